//! A dense tensor of the model with its slots: one long row, as far as the optimizer can tell.

use elasticdl_spec::TensorShape;

use crate::optimizer::{Optimizer, Rule};

/// A tensor's values and slots.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: TensorShape,
    values: Vec<f32>,
    slots: Vec<f32>,
}

impl Tensor {
    /// The tensor as it is born; `seed` is the job's.
    pub fn new(shape: TensorShape, seed: u64, optimizer: &Optimizer) -> Self {
        let values = shape.init_values(seed);
        let mut slots = vec![0.0; optimizer.slots(values.len())];
        optimizer.begin(&mut slots);
        Tensor { shape, values, slots }
    }

    /// Its shape.
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// Its values, row-major.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Its slots.
    pub fn slots(&self) -> &[f32] {
        &self.slots
    }

    /// Applies a gradient of the same length, with `factor` times the learning rate.
    pub fn push(&mut self, gradient: &[f32], optimizer: &Optimizer, factor: f32) {
        optimizer.apply(&mut self.values, &mut self.slots, gradient, factor);
    }

    /// Sets values and slots as a checkpoint holds them. `false`: the lengths do not fit; nothing changed.
    pub fn restore(&mut self, values: Vec<f32>, slots: Vec<f32>) -> bool {
        let fits = values.len() == self.values.len() && slots.len() == self.slots.len();
        if fits {
            (self.values, self.slots) = (values, slots);
        }
        fits
    }
}
