//! Jobs on a real Kubernetes cluster: pods are killed, preempted, starved of memory and lost with their node, the
//! master among them, and every record counts once. [`operator`]: the same job as a resource. [`command`]:
//! programs of one's own. [`objects`]: a job in object storage. [`servers`]: more and fewer servers, and their backups.
//!
//! `cargo xtask test` starts a cluster for these tests and names it in `ELASTICDL_TEST_KUBECONFIG`. Set that
//! yourself to use another one: then `ELASTICDL_TEST_VOLUME` is a volume that all nodes share and everybody may
//! write to (as JSON), `ELASTICDL_TEST_IMAGE` an image with this version, and `ELASTICDL_TEST_S3` a bucket that pods can
//! reach with the settings of the environment.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests may panic, and these wait for other processes with a deadline"
)]

mod command;
mod objects;
mod operator;
mod place;
mod servers;

use place::Place;
use serde_json::{Value, json};

/// Takes every kind of harm that a cluster can do, one after the other.
#[test]
fn a_job_on_a_cluster_rides_through_everything() {
    let Some(place) = Place::find("ride") else { return };
    let job = place.job("ride", 120, json!({ "count": 2, "max": 2, "cpu": "400m", "memory": "256Mi" }));
    let mut running = place.train(&job);
    running.until_training();

    let name = place.pod("ride", "worker");
    place.kill(&name);
    let exited =
        running.until("the end of a worker", |e| e["event"] == "worker_exited" && e["asked"] == false);
    assert_eq!(exited["why"], "deleted", "{exited}");
    running.until("its replacement", |e| e["event"] == "worker_joined");

    place.kill(&place.pod("ride", "server"));
    running.until("the end of a server", |e| e["event"] == "server_exited");
    running.until("the server again", |e| e["event"] == "server_ready");

    place.kubectl(&["delete", "pod", "ride-master", "--wait=false"]).ok();
    let next = running.until("the next master", |e| e["event"] == "started");
    assert_eq!(next["term"], 2, "{next}");
    assert!(next["adopted"].as_u64() >= Some(3), "it takes over what runs: {next}");
    running.until_training();

    preempted(&place, &mut running);
    if place.can_power_nodes() {
        node_lost(&place, &mut running);
        master_cut_off(&place, &mut running);
    }

    let (finished, code) = running.end();
    assert_eq!((code, &finished["outcome"]), (Some(0), &json!("done")), "{finished}");
    let audit: Value = serde_json::from_str(&place.elasticdl(&["audit", "ride", "--json"]).ok()).unwrap();
    assert_eq!((&audit["exact"], &audit["lost"], &audit["doubled"]), (&json!(true), &json!(0), &json!(0)));

    let told = place.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]).ok();
    for reason in ["Started", "Training", "WorkerExited", "ServerExited", "Pending", "Replay", "Finished"] {
        assert!(told.split(' ').any(|word| word == reason), "{reason} in the events: {told}");
    }
    let left = "jsonpath={.items[?(@.metadata.labels.elasticdl\\.org/role!='master')].metadata.name}";
    place.until("the job's pods to go", || {
        place.kubectl(&["get", "pods", "-o", left]).ok().trim().is_empty().then_some(())
    });
}

/// Something more important takes the room, and gives it back.
fn preempted(place: &Place, running: &mut place::Running) {
    place.apply(&json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": "elasticdl-test-online" }, "value": 1000, "description": "An online service in a test."
    }));
    // So large that no worker has room beside it, and master and servers have.
    let service = |name: &str, node: &str| {
        let cpu = format!("{}m", place.processors(node) - 350);
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "labels": { "app": "online" } },
            "spec": {
                "priorityClassName": "elasticdl-test-online", "terminationGracePeriodSeconds": 0,
                "nodeSelector": { "kubernetes.io/hostname": node },
                "containers": [{ "name": "c", "image": place.busybox(), "command": ["sleep", "600"],
                    "resources": { "requests": { "cpu": cpu } } }],
            },
        })
    };
    for (n, node) in place.nodes().iter().enumerate() {
        place.apply(&service(&format!("online-{n}"), node));
    }
    let exited = running.until("preemption", |e| e["event"] == "worker_exited" && e["why"] == "preempted");
    let pending = running.until("a worker without room", |e| e["event"] == "pending");
    let why = pending["why"].as_str().unwrap();
    assert!(why.contains("Insufficient cpu"), "in the scheduler's own words: {exited} {pending}");
    place.kubectl(&["delete", "pod", "-l", "app=online", "--grace-period=0", "--force"]).ok();
    running.until("a worker that has room again", |e| e["event"] == "worker_joined");
}

