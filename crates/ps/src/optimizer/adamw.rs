//! Adam with decoupled decay λ of the weights, as `torch.optim.AdamW`:
//!
//! ```text
//! w -= lr · λ · w
//! ```
//!
//! and then a step of Adam (see `adam.rs`), whose moments know nothing of the decay. Where the learning rate
//! varies the decay goes with it. Rows decay when they are trained, and only then.
//!
//! Slots: those of Adam.

use super::{Adam, Rule};

/// Adam with decoupled decay.
#[derive(Debug, Clone)]
pub struct Adamw {
    adam: Adam,
    /// `lr · λ`
    decay: f32,
}

impl Adamw {
    /// Adam with these settings, and the part of itself that a weight loses with each step, times the step size.
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32) -> Self {
        let adam = Adam::new(learning_rate, beta1, beta2, epsilon);
        Adamw { adam, decay: learning_rate * weight_decay }
    }
}

impl Rule for Adamw {
    fn slots(&self, weights: usize) -> usize {
        self.adam.slots(weights)
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        let kept = 1.0 - self.decay * factor;
        weights.iter_mut().for_each(|w| *w *= kept);
        self.adam.apply(weights, slots, gradient, factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::adam::tests::SLOTS;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// `torch.optim.AdamW([w], lr=0.01, weight_decay=0.1)`
    #[test]
    fn moves_as_torch_does() {
        let rule = Adamw::new(0.01, 0.9, 0.999, 1e-8, 0.1);
        let steady = [
            [0.989, -1.988, 0.2997, -0.0099999],
            [0.991672035, -1.99256527, 0.291959037, -0.0166903879],
            [0.992929649, -1.99594888, 0.285221772, -0.0218531774],
            [0.993779197, -1.99835676, 0.279656948, -0.0260740277],
            [0.994342732, -1.99390556, 0.272655925, -0.0206002302],
            [0.991719658, -1.98979762, 0.266788217, -0.0245068378],
        ];
        check(&rule, STEADY, steady, &SLOTS);
        let varying = [
            [0.9945, -1.994, 0.29985, -0.00499995],
            [0.997166535, -1.99855927, 0.292108887, -0.0116954378],
            [0.998418654, -2.00193688, 0.285371472, -0.0168632223],
            [0.998629669, -2.00253736, 0.283980228, -0.0179196824],
            [0.99876934, -2.00142351, 0.282228892, -0.0165532716],
            [0.99850659, -2.00101196, 0.281641164, -0.0169443371],
        ];
        check(&rule, FACTORS, varying, &SLOTS);
    }
}
