//! `cargo xtask kube check`: does a cluster do what tests will ask of it? Each step has a deadline.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::cgroup::Cgroup;
use super::cluster::Cluster;
use super::image::BUSYBOX;
use super::kubectl::Kubectl;
use super::state::State;
use super::{Shape, network, wait};

/// How long a pod may take to do its little work.
const POD: Duration = Duration::from_secs(60);
/// How long a lost node may go unnoticed, or its pods unreplaced.
const LOSS: Duration = Duration::from_secs(45);

/// Brings a cluster up, tries it, and takes it down. One that was up before stays up.
pub fn check() -> Result<()> {
    let mut figures = Figures::default();
    let found = State::read(&super::places::Places::find()?)?.is_some_and(|state| state.serves());
    let cluster =
        figures.time("up", || if found { Cluster::running() } else { Cluster::up(shape()?, &[]) })?;
    let places = cluster.places.clone();
    ensure!(cluster.state.shape.nodes >= 2, "this needs 2 real nodes, and the cluster that is up has fewer");
    ensure!(
        cluster.state.shape.simulated >= 5,
        "this needs 5 simulated nodes, and the cluster that is up has fewer"
    );

    let mut trial = Trial::begin(cluster)?;
    trial.pods_run_to_their_end(&mut figures)?;
    trial.a_file_is_shared(&mut figures)?;
    trial.a_service_answers(&mut figures)?;
    trial.simulated_pods_run(&mut figures)?;
    trial.a_simulated_pod_fails(&mut figures)?;
    trial.importance_makes_room(&mut figures)?;
    trial.a_node_is_lost_and_comes_back(&mut figures)?;
    let cluster = trial.end()?;
    if !found {
        figures.time("down", || cluster.into_down())?;
        nothing_is_left(&places.run())?;
    }
    figures.print();
    Ok(())
}

fn shape() -> Result<Shape> {
    Ok(Shape {
        nodes: 2,
        node_cpu: None,
        node_memory: None,
        simulated: 5,
        simulated_cpu: "32".parse()?,
        simulated_memory: "128Gi".parse()?,
    })
}

fn nothing_is_left(run: &Path) -> Result<()> {
    ensure!(!Cgroup::cluster().exists()?, "down left control groups");
    ensure!(!network::exists(), "down left namespaces or cables");
    ensure!(!run.exists(), "down left {}", run.display());
    Ok(())
}

/// How long what took.
#[derive(Default)]
struct Figures(Vec<(String, Duration)>);

impl Figures {
    fn time<T>(&mut self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let result = work().with_context(|| format!("check failed: {what}"))?;
        self.0.push((what.to_owned(), began.elapsed()));
        eprintln!("ok: {what}, {:.1} s", began.elapsed().as_secs_f64());
        Ok(result)
    }

    fn print(&self) {
        for (what, took) in &self.0 {
            println!("{:>6.1} s  {what}", took.as_secs_f64());
        }
    }
}

/// A cluster under trial, in a Kubernetes namespace that goes afterwards.
struct Trial {
    cluster: Cluster,
    kubectl: Kubectl,
    namespace: String,
}

impl Trial {
    fn begin(cluster: Cluster) -> Result<Trial> {
        let namespace = format!("check-{}", std::process::id());
        let trial = Trial { kubectl: cluster.kubectl(), cluster, namespace };
        trial.kubectl.text(&["create", "namespace", &trial.namespace])?;
        trial.wait("create", &["serviceaccount/default"], POD)?;
        Ok(trial)
    }

    fn end(self) -> Result<Cluster> {
        // Nothing is asked of it any more, so nobody waits for its end.
        self.kubectl.text(&["delete", "namespace", &self.namespace, "--wait=false"])?;
        self.kubectl.text(&["delete", "priorityclass", &self.namespace])?;
        Ok(self.cluster)
    }

    fn pods_run_to_their_end(&self, figures: &mut Figures) -> Result<()> {
        for node in ["n1", "n2"] {
            figures.time(&format!("a pod on {node} ran to its end and its log was read"), || {
                let said = self.say(&format!("hello-{node}"), node, "echo hello from $NODE")?;
                ensure!(said == format!("hello from {node}\n"), "the pod on {node} said {said:?}");
                Ok(())
            })?;
        }
        Ok(())
    }

