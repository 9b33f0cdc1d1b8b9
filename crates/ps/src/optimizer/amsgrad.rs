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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// `torch.optim.Adam([w], lr=0.01, betas=(0.5, 0.6), amsgrad=True)`: moments so short that they shrink.
    #[test]
    fn moves_as_torch_does() {
        let rule = Amsgrad::new(0.01, 0.5, 0.6, 1e-8);
        let first = [0.332_812_5, -0.685_156_25, 0.063_781_25, 0.875_015_6];
        let second = [0.256_48, 2.370_168, 0.015_904_052, 1.66];
        let most = [0.46, 3.950_28, 0.026_440_086, 1.66];
        let slots = [&first[..], &second, &most, &[6.0]].concat();
        let steady = [
            [0.99, -1.99, 0.3, -0.0099999],
            [0.995897678, -1.9978689, 0.291567366, -0.0142162169],
            [0.997949189, -2.00199958, 0.283527609, -0.0162161889],
            [0.998957935, -2.00403067, 0.279574387, -0.0171995925],
            [0.999460363, -1.99719603, 0.271187924, -0.00936356671],
            [0.994593099, -1.99377671, 0.267297241, -0.0160999378],
        ];
        check(&rule, STEADY, steady, &slots);
        let varying = [
            [0.995, -1.995, 0.3, -0.00499995],
            [1.00089768, -2.00286889, 0.291567366, -0.00921626688],
            [1.00294919, -2.00699958, 0.283527609, -0.0112162389],
            [1.00320138, -2.00750735, 0.282539303, -0.0114620898],
            [1.00332698, -2.00579869, 0.280442687, -0.00950308334],
            [1.00284026, -2.00545676, 0.280053619, -0.0101767204],
        ];
        check(&rule, FACTORS, varying, &slots);
    }
}
