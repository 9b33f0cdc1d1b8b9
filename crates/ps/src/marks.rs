//! Which batches a partition has applied: the rules of exactly-once, and nothing of rows.
//!
//! For each open task there is a mark, the next batch that is not applied, and the highest lease that was
//! seen. What follows from a push is decided here alone:
//!
//! | push | answer |
//! | --- | --- |
//! | of a closed task | `Duplicate` |
//! | under a lease older than the highest seen, or below the floor | `Fenced` |
//! | of a batch below the mark | `Duplicate` |
//! | of the batch at the mark | `Ok`: it is applied and the mark moves past it |
//! | of a batch above the mark | `Gap`: something before it was lost |

use std::collections::BTreeMap;

use elasticdl_spec::{LeaseId, TaskId};
use elasticdl_wire::ps::Status;
use serde::{Deserialize, Serialize};

use crate::closed::Closed;

/// The mark of a task that is closed: past every batch.
pub const MARK_CLOSED: u64 = u64::MAX;

/// Marks of open tasks, and the closed ones.
///
/// Invariant: no task is open and closed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks {
    open: BTreeMap<TaskId, Open>,
    closed: Closed,
    /// Leases below it are older than any, whatever their task.
    floor: LeaseId,
}

/// What is known of an open task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The next batch that is not applied.
    pub mark: u64,
    /// The highest lease seen.
    pub lease: LeaseId,
}

impl Marks {
    /// Marks as a checkpoint holds them.
    pub fn new(open: BTreeMap<TaskId, Open>, closed: Closed) -> Self {
        assert!(
            !open.keys().any(|task| closed.contains(task.epoch, task.shard)),
            "no task is open and closed"
        );
        Marks { open, closed, floor: LeaseId::default() }
    }

    /// What is to become of a batch, and the task's mark now. Changes nothing.
    pub fn judge(&self, task: TaskId, batch: u64, lease: LeaseId) -> (Status, u64) {
        if self.is_closed(task) {
            return (Status::Duplicate, MARK_CLOSED);
        }
        let open = self.open.get(&task);
        let mark = open.map_or(0, |open| open.mark);
        if lease < self.floor || open.is_some_and(|open| lease < open.lease) {
            return (Status::Fenced, mark);
        }
        match batch.cmp(&mark) {
            std::cmp::Ordering::Less => (Status::Duplicate, mark),
            std::cmp::Ordering::Equal => (Status::Ok, mark),
            std::cmp::Ordering::Greater => (Status::Gap, mark),
        }
    }

    /// `lease` holds the task now, unless a newer one does. Tells which, and the task's mark.
    pub fn fence(&mut self, task: TaskId, lease: LeaseId) -> (Status, u64) {
        if self.is_closed(task) {
            return (Status::Ok, MARK_CLOSED);
        }
        if lease < self.floor {
            return (Status::Fenced, self.open.get(&task).map_or(0, |open| open.mark));
        }
        let open = self.open.entry(task).or_insert(Open { mark: 0, lease });
        if lease < open.lease {
            return (Status::Fenced, open.mark);
        }
        open.lease = lease;
        (Status::Ok, open.mark)
    }

    /// Leases below `floor` are refused from now on.
    pub fn raise_floor(&mut self, floor: LeaseId) {
        self.floor = self.floor.max(floor);
    }

    /// The batch at the mark is applied. Tells the new mark.
    pub fn advance(&mut self, task: TaskId) -> u64 {
        let open = self.open.get_mut(&task).expect("a task is fenced before its mark moves");
        assert!(open.mark < MARK_CLOSED - 1, "a task ends before its batches cannot be counted");
        open.mark += 1;
        open.mark
    }

    /// A committed checkpoint covers this task: its mark is needed no more.
    pub fn close(&mut self, task: TaskId) {
        self.open.remove(&task);
        self.closed.insert(task.epoch, task.shard);
    }

