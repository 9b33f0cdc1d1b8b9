//! Any process killed with SIGKILL or paused while the job trains; then the audit, and a model that counts.

use std::path::{Path, PathBuf};
use std::{fs, io};

use elasticdl_ps::checkpoint::{Layer, Piece, Reader, Sum};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::backups::{backed_up, kill};
use super::moves::{ends_fast, growing, slow};
use super::world::{Running, World, pids, said, signal, wait_for};

/// A few seconds of work for two workers and two servers, with a checkpoint each second.
const WORK: &str = "train: { batch: 128, epochs: 20 }\nservers: { count: 2, partitions: 4 }\nworkers: { count: 2 }\n\
                    checkpoint: { every: 1s }";
/// What that is in records.
const RECORDS: u64 = 1_200_000;

/// A job that trains.
fn training(world: &World) -> Running {
    let file = world.job("ctr", WORK);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    job
}

/// The audit of a job that is over and exact.
pub(super) fn audit(world: &World, job: &str) -> Value {
    let audit: Value = serde_json::from_str(&world.run(&["audit", job, "--json"]).ok()).unwrap();
    let figures = json!([audit["exact"], audit["lost"], audit["doubled"], audit["complete"]]);
    assert_eq!(figures, json!([true, 0, 0, true]), "{audit}");
    audit
}

/// The job ends well with every record trained, and the audit proves it.
fn ends_exactly(world: &World, job: Running) -> Value {
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], &last["records"], code), (&"done".into(), &RECORDS.into(), Some(0)));
    let audit = audit(world, "ctr");
    let epochs = audit["epochs"].as_array().unwrap();
    assert_eq!(epochs.len() as u64, RECORDS / 60_000);
    for epoch in epochs {
        assert_eq!((&epoch["expected"], &epoch["applied_min"]), (&60_000.into(), &60_000.into()), "{epoch}");
        assert_eq!(epoch["partitions"].as_array().unwrap().len(), 4);
    }
    audit
}

#[test]
fn a_killed_master_is_started_again_takes_over_what_runs_and_every_record_counts_once() {
    let world = World::with_data(60_000);
    let mut job = training(&world);
    let (before, (address, master)) = (pids(&world.status("ctr")), world.master("ctr"));
    assert_eq!(before.len(), 4);
    signal(master, Signal::KILL);
    let status = world.status("ctr");
    assert_eq!(
        (&status["term"], pids(&status)),
        (&2.into(), before),
        "asked in the gap, and nobody was replaced"
    );
    let started = job.until("the next master", |e| e["event"] == "started");
    assert_eq!((&started["term"], &started["adopted"]), (&2.into(), &4.into()));
    let (address_now, master_now) = world.master("ctr");
    assert_eq!(address_now, address);
    assert_ne!(master_now, master);
    let audit = ends_exactly(&world, job);
    assert_eq!(audit["replayed"], 0, "no server died");
}

#[test]
fn a_killed_server_gets_back_what_it_lost_and_every_record_counts_once() {
    let world = World::with_data(60_000);
    let mut job = training(&world);
    let checkpoint = job.until("a checkpoint", |e| e["event"] == "checkpoint");
    let covered = checkpoint["records"].as_u64().unwrap();
    let more = |e: &Value| e["event"] == "progress" && e["records"].as_u64() > Some(covered + 10_000);
    job.until("more than the checkpoint covers", more);
    let server = world.status("ctr")["servers"][0]["pid"].as_u64().unwrap() as u32;
    signal(server, Signal::KILL);
    job.until("the death", |e| e["event"] == "server_exited" && e["asked"] == false);
    let replay = job.until("the replay", |e| e["event"] == "replay");
    assert!(replay["records"].as_u64() > Some(0), "{replay}");
    job.until("the end of the replay", |e| e["event"] == "replayed");
    let audit = ends_exactly(&world, job);
    assert!(audit["replayed"].as_u64() > Some(0), "{audit}");
    let of = |partition: usize| -> u64 {
        let epochs = audit["epochs"].as_array().unwrap().iter();
        epochs.map(|epoch| epoch["partitions"][partition]["replayed"].as_u64().unwrap()).sum()
    };
    assert!((0..4).any(|p| of(p) > 0) && (0..4).any(|p| of(p) == 0), "only what was lost: {audit}");
    let table = world.run(&["audit", "ctr"]).ok();
    assert!(table.contains("exact: every record counts once in every partition"), "{table}");
}

