//! Exported models: used without servers, whole or refused.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::world::{World, shared_data};

/// A world with a trained model in `model/`, and the job's last event.
fn trained() -> (World, Value) {
    let world = World::with_data(10_000);
    let file = world.job("ctr", "train: { batch: 256 }\nworkers: { count: 1 }\noutput: model");
    let run = world.run(&["train", &file, "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let last = run.last_json();
    (world, last)
}

#[test]
fn an_exported_model_judges_as_the_job_did_and_predicts_in_order() {
    let (world, last) = trained();
    let judged =
        world.run(&["evaluate", "--model", "model", "--data", "data/test-*.tsv", "--json"]).last_json();
    assert_eq!(judged["records"], 2_000);
    for key in ["logloss", "auc", "best_logloss", "best_auc"] {
        let (ours, jobs) = (judged[key].as_f64().unwrap(), last[key].as_f64().unwrap());
        assert!((ours - jobs).abs() < 1e-5, "{key}: {ours} here, {jobs} in the job");
    }
    let one =
        world.run(&["predict", "--model", "model", "--data", "data/test-000.tsv", "--threads", "1"]).ok();
    let three =
        world.run(&["predict", "--model", "model", "--data", "data/test-000.tsv", "--threads", "3"]).ok();
    assert_eq!(one, three, "threads change nothing");
    let scores: Vec<f64> = one.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(scores.len(), 2_000);
    assert!(scores.iter().all(|p| (0.0..=1.0).contains(p)));
    let text = fs::read_to_string(world.path("data/test-000.tsv")).unwrap();
    let labels = text.lines().map(|line| f64::from(u8::from(line.starts_with('1'))));
    let loss: f64 = scores.iter().zip(labels).map(|(p, y)| -(y * p.ln() + (1.0 - y) * (1.0 - p).ln())).sum();
    assert!(
        (loss / 2_000.0 - last["logloss"].as_f64().unwrap()).abs() < 1e-4,
        "a line belongs to its record"
    );
    let new: String = text.lines().map(|line| format!("{}\n", &line[2..])).collect();
    world.write("new.tsv", &new);
    let unlabelled = world.run(&["predict", "--model", "model", "--data", "new.tsv", "--no-label"]).ok();
    assert_eq!(unlabelled, one, "the label says nothing about a prediction");
    let refused = world.run(&["predict", "--model", "model", "--data", "new.tsv"]).failed(1);
    assert!(refused.contains("39 columns"), "{refused}");
    let manifest: Value =
        serde_json::from_slice(&fs::read(world.path("model/manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["job"], &manifest["records"]), (&"ctr".into(), &10_000.into()));
    assert_eq!(manifest["logloss"], last["logloss"]);
}

#[test]
fn export_writes_the_same_model_as_the_job_did() {
    let (world, _) = trained();
    world.run(&["export", "ctr", "--out", "again"]).ok();
    for name in ["model.safetensors", "manifest.json"] {
        let read = |dir: &str| fs::read(world.path(dir).join(name)).unwrap();
        assert!(read("model") == read("again"), "{name} differs");
    }
    let foreign = world.run(&["export", "ctr", "--out", "data"]).failed(1);
    assert!(foreign.contains("holds other things than a model"), "{foreign}");
}

#[test]
fn a_malformed_record_is_named_or_keeps_its_line_as_nan() {
    let (world, _) = trained();
    let text = fs::read_to_string(world.path("data/test-000.tsv")).unwrap();
    let mut lines: Vec<&str> = text.lines().take(10).collect();
    lines[3] = "1\tbroken";
    world.write("odd.tsv", &lines.join("\n"));
    let args = ["predict", "--model", "model", "--data", "odd.tsv"];
    let refused = world.run(&args).failed(1);
    assert!(refused.contains("odd.tsv, line 4"), "{refused}");
    assert!(refused.contains("--skip-bad"), "{refused}");
    let marked = world.run(&[&args[..], &["--skip-bad", "--out", "scores.txt"]].concat());
    assert!(marked.stderr.contains("1 of 10 records could not be read"), "{}", marked.stderr);
    let scores = fs::read_to_string(world.path("scores.txt")).unwrap();
    let scores: Vec<&str> = scores.lines().collect();
    assert_eq!((scores.len(), scores[3]), (10, "nan"));
    let whole = world.run(&["predict", "--model", "model", "--data", "data/test-000.tsv"]).ok();
    let whole: Vec<&str> = whole.lines().take(10).collect();
    assert_eq!((scores[2], scores[4]), (whole[2], whole[4]));
}

#[test]
fn a_damaged_model_is_refused() {
    let (world, _) = trained();
    let path = world.path("model/model.safetensors");
    let good = fs::read(&path).unwrap();
    let args = ["predict", "--model", "model", "--data", "data/test-000.tsv"];
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    let short = world.run(&args).failed(1);
    assert!(short.contains("model.safetensors is damaged: it has"), "{short}");
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&path, &flipped).unwrap();
    let wrong = world.run(&args).failed(1);
    assert!(wrong.contains("its checksum is not the one in the manifest"), "{wrong}");
    fs::remove_file(world.path("model/manifest.json")).unwrap();
    let none = world.run(&args).failed(1);
    assert!(none.contains("there is no exported model in model"), "{none}");
}

#[test]
fn the_adult_examples_reach_what_they_promise() {
    let (Some(train), Some(test)) =
        (shared_data("census-adult/adult.data.gz"), shared_data("census-adult/adult.test.gz"))
    else {
        return;
    };
    let world = World::new();
    for name in ["adult-wide-deep", "adult-deepfm"] {
        let file = example(name);
        let (train, test) =
            (format!("data.train={}", train.display()), format!("data.validate={}", test.display()));
        let run = world.run(&["train", &file, "--set", &train, "--set", &test, "--json"]);
        let last = run.last_json();
        assert!(last["auc"].as_f64() >= Some(0.905), "{name}: {last}");
        assert!(last["logloss"].as_f64() <= Some(0.32), "{name}: {last}");
    }
}

#[test]
fn the_quick_start_learns_nearly_all_that_can_be_learned_and_lr_cannot() {
    let world = World::new();
    let gap = |name: &str| {
        let run = world.run(&["train", &example(name), "--json"]);
        let last = run.last_json();
        assert_eq!((&last["outcome"], run.code), (&"done".into(), Some(0)), "{}", run.stderr);
        last["logloss"].as_f64().unwrap() - last["best_logloss"].as_f64().unwrap()
    };
    let (deepfm, lr) = (gap("deepfm"), gap("lr"));
    assert!(deepfm < 0.01, "deepfm is {deepfm} above the planted optimum");
    assert!(lr > deepfm + 0.01, "lr is only {lr} above the planted optimum, deepfm {deepfm}");
}

#[test]
fn synthetic_data_is_the_same_each_time_and_can_be_looked_at() {
    let world = World::new();
    let make = |out: &str, format: &str| {
        let args =
            ["data", "synth", "criteo", "--rows", "3000", "--files", "2", "--format", format, "--out", out];
        world.run(&[&args[..], &["--json"]].concat()).last_json()
    };
    let truth = make("one", "tsv");
    assert_eq!(truth, make("two", "tsv"));
    assert_eq!((&truth["train"]["rows"], &truth["test"]["rows"]), (&3000.into(), &300.into()));
    let read = |name: &str| fs::read(world.path(name)).unwrap();
    assert!(read("one/train-001.tsv") == read("two/train-001.tsv"));
    make("three", "parquet");
    let head = |file: &str| world.run(&["data", "head", file, "--layout", "criteo", "-n", "2"]).ok();
    let shown = head("one/train-000.tsv");
    assert_eq!(shown.lines().count(), 40, "{shown}");
    // Ids are text in one format and numbers in the other; labels and counts are the same.
    let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let first = |text: &str| text.lines().take(14).map(words).collect::<Vec<_>>();
    assert_eq!(first(&shown), first(&head("three/train-000.parquet")));
    let unknown = world.run(&["data", "head", "one/train-000.tsv", "--layout", "critoe"]).failed(1);
    assert!(unknown.contains("did you mean criteo?"), "{unknown}");
}

/// The path of a job file that ships.
fn example(name: &str) -> String {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    examples.join(format!("{name}.yaml")).display().to_string()
}
