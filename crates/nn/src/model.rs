//! The contract between a model and whoever feeds it: plain slices in, plain buffers out.
//!
//! The worker, `evaluate` and `predict` know a model by this trait alone. Nothing here knows
//! Burn, so that a model written in anything else fits the same place.

use elasticdl_spec::ModelShape;

/// One table's part of an input: unique rows, and for each record and field which of them it is.
#[derive(Debug, Clone, Copy)]
pub struct TableInput<'a> {
    /// The rows, each once: unique × width.
    pub rows: &'a [f32],
    /// Which row, by record and field: records × fields, row-major.
    pub index: &'a [u32],
}

/// Some records, ready for a model.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// How many records.
    pub records: usize,
    /// Their numbers: records × numeric fields, row-major.
    pub numeric: &'a [f32],
    /// Their labels, 0 or 1; empty when predicting.
    pub labels: &'a [f32],
    /// One entry for each table of the shape, in its order.
    pub tables: &'a [TableInput<'a>],
}

/// Gradient buffers. A model adds to them and never overwrites.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gradients {
    /// By table: unique × width, like the rows of the input.
    pub tables: Vec<Vec<f32>>,
    /// By tensor: like the tensors of the shape.
    pub tensors: Vec<Vec<f32>>,
}

impl Gradients {
    /// Makes the buffers as large as `shape` and the number of unique rows of each table say, and zero.
    ///
    /// Buffers are kept between batches: after the first ones nothing is allocated.
    pub fn reset(&mut self, shape: &ModelShape, unique: &[usize]) {
        assert_eq!(unique.len(), shape.tables.len(), "one number of unique rows per table");
        self.tables.resize_with(shape.tables.len(), Vec::new);
        for ((buffer, table), unique) in self.tables.iter_mut().zip(&shape.tables).zip(unique) {
            zero(buffer, unique * table.width());
        }
        self.tensors.resize_with(shape.tensors.len(), Vec::new);
        for (buffer, tensor) in self.tensors.iter_mut().zip(&shape.tensors) {
            zero(buffer, tensor.len());
        }
    }

    /// Adds the gradients of another part of the same batch.
    pub fn add(&mut self, other: &Gradients) {
        for (mine, theirs) in self.tables.iter_mut().zip(&other.tables) {
            add_each(mine, theirs);
        }
        for (mine, theirs) in self.tensors.iter_mut().zip(&other.tensors) {
            add_each(mine, theirs);
        }
    }
}

fn zero(buffer: &mut Vec<f32>, len: usize) {
    buffer.clear();
    buffer.resize(len, 0.0);
}

fn add_each(mine: &mut [f32], theirs: &[f32]) {
    assert_eq!(mine.len(), theirs.len(), "gradients of one batch have one shape");
    mine.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
}

/// A binary classifier over numbers and embedding rows, run by one thread.
///
/// An instance keeps its working memory between calls. To use several cores, cut a batch into
/// parts and give each part its own instance and thread: no method starts threads of its own.
pub trait Model: Send {
    /// Tables and tensors, with initializers, in the order of every slice below.
    fn shape(&self) -> &ModelShape;

    /// Takes the dense values, in shape order. Needed before the first batch and after every change.
    fn load(&mut self, tensors: &[&[f32]]);

    /// Adds to `gradients` the gradient of (sum of losses over these records) / `batch_records`.
    ///
    /// `batch_records` is the size of the whole batch of which these records are a part. Returns
    /// the sum of the losses of these records; it is NaN where an input is.
    fn train(&mut self, input: &Input, batch_records: usize, gradients: &mut Gradients) -> f64;

    /// Replaces `probabilities` by one number per record: how likely its label is 1.
    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>);
}
