//! Training tasks and their leases. Pure: time comes in, decisions go out.
//!
//! A task is never dropped. It waits, is leased, and is done; a lease that ends early (the worker died,
//! gave it back, or had no batch done for too long) makes it wait again, first in line. What was applied
//! of it stays applied: whoever takes it next goes on from the partitions' marks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_spec::mix::mix2;
use elasticdl_spec::{LeaseId, Position, Shard, TaskId, WorkerId};
use serde::{Deserialize, Serialize};

use crate::ledger::Book;
use crate::status::TaskCounts;
use line::{Line, Rank};
use positions::Positions;

mod line;
mod positions;

/// The tasks of a job, of one purpose.
#[derive(Debug)]
pub struct Tasks {
    order: Order,
    epochs: u32,
    shards: Vec<Shard>,
    /// Whether all shards are known.
    indexed: bool,
    /// The newest epoch begun.
    epoch: u32,
    /// Waiting, of the newest epoch, in the order in which they are leased.
    todo: BTreeSet<(u64, u32)>,
    /// Waiting again after a lease that ended early, or to be replayed; they go first.
    again: Line,
    leased: BTreeMap<TaskId, Lease>,
    /// Not done, and their last lease ended in the middle of a step, perhaps: some partitions may have it and
    /// others not.
    interrupted: BTreeSet<TaskId>,
    /// Done, and held to their end by every file of the committed checkpoint.
    covered: Done,
    /// Done since.
    recent: BTreeMap<TaskId, Finished>,
    /// Records reported so far of tasks that are not done.
    partial: BTreeMap<TaskId, u64>,
    bad: BTreeMap<TaskId, u64>,
    positions: Positions,
}

/// In which order the tasks of an epoch are leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they stand in the files.
    Files,
    /// Shuffled by this seed, differently in each epoch.
    Shuffled(u64),
}

impl Order {
    /// Tasks of an epoch are leased by this, the least first; then by their shards.
    fn key(self, task: TaskId) -> u64 {
        match self {
            Order::Files => u64::from(task.shard),
            Order::Shuffled(seed) => mix2(seed, task.as_u64()),
        }
    }
}

/// A task held by a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Who holds it.
    pub worker: WorkerId,
    /// When a batch was last done under it, or when it was given.
    pub renewed: Duration,
}

/// What a task came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    /// Good records of it.
    pub records: u64,
    /// Records of it that were set aside.
    pub bad_records: u64,
    /// Its batches, the quarantined ones included: every partition's mark ends there.
    pub batches: u64,
}

/// Tasks that are done: shards per epoch, and how many records that was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Finished shards by epoch, as ranges `[first, last]`.
    pub epochs: BTreeMap<u32, Vec<(u32, u32)>>,
    /// Good records of all of them.
    pub records: u64,
    /// Malformed records of all of them.
    pub bad_records: u64,
}

impl Done {
    /// Whether the task is done.
    pub fn contains(&self, task: TaskId) -> bool {
        let inside = |(first, last): &(u32, u32)| (*first..=*last).contains(&task.shard);
        self.epochs.get(&task.epoch).is_some_and(|ranges| ranges.iter().any(inside))
    }

    /// How many tasks are done.
    pub fn tasks(&self) -> u64 {
        self.epochs.values().flatten().map(|(first, last)| u64::from(last - first) + 1).sum()
    }

    /// Adds a task that was not in it.
    pub fn add(&mut self, task: TaskId, finished: Finished) {
        assert!(!self.contains(task), "a task is done once");
        self.records += finished.records;
        self.bad_records += finished.bad_records;
        let ranges = self.epochs.entry(task.epoch).or_default();
        let at = ranges.partition_point(|(first, _)| *first < task.shard);
        ranges.insert(at, (task.shard, task.shard));
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for &(first, last) in ranges.iter() {
            match merged.last_mut() {
                Some((_, end)) if *end + 1 == first => *end = last,
                _ => merged.push((first, last)),
            }
        }
        *ranges = merged;
    }
}

/// By partition: the marks of open tasks in its file.
pub type FileMarks = BTreeMap<u32, BTreeMap<TaskId, u64>>;

/// What became of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// The lease counts.
    Yes,
    /// It ended before: the report says nothing about the task any more.
    No,
}

