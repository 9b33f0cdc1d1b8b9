//! Things that go wrong while a job runs: deaths, damage, strangers.

use std::fs::{self, OpenOptions};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::world::{World, is_alive, pids, signal, wait_for};

/// More work than any test waits for; it is stopped.
const ENDLESS: &str =
    "train: { batch: 256, epochs: 100000 }\nservers: { count: 2, partitions: 4 }\nworkers: { count: 2 }";

fn worker_pid(world: &World) -> u32 {
    wait_for("a working worker", || {
        let status = world.status("ctr");
        let workers = status["workers"].as_array()?.clone();
        let busy = workers.iter().find(|w| w["state"] == "working")?;
        Some(busy["pid"].as_u64()? as u32)
    })
}

#[test]
fn a_killed_worker_is_replaced_at_once_and_every_record_is_trained() {
    let world = World::with_data(60_000);
    let file = world.job("ctr", "train: { batch: 128, epochs: 20 }\nworkers: { count: 2 }");
    let mut job = world.start(&["train", &file]);
    job.until_training();
    signal(worker_pid(&world), Signal::KILL);
    let died = job.until("the death", |e| e["event"] == "worker_exited" && e["asked"] == false);
    assert_eq!(died["signal"], 9);
    let started = job.until("the replacement", |e| e["event"] == "worker_started");
    let pause = started["seconds"].as_f64().unwrap() - died["seconds"].as_f64().unwrap();
    assert!(pause < 0.5, "the replacement was started at once, not after {pause} s");
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], &last["records"], code), (&"done".into(), &1_200_000.into(), Some(0)));
}

#[test]
fn a_killed_client_leaves_a_checkpoint_and_no_processes() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let mut processes = pids(&world.status("ctr"));
    processes.push(world.master("ctr").1);
    assert_eq!(processes.len(), 5);
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    wait_for("all processes to end", || processes.iter().all(|pid| !is_alive(*pid)).then_some(()));
    let status: Value = world.status("ctr");
    assert_eq!(status["phase"], "stopped");
    assert!(world.job_dir("ctr").join("checkpoint/checkpoint-000001/manifest.json").exists());
}

#[test]
fn a_master_that_is_not_to_be_started_again_is_told_and_its_processes_end_by_themselves() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", &format!("{ENDLESS}\nlimits: {{ orphan: 2s, restarts: 0 }}"));
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let processes = pids(&world.status("ctr"));
    signal(world.master("ctr").1, Signal::KILL);
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"failed".into(), Some(3)));
    assert!(last["error"].as_str().unwrap().contains("its master died (signal: 9"), "{last}");
    wait_for("the orphans to end", || processes.iter().all(|pid| !is_alive(*pid)).then_some(()));
    assert_eq!(world.status("ctr")["phase"], "lost");
}

