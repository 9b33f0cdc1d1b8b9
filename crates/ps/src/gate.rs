//! Who may begin a batch: a gate that admits only as many as keep every gradient fresh enough.
//!
//! Before a worker pulls a batch it asks for a permit, and gives it back when the batch has landed on all
//! partitions or is dropped; a connection that ends gives back all of its permits, and so does one that is not heard
//! of for as long as a lease lasts. The gate is with the server of
//! partition 0, in memory only: one that was just born knows nothing of batches under way. That costs work done
//! twice and no guarantee, because partitions refuse what is too stale whatever the gate believes.
//!
//! Pure: time comes in as a value. The edge that waits is `gatekeeper.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_wire::gate::{Batch, Decision};

/// A step that is not full is closed when nobody has asked to be in it for so long: the tail of an epoch.
pub const TAIL: Duration = Duration::from_millis(500);

/// What the gate sees to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Between the pull and the push of a batch at most so many others are applied.
    Bounded(u64),
    /// So many batches are computed from the same weights and applied together.
    Steps(u64),
    /// So many batches are computed from the same tensors.
    Rounds(u64),
}

/// Permits that are out, and what was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gate {
    policy: Policy,
    /// How long a batch may take.
    patience: Duration,
    permits: BTreeMap<u64, Permit>,
    next: u64,
    /// Batches that were under way and are no more.
    over: u64,
    /// Batches applied before the step that is being filled; with rounds, by partition 0 as far as is known.
    version: u64,
    decided: Option<Decision>,
    /// When somebody last entered the step, or staged.
    changed: Duration,
}

/// A batch under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Permit {
    connection: u64,
    batch: Batch,
    since: Duration,
    /// How many were over when it was given, or in which round that was.
    before: u64,
    staged: bool,
}

/// A permit, and the version that its batch is to be computed from where steps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granted {
    /// Its number; none comes twice in the lives of a job.
    pub permit: u64,
    /// How many batches the weights are to hold.
    pub version: u64,
}

impl Gate {
    /// A gate beside this life of partition 0, which has applied so many batches.
    pub fn new(policy: Policy, patience: Duration, incarnation: u64, version: u64) -> Self {
        let (permits, changed) = (BTreeMap::new(), Duration::ZERO);
        let over = 0;
        Gate { policy, patience, permits, next: incarnation << 32, over, version, decided: None, changed }
    }

    /// Partition 0 has applied so many batches. Rounds go by that, as they do in the partitions: what becomes of
    /// permits would not tell of a batch whose worker died when all had applied it.
    pub fn observe(&mut self, version: u64) {
        if let Policy::Rounds(_) = self.policy {
            self.version = self.version.max(version);
        }
    }

    /// May this batch be pulled now? `None`: not yet.
    pub fn admit(&mut self, now: Duration, connection: u64, batch: Batch) -> Option<Granted> {
        self.close(now);
        let free = match self.policy {
            // The oldest one under way is the first that would become too stale.
            Policy::Bounded(most) => self
                .permits
                .values()
                .next()
                .is_none_or(|oldest| self.over - oldest.before + self.permits.len() as u64 <= most),
            // What is under way and already in partition 0 is counted twice, until it is in all of them.
            Policy::Rounds(size) => {
                self.permits.values().all(|permit| permit.before == self.version / size)
                    && self.permits.len() as u64 + self.version % size < size
            }
            Policy::Steps(size) => self.make_way(batch) && (self.permits.len() as u64) < size,
        };
        if !free {
            return None;
        }
        self.next += 1;
        self.changed = now;
        let before = if let Policy::Rounds(size) = self.policy { self.version / size } else { self.over };
        self.permits.insert(self.next, Permit { connection, batch, since: now, before, staged: false });
        Some(Granted { permit: self.next, version: self.version })
    }

    /// Whether the batch is not in the step already, or was under a lease that has a successor now.
    fn make_way(&mut self, batch: Batch) -> bool {
        if self.decided.as_ref().is_some_and(|decided| contains(decided, batch)) {
            return false;
        }
        let same = |(_, p): &(&u64, &Permit)| (p.batch.task, p.batch.batch) == (batch.task, batch.batch);
        match self.permits.iter().find(same).map(|(number, permit)| (*number, *permit)) {
            None => true,
            Some((_, permit)) if permit.staged || permit.batch.lease > batch.lease => false,
            Some((number, _)) => self.permits.remove(&number).is_some(),
        }
    }

    /// The batch of a permit is applied by all partitions.
    pub fn landed(&mut self, permit: u64) {
        if self.permits.remove(&permit).is_some() {
            self.over += 1;
        }
    }

    /// Nothing will become of the batch of a permit.
    pub fn dropped(&mut self, permit: u64) {
        self.give_back(|number, _| number == permit);
    }

    /// A connection has ended: nothing will become of its batches, but for those that are staged everywhere.
    pub fn lost(&mut self, connection: u64) {
        self.give_back(|_, permit| permit.connection == connection);
    }

    fn give_back(&mut self, which: impl Fn(u64, &Permit) -> bool) {
        let before = self.permits.len();
        self.permits.retain(|number, permit| permit.staged || !which(*number, permit));
        if let Policy::Bounded(_) = self.policy {
            // Some partitions may have applied what is given up.
            self.over += (before - self.permits.len()) as u64;
        }
    }

    /// The batch of a permit is staged on all partitions. `false`: it is in no step, and must be done again.
    pub fn staged(&mut self, now: Duration, permit: u64, batch: Batch) -> bool {
        if let Some(held) = self.permits.get_mut(&permit).filter(|held| held.batch == batch) {
            held.staged = true;
            self.changed = now;
            self.close(now);
            return true;
        }
        self.decided.as_ref().is_some_and(|decided| decided.batches.contains(&batch))
    }

    /// Gives up permits that were not heard of for too long, and decides the step if it is full, or if nothing more
    /// comes, and all of it is staged. Who waits for a decision may be the only one left who asks for anything.
    pub fn close(&mut self, now: Duration) {
        let patience = self.patience;
        self.give_back(|_, permit| now.saturating_sub(permit.since) > patience);
        let Policy::Steps(size) = self.policy else { return };
        let full = self.permits.len() as u64 >= size;
        let over = full || now.saturating_sub(self.changed) >= TAIL;
        if self.permits.is_empty() || !over || self.permits.values().any(|permit| !permit.staged) {
            return;
        }
        let mut batches: Vec<Batch> =
            std::mem::take(&mut self.permits).into_values().map(|p| p.batch).collect();
        batches.sort_unstable();
        let decision = Decision { version: self.version, batches };
        self.version = decision.end();
        self.decided = Some(decision);
    }

    /// The last decision, where whoever knows that all is committed up to a version, and asks for a batch, may
    /// need it. One decision is enough: its step began when those before it were committed everywhere.
    pub fn decision(&self, committed: u64, asked: Option<Batch>) -> Option<&Decision> {
        let asked = |decided: &Decision| asked.is_some_and(|batch| contains(decided, batch));
        self.decided.as_ref().filter(|decided| decided.end() > committed || asked(decided))
    }

    /// Whether no batch is under way.
    pub fn is_idle(&self) -> bool {
        self.permits.is_empty()
    }
}

fn contains(decided: &Decision, batch: Batch) -> bool {
    decided.batches.iter().any(|b| (b.task, b.batch) == (batch.task, batch.batch))
}

#[cfg(test)]
mod tests;
