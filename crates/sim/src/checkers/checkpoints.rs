//! A committed checkpoint is complete and restorable, and in each of its files marks, counters, rows and
//! tensors tell the same story.

use std::collections::BTreeMap;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::tasks::Done;
use elasticdl_ps::audit::{Tally, digest};
use elasticdl_ps::checkpoint::{Contents, Head, Sum, decode, decode_contents};
use elasticdl_ps::table::Bounds;
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
    let (manifest, files) = read(scenario, disk, id)?;
    if manifest.done != *covered {
        return Err(format!("checkpoint {id} covers other tasks than the ledger says"));
    }
    let same_step = files.iter().all(|file| file.head.audit == files[0].head.audit);
    if scenario.plan.job.is_staged() && !same_step {
        return Err(format!("the files of checkpoint {id} are not cut at one step"));
    }
    for file in &files {
        let wrong = |reason: String| format!("checkpoint {id}, {}: {reason}", file.head.partition);
        check_covered(scenario, &file.head, covered).map_err(wrong)?;
        check_file(scenario, file).map_err(wrong)?;
    }
    Ok(())
}

/// Reads all files of a checkpoint. One of them, another one each time, is opened as a server would.
///
/// # Errors
///
/// One of them is missing, or is not what was written.
pub fn read(scenario: &Scenario, disk: &Disk, id: u64) -> Result<(Manifest, Vec<Contents>), String> {
    let dir = disk.checkpoint(id).ok_or(format!("checkpoint {id} is not on disk"))?;
    let manifest = dir.manifest().map_err(|reason| format!("checkpoint {id}: {reason}"))?;
    let mut files = Vec::new();
    for partition in 0..scenario.partitions() {
        let wrong = |reason: String| format!("checkpoint {id}, partition {partition}: {reason}");
        let file = manifest.partitions.get(&partition).ok_or_else(|| wrong("not in the manifest".into()))?;
        let mut chain = Vec::new();
        for layer in manifest.chain(partition) {
            let found = disk.checkpoint(layer.checkpoint).and_then(|dir| dir.files.get(&partition));
            let missing =
                || wrong(format!("its file is not on disk: that of checkpoint {}", layer.checkpoint));
            let bytes = found.ok_or_else(missing)?;
            let sum = Sum { bytes: layer.bytes, crc32: layer.crc32 };
            if Sum::of(bytes) != sum {
                return Err(wrong(format!(
                    "the manifest says {sum:?}, and the file is {:?}",
                    Sum::of(bytes)
                )));
            }
            chain.push((layer.checkpoint, &bytes[..], sum));
        }
        let bytes: Vec<&[u8]> = chain.iter().map(|(_, bytes, _)| *bytes).collect();
        let contents = decode_contents(&bytes).map_err(|e| wrong(e.chain()))?;
        let (life, place) = (contents.head.incarnation, contents.head.partition);
        if (life, place) != (file.incarnation, PartitionId(partition)) {
            return Err(wrong(format!(
                "the file is of {place} in life {life}, the manifest says {}",
                file.incarnation
            )));
        }
        if id % u64::from(scenario.partitions()) == u64::from(partition) {
            decode(&scenario.model, place, life + 1, &chain).map_err(|e| wrong(e.chain()))?;
        }
        files.push(contents);
    }
    Ok((manifest, files))
}

