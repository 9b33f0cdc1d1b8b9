//! RMSprop, as `torch.optim.RMSprop` without momentum:
//!
//! ```text
//! v = ρ·v + (1-ρ)·g²
//! w -= lr · g / (√v + ε)
//! ```
//!
//! Slots: `v` per weight.

use super::{Rule, decimal};

/// RMSprop.
#[derive(Debug, Clone)]
pub struct Rmsprop {
    learning_rate: f32,
    /// ρ and 1-ρ
    keep: f32,
    take: f32,
    epsilon: f32,
}

impl Rmsprop {
    /// RMSprop with these settings.
    pub fn new(learning_rate: f32, rho: f32, epsilon: f32) -> Self {
        Rmsprop { learning_rate, keep: rho, take: (1.0 - decimal(rho)) as f32, epsilon }
    }
}

impl Rule for Rmsprop {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        assert_eq!(weights.len(), slots.len(), "there is a mean of squares per weight");
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.keep * *v + self.take * g * g;
            *w -= rate * g / (v.sqrt() + self.epsilon);
        }
    }
}
