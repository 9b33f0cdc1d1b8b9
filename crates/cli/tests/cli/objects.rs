//! Data, checkpoints, ledger and output in object storage: a server that speaks S3, real processes, deaths.

use std::io::Write;
use std::path::{Path, PathBuf};

use elasticdl_storage as storage;
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::process::Signal;
use serde_json::Value;

use super::chaos::{audit, counting, every_row_of};
use super::world::{World, signal};

/// A place of its own in the bucket for tests; `None` says aloud that a test is skipped.
fn bucket(world: &World) -> Option<String> {
    let Ok(base) = std::env::var("ELASTICDL_TEST_S3") else {
        eprintln!(
            "skipped: ELASTICDL_TEST_S3 names no bucket; `cargo xtask test` starts a server and sets it"
        );
        return None;
    };
    let unique = world.path("").file_name().unwrap().to_string_lossy().into_owned();
    Some(format!("{base}/cli/{unique}"))
}

/// Copies what lies in `data/` into the bucket, and removes it here.
fn upload(world: &World, bucket: &str) {
    for name in storage::list(world.path("data")).unwrap() {
        let content = storage::read(world.path("data").join(&name)).unwrap();
        storage::replace(Path::new(bucket).join("data").join(&name), &content).unwrap();
    }
    storage::remove_all(world.path("data")).unwrap();
}

/// Makes a job file's paths those of the bucket.
fn in_bucket(world: &World, file: &str, bucket: &str) {
    let text = String::from_utf8(storage::read(world.path(file)).unwrap()).unwrap();
    world.write(file, &text.replace(" data/", &format!(" {bucket}/data/")));
}

/// The newest committed checkpoint in a directory of the bucket.
fn newest_checkpoint(dir: &Path) -> PathBuf {
    let mut names = storage::list(dir).unwrap();
    names.retain(|name| name.starts_with("checkpoint-"));
    names.sort();
    let complete = |name: &String| storage::exists(dir.join(name).join("manifest.json")).unwrap();
    dir.join(names.into_iter().rfind(complete).unwrap())
}

#[test]
fn a_job_in_object_storage_counts_every_record_once_whatever_dies() {
    const EPOCHS: u32 = 12;
    let (world, file) = counting(EPOCHS, "");
    let Some(bucket) = bucket(&world) else { return };
    upload(&world, &bucket);
    in_bucket(&world, &file, &bucket);
    let dir = format!("{bucket}/ckpt/");
    let mut job = world.start(&["train", &file, "--set", &format!("checkpoint.dir={dir}")]);
    job.until("a checkpoint", |e| e["event"] == "checkpoint");
    let server = world.status("count")["servers"][0]["pid"].as_u64().unwrap() as u32;
    signal(server, Signal::KILL);
    job.until("its death", |e| e["event"] == "server_exited" && e["asked"] == false);
    job.until("the next one", |e| e["event"] == "server_ready");
    signal(world.master("count").1, Signal::KILL);
    job.until("leases of the next master", |e| e["event"] == "leasing");
    let (last, code) = job.end();
    let records = 20_000 * u64::from(EPOCHS);
    assert_eq!((&last["outcome"], &last["records"], code), (&"done".into(), &records.into(), Some(0)));
    audit(&world, "count");
    every_row_of(&newest_checkpoint(Path::new(&dir)), EPOCHS);
    let terms = storage::list(Path::new(&dir).join("term")).unwrap();
    assert_eq!(terms.len(), 2, "one for each master: {terms:?}");
    assert!(!world.job_dir("count").join("checkpoint").exists(), "nothing of it lies here");
}

#[test]
fn a_model_in_object_storage_is_exported_judged_and_used() {
    let world = World::with_data(20_000);
    let Some(bucket) = bucket(&world) else { return };
    upload(&world, &bucket);
    let more =
        format!("train: {{ batch: 128 }}\ncheckpoint: {{ dir: {bucket}/ckpt }}\noutput: {bucket}/model");
    let file = world.job("ctr", &more);
    in_bucket(&world, &file, &bucket);
    let (last, code) = world.start(&["train", &file]).end();
    assert_eq!(
        (&last["outcome"], &last["records"], code),
        (&"done".into(), &20_000.into(), Some(0)),
        "{last}"
    );
    assert!(last["best_auc"].is_number() || last["auc"].is_number(), "{last}");

    let (model, test) = (format!("{bucket}/model"), format!("{bucket}/data/test-*.tsv"));
    let judged = world.run(&["evaluate", "--model", &model, "--data", &test, "--json"]).last_json();
    let off = |name: &str| (judged[name].as_f64().unwrap() - last[name].as_f64().unwrap()).abs();
    assert!(off("logloss") < 1e-6 && off("auc") < 1e-6, "{judged} {last}");
    let scored = world.run(&["predict", "--model", &model, "--data", &test]).ok();
    assert_eq!(scored.lines().count(), 2_000);

    // Exported again, to a directory here and to another one there, it is the same model.
    let there = format!("{bucket}/again");
    world.run(&["export", "ctr", "--out", "here"]).ok();
    world.run(&["export", "ctr", "--out", &there]).ok();
    let weights = |dir: &Path| storage::read(dir.join("model.safetensors")).unwrap();
    let first = weights(Path::new(&model));
    assert!(first == weights(&world.path("here")) && first == weights(Path::new(&there)));

    // A second run does not go on from the first one's ledger, and says what to do.
    let refused = world.run(&["train", &file]).failed(1);
    assert!(refused.contains("holds checkpoints of an earlier run of job \"ctr\""), "{refused}");
    let fresh = world.run(&["train", &file, "--fresh", "--json"]);
    assert_eq!(fresh.code, Some(0), "{}", fresh.stderr);
    assert_eq!(fresh.last_json()["records"], 20_000);
}