    /// Committed checkpoints cover all these tasks.
    pub fn close_all(&mut self, covered: &Closed) {
        self.open.retain(|task, _| !covered.contains(task.epoch, task.shard));
        self.closed.merge(covered);
    }

    /// The task's mark.
    pub fn mark(&self, task: TaskId) -> u64 {
        if self.is_closed(task) { MARK_CLOSED } else { self.open.get(&task).map_or(0, |open| open.mark) }
    }

    /// Open tasks with their marks and leases.
    pub fn open(&self) -> &BTreeMap<TaskId, Open> {
        &self.open
    }

    /// Closed tasks.
    pub fn closed(&self) -> &Closed {
        &self.closed
    }

    fn is_closed(&self, task: TaskId) -> bool {
        self.closed.contains(task.epoch, task.shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: TaskId = TaskId { purpose: elasticdl_spec::Purpose::Train, epoch: 0, shard: 3 };

    fn lease(n: u64) -> LeaseId {
        LeaseId { term: 1, n }
    }

    #[test]
    fn leases_below_the_floor_are_older_than_any() {
        let mut marks = Marks::default();
        marks.raise_floor(lease(5));
        assert_eq!(marks.fence(TASK, lease(4)), (Status::Fenced, 0));
        assert_eq!(marks.judge(TASK, 0, lease(4)), (Status::Fenced, 0));
        assert!(marks.open().is_empty(), "and leave no trace");
        assert_eq!(marks.fence(TASK, lease(5)), (Status::Ok, 0));
        assert_eq!(marks.judge(TASK, 0, lease(6)), (Status::Ok, 0));
    }

    #[test]
    fn only_the_batch_at_the_mark_is_applied() {
        let mut marks = Marks::default();
        assert_eq!(marks.judge(TASK, 1, lease(1)), (Status::Gap, 0));
        assert_eq!(marks.judge(TASK, 0, lease(1)), (Status::Ok, 0));
        marks.fence(TASK, lease(1));
        assert_eq!(marks.advance(TASK), 1);
        assert_eq!(marks.judge(TASK, 0, lease(1)), (Status::Duplicate, 1));
        assert_eq!(marks.judge(TASK, 1, lease(1)), (Status::Ok, 1));
    }

    #[test]
    fn asking_for_the_mark_raises_the_fence() {
        let mut marks = Marks::default();
        assert_eq!(marks.fence(TASK, lease(5)), (Status::Ok, 0));
        assert_eq!(marks.fence(TASK, lease(4)), (Status::Fenced, 0));
        assert_eq!(marks.judge(TASK, 0, lease(4)), (Status::Fenced, 0));
        assert_eq!(marks.judge(TASK, 0, lease(5)), (Status::Ok, 0));
        let next_term = LeaseId { term: 2, n: 0 };
        assert_eq!(marks.fence(TASK, next_term), (Status::Ok, 0));
        assert_eq!(marks.fence(TASK, lease(900)), (Status::Fenced, 0));
    }

    #[test]
    fn a_closed_task_acknowledges_everything() {
        let mut marks = Marks::default();
        marks.fence(TASK, lease(5));
        marks.close(TASK);
        assert!(marks.open().is_empty());
        assert_eq!(marks.fence(TASK, lease(1)), (Status::Ok, MARK_CLOSED));
        assert_eq!(marks.judge(TASK, 7, lease(1)), (Status::Duplicate, MARK_CLOSED));
    }

    #[test]
    fn a_closed_set_takes_its_tasks_out_of_the_open_ones() {
        let mut marks = Marks::default();
        for shard in 0..4 {
            marks.fence(TaskId::train(0, shard), lease(1));
        }
        marks.close(TaskId::train(0, 0));
        let mut covered = Closed::default();
        for shard in [0, 1, 3] {
            covered.insert(0, shard);
        }
        for _ in 0..2 {
            marks.close_all(&covered);
            assert_eq!(marks.open().keys().collect::<Vec<_>>(), [&TaskId::train(0, 2)]);
            assert_eq!(marks.closed(), &covered);
        }
    }
}