/// Every covered task is at its end.
fn check_covered(scenario: &Scenario, head: &Head, covered: &Done) -> Result<(), String> {
    for epoch in 0..scenario.plan.job.train.epochs {
        for shard in 0..scenario.shards.len() as u32 {
            let task = TaskId::train(epoch, shard);
            let (applied, all) = (applied(scenario, head, task), batches(scenario, task));
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
fn check_file(scenario: &Scenario, file: &Contents) -> Result<(), String> {
    let mut tallies: BTreeMap<u32, Tally> = BTreeMap::new();
    let mut rows: BTreeMap<u64, u32> = BTreeMap::new();
    let mut pushes = 0u32;
    for epoch in 0..scenario.plan.job.train.epochs {
        for (number, shard) in scenario.shards.iter().enumerate() {
            let task = TaskId::train(epoch, number as u32);
            for batch in 0..applied(scenario, &file.head, task) {
                let records = scenario.taught(task, shard, batch);
                let tally = tallies.entry(epoch).or_default();
                tally.records += records.end - records.start;
                tally.batches += 1;
                tally.digest = tally.digest.wrapping_add(digest(task, batch));
                pushes += u32::from(!records.is_empty());
                records.for_each(|record| *rows.entry(record).or_default() += 1);
            }
        }
    }
    let found = file.head.audit.epochs();
    if *found != tallies {
        return Err(format!("it has applied {found:?}, and its marks say {tallies:?}"));
    }
    check_rows(scenario, file, &rows)?;
    let all = tallies.values().map(|tally| tally.batches).sum();
    let right = |value: f32| match scenario.plan.job.is_hybrid() {
        true => is_gathered(scenario, value, all, all - u64::from(pushes)),
        false => is_right(scenario, value, pushes),
    };
    let wrong = file.tensors.iter().flatten().find(|value| !right(**value));
    match wrong {
        None => Ok(()),
        Some(value) => Err(format!("its tensor has counted {value} batches, and its marks say {pushes}")),
    }
}

/// Each row has counted its record as often as `expected` says, and there are no others. Where rows have a bound, none has
/// counted more than that, and what was refused makes up for the rest.
///
/// # Errors
///
/// The first that has not.
pub fn check_rows(scenario: &Scenario, file: &Contents, expected: &BTreeMap<u64, u32>) -> Result<(), String> {
    let (ids, counts) = &file.tables[0];
    let counted: BTreeMap<u64, f32> = ids.iter().copied().zip(counts.iter().copied()).collect();
    let records = scenario.shards.last().map_or(0, |shard| shard.first + shard.records.unwrap_or(0));
    if let Some(stranger) = ids.iter().find(|id| **id >= records) {
        return Err(format!("there is a row {stranger}, and records end at {records}"));
    }
    let partitions = scenario.partitions();
    let mut missing = 0.0;
    for record in (0..records).filter(|r| partition_of_row(*r, partitions) == file.head.partition) {
        let due = expected.get(&record).copied().unwrap_or(0);
        let found = counted.get(&record).copied().unwrap_or(0.0);
        let right = match scenario.is_bounded() {
            true => found <= due as f32,
            false => is_right(scenario, found, due),
        };
        if !right {
            return Err(format!("record {record} has counted {found} times, and {due} is right"));
        }
        missing += f64::from(due) - f64::from(found);
    }
    if !scenario.is_bounded() {
        return Ok(());
    }
    let Bounds { counts, .. } = file.head.bounds.first().ok_or("it tells nothing of what was refused")?;
    // What a row had counted goes with it.
    let refused = counts.refused as f64;
    match refused == missing || (counts.evicted > 0 && refused < missing) {
        true => Ok(()),
        false => Err(format!("{refused} gradients were refused, and {missing} are missing")),
    }
}

/// Whether this is what so many gradients of 1 come to: their number; or where several make a step, each a part of 1.
fn is_right(scenario: &Scenario, found: f32, due: u32) -> bool {
    if !scenario.is_synchronous() {
        return found == due as f32;
    }
    let (least, most) = (due as f32 / scenario.plan.job.train.grads_to_wait as f32, due as f32);
    found >= least - 1e-3 && found <= most + 1e-3
}

/// Whether a tensor has moved by 1 for each round of all these batches, of which some were empty; the rest of a round
/// is gathered, or applied at the end.
fn is_gathered(scenario: &Scenario, found: f32, batches: u64, empty: u64) -> bool {
    let size = u64::from(scenario.plan.job.train.grads_to_wait);
    let (least, most) = ((batches / size).saturating_sub(empty) as f32, batches.div_ceil(size) as f32);
    found >= least - 1e-3 && found <= most + 1e-3
}

/// How many batches of a task are in a file, by its marks.
fn applied(scenario: &Scenario, head: &Head, task: TaskId) -> u64 {
    if head.closed.contains(task.epoch, task.shard) {
        return batches(scenario, task);
    }
    head.marks.get(&task).map_or(0, |open| open.mark)
}

fn batches(scenario: &Scenario, task: TaskId) -> u64 {
    scenario.shards.get(task.shard as usize).map_or(0, |shard| scenario.batches(shard))
}
