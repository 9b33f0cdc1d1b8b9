//! Servers that die where each partition has a backup: nothing is trained again, and every record counts once.

use rustix::process::Signal;
use serde_json::Value;

use super::chaos::{CHAINS, adds, counting};
use super::failpoints::hits;
use super::moves::{ends_fast, is_hit, pid, slow};
use super::world::{World, signal, wait_for};

/// Waits until all partitions have their backups.
pub(super) fn backed_up(world: &World) {
    wait_for("backups", || {
        let status = world.status("count");
        assert_eq!(status["phase"], "training", "the job ends too soon for backups");
        (status["backups"]["there"] == status["backups"]["wanted"]).then_some(())
    });
}

pub(super) fn kill(world: &World, server: usize) {
    let pid = world.status("count")["servers"][server]["pid"].as_u64().unwrap();
    signal(pid as u32, Signal::KILL);
}

#[test]
fn servers_die_one_after_the_other_and_nothing_is_trained_again() {
    let (world, mut job) = slow("", &["servers.replicas=2"]);
    backed_up(&world);
    let shown = world.run(&["status", "count"]).ok();
    assert!(shown.contains("4 of 4 partitions backed up"), "{shown}");
    for server in [0, 1] {
        kill(&world, server);
        let promoted = job.until("the backups", |e| e["event"] == "promoted" || e["event"] == "replay");
        assert_eq!(
            (&promoted["event"], &promoted["from"]),
            (&"promoted".into(), &server.into()),
            "{promoted}"
        );
        // The next server of its number gets its share again, and all have backups.
        backed_up(&world);
    }
    assert_eq!(ends_fast(&world, job), 0);
}

#[test]
fn a_server_dies_with_a_batch_that_its_backup_may_not_have() {
    dies_at("ps.before_backup");
}

#[test]
fn a_server_dies_with_a_batch_that_its_backup_has_and_nobody_knows_of() {
    dies_at("ps.after_backup");
}

fn dies_at(point: &str) {
    let (world, mut job) = slow(&format!("{point}=kill@1500"), &["servers.replicas=2"]);
    let promoted = job.until("the backups", |e| e["event"] == "promoted" || e["event"] == "replay");
    assert_eq!(promoted["event"], "promoted", "{promoted}");
    assert_eq!(hits(&world), ["worker.compute", point]);
    assert_eq!(ends_fast(&world, job), 0);
}

/// Goal: a backup that is lost is made again while training goes on. Its server dies with what was its own, too.
#[test]
fn a_server_dies_when_its_backup_has_done_what_it_has_not_told() {
    let (world, mut job) = slow("ps.backup_done=kill@1500", &["servers.replicas=2"]);
    job.until("the backups", |e| e["event"] == "promoted");
    is_hit(&world, "ps.backup_done");
    backed_up(&world);
    assert_eq!(ends_fast(&world, job), 0);
}

/// Goal: what a stopped server has a backup of waits for a moment, goes on alone, and is backed up again.
#[test]
fn a_server_that_stands_still_is_given_up_as_a_backup() {
    let (world, job) = slow("", &["servers.replicas=2", "limits.silence=60s"]);
    backed_up(&world);
    let pid = world.status("count")["servers"][1]["pid"].as_u64().unwrap() as u32;
    signal(pid, Signal::STOP);
    let alone = |status: &Value| status["backups"]["there"].as_u64().filter(|there| *there < 4);
    wait_for("a partition that goes on alone", || alone(&world.status("count")));
    signal(pid, Signal::CONT);
    backed_up(&world);
    assert_eq!(ends_fast(&world, job), 0);
}

#[test]
fn a_master_and_a_server_die_together() {
    let (world, mut job) = slow("", &["servers.replicas=2"]);
    backed_up(&world);
    let (status, (_, master)) = (world.status("count"), world.master("count"));
    signal(master, Signal::STOP);
    kill_pid(&status, 0);
    signal(master, Signal::KILL);
    let next = job.until("the next master", |e| e["event"] == "started" && e["term"] == 2);
    assert_eq!(next["adopted"], 3, "{next}");
    job.until("the backups", |e| e["event"] == "promoted");
    assert_eq!(ends_fast(&world, job), 0);
}

fn kill_pid(status: &Value, server: usize) {
    signal(status["servers"][server]["pid"].as_u64().unwrap() as u32, Signal::KILL);
}

#[test]
fn backups_in_hybrid_mode_with_chains_of_checkpoints() {
    let hybrid = ["train.consistency=hybrid", "train.grads_to_wait=2"];
    let (world, mut job) = slow("", &[&["servers.replicas=2"], &hybrid[..], &CHAINS].concat());
    backed_up(&world);
    adds(&mut job);
    kill(&world, 0);
    job.until("the backups", |e| e["event"] == "promoted");
    assert_eq!(ends_fast(&world, job), 0);
}

