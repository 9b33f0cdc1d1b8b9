//! At the end no record is lost and none has counted twice, in any partition and epoch. Rows and counters
//! tell it; marks are not asked.

use std::collections::BTreeMap;

use elasticdl_ps::audit::{Tally, digest};
use elasticdl_spec::TaskId;

use crate::checkers::checkpoints::{check_rows, restore};
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
    let (_, partitions) = restore(scenario, disk, id)?;
    let epochs = scenario.plan.job.train.epochs;
    let expected: BTreeMap<u32, Tally> = (0..epochs).map(|epoch| (epoch, tally(scenario, epoch))).collect();
    let records = scenario.shards.iter().flat_map(|s| s.first..s.first + s.records.unwrap_or(0));
    let rows: BTreeMap<u64, u32> = records.map(|record| (record, epochs)).collect();
    for partition in &partitions {
        let wrong = |reason: String| format!("the end, checkpoint {id}, {}: {reason}", partition.id());
        check_rows(scenario, partition, &rows).map_err(wrong)?;
        let found = partition.memory().audit.epochs();
        if *found != expected {
            return Err(wrong(format!("{found:?} was applied, and {expected:?} is right")));
        }
    }
    Ok(())
}

/// What every partition is to have applied in an epoch.
fn tally(scenario: &Scenario, epoch: u32) -> Tally {
    let mut tally = Tally::default();
    for (number, shard) in scenario.shards.iter().enumerate() {
        for batch in 0..scenario.batches(shard) {
            let records = scenario.records(shard, batch);
            tally.records += records.end - records.start;
            tally.batches += 1;
            tally.digest = tally.digest.wrapping_add(digest(TaskId::train(epoch, number as u32), batch));
        }
    }
    tally
}
