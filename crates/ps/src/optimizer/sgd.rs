//! Plain gradient descent, as `torch.optim.SGD`: `w -= lr * g`. No slots.

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

    fn begin(&self, slots: &mut [f32]) {
        assert!(slots.is_empty(), "plain gradient descent has no slots");
    }

    #[inline]
    fn apply(&self, weights: &mut [f32], _slots: &mut [f32], gradient: &[f32]) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        for (w, g) in weights.iter_mut().zip(gradient) {
            *w -= self.learning_rate * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::check;

    #[test]
    fn moves_as_torch_does() {
        let rule = Sgd { learning_rate: 0.1 };
        let steps: [&[f32]; 2] = [&[0.5, -0.25, 0.0], &[-1.0, 2.0, 1e-3]];
        let expected: [(&[f32], &[f32]); 2] = [(&[0.95, -1.975, 0.3], &[]), (&[1.05, -2.175, 0.2999], &[])];
        check(&rule, &[1.0, -2.0, 0.3], &steps, &expected);
    }
}