impl Tasks {
    /// No tasks yet: `epochs` passes over shards that are still to be found.
    pub fn new(epochs: u32, order: Order) -> Self {
        Tasks {
            order,
            epochs,
            shards: Vec::new(),
            indexed: false,
            epoch: 0,
            todo: BTreeSet::new(),
            again: Line::default(),
            leased: BTreeMap::new(),
            interrupted: BTreeSet::new(),
            covered: Done::default(),
            recent: BTreeMap::new(),
            partial: BTreeMap::new(),
            bad: BTreeMap::new(),
            positions: Positions::default(),
        }
    }

    /// A shard was found. Shards come in the same order in every run over the same files.
    pub fn add_shard(&mut self, shard: Shard) {
        assert!(!self.indexed, "no shard comes after the last");
        let number = self.shards.len() as u32;
        self.shards.push(shard);
        for epoch in 0..=self.epoch {
            self.make_wait(TaskId::train(epoch, number));
        }
    }

    /// All shards are known.
    pub fn all_found(&mut self) {
        self.indexed = true;
        self.begin_epochs();
    }

    /// The shards found so far.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The shard of a task.
    pub fn shard(&self, task: TaskId) -> &Shard {
        &self.shards[task.shard as usize]
    }

    /// Where a task stands in the nominal order of the job, in batches of so many records: after all epochs
    /// before its own, and in its epoch where it would be leased if nothing ever went wrong. All shards are known.
    pub fn position(&mut self, task: TaskId, batch: u64) -> Position {
        assert!(self.indexed, "a task's position is known when all shards are");
        let (order, shards) = (self.order, &self.shards);
        let first = self.positions.first(task, shards, batch, |task| order.key(task));
        Position { first, total: self.positions.per_epoch() * u64::from(self.epochs) }
    }

    /// Whether all shards are known.
    pub fn is_indexed(&self) -> bool {
        self.indexed
    }

    /// Gives the next waiting task to a worker, and tells whether it was given before.
    pub fn lease(&mut self, now: Duration, id: LeaseId, worker: WorkerId) -> Option<(TaskId, bool)> {
        // After a master's death a task may wait before its shard is found again.
        let (task, again) = match self.again.take(self.shards.len() as u32) {
            Some(task) => (task, true),
            None => {
                let (_, shard) = self.todo.pop_first()?;
                (TaskId::train(self.epoch, shard), false)
            }
        };
        assert!(!self.is_done(task), "a done task does not wait");
        let previous = self.leased.insert(task, Lease { id, worker, renewed: now });
        assert!(previous.is_none(), "a waiting task is not leased");
        self.begin_epochs();
        Some((task, again))
    }

    /// A worker has done batches of a task, `records` of them since it last said so, and met `bad`
    /// malformed records in the task so far.
    pub fn progress(&mut self, now: Duration, task: TaskId, id: LeaseId, records: u64, bad: u64) -> Held {
        match self.leased.get(&task).filter(|lease| lease.id == id).map(|lease| lease.worker) {
            Some(worker) => {
                if records > 0 {
                    self.renew(now, worker);
                }
                *self.partial.entry(task).or_default() += records;
                let known = self.bad.entry(task).or_default();
                *known = bad.max(*known);
                Held::Yes
            }
            None => Held::No,
        }
    }

    /// Whether this lease counts.
    pub fn is_held(&self, task: TaskId, id: LeaseId) -> Held {
        if self.leased.get(&task).is_some_and(|lease| lease.id == id) { Held::Yes } else { Held::No }
    }

    /// A task is done: all its batches are applied. Tells what it came to, where the lease counts.
    pub fn finish(&mut self, task: TaskId, id: LeaseId, records: u64, batches: u64) -> Option<Finished> {
        if self.is_held(task, id) == Held::No {
            return None;
        }
        self.leased.remove(&task);
        self.interrupted.remove(&task);
        self.partial.remove(&task);
        let finished = Finished { records, bad_records: self.bad.remove(&task).unwrap_or(0), batches };
        self.recent.insert(task, finished);
        Some(finished)
    }

    /// A worker gives a task back, or failed at it in a way that another try may mend.
    pub fn give_back(&mut self, task: TaskId, id: LeaseId) -> Held {
        if self.leased.get(&task).is_none_or(|lease| lease.id != id) {
            return Held::No;
        }
        self.leased.remove(&task);
        self.again.add(task, Rank::Freed(id));
        Held::Yes
    }

