//! From a network that gives logits to a [`Model`]: blocks of records, loss, probabilities.

use elasticdl_spec::ModelShape;

use super::loss;
use crate::{Gradients, Input, Model};

/// Records that go through the network at a time. Measured: fewer, and large layers pay for adding up
/// their gradients more often; more, and what one layer writes has left the cache when the next one
/// reads it. Between 512 and 2048 there is little difference.
const BLOCK_RECORDS: usize = 1024;

/// Some consecutive records of an input whose one table is the embedding.
pub(crate) struct Block<'a> {
    pub records: usize,
    /// records × numeric fields.
    pub numeric: &'a [f32],
    /// unique × width.
    pub rows: &'a [f32],
    /// records × categorical fields.
    pub index: &'a [u32],
}

/// What a model has to say beyond sigmoid and cross-entropy.
pub(crate) trait Network: Send {
    /// Tables and tensors.
    fn shape(&self) -> &ModelShape;

    /// Takes the dense values, in shape order.
    fn load(&mut self, tensors: &[&[f32]]);

    /// Writes a logit per record, and remembers what `backward` needs of the block.
    fn forward(&mut self, block: &Block, logits: &mut [f32]);

    /// Adds the gradients for `slopes`, the loss's derivative by each logit, of the block that
    /// `forward` saw last.
    fn backward(&mut self, block: &Block, slopes: &[f32], gradients: &mut Gradients);
}

/// A network under sigmoid cross-entropy.
pub(crate) struct Classifier<N> {
    network: N,
    numeric_fields: usize,
    categorical_fields: usize,
    /// Logits of the block; after the loss, its slopes.
    logits: Vec<f32>,
}

impl<N: Network> Classifier<N> {
    /// For records with so many fields.
    pub fn new(network: N, numeric_fields: usize, categorical_fields: usize) -> Self {
        Classifier { network, numeric_fields, categorical_fields, logits: Vec::new() }
    }

    /// The records `first..` of `input`, at most a block of them.
    fn block<'a>(&self, input: &Input<'a>, first: usize) -> Block<'a> {
        let records = BLOCK_RECORDS.min(input.records - first);
        let table = &input.tables[0];
        Block {
            records,
            numeric: rows_of(input.numeric, self.numeric_fields, first, records),
            rows: table.rows,
            index: rows_of(table.index, self.categorical_fields, first, records),
        }
    }

    fn check(&self, input: &Input) {
        assert_eq!(input.tables.len(), 1, "all categorical fields share one table");
        assert_eq!(input.numeric.len(), input.records * self.numeric_fields, "numeric values per record");
        let index = input.tables[0].index;
        assert_eq!(index.len(), input.records * self.categorical_fields, "rows per record");
    }
}

impl<N: Network> Model for Classifier<N> {
    fn shape(&self) -> &ModelShape {
        self.network.shape()
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        let shapes = &self.network.shape().tensors;
        assert_eq!(tensors.len(), shapes.len(), "one slice per tensor of the shape");
        for (values, shape) in tensors.iter().zip(shapes) {
            assert_eq!(values.len(), shape.len(), "{} has the size its shape says", shape.name);
        }
        self.network.load(tensors);
    }

    fn train(&mut self, input: &Input, batch_records: usize, gradients: &mut Gradients) -> f64 {
        self.check(input);
        assert_eq!(input.labels.len(), input.records, "training needs a label per record");
        let mut loss_sum = 0.0;
        for first in (0..input.records).step_by(BLOCK_RECORDS) {
            let block = self.block(input, first);
            self.logits.resize(block.records, 0.0);
            self.network.forward(&block, &mut self.logits);
            let labels = &input.labels[first..first + block.records];
            loss_sum += loss::cross_entropy(&mut self.logits, labels, 1.0 / batch_records as f32);
            self.network.backward(&block, &self.logits, gradients);
        }
        loss_sum
    }

    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>) {
        self.check(input);
        probabilities.clear();
        probabilities.resize(input.records, 0.0);
        for first in (0..input.records).step_by(BLOCK_RECORDS) {
            let block = self.block(input, first);
            let out = &mut probabilities[first..first + block.records];
            self.network.forward(&block, out);
            out.iter_mut().for_each(|z| *z = loss::sigmoid(*z));
        }
    }
}

fn rows_of<T>(values: &[T], width: usize, first: usize, records: usize) -> &[T] {
    &values[first * width..(first + records) * width]
}
