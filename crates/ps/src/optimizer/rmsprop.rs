//! RMSprop, as `torch.optim.RMSprop` without momentum:
//!
//! ```text
//! v = ρ·v + (1-ρ)·g²
//! w -= lr · g / (√v + ε)
//! ```
//!
//! Slots: `v` per weight.

use super::{Rule, decimal};

/// RMSprop.
#[derive(Debug, Clone)]
pub struct Rmsprop {
    learning_rate: f32,
    /// ρ and 1-ρ
    keep: f32,
    take: f32,
    epsilon: f32,
}

impl Rmsprop {
    /// RMSprop with these settings.
    pub fn new(learning_rate: f32, rho: f32, epsilon: f32) -> Self {
        Rmsprop { learning_rate, keep: rho, take: (1.0 - decimal(rho)) as f32, epsilon }
    }
}

impl Rule for Rmsprop {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        assert_eq!(weights.len(), slots.len(), "there is a mean of squares per weight");
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.keep * *v + self.take * g * g;
            *w -= rate * g / (v.sqrt() + self.epsilon);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    /// `torch.optim.RMSprop([w], lr=0.01, alpha=0.9, eps=1e-6)`
    #[test]
    fn moves_as_torch_does() {
        let rule = Rmsprop::new(0.01, 0.9, 1e-6);
        let slots = [0.130_101_25, 1.076_859_6, 0.006_364_065_6, 0.422_500_06];
        let steady = [
            [0.968377423, -1.96837762, 0.3, -0.0315230918],
            [0.99694877, -1.99978032, 0.268476908, -0.0315230918],
            [0.993950653, -2.00143313, 0.236856554, -0.0315230919],
            [0.993950653, -2.00143313, 0.236856554, -0.0315230919],
            [0.993950652, -1.97400712, 0.20710359, 9.94432405e-05],
            [0.974543755, -1.97400712, 0.208357098, -0.030669738],
        ];
        check(&rule, STEADY, steady, &slots);
        let varying = [
            [0.984188712, -1.98418881, 0.3, -0.0157615459],
            [1.01276006, -2.01559151, 0.268476908, -0.0157615459],
            [1.00976194, -2.01724431, 0.236856554, -0.015761546],
            [1.00976194, -2.01724431, 0.236856554, -0.015761546],
            [1.00976194, -2.01038781, 0.229418313, -0.00785591217],
            [1.00782125, -2.01038781, 0.229543664, -0.0109328303],
        ];
        check(&rule, FACTORS, varying, &slots);
    }
}
