//! Jobs that were stopped and go on with other numbers of servers and workers.

use std::process::Stdio;

use serde_json::Value;

use super::chaos::{audit, counting, every_row_is_right};
use super::failpoints::{deterministic, hits, weights, with_points};
use super::world::{Running, World, wait_for};

/// Trains a job for so many records more, with so long a pause before each batch, and stops it. Returns how many there
/// are then, and how many workers and partitions by server there were.
fn trained_on(world: &World, words: &[&str], pause: &str, more: u64) -> (u64, usize, Vec<usize>) {
    let job = if words[0] == "train" { words[1].trim_end_matches(".yaml") } else { words[1] };
    let mut command = world.command(words);
    command.env("ELASTICDL_FAILPOINTS", format!("worker.compute=sleep:{pause}@every")).stdout(Stdio::piped());
    let mut running = Running::following(command.arg("--json").spawn().unwrap());
    let before = running.until("training", |e| e["event"] == "training")["records"].as_u64().unwrap();
    let enough = |e: &Value| e["event"] == "progress" && e["records"].as_u64() >= Some(before + more);
    running.until("some records", enough);
    let held = |server: &Value| server["gauges"]["loads"].as_object().map(|loads| loads.len());
    let (workers, held) = wait_for("word of all servers", || {
        let status = world.status(job);
        let held: Option<Vec<usize>> = status["servers"].as_array()?.iter().map(held).collect();
        Some((status["workers"].as_array()?.len(), held?))
    });
    world.run(&["stop", job]).ok();
    let (last, _) = running.end();
    assert_eq!(last["outcome"], "stopped", "{last}");
    (last["records"].as_u64().unwrap(), workers, held)
}

#[test]
fn a_job_goes_on_with_more_servers_and_with_fewer_and_nothing_is_trained_again() {
    const EPOCHS: u32 = 40;
    let (world, file) = counting(EPOCHS, "");
    let train = ["train", &file, "--set", "train.batch=128"];
    let (_, workers, held) = trained_on(&world, &train, "5ms", 25_000);
    assert_eq!((workers, held), (2, vec![2, 2]));
    let resume = ["resume", "count", "--servers", "3", "--workers", "1"];
    let (_, workers, held) = trained_on(&world, &resume, "5ms", 25_000);
    assert_eq!((workers, held), (1, vec![2, 1, 1]));
    // Numbers that were asked for stay.
    let (records, workers, held) = trained_on(&world, &["resume", "count"], "5ms", 1);
    assert_eq!((workers, held), (1, vec![2, 1, 1]));
    assert!(records < u64::from(20_000 * EPOCHS), "there is something left to train: {records}");
    let words = ["resume", "count", "--servers", "1", "--workers", "auto", "--json"];
    let last = world.run(&words).last_json();
    assert_eq!((&last["outcome"], &last["records"]), (&"done".into(), &(20_000 * EPOCHS).into()), "{last}");
    assert_eq!(audit(&world, "count")["replayed"], 0);
    every_row_is_right(&world, EPOCHS);
}

/// Goal: rows, Adam's slots, tensors and marks are what they were on any number of servers: to the bit, all that comes
/// after is what it is in a job that was never stopped.
#[test]
fn a_job_that_went_on_with_other_numbers_of_servers_ends_with_the_same_bits() {
    let world = World::with_data(20_000);
    world.run(&["train", &deterministic(&world, "calm")]).ok();
    let file = deterministic(&world, "moved");
    let (_, _, held) = trained_on(&world, &["train", &file], "60ms", 5_000);
    assert_eq!(held, [2, 2]);
    let (records, _, held) = trained_on(&world, &["resume", "moved", "--servers", "3"], "60ms", 5_000);
    assert_eq!(held, [2, 1, 1]);
    assert!(records < 40_000, "there is something left to train: {records}");
    world.run(&["resume", "moved", "--servers", "1"]).ok();
    assert!(weights(&world, "moved") == weights(&world, "calm"), "other weights than those of the calm job");
    audit(&world, "moved");
}

/// Goal: a master that dies before it has written down what it was told to have is followed by one that is told as well.
#[test]
fn numbers_that_a_master_took_along_when_it_died_hold_for_the_next_one() {
    const EPOCHS: u32 = 20;
    let (world, file) = counting(EPOCHS, "");
    trained_on(&world, &["train", &file, "--set", "train.batch=128"], "5ms", 5_000);
    let mut command = world.command(&["resume", "count", "--servers", "3", "--json"]);
    with_points(&world, &mut command, "master.term_claimed=kill@1");
    let mut job = Running::following(command.stdout(Stdio::piped()).spawn().unwrap());
    let started = job.until("the next master", |e| e["event"] == "started");
    assert_eq!((hits(&world), &started["term"]), (vec!["master.term_claimed".to_string()], &3.into()));
    let servers = || world.status("count")["servers"].as_array().map(Vec::len);
    wait_for("three servers", || servers().filter(|servers| *servers == 3));
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{last}");
    assert_eq!(audit(&world, "count")["replayed"], 0);
    every_row_is_right(&world, EPOCHS);
}

#[test]
fn a_job_does_not_resume_with_numbers_that_it_cannot_have() {
    let (world, file) = counting(1, "");
    world.run(&["train", &file]).ok();
    for (flag, number, said) in [
        ("--servers", "0", "0 servers are wanted; from 1 to servers.partitions = 4 are possible"),
        ("--servers", "5", "5 servers are wanted; from 1 to servers.partitions = 4 are possible"),
        ("--workers", "0", "0 workers are wanted; from 1 to workers.max = 16 are possible"),
        ("--workers", "many", "a whole number or auto is wanted"),
    ] {
        let refused = world.run(&["resume", "count", flag, number]).failed(1);
        assert!(refused.contains(said), "{refused}");
    }
    let program = "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: { name: own }\nspec: { command: { run: [\"true\"] } }\n";
    world.write("own.yaml", program);
    world.run(&["train", "own.yaml"]).ok();
    let refused = world.run(&["resume", "own", "--workers", "2"]).failed(1);
    assert!(refused.contains("runs a program of its own, and its file says how many members"), "{refused}");
}
