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

use super::{Rule, decimal};

/// For how many steps the corrections are kept ready; later ones are computed when needed.
const STEPS_READY: usize = 2048;

/// Adam with bias correction.
#[derive(Debug, Clone)]
pub struct Adam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f32,
    /// For step t at t-1: `lr/(1-β₁ᵗ)` and `1/√(1-β₂ᵗ)`. Rows are many and their steps few and alike.
    ready: Vec<(f32, f32)>,
}

impl Adam {
    /// Adam with these settings.
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32) -> Self {
        let mut adam = Adam {
            learning_rate: decimal(learning_rate),
            beta1: decimal(beta1),
            beta2: decimal(beta2),
            epsilon,
            ready: Vec::new(),
        };
        adam.ready = (1..=STEPS_READY).map(|t| adam.corrections(t as f32)).collect();
        adam
    }

    fn corrections(&self, step: f32) -> (f32, f32) {
        let step = step as i32;
        let rate = self.learning_rate / (1.0 - self.beta1.powi(step));
        let root = 1.0 / (1.0 - self.beta2.powi(step)).sqrt();
        (rate as f32, root as f32)
    }
}

impl Rule for Adam {
    fn slots(&self, weights: usize) -> usize {
        2 * weights + 1
    }

    fn begin(&self, slots: &mut [f32]) {
        slots.fill(0.0);
    }

    #[inline]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32]) {
        let n = weights.len();
        assert_eq!(n, gradient.len(), "a gradient is as long as its weights");
        assert_eq!(2 * n + 1, slots.len(), "there are two moments per weight and a step count");
        let (m, rest) = slots.split_at_mut(n);
        let (v, step) = rest.split_at_mut(n);
        step[0] += 1.0;
        let ready = self.ready.get(step[0] as usize - 1);
        let (rate, root) = ready.copied().unwrap_or_else(|| self.corrections(step[0]));

        let (beta1, fresh1) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
        let (beta2, fresh2) = (self.beta2 as f32, (1.0 - self.beta2) as f32);
        for (((w, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            *m = beta1 * *m + fresh1 * g;
            *v = beta2 * *v + fresh2 * g * g;
            *w -= rate * *m / (v.sqrt() * root + self.epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::check;

    #[test]
    fn moves_as_torch_does() {
        let rule = Adam::new(0.01, 0.9, 0.999, 1e-8);
        let steps: [&[f32]; 3] = [&[0.5, -0.25, 0.0], &[-1.0, 2.0, 1e-3], &[0.1, 0.1, 0.1]];
        let expected: [(&[f32], &[f32]); 3] = [
            (&[0.99, -1.99, 0.3], &[0.05, -0.025, 0.0, 0.00025, 0.0000625, 0.0, 1.0]),
            (
                &[0.993_661, -1.996_553_3, 0.292_558_7],
                &[-0.055, 0.1775, 0.0001, 0.00124975, 0.0040624375, 1e-9, 2.0],
            ),
            (
                &[0.995_910_3, -2.001_929_4, 0.286_113_4],
                &[-0.0395, 0.16975, 0.01009, 0.001_258_5, 0.004_068_375, 0.000010001, 3.0],
            ),
        ];
        check(&rule, &[1.0, -2.0, 0.3], &steps, &expected);
    }

    /// Goal: the corrections kept ready and those computed later meet without a jump.
    #[test]
    fn a_long_run_stays_with_the_formula() {
        let rule = Adam::new(0.001, 0.9, 0.999, 1e-8);
        let (mut w, mut slots) = ([0.0f32], [0.0f32; 3]);
        for t in 1..=5000 {
            rule.apply(&mut w, &mut slots, &[if t % 3 == 0 { -0.5 } else { 1.0 }]);
            let expected = match t {
                2047 => -1.182_746,
                2049 => -1.183_899,
                5000 => -2.887_688,
                _ => continue,
            };
            // The sum of thousands of steps is kept in f32, here as in torch.
            assert!((w[0] - expected).abs() < 2e-4, "step {t}: {} {expected}", w[0]);
        }
    }

    /// Defect 7 of the original: dense tensors went through Adam twice.
    #[test]
    fn one_application_is_one_step() {
        let rule = Adam::new(0.01, 0.9, 0.999, 1e-8);
        let (mut w, mut slots) = ([1.0f32; 2], vec![0.0; rule.slots(2)]);
        rule.apply(&mut w, &mut slots, &[3.0, -3.0]);
        assert_eq!(slots[4], 1.0);
        assert!((w[0] - 0.99).abs() < 1e-6 && (w[1] - 1.01).abs() < 1e-6, "{w:?}");
    }
}
