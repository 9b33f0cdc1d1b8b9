//! Tables to measure, and the ids that they are asked for.

use elasticdl_ps::{Optimizer, Table};
use elasticdl_spec::mix::{Rng, mix64};
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, OptimizerSpec, TableShape, TableSpec};

/// Ids in one call, about as many as a batch of 4,096 records with 26 fields has after deduplication.
pub const BATCH: usize = 40_000;
/// Calls in one measurement.
pub const BATCHES: usize = 50;

/// Partitions of a job by default: a server holds a table in so many pieces, and workers deal ids to them.
pub const PARTITIONS: u32 = 8;

/// A table and the rule by which it learns.
pub struct Trained {
    parts: Vec<Table>,
    pub optimizer: Optimizer,
}

/// The ids of one call, by partition.
pub type Dealt = Vec<Vec<u64>>;

impl Trained {
    pub fn new(dim: usize, spec: OptimizerSpec) -> Trained {
        let optimizer = Optimizer::new(spec);
        let part = |_| Table::new(shape(dim), 7, &optimizer).with(TableSpec::default(), PARTITIONS);
        Trained { parts: (0..PARTITIONS).map(part).collect(), optimizer }
    }

    /// Bears these rows.
    pub fn bear(&mut self, rows: usize, floats: &mut [f32]) {
        births(rows).for_each(|ids| self.pull(&ids, floats));
    }

    /// Copies rows to the front of `floats`.
    pub fn pull(&mut self, ids: &Dealt, mut floats: &mut [f32]) {
        let dim = floats.len() / BATCH;
        for (part, ids) in self.parts.iter_mut().zip(ids) {
            let (out, rest) = floats.split_at_mut(ids.len() * dim);
            part.pull(ids, out);
            floats = rest;
        }
    }

    /// Moves rows by the gradients in front.
    pub fn push(&mut self, ids: &Dealt, gradients: &[f32]) {
        let dim = gradients.len() / BATCH;
        for (part, ids) in self.parts.iter_mut().zip(ids) {
            part.push(ids, &gradients[..ids.len() * dim], &self.optimizer, 1.0);
        }
    }

    /// Bytes in use for each row.
    pub fn bytes_per_row(&self) -> f64 {
        let (bytes, rows) = self.parts.iter().fold((0, 0), |(b, r), part| (b + part.bytes(), r + part.len()));
        bytes as f64 / rows as f64
    }
}

/// Ids by partition, in the order of their hashes, as a worker deals them: by the first bits of those, at least.
pub fn deal(ids: &[u64]) -> Dealt {
    const BITS: u32 = 12;
    let group = |id: &u64| (mix64(*id) >> (u64::BITS - BITS)) as usize;
    let mut ends = [0; (1 << BITS) + 1];
    ids.iter().for_each(|id| ends[group(id) + 1] += 1);
    (1..ends.len()).for_each(|i| ends[i] += ends[i - 1]);
    let mut ordered = vec![0; ids.len()];
    for id in ids {
        let place = &mut ends[group(id)];
        ordered[*place] = *id;
        *place += 1;
    }
    deal_in_no_order(&ordered)
}

/// Ids by partition, as they come.
pub fn deal_in_no_order(ids: &[u64]) -> Dealt {
    let mut parts = vec![Vec::with_capacity(2 * ids.len() / PARTITIONS as usize); PARTITIONS as usize];
    ids.iter().for_each(|id| parts[partition_of_row(*id, PARTITIONS).0 as usize].push(*id));
    parts
}

/// The ids of so many rows, in calls.
pub fn births(rows: usize) -> impl Iterator<Item = Dealt> {
    (0..rows).step_by(BATCH).map(move |from| {
        let ids: Vec<u64> = (from..rows.min(from + BATCH)).map(|row| id(row as u64)).collect();
        deal(&ids)
    })
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
pub fn ids(rows: &[u64]) -> Vec<u64> {
    rows.iter().map(|row| id(*row)).collect()
}

/// The middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}
