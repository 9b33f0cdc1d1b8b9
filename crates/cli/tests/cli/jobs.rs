//! Whole jobs: trained, watched, scaled, stopped, resumed, locked.

use std::fs;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;

use super::world::{Running, World, is_alive, pids, said, signal, wait_for};

/// More work than any test waits for; it is stopped.
const ENDLESS: &str =
    "train: { batch: 256, epochs: 100000 }\nservers: { count: 2, partitions: 4 }\nworkers: { count: 2 }";

#[test]
fn a_job_trains_every_record_and_judges_itself() {
    let world = World::with_data(20_000);
    let file = world.job("ctr", "train: { batch: 256, epochs: 2 }\nworkers: { count: 2 }\noutput: model");
    let run = world.run(&["train", &file, "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let last = run.last_json();
    assert_eq!((&last["event"], &last["outcome"]), (&"finished".into(), &"done".into()));
    assert_eq!(last["records"], 40_000);
    for key in ["logloss", "auc", "seconds", "records_per_second", "best_logloss", "best_auc"] {
        assert!(last[key].is_number(), "{key}: {last}");
    }
    let sequence: Vec<u64> = run.stdout.lines().map(|l| event(l)["seq"].as_u64().unwrap()).collect();
    assert_eq!(sequence, (1..=sequence.len() as u64).collect::<Vec<_>>(), "no event is lost or doubled");
    assert_eq!(run.stderr, "", "with --json, stderr is for errors");
}

fn event(line: &str) -> Value {
    serde_json::from_str(line).unwrap()
}

#[test]
fn plain_lines_and_a_table_are_for_people() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", "train: { batch: 256 }");
    let run = world.run(&["train", &file]);
    assert!(run.stderr.contains("judged on 2,000 records"), "{}", run.stderr);
    for word in ["ctr", "done", "logloss", "best reachable AUC", "5,000"] {
        assert!(run.stdout.contains(word), "{word}: {}", run.stdout);
    }
    assert!(!run.stdout.contains('\x1b') && !run.stderr.contains('\x1b'), "no colours into a pipe");
    let jobs: Value = serde_json::from_str(&world.run(&["jobs", "--json"]).ok()).unwrap();
    assert_eq!(
        (&jobs[0]["name"], &jobs[0]["phase"], &jobs[0]["records"]),
        (&"ctr".into(), &"done".into(), &5000.into())
    );
    assert!(world.run(&["status", "ctr"]).ok().contains("logloss"));
    assert!(world.run(&["logs", "ctr", "worker-0"]).ok().contains("worker joined"));
    let unknown = world.run(&["logs", "ctr", "worker-9"]).failed(1);
    assert!(unknown.contains("there are master, ps-0, worker-0"), "{unknown}");
}

#[test]
fn the_same_job_again_starts_afresh_and_keeps_the_last_checkpoints_aside() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", "train: { batch: 256 }");
    world.run(&["train", &file]).ok();
    let again = world.run(&["train", &file, "--json"]);
    assert_eq!(again.last_json()["records"], 5_000);
    assert!(again.stderr.contains("checkpoint.old"), "{}", again.stderr);
    assert!(world.job_dir("ctr").join("checkpoint.old/checkpoint-000001/manifest.json").exists());
}

#[test]
fn checkpoints_in_a_directory_of_the_persons_own_are_not_overwritten() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", "train: { batch: 256 }\ncheckpoint: { dir: ckpt }");
    world.run(&["train", &file]).ok();
    insta::assert_snapshot!(world.neutral(&world.run(&["train", &file]).failed(1)));
    world.run(&["train", &file, "--fresh"]).ok();
    let other = world.job("other", "train: { batch: 256 }\ncheckpoint: { dir: ckpt }");
    let refused = world.run(&["train", &other]).failed(1);
    assert!(
        refused.contains("earlier run of job \"ctr\"") && refused.contains("`elasticdl resume ctr`"),
        "{refused}"
    );
}

#[test]
fn a_second_job_of_the_name_or_checkpoint_directory_is_refused_while_the_first_lives() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", &format!("{ENDLESS}\ncheckpoint: {{ dir: ckpt }}"));
    let mut first = world.start(&["train", &file]);
    first.until_training();
    let (_, pid) = world.master("ctr");
    let same = world.run(&["train", &file]).failed(1);
    assert!(same.contains(&format!("job \"ctr\" is running (pid {pid})")), "{same}");
    assert!(same.contains("hint: `elasticdl stop ctr`"), "{same}");
    let other = world.job("other", "checkpoint: { dir: ckpt }");
    let shared = world.run(&["train", &other]).failed(1);
    assert!(shared.contains(&format!("is in use by job \"ctr\" (pid {pid})")), "{shared}");
    let resumed = world.run(&["resume", "ctr"]).failed(1);
    assert!(resumed.contains("is running"), "{resumed}");
    world.run(&["stop", "ctr", "--now"]).ok();
    assert_eq!(first.end().0["outcome"], "stopped");
}

