//! The operator on a real cluster: a job file is applied with kubectl, scaled, suspended and removed with kubectl,
//! and rides through the deaths of its master and of an operator.
//!
//! `cargo xtask test` starts a cluster and names it in `ELASTICDL_TEST_KUBECONFIG`. Set that yourself to use another
//! one: then `ELASTICDL_TEST_VOLUME` is a volume that all nodes share and everybody may write to (as JSON), and
//! `ELASTICDL_TEST_IMAGE` an image with this version. Addresses of pods must be reachable from here.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests may panic, and this one waits for other processes with a deadline"
)]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Nothing of what is waited for here takes longer, on a slow machine.
const DEADLINE: Duration = Duration::from_secs(120);
/// Long enough for everything that is done to the job while it trains.
const EPOCHS: u32 = 25;
const ROWS: u64 = EPOCHS as u64 * 100_000;
const LOOK: Duration = Duration::from_millis(200);

#[test]
fn jobs_are_resources() {
    let Some(place) = Place::find() else { return };
    let first = place.operator();
    place.until("the first operator to lead", || (place.holder() != "").then_some(()));
    let leader = place.holder();
    let second = place.operator();

    a_typo_is_told_with_the_nearest_key(&place);
    a_job_is_followed_scaled_and_started_again(&place);
    drop(first);
    a_job_is_suspended_and_goes_on(&place);
    assert_ne!(place.holder(), leader, "the second operator leads now");
    a_job_that_is_over_is_removed(&place);
    a_deadline_fails_a_job(&place);
    drop(second);
}

fn a_typo_is_told_with_the_nearest_key(place: &Place) {
    let mut typo = place.job("typo", 1);
    typo["spec"]["train"]["lerning_rate"] = json!(0.1);
    place.apply(&typo);
    let valid = place.condition("typo", "Valid", "False");
    assert_eq!(valid["message"], "spec.train.lerning_rate: unknown key; did you mean learning_rate?");
    assert_eq!(place.status("typo")["phase"], "Pending");
    place.kubectl(&["delete", "elasticjob", "typo", "--timeout=60s"]).ok();
}

fn a_job_is_followed_scaled_and_started_again(place: &Place) {
    place.apply(&place.job("ctr", EPOCHS));
    place.phase("ctr", "Training");
    let mut job = place.job("ctr", EPOCHS + 1);
    let refused = place.try_apply(&job);
    assert!(refused.stderr.contains("train cannot change while the job is there"), "{}", refused.stderr);
    job = place.job("ctr", EPOCHS);
    job["spec"]["workers"]["min"] = json!(5);
    let refused = place.try_apply(&job);
    assert!(refused.stderr.contains("workers.min is more than workers.max"), "{}", refused.stderr);

    place.kubectl(&["scale", "elasticjob", "ctr", "--replicas=2"]).ok();
    place.until("two workers", || (place.status("ctr")["workers"] == 2).then_some(()));
    let masters = "elasticdl.org/job=ctr,elasticdl.org/role=master";
    place.kubectl(&["delete", "pod", "-l", masters, "--grace-period=0", "--force"]).ok();
    place.until("another master", || {
        let status = place.status("ctr");
        (status["restarts"] == 1 || place.pods(masters).contains("ctr-master")).then_some(())
    });
    place.condition("ctr", "Running", "True");
    place.until("two workers again", || (place.status("ctr")["workers"] == 2).then_some(()));
}

