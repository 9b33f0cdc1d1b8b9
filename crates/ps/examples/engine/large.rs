//! A hundred million rows of dim 8: how much memory they take, and whether they are found as fast as few.

use elasticdl_spec::OptimizerSpec;
use serde_json::{Value, json};

use crate::clock::{peak_bytes, steady_rate};
use crate::gather::Dense;
use crate::table::{BATCH, BATCHES, Dealt, PARTITIONS, Trained, batches, deal, ids, median};

const DIM: usize = 8;
/// The many, and the few.
pub const ROWS: usize = 100_000_000;
const FEW: usize = 1_000_000;

/// Measures both in turn, so many times.
pub fn run(pairs: usize, rows: usize) -> Value {
    let sgd = OptimizerSpec::Sgd { learning_rate: 0.01 };
    let mut floats = vec![0.0f32; BATCH * DIM];
    let mut many = Trained::new(DIM, sgd);
    many.bear(rows, &mut floats);
    // Everything else comes later and does not count.
    let (peak, bytes) = (peak_bytes(), many.bytes_per_row());
    let mut few = Trained::new(DIM, sgd);
    few.bear(FEW, &mut floats);
    let (many_numbers, few_numbers) = (batches(rows), batches(FEW));
    let dealt =
        |batches: &[Vec<u64>]| -> Vec<Dealt> { batches.iter().map(|rows| deal(&ids(rows))).collect() };
    let (many_ids, few_ids) = (dealt(&many_numbers), dealt(&few_numbers));
    let (many_dense, few_dense) = (Dense::new(rows, DIM), Dense::new(FEW, DIM));
    let mut ratios: Vec<[f64; 4]> = Vec::new();
    for _ in 0..pairs {
        let mut pull = |trained: &mut Trained, ids: &[Dealt]| {
            steady_rate(BATCH * BATCHES, || ids.iter().for_each(|ids| trained.pull(ids, &mut floats)))
        };
        let (of_many, of_few) = (pull(&mut many, &many_ids), pull(&mut few, &few_ids));
        let mut gather = |dense: &Dense, numbers: &[Vec<u64>]| {
            steady_rate(BATCH * BATCHES, || {
                numbers.iter().for_each(|rows| dense.gather(rows, DIM, &mut floats))
            })
        };
        ratios.push([of_many, gather(&many_dense, &many_numbers), of_few, gather(&few_dense, &few_numbers)]);
    }
    let of = |f: &dyn Fn(&[f64; 4]) -> f64| median(ratios.iter().map(f).collect());
    json!({
        "rows": rows, "pairs": pairs, "partitions": PARTITIONS, "peak_bytes": peak, "bytes_per_row": bytes,
        "pull_of_gather": of(&|r| r[0] / r[1]), "pull_of_gather_few": of(&|r| r[2] / r[3]),
        "large_of_few": of(&|r| (r[0] / r[1]) / (r[2] / r[3])),
    })
}