#[test]
fn packed_and_columnar_data_in_object_storage_is_read_as_on_disk() {
    let world = World::new();
    let Some(bucket) = bucket(&world) else { return };
    let args = ["data", "synth", "criteo", "--rows", "5000", "--format", "parquet", "--out", "data"];
    world.run(&args).ok();
    let head = |place: &str| world.run(&["data", "head", place, "--layout", "criteo", "--records", "3"]).ok();
    let here = head("data/train-*.parquet");
    assert!(here.lines().count() > 10, "{here}");
    upload(&world, &bucket);
    assert_eq!(head(&format!("{bucket}/data/train-*.parquet")), here);

    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    // Longer than a block, so that unpacking goes from one to the next.
    let text: String = (0..400_000u64).map(|n| format!("{},id{}\n", n % 2, n * 7919 % 100_003)).collect();
    packed.write_all(text.as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    assert!(packed.len() > 1 << 20, "{}", packed.len());
    storage::replace(format!("{bucket}/packed/a.csv.gz"), &packed).unwrap();
    let job = format!(
        "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: packed }}\nspec:\n  \
         model: {{ zoo: counting }}\n  \
         data: {{ train: {bucket}/packed/*.csv.gz, layout: custom, label: label, categorical: [id], \
         columns: [label, id] }}\n  train: {{ batch: 4096, optimizer: sgd, learning_rate: 1 }}\n  \
         checkpoint: {{ dir: {bucket}/packed-ckpt }}\n"
    );
    world.write("packed.yaml", &job);
    let (last, _) = world.start(&["train", "packed.yaml"]).end();
    assert_eq!((&last["outcome"], &last["records"]), (&"done".into(), &400_000.into()), "{last}");
    audit(&world, "packed");
}

#[test]
fn a_bucket_that_is_not_there_and_an_endpoint_that_does_not_answer_are_told_apart() {
    let world = World::with_data(5_000);
    let Some(_) = bucket(&world) else { return };
    let file = world.job("ctr", "checkpoint: { dir: \"s3://no-such-bucket/ckpt\" }");
    let missing = world.run(&["train", &file]).failed(1);
    assert!(missing.contains("spec.checkpoint.dir: cannot reach s3://no-such-bucket/ckpt"), "{missing}");
    assert!(missing.contains("there is no bucket \"no-such-bucket\"; make it"), "{missing}");

    let mut nowhere = world.command(&["train", &file]);
    let away = super::world::said(nowhere.env("AWS_ENDPOINT_URL", "http://127.0.0.1:1")).failed(1);
    assert!(away.contains("was not reached; check AWS_ENDPOINT_URL"), "{away}");
    let unknown = world.job("ctr", "checkpoint: { dir: \"ftp://host/ckpt\" }");
    let unknown = world.run(&["train", &unknown]).failed(1);
    assert!(unknown.contains("ftp:// is no object storage that this program knows; s3:// is"), "{unknown}");
}

#[test]
fn a_pattern_without_objects_names_what_is_there() {
    let world = World::with_data(5_000);
    let Some(bucket) = bucket(&world) else { return };
    upload(&world, &bucket);
    let file = world.job("ctr", "");
    in_bucket(&world, &file, &bucket);
    let wrong = format!("data.train={bucket}/data/trian-*.tsv");
    let said = world.run(&["train", &file, "--set", &wrong]).failed(1);
    assert!(said.contains(&format!("no data file matches {bucket}/data/trian-*.tsv; there is")), "{said}");
    let listed: Value = storage::list(format!("{bucket}/data")).unwrap().into();
    assert!(listed.as_array().is_some_and(|names| names.iter().any(|n| n == "train-000.tsv")), "{listed}");
}
