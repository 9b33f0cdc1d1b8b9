//! A process killed at one certain point, shown to have been hit; then the audit, and a model that counts.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

use safetensors::SafeTensors;
use serde_json::Value;

use super::chaos::{audit, counting, every_row_is_right};
use super::world::{Running, World};

const EPOCHS: u32 = 3;

/// The command with these points; where they are noted is `hits` in the world.
pub(super) fn with_points<'c>(world: &World, command: &'c mut Command, points: &str) -> &'c mut Command {
    command.env("ELASTICDL_FAILPOINTS", points).env("ELASTICDL_FAILPOINTS_LOG", world.path("hits"))
}

/// The points that have acted.
pub(super) fn hits(world: &World) -> Vec<String> {
    let text = fs::read_to_string(world.path("hits")).unwrap_or_default();
    text.lines().map(|line| line.split(' ').next().unwrap_or_default().to_string()).collect()
}

/// Trains a job to its end with a point, and returns its last event and its exit code.
fn train(world: &World, file: &str, points: &str) -> (Value, Option<i32>) {
    let mut command = world.command(&["train", file, "--json"]);
    with_points(world, &mut command, points);
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    Running::following(child).end()
}

/// The counting job ends exactly although a process dies at this point.
fn exact_in_spite_of(point: &str, at: u32) {
    let (world, file) = counting(EPOCHS, "");
    let (last, code) = train(&world, &file, &format!("{point}=kill@{at}"));
    assert_eq!(hits(&world), [point], "the point was reached");
    assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{last}");
    audit(&world, "count");
    every_row_is_right(&world, EPOCHS);
}

#[test]
fn killed_between_the_applies_of_two_partitions() {
    exact_in_spite_of("ps.between_partitions", 500);
}

#[test]
fn killed_after_the_cut_of_a_checkpoint() {
    exact_in_spite_of("ps.cut", 2);
}

#[test]
fn killed_when_a_checkpoint_is_durable_and_nobody_knows() {
    exact_in_spite_of("ps.durable", 1);
}

#[test]
fn killed_when_the_manifest_is_written_and_the_ledger_does_not_know() {
    exact_in_spite_of("master.manifest_written", 1);
}

#[test]
fn killed_when_a_lease_is_recorded_and_not_given() {
    exact_in_spite_of("master.lease_recorded", 20);
}

#[test]
fn killed_between_the_last_acknowledgement_and_done() {
    exact_in_spite_of("worker.before_done", 5);
}

/// A deterministic job on the data in `data/`; its model ends in `NAME.model`.
pub(super) fn deterministic(world: &World, name: &str) -> String {
    deterministic_with(world, name, "")
}

/// The same with more settings.
fn deterministic_with(world: &World, name: &str, more: &str) -> String {
    let more = format!(
        "train: {{ batch: 128, epochs: 2, optimizer: adam, learning_rate: 0.01, staleness: 0 }}\n\
         servers: {{ count: 2, partitions: 4 }}\nworkers: {{ count: 1, max: 1 }}\ncheckpoint: {{ every: 300ms }}\n\
         output: {name}.model\n{more}"
    );
    world.job(name, &more)
}

/// A model's weights: rows by id, whatever their order in the file, and tensors by name.
#[derive(PartialEq)]
pub(super) struct Weights {
    rows: BTreeMap<u64, Vec<u8>>,
    tensors: BTreeMap<String, Vec<u8>>,
}

