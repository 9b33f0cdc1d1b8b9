//! Rows of dim 16 in 2 GiB: pulled, pushed and born, beside a gather and a hash map.

use elasticdl_ps::table::Pages;
use elasticdl_spec::OptimizerSpec;
use serde_json::{Value, json};

use crate::clock::{rate, steady_rate};
use crate::gather::{Boxed, Dense};
use crate::table::{
    BATCH, BATCHES, Dealt, PARTITIONS, Trained, batches, births, deal, deal_in_no_order, ids, median,
};

const DIM: usize = 16;
/// Weights and Adagrad's slots.
const STRIDE: usize = 2 * DIM;
/// 2 GiB of such rows.
pub const ROWS: usize = (2 << 30) / (STRIDE * 4);
/// Rows born in one measurement.
const BORN: usize = 2_000_000;

/// What most jobs train with.
pub const ADAGRAD: OptimizerSpec =
    OptimizerSpec::Adagrad { learning_rate: 0.01, initial_accumulator: 0.1, epsilon: 1e-10 };
const ADAM: OptimizerSpec =
    OptimizerSpec::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };

/// Measures in turn, so many times, and tells medians of ratios.
pub fn run(pairs: usize, rows: usize) -> Value {
    let mut floats = vec![0.0f32; BATCH * DIM];
    let mut adagrad = Trained::new(DIM, ADAGRAD);
    let mut adam = Trained::new(DIM, ADAM);
    adagrad.bear(rows, &mut floats);
    adam.bear(rows, &mut floats);
    let (dense, boxed) = (Dense::new(rows, STRIDE), Boxed::new(rows, STRIDE));
    let numbers = batches(rows);
    let ids: Vec<Vec<u64>> = numbers.iter().map(|rows| ids(rows)).collect();
    let dealt: Vec<Dealt> = ids.iter().map(|ids| deal(ids)).collect();
    let unordered: Vec<Dealt> = ids.iter().map(|ids| deal_in_no_order(ids)).collect();
    let unborn: Vec<Dealt> = births(BORN).collect();
    let gradients = vec![1e-3f32; BATCH * DIM];
    let count = BATCH * BATCHES;
    let mut rounds = Vec::new();
    for _ in 0..pairs {
        let gather =
            steady_rate(count, || numbers.iter().for_each(|rows| dense.gather(rows, DIM, &mut floats)));
        let on =
            steady_rate(count, || numbers.iter().for_each(|rows| dense.gather_on(rows, DIM, &mut floats)));
        let pull = steady_rate(count, || dealt.iter().for_each(|ids| adagrad.pull(ids, &mut floats)));
        let any = steady_rate(count, || unordered.iter().for_each(|ids| adagrad.pull(ids, &mut floats)));
        let boxed = steady_rate(count, || ids.iter().for_each(|ids| boxed.pull(ids, DIM, &mut floats)));
        let push = |trained: &mut Trained| {
            steady_rate(count, || dealt.iter().for_each(|ids| trained.push(ids, &gradients)))
        };
        let (adagrad, adam) = (push(&mut adagrad), push(&mut adam));
        let mut fresh = Trained::new(DIM, ADAGRAD);
        warm(BORN * STRIDE * 2);
        let born = rate(BORN, || unborn.iter().for_each(|ids| fresh.pull(ids, &mut floats)));
        rounds.push([gather, pull, boxed, adagrad, adam, born, any, on]);
    }
    let of = |f: &dyn Fn(&[f64; 8]) -> f64| median(rounds.iter().map(f).collect());
    json!({
        "rows": rows, "pairs": pairs, "partitions": PARTITIONS, "bytes_per_row": adagrad.bytes_per_row(),
        "million_rows_per_second": {
            "gather": of(&|r| r[0]), "pull": of(&|r| r[1]), "boxed": of(&|r| r[2]),
            "adagrad": of(&|r| r[3]), "adam": of(&|r| r[4]), "born": of(&|r| r[5]),
            "unordered": of(&|r| r[6]), "gather_on": of(&|r| r[7]),
        },
        "pull_of_gather_on": of(&|r| r[1] / r[7]), "unordered_of_gather": of(&|r| r[6] / r[0]),
        "pull_of_gather": of(&|r| r[1] / r[0]), "pull_of_boxed": of(&|r| r[1] / r[2]),
        "adagrad_of_pull": of(&|r| r[3] / r[1]), "adam_of_pull": of(&|r| r[4] / r[1]),
    })
}

/// Has memory for so many floats at hand. The kernel of a virtual machine gives memory that was free for seconds back to
/// its host, and to get it again takes many times as long as to clear it.
fn warm(floats: usize) {
    Pages::huge(floats).fill(1.0);
}
