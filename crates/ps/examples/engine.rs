//! How fast a table is: rows born, pulled and pushed per second on one core.
//!
//! `cargo run --release -p elasticdl-ps --example engine -- [rows] [dim]`

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::Instant;

use elasticdl_ps::{Optimizer, Table};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, OptimizerSpec, TableShape};

/// Ids in one call, as many as a batch of 4,096 records with 26 fields has after deduplication.
const BATCH: usize = 40_000;
const BATCHES: usize = 100;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>().expect("a number"));
    let sizes = arguments.next().map_or(vec![100_000, 1_000_000, 16_000_000], |n| vec![n]);
    let dims = arguments.next().map_or(vec![8, 16, 17, 64], |d| vec![d]);
    println!("million rows per second, one thread, batches of {BATCH} uniform ids");
    println!("{:>10} {:>4} {:<8} {:>7} {:>7} {:>7} {:>9}", "rows", "dim", "rule", "born", "pull", "push", "bytes/row");
    for rows in sizes {
        for dim in &dims {
            for (name, spec) in RULES {
                if rows * dim <= 256_000_000 {
                    measure(rows, *dim, name, spec);
                }
            }
        }
    }
}

const RULES: [(&str, OptimizerSpec); 3] = [
    ("sgd", OptimizerSpec::Sgd { learning_rate: 0.01 }),
    ("adagrad", OptimizerSpec::Adagrad { learning_rate: 0.01, initial_accumulator: 0.1, epsilon: 1e-10 }),
    ("adam", OptimizerSpec::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }),
];

fn measure(rows: usize, dim: usize, name: &str, spec: OptimizerSpec) {
    let optimizer = Optimizer::new(spec);
    let init = Initializer::Uniform { bound: 0.01 };
    let shape = TableShape { name: "t".into(), parts: vec![RowPart { width: dim, init }] };
    let mut table = Table::new(shape, 7, &optimizer);
    let mut floats = vec![0.0f32; BATCH * dim];

    let all: Vec<u64> = (0..rows as u64).collect();
    let born = rate(rows, || {
        for ids in all.chunks(BATCH) {
            table.pull(ids, &mut floats[..ids.len() * dim]);
        }
    });
    let mut rng = Rng::new(1);
    let batches: Vec<Vec<u64>> =
        (0..BATCHES).map(|_| (0..BATCH).map(|_| rng.below(rows as u64)).collect()).collect();
    let pull = rate(BATCH * BATCHES, || batches.iter().for_each(|ids| table.pull(ids, &mut floats)));
    floats.fill(1e-3);
    let push = rate(BATCH * BATCHES, || batches.iter().for_each(|ids| table.push(ids, &floats, &optimizer)));
    let bytes = table.bytes() as f64 / table.len() as f64;
    println!("{rows:>10} {dim:>4} {name:<8} {born:>7.1} {pull:>7.1} {push:>7.1} {bytes:>9.0}");
}

fn rate(count: usize, mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    count as f64 / start.elapsed().as_secs_f64() / 1e6
}
