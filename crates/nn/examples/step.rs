//! Training speed of the models on this machine, without data, servers or network.
//!
//! `cargo run --release -p elasticdl-nn --example step -- [threads] [seconds] [model]` prints records
//! per second of processor time for the configurations of the benchmark. Each thread has its own model
//! and half a batch. A plain matrix product is timed between the steps, so that figures of a busy
//! machine can be compared: the last column is how much of the product's speed the whole step has.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

use burn::tensor::{Device, Distribution, Tensor};
use elasticdl_nn::{Gradients, Input, TableInput, build};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::{ModelSpec, Zoo};
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RECORDS: usize = 2048;
const NUMERIC: usize = 13;
const CATEGORICAL: usize = 26;
const UNIQUE: usize = 30_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| arguments.get(at).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (threads, seconds) = (number(0, 1), number(1, 3));
    let wanted = arguments.get(2).map_or("", String::as_str);
    let run_time = Duration::from_secs(seconds as u64);
    println!("{:34} {threads} thread(s), records per second of processor time", "");
    println!("{:34} {:>9} {:>9} {:>8} {:>8}", "model", "median", "best", "GFLOP/s", "of SGEMM");
    for (name, zoo, embedding_dim, hidden) in [
        ("deepfm dim 16 hidden 400-400-400", Zoo::Deepfm, 16, vec![400, 400, 400]),
        ("deepfm dim 8 hidden 16-4", Zoo::Deepfm, 8, vec![16, 4]),
        ("wide-deep dim 8 hidden 16-4", Zoo::WideDeep, 8, vec![16, 4]),
        ("lr", Zoo::Lr, 1, vec![]),
    ] {
        if !name.contains(wanted) {
            continue;
        }
        let spec = ModelSpec { zoo, embedding_dim, hidden };
        let runs: Vec<Run> = std::thread::scope(|scope| {
            let spec = &spec;
            let runs: Vec<_> = (0..threads).map(|i| scope.spawn(move || run(spec, run_time, i))).collect();
            runs.into_iter().map(|run| run.join().expect("a run does not panic")).collect()
        });
        let median: f64 = runs.iter().map(|run| RECORDS as f64 / run.median).sum();
        let best: f64 = runs.iter().map(|run| RECORDS as f64 / run.best).sum();
        let sgemm: f64 = runs.iter().map(|run| run.sgemm).sum();
        let share = 100.0 * median * flops(&spec) / sgemm;
        println!("{name:34} {median:9.0} {best:9.0} {:8.1} {share:7.0}%", sgemm * 1e-9);
    }
}

/// Floating point operations of a record's matrix products, forward and backward.
fn flops(spec: &ModelSpec) -> f64 {
    let mut fan_in = NUMERIC + CATEGORICAL * spec.embedding_dim;
    let mut products = 0;
    for &width in &spec.hidden {
        products += fan_in * width;
        fan_in = width;
    }
    6.0 * products as f64
}

/// Seconds of the median and the fastest step; FLOP/s of the median product between them.
struct Run {
    median: f64,
    best: f64,
    sgemm: f64,
}

fn run(spec: &ModelSpec, run_time: Duration, seed: usize) -> Run {
    let mut model = build(spec, NUMERIC, CATEGORICAL).expect("the benchmark's models are valid");
    let mut rng = Rng::new(seed as u64);
    let shape = model.shape().clone();
    let width = shape.tables[0].width();
    let tensors: Vec<Vec<f32>> = shape.tensors.iter().map(|t| t.init_values(7)).collect();
    let mut rows = vec![0.0; UNIQUE * width];
    for (id, row) in rows.chunks_exact_mut(width).enumerate() {
        shape.tables[0].init_row(7, id as u64, row);
    }
    let numeric: Vec<f32> = (0..RECORDS * NUMERIC).map(|_| rng.uniform() as f32 * 3.0).collect();
    // Squared uniforms: some rows are far more frequent than others, as ids are.
    let index: Vec<u32> =
        (0..RECORDS * CATEGORICAL).map(|_| (rng.uniform().powi(2) * UNIQUE as f64) as u32).collect();
    let labels: Vec<f32> = (0..RECORDS).map(|_| rng.below(2) as f32).collect();
    let tables = [TableInput { rows: &rows, index: &index }];
    let input = Input { records: RECORDS, numeric: &numeric, labels: &labels, tables: &tables };
    let dense: Vec<&[f32]> = tensors.iter().map(Vec::as_slice).collect();
    let mut gradients = Gradients::default();
    gradients.reset(&shape, &[UNIQUE]);

    let device = Device::flex();
    let left = Tensor::<2>::random([512, 400], Distribution::Default, &device);
    let right = Tensor::<2>::random([400, 400], Distribution::Default, &device);
    let (mut steps, mut products) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while start.elapsed() < run_time {
        steps.push(timed(|| {
            model.load(&dense);
            let loss = model.train(&input, 2 * RECORDS, &mut gradients);
            assert!(loss.is_finite(), "random data has a finite loss");
        }));
        if steps.len() % 8 == 1 {
            products.push(timed(|| drop(left.clone().matmul(right.clone()))));
        }
    }
    steps.sort_by(f64::total_cmp);
    products.sort_by(f64::total_cmp);
    Run {
        median: steps[steps.len() / 2],
        best: steps[0],
        sgemm: 2.0 * 512.0 * 400.0 * 400.0 / products[products.len() / 2],
    }
}

/// Seconds that this thread ran for `f`: what others on a busy machine took is not counted.
fn timed(f: impl FnOnce()) -> f64 {
    let start = clock_gettime(ClockId::ThreadCPUTime);
    f();
    let end = clock_gettime(ClockId::ThreadCPUTime);
    (end.tv_sec - start.tv_sec) as f64 + (end.tv_nsec - start.tv_nsec) as f64 * 1e-9
}
