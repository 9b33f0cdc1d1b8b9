//! The operator: a job file is applied with kubectl, scaled, suspended and removed with kubectl, and rides through
//! the deaths of its master and of an operator. Addresses of pods must be reachable from here.

use std::ops::Deref;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::place::Place;

/// Long enough for everything that is done to the job while it trains.
const EPOCHS: u32 = 25;
const ROWS: u64 = EPOCHS as u64 * 100_000;

#[test]
fn jobs_are_resources() {
    let Some(place) = Place::find("operator") else { return };
    let place = Resources::of(place);
    let first = place.operator();
    let leader =
        place.until("the first operator to lead", || Some(place.holder()).filter(|name| !name.is_empty()));
    let second = place.operator();

    a_typo_is_told_with_the_nearest_key(&place);
    the_quick_start_is_a_resource(&place);
    a_job_is_followed_scaled_and_started_again(&place);
    drop(first);
    a_job_is_suspended_and_goes_on(&place);
    assert_ne!(place.holder(), leader, "the second operator leads now");
    a_job_that_is_over_is_removed(&place);
    a_deadline_fails_a_job(&place);
    a_late_job_is_let_in_and_the_room_is_evened_out(&place);
    drop(second);
}

fn a_typo_is_told_with_the_nearest_key(place: &Resources) {
    let mut typo = place.resource("typo", 1);
    typo["spec"]["train"]["lerning_rate"] = json!(0.1);
    place.apply(&typo);
    let valid = place.condition("typo", "Valid", "False");
    assert_eq!(valid["message"], "spec.train.lerning_rate: unknown key; did you mean learning_rate?");
    assert_eq!(place.status("typo")["phase"], "Pending");
    place.kubectl(&["delete", "elasticjob", "typo", "--timeout=60s"]).ok();
}

/// The very file of the quick start, with a volume, pods for small nodes, and less data.
fn the_quick_start_is_a_resource(place: &Resources) {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/deepfm.yaml");
    let mut text = std::fs::read_to_string(file).unwrap();
    for (from, to) in [
        ("synth_rows: 4000000", "synth_rows: 200000"),
        ("  workers:\n", "  workers:\n    cpu: 300m\n    memory: 256Mi\n"),
        (
            "  servers:\n",
            "  master: { cpu: 100m, memory: 128Mi }\n  servers:\n    cpu: 200m\n    memory: 256Mi\n",
        ),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        text = text.replace(from, to);
    }
    place.apply_text(&format!("{text}  kubernetes: {}\n", place.kubernetes())).ok();
    place.phase("deepfm", "Done");
    let status = place.status("deepfm");
    assert_eq!((&status["records"], &status["progress"]), (&json!(200_000), &json!("100 %")), "{status}");
    let auc: f64 = status["auc"].as_str().unwrap().parse().unwrap();
    assert!(auc > 0.6, "{status}");
    place.kubectl(&["delete", "elasticjob", "deepfm", "--timeout=60s"]).ok();
}

fn a_job_is_followed_scaled_and_started_again(place: &Resources) {
    place.apply(&place.resource("ctr", EPOCHS));
    place.phase("ctr", "Training");
    let mut job = place.resource("ctr", EPOCHS + 1);
    let refused = place.try_apply(&job);
    assert!(refused.stderr.contains("train cannot change while the job is there"), "{}", refused.stderr);
    job = place.resource("ctr", EPOCHS);
    job["spec"]["workers"]["min"] = json!(5);
    let refused = place.try_apply(&job);
    assert!(refused.stderr.contains("workers.min is more than workers.max"), "{}", refused.stderr);

    place.kubectl(&["scale", "elasticjob", "ctr", "--replicas=2"]).ok();
    place.until("two workers", || (place.status("ctr")["workers"] == 2).then_some(()));
    let masters = "elasticdl.org/job=ctr,elasticdl.org/role=master";
    let running = ["get", "pods", "-l", masters, "-o", "jsonpath={.items[*].metadata.uid}"];
    let before = place.kubectl(&running).ok();
    place.kubectl(&["delete", "pod", "-l", masters, "--grace-period=0", "--force"]).ok();
    place.until("another master", || {
        Some(place.kubectl(&running).ok()).filter(|now| !now.is_empty() && *now != before)
    });
    place.condition("ctr", "Running", "True");
    place.until("two workers again", || (place.status("ctr")["workers"] == 2).then_some(()));
}

