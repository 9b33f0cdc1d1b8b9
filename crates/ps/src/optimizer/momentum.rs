//! Gradient descent with momentum μ, as `torch.optim.SGD` with `momentum` and without dampening:
//!
//! ```text
//! v = μ·v + g
//! w -= lr · v               momentum
//! w -= lr · (g + μ·v)       Nesterov's
//! ```
//!
//! Slots: `v` per weight. It starts at zero, so that the first step makes it the gradient, as torch says.

use super::Rule;

/// Gradient descent with momentum.
#[derive(Debug, Clone)]
pub struct Momentum {
    /// Step size.
    pub learning_rate: f32,
    /// What is kept of the velocity.
    pub momentum: f32,
}

/// Gradient descent with Nesterov's momentum.
#[derive(Debug, Clone)]
pub struct Nesterov {
    /// Step size.
    pub learning_rate: f32,
    /// What is kept of the velocity.
    pub momentum: f32,
}

impl Rule for Momentum {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        check_lengths(weights, slots, gradient);
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.momentum * *v + g;
            *w -= rate * *v;
        }
    }
}

impl Rule for Nesterov {
    fn slots(&self, weights: usize) -> usize {
        weights
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        check_lengths(weights, slots, gradient);
        let rate = self.learning_rate * factor;
        for ((w, v), g) in weights.iter_mut().zip(slots).zip(gradient) {
            *v = self.momentum * *v + g;
            *w -= rate * (g + self.momentum * *v);
        }
    }
}

#[inline(always)]
fn check_lengths(weights: &[f32], slots: &[f32], gradient: &[f32]) {
    assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
    assert_eq!(weights.len(), slots.len(), "there is a velocity per weight");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    const VELOCITY: [f64; 4] = [0.412_045, -1.462_522_5, 0.288_556_1, 1.550_590_5];

    /// `torch.optim.SGD([w], lr=0.1, momentum=0.9)`
    #[test]
    fn momentum_moves_as_torch_does() {
        let rule = Momentum { learning_rate: 0.1, momentum: 0.9 };
        let steady = [
            [0.95, -1.975, 0.3, -0.0001],
            [1.005, -2.1525, 0.2999, -0.00019],
            [1.0445, -2.32225, 0.28981, -0.000271],
            [1.08005, -2.475025, 0.280729, -0.0003439],
            [1.112045, -2.3125225, 0.2475561, 0.04959049],
            [1.0708405, -2.16627025, 0.21870049, -0.105468559],
        ];
        check(&rule, STEADY, steady, &VELOCITY);
        let varying = [
            [0.975, -1.9875, 0.3, -5e-05],
            [1.03, -2.165, 0.2999, -0.00014],
            [1.0695, -2.33475, 0.28981, -0.000221],
            [1.0783875, -2.37294375, 0.28753975, -0.000239225],
            [1.08638625, -2.33231813, 0.279246525, 0.0122443725],
            [1.0822658, -2.3176929, 0.276360964, -0.0032615324],
        ];
        check(&rule, FACTORS, varying, &VELOCITY);
    }

    /// `torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True)`
    #[test]
    fn nesterovs_moves_as_torch_does() {
        let rule = Nesterov { learning_rate: 0.1, momentum: 0.9 };
        let steady = [
            [0.905, -1.9525, 0.3, -0.00019],
            [1.0545, -2.31225, 0.29981, -0.000271],
            [1.08005, -2.475025, 0.280729, -0.0003439],
            [1.112045, -2.6125225, 0.2725561, -0.00040951],
            [1.1408405, -2.16627025, 0.21770049, 0.094531441],
            [1.03375645, -2.03464322, 0.192730441, -0.245021703],
        ];
        check(&rule, STEADY, steady, &VELOCITY);
        let varying = [
            [0.9525, -1.97625, 0.3, -9.5e-05],
            [1.102, -2.336, 0.29981, -0.000176],
            [1.12755, -2.498775, 0.280729, -0.0002489],
            [1.13554875, -2.53314938, 0.278685775, -0.0002653025],
            [1.14274762, -2.42158631, 0.264971872, 0.0234699352],
            [1.13203922, -2.40842361, 0.262474868, -0.0104853792],
        ];
        check(&rule, FACTORS, varying, &VELOCITY);
    }
}
