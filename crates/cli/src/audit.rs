//! Whether every record counts exactly once: what the data demands beside what the partitions have applied.
//! Pure; [`command`] reads the files, [`report`] writes the outcome.
//!
//! What is expected comes from the data's index: how many records each shard has, and so which batches each
//! task has. What was applied comes from the partitions' tallies, which change where rows change. Nobody's
//! word that a task is done is taken for either.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_master::tasks::{Done, Finished};
use elasticdl_ps::audit::{Tally, digest};
use elasticdl_spec::TaskId;

pub mod command;
pub mod report;

/// What the job is made of, from its ledger and the manifest of the checkpoint that is looked at.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Records per batch.
    pub batch: u64,
    /// Passes over the data.
    pub epochs: u32,
    /// Records of each training shard; `None` where only reading to its end tells.
    pub shards: BTreeMap<u32, Option<u64>>,
    /// Whether every task of every epoch is expected; else what `covered` and the marks say.
    pub complete: bool,
    /// Tasks that the checkpoint is said to hold to their end, and how many of their records were set aside.
    pub covered: Done,
    /// What tasks came to that are done beyond it.
    pub recent: BTreeMap<TaskId, Finished>,
    /// Whether records of open tasks may have been set aside.
    pub sets_aside: bool,
    /// Records that had to be applied again after servers died.
    pub replayed: u64,
    /// The same by epoch and by the partitions that had lost them.
    pub replayed_in: BTreeMap<u32, BTreeMap<u32, u64>>,
}

/// What one partition's file says.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// What was applied, by epoch.
    pub tallies: BTreeMap<u32, Tally>,
    /// The marks of its open tasks.
    pub marks: BTreeMap<TaskId, u64>,
}

/// How it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audit {
    /// By epoch and partition.
    pub lines: BTreeMap<(u32, u32), Line>,
    /// Whether everything is where it should be, once.
    pub exact: bool,
    /// Records lost: over all epochs, each with the partition that lost most.
    pub lost: u64,
    /// Records that count twice, reckoned in the same way.
    pub doubled: u64,
    /// Records set aside, likewise.
    pub set_aside: u64,
}

/// One epoch in one partition, in records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Line {
    /// What should have been applied: what the data holds less what was set aside.
    pub expected: u64,
    /// What was.
    pub applied: u64,
    /// Malformed records, and those of quarantined batches.
    pub set_aside: u64,
    /// Expected and missing. Where batches were lost and others doubled, the least that it can be.
    pub lost: u64,
    /// Applied and not expected; likewise.
    pub doubled: u64,
    /// Of tasks that were done and had to be applied again, because the partition's server died.
    pub replayed: u64,
    /// Whether it is the very batches that were expected, each once.
    pub batches_agree: bool,
}

/// A shard whose records nobody has counted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unknown(pub u32);

/// What should have been applied in an epoch, before anything is set aside.
#[derive(Debug, Clone, Copy, Default)]
struct Due {
    tally: Tally,
    /// Of these, records in tasks of which it is not known how many were set aside, or how many there are.
    unsure: u64,
}

/// Compares all partitions with the data.
///
/// # Errors
///
/// A shard that should have been applied whole has an unknown number of records.
pub fn audit(facts: &Facts, partitions: &BTreeMap<u32, Held>) -> Result<Audit, Unknown> {
    let whole = wholly_due(facts)?;
    let mut audit = Audit::default();
    for (partition, held) in partitions {
        let mut due = whole.clone();
        if !facts.complete {
            add_open(facts, held, &mut due);
        }
        let lines = compare(facts, &due, &held.tallies);
        for (epoch, mut line) in lines {
            let replayed = facts.replayed_in.get(&epoch).and_then(|epoch| epoch.get(partition));
            line.replayed = replayed.copied().unwrap_or(0);
            audit.lines.insert((epoch, *partition), line);
        }
    }
    audit.exact = audit.lines.values().all(|l| l.batches_agree && l.lost == 0 && l.doubled == 0);
    audit.lost = audit.worst(|line| line.lost);
    audit.doubled = audit.worst(|line| line.doubled);
    audit.set_aside = audit.worst(|line| line.set_aside);
    Ok(audit)
}

impl Audit {
    /// The lines of one epoch, by partition.
    pub fn epoch(&self, epoch: u32) -> impl Iterator<Item = (u32, &Line)> {
        self.lines.range((epoch, 0)..=(epoch, u32::MAX)).map(|((_, partition), line)| (*partition, line))
    }

    /// The epochs.
    pub fn epochs(&self) -> BTreeSet<u32> {
        self.lines.keys().map(|(epoch, _)| *epoch).collect()
    }

    /// The highest figure of each epoch, added up. Every record goes to every partition, so a sum over
    /// partitions would count one record many times.
    fn worst(&self, figure: impl Fn(&Line) -> u64) -> u64 {
        let highest = |epoch| self.epoch(epoch).map(|(_, line)| figure(line)).max().unwrap_or(0);
        self.epochs().into_iter().map(highest).sum()
    }
}

