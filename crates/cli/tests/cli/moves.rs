//! Partitions that move between servers while the job trains, and what dies meanwhile; then the audit, and a model that
//! counts.

use std::fs;
use std::process::Stdio;
use std::sync::Arc;

use elasticdl_data::{Batches, BatchesConfig};
use elasticdl_spec::placement::{partition_of_row, server_of_partition};
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::{Shard, TaskId};
use rustix::process::Signal;
use serde_json::Value;

use super::chaos::{audit, counting_these, every_row_is};
use super::failpoints::{hits, with_points};
use super::world::{Running, World, signal, wait_for};

/// So many ids that a partition of them is copied in several pieces.
const MANY: u64 = 80_000;
/// Passes over so many: far more than slow workers get to.
const MANY_EPOCHS: u32 = 24;
/// Each batch takes so long.
const SLOW: &str = "worker.compute=sleep:15ms@every";

fn scale(world: &World, servers: &str) -> String {
    world.run(&["scale", "count", "--servers", servers]).stderr
}

fn moved(job: &mut Running) -> Value {
    job.until("a move", |e| e["event"] == "moved")
}

#[test]
fn servers_come_and_go_while_the_job_trains_and_nothing_is_trained_again() {
    let (world, mut job) = slow("", &[]);
    assert!(scale(&world, "3").contains("count: 3 servers wanted, 2 before"));
    let first = moved(&mut job);
    assert_eq!(first["to"], 2, "{first}");
    let status = world.status("count");
    assert_eq!(status["servers"].as_array().unwrap().len(), 3, "{status}");
    scale(&world, "1");
    for _ in 0..2 {
        moved(&mut job);
    }
    let left = wait_for("the servers that are too many to leave", || {
        let servers = world.status("count")["servers"].clone();
        servers.as_array().filter(|servers| servers.len() == 1).cloned()
    });
    assert_eq!(left[0]["id"], 0);
    assert_eq!(ends_fast(&world, job), 0, "rows were carried over and not trained again");
}

/// A counting job with so many ids, whose workers are too slow to end it before whatever a test waits for, when most of
/// its rows are there.
pub(super) fn slow(points: &str, more: &[&str]) -> (World, Running) {
    let (world, file) = counting_these(&(0..MANY).collect::<Vec<_>>(), MANY_EPOCHS, "");
    let mut words = vec!["train", &file, "--json", "--set", "train.batch=256"];
    words.extend(more.iter().flat_map(|set| ["--set", *set]));
    let mut command = world.command(&words);
    with_points(&world, &mut command, &format!("{points};{SLOW}"));
    let mut job = Running::following(command.stdout(Stdio::piped()).spawn().unwrap());
    job.until("most rows", |e| e["event"] == "progress" && e["records"].as_u64() > Some(MANY));
    (world, job)
}

