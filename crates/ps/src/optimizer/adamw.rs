//! Adam with decoupled decay λ of the weights, as `torch.optim.AdamW`:
//!
//! ```text
//! w -= lr · λ · w
//! ```
//!
//! and then a step of Adam (see `adam.rs`), whose moments know nothing of the decay. Where the learning rate
//! varies the decay goes with it. Rows decay when they are trained, and only then.
//!
//! Slots: those of Adam.

use super::{Adam, Rule};

/// Adam with decoupled decay.
#[derive(Debug, Clone)]
pub struct Adamw {
    adam: Adam,
    /// `lr · λ`
    decay: f32,
}

impl Adamw {
    /// Adam with these settings, and the part of itself that a weight loses with each step, times the step size.
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32) -> Self {
        let adam = Adam::new(learning_rate, beta1, beta2, epsilon);
        Adamw { adam, decay: learning_rate * weight_decay }
    }
}

impl Rule for Adamw {
    fn slots(&self, weights: usize) -> usize {
        self.adam.slots(weights)
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        let kept = 1.0 - self.decay * factor;
        weights.iter_mut().for_each(|w| *w *= kept);
        self.adam.apply(weights, slots, gradient, factor);
    }
}