#[test]
fn workers_come_and_go_while_the_job_runs() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    world.run(&["scale", "ctr", "--workers", "4"]).ok();
    let working = |world: &World| {
        let status = world.status("ctr");
        let workers = status["workers"].as_array().unwrap().clone();
        (workers.iter().filter(|w| w["records"].as_u64() > Some(0)).count(), workers.len())
    };
    wait_for("four workers that have trained", || (working(&world) == (4, 4)).then_some(()));
    world.run(&["scale", "ctr", "--workers", "1"]).ok();
    wait_for("three workers to leave", || (working(&world).1 == 1).then_some(()));
    let many = world.run(&["scale", "ctr", "--workers", "99"]).failed(1);
    assert!(many.contains("from 1 to workers.max = 16 are possible"), "{many}");
    world.run(&["stop", "ctr"]).ok();
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"stopped".into(), Some(0)));
    let idle = world.run(&["scale", "ctr", "--workers", "2"]).failed(1);
    assert!(idle.contains("is not running"), "{idle}");
}

/// Goal: workers that mostly wait are of use whatever else this machine does, so the way up is known. How many
/// are too many depends on the machine; the master's own tests have machines of all kinds.
#[test]
fn a_job_with_a_limit_alone_asks_for_as_many_workers_as_are_of_use_until_somebody_says_how_many() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", "train: { batch: 256, epochs: 100000 }\nworkers: { min: 1, max: 4 }");
    let mut command = world.command(&["train", &file, "--json"]);
    command.env("ELASTICDL_FAILPOINTS", "worker.compute=sleep:30ms@every").stdout(Stdio::piped());
    let mut job = Running::following(command.spawn().unwrap());
    let scaled = |e: &Value| (e["from"].clone(), e["to"].clone(), e["automatic"].clone());
    let up = job.until("more workers", |e| e["event"] == "scaled");
    assert_eq!(scaled(&up), (2.into(), 4.into(), true.into()));
    assert_eq!(up["reason"], "tries whether that is better than 2");
    let found = wait_for("a number that stays", || {
        let status = world.status("ctr");
        let why = status["workers_why"].as_str().unwrap().to_string();
        let found = why.starts_with("more would add less") || why.starts_with("all of them are of use");
        found.then(|| status["workers_wanted"].as_u64().unwrap())
    });
    assert!((3..=4).contains(&found), "{found}");
    assert!(world.run(&["status", "ctr"]).ok().contains(" (auto: "));

    world.run(&["scale", "ctr", "--workers", "2"]).ok();
    let fixed = job.until("a fixed number", |e| e["event"] == "scaled" && e["automatic"] == false);
    assert_eq!(scaled(&fixed), (found.into(), 2.into(), false.into()));
    wait_for("the others to leave", || {
        let status = world.status("ctr");
        (status["workers"].as_array().unwrap().len() == 2 && status["workers_why"].is_null()).then_some(())
    });
    let auto = world.run(&["scale", "ctr", "--workers", "auto"]);
    assert!(auto.stderr.contains("as many workers wanted as are of use"), "{}", auto.stderr);
    let again = job.until("a number that may change", |e| e["event"] == "scaled");
    assert_eq!(scaled(&again), (2.into(), 2.into(), true.into()));
    let up = job.until("more workers", |e| e["event"] == "scaled");
    assert_eq!(scaled(&up), (2.into(), 4.into(), true.into()));
    let wrong = world.run(&["scale", "ctr", "--workers", "many"]).failed(1);
    assert!(wrong.contains("a whole number or auto is wanted"), "{wrong}");
    world.run(&["stop", "ctr", "--now"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");
}

#[test]
fn a_stopped_job_resumes_where_its_checkpoint_is_and_trains_each_record_once() {
    let world = World::with_data(60_000);
    let file = world.job("ctr", "train: { batch: 128, epochs: 4 }\nworkers: { count: 1 }");
    // Slow enough to be stopped in the middle, whatever else the machine does.
    let mut command = world.command(&["train", &file, "--json"]);
    command.env("ELASTICDL_FAILPOINTS", "worker.compute=sleep:10ms@every").stdout(Stdio::piped());
    let mut job = Running::following(command.spawn().unwrap());
    job.until_training();
    job.until("records", |e| e["event"] == "progress");
    world.run(&["stop", "ctr"]).ok();
    let (stopped, _) = job.end();
    let before = stopped["records"].as_u64().unwrap();
    assert!(before > 0 && before < 240_000, "stopped in the middle: {before}");
    let resumed = world.run(&["resume", "ctr", "--json"]);
    let training = resumed.stdout.lines().map(event).find(|e| e["event"] == "training").unwrap();
    assert!(training["records"].as_u64() > Some(0), "what was trained is not trained again: {training}");
    assert_eq!(
        (&resumed.last_json()["outcome"], &resumed.last_json()["records"]),
        (&"done".into(), &240_000.into())
    );
}

#[test]
fn a_job_without_a_checkpoint_goes_on_from_its_ledger_and_one_without_a_ledger_cannot() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    world.run(&["stop", "ctr", "--now"]).ok();
    job.end();
    let nothing = world.run(&["audit", "ctr"]).failed(1);
    assert!(nothing.contains("there is nothing to audit of job \"ctr\" yet"), "{nothing}");
    let mut job = world.start(&["resume", "ctr"]);
    job.until_training();
    world.run(&["stop", "ctr", "--now"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");
    fs::remove_dir_all(world.job_dir("ctr").join("checkpoint/ledger")).unwrap();
    let refused = world.run(&["resume", "ctr"]).failed(1);
    assert!(refused.contains("job \"ctr\" has not begun"), "{refused}");
}

#[test]
fn interrupts_stop_after_a_checkpoint_then_at_once() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    signal(job.child.id(), Signal::INT);
    job.until("a checkpoint", |e| e["event"] == "checkpoint");
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"stopped".into(), Some(0)));

    let mut job = world.start(&["train", &file]);
    job.until_training();
    signal(job.child.id(), Signal::INT);
    job.until("the stop", |e| e["event"] == "stopping");
    signal(job.child.id(), Signal::INT);
    assert_eq!(job.end().0["outcome"], "stopped");
}