#[test]
fn a_resumed_job_adopts_its_workers_and_servers_after_client_and_master_were_killed() {
    let world = World::with_data(60_000);
    let mut job = training(&world);
    let before = pids(&world.status("ctr"));
    // A client that is alive would start the master again, and a master whose client is gone would stop.
    signal(job.child.id(), Signal::STOP);
    signal(world.master("ctr").1, Signal::KILL);
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    // What is killed holds the job until it is gone.
    wait_for("the master's end", || (world.status("ctr")["phase"] == "lost").then_some(()));
    let mut resumed = world.start(&["resume", "ctr"]);
    let started = resumed.until("the next master", |e| e["event"] == "started");
    assert_eq!((&started["term"], &started["adopted"]), (&2.into(), &4.into()));
    assert_eq!(pids(&world.status("ctr")), before);
    ends_exactly(&world, resumed);
}

#[test]
fn a_paused_master_is_not_started_twice_and_what_was_paused_goes_on() {
    let world = World::with_data(60_000);
    let mut job = training(&world);
    let (_, master) = world.master("ctr");
    let args = "chaos ctr --pause master --every 10ms --for 1s --pause-for 700ms --json";
    let chaos = world.run(&args.split(' ').collect::<Vec<_>>());
    let told = chaos.last_json();
    assert_eq!((chaos.code, &told["hits"][0]["victim"]), (Some(0), &"master".into()), "{}", chaos.stderr);
    assert_eq!(told["hits"][0]["pid"], master);
    assert_eq!(world.master("ctr").1, master);
    job.until("more", |e| e["event"] == "progress");
    ends_exactly(&world, job);
    let events = fs::read_to_string(world.job_dir("ctr").join("events.jsonl")).unwrap();
    assert_eq!(events.matches("\"event\":\"started\"").count(), 1);
}

#[test]
fn an_interrupted_chaos_lets_go_of_what_it_paused() {
    let world = World::with_data(60_000);
    let job = training(&world);
    let args = ["chaos", "ctr", "--pause", "worker,server", "--every", "10ms", "--pause-for", "1h"];
    let mut chaos = world.command(&args).stdout(std::process::Stdio::null()).spawn().unwrap();
    let all = pids(&world.status("ctr"));
    wait_for("a paused process", || all.iter().any(|pid| state(*pid) == Some('T')).then_some(()));
    signal(chaos.id(), Signal::INT);
    assert_eq!(chaos.wait().unwrap().code(), Some(0));
    assert!(all.iter().all(|pid| state(*pid) != Some('T')));
    ends_exactly(&world, job);
}

/// How the kernel sees a process: R, S, T …
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Passes over the data of the counting job.
const EPOCHS: u32 = 40;
/// Ids to count, each in one record.
const IDS: u64 = 20_000;

/// A world whose records have an id each, and a job that counts them.
pub(super) fn counting(epochs: u32, more: &str) -> (World, String) {
    counting_these(&(0..IDS).collect::<Vec<_>>(), epochs, more)
}

/// The same with these ids.
pub(super) fn counting_these(ids: &[u64], epochs: u32, more: &str) -> (World, String) {
    let world = World::new();
    for file in 0..4 {
        let lines: String =
            ids.iter().filter(|id| *id % 4 == file).map(|id| format!("{},id{id}\n", id % 2)).collect();
        world.write(&format!("data/part-{file}.csv"), &format!("label,id\n{lines}"));
    }
    let text = format!(
        "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: count }}\nspec:\n  \
         model: {{ zoo: counting }}\n  \
         data: {{ train: data/*.csv, layout: custom, label: label, categorical: [id], batches_per_task: 8 }}\n  \
         train: {{ batch: 16, epochs: {epochs}, optimizer: sgd, learning_rate: 1 }}\n  \
         servers: {{ count: 2, partitions: 4 }}\n  workers: {{ count: 2 }}\n  checkpoint: {{ every: 500ms }}\n  {more}\n"
    );
    world.write("count.yaml", &text);
    (world, "count.yaml".into())
}

/// The newest committed checkpoint of a job.
pub(super) fn newest_checkpoint(dir: &Path) -> io::Result<PathBuf> {
    let mut complete: Vec<PathBuf> = fs::read_dir(dir)?.flatten().map(|entry| entry.path()).collect();
    complete.retain(|path| path.join("manifest.json").exists());
    complete.sort();
    complete.pop().ok_or(io::ErrorKind::NotFound.into())
}

/// Every row of the final checkpoint is the number of epochs, and there is one for every id.
pub(super) fn every_row_is_right(world: &World, epochs: u32) {
    every_row_is(world, IDS, epochs as f32);
}

/// Every row of the final checkpoint is this number, and there are so many.
pub(super) fn every_row_is(world: &World, rows: u64, weight: f32) {
    each_row(&newest_checkpoint(&world.job_dir("count").join("checkpoint")).unwrap(), rows, weight);
}

/// The same as [`every_row_is_right`] of a certain checkpoint.
pub(super) fn every_row_of(dir: &Path, epochs: u32) {
    each_row(dir, IDS, epochs as f32);
}

