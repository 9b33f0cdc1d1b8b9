//! Adam with bias correction, as `torch.optim.Adam` without weight decay:
//!
//! ```text
//! t += 1
//! m = β₁·m + (1-β₁)·g
//! v = β₂·v + (1-β₂)·g²
//! w -= lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε)
//! ```
//!
//! Slots: `m` per weight, `v` per weight, then one `t`. The steps are those of the row (or the tensor),
//! not of the job: a row met for the first time late in training gets its full first step. As an f32,
//! `t` counts to 2²⁴ and stays there, where both corrections have been 1 for long.

use super::Rule;
use super::corrections::Corrections;

/// Adam with bias correction.
#[derive(Debug, Clone)]
pub struct Adam {
    corrections: Corrections,
    epsilon: f32,
}

impl Adam {
    /// Adam with these settings.
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32) -> Self {
        Adam { corrections: Corrections::new(learning_rate, beta1, beta2), epsilon }
    }
}

impl Rule for Adam {
    fn slots(&self, weights: usize) -> usize {
        2 * weights + 1
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        let n = weights.len();
        assert_eq!(n, gradient.len(), "a gradient is as long as its weights");
        assert_eq!(2 * n + 1, slots.len(), "there are two moments per weight and a step count");
        let (m, rest) = slots.split_at_mut(n);
        let (v, step) = rest.split_at_mut(n);
        let correction = self.corrections.step(&mut step[0]);
        let (rate, root) = (correction.rate * factor, correction.root);
        let (first, second) = self.corrections.mixes;
        for (((w, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            *m = first.keep * *m + first.take * g;
            *v = second.keep * *v + second.take * g * g;
            *w -= rate * *m / (v.sqrt() * root + self.epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the corrections kept ready and those computed later meet without a jump.
    #[test]
    fn a_long_run_stays_with_the_formula() {
        let rule = Adam::new(0.001, 0.9, 0.999, 1e-8);
        let (mut w, mut slots) = ([0.0f32], [0.0f32; 3]);
        let (mut due, mut m, mut v) = (0.0f64, 0.0f64, 0.0f64);
        for t in 1..=5000 {
            let g = if t % 3 == 0 { -0.5 } else { 1.0 };
            rule.apply(&mut w, &mut slots, &[g as f32], 1.0);
            m = 0.9 * m + 0.1 * g;
            v = 0.999 * v + 0.001 * g * g;
            due -= 0.001 / (1.0 - 0.9f64.powi(t)) * m / ((v / (1.0 - 0.999f64.powi(t))).sqrt() + 1e-8);
            // The sum of thousands of steps is kept in f32, here as in torch.
            assert!((f64::from(w[0]) - due).abs() < 2e-4, "step {t}: {} {due}", w[0]);
        }
        assert!(due < -2.8, "far from where it began: {due}");
    }
}
