//! All partitions of a server into the files of a checkpoint.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
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
use crate::pace::{self, Pace, Toll, Trained, Watch, of_the_clock, of_this_thread};

/// Files written at a time while nobody trains: while one of them is synced, another one is made. Else no second one is
/// begun.
const WRITERS: usize = 2;
/// While somebody trains, a writer rests so many times as long as it works on a file. It does not rest long: the longer
/// a partition is being written, the more of its rows change meanwhile, and have to be put aside first.
const REST: u32 = 1;
/// Work that is rested from at once, at most: rows that were put aside come many at a time.
const WORK_MAX: Duration = Duration::from_millis(500);
/// Between two files it rests so long that training loses one part of so many, as far as can be seen. Nothing is put
/// aside then.
const LOST_SHARE: u32 = 20;
/// But so many times as long as it has worked on the last one.
const REST_BETWEEN: RangeInclusive<u32> = 8..=20;

impl Partitions {
    /// Writes every partition into `dir`, one or two at a time. Each is cut at one moment of its own, for which its lock is
    /// held while its tensors are copied; its rows are then taken away piece by piece, about a millisecond at a time.
    pub fn write_checkpoint(&self, dir: &Path, order: Order) -> Result<Vec<Written>> {
        // What was handed over is another server's to write.
        let all = self.each(|partition| partition.is_handed_over()).into_iter();
        let todo: VecDeque<PartitionId> =
            all.filter(|(_, handed)| *handed != Some(true)).map(|(id, _)| id).collect();
        let todo = Mutex::new(todo);
        let todo = || todo.lock().unwrap_or_else(PoisonError::into_inner);
        let next = || todo().front().copied();
        let trained = Trained::new(of_the_clock);
        let write = |number: usize| {
            let mut written = Vec::new();
            let mut toll = Toll::new(LOST_SHARE, REST_BETWEEN);
            loop {
                while number > 0
                    && !trained.is_idle()
                    && let Some(next) = next()
                {
                    pace::between_looks();
                    self.look(next, &trained);
                }
                let Some(partition) = todo().pop_front() else { return Ok(written) };
                let (work, watch) = (of_this_thread(), self.watch(partition, &trained));
                match self.write_partition(partition, dir, order, &trained) {
                    Ok(file) => written.push(file),
                    Err(error) => {
                        // A checkpoint without one of its files is none.
                        todo().clear();
                        return Err(error);
                    }
                }
                let (work, worked) = (of_this_thread().saturating_sub(work), watch.seen());
                // Where there is nothing left to do, or it went wrong for another writer, there is nothing to wait for.
                if let Some(next) = next() {
                    let watch = self.watch(next, &trained);
                    let mut rested = watch.seen();
                    while trained.lately()
                        && rested.time < toll.rest(work, worked, rested)
                        && todo().front() == Some(&next)
                    {
                        pace::between_looks();
                        rested = watch.seen();
                    }
                    toll.rested(rested);
                }
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

    /// Looks whether somebody trains, and tells how many pushes were applied by now, counted from any number. `None`: the
    /// partition is not here any more, as whoever writes it will find.
    fn look(&self, partition: PartitionId, trained: &Trained) -> Option<u64> {
        let pushes = self.with(partition, |p| self.pushes_seen(p));
        pushes.iter().for_each(|pushes| trained.saw(partition, *pushes));
        pushes
    }

    /// Watches from now on what training does to this partition.
    fn watch(&self, partition: PartitionId, trained: &Trained) -> Watch<impl Fn() -> Option<u64>> {
        Watch::begin(move || self.look(partition, trained))
    }

    /// A number that changes with every push to this partition, and every request that pushes to another one.
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
                        let pushes = self.pushes_seen(p);
                        pace.saw(pushes);
                        trained.saw(partition, pushes);
                        work(p);
                    };
                    self.with(partition, take).ok_or(Error::CutLost { partition })
                })
            }
        };
        let over = |p: &mut crate::Partition| {
            // The disk may have taken its time.
            trained.saw(partition, self.pushes_seen(p));
            match &written {
                Ok(_) => p.end_cut(order.checkpoint),
                Err(_) => p.abandon_cut(order.checkpoint),
            }
        };
        // One that is not here any more has no use for it.
        let _ = self.with(partition, over);
        Ok(Written { partition, incarnation, base, sum: written?, marks })
    }
}
