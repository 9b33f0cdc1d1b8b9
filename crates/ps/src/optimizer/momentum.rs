//! Gradient descent with momentum μ, as `torch.optim.SGD` with `momentum` and without dampening:
//!
//! ```text
//! v = μ·v + g
//! w -= lr · v               momentum
//! w -= lr · (g + μ·v)       Nesterov's
//! ```
//!
//! Slots: `v` per weight. It starts at zero, so that the first step makes it the gradient, as torch says.

use super::Rule;

/// Gradient descent with momentum.
#[derive(Debug, Clone)]
pub struct Momentum {
    /// Step size.
    pub learning_rate: f32,
    /// What is kept of the velocity.
    pub momentum: f32,
}

/// Gradient descent with Nesterov's momentum.
#[derive(Debug, Clone)]
pub struct Nesterov {
    /// Step size.
    pub learning_rate: f32,
    /// What is kept of the velocity.
    pub momentum: f32,
}

impl Rule for Momentum {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        check_lengths(weights, slots, gradient);
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.momentum * *v + g;
            *w -= rate * *v;
        }
    }
}

impl Rule for Nesterov {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        check_lengths(weights, slots, gradient);
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.momentum * *v + g;
            *w -= rate * (g + self.momentum * *v);
        }
    }
}

#[inline(always)]
fn check_lengths(weights: &[f32], slots: &[f32], gradient: &[f32]) {
    assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
    assert_eq!(weights.len(), slots.len(), "there is a velocity per weight");
}