/// What every partition must hold whole: all tasks, or those that are covered.
fn wholly_due(facts: &Facts) -> Result<BTreeMap<u32, Due>, Unknown> {
    let mut due: BTreeMap<u32, Due> = BTreeMap::new();
    let mut add = |task: TaskId| {
        let records = facts.records(task.shard).ok_or(Unknown(task.shard))?;
        let batches = records.div_ceil(facts.batch);
        facts.add(task, batches, Some(records), due.entry(task.epoch).or_default());
        Ok(())
    };
    if facts.complete {
        for epoch in 0..facts.epochs {
            facts.shards.keys().try_for_each(|shard| add(TaskId::train(epoch, *shard)))?;
        }
    } else {
        for (epoch, ranges) in &facts.covered.epochs {
            let shards = ranges.iter().flat_map(|(first, last)| *first..=*last);
            shards.into_iter().try_for_each(|shard| add(TaskId::train(*epoch, shard)))?;
        }
    }
    Ok(due)
}

/// What a partition must hold of open tasks: each up to the mark in the partition's own file.
fn add_open(facts: &Facts, held: &Held, due: &mut BTreeMap<u32, Due>) {
    for (task, mark) in held.marks.iter().filter(|(task, _)| !facts.covered.contains(**task)) {
        let due = due.entry(task.epoch).or_default();
        let (before, records) = (due.tally.records, facts.records(task.shard));
        facts.add(*task, *mark, records, due);
        if facts.sets_aside || records.is_none() {
            due.unsure += due.tally.records - before;
        }
    }
}

impl Facts {
    /// How many records a shard has: by the index, or as a task that read it to its end has found.
    fn records(&self, shard: u32) -> Option<u64> {
        let found = || {
            let of_shard = self.recent.iter().find(|(task, _)| task.shard == shard);
            of_shard.map(|(_, finished)| finished.records + finished.bad_records)
        };
        self.shards.get(&shard).copied().flatten().or_else(found)
    }

    /// Adds the first `batches` batches of a task with so many records.
    fn add(&self, task: TaskId, batches: u64, records: Option<u64>, due: &mut Due) {
        for batch in 0..batches {
            let size = records.map_or(self.batch, |n| n.saturating_sub(batch * self.batch).min(self.batch));
            due.tally.records += size;
            due.tally.batches += 1;
            due.tally.digest = due.tally.digest.wrapping_add(digest(task, batch));
        }
    }
}

/// The epochs of one partition.
fn compare(facts: &Facts, due: &BTreeMap<u32, Due>, applied: &BTreeMap<u32, Tally>) -> BTreeMap<u32, Line> {
    let mut lines = BTreeMap::new();
    let mut unsure = 0;
    for epoch in due.keys().chain(applied.keys()).collect::<BTreeSet<_>>() {
        let due = due.get(epoch).copied().unwrap_or_default();
        let applied = applied.get(epoch).copied().unwrap_or_default();
        let batches_agree = (due.tally.batches, due.tally.digest) == (applied.batches, applied.digest);
        unsure += if batches_agree { due.unsure } else { 0 };
        let (expected, applied) = (due.tally.records, applied.records);
        lines.insert(*epoch, Line { expected, applied, batches_agree, ..Line::default() });
    }
    // The ledger says how many records were set aside, and not in which epoch.
    let aside = facts.covered.bad_records;
    settle(&mut lines, aside, aside + unsure);
    for line in lines.values_mut().filter(|l| !l.batches_agree && l.lost == 0 && l.doubled == 0) {
        // As many as there should be, and others: at least one batch is missing and one is there twice.
        (line.lost, line.doubled) = (facts.batch, facts.batch);
    }
    lines
}

/// Tells the records that were set aside, of which there are from `aside_min` to `aside_max`, from the lost
/// ones. A batch with records set aside is applied without them, an empty one too: it moves the mark.
///
/// Where the batches agree, a record that is missing from them can only have been set aside, so a surplus or
/// a lack beyond what was set aside is blamed on epochs whose batches do not agree, as far as there are any.
fn settle(lines: &mut BTreeMap<u32, Line>, aside_min: u64, aside_max: u64) {
    let missing = |line: &Line| line.expected.saturating_sub(line.applied);
    for line in lines.values_mut() {
        line.doubled = line.applied.saturating_sub(line.expected);
    }
    let missing_all: u64 = lines.values().map(missing).sum();
    let mut lost = missing_all.saturating_sub(aside_max);
    let mut surplus = aside_min.saturating_sub(missing_all);
    for agree in [false, true] {
        for line in lines.values_mut().filter(|line| line.batches_agree == agree) {
            let missing = missing(line);
            let lost_here = missing.min(lost);
            lost -= lost_here;
            let set_aside = missing - lost_here;
            // Set aside by the ledger and applied all the same.
            line.doubled += std::mem::take(&mut surplus);
            line.lost = lost_here;
            line.set_aside = set_aside;
            line.expected -= set_aside;
        }
    }
}

#[cfg(test)]
mod tests;
