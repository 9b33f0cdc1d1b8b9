//! At the end no record is lost and none has counted twice, in any partition and epoch. Rows and counters
//! tell it; marks are not asked.

use std::collections::BTreeMap;

use elasticdl_ps::audit::{Tally, digest};
use elasticdl_spec::TaskId;

use crate::checkers::checkpoints::{check_rows, read};
use crate::disk::Disk;
use crate::scenario::Scenario;

/// Checks the checkpoint that the job ends with: the newest that its ledger goes by.
///
/// # Errors
///
/// What was lost or has counted twice.
pub fn check(scenario: &Scenario, disk: &Disk) -> Result<(), String> {
    let book = disk.settled_book()?;
    let id = book.committed.ok_or("the job is done, and no checkpoint is committed")?;
    let (_, files) = read(scenario, disk, id)?;
    let epochs = scenario.plan.job.train.epochs;
    let expected: BTreeMap<u32, Tally> = (0..epochs).map(|epoch| (epoch, tally(scenario, epoch))).collect();
    let rows = counts(scenario);
    for file in &files {
        let wrong = |reason: String| format!("the end, checkpoint {id}, {}: {reason}", file.head.partition);
        check_rows(scenario, file, &rows).map_err(wrong)?;
        let found = file.head.audit.epochs();
        if *found != expected {
            return Err(wrong(format!("{found:?} was applied, and {expected:?} is right")));
        }
    }
    Ok(())
}

/// How often every record is to have counted: once in each epoch, where its batch can be computed.
fn counts(scenario: &Scenario) -> BTreeMap<u64, u32> {
    let mut counts = BTreeMap::new();
    for epoch in 0..scenario.plan.job.train.epochs {
        for (number, shard) in scenario.shards.iter().enumerate() {
            let task = TaskId::train(epoch, number as u32);
            let records = (0..scenario.batches(shard)).flat_map(|batch| scenario.taught(task, shard, batch));
            records.for_each(|record| *counts.entry(record).or_default() += 1);
        }
    }
    counts
}

/// What every partition is to have applied in an epoch.
fn tally(scenario: &Scenario, epoch: u32) -> Tally {
    let mut tally = Tally::default();
    for (number, shard) in scenario.shards.iter().enumerate() {
        let task = TaskId::train(epoch, number as u32);
        for batch in 0..scenario.batches(shard) {
            let records = scenario.taught(task, shard, batch);
            tally.records += records.end - records.start;
            tally.batches += 1;
            tally.digest = tally.digest.wrapping_add(digest(task, batch));
        }
    }
    tally
}
