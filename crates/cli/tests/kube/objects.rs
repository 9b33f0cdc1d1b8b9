//! A job whose data, checkpoints, ledger and model lie in object storage: its pods share no volume.

use std::path::Path;

use elasticdl_storage as storage;
use serde_json::{Value, json};

use super::place::Place;

/// Far more than are trained before the last of the deaths.
const EPOCHS: u32 = 140;

#[test]
fn a_job_in_object_storage_needs_no_volume() {
    let Some(place) = Place::find("objects") else { return };
    let Ok(base) = std::env::var("ELASTICDL_TEST_S3") else {
        eprintln!(
            "skipped: ELASTICDL_TEST_S3 names no bucket that pods can reach; `cargo xtask test` starts one"
        );
        return;
    };
    let bucket = format!("{base}/{}", place.namespace);
    upload(&place, &bucket);
    place.write("objects.yaml", &job(&place, &bucket).to_string());
    let mut running = place.train("objects.yaml");
    running.until("a checkpoint", |e| e["event"] == "checkpoint");
    // Nothing of it outlives its pod.
    place.kill(&place.pod("objects", "server"));
    running.until("the server again", |e| e["event"] == "server_ready");
    place.kill(&place.pod("objects", "master"));
    let next = running.until("the next master", |e| e["event"] == "started");
    assert_eq!(next["term"], 2, "{next}");
    let volumes =
        "jsonpath={.items[*].spec.volumes[*].hostPath}{.items[*].spec.volumes[*].persistentVolumeClaim}";
    assert_eq!(place.kubectl(&["get", "pods", "-o", volumes]).ok().trim(), "", "no volume is shared");

    let (finished, code) = running.end();
    let records = 20_000 * u64::from(EPOCHS);
    assert_eq!(
        (&finished["outcome"], &finished["records"], code),
        (&json!("done"), &json!(records), Some(0)),
        "{finished}"
    );
    let audit: Value = serde_json::from_str(&place.elasticdl(&["audit", "objects", "--json"]).ok()).unwrap();
    assert_eq!((&audit["exact"], &audit["lost"], &audit["doubled"]), (&json!(true), &json!(0), &json!(0)));
    let terms = storage::list(Path::new(&bucket).join("ckpt/term")).unwrap();
    assert_eq!(terms.len(), 2, "one for each master: {terms:?}");
    let (model, data) = (format!("{bucket}/model"), format!("{bucket}/data/test-*.tsv"));
    let judged = place.elasticdl(&["evaluate", "--model", &model, "--data", &data]);
    assert!(judged.ok().contains("AUC"), "the model is there");
}

/// Synthetic records, copied into the bucket.
fn upload(place: &Place, bucket: &str) {
    let rows = ["--rows", "20000", "--test-rows", "2000", "--out", "data"];
    place.elasticdl(&[&["data", "synth", "criteo"][..], &rows].concat()).ok();
    for name in storage::list(place.path("data")).unwrap() {
        let content = storage::read(place.path("data").join(&name)).unwrap();
        storage::replace(Path::new(bucket).join("data").join(&name), &content).unwrap();
    }
}

fn job(place: &Place, bucket: &str) -> Value {
    let mut kubernetes = place.kubernetes();
    kubernetes["namespace"] = json!(place.namespace);
    kubernetes["volumes"] = json!([]);
    let settings = std::env::vars().filter(|(name, _)| name.starts_with("AWS_"));
    kubernetes["env"] = settings.map(|(name, value)| (name, Value::from(value))).collect();
    json!({
        "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": "objects" },
        "spec": {
            "model": { "zoo": "deepfm", "embedding_dim": 4, "hidden": [16] },
            "data": {
                "train": format!("{bucket}/data/train-*.tsv"), "validate": format!("{bucket}/data/test-*.tsv"),
                "layout": "criteo", "batches_per_task": 16,
            },
            "train": { "epochs": EPOCHS, "batch": 64, "optimizer": "adagrad", "learning_rate": 0.1 },
            "workers": { "count": 2, "max": 2, "cpu": "400m", "memory": "256Mi" },
            "servers": { "count": 1, "cpu": "100m", "memory": "256Mi" },
            "master": { "cpu": "100m", "memory": "128Mi" },
            "checkpoint": { "every": "3s", "dir": format!("{bucket}/ckpt") },
            "limits": { "lease": "3s", "silence": "6s", "orphan": "60s" },
            "output": format!("{bucket}/model"),
            "kubernetes": kubernetes,
        },
    })
}