    /// A worker asks for a task and has these leases in hand: any other of its leases it never got.
    pub fn keep_only(&mut self, worker: WorkerId, held: &BTreeSet<LeaseId>) -> Vec<TaskId> {
        self.end_leases(|lease| lease.worker == worker && !held.contains(&lease.id))
    }

    /// Only these workers are left.
    pub fn keep_workers(&mut self, workers: &[u32]) -> Vec<TaskId> {
        self.end_leases(|lease| !workers.contains(&lease.worker.0))
    }

    /// Nobody can get a batch done now: no lease runs out because of that.
    pub fn renew_all(&mut self, now: Duration) {
        self.leased.values_mut().for_each(|lease| lease.renewed = now);
    }

    /// A worker is gone: what it held waits again.
    pub fn worker_gone(&mut self, worker: WorkerId) -> Vec<TaskId> {
        self.end_leases(|lease| lease.worker == worker)
    }

    /// Ends the leases under which no batch was done for `limit`.
    pub fn expire(&mut self, now: Duration, limit: Duration) -> Vec<(TaskId, WorkerId)> {
        let late = |lease: &Lease| now.saturating_sub(lease.renewed) > limit;
        let workers: BTreeMap<TaskId, WorkerId> =
            self.leased.iter().filter(|(_, l)| late(l)).map(|(t, l)| (*t, l.worker)).collect();
        let ended = self.end_leases(late);
        ended.into_iter().map(|task| (task, workers[&task])).collect()
    }

    /// A partition has lost what came after the committed checkpoint: tasks that were done since then wait
    /// again. Their marks tell what is left to be done of them. Returns them, with what they had come to.
    pub fn reopen(&mut self) -> BTreeMap<TaskId, Finished> {
        let again = std::mem::take(&mut self.recent);
        again.keys().for_each(|task| self.replay(*task));
        again
    }

    /// All partitions have gone back to the committed checkpoint: what is not covered by it waits again,
    /// leased or not.
    pub fn roll_back(&mut self) -> BTreeMap<TaskId, Finished> {
        let leased = std::mem::take(&mut self.leased).into_keys();
        let waiting: Vec<TaskId> = leased.chain(self.again.tasks()).collect();
        waiting.into_iter().for_each(|task| self.replay(task));
        self.interrupted.clear();
        self.partial.clear();
        self.bad.clear();
        self.reopen()
    }

    /// Goes on from what a ledger holds. To be called before the first shard is added.
    pub fn load(&mut self, now: Duration, book: &Book) {
        assert!(self.shards.is_empty(), "a ledger is read first");
        self.covered = book.covered.clone();
        self.recent = book.recent.clone();
        let lease = |(id, worker): &(LeaseId, WorkerId)| Lease { id: *id, worker: *worker, renewed: now };
        self.leased = book.leased.iter().map(|(task, held)| (*task, lease(held))).collect();
        self.interrupted = book.interrupted.clone();
        // The epochs up to the newest with anything done or begun had been begun.
        let open =
            self.recent.keys().chain(self.leased.keys()).chain(&self.interrupted).map(|task| task.epoch);
        self.epoch = open.chain(self.covered.epochs.keys().copied()).max().unwrap_or(0);
    }

    /// What a checkpoint with these files covers: done tasks whose every batch is in every file. When they
    /// were done says nothing.
    pub fn covered_by(&self, files: &FileMarks) -> Done {
        let mut covered = self.covered.clone();
        for (task, finished) in &self.recent {
            let mark = |marks: &BTreeMap<TaskId, u64>| marks.get(task).copied().unwrap_or(0);
            if files.values().all(|marks| mark(marks) >= finished.batches) {
                covered.add(*task, *finished);
            }
        }
        covered
    }

    /// A checkpoint that covers these tasks is committed.
    pub fn commit(&mut self, covered: Done) {
        self.recent.retain(|task, _| !covered.contains(*task));
        self.covered = covered;
    }

    /// Whether every task of every epoch is done.
    pub fn is_complete(&self) -> bool {
        self.indexed && self.covered.tasks() + self.recent.len() as u64 == self.tasks_total()
    }

    /// Whether the committed checkpoint covers every task of every epoch.
    pub fn is_covered(&self) -> bool {
        self.indexed && self.covered.tasks() == self.tasks_total()
    }

    /// What the committed checkpoint covers.
    pub fn covered(&self) -> &Done {
        &self.covered
    }

