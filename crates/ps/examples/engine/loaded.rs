//! A checkpoint of 2 GiB of rows while they are pulled and pushed as fast as can be: what it costs the others.

use std::error::Error;

use elasticdl_ps::checkpoint::Order;
use elasticdl_ps::{Partition, Partitions};
use elasticdl_spec::PartitionId;
use serde_json::{Value, json};

use crate::checkpoint::{DIM, bear};
use crate::memory::ADAGRAD;
use crate::served::hold;
use crate::table::median;
use crate::trainers::{Served, Stretch, Trainers};

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

    fn longest_alone(&self) -> f64 {
        self.before.longest_ms.max(self.after.longest_ms)
    }
}

/// Checkpoints in turn with stretches without one, so many times: whole ones, then those that add to them.
pub fn run(rounds: usize, rows: usize) -> Result<Value, Box<dyn Error>> {
    let (_, partitions) = hold(DIM, ADAGRAD);
    bear(&partitions, rows)?;
    let scratch = tempfile::tempdir()?;
    let (mut whole, mut added) = (Vec::new(), Vec::new());
    let mut checkpoint = 0;
    let trainers = Trainers::start(&partitions, rows)?;
    for _ in 0..rounds {
        for (base, told) in [(None, &mut whole), (Some(checkpoint + 1), &mut added)] {
            checkpoint += 1;
            let before = trainers.alone();
            let dir = scratch.path().join(checkpoint.to_string());
            std::fs::create_dir(&dir)?;
            let mut written = Ok(Vec::new());
            let order = Order { checkpoint, base, is_basis: true };
            let during = trainers.during(|| written = partitions.write_checkpoint(&dir, order));
            let bytes: u64 = written?.iter().map(|file| file.sum.bytes).sum();
            let after = trainers.alone();
            told.push(Measured { before, during, after, bytes });
            std::fs::remove_dir_all(&dir)?;
        }
    }
    trainers.end();
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
        "longest_pull_ms_alone": most(&|m| m.longest_alone()),
        "longest_pull_ms_more": most(&|m| m.during.longest_ms - m.longest_alone()),
        "more_memory": most(&|m| m.during.memory_mb / m.before.memory_mb - 1.0),
    })
}

/// Partitions that stay where they are.
impl Served for Partitions {
    fn on<T>(&self, id: PartitionId, mut work: impl FnMut(&mut Partition, u64) -> Option<T>) -> T {
        self.with(id, |partition| work(partition, 1)).flatten().expect("the partition is here")
    }
}
