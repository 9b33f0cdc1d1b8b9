//! AMSGrad, as `torch.optim.Adam` with `amsgrad`: Adam whose second moment never shrinks:
//!
//! ```text
//! t += 1
//! m = β₁·m + (1-β₁)·g
//! v = β₂·v + (1-β₂)·g²
//! u = max(u, v)
//! w -= lr/(1-β₁ᵗ) · m / (√u/√(1-β₂ᵗ) + ε)
//! ```
//!
//! Slots: `m` per weight, `v` per weight, `u` per weight, then one `t`, which counts as Adam's does.

use super::Rule;
use super::corrections::Corrections;

/// AMSGrad.
#[derive(Debug, Clone)]
pub struct Amsgrad {
    corrections: Corrections,
    epsilon: f32,
}

impl Amsgrad {
    /// AMSGrad with these settings.
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32) -> Self {
        Amsgrad { corrections: Corrections::new(learning_rate, beta1, beta2), epsilon }
    }
}

impl Rule for Amsgrad {
    fn slots(&self, weights: usize) -> usize {
        3 * weights + 1
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        let n = weights.len();
        assert_eq!(n, gradient.len(), "a gradient is as long as its weights");
        assert_eq!(3 * n + 1, slots.len(), "there are three moments per weight and a step count");
        let (m, rest) = slots.split_at_mut(n);
        let (v, rest) = rest.split_at_mut(n);
        let (u, step) = rest.split_at_mut(n);
        let correction = self.corrections.step(&mut step[0]);
        let (rate, root) = (correction.rate * factor, correction.root);
        let (first, second) = self.corrections.mixes;
        for ((((w, m), v), u), g) in weights.iter_mut().zip(m).zip(v).zip(u).zip(gradient) {
            *m = first.keep * *m + first.take * g;
            *v = second.keep * *v + second.take * g * g;
            *u = if *v > *u { *v } else { *u };
            *w -= rate * *m / (u.sqrt() * root + self.epsilon);
        }
    }
}