fn a_job_is_suspended_and_goes_on(place: &Place) {
    place.kubectl(&["patch", "elasticjob", "ctr", "--type=merge", "-p", r#"{"spec":{"suspend":true}}"#]).ok();
    place.condition("ctr", "Suspended", "True");
    let records = place.status("ctr")["records"].as_u64().unwrap();
    assert!(records > 0 && records < ROWS, "{records}");
    assert_eq!(place.pods("elasticdl.org/job=ctr").trim(), "", "nothing of it runs");
    place
        .kubectl(&["patch", "elasticjob", "ctr", "--type=merge", "-p", r#"{"spec":{"suspend":false}}"#])
        .ok();
    place.kubectl(&["wait", "--for=condition=Complete", "elasticjob/ctr", "--timeout=300s"]).ok();
    let status = place.status("ctr");
    assert_eq!((&status["phase"], &status["records"]), (&json!("Done"), &json!(ROWS)), "each once: {status}");
    assert!(status["auc"].as_str().unwrap().parse::<f64>().unwrap() > 0.6, "{status}");
    let table = place.kubectl(&["get", "elasticjobs"]).ok();
    let head: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["NAME", "PHASE", "PROGRESS", "WORKERS", "AUC", "AGE"]);
    assert!(table.contains("Done") && table.contains("100 %"), "{table}");
    let told = place.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]).ok();
    for reason in ["Invalid", "Started", "Scaled", "Suspended", "Resumed", "Done"] {
        assert!(told.split(' ').any(|word| word == reason), "{reason} in the events: {told}");
    }
}

fn a_job_that_is_over_is_removed(place: &Place) {
    place.kubectl(&["patch", "elasticjob", "ctr", "--type=merge", "-p", r#"{"spec":{"ttl":"1s"}}"#]).ok();
    place.kubectl(&["wait", "--for=delete", "elasticjob/ctr", "--timeout=60s"]).ok();
    place.until("everything of it to go", || {
        let left = place.kubectl(&["get", "pods,secrets,services,roles", "-o", "name"]).ok();
        (!left.contains("ctr")).then_some(())
    });
}

fn a_deadline_fails_a_job(place: &Place) {
    let mut job = place.job("late", 100);
    job["spec"]["deadline"] = json!("8s");
    place.apply(&job);
    let failed = place.condition("late", "Failed", "True");
    assert_eq!(failed["reason"], "DeadlineExceeded", "{failed}");
    assert_eq!(place.pods("elasticdl.org/job=late").trim(), "");
}

/// A namespace of its own, which goes when this is dropped.
struct Place {
    namespace: String,
    kubeconfig: PathBuf,
    files: PathBuf,
}

/// What a program said.
struct Said {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Said {
    fn of(output: Output) -> Said {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Said { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self.stdout
    }
}

/// An operator, killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Place {
    /// A fresh namespace of a cluster that knows the resource; `None` says aloud that the test is skipped.
    fn find() -> Option<Place> {
        let Some(kubeconfig) = std::env::var_os("ELASTICDL_TEST_KUBECONFIG") else {
            eprintln!("skipped: ELASTICDL_TEST_KUBECONFIG names no cluster; `cargo xtask test` starts one");
            return None;
        };
        let namespace = format!("op-test-{}", std::process::id());
        let files = std::env::temp_dir().join(&namespace);
        fs::create_dir_all(&files).unwrap();
        let place = Place { namespace, kubeconfig: kubeconfig.into(), files };
        place.kubectl(&["create", "namespace", &place.namespace]).ok();
        let definition =
            Command::new(env!("CARGO_BIN_EXE_elasticdl")).args(["operator", "crd", "--crd-only"]).output();
        let file = place.write("crd.yaml", &Said::of(definition.unwrap()).ok());
        place.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", &file]).ok();
        let crd = "crd/elasticjobs.elasticdl.org";
        place.kubectl(&["wait", "--for=condition=Established", crd, "--timeout=60s"]).ok();
        place.until("the namespace's account", || {
            (place.kubectl(&["get", "serviceaccount", "default"]).code == Some(0)).then_some(())
        });
        Some(place)
    }

    fn operator(&self) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elasticdl"));
        command.args(["operator", "--namespace", &self.namespace]);
        command.args(["--leader-elect", "--lease-namespace", &self.namespace]);
        Running(command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null()).spawn().unwrap())
    }

    /// Who leads.
    fn holder(&self) -> String {
        self.kubectl(&["get", "lease", "elasticdl-operator", "-o", "jsonpath={.spec.holderIdentity}"]).stdout
    }

    fn job(&self, name: &str, epochs: u32) -> Value {
        let mut kubernetes = json!({ "volumes": [self.volume()], "grace": "5s" });
        if let Ok(image) = std::env::var("ELASTICDL_TEST_IMAGE") {
            kubernetes["image"] = json!(image);
        }
        json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name },
            "spec": {
                "model": { "zoo": "deepfm", "embedding_dim": 4, "hidden": [16] },
                "data": {
                    "train": "data/train-*.tsv", "validate": "data/test-*.tsv", "layout": "criteo",
                    "synth_rows": 100_000, "batches_per_task": 8,
                },
                "train": { "epochs": epochs, "batch": 128, "learning_rate": 0.1 },
                // Slow on purpose: there is much to be done while it trains.
                "workers": { "count": 1, "max": 2, "cpu": "100m", "cpu_limit": "100m", "memory": "256Mi" },
                "servers": { "count": 1, "cpu": "100m", "memory": "256Mi" },
                "master": { "cpu": "100m", "memory": "128Mi" },
                "checkpoint": { "every": "5s" },
                "limits": { "orphan": "60s" },
                "kubernetes": kubernetes,
            },
        })
    }

    /// The shared volume, with a directory of its own for this test.
    fn volume(&self) -> Value {
        let text = std::env::var("ELASTICDL_TEST_VOLUME")
            .expect("ELASTICDL_TEST_VOLUME says which volume pods share");
        let mut volume: Value = serde_json::from_str(&text).unwrap();
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            let own = PathBuf::from(path).join(&self.namespace);
            fs::create_dir_all(&own).unwrap();
            fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
            volume["hostPath"]["path"] = json!(own);
        }
        volume["mountPath"] = json!("/shared");
        volume
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.files.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn apply(&self, object: &Value) {
        self.try_apply(object).ok();
    }

    fn try_apply(&self, object: &Value) -> Said {
        let file = self.write("object.json", &object.to_string());
        self.kubectl(&["apply", "-f", &file])
    }

    fn kubectl(&self, args: &[&str]) -> Said {
        let program = std::env::var_os("ELASTICDL_TEST_KUBECTL").unwrap_or_else(|| "kubectl".into());
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(["--namespace", &self.namespace]).args(args);
        Said::of(command.output().expect("kubectl is there"))
    }

    fn status(&self, job: &str) -> Value {
        let said = self.kubectl(&["get", "elasticjob", job, "-o", "jsonpath={.status}"]);
        serde_json::from_str(&said.stdout).unwrap_or_default()
    }

    fn pods(&self, selector: &str) -> String {
        self.kubectl(&["get", "pods", "-l", selector, "-o", "name"]).ok()
    }

    fn phase(&self, job: &str, phase: &str) {
        self.until(&format!("{job} to be {phase}"), || (self.status(job)["phase"] == phase).then_some(()));
    }

    /// Waits until a condition is `True` or `False`.
    fn condition(&self, job: &str, type_: &str, status: &str) -> Value {
        self.until(&format!("{type_}={status} of {job}"), || {
            let known = self.status(job);
            let mut conditions = known["conditions"].as_array()?.iter();
            conditions.find(|c| c["type"] == type_ && c["status"] == status).cloned()
        })
    }

    fn until<T>(&self, what: &str, mut seen: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(seen) = seen() {
                return seen;
            }
            if began.elapsed() > DEADLINE {
                let all = self.kubectl(&["get", "elasticjobs,pods,events", "-o", "wide"]).stdout;
                panic!("waited in vain for {what}\n{all}");
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // No operator may be left to take a finalizer off, so the jobs let go themselves.
        let jobs = self.kubectl(&["get", "elasticjobs", "-o", "name"]).stdout;
        for job in jobs.split_whitespace() {
            self.kubectl(&["patch", job, "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#]);
        }
        self.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"]);
        let _ = fs::remove_dir_all(&self.files);
    }
}
