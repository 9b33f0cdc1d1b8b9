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
pub(super) mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// The moments and the step count in the end, which depend on the gradients alone.
    pub(in crate::optimizer) const SLOTS: [f64; 9] = [
        0.041_204_5,
        -0.146_252_25,
        0.028_855_61,
        0.155_059_05,
        0.001_744_728_5,
        0.013_047_182,
        7.250_852_6e-5,
        0.004_249_751,
        6.0,
    ];

    /// `torch.optim.Adam([w], lr=0.01)`
    #[test]
    fn moves_as_torch_does() {
        let rule = Adam::new(0.01, 0.9, 0.999, 1e-8);
        let steady = [
            [0.99, -1.99, 0.3, -0.0099999],
            [0.993661035, -1.99655327, 0.292558737, -0.0167003878],
            [0.995910321, -2.00192944, 0.286113431, -0.0218798677],
            [0.997752799, -2.00633328, 0.280833828, -0.0261225712],
            [0.999310113, -2.00388043, 0.274112463, -0.0206748477],
            [0.997681382, -2.00176639, 0.26851741, -0.0246020555],
        ];
        check(&rule, STEADY, steady, &SLOTS);
        let varying = [
            [0.995, -1.995, 0.3, -0.00499995],
            [0.998661035, -2.00155327, 0.292558737, -0.0117004378],
            [1.00091032, -2.00692944, 0.286113431, -0.0168799177],
            [1.00137094, -2.0080304, 0.28479353, -0.0179405936],
            [1.00176027, -2.00741719, 0.283113189, -0.0165786627],
            [1.0015974, -2.00720579, 0.282553684, -0.0169713835],
        ];
        check(&rule, FACTORS, varying, &SLOTS);
    }

    /// Goal: the corrections kept ready and those computed later meet without a jump.
    #[test]
    fn a_long_run_stays_with_the_formula() {
        let rule = Adam::new(0.001, 0.9, 0.999, 1e-8);
        let (mut w, mut slots) = ([0.0f32], [0.0f32; 3]);
        for t in 1..=5000 {
            rule.apply(&mut w, &mut slots, &[if t % 3 == 0 { -0.5 } else { 1.0 }], 1.0);
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
        rule.apply(&mut w, &mut slots, &[3.0, -3.0], 1.0);
        assert_eq!(slots[4], 1.0);
        assert!((w[0] - 0.99).abs() < 1e-6 && (w[1] - 1.01).abs() < 1e-6, "{w:?}");
    }
}