    fn a_file_is_shared(&self, figures: &mut Figures) -> Result<()> {
        let shared = self.cluster.places.shared();
        let (file, text) = (shared.join(&self.namespace), "written on n1\n");
        figures.time("a file written on n1 was read on n2 and on the machine", || {
            let path = file.display();
            self.say("writer", "n1", &format!("echo written on $NODE > {path}"))?;
            let read = self.say("reader", "n2", &format!("cat {path}"))?;
            let here = fs::read_to_string(&file).with_context(|| format!("read {path}"))?;
            ensure!(read == text && here == text, "n2 read {read:?}, the machine {here:?}");
            fs::remove_file(&file).with_context(|| format!("remove {path}"))
        })
    }

    fn a_service_answers(&self, figures: &mut Figures) -> Result<()> {
        let script =
            "mkdir /tmp/www && echo served > /tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www";
        let mut pod = self.pod("web", "n1", script);
        pod["metadata"]["labels"] = json!({ "app": "web" });
        pod["spec"]["containers"][0]["readinessProbe"] =
            json!({ "tcpSocket": { "port": 8080 }, "periodSeconds": 1 });
        let service = json!({ "selector": { "app": "web" }, "ports": [{ "port": 80, "targetPort": 8080 }] });
        figures.time("a web server on n1 was ready", || {
            self.kubectl.create(&self.object("v1", "Service", "web", service))?;
            self.kubectl.create(&pod)?;
            self.wait("condition=Ready", &["pod/web"], POD)
        })?;
        let service = self.json(&["get", "service", "web"])?;
        let ip = service["spec"]["clusterIP"].as_str().context("the Service has an address")?;
        // Proxies learn of a Service a moment after it was made.
        let ask = format!("until timeout 2 wget -q -O - http://{ip}/; do :; done");
        for node in ["n1", "n2"] {
            figures.time(&format!("a Service on n1 answered a pod on {node}"), || {
                let said = self.say(&format!("asks-from-{node}"), node, &ask)?;
                ensure!(said == "served\n", "the pod on {node} read {said:?}");
                Ok(())
            })?;
        }
        figures.time("it answered the machine", || {
            wait::until("the Service to answer", POD, || Ok(fetch(ip, 80).ok())).and_then(|answer| {
                ensure!(answer.ends_with("\r\n\r\nserved\n"), "the machine read {answer:?}");
                Ok(())
            })
        })
    }

    fn simulated_pods_run(&self, figures: &mut Figures) -> Result<()> {
        let labels = json!({ "app": "many" });
        let template = json!({ "metadata": { "labels": labels }, "spec": simulated_pod("100m") });
        let spec = json!({ "replicas": 20, "selector": { "matchLabels": labels }, "template": template });
        figures.time("20 pods ran on simulated nodes", || {
            self.kubectl.create(&self.object("apps/v1", "Deployment", "many", spec))?;
            self.wait("jsonpath={.status.readyReplicas}=20", &["deployment/many"], POD)
        })?;
        let pods = self.json(&["get", "pods", "--selector=app=many"])?;
        let nodes = pods["items"].as_array().into_iter().flatten().map(|pod| &pod["spec"]["nodeName"]);
        let elsewhere =
            nodes.filter(|node| !node.as_str().is_some_and(|name| name.starts_with("sim-"))).count();
        ensure!(elsewhere == 0, "{elsewhere} pods for simulated nodes run elsewhere");
        Ok(())
    }

    fn a_simulated_pod_fails(&self, figures: &mut Figures) -> Result<()> {
        let mut pod = self.object("v1", "Pod", "fails", simulated_pod("100m"));
        pod["metadata"]["annotations"] = json!({
            "simulate.elasticdl.org/exit-after": "100ms",
            "simulate.elasticdl.org/exit-code": "7",
        });
        figures.time("a simulated pod failed as it was told to", || {
            self.kubectl.create(&pod)?;
            self.wait("jsonpath={.status.phase}=Failed", &["pod/fails"], POD)?;
            let pod = self.json(&["get", "pod", "fails"])?;
            let code = &pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"];
            ensure!(*code == 7, "its exit code is {code}");
            Ok(())
        })
    }

