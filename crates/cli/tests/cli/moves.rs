//! Partitions that move between servers while the job trains, and what dies meanwhile; then the audit, and a model that
//! counts.

use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;

use super::chaos::{audit, counting, every_row_is_right};
use super::failpoints::{hits, with_points};
use super::world::{Running, World, signal, wait_for};

/// Enough for some seconds.
const EPOCHS: u32 = 30;

/// The counting job, with points where processes die.
fn training(points: &str) -> (World, Running) {
    let (world, file) = counting(EPOCHS, "");
    let mut command = world.command(&["train", &file, "--json"]);
    with_points(&world, &mut command, points);
    let mut job = Running::following(command.stdout(Stdio::piped()).spawn().unwrap());
    job.until_training();
    (world, job)
}

fn scale(world: &World, servers: &str) -> String {
    world.run(&["scale", "count", "--servers", servers]).stderr
}

fn is_exact(world: &World, job: Running) {
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{last}");
    audit(world, "count");
    every_row_is_right(world, EPOCHS);
}

fn moved(job: &mut Running) -> Value {
    job.until("a move", |e| e["event"] == "moved")
}

#[test]
fn servers_come_and_go_while_the_job_trains_and_nothing_is_trained_again() {
    let (world, mut job) = training("");
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
    is_exact(&world, job);
    let audit: Value = serde_json::from_str(&world.run(&["audit", "count", "--json"]).ok()).unwrap();
    assert_eq!(audit["replayed"], 0, "rows were carried over and not trained again");
}

#[test]
fn a_server_killed_while_its_partitions_are_copied() {
    let (world, mut job) = training("ps.taking_over=sleep:1h");
    scale(&world, "3");
    job.until("a move", |e| e["event"] == "moving");
    wait_for("the point", || hits(&world).contains(&"ps.taking_over".to_string()).then_some(()));
    // By now the ledger says that they are the new server's, which waits for ever.
    let pid = |id: usize| world.status("count")["servers"][id]["pid"].as_u64().unwrap() as u32;
    signal(pid(0), Signal::KILL);
    job.until("the replay", |e| e["event"] == "replay");
    signal(pid(2), Signal::KILL);
    is_exact(&world, job);
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
    let (world, mut job) = training(&format!("{point}=kill"));
    scale(&world, "3");
    job.until("the loss", |e| e["event"] == "replay");
    assert_eq!(hits(&world), [point]);
    is_exact(&world, job);
}

#[test]
fn a_master_killed_when_it_has_written_down_whose_partitions_are() {
    let (world, mut job) = training("master.moved_recorded=kill");
    scale(&world, "3");
    let next = job.until("the next master", |e| e["event"] == "started" && e["term"] == 2);
    assert_eq!(next["adopted"], 5, "{next}");
    assert_eq!(hits(&world), ["master.moved_recorded"]);
    is_exact(&world, job);
}

#[test]
fn a_number_of_servers_that_cannot_be_is_refused() {
    let (world, mut job) = training("");
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
