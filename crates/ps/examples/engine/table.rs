//! Tables to measure, and the ids that they are asked for.

use elasticdl_ps::{Optimizer, Table};
use elasticdl_spec::mix::{Rng, mix64};
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, OptimizerSpec, TableShape};

/// Ids in one call, about as many as a batch of 4,096 records with 26 fields has after deduplication.
pub const BATCH: usize = 40_000;
/// Calls in one measurement.
pub const BATCHES: usize = 50;

/// A table and the rule by which it learns.
pub struct Trained {
    pub table: Table,
    pub optimizer: Optimizer,
}

impl Trained {
    pub fn new(dim: usize, spec: OptimizerSpec) -> Trained {
        let optimizer = Optimizer::new(spec);
        Trained { table: Table::new(shape(dim), 7, &optimizer), optimizer }
    }

    /// Bears these rows.
    pub fn bear(&mut self, rows: usize, floats: &mut [f32]) {
        let dim = floats.len() / BATCH;
        let mut ids = Vec::with_capacity(BATCH);
        for from in (0..rows).step_by(BATCH) {
            ids.clear();
            ids.extend((from..rows.min(from + BATCH)).map(|row| id(row as u64)));
            self.table.pull(&ids, &mut floats[..ids.len() * dim]);
        }
    }
}

/// The shape of a table with rows of this dim.
pub fn shape(dim: usize) -> TableShape {
    let init = Initializer::Uniform { bound: 0.01 };
    TableShape { name: "t".into(), parts: vec![RowPart { width: dim, init }] }
}

/// The id of the row that was born so late: ids are spread over all numbers, as hashes are.
pub fn id(row: u64) -> u64 {
    mix64(row)
}

/// Uniform rows, in calls.
pub fn batches(rows: usize) -> Vec<Vec<u64>> {
    let mut rng = Rng::new(1);
    (0..BATCHES).map(|_| (0..BATCH).map(|_| rng.below(rows as u64)).collect()).collect()
}

/// Their ids.
pub fn ids(batches: &[Vec<u64>]) -> Vec<Vec<u64>> {
    batches.iter().map(|rows| rows.iter().map(|row| id(*row)).collect()).collect()
}

/// The middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}
