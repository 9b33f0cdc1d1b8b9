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

    #[inline]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32]) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        assert_eq!(weights.len(), slots.len(), "there is an accumulator per weight");
        for ((w, a), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *a += g * g;
            *w -= self.learning_rate * g / (a.sqrt() + self.epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::check;

    #[test]
    fn moves_as_torch_does() {
        let rule = Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 };
        let steps: [&[f32]; 3] = [&[0.5, -0.25, 0.0], &[-1.0, 2.0, 1e-3], &[0.1, 0.1, 0.1]];
        let expected: [(&[f32], &[f32]); 3] = [
            (&[0.915_484_6, -1.937_982_6, 0.3], &[0.35, 0.1625, 0.1]),
            (&[1.001_550_9, -2.036_011_2, 0.299_683_8], &[1.35, 4.1625, 0.100001]),
            (&[0.992_975_9, -2.040_907, 0.269_532_8], &[1.36, 4.1725, 0.110001]),
        ];
        check(&rule, &[1.0, -2.0, 0.3], &steps, &expected);
    }
}