fn each_row(dir: &Path, rows: u64, expected: f32) {
    let mut found = 0;
    let reader = Reader::open(chains(dir)).unwrap();
    reader.verify().unwrap();
    let visited = reader.visit(|piece| {
        if let Piece::Rows { ids, weights, .. } = piece {
            found += ids.len() as u64;
            let wrong = ids.iter().zip(weights).find(|(_, weight)| **weight != expected);
            assert_eq!(wrong, None, "a row that is another number than {expected}");
        }
        Ok::<(), elasticdl_ps::Error>(())
    });
    visited.unwrap();
    assert_eq!(found, rows);
}

/// The files of every partition, as the manifest in `dir` says.
pub(super) fn chains(dir: &Path) -> Vec<Vec<Layer>> {
    let text = elasticdl_storage::read(dir.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let layer = |file: &Value, checkpoint: u64| Layer {
        checkpoint,
        dir: dir.with_file_name(format!("checkpoint-{checkpoint:06}")),
        sum: Sum { bytes: number(file, "bytes"), crc32: number(file, "crc32") as u32 },
    };
    let partitions = manifest["partitions"].as_object().unwrap();
    let chain = |file: &Value| {
        let earlier = file["earlier"].as_array().into_iter().flatten();
        let earlier = earlier.map(|file| layer(file, number(file, "checkpoint")));
        earlier.chain([layer(file, number(&manifest, "id"))]).collect()
    };
    (0..partitions.len()).map(|partition| chain(&partitions[&partition.to_string()])).collect()
}

#[test]
fn whatever_dies_every_record_is_counted_exactly_once_per_epoch() {
    let (world, file) = counting(EPOCHS, "");
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let member = |list: &str| world.status("count")[list][0]["pid"].as_u64().unwrap() as u32;
    signal(member("workers"), Signal::KILL);
    job.until("a new worker", |e| e["event"] == "worker_joined");
    job.until("a checkpoint", |e| e["event"] == "checkpoint");
    signal(member("servers"), Signal::KILL);
    job.until("the server", |e| e["event"] == "server_ready");
    signal(world.master("count").1, Signal::KILL);
    job.until("leases of the next master", |e| e["event"] == "leasing");
    let (last, code) = job.end();
    let records = IDS * u64::from(EPOCHS);
    assert_eq!((&last["outcome"], &last["records"], code), (&"done".into(), &records.into(), Some(0)));
    audit(&world, "count");
    every_row_is_right(&world, EPOCHS);
}

/// Kills processes of every role while the job trains.
pub(super) fn hits_every_role(world: &World, job: &str) {
    let args = format!("chaos {job} --kill worker,server,master --every 400ms --for 4s --seed 7 --json");
    let chaos = world.run(&args.split(' ').collect::<Vec<_>>());
    assert_eq!(chaos.code, Some(0), "{}", chaos.stderr);
    let told = chaos.last_json();
    let hits = told["hits"].as_array().unwrap();
    for role in ["worker-", "ps-", "master"] {
        let hit = hits.iter().find(|hit| hit["victim"].as_str().unwrap().starts_with(role));
        let hit = hit.unwrap_or_else(|| panic!("nobody hit {role}: {told}"));
        let figure = if role == "master" { "regroup" } else { "detect" };
        assert!(hit[figure].is_number(), "{hit}");
    }
}

/// The slow counting job with these settings is hit in every role, and ends exactly.
fn is_exact_in_chaos(sets: &[&str], meanwhile: impl FnOnce(&World, &mut Running)) {
    let (world, mut job) = slow("", &[&["limits.restarts=50"], sets].concat());
    meanwhile(&world, &mut job);
    hits_every_role(&world, "count");
    ends_fast(&world, job);
}

#[test]
fn chaos_hits_every_role_and_the_job_ends_exactly() {
    is_exact_in_chaos(&[], |_, _| {});
}

#[test]
fn chaos_hits_every_role_of_a_hybrid_job_with_chains_of_checkpoints() {
    let sets = ["train.consistency=hybrid", "train.grads_to_wait=2", CHAINS[0], CHAINS[1]];
    is_exact_in_chaos(&sets, |_, job| adds(job));
}

#[test]
fn chaos_hits_every_role_of_a_job_with_backups_whose_partitions_move() {
    is_exact_in_chaos(&["servers.replicas=2", CHAINS[0], CHAINS[1]], |world, job| {
        world.run(&["scale", "count", "--servers", "3"]).ok();
        job.until("a move", |e| e["event"] == "moved");
        adds(job);
        backed_up(world);
        kill(world, 0);
        job.until("the backups", |e| e["event"] == "promoted");
    });
}

/// So often that not every row has changed, and most of them hold what has.
pub(super) const CHAINS: [&str; 2] = ["checkpoint.every=100ms", "checkpoint.full_every=3"];

/// Waits for a checkpoint that adds to another one.
pub(super) fn adds(job: &mut Running) {
    job.until("a checkpoint that adds to another", |e| e["event"] == "checkpoint" && e["adding"] != 0);
}

fn events(world: &World) -> Vec<Value> {
    let text = fs::read_to_string(world.job_dir("count").join("events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How the master says that partitions did not get to another server.
const GIVEN_UP: [&str; 2] = ["could not be moved", "were lost on their way"];

/// Goal: somebody dies while partitions are on their way to another server, whoever it is and however far they are.
#[test]
fn chaos_hits_processes_while_partitions_move() {
    // A partition is copied in three pieces, with a point after each but the last.
    let (world, mut job) = slow("ps.copying=sleep:700ms@every", &["limits.restarts=50"]);
    growing(&world, &mut job);
    world.run(&["scale", "count", "--servers", "4"]).ok();
    hits_every_role(&world, "count");
    let (mut moving, mut died) = (false, 0);
    for event in events(&world) {
        let message = event["message"].as_str().unwrap_or_default();
        match event["event"].as_str().unwrap() {
            "moving" => moving = true,
            "moved" => moving = false,
            "warning" if GIVEN_UP.iter().any(|end| message.contains(end)) => moving = false,
            "worker_exited" | "server_exited" if event["asked"] == false => died += usize::from(moving),
            // The next master begins with none.
            "started" => died += usize::from(std::mem::take(&mut moving)),
            _ => {}
        }
    }
    assert!(died > 0, "nobody died in the middle of a move");
    assert!(ends_fast(&world, job) > 0, "a server died");
}

#[test]
fn chaos_does_not_kill_a_master_that_nobody_would_start_again() {
    let world = World::with_data(60_000);
    let file = world.job("ctr", WORK);
    world.run(&["train", &file, "--detach"]).ok();
    let refused = world.run(&["chaos", "ctr", "--kill", "master"]).failed(1);
    assert!(refused.contains("nobody would start the master of \"ctr\" again"), "{refused}");
    world.run(&["stop", "ctr", "--now"]).ok();
    let over = world.run(&["chaos", "ctr", "--kill", "worker"]).failed(1);
    assert!(over.contains("job \"ctr\" is not running"), "{over}");
    let nothing = said(&mut world.command(&["chaos", "ctr"])).failed(1);
    assert!(nothing.contains("--kill <ROLES>"), "{nothing}");
}

/// Goal: servers go on from chains of files, and from chains that were added to by servers that had gone on from one.
#[test]
fn servers_that_die_while_checkpoints_add_to_earlier_ones_lose_nothing() {
    const EPOCHS: u32 = 30;
    let (world, file) = counting(EPOCHS, "");
    let often =
        ["--set", "checkpoint.every=100ms", "--set", "checkpoint.full_every=4", "--set", "checkpoint.keep=1"];
    let mut job = world.start(&[&["train", &file][..], &often].concat());
    job.until_training();
    for server in [0, 1, 0] {
        adds(&mut job);
        let status = world.status("count");
        let pid = status["servers"][server]["pid"].as_u64();
        signal(pid.unwrap_or_else(|| panic!("ps-{server} is there: {status}")) as u32, Signal::KILL);
        job.until("the next one", |e| e["event"] == "server_ready" && e["server"] == server);
    }
    let (last, code) = job.end();
    let records = IDS * u64::from(EPOCHS);
    assert_eq!((&last["outcome"], &last["records"], code), (&"done".into(), &records.into(), Some(0)));
    audit(&world, "count");
    every_row_is_right(&world, EPOCHS);
    kept_files_are_those_that_the_newest_needs(&world.job_dir("count").join("checkpoint"));
}

/// With `checkpoint.keep: 1` nothing else is left.
fn kept_files_are_those_that_the_newest_needs(dir: &Path) {
    let needed = |partition: usize, chain: Vec<Layer>| {
        chain.into_iter().map(move |layer| layer.dir.join(format!("partition-{partition:03}.arrow")))
    };
    let chains = chains(&newest_checkpoint(dir).unwrap()).into_iter().enumerate();
    let mut needed: Vec<PathBuf> = chains.flat_map(|(partition, chain)| needed(partition, chain)).collect();
    let mut found = Vec::new();
    for checkpoint in fs::read_dir(dir).unwrap().flatten() {
        if checkpoint.file_name().to_string_lossy().starts_with("checkpoint-") {
            let files = fs::read_dir(checkpoint.path()).unwrap().flatten().map(|file| file.path());
            found.extend(files.filter(|file| file.extension().is_some_and(|kind| kind == "arrow")));
        }
    }
    needed.sort();
    found.sort();
    assert_eq!(found, needed);
}
