//! A committed checkpoint is complete and restorable, and in each of its files marks, counters, rows and
//! tensors tell the same story.

use std::collections::BTreeMap;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::tasks::Done;
use elasticdl_ps::Partition;
use elasticdl_ps::audit::{Tally, digest};
use elasticdl_ps::checkpoint::{Sum, decode, decode_head};
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::{PartitionId, TaskId};

use crate::disk::Disk;
use crate::scenario::Scenario;

/// Checks the checkpoint `id`, of which the ledger says that it covers these tasks.
///
/// # Errors
///
/// What is wrong with it.
pub fn check(scenario: &Scenario, disk: &Disk, id: u64, covered: &Done) -> Result<(), String> {
    let (manifest, partitions) = restore(scenario, disk, id)?;
    if manifest.done != *covered {
        return Err(format!("checkpoint {id} covers other tasks than the ledger says"));
    }
    for partition in &partitions {
        let wrong = |reason: String| format!("checkpoint {id}, {}: {reason}", partition.id());
        check_covered(scenario, partition, covered).map_err(wrong)?;
        check_partition(scenario, partition).map_err(wrong)?;
    }
    Ok(())
}

/// Opens all partitions of a checkpoint as a server would.
///
/// # Errors
///
/// One of them cannot be opened.
pub fn restore(scenario: &Scenario, disk: &Disk, id: u64) -> Result<(Manifest, Vec<Partition>), String> {
    let dir = disk.checkpoint(id).ok_or(format!("checkpoint {id} is not on disk"))?;
    let manifest = dir.manifest().map_err(|reason| format!("checkpoint {id}: {reason}"))?;
    let mut partitions = Vec::new();
    for partition in 0..scenario.partitions() {
        let wrong = |reason: String| format!("checkpoint {id}, partition {partition}: {reason}");
        let file = manifest.partitions.get(&partition).ok_or_else(|| wrong("not in the manifest".into()))?;
        let bytes = dir.files.get(&partition).ok_or_else(|| wrong("its file is not on disk".into()))?;
        let sum = Sum { bytes: file.bytes, crc32: file.crc32 };
        let incarnation = decode_head(bytes).map_err(|e| wrong(e.chain()))?.incarnation;
        if incarnation != file.incarnation {
            return Err(wrong(format!("cut in life {incarnation}, and the manifest says {}", file.incarnation)));
        }
        let restored = decode(&scenario.model, bytes, PartitionId(partition), incarnation, sum);
        partitions.push(restored.map_err(|e| wrong(e.chain()))?);
    }
    Ok((manifest, partitions))
}

/// Every covered task is at its end.
fn check_covered(scenario: &Scenario, partition: &Partition, covered: &Done) -> Result<(), String> {
    for epoch in 0..scenario.plan.job.train.epochs {
        for shard in 0..scenario.shards.len() as u32 {
            let task = TaskId::train(epoch, shard);
            let (applied, all) = (applied(scenario, partition, task), batches(scenario, task));
            if applied > all {
                return Err(format!("{task} has {all} batches, and the mark is {applied}"));
            }
            if covered.contains(task) && applied < all {
                return Err(format!("{task} is covered, and the file has {applied} of its {all} batches"));
            }
        }
    }
    Ok(())
}

/// Rows, tensors and counters are what the marks say.
fn check_partition(scenario: &Scenario, partition: &Partition) -> Result<(), String> {
    let mut tallies: BTreeMap<u32, Tally> = BTreeMap::new();
    let mut rows: BTreeMap<u64, u32> = BTreeMap::new();
    let mut pushes = 0;
    for epoch in 0..scenario.plan.job.train.epochs {
        for (number, shard) in scenario.shards.iter().enumerate() {
            let task = TaskId::train(epoch, number as u32);
            for batch in 0..applied(scenario, partition, task) {
                let records = scenario.records(shard, batch);
                let tally = tallies.entry(epoch).or_default();
                tally.records += records.end - records.start;
                tally.batches += 1;
                tally.digest = tally.digest.wrapping_add(digest(task, batch));
                pushes += 1;
                records.for_each(|record| *rows.entry(record).or_default() += 1);
            }
        }
    }
    if partition.memory().audit.epochs() != &tallies {
        return Err(format!("it has applied {:?}, and its marks say {tallies:?}", partition.memory().audit.epochs()));
    }
    check_rows(scenario, partition, &rows)?;
    let counted = partition.tensors().iter().flat_map(|tensor| tensor.values());
    match counted.copied().find(|value| *value != pushes as f32) {
        None => Ok(()),
        Some(value) => Err(format!("its tensor has counted {value} batches, and its marks say {pushes}")),
    }
}

/// Each row has counted its record as often as `expected` says.
pub fn check_rows(scenario: &Scenario, partition: &Partition, expected: &BTreeMap<u64, u32>) -> Result<(), String> {
    let partitions = scenario.partitions();
    let ids = partition.tables()[0].ids();
    let mut counts = vec![0.0; ids.len()];
    partition.read(0, &ids, &mut counts);
    let counted: BTreeMap<u64, f32> = ids.into_iter().zip(counts).collect();
    for record in 0..scenario.shards.iter().map(|shard| shard.first + shard.records.unwrap_or(0)).max().unwrap_or(0) {
        if partition_of_row(record, partitions) != partition.id() {
            continue;
        }
        let due = expected.get(&record).copied().unwrap_or(0);
        let found = counted.get(&record).copied().unwrap_or(0.0);
        if found != due as f32 {
            return Err(format!("record {record} has counted {found} times, and {due} is right"));
        }
    }
    Ok(())
}

/// How many batches of a task are in a partition, by its marks.
fn applied(scenario: &Scenario, partition: &Partition, task: TaskId) -> u64 {
    let marks = &partition.memory().marks;
    if marks.closed().contains(task.epoch, task.shard) {
        return batches(scenario, task);
    }
    marks.open().get(&task).map_or(0, |open| open.mark)
}

fn batches(scenario: &Scenario, task: TaskId) -> u64 {
    scenario.shards.get(task.shard as usize).map_or(0, |shard| scenario.batches(shard))
}