    /// Two pods want most of one node: the more important one gets it.
    fn importance_makes_room(&self, figures: &mut Figures) -> Result<()> {
        let mut class =
            json!({ "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000 });
        class["metadata"] = json!({ "name": self.namespace });
        self.kubectl.create(&class)?;
        let pod = |name: &str| {
            let mut pod = self.object("v1", "Pod", name, simulated_pod("20"));
            pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!("sim-1");
            pod
        };
        self.kubectl.create(&pod("modest"))?;
        self.wait("condition=Ready", &["pod/modest"], POD)?;
        figures.time("a more important pod took the room of another", || {
            let mut important = pod("important");
            important["spec"]["priorityClassName"] = json!(self.namespace);
            self.kubectl.create(&important)?;
            self.wait("condition=Ready", &["pod/important"], POD)?;
            self.wait("delete", &["pod/modest"], POD)
        })
    }

    fn a_node_is_lost_and_comes_back(&mut self, figures: &mut Figures) -> Result<()> {
        self.kubectl.create(&self.mover())?;
        self.wait("jsonpath={.status.readyReplicas}=1", &["deployment/mover"], POD)?;
        ensure!(self.mover_runs_on("n2")?, "the pod that prefers n2 runs elsewhere");
        figures.time("n2 was powered off", || self.cluster.power_off("n2"))?;
        figures.time("its loss was noticed", || {
            self.kubectl.wait("condition=Ready=Unknown", &["node/n2"], LOSS)
        })?;
        figures.time("its pod was replaced on n1", || {
            wait::until("a pod in its place", LOSS, || Ok(self.mover_runs_on("n1")?.then_some(())))
        })?;
        figures.time("n2 was powered on and ready", || self.cluster.power_on("n2"))?;
        figures.time("a pod on n2 ran to its end again", || {
            let said = self.say("again", "n2", "echo again on $NODE")?;
            ensure!(said == "again on n2\n", "the pod said {said:?}");
            Ok(())
        })
    }

    /// One pod, on n2 where it can be.
    fn mover(&self) -> Value {
        let labels = json!({ "app": "mover" });
        let mut spec = self.pod("mover", "", "exec sleep 3600")["spec"].take();
        let wish = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["n2"] });
        spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] =
            json!([{ "weight": 100, "preference": { "matchExpressions": [wish] } }]);
        spec["restartPolicy"] = json!("Always");
        spec["nodeSelector"] = json!({});
        let template = json!({ "metadata": { "labels": labels }, "spec": spec });
        let spec = json!({ "replicas": 1, "selector": { "matchLabels": labels }, "template": template });
        self.object("apps/v1", "Deployment", "mover", spec)
    }

    fn mover_runs_on(&self, node: &str) -> Result<bool> {
        let field = format!("--field-selector=spec.nodeName={node},status.phase=Running");
        let pods = self.json(&["get", "pods", "--selector=app=mover", &field])?;
        Ok(pods["items"].as_array().is_some_and(|pods| !pods.is_empty()))
    }

    /// Runs a shell line on a node to its end and returns what it said.
    fn say(&self, name: &str, node: &str, script: &str) -> Result<String> {
        self.kubectl.create(&self.pod(name, node, script))?;
        self.wait("jsonpath={.status.phase}=Succeeded", &[&format!("pod/{name}")], POD)?;
        self.kubectl.text(&["logs", name, "--namespace", &self.namespace])
    }

    fn pod(&self, name: &str, node: &str, script: &str) -> Value {
        let shared = self.cluster.places.shared();
        let container = json!({
            "name": "main",
            "image": BUSYBOX,
            "command": ["sh", "-c", script],
            "env": [{ "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }],
            "volumeMounts": [{ "name": "shared", "mountPath": shared }],
        });
        let spec = json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": { "kubernetes.io/hostname": node },
            "containers": [container],
            "volumes": [{ "name": "shared", "hostPath": { "path": shared, "type": "Directory" } }],
        });
        self.object("v1", "Pod", name, spec)
    }

    fn object(&self, version: &str, kind: &str, name: &str, spec: Value) -> Value {
        let metadata = json!({ "name": name, "namespace": self.namespace });
        json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec })
    }

    fn json(&self, arguments: &[&str]) -> Result<Value> {
        self.kubectl.json(&[arguments, &["--namespace", &self.namespace]].concat())
    }

    fn wait(&self, until: &str, what: &[&str], limit: Duration) -> Result<()> {
        self.kubectl.wait(until, &[what, &["--namespace", &self.namespace]].concat(), limit)
    }
}

/// A pod that goes to simulated nodes only.
fn simulated_pod(cpu: &str) -> Value {
    json!({
        "nodeSelector": { "type": "kwok" },
        "tolerations": [{ "key": "kwok.x-k8s.io/node", "operator": "Exists" }],
        "containers": [{
            "name": "main",
            "image": "nothing.local/nothing:1",
            "resources": { "requests": { "cpu": cpu, "memory": "64Mi" } },
        }],
    })
}

/// A whole HTTP answer.
fn fetch(ip: &str, port: u16) -> Result<String> {
    let address = format!("{ip}:{port}").parse().context("read an address")?;
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
