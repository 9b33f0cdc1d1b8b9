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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// `torch.optim.Adagrad([w], lr=0.1, initial_accumulator_value=0.1, eps=1e-10)`
    #[test]
    fn moves_as_torch_does() {
        let rule = Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 };
        let sums = [1.85, 13.1725, 0.172601, 4.350001];
        let steady = [
            [0.915484575, -1.93798263, 0.3, -0.000316226185],
            [1.00155087, -2.03601125, 0.299683774, -0.000316226185],
            [0.992975942, -2.0409068, 0.269532776, -0.000316226185],
            [0.992975942, -2.0409068, 0.269532776, -0.000316226185],
            [0.992975941, -1.95824837, 0.209340024, 0.0841990785],
            [0.941510917, -1.95824837, 0.211747037, -0.0116935707],
        ];
        check(&rule, STEADY, steady, &sums);
        let varying = [
            [0.957742287, -1.96899132, 0.3, -0.000158113092],
            [1.04380858, -2.06701993, 0.299683774, -0.000158113092],
            [1.03523365, -2.07191549, 0.269532776, -0.000158113093],
            [1.03523365, -2.07191549, 0.269532776, -0.000158113093],
            [1.03523365, -2.05125088, 0.254484588, 0.0209707131],
            [1.03008715, -2.05125088, 0.25472529, 0.0113814482],
        ];
        check(&rule, FACTORS, varying, &sums);
    }
}
