//! A dense tensor of the model with its slots: one long row, as far as the optimizer can tell.

use elasticdl_spec::TensorShape;

use crate::optimizer::{Optimizer, Rule};

/// A tensor's values and slots.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: TensorShape,
    values: Vec<f32>,
    /// The optimizer's; and behind them, where gradients are gathered, their sum, how many they are, and the sum of
    /// their factors. So a checkpoint holds all of it, and it comes back with the rest.
    slots: Vec<f32>,
    /// How many of the slots are the optimizer's.
    own: usize,
}

impl Tensor {
    /// The tensor as it is born; `seed` is the job's.
    pub fn new(shape: TensorShape, seed: u64, optimizer: &Optimizer) -> Self {
        let values = shape.init_values(seed);
        let mut slots = vec![0.0; optimizer.slots(values.len())];
        optimizer.begin(&mut slots);
        Tensor { shape, values, own: slots.len(), slots }
    }

    /// The same, with room for gradients that are gathered before they are applied.
    pub fn gathering(mut self) -> Self {
        self.slots.resize(self.own + self.values.len() + 2, 0.0);
        self
    }

    /// How many gradients are gathered.
    pub fn gathered(&self) -> u64 {
        self.slots.get(self.own + self.values.len()).map_or(0, |count| *count as u64)
    }

    /// Gathers a gradient; `None`: one that is zero.
    pub fn gather(&mut self, gradient: Option<&[f32]>, factor: f32) {
        let (sum, counts) = self.slots[self.own..].split_at_mut(self.values.len());
        sum.iter_mut().zip(gradient.into_iter().flatten()).for_each(|(sum, g)| *sum += g);
        counts[0] += 1.0;
        counts[1] += factor;
    }

    /// Applies the mean of what is gathered, if anything is, with the mean of the factors.
    pub fn apply_gathered(&mut self, optimizer: &Optimizer) {
        if self.gathered() == 0 {
            return;
        }
        let (own, rest) = self.slots.split_at_mut(self.own);
        let (sum, counts) = rest.split_at_mut(self.values.len());
        let share = 1.0 / counts[0];
        sum.iter_mut().for_each(|sum| *sum *= share);
        optimizer.apply(&mut self.values, own, sum, counts[1] * share);
        rest.fill(0.0);
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
        optimizer.apply(&mut self.values, &mut self.slots[..self.own], gradient, factor);
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
