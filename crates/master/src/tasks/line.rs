//! Tasks that wait again, in the order in which they are leased.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_spec::{LeaseId, TaskId};

/// Why a task waits again; the first goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Its lease ended early. Workers take their tasks in the order of their leases, so that the oldest is
    /// the one that somebody was at.
    Freed(LeaseId),
    /// It is to be applied again: by epoch, and then as it came the first time.
    Replayed(u32, u64),
}

/// A line of tasks, each of which stands in it once.
#[derive(Debug, Default)]
pub struct Line {
    order: BTreeSet<(Rank, TaskId)>,
    ranks: BTreeMap<TaskId, Rank>,
}

impl Line {
    /// Puts a task into its place; one that stands in the line already goes to the new one.
    pub fn add(&mut self, task: TaskId, rank: Rank) {
        if let Some(before) = self.ranks.insert(task, rank) {
            self.order.remove(&(before, task));
        }
        self.order.insert((rank, task));
    }

    /// Takes the first task out whose shard is below `shards`.
    pub fn take(&mut self, shards: u32) -> Option<TaskId> {
        let first = self.order.iter().find(|(_, task)| task.shard < shards).copied()?;
        self.order.remove(&first);
        self.ranks.remove(&first.1);
        Some(first.1)
    }

    /// All that stand in it.
    pub fn tasks(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.ranks.keys().copied()
    }

    /// Whether the task stands in it.
    pub fn contains(&self, task: TaskId) -> bool {
        self.ranks.contains_key(&task)
    }

    /// How many stand in it.
    pub fn len(&self) -> usize {
        self.order.len()
    }
}
