//! Adagrad per element, as `torch.optim.Adagrad` without decay:
//!
//! ```text
//! a += g²
//! w -= lr · g / (√a + ε)
//! ```
//!
//! Slots: `a` per weight, starting at `initial_accumulator`.

use super::Rule;

/// Adagrad per element.
#[derive(Debug, Clone)]
pub struct Adagrad {
    /// Step size.
    pub learning_rate: f32,
    /// What the accumulator starts with.
    pub initial_accumulator: f32,
    /// Added to the root.
    pub epsilon: f32,
}

impl Rule for Adagrad {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    fn begin(&self, slots: &mut [f32]) {
        slots.fill(self.initial_accumulator);
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        assert_eq!(weights.len(), slots.len(), "there is an accumulator per weight");
        let rate = self.learning_rate * factor;
        for ((w, a), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *a += g * g;
            *w -= rate * g / (a.sqrt() + self.epsilon);
        }
    }
}
