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