    /// Whether a task is done.
    pub fn is_done(&self, task: TaskId) -> bool {
        self.recent.contains_key(&task) || self.covered.contains(task)
    }

    /// Whether all partitions have just the same batches: nobody is at a task, and nobody was in the middle of
    /// one when its lease ended.
    pub fn is_between_steps(&self) -> bool {
        self.leased.is_empty() && self.interrupted.is_empty()
    }

    /// Whether a task waits that was perhaps left in the middle of a step.
    pub fn interrupted_waits(&self) -> bool {
        self.again.tasks().any(|task| self.interrupted.contains(&task))
    }

    /// Whether as many tasks wait, of all epochs to come, as are leased.
    pub fn is_plentiful(&self) -> bool {
        let later = u64::from(self.epochs - 1 - self.epoch) * self.shards.len() as u64;
        (self.todo.len() + self.again.len()) as u64 + later >= self.leased.len() as u64
    }

    /// The leases that a worker holds.
    pub fn leases_of(&self, worker: WorkerId) -> impl Iterator<Item = LeaseId> + '_ {
        self.leased.values().filter(move |lease| lease.worker == worker).map(|lease| lease.id)
    }

    /// The task and lease that a worker holds, the oldest first.
    pub fn held_by(&self, worker: WorkerId) -> impl Iterator<Item = TaskId> + '_ {
        self.leased.iter().filter(move |(_, lease)| lease.worker == worker).map(|(task, _)| *task)
    }

    /// Records trained: of done tasks exactly, of open ones as far as reported.
    pub fn records(&self) -> u64 {
        let recent: u64 = self.recent.values().map(|finished| finished.records).sum();
        self.covered.records + recent + self.partial.values().sum::<u64>()
    }

    /// Malformed records met.
    pub fn bad_records(&self) -> u64 {
        let recent: u64 = self.recent.values().map(|finished| finished.bad_records).sum();
        self.covered.bad_records + recent + self.bad.values().sum::<u64>()
    }

    /// Records of all epochs, where that is known already.
    pub fn records_total(&self) -> Option<u64> {
        let once: u64 = self.shards.iter().map(|s| s.records).sum::<Option<u64>>()?;
        self.indexed.then_some(once * u64::from(self.epochs))
    }

    /// The newest epoch begun.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Tasks by state.
    pub fn counts(&self) -> TaskCounts {
        TaskCounts {
            todo: (self.todo.len() + self.again.len()) as u64,
            leased: self.leased.len() as u64,
            done: self.covered.tasks() + self.recent.len() as u64,
        }
    }

    /// A worker that gets batches done keeps all it holds: the task it reads ahead waits for this one.
    fn renew(&mut self, now: Duration, worker: WorkerId) {
        for lease in self.leased.values_mut().filter(|lease| lease.worker == worker) {
            lease.renewed = now;
        }
    }

    fn tasks_total(&self) -> u64 {
        u64::from(self.epochs) * self.shards.len() as u64
    }

    fn make_wait(&mut self, task: TaskId) {
        if self.again.contains(task) || self.is_done(task) || self.leased.contains_key(&task) {
            return;
        }
        if task.epoch == self.epoch && !self.interrupted.contains(&task) {
            self.todo.insert((self.order.key(task), task.shard));
        } else {
            self.replay(task);
        }
    }

    fn replay(&mut self, task: TaskId) {
        self.again.add(task, Rank::Replayed(task.epoch, self.order.key(task)));
    }

    /// The next epoch begins when nothing of this one waits any more, so that no worker idles.
    fn begin_epochs(&mut self) {
        while self.indexed && self.todo.is_empty() && self.epoch + 1 < self.epochs && !self.shards.is_empty()
        {
            self.epoch += 1;
            for shard in 0..self.shards.len() as u32 {
                self.make_wait(TaskId::train(self.epoch, shard));
            }
        }
    }

    fn end_leases(&mut self, ends: impl Fn(&Lease) -> bool) -> Vec<TaskId> {
        let ended: Vec<(TaskId, LeaseId)> =
            self.leased.iter().filter(|(_, l)| ends(l)).map(|(t, l)| (*t, l.id)).collect();
        for (task, lease) in &ended {
            self.leased.remove(task);
            self.interrupted.insert(*task);
            self.again.add(*task, Rank::Freed(*lease));
        }
        ended.into_iter().map(|(task, _)| task).collect()
    }
}

#[cfg(test)]
mod tests;
