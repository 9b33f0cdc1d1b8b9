//! Whether the planted truth of the synthetic data can be learnt, and whether it takes interactions to do so:
//! `cargo run --release -p elasticdl-data --example learnable -- [ROWS [BATCH [RATE [ACCUMULATOR [SEED]]]]]`.
//!
//! Trains logistic regression and a factorization machine in one pass with Adagrad, in the plainest way
//! (one thread, mean gradient of a batch), and prints their loss on the test records beside the best possible.

use std::sync::Arc;

use elasticdl_data::synth::{SynthFormat, SynthOptions, criteo};
use elasticdl_data::{Batch, Batches, BatchesConfig, cut, discover};
use elasticdl_spec::mix::{Rng, mix64};
use elasticdl_spec::{Layout, TaskId};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = |default: f64| arguments.next().map_or(Ok(default), |text| text.parse::<f64>());
    let rows = argument(2e6)? as u64;
    let batch = argument(2048.0)? as usize;
    let rate = argument(0.05)? as f32;
    let accumulator = argument(1e-6)? as f32;
    let seed = argument(7.0)? as u64;

    let directory = tempfile::tempdir()?;
    let options = SynthOptions {
        rows,
        test_rows: 200_000,
        files: 2,
        seed,
        out: directory.path().to_path_buf(),
        format: SynthFormat::Parquet,
        threads: 2,
    };
    let truth = criteo(&options, &mut |_| {})?;
    let test = truth.test.expect("test rows were asked for");
    println!("{rows} rows, {} distinct ids, {:.3} positive", truth.distinct_ids, truth.train.positive);
    println!("best possible    logloss {:.4}  auc {:.4}", test.best_logloss, test.best_auc);
    for (name, dim) in [("logistic", 0), ("fm, 8 factors", 8), ("fm, 16 factors", 16)] {
        let mut model = Model::new(dim, rate, accumulator);
        read(&options, "train", batch, &mut |batch| model.train(batch))?;
        let (mut loss, mut records) = (0.0, 0);
        read(&options, "test", 4096, &mut |batch| {
            loss += model.logits(batch).iter().zip(&batch.labels).map(|(x, y)| loss_of(*x, *y)).sum::<f64>();
            records += batch.records;
        })?;
        let loss = loss / records as f64;
        println!("{name:16} logloss {loss:.4}  behind {:.4}", loss - test.best_logloss);
    }
    Ok(())
}

fn loss_of(logit: f32, label: f32) -> f64 {
    let margin = f64::from(if label > 0.5 { -logit } else { logit });
    margin.exp().ln_1p()
}

/// Hands all batches of a split to `take`.
fn read(options: &SynthOptions, split: &str, batch: usize, take: &mut dyn FnMut(&Batch)) -> Outcome<()> {
    let layout = Arc::new(Layout::known("criteo").expect("known by name"));
    let pattern = options.out.join(format!("{split}-*")).display().to_string();
    let mut shards = Vec::new();
    for file in discover(&[pattern], None)? {
        cut(&file, &layout, 65_536, &options.out.join("index"), &mut |shard| shards.push(shard))?;
    }
    Rng::new(1).shuffle(&mut shards);
    for (n, shard) in shards.into_iter().enumerate() {
        let mut batches = Batches::open(BatchesConfig {
            task: TaskId::train(0, n as u32),
            shard,
            layout: layout.clone(),
            format: None,
            batch,
            batches_per_block: (65_536 / batch).max(1) as u32,
            shuffle: true,
            seed: 1,
            first_batch: 0,
        })?;
        while let Some((_, batch, _)) = batches.next()? {
            take(&batch);
        }
    }
    Ok(())
}

/// A factorization machine over ids, with a linear part for ids and numbers; without factors it is
/// logistic regression.
struct Model {
    dim: usize,
    rate: f32,
    accumulator: f32,
    rows: Rows,
    /// For each row, its weight and factors, then their sums of squared gradients, then the gradients.
    values: Vec<f32>,
    dense: [Vec<f32>; 3],
    touched: Vec<usize>,
}

