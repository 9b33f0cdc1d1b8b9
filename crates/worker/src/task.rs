//! A leased task while this worker holds it, as all of its stages see it.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use elasticdl_spec::{LeaseId, Position, Purpose, Shard, TaskId};

/// A task and the lease under which it is worked on: the same task may come back under another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// The task.
    pub task: TaskId,
    /// The lease.
    pub lease: LeaseId,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} under lease {}", self.task, self.lease)
    }
}

/// What the master said when it gave a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leased {
    /// Which task, by what right.
    pub claim: Claim,
    /// Its records.
    pub shard: Shard,
    /// Whether it was leased before, so that some of it may be applied already.
    pub again: bool,
    /// Batches that are set aside: they move the marks and teach nothing.
    pub quarantined: BTreeSet<u64>,
    /// Where it stands in the job; known where the learning rate varies.
    pub position: Position,
}

impl Leased {
    /// A task that nobody had before.
    pub fn new(claim: Claim, shard: Shard) -> Self {
        Leased { claim, shard, again: false, quarantined: BTreeSet::new(), position: Position::default() }
    }
}

/// A leased task on its way through the stages.
///
/// Stages do not talk to each other about a task that ends early. Whoever learns of it says so here, and
/// the others let go of its batches when they meet them.
#[derive(Debug)]
pub struct LeasedTask {
    /// Which task, by what right.
    pub claim: Claim,
    /// Its records.
    pub shard: Shard,
    /// Where it stands in the job.
    pub position: Position,
    /// Whether it was leased before and its first pull is still to come.
    begins_again: AtomicBool,
    quarantined: BTreeSet<u64>,
    attempt: AtomicU64,
    dropped: AtomicBool,
}

impl LeasedTask {
    /// A task that was just leased.
    pub fn new(leased: Leased) -> Self {
        let Leased { claim, shard, again, quarantined, position } = leased;
        LeasedTask {
            claim,
            shard,
            position,
            begins_again: AtomicBool::new(again),
            quarantined,
            attempt: AtomicU64::new(0),
            dropped: AtomicBool::new(false),
        }
    }

    /// Rows of it were pulled; `true` for the first ones of a task that was leased before.
    pub fn begins_again(&self) -> bool {
        self.begins_again.swap(false, Ordering::AcqRel)
    }

    /// Whether this batch is set aside.
    pub fn is_quarantined(&self, batch: u64) -> bool {
        self.quarantined.contains(&batch)
    }

    /// Whether it trains or evaluates.
    pub fn purpose(&self) -> Purpose {
        self.claim.task.purpose
    }

    /// Nothing of it is to be read, pulled, computed or pushed any more.
    pub fn drop_all(&self) {
        self.dropped.store(true, Ordering::Release);
    }

    /// Nothing of the present attempt counts any more: it begins again at its marks.
    pub fn begin_again(&self) {
        self.attempt.fetch_add(1, Ordering::AcqRel);
    }

    /// The present attempt, from 0.
    pub fn attempt(&self) -> u64 {
        self.attempt.load(Ordering::Acquire)
    }

    /// Whether work of this attempt is still wanted.
    pub fn wants(&self, attempt: u64) -> bool {
        !self.dropped.load(Ordering::Acquire) && self.attempt() == attempt
    }
}
