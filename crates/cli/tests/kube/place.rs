//! A namespace of a real cluster for one test, a home for its jobs here, and the binary to try.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

#[path = "../cli/world.rs"]
#[expect(dead_code, reason = "shared with the tests of local jobs, which use all of it")]
mod world;

pub use world::{Running, Said};
use world::{World, said, wait_for};

/// Where a test takes place. Its namespace goes when it is dropped.
pub struct Place {
    world: World,
    /// The namespace.
    pub namespace: String,
    kubeconfig: PathBuf,
}

impl Place {
    /// A fresh namespace; `None` says aloud that the test is skipped.
    pub fn find(name: &str) -> Option<Place> {
        let Some(kubeconfig) = std::env::var_os("ELASTICDL_TEST_KUBECONFIG") else {
            eprintln!("skipped: ELASTICDL_TEST_KUBECONFIG names no cluster; `cargo xtask test` starts one");
            return None;
        };
        let namespace = format!("test-{name}-{}", std::process::id());
        let place = Place { world: World::new(), namespace, kubeconfig: kubeconfig.into() };
        place.kubectl(&["create", "namespace", &place.namespace]).ok();
        // Pods cannot be made before the namespace has its account.
        wait_for("the namespace's account", || {
            (place.kubectl(&["get", "serviceaccount", "default"]).code == Some(0)).then_some(())
        });
        Some(place)
    }

    /// Writes a job file: a small model on synthetic data that is made on the volume.
    pub fn job(&self, name: &str, epochs: u32, workers: Value) -> String {
        let mut kubernetes = self.kubernetes();
        kubernetes["namespace"] = json!(self.namespace);
        let job = json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name },
            "spec": {
                "model": { "zoo": "deepfm", "embedding_dim": 4, "hidden": [16] },
                "data": { "train": "data/train-*.tsv", "validate": "data/test-*.tsv", "layout": "criteo", "synth_rows": 100_000 },
                "train": { "epochs": epochs, "batch": 128, "optimizer": "adagrad", "learning_rate": 0.1 },
                "workers": workers,
                "servers": { "count": 2, "cpu": "100m", "memory": "256Mi" },
                "master": { "cpu": "100m", "memory": "128Mi" },
                "checkpoint": { "every": "5s" },
                "limits": { "lease": "3s", "silence": "6s", "orphan": "60s" },
                "kubernetes": kubernetes,
            },
        });
        let file = format!("{name}.yaml");
        self.world.write(&file, &job.to_string());
        file
    }

    /// Writes a file to where commands are run.
    pub fn write(&self, name: &str, text: &str) {
        self.world.write(name, text);
    }

    /// A path where commands are run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.world.path(name)
    }

    /// What a job says of the cluster.
    pub fn kubernetes(&self) -> Value {
        let mut kubernetes = json!({ "volumes": [self.volume()], "grace": "10s" });
        if let Ok(image) = std::env::var("ELASTICDL_TEST_IMAGE") {
            kubernetes["image"] = json!(image);
        }
        kubernetes
    }

    /// The shared volume, with a directory of its own for this test.
    fn volume(&self) -> Value {
        let text = std::env::var("ELASTICDL_TEST_VOLUME")
            .expect("ELASTICDL_TEST_VOLUME says which volume pods share");
        let mut volume: Value = serde_json::from_str(&text).unwrap();
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            let own = PathBuf::from(path).join(&self.namespace);
            std::fs::create_dir_all(&own).unwrap();
            std::fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
            volume["hostPath"]["path"] = json!(own);
        }
        volume["mountPath"] = json!("/shared");
        volume
    }

    /// Trains on the cluster and follows the events.
    pub fn train(&self, job: &str) -> Running {
        self.train_with(job, &[])
    }

    /// The same with more arguments.
    pub fn train_with(&self, job: &str, more: &[&str]) -> Running {
        let mut command = self.command(&[&["train", job, "--on", "kubernetes", "--json"], more].concat());
        Running::following(command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap())
    }

    /// Runs the binary to its end.
    pub fn elasticdl(&self, args: &[&str]) -> Said {
        said(&mut self.command(args))
    }

    /// The binary, pointed at the cluster.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.world.command(args);
        command.env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs kubectl in the namespace.
    pub fn kubectl(&self, args: &[&str]) -> Said {
        said(&mut self.kubectl_command(args))
    }

    fn kubectl_command(&self, args: &[&str]) -> Command {
        let program = std::env::var_os("ELASTICDL_TEST_KUBECTL").unwrap_or_else(|| "kubectl".into());
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", &self.namespace]).args(args);
        command
    }

    /// Makes an object.
    pub fn apply(&self, object: &Value) {
        self.try_apply(object).ok();
    }

    /// Tries to make an object.
    pub fn try_apply(&self, object: &Value) -> Said {
        self.apply_text(&object.to_string())
    }

    /// Tries to make the objects of a manifest.
    pub fn apply_text(&self, manifest: &str) -> Said {
        self.world.write("manifest.yaml", manifest);
        let file = self.world.path("manifest.yaml").display().to_string();
        self.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", &file])
    }

    /// The name of a running pod of a role.
    pub fn pod(&self, job: &str, role: &str) -> String {
        let selector = format!("elasticdl.org/job={job},elasticdl.org/role={role}");
        let running = "jsonpath={.items[?(@.status.phase=='Running')].metadata.name}";
        wait_for("a running pod", || {
            let names = self.kubectl(&["get", "pods", "-l", &selector, "-o", running]).ok();
            names.split_whitespace().next().map(str::to_string)
        })
    }

    /// Waits until something is seen.
    pub fn until<T>(&self, what: &str, seen: impl FnMut() -> Option<T>) -> T {
        wait_for(what, seen)
    }

    /// Ends a pod without a warning.
    pub fn kill(&self, pod: &str) {
        self.kubectl(&["delete", "pod", pod, "--grace-period=0", "--force"]).ok();
    }

    /// The nodes that run containers.
    pub fn nodes(&self) -> Vec<String> {
        let names = self
            .kubectl(&["get", "nodes", "-l", "type!=kwok", "-o", "jsonpath={.items[*].metadata.name}"])
            .ok();
        names.split_whitespace().map(str::to_string).collect()
    }

    /// Thousandths of a processor that a node offers.
    pub fn processors(&self, node: &str) -> u64 {
        let text = self.kubectl(&["get", "node", node, "-o", "jsonpath={.status.allocatable.cpu}"]).ok();
        match text.trim().strip_suffix('m') {
            Some(thousandths) => thousandths.parse().unwrap(),
            None => text.trim().parse::<u64>().unwrap() * 1000,
        }
    }

    /// An image with `sleep` in it.
    pub fn busybox(&self) -> String {
        std::env::var("ELASTICDL_TEST_BUSYBOX").unwrap_or_else(|_| "busybox:1".into())
    }

    /// Whether nodes can be powered off and on.
    pub fn can_power_nodes(&self) -> bool {
        let can = std::env::var_os("ELASTICDL_TEST_POWER").is_some();
        if !can {
            eprintln!("skipped: powering a node off; ELASTICDL_TEST_POWER names no program that does it");
        }
        can
    }

    /// Powers a node off or on.
    pub fn power(&self, node: &str, how: &str) {
        let program = std::env::var_os("ELASTICDL_TEST_POWER").unwrap();
        said(Command::new(program).args(["kube", "node", how, node.trim_start_matches('n')])).ok();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for what in [&["get", "pods,elasticjobs", "-o", "wide"][..], &["get", "events"]] {
                eprintln!("{}", self.kubectl(what).stdout);
            }
        }
        self.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"]);
    }
}