/// What a slow job has left is trained by fast workers; then all of it is there once. Returns how many records were
/// trained again, in all of its time.
pub(super) fn ends_fast(world: &World, job: Running) -> u64 {
    world.run(&["stop", "count"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");
    let (last, code) = world.start(&["resume", "count"]).end();
    assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{last}");
    every_row_is(world, MANY, MANY_EPOCHS as f32);
    audit(world, "count")["replayed"].as_u64().unwrap()
}

pub(super) fn pid(world: &World, server: u64) -> u32 {
    let servers = world.status("count")["servers"].clone();
    let found = servers.as_array().unwrap().iter().find(|one| one["id"] == server).cloned();
    found.unwrap_or_else(|| panic!("no server {server}: {servers}"))["pid"].as_u64().unwrap() as u32
}

/// A server has got to a point.
pub(super) fn is_hit(world: &World, point: &str) {
    wait_for(point, || hits(world).iter().any(|hit| hit == point).then_some(()));
}

/// Three servers are wanted, and the third is told to copy some partitions. Returns that event.
pub(super) fn growing(world: &World, job: &mut Running) -> Value {
    scale(world, "3");
    let moving = job.until("a move", |e| e["event"] == "moving");
    assert_eq!(moving["to"], 2, "{moving}");
    moving
}

/// The move that was begun is given up, and the next one is done.
fn is_done_later(job: &mut Running, moving: &Value) {
    let given_up = format!("partitions could not be moved from ps-{} to ps-2: a server died", moving["from"]);
    job.until("the move's end", |e| e["event"] == "warning" && e["message"] == given_up.as_str());
    assert_eq!(moved(job)["to"], 2);
}

#[test]
fn a_server_killed_while_it_copies_costs_nothing_and_the_next_one_copies_again() {
    let (world, mut job) = slow("ps.copying=kill", &[]);
    let moving = growing(&world, &mut job);
    is_done_later(&mut job, &moving);
    is_hit(&world, "ps.copying");
    assert_eq!(ends_fast(&world, job), 0, "what was to be moved stayed where it was");
}

#[test]
fn a_server_killed_while_it_is_copied_from_comes_back_and_is_copied_from_again() {
    let (world, mut job) = slow("ps.copied_from=kill", &[]);
    let moving = growing(&world, &mut job);
    let replay = job.until("the replay", |e| e["event"] == "replay");
    assert_eq!(replay["servers"][0], moving["from"], "{replay}");
    assert_eq!(moved(&mut job)["to"], 2);
    is_hit(&world, "ps.copied_from");
    assert_eq!(ends_fast(&world, job), replay["records"].as_u64().unwrap(), "trained again once");
}

#[test]
fn a_master_killed_while_rows_are_copied_costs_nothing_and_the_next_one_has_them_copied() {
    let (world, mut job) = slow("ps.copying=stop", &[]);
    growing(&world, &mut job);
    is_hit(&world, "ps.copying");
    let copier = pid(&world, 2);
    signal(world.master("count").1, Signal::KILL);
    let next = job.until("the next master", |e| e["event"] == "started" && e["term"] == 2);
    assert_eq!(next["adopted"], 5, "{next}");
    signal(copier, Signal::CONT);
    assert_eq!(moved(&mut job)["to"], 2);
    assert_eq!(ends_fast(&world, job), 0);
}

/// Goal: what nobody serves any more is replayed when the server that had it dies, and when the one dies that the ledger
/// has given it to.
#[test]
fn both_servers_killed_one_after_the_other_when_the_ledger_has_given_partitions_away() {
    let (world, mut job) = slow("ps.taking_over=sleep:1h", &[]);
    scale(&world, "3");
    job.until("a move", |e| e["event"] == "moving");
    is_hit(&world, "ps.taking_over");
    // By now the ledger says that they are the new server's, which waits for ever.
    signal(pid(&world, 0), Signal::KILL);
    job.until("the replay", |e| e["event"] == "replay");
    signal(pid(&world, 2), Signal::KILL);
    ends_fast(&world, job);
}

/// Ids whose rows are nearly all in partitions of the first of two servers.
fn lopsided() -> Vec<u64> {
    let (world, file) = counting_these(&[], 1, "");
    let text = fs::read_to_string(world.path(&file)).unwrap();
    let job = resolve(&Inputs { file: Some(&text), ..Inputs::default() }).unwrap().job;
    let candidates = 0..12_000u64;
    let lines: String = candidates.clone().map(|id| format!("{},id{id}\n", id % 2)).collect();
    world.write("ids.csv", &format!("label,id\n{lines}"));
    let path = world.path("ids.csv").display().to_string();
    let file = elasticdl_data::discover(std::slice::from_ref(&path), None).unwrap().remove(0);
    let shard = Shard { path, first: 0, records: None, offset: 0, fingerprint: file.fingerprint };
    let mut batches = Batches::open(BatchesConfig {
        task: TaskId::train(0, 0),
        shard,
        layout: Arc::new(job.data.layout),
        format: None,
        batch: 20_000,
        batches_per_block: 1,
        shuffle: false,
        seed: 0,
        first_batch: 0,
    })
    .unwrap();
    let (_, batch, _) = batches.next().unwrap().unwrap();
    let first_server = |hash: u64| server_of_partition(partition_of_row(hash, 4), 2).0 == 0;
    let chosen = candidates.zip(batch.ids).filter(|(id, hash)| first_server(*hash) || id.is_multiple_of(20));
    chosen.map(|(id, _)| id).collect()
}

/// Goal: nobody asks for it; a server that has nearly all to do is seen to have it, and gives a partition away.
#[test]
fn a_server_with_nearly_all_the_work_gives_a_partition_away_by_itself() {
    const EPOCHS: u32 = 40;
    let ids = lopsided();
    let (world, file) = counting_these(&ids, EPOCHS, "");
    let mut command = world.command(&["train", &file, "--json"]);
    with_points(&world, &mut command, SLOW);
    let mut job = Running::following(command.stdout(Stdio::piped()).spawn().unwrap());
    job.until_training();
    let loads = |server: usize| -> Vec<(String, u64)> {
        let loads = world.status("count")["servers"][server]["gauges"]["loads"].clone();
        let loads = loads.as_object().into_iter().flatten();
        loads.map(|(partition, load)| (partition.clone(), load.as_u64().unwrap())).collect()
    };
    let load = |server: usize| loads(server).iter().map(|(_, load)| load).sum::<u64>();
    wait_for("some work", || (load(0) > 5_000).then_some(()));
    assert!(load(0) > 5 * load(1), "ps-0 {:?}, ps-1 {:?}", loads(0), loads(1));
    let moving = job.until("a move", |e| e["event"] == "moving");
    assert_eq!((&moving["from"], &moving["to"]), (&0.into(), &1.into()), "{moving}");
    assert!(moving["seconds"].as_f64() >= Some(15.0), "not by the first impression: {moving}");
    let moved = moved(&mut job);
    let partition = moved["partitions"][0].as_u64().unwrap();
    assert!(
        moved["partitions"].as_array().unwrap().len() == 1 && partition.is_multiple_of(2),
        "one of two: {moved}"
    );
    // Both have a busy one now.
    wait_for("the partition at its new place, and nowhere else", || {
        let (old, new) = (loads(0), loads(1));
        let works = new.iter().any(|(id, load)| *id == partition.to_string() && *load > 0);
        (works && (old.len(), new.len()) == (1, 3)).then_some(())
    });
    world.run(&["stop", "count"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");
    let events = fs::read_to_string(world.job_dir("count").join("events.jsonl")).unwrap();
    assert_eq!((events.matches("servers_scaled").count(), events.matches("\"moved\"").count()), (0, 1));
    assert_eq!(world.start(&["resume", "count"]).end().0["outcome"], "done");
    assert_eq!(audit(&world, "count")["replayed"], 0);
    every_row_is(&world, ids.len() as u64, EPOCHS as f32);
}

#[test]
fn killed_before_partitions_are_handed_over() {
    killed_at("ps.taking_over");
}

#[test]
fn killed_when_partitions_are_handed_over_and_not_served() {
    killed_at("ps.handed_over");
}

fn killed_at(point: &str) {
    let (world, mut job) = slow(&format!("{point}=kill"), &[]);
    scale(&world, "3");
    job.until("the loss", |e| e["event"] == "replay");
    assert_eq!(hits(&world), ["worker.compute", point]);
    ends_fast(&world, job);
}

#[test]
fn a_master_killed_when_it_has_written_down_whose_partitions_are() {
    let (world, mut job) = slow("master.moved_recorded=kill", &[]);
    scale(&world, "3");
    let next = job.until("the next master", |e| e["event"] == "started" && e["term"] == 2);
    assert_eq!(next["adopted"], 5, "{next}");
    assert_eq!(hits(&world), ["worker.compute", "master.moved_recorded"]);
    ends_fast(&world, job);
}

#[test]
fn a_number_of_servers_that_cannot_be_is_refused() {
    let (world, mut job) = slow("", &[]);
    for wrong in ["0", "5"] {
        let said = world.run(&["scale", "count", "--servers", wrong]);
        assert_eq!(said.code, Some(1), "{}", said.stderr);
        let reason = format!("{wrong} servers are wanted; from 1 to servers.partitions = 4 are possible");
        assert!(said.stderr.contains(&reason), "{}", said.stderr);
    }
    let neither = world.run(&["scale", "count"]);
    assert!(neither.stderr.contains("--workers <N|auto>|--servers <N>"), "{}", neither.stderr);
    world.run(&["stop", "count", "--now"]).ok();
    job.child.wait().unwrap();
}