/// A node goes without a word; who was there is replaced elsewhere before the cluster has noticed.
fn node_lost(place: &Place, running: &mut place::Running) {
    let master = place
        .kubectl(&[
            "get",
            "pods",
            "-l",
            "elasticdl.org/role=master",
            "-o",
            "jsonpath={.items[?(@.status.phase=='Running')].spec.nodeName}",
        ])
        .ok();
    let node = place.nodes().into_iter().find(|node| *node != master.trim()).unwrap();
    let on_it = place
        .kubectl(&[
            "get",
            "pods",
            "-l",
            "elasticdl.org/role in (worker,server)",
            "--field-selector",
            &format!("spec.nodeName={node}"),
            "-o",
            "name",
        ])
        .ok();
    place.power(&node, "off");
    if !on_it.trim().is_empty() {
        running.until("the loss to be noticed", |e| {
            e["event"] == "silent" || (e["why"].as_str().is_some_and(|why| why.contains("node")))
        });
    }
    running.until_training();
    place.power(&node, "on");
}

/// Goal: the master's node is cut off, and so its pod hangs in Terminating while its process goes on, with the ledger's
/// volume at hand. The next one leads from the other node, and the old one changes nothing any more.
fn master_cut_off(place: &Place, running: &mut place::Running) {
    let master = |field: &str| {
        let running = format!("jsonpath={{.items[?(@.status.phase=='Running')].{field}}}");
        place
            .kubectl(&["get", "pods", "-l", "elasticdl.org/role=master", "-o", &running])
            .ok()
            .trim()
            .to_string()
    };
    let (old, node) = (master("metadata.name"), master("spec.nodeName"));
    assert_eq!(old.split(' ').count(), 1, "one master leads: {old}");
    place.power(&node, "cut");
    running.until("the next master", |e| e["event"] == "started");
    let status =
        |what: &str| place.kubectl(&["get", "pod", &old, "-o", &format!("jsonpath={{{what}}}")]).ok();
    assert_ne!(status(".metadata.deletionTimestamp"), "", "it hangs in Terminating");
    assert_eq!(status(".status.phase"), "Running");
    running.until_training();
    running.until("records under the next master", |e| e["event"] == "progress");
    place.power(&node, "mend");
    place.until("the old one to go", || {
        let there = place.kubectl(&["get", "pod", &old, "--ignore-not-found", "-o", "name"]).ok();
        there.trim().is_empty().then_some(())
    });
}

/// A worker that needs more memory than it was given gets more.
#[test]
fn a_worker_killed_for_its_memory_gets_more() {
    let Some(place) = Place::find("memory") else { return };
    let workers = json!({ "count": 1, "max": 1, "cpu": "100m", "memory": "12Mi", "memory_max": "512Mi" });
    let job = place.job("memory", 1, workers);
    let mut running = place.train(&job);
    let exited = running.until("the end for lack of memory", |e| e["event"] == "worker_exited");
    let why = exited["why"].as_str().unwrap_or_default();
    assert!(why.starts_with("killed for its memory; the next one asks for"), "{exited}");
    let (finished, code) = running.end();
    assert_eq!((code, &finished["outcome"]), (Some(0), &json!("done")), "{finished}");
}

/// What is wrong with a job on a cluster is told as it is anywhere else, and before anything runs for long.
#[test]
fn what_cannot_run_on_a_cluster_says_why() {
    let Some(place) = Place::find("wrong") else { return };
    let job = place.job("wrong", 1, json!({ "count": 1 }));
    let without = place.elasticdl(&["train", &job, "--on", "kubernetes", "--set", "kubernetes.volumes=[]"]);
    assert!(without.failed(1).contains("spec.kubernetes.volumes"));
    let missing =
        place.elasticdl(&["train", &job, "--on", "kubernetes", "--set", "data.validate=nowhere/*.tsv"]);
    let said = missing.failed(1);
    assert!(said.contains("nowhere/*.tsv"), "{said}");
}
