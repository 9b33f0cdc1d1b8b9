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
use crate::pace::{self, Pace, Trained, of_the_clock, of_this_thread};

/// Files written at a time while nobody trains: while one of them is synced, another one is made. Else there is one.
const WRITERS: usize = 2;
/// While somebody trains, a writer rests so many times as long as it works on a file. It does not rest long: the longer
/// a partition is being written, the more of its rows change meanwhile, and have to be put aside first.
const REST: u32 = 1;
/// Work that is rested from at once, at most: rows that were put aside come many at a time.
const WORK_MAX: Duration = Duration::from_millis(500);
/// Between two files it rests so many times as long as the last one took. Nothing has to be put aside then.
const REST_BETWEEN: u32 = 10;

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
        let (trained, second_from) = (Trained::default(), of_the_clock() + pace::IDLE);
        let write = |number: usize| {
            let mut written = Vec::new();
            loop {
                // By then the first has seen whether somebody trains.
                let waits = || number > 0 && (of_the_clock() < second_from || trained.lately());
                while waits() && !todo().is_empty() {
                    pace::between_looks();
                }
                let Some(partition) = todo().pop_front() else { return Ok(written) };
                let began = of_this_thread();
                match self.write_partition(partition, dir, order, &trained) {
                    Ok(file) => written.push(file),
                    Err(error) => {
                        // A checkpoint without one of its files is none.
                        todo().clear();
                        return Err(error);
                    }
                }
                let work = of_this_thread().saturating_sub(began);
                let next = todo().front().copied();
                next.iter().for_each(|next| self.rest_before(*next, work * REST_BETWEEN, &trained));
            }
        };
        let outcomes: Vec<Result<Vec<Written>>> = thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS.min(todo().len()))
                .map(|i| Builder::new().name(format!("ps-write-{i}")).spawn_scoped(scope, move || write(i)))
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

    /// Rests for so long before it goes on with a partition, unless nobody trains any more.
    fn rest_before(&self, next: PartitionId, time: Duration, trained: &Trained) {
        let until = of_the_clock() + time;
        let mut seen = None;
        while trained.lately() && of_the_clock() < until {
            pace::between_looks();
            let pushes = self.with(next, |p| self.pushes_seen(p));
            if seen.replace(pushes).is_some_and(|before| before != pushes) {
                trained.again();
            }
        }
    }

    /// A number that changes with every push that this partition or any other has, as it is now.
    fn pushes_seen(&self, partition: &crate::Partition) -> u64 {
        partition.version().wrapping_add(self.pushes.load(Ordering::Relaxed))
    }

    fn write_partition(
        &self,
        partition: PartitionId,
        dir: &Path,
        order: Order,
        trained: &Trained,
    ) -> Result<Written> {
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
                    let take = |p: &mut crate::Partition| {
                        if pace.saw(self.pushes_seen(p)) {
                            trained.again();
                        }
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
