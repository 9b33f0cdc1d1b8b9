//! All partitions of a server into the files of a checkpoint.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};
use std::time::Duration;

use elasticdl_spec::PartitionId;
use elasticdl_wire::failpoint;

use super::{Partitions, Written};
use crate::checkpoint::{self, Cut, Order};
use crate::error::{Error, Result};
use crate::pace::{Pace, of_this_thread};

/// Files written at a time: while one of them is synced, another one is made.
const WRITERS: usize = 2;
/// While somebody trains, a writer rests so many times as long as it works: it takes a thirtieth of a processor, and
/// little of what memory and disk can do in any moment.
const REST: u32 = 29;
/// Rows that were put aside come many at a time.
const WORK_MAX: Duration = Duration::from_millis(500);

impl Partitions {
    /// Writes every partition into `dir`, a few at a time. Each is cut at one moment of its own and then taken away
    /// piece by piece, so that its lock is held for about a millisecond at a time.
    pub fn write_checkpoint(&self, dir: &Path, order: Order) -> Result<Vec<Written>> {
        // What was handed over is another server's to write.
        let all = self.each(|partition| partition.is_handed_over()).into_iter();
        let todo: VecDeque<PartitionId> =
            all.filter(|(_, handed)| *handed != Some(true)).map(|(id, _)| id).collect();
        let todo = Mutex::new(todo);
        let todo = || todo.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || {
            let mut written = Vec::new();
            loop {
                let Some(partition) = todo().pop_front() else { return Ok(written) };
                match self.write_partition(partition, dir, order) {
                    Ok(file) => written.push(file),
                    Err(error) => {
                        // A checkpoint without one of its files is none.
                        todo().clear();
                        return Err(error);
                    }
                }
            }
        };
        let outcomes: Vec<Result<Vec<Written>>> = thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS.min(todo().len()))
                .map(|i| Builder::new().name(format!("ps-write-{i}")).spawn_scoped(scope, write))
                .collect();
            let joined = writers.into_iter().map(|writer| {
                let writer = writer.map_err(|e| Error::io("starting to write a checkpoint", e))?;
                writer.join().map_err(|_| Error::Panicked("writing a checkpoint"))?
            });
            joined.collect()
        });
        let written: Result<Vec<Vec<Written>>> = outcomes.into_iter().collect();
        let mut written: Vec<Written> = written?.into_iter().flatten().collect();
        written.sort_unstable_by_key(|file| file.partition);
        checkpoint::sync(dir)?;
        Ok(written)
    }

    fn write_partition(&self, partition: PartitionId, dir: &Path, order: Order) -> Result<Written> {
        let cut = self.with(partition, |p| Cut::begin(p, order)).ok_or(Error::Torn { partition })?;
        let head = cut.head();
        let (incarnation, base) = (head.incarnation, head.base);
        let marks = head.marks.iter().map(|(task, open)| (*task, open.mark)).collect();
        let written = match failpoint::pass("ps.cut") {
            Err(broken) => Err(Error::io(format!("writing the checkpoint of {partition}"), broken)),
            Ok(()) => {
                let mut pace = Pace::new(REST, WORK_MAX, of_this_thread);
                checkpoint::write(cut, dir, |work| {
                    pace.rest();
                    let pushes = self.pushes.load(Ordering::Relaxed);
                    let take = |p: &mut crate::Partition| {
                        pace.saw(p.version().wrapping_add(pushes));
                        work(p);
                    };
                    self.with(partition, take).ok_or(Error::CutLost { partition })
                })
            }
        };
        let over = |p: &mut crate::Partition| match &written {
            Ok(_) => p.end_cut(order.checkpoint),
            Err(_) => p.abandon_cut(order.checkpoint),
        };
        // One that is not here any more has no use for it.
        let _ = self.with(partition, over);
        Ok(Written { partition, incarnation, base, sum: written?, marks })
    }
}