#[test]
fn a_call_without_the_token_is_refused() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let (address, _) = world.master("ctr");
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    for path in ["/v1/status", "/v1/events"] {
        let url = format!("http://{address}{path}");
        assert_eq!(agent.get(&url).call().unwrap().status(), 401);
        let wrong = agent.get(&url).header("authorization", "Bearer 0123456789abcdef0123456789abcdef").call();
        assert_eq!(wrong.unwrap().status(), 401);
    }
    let stop = agent.post(format!("http://{address}/v1/stop")).send_json(json!({ "now": true })).unwrap();
    assert_eq!(stop.status(), 401);
    assert_eq!(world.status("ctr")["phase"], "training", "the job goes on");
    // A worker with another token is sent away by the master.
    world.write("stranger", &"ab".repeat(32));
    fs::set_permissions(world.path("stranger"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let began = Instant::now();
    let worker = world.run(&["worker", "--master", &address, "--token-file", "stranger", "--id", "9"]);
    assert_eq!(worker.code, Some(1), "{}", worker.stderr);
    assert!(worker.stderr.contains("token is missing or wrong"), "{}", worker.stderr);
    assert!(began.elapsed() < Duration::from_secs(10), "it does not try again");
    world.run(&["stop", "ctr", "--now"]).ok();
    job.end();
}

#[test]
fn a_token_that_others_can_read_is_refused() {
    let world = World::new();
    world.write("open", &"ab".repeat(32));
    fs::set_permissions(world.path("open"), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let worker =
        world.run(&["worker", "--master", "127.0.0.1:1", "--token-file", "open", "--id", "0"]).failed(1);
    assert!(worker.contains("others can read it"), "{worker}");
}

/// A job that was stopped after a checkpoint.
fn stopped(world: &World, more: &str) {
    let file = world.job("ctr", &format!("{ENDLESS}{more}"));
    let mut job = world.start(&["train", &file]);
    job.until_training();
    world.run(&["stop", "ctr"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");
}

#[test]
fn a_truncated_checkpoint_is_named_and_not_read() {
    let world = World::with_data(5_000);
    stopped(&world, "");
    let file = world.job_dir("ctr").join("checkpoint/checkpoint-000001/partition-001.arrow");
    let bytes = fs::metadata(&file).unwrap().len();
    OpenOptions::new().write(true).open(&file).unwrap().set_len(bytes / 2).unwrap();
    let resumed = world.run(&["resume", "ctr", "--json"]);
    assert_eq!(resumed.code, Some(3), "{}", resumed.stderr);
    let error = resumed.last_json()["error"].as_str().unwrap().to_string();
    assert!(error.contains("partition-001.arrow is truncated"), "{error}");
    let exported = world.run(&["export", "ctr", "--out", "model"]).failed(1);
    assert!(exported.contains("partition-001.arrow"), "{exported}");
    assert!(!world.path("model/manifest.json").exists());
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let world = World::with_data(5_000);
    stopped(&world, "");
    let path = world.job_dir("ctr").join("job.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["job"]["model"]["embedding_dim"] = json!(6);
    fs::write(&path, record.to_string()).unwrap();
    let refused = world.run(&["resume", "ctr"]).failed(1);
    assert!(refused.contains("it is of another model: its table embedding has rows of 5"), "{refused}");
}

#[test]
fn data_that_changed_since_the_checkpoint_is_refused() {
    let world = World::with_data(5_000);
    stopped(&world, "");
    let path = world.path("data/train-000.tsv");
    let text = fs::read_to_string(&path).unwrap();
    let shorter: String = text.lines().skip(1).map(|line| format!("{line}\n")).collect();
    fs::write(&path, shorter).unwrap();
    let resumed = world.run(&["resume", "ctr", "--json"]);
    assert_eq!(resumed.code, Some(3), "{}", resumed.stderr);
    let error = resumed.last_json()["error"].as_str().unwrap().to_string();
    assert!(error.contains("not those that the job began with"), "{error}");
}

#[test]
fn a_loss_that_is_no_number_ends_the_job_with_its_place_and_the_last_checkpoint_stays() {
    let world = World::with_data(20_000);
    let file =
        world.job("ctr", "train: { batch: 256, optimizer: sgd, learning_rate: 1e30 }\nworkers: { count: 1 }");
    let run = world.run(&["train", &file, "--json"]);
    assert_eq!(run.code, Some(3), "{}", run.stderr);
    let error = run.last_json()["error"].as_str().unwrap().to_string();
    assert!(error.starts_with("task train/0/") && error.contains(", batch "), "{error}");
    assert!(run.stderr.contains("error: job \"ctr\" failed"), "{}", run.stderr);
}

#[test]
fn a_malformed_record_in_the_middle_names_file_line_and_column() {
    let world = World::with_data(5_000);
    let path = world.path("data/train-002.tsv");
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<String> = text.lines().map(Into::into).collect();
    lines[499] = lines[499].replacen('\t', "\tmany\t", 1).replacen("\t\t", "\t", 1);
    let fields: Vec<&str> = lines[499].split('\t').collect();
    let mut fixed: Vec<&str> = fields[..2].to_vec();
    fixed.extend(&fields[fields.len() - 38..]);
    lines[499] = fixed.join("\t");
    fs::write(&path, lines.join("\n")).unwrap();
    let file = world.job("ctr", "train: { batch: 256 }");
    let run = world.run(&["train", &file, "--json"]);
    assert_eq!(run.code, Some(3), "{}", run.stderr);
    let error = run.last_json()["error"].as_str().unwrap().to_string();
    assert!(error.contains("data/train-002.tsv, line 500, column 2 (I1): \"many\" is no"), "{error}");
    let allowed = world.run(&["train", &file, "--json", "--set", "data.bad_records_max=1"]);
    assert_eq!(allowed.code, Some(0), "{}", allowed.stderr);
    assert_eq!(
        (&allowed.last_json()["records"], &allowed.last_json()["bad_records"]),
        (&4_999.into(), &1.into())
    );
}
