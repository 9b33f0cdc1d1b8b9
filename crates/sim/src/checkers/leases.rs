//! A task has one lease that counts. The newest master gives none for a task that is held, its numbers only
//! grow, and no partition applies a push under a lease older than one that it has seen.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_master::ledger::Book;
use elasticdl_ps::Partition;
use elasticdl_spec::{LeaseId, PartitionId, TaskId};
use elasticdl_wire::ps::{Answer, PushHeader, Status};

use super::Violation;
use crate::net::Pid;

/// What is known of leases.
#[derive(Debug, Default)]
pub struct Leases {
    term: u64,
    /// The newest lease given.
    newest: Option<LeaseId>,
    /// The highest lease seen by a partition of a process.
    seen: BTreeMap<(Pid, PartitionId), BTreeMap<TaskId, LeaseId>>,
    /// What is wrong.
    pub found: Option<Violation>,
}

impl Leases {
    /// A master has claimed a term.
    pub fn begun(&mut self, term: u64) {
        assert!(term > self.term, "the disk gives out growing terms");
        self.term = term;
    }

    /// The newest master gives a lease; `book` is what it had written before.
    pub fn given(&mut self, now: Duration, task: TaskId, lease: LeaseId, book: &Book) {
        if let Some((held, worker)) = book.leased.get(&task) {
            self.wrong(
                now,
                format!("{task} is given under lease {lease} while {worker} holds it under {held}"),
            );
        }
        if self.newest.is_some_and(|newest| newest >= lease) || lease.term != self.term {
            self.wrong(
                now,
                format!("lease {lease} of {task} is not above {:?} in term {}", self.newest, self.term),
            );
        }
        self.newest = Some(lease);
    }

    /// A process has opened a partition, new or with what a checkpoint remembers.
    pub fn opened(&mut self, pid: Pid, partition: &Partition) {
        let open = partition.memory().marks.open().iter();
        self.seen.insert((pid, partition.id()), open.map(|(task, open)| (*task, open.lease)).collect());
    }

    /// A partition was asked for its mark.
    pub fn fenced(&mut self, pid: Pid, task: TaskId, lease: LeaseId, answer: &Answer) {
        if answer.status == Status::Ok {
            self.see((pid, answer.partition), task, lease);
        }
    }

    /// A partition was pushed to.
    pub fn pushed(&mut self, now: Duration, pid: Pid, header: &PushHeader, answer: &Answer) {
        if answer.status != Status::Ok {
            return;
        }
        let PushHeader { task, batch, lease, .. } = *header;
        let highest = self.see((pid, answer.partition), task, lease);
        if lease < highest {
            let partition = answer.partition;
            self.wrong(
                now,
                format!(
                    "{partition} applied {task} batch {batch} under lease {lease} after it saw {highest}"
                ),
            );
        }
    }

    /// The highest lease seen there, this one included.
    fn see(&mut self, place: (Pid, PartitionId), task: TaskId, lease: LeaseId) -> LeaseId {
        let highest = self.seen.entry(place).or_default().entry(task).or_insert(lease);
        *highest = lease.max(*highest);
        *highest
    }

    fn wrong(&mut self, at: Duration, what: String) {
        self.found.get_or_insert(Violation { checker: "leases", at, what });
    }
}
