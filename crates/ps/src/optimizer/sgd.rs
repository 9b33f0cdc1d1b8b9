//! Plain gradient descent, as `torch.optim.SGD`: `w -= lr · g`. No slots.

use super::Rule;

/// Plain gradient descent.
#[derive(Debug, Clone)]
pub struct Sgd {
    /// Step size.
    pub learning_rate: f32,
}

impl Rule for Sgd {
    fn slots(&self, _weights: usize) -> usize {
        0
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], _slots: &mut [f32], gradient: &[f32], factor: f32) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        let rate = self.learning_rate * factor;
        for (w, g) in weights.iter_mut().zip(gradient) {
            *w -= rate * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// `torch.optim.SGD([w], lr=0.1)`
    #[test]
    fn moves_as_torch_does() {
        let rule = Sgd { learning_rate: 0.1 };
        let steady = [
            [0.95, -1.975, 0.3, -0.0001],
            [1.05, -2.175, 0.2999, -0.0001],
            [1.04, -2.185, 0.2899, -0.0001],
            [1.04, -2.185, 0.2899, -0.0001],
            [1.04, -1.885, 0.2649, 0.0499],
            [0.97, -1.885, 0.2659, -0.1501],
        ];
        check(&rule, STEADY, steady, &[]);
        let varying = [
            [0.975, -1.9875, 0.3, -5e-05],
            [1.075, -2.1875, 0.2999, -5e-05],
            [1.065, -2.1975, 0.2899, -5e-05],
            [1.065, -2.1975, 0.2899, -5e-05],
            [1.065, -2.1225, 0.28365, 0.01245],
            [1.058, -2.1225, 0.28375, -0.00755],
        ];
        check(&rule, FACTORS, varying, &[]);
    }
}