#[test]
fn backups_follow_partitions_that_move() {
    let (world, mut job) = slow("", &["servers.replicas=2"]);
    backed_up(&world);
    world.run(&["scale", "count", "--servers", "3"]).ok();
    job.until("a move", |e| e["event"] == "moved");
    backed_up(&world);
    kill(&world, 2);
    job.until("the backups", |e| e["event"] == "promoted");
    let refused = world.run(&["scale", "count", "--servers", "1"]);
    assert!(refused.stderr.contains("from 2 to servers.partitions"), "{}", refused.stderr);
    assert_eq!(ends_fast(&world, job), 0);
}

/// Goal: while a server is copied from it dies. Its backups take over, the move is begun anew from where
/// the partitions are then, and all backups are made again while the job trains.
#[test]
fn a_server_dies_while_partitions_are_copied_from_it() {
    let (world, mut job) = slow("ps.copying=stop", &["servers.replicas=2"]);
    backed_up(&world);
    world.run(&["scale", "count", "--servers", "3"]).ok();
    let moving = job.until("a move", |e| e["event"] == "moving");
    is_hit(&world, "ps.copying");
    let (from, to) = (moving["from"].as_u64().unwrap(), moving["to"].as_u64().unwrap());
    let copier = pid(&world, to);
    signal(pid(&world, from), Signal::KILL);
    let promoted = job.until("the backups", |e| e["event"] == "promoted" || e["event"] == "replay");
    assert_eq!(
        (&promoted["event"], promoted["from"].as_u64()),
        (&"promoted".into(), Some(from)),
        "{promoted}"
    );
    signal(copier, Signal::CONT);
    let again = job.until("the next move", |e| e["event"] == "moved");
    assert_eq!(again["from"], 1 - from, "from where the backups took over: {again}");
    is_rebuilt_while_the_job_trains(&world);
    assert_eq!(ends_fast(&world, job), 0);
}

/// Goal: somebody dies in the middle of a move of partitions that have backups. Their rows are with their old server, with
/// the new one or with a backup, and nowhere twice.
#[test]
fn whoever_dies_of_a_move_of_what_has_backups_every_record_counts_once() {
    for (point, then) in [
        ("ps.taking_over", "server_exited"),
        ("ps.handed_over", "server_exited"),
        ("master.moved_recorded", "leasing"),
    ] {
        let (world, mut job) = slow(&format!("{point}=kill"), &["servers.replicas=2"]);
        backed_up(&world);
        world.run(&["scale", "count", "--servers", "3"]).ok();
        job.until(then, |e| e["event"] == then);
        assert_eq!(hits(&world).iter().filter(|hit| *hit == point).count(), 1, "{point}");
        backed_up(&world);
        ends_fast(&world, job);
    }
}

/// Goal: backups of many rows are being made again when the one dies that makes them, and has partitions of its own.
#[test]
fn a_server_dies_while_it_makes_backups_again() {
    let (world, mut job) = slow("ps.copying_backup=kill", &["servers.replicas=2"]);
    backed_up(&world);
    kill(&world, 0);
    job.until("the backups", |e| e["event"] == "promoted");
    is_hit(&world, "ps.copying_backup");
    is_rebuilt_while_the_job_trains(&world);
    ends_fast(&world, job);
}

/// Every partition has a backup again, and records were trained before and after.
fn is_rebuilt_while_the_job_trains(world: &World) {
    let records = || {
        let status = world.status("count");
        assert_eq!(status["phase"], "training");
        status["records"].as_u64().unwrap()
    };
    let before = records();
    backed_up(world);
    let then = records();
    assert!(then > before);
    wait_for("more records", || (records() > then).then_some(()));
}

#[test]
fn backups_that_cannot_be_are_refused() {
    let (world, file) = counting(1, "");
    for (sets, said) in [
        (&["servers.count=1"][..], "2 replicas take two servers"),
        (&["train.consistency=synchronous"], "a server's death takes all partitions back to one step"),
        (&["train.staleness=0", "workers.max=1"], "a server's death takes all partitions back to one step"),
        (&["servers.replicas=3"], "this takes a whole number from 1 to 2"),
    ] {
        let mut words = vec!["train", &file, "--set", "servers.replicas=2"];
        words.extend(sets.iter().flat_map(|set| ["--set", *set]));
        let outcome = world.run(&words);
        assert!(outcome.code != Some(0) && outcome.stderr.contains(said), "{sets:?}: {}", outcome.stderr);
    }
}