fn a_job_is_suspended_and_goes_on(place: &Resources) {
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

fn a_job_that_is_over_is_removed(place: &Resources) {
    place.kubectl(&["patch", "elasticjob", "ctr", "--type=merge", "-p", r#"{"spec":{"ttl":"1s"}}"#]).ok();
    place.kubectl(&["wait", "--for=delete", "elasticjob/ctr", "--timeout=60s"]).ok();
    place.until("everything of it to go", || {
        let left = place.kubectl(&["get", "pods,secrets,services,roles", "-o", "name"]).ok();
        (!left.contains("ctr")).then_some(())
    });
}

fn a_deadline_fails_a_job(place: &Resources) {
    let mut job = place.resource("late", 100);
    job["spec"]["deadline"] = json!("8s");
    place.apply(&job);
    let failed = place.condition("late", "Failed", "True");
    assert_eq!(failed["reason"], "DeadlineExceeded", "{failed}");
    assert_eq!(place.pods("elasticdl.org/job=late").trim(), "");
}

/// Goal: the cluster is full of one job, and another one of its kind need not wait for its end.
fn a_late_job_is_let_in_and_the_room_is_evened_out(place: &Resources) {
    let job = |name: &str, workers: Value| {
        let mut job = place.resource(name, 1000);
        job["spec"]["workers"] = json!({ "cpu": "400m", "memory": "256Mi" });
        for (setting, value) in workers.as_object().unwrap() {
            job["spec"]["workers"][setting] = value.clone();
        }
        job
    };
    let granted = |name: &str| place.status(name)["workersGranted"].as_u64().unwrap_or(0);
    let alone = |name: &str| {
        place.until("the room to be one job's", || {
            let (has, granted) = (place.status(name)["workers"].as_u64(), granted(name));
            Some(granted).filter(|_| granted > 2 && has == Some(granted))
        })
    };
    place.apply(&job("first", json!({ "count": 16, "max": 16 })));
    let all = alone("first");
    assert!(all < 16, "the cluster is too small for all of them: {all}");

    place.apply(&job("gang", json!({ "min": 16, "count": 16, "max": 16 })));
    let waits = place.condition("gang", "Admitted", "False");
    assert_eq!(waits["reason"], "TooLarge", "{waits}");
    assert_eq!(place.pods("elasticdl.org/job=gang").trim(), "", "nothing of it is made");
    place.kubectl(&["delete", "elasticjob", "gang", "--timeout=60s"]).ok();

    place.apply(&job("second", json!({ "count": 16, "max": 16 })));
    place.phase("second", "Training");
    place.until("an even share", || {
        let (first, second) = (granted("first"), granted("second"));
        let even = first.abs_diff(second) <= 1 && first + second + 1 >= all;
        let has = |name: &str| place.status(name)["workers"].as_u64() == Some(granted(name));
        (even && has("first") && has("second")).then_some(())
    });
    place.kubectl(&["delete", "elasticjob", "first", "--timeout=60s"]).ok();
    assert_eq!(alone("second"), all, "what the first had is the second's");
    place.kubectl(&["delete", "elasticjob", "second", "--timeout=60s"]).ok();
}

/// An operator, killed when it is dropped.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A place whose cluster knows the resource.
pub struct Resources(Place);

impl Deref for Resources {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.0
    }
}

impl Resources {
    /// Makes the cluster know it.
    pub fn of(place: Place) -> Resources {
        let definition = place.elasticdl(&["operator", "crd", "--crd-only"]).ok();
        place.apply_text(&definition).ok();
        // Masters have a priority, which whoever installs the operator makes.
        let classes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/operator/priorities.yaml");
        place.apply_text(&std::fs::read_to_string(classes).unwrap()).ok();
        let crd = "crd/elasticjobs.elasticdl.org";
        place.kubectl(&["wait", "--for=condition=Established", crd, "--timeout=60s"]).ok();
        Resources(place)
    }

    /// Starts an operator.
    pub fn operator(&self) -> Running {
        let namespace = &self.namespace;
        let mut command = self.command(&["operator", "--namespace", namespace, "--leader-elect"]);
        command.args(["--lease-namespace", namespace]);
        Running(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Who leads.
    fn holder(&self) -> String {
        self.kubectl(&["get", "lease", "elasticdl-operator", "-o", "jsonpath={.spec.holderIdentity}"]).stdout
    }

    fn resource(&self, name: &str, epochs: u32) -> Value {
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
                "kubernetes": self.kubernetes(),
            },
        })
    }

    fn status(&self, job: &str) -> Value {
        let said = self.kubectl(&["get", "elasticjob", job, "-o", "jsonpath={.status}"]);
        serde_json::from_str(&said.stdout).unwrap_or_default()
    }

    /// The pods that a selector finds.
    pub fn pods(&self, selector: &str) -> String {
        self.kubectl(&["get", "pods", "-l", selector, "-o", "name"]).ok()
    }

    /// Waits until a job is in this phase.
    pub fn phase(&self, job: &str, phase: &str) {
        self.until(&format!("{job} to be {phase}"), || (self.status(job)["phase"] == phase).then_some(()));
    }

    /// Waits until a condition is `True` or `False`.
    pub fn condition(&self, job: &str, type_: &str, status: &str) -> Value {
        self.until(&format!("{type_}={status} of {job}"), || {
            let known = self.status(job);
            let mut conditions = known["conditions"].as_array()?.iter();
            conditions.find(|c| c["type"] == type_ && c["status"] == status).cloned()
        })
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        // No operator may be left to take a finalizer off, so the jobs let go themselves.
        let jobs = self.kubectl(&["get", "elasticjobs", "-o", "name"]).stdout;
        for job in jobs.split_whitespace() {
            self.kubectl(&["patch", job, "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#]);
        }
    }
}