#[test]
fn a_detached_job_outlives_its_client_and_ends_on_request() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", ENDLESS);
    let started = world.run(&["train", &file, "--detach", "--json"]);
    assert_eq!((started.code, &started.last_json()["event"]), (Some(0), &"detached".into()));
    wait_for("records", || (world.status("ctr")["records"].as_u64() > Some(0)).then_some(()));
    let processes = pids(&world.status("ctr"));
    assert_eq!(processes.len(), 4);
    world.run(&["stop", "ctr"]).ok();
    wait_for("all processes to end", || processes.iter().all(|pid| !is_alive(*pid)).then_some(()));
    assert!(world.run(&["status", "ctr"]).ok().contains("stopped"));
}

#[test]
fn missing_data_is_made_where_the_job_says_so() {
    let world = World::new();
    let file = world.job("ctr", "train: { batch: 256 }");
    let run = world.run(&["train", &file, "--set", "data.synth_rows=5000", "--json"]);
    assert_eq!(run.last_json()["records"], 5_000, "{}", run.stderr);
    assert!(
        run.stderr.contains("matches nothing: making 5,000 + 500 synthetic records in data"),
        "{}",
        run.stderr
    );
    assert!(world.path("data/truth.json").exists());
}

#[test]
fn one_job_runs_from_another_directory_too() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", "train: { batch: 256 }\noutput: model");
    let mut job = world.start(&["train", &file]);
    job.until("the start", |e| e["event"] == "started");
    world.run(&["stop", "ctr"]);
    job.end();
    fs::create_dir(world.path("elsewhere")).unwrap();
    let mut resume = world.command(&["resume", "ctr", "--json"]);
    let resumed = said(resume.current_dir(world.path("elsewhere")));
    // Stopped before its first batch there is no checkpoint; then there is nothing to resume.
    if resumed.code == Some(0) {
        assert_eq!(resumed.last_json()["records"], 5_000);
        assert!(world.path("model/manifest.json").exists(), "the output is where the job was submitted");
    }
}

#[test]
fn nothing_is_exported_before_there_is_a_checkpoint() {
    let world = World::with_data(20_000);
    let file = world.job("ctr", "train: { epochs: 50 }");
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let refused = world.run(&["export", "ctr", "--out", "early"]).failed(1);
    assert!(refused.contains("job \"ctr\" has no committed checkpoint"), "{refused}");
    assert!(!world.path("early").exists(), "untrained weights are no model");
    world.run(&["stop", "ctr", "--now"]).ok();
}
