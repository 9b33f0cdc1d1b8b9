//! Threads that pull and push batches of uniform rows as fast as can be, while something else is measured.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock and waits")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elasticdl_ps::Partition;
use elasticdl_ps::audit::{Tally, digest};
use elasticdl_ps::partition::{Push, RowGradients};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::{LeaseId, PartitionId, TaskId};
use elasticdl_wire::ps::{PushHeader, Status};

use crate::checkpoint::DIM;
use crate::clock::{processor_seconds, resident_bytes};
use crate::table::{BATCH, deal, id};

const TRAINERS: u64 = 2;
/// Of a batch.
const RECORDS: u64 = 4096;
/// How long they are left alone before and after what is measured.
const ALONE: Duration = Duration::from_secs(5);

/// Where partitions are: works on one, with the incarnation that it should have, until that has an outcome.
pub trait Served: Send + Sync + 'static {
    fn on<T>(&self, id: PartitionId, work: impl FnMut(&mut Partition, u64) -> Option<T>) -> T;
}

/// Trainers at work.
pub struct Trainers {
    done: Arc<Done>,
    threads: Vec<JoinHandle<u64>>,
}

/// What they have done.
#[derive(Default)]
struct Done {
    over: AtomicBool,
    rows: AtomicU64,
    /// The longest that the pull of a batch has taken, with all that it waited for, in microseconds.
    longest: AtomicU64,
    /// The most memory that was seen, in bytes.
    memory: AtomicU64,
}

/// A stretch of time.
pub struct Stretch {
    pub seconds: f64,
    pub rows_per_second: f64,
    /// Processor time of all threads of this process.
    pub ns_per_row: f64,
    pub longest_ms: f64,
    pub memory_mb: f64,
}

impl Trainers {
    /// Begins to train on so many rows.
    pub fn start(served: &Arc<impl Served>, rows: usize) -> io::Result<Self> {
        let done = Arc::new(Done::default());
        let start = |number| {
            let (served, done) = (Arc::clone(served), Arc::clone(&done));
            let named = thread::Builder::new().name(format!("train-{number}"));
            named.spawn(move || train(&*served, &done, number, rows))
        };
        let threads = (0..TRAINERS).map(start).collect::<io::Result<_>>()?;
        let trainers = Trainers { done, threads };
        trainers.alone();
        Ok(trainers)
    }

    /// What they do while nothing else is done.
    pub fn alone(&self) -> Stretch {
        self.during(|| thread::sleep(ALONE))
    }

    /// What they do while something is done.
    pub fn during(&self, work: impl FnOnce()) -> Stretch {
        let done = &self.done;
        done.longest.store(0, Ordering::Relaxed);
        done.memory.store(0, Ordering::Relaxed);
        let over = AtomicBool::new(false);
        let (start, from, worked) = (Instant::now(), done.rows.load(Ordering::Relaxed), processor_seconds());
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    done.memory.fetch_max(resident_bytes(), Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(20));
                }
            });
            work();
            over.store(true, Ordering::Relaxed);
        });
        let seconds = start.elapsed().as_secs_f64();
        let rows = (done.rows.load(Ordering::Relaxed) - from) as f64;
        Stretch {
            seconds,
            rows_per_second: rows / seconds,
            ns_per_row: (processor_seconds() - worked) * 1e9 / rows,
            longest_ms: done.longest.load(Ordering::Relaxed) as f64 / 1e3,
            memory_mb: done.memory.load(Ordering::Relaxed) as f64 / 1e6,
        }
    }

    /// Ends them; one that has panicked makes the measurement worth nothing. What every partition is to have counted now.
    pub fn end(self) -> Tally {
        self.done.over.store(true, Ordering::Relaxed);
        let batches = self.threads.into_iter().map(|thread| thread.join().expect("every push counts once"));
        let mut due = Tally::default();
        for (number, batches) in (0..).zip(batches) {
            due.records += batches * RECORDS;
            due.batches += batches;
            let digests = (0..batches).map(|batch| digest(task(number), batch));
            due.digest = digests.fold(due.digest, u64::wrapping_add);
        }
        due
    }
}

fn task(number: u64) -> TaskId {
    TaskId::train(0, number as u32)
}

/// Pulls and pushes batches, partition by partition, as a worker's requests do. Tells how many.
fn train(served: &impl Served, done: &Done, number: u64, rows: usize) -> u64 {
    let mut rng = Rng::new(number);
    let (mut floats, gradients) = (vec![0.0; BATCH * DIM], vec![1e-3f32; BATCH * DIM]);
    let lease = LeaseId { term: 1, n: 1 };
    for batch in 0.. {
        let ids: Vec<u64> = (0..BATCH).map(|_| id(rng.below(rows as u64))).collect();
        let parts = deal(&ids);
        let start = Instant::now();
        for (ids, part) in parts.iter().zip(0..) {
            let out = &mut floats[..ids.len() * DIM];
            served.on(PartitionId(part), |partition, life| {
                let here = partition.admit(life) == Status::Ok;
                here.then(|| partition.pull(0, ids, out).expect("rows are dealt to their partitions"))
            });
        }
        done.longest.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        let header = PushHeader { task: task(number), batch, lease, records: RECORDS, factor: 1.0 };
        for (ids, part) in parts.iter().zip(0..) {
            let tables = [RowGradients { ids, gradients: &gradients[..ids.len() * DIM] }];
            served.on(PartitionId(part), |partition, incarnation| {
                let push = Push { header, incarnation, version: 0, tables: &tables, tensors: &[] };
                let status = partition.push(&push).expect("pushes fit the model").status;
                (status != Status::WrongIncarnation)
                    .then(|| assert_eq!(status, Status::Ok, "each counts once"))
            });
        }
        done.rows.fetch_add(BATCH as u64, Ordering::Relaxed);
        if done.over.load(Ordering::Relaxed) {
            return batch + 1;
        }
    }
    unreachable!("there are more batches than anybody trains")
}