impl Model {
    fn new(dim: usize, rate: f32, accumulator: f32) -> Self {
        let dense = [vec![0.0; 14], vec![accumulator; 14], vec![0.0; 14]];
        Model { dim, rate, accumulator, rows: Rows::new(), values: Vec::new(), dense, touched: Vec::new() }
    }

    fn width(&self) -> usize {
        3 * (self.dim + 1)
    }

    /// The rows of a batch's ids, those that are new being born.
    fn find(&mut self, batch: &Batch) -> Vec<usize> {
        let (width, dim) = (self.width(), self.dim);
        let found: Vec<usize> = batch.ids.iter().map(|id| self.rows.find(*id) * width).collect();
        while self.values.len() < self.rows.len * width {
            let mut rng = Rng::new(mix64(self.values.len() as u64));
            self.values.push(0.0);
            self.values.extend((0..dim).map(|_| rng.normal() as f32 * 0.01));
            self.values.extend((0..=dim).map(|_| self.accumulator));
            self.values.extend((0..=dim).map(|_| 0.0));
        }
        found
    }

    fn logits(&mut self, batch: &Batch) -> Vec<f32> {
        let rows = self.find(batch);
        (0..batch.records)
            .map(|at| self.logit(&batch.numeric[at * 13..][..13], &rows[at * 26..][..26]).0)
            .collect()
    }

    fn logit(&self, numeric: &[f32], rows: &[usize]) -> (f32, Vec<f32>) {
        let mut logit =
            self.dense[0][13] + numeric.iter().zip(&self.dense[0]).map(|(x, w)| x * w).sum::<f32>();
        let (mut sums, mut squares) = (vec![0.0; self.dim], 0.0);
        for row in rows {
            logit += self.values[*row];
            for (sum, v) in sums.iter_mut().zip(&self.values[row + 1..]) {
                *sum += v;
                squares += v * v;
            }
        }
        logit += (sums.iter().map(|sum| sum * sum).sum::<f32>() - squares) / 2.0;
        (logit, sums)
    }

    fn train(&mut self, batch: &Batch) {
        let rows = self.find(batch);
        let (parts, dim) = (self.dim + 1, self.dim);
        for at in 0..batch.records {
            let (numeric, rows) = (&batch.numeric[at * 13..][..13], &rows[at * 26..][..26]);
            let (logit, sums) = self.logit(numeric, rows);
            let slope = (1.0 / (1.0 + (-logit).exp()) - batch.labels[at]) / batch.records as f32;
            for (gradient, x) in self.dense[2].iter_mut().zip(numeric.iter().chain([&1.0])) {
                *gradient += slope * x;
            }
            for row in rows {
                let row = &mut self.values[*row..][..3 * parts];
                row[2 * parts] += slope;
                for k in 0..dim {
                    row[2 * parts + 1 + k] += slope * (sums[k] - row[1 + k]);
                }
            }
            self.touched.extend_from_slice(rows);
        }
        for mut row in std::mem::take(&mut self.touched) {
            for _ in 0..parts {
                let gradient = std::mem::take(&mut self.values[row + 2 * parts]);
                self.values[row + parts] += gradient * gradient;
                if gradient != 0.0 {
                    self.values[row] -= self.rate * gradient / self.values[row + parts].sqrt();
                }
                row += 1;
            }
        }
        let [weights, squares, gradients] = &mut self.dense;
        for ((weight, square), gradient) in weights.iter_mut().zip(squares).zip(gradients) {
            *square += *gradient * *gradient;
            *weight -= self.rate * *gradient / square.sqrt().max(1e-12);
            *gradient = 0.0;
        }
    }
}

/// Ids to numbers from 0: open addressing.
struct Rows {
    slots: Vec<(u64, usize)>,
    len: usize,
}

impl Rows {
    fn new() -> Self {
        Rows { slots: vec![(0, usize::MAX); 1 << 23], len: 0 }
    }

    fn find(&mut self, id: u64) -> usize {
        let mut at = id as usize % self.slots.len();
        loop {
            match self.slots[at] {
                (_, usize::MAX) => {
                    self.slots[at] = (id, self.len);
                    self.len += 1;
                    return self.len - 1;
                }
                (there, row) if there == id => return row,
                _ => at = (at + 1) % self.slots.len(),
            }
        }
    }
}