pub(super) fn weights(world: &World, name: &str) -> Weights {
    let bytes = fs::read(world.path(&format!("{name}.model")).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, Vec<u8>> =
        file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
    let (ids, rows) = (tensors.remove("embedding.ids").unwrap(), tensors.remove("embedding.rows").unwrap());
    let ids = ids.chunks_exact(8).map(|id| u64::from_le_bytes(id.try_into().unwrap()));
    let width = rows.len() / ids.len();
    Weights { rows: ids.zip(rows.chunks_exact(width).map(<[u8]>::to_vec)).collect(), tensors }
}

/// A deterministic job with these settings, undisturbed and hit at each of these points.
fn ends_with_the_same_bits(more: &str, points: &[&str]) {
    let world = World::with_data(20_000);
    world.run(&["train", &deterministic_with(&world, "calm", more)]).ok();
    let calm = weights(&world, "calm");
    for (n, point) in points.iter().enumerate() {
        let name = format!("hit{n}");
        let (last, code) = train(&world, &deterministic_with(&world, &name, more), point);
        assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{point}: {last}");
        assert_eq!(hits(&world).len(), n + 1, "{point} was reached");
        assert!(weights(&world, &name) == calm, "{point}: other weights than those of the undisturbed run");
        audit(&world, &name);
    }
}

#[test]
fn a_deterministic_job_ends_with_the_same_bits_wherever_it_is_hit() {
    let points = ["worker.staged=kill@40", "ps.between_partitions=kill@150", "master.lease_recorded=kill@15"];
    ends_with_the_same_bits("", &points);
}

/// Goal: counts of ids without a row, and whose row goes, are those of the pushes alone: the same rows are there in the end.
#[test]
fn a_table_with_a_bound_has_the_same_rows_wherever_its_job_is_hit() {
    let points = ["worker.staged=kill@40", "ps.between_partitions=kill@150", "ps.cut=kill@2"];
    ends_with_the_same_bits("tables: { '*': { memory_max: 256Ki, admit_after: 2 } }", &points);
}

/// Goal: killed when a batch is staged and nobody knows, or when a step is committed in one partition and not in the
/// next: the others see to it, and every record counts once.
#[test]
fn a_synchronous_job_is_exact_wherever_it_is_hit() {
    let world = World::with_data(20_000);
    let more = "train: { batch: 128, epochs: 2, consistency: synchronous, grads_to_wait: 3 }\n\
                servers: { count: 2, partitions: 4 }\nworkers: { count: 2 }\ncheckpoint: { every: 1s }";
    let points = ["worker.staged=kill@30", "ps.between_partitions=kill@60"];
    for (n, point) in points.iter().enumerate() {
        let name = format!("sync{n}");
        let (last, code) = train(&world, &world.job(&name, more), point);
        assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)), "{point}: {last}");
        assert_eq!(hits(&world).len(), n + 1, "{point} was reached");
        audit(&world, &name);
    }
}

#[test]
fn a_batch_that_fails_again_and_again_is_set_aside_and_everything_else_is_trained() {
    let world = World::with_data(20_000);
    let file = world.job("ctr", "train: { batch: 128 }\nworkers: { count: 2 }");
    let points = "worker.compute[train/0/3:2]=error@every";
    let (last, code) = train(&world, &file, points);
    assert_eq!(
        (&last["outcome"], &last["records"], code),
        (&"failed".into(), &19_872.into(), Some(3)),
        "{last}"
    );
    let error = last["error"].as_str().unwrap();
    assert!(error.contains("task train/0/3, batch 2: a failpoint says so"), "{error}");
    let audit: Value = serde_json::from_str(&world.run(&["audit", "ctr", "--json"]).ok()).unwrap();
    assert_eq!((&audit["exact"], &audit["set_aside"]), (&true.into(), &128.into()), "{audit}");

    let world = World::with_data(20_000);
    let file = world.job("ctr", "train: { batch: 128 }\nworkers: { count: 2 }");
    let text = fs::read_to_string(world.path(&file)).unwrap();
    let allowed = text.replace("batches_per_task: 4", "batches_per_task: 4, bad_records_max: 128");
    fs::write(world.path(&file), allowed).unwrap();
    let (last, code) = train(&world, &file, points);
    assert_eq!(
        (&last["outcome"], &last["bad_records"], code),
        (&"done".into(), &128.into(), Some(0)),
        "{last}"
    );
}
