//! A checkpoint of 2 GiB of rows while they are pulled and pushed as fast as can be: what it costs the others.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock and waits")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use elasticdl_ps::Partitions;
use elasticdl_ps::checkpoint::Order;
use elasticdl_ps::partition::{Push, RowGradients};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::{LeaseId, PartitionId, TaskId};
use elasticdl_wire::ps::PushHeader;
use serde_json::{Value, json};

use crate::checkpoint::{DIM, bear};
use crate::memory::ADAGRAD;
use crate::served::hold;
use crate::table::{BATCH, deal, id, median};

const TRAINERS: u64 = 2;
/// How long the trainers are left alone before and after.
const ALONE: Duration = Duration::from_secs(5);

/// What the trainers have done.
#[derive(Default)]
struct Done {
    over: AtomicBool,
    rows: AtomicU64,
    /// The longest that a pull from one partition has taken, lock included, in microseconds.
    longest: AtomicU64,
    /// The most memory that was seen, in kilobytes.
    memory: AtomicU64,
}

/// A stretch of time.
struct Stretch {
    seconds: f64,
    rows_per_second: f64,
    /// Processor time of all threads of this process.
    ns_per_row: f64,
    longest_ms: f64,
    memory_mb: f64,
}

/// A checkpoint: the stretches before, during and after it, and its bytes.
struct Measured {
    before: Stretch,
    during: Stretch,
    after: Stretch,
    bytes: u64,
}

impl Measured {
    fn rows_alone(&self) -> f64 {
        (self.before.rows_per_second + self.after.rows_per_second) / 2.0
    }
}

/// Checkpoints in turn with stretches without one, so many times: whole ones, then those that add to them.
pub fn run(rounds: usize, rows: usize) -> Result<Value, Box<dyn Error>> {
    let (_, partitions) = hold(DIM, ADAGRAD);
    bear(&partitions, rows)?;
    let scratch = tempfile::tempdir()?;
    let done = Arc::new(Done::default());
    let trainers: Vec<_> = (0..TRAINERS)
        .map(|number| {
            let (partitions, done) = (Arc::clone(&partitions), Arc::clone(&done));
            thread::Builder::new()
                .name(format!("train-{number}"))
                .spawn(move || train(&partitions, &done, number, rows))
        })
        .collect::<Result<_, _>>()?;
    let (mut whole, mut added) = (Vec::new(), Vec::new());
    let mut checkpoint = 0;
    alone(&done);
    for _ in 0..rounds {
        for (base, told) in [(None, &mut whole), (Some(checkpoint + 1), &mut added)] {
            checkpoint += 1;
            let before = alone(&done);
            let dir = scratch.path().join(checkpoint.to_string());
            std::fs::create_dir(&dir)?;
            let mut written = Ok(Vec::new());
            let order = Order { checkpoint, base, is_basis: true };
            let during = stretch(&done, || written = partitions.write_checkpoint(&dir, order));
            let bytes: u64 = written?.iter().map(|file| file.sum.bytes).sum();
            let after = alone(&done);
            told.push(Measured { before, during, after, bytes });
            std::fs::remove_dir_all(&dir)?;
        }
    }
    done.over.store(true, Ordering::Relaxed);
    trainers.into_iter().for_each(|trainer| drop(trainer.join()));
    Ok(json!({ "rows": rows, "rounds": rounds, "whole": tell(&whole), "added": tell(&added) }))
}

fn tell(measured: &[Measured]) -> Value {
    let of = |f: &dyn Fn(&Measured) -> f64| median(measured.iter().map(f).collect());
    let most = |f: &dyn Fn(&Measured) -> f64| measured.iter().map(f).fold(0.0, f64::max);
    json!({
        "megabytes": of(&|m| m.bytes as f64 / 1e6),
        "seconds": of(&|m| m.during.seconds),
        "training_lost": of(&|m| 1.0 - m.during.rows_per_second / m.rows_alone()),
        "processor_time_more": of(&|m| 2.0 * m.during.ns_per_row / (m.before.ns_per_row + m.after.ns_per_row) - 1.0),
        "rows_per_second": of(&|m| m.during.rows_per_second),
        "rows_per_second_alone": of(&|m| m.rows_alone()),
        "longest_pull_ms": most(&|m| m.during.longest_ms),
        "longest_pull_ms_alone": most(&|m| m.before.longest_ms.max(m.after.longest_ms)),
        "more_memory": most(&|m| m.during.memory_mb / m.before.memory_mb - 1.0),
    })
}

fn alone(done: &Done) -> Stretch {
    stretch(done, || thread::sleep(ALONE))
}

/// What the trainers do while something is done.
fn stretch(done: &Done, work: impl FnOnce()) -> Stretch {
    done.longest.store(0, Ordering::Relaxed);
    done.memory.store(0, Ordering::Relaxed);
    let over = AtomicBool::new(false);
    let (start, from, worked) = (Instant::now(), done.rows.load(Ordering::Relaxed), processor_seconds());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                done.memory.fetch_max(resident_kilobytes(), Ordering::Relaxed);
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
        memory_mb: done.memory.load(Ordering::Relaxed) as f64 / 1e3,
    }
}

/// Pulls and pushes batches of uniform rows, partition by partition, as a worker's requests do.
fn train(partitions: &Partitions, done: &Done, number: u64, rows: usize) {
    let mut rng = Rng::new(number);
    let (mut floats, gradients) = (vec![0.0; BATCH * DIM], vec![1e-3f32; BATCH * DIM]);
    for batch in 0.. {
        let ids: Vec<u64> = (0..BATCH).map(|_| id(rng.below(rows as u64))).collect();
        let parts = deal(&ids);
        for (ids, part) in parts.iter().zip(0..) {
            let start = Instant::now();
            let out = &mut floats[..ids.len() * DIM];
            let pulled = partitions.with(PartitionId(part), |p| p.pull(0, ids, out));
            assert!(matches!(pulled, Some(Ok(()))), "rows are dealt to their partitions");
            done.longest.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
        let lease = LeaseId { term: 1, n: 1 };
        let task = TaskId::train(0, number as u32);
        let header = PushHeader { task, batch, lease, records: 4096, factor: 1.0 };
        for (ids, part) in parts.iter().zip(0..) {
            let tables = [RowGradients { ids, gradients: &gradients[..ids.len() * DIM] }];
            let push = Push { header, incarnation: 1, version: 0, tables: &tables, tensors: &[] };
            let pushed = partitions.with(PartitionId(part), |p| p.push(&push));
            assert!(matches!(pushed, Some(Ok(_))), "pushes fit the model");
        }
        done.rows.fetch_add(BATCH as u64, Ordering::Relaxed);
        if done.over.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// Memory of this process; 0 where it cannot be told.
fn resident_kilobytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Processor time of this process, in steps of 10 ms; 0 where it cannot be told.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = stat.rsplit(") ").next().into_iter().flat_map(|rest| rest.split(' ').skip(11).take(2));
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
