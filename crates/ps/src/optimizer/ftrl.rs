//! FTRL-Proximal with a learning-rate power of -½, as TensorFlow's `Ftrl`:
//!
//! ```text
//! q(n, lr) = (√n + β) / lr
//! m = n + g²
//! z += g - (q(m, lr) - q(n, last lr)) · w
//! w = -(z - clamp(z, -l1, l1)) / (q(m, lr) + 2·l2)
//! n = m
//! ```
//!
//! Slots: `n` per weight, starting at `initial_accumulator`, `z` per weight, then the last learning rate of the
//! row, 0 before its first step. TensorFlow has no such slot and takes the present rate for the last one; when
//! the rate falls, that pulls all weights towards zero by as much as it fell. With the last rate the sum over
//! `z` is what the published algorithm says, and a gradient of zero leaves a trained weight where it is. Where
//! the rate stays, both are the same.

use super::Rule;

/// Below this a learning rate is no step at all; its inverse would leave the range of numbers.
const RATE_MIN: f32 = 1e-20;

/// FTRL-Proximal.
#[derive(Debug, Clone)]
pub struct Ftrl {
    /// Step size.
    pub learning_rate: f32,
    /// What the accumulator starts with.
    pub initial_accumulator: f32,
    /// Weights whose `z` is no further than this from zero are zero.
    pub l1: f32,
    /// Pull of the weights towards zero.
    pub l2: f32,
    /// Added to the root.
    pub beta: f32,
}

impl Rule for Ftrl {
    fn slots(&self, weights: usize) -> usize {
        2 * weights + 1
    }

    fn begin(&self, slots: &mut [f32]) {
        let n = slots.len() / 2;
        slots[..n].fill(self.initial_accumulator);
        slots[n..].fill(0.0);
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        let len = weights.len();
        assert_eq!(len, gradient.len(), "a gradient is as long as its weights");
        assert_eq!(2 * len + 1, slots.len(), "there are two sums per weight and a learning rate");
        let (n, rest) = slots.split_at_mut(len);
        let (z, last) = rest.split_at_mut(len);
        let rate = self.learning_rate * factor;
        if rate < RATE_MIN {
            return;
        }
        let now = 1.0 / rate;
        let before = if last[0] > 0.0 { 1.0 / last[0] } else { now };
        last[0] = rate;
        let (l1, l2, beta) = (self.l1, 2.0 * self.l2, self.beta);
        for (((w, n), z), g) in weights.iter_mut().zip(n).zip(z).zip(gradient) {
            let old = (n.sqrt() + beta) * before;
            *n += g * g;
            let new = (n.sqrt() + beta) * now;
            *z += g - (new - old) * *w;
            // Adding 0 makes the zero of a weight that l1 holds a positive one.
            let beyond = *z - z.clamp(-l1, l1);
            *w = 0.0 - beyond / (new + l2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Ftrl = Ftrl { learning_rate: 0.1, initial_accumulator: 0.1, l1: 0.02, l2: 0.03, beta: 0.5 };

    /// Goal: what TensorFlow's formula does not do when the rate falls to a tenth.
    #[test]
    fn another_rate_alone_moves_no_weight() {
        let (mut w, mut slots) = ([0.0f32; 2], vec![0.0; 5]);
        RULE.begin(&mut slots);
        RULE.apply(&mut w, &mut slots, &[0.5, -1.0], 1.0);
        let trained = w;
        assert!(w[0] < -0.01 && w[1] > 0.01, "{w:?}");
        for factor in [0.1, 1.0, 0.003] {
            RULE.apply(&mut w, &mut slots, &[0.0, 0.0], factor);
            assert!(w.iter().zip(trained).all(|(a, b)| (a - b).abs() < 1e-6), "{w:?} {trained:?}");
        }
    }

    #[test]
    fn a_rate_of_nothing_is_no_step() {
        let (mut w, mut slots) = ([0.25f32; 2], vec![0.0; 5]);
        RULE.begin(&mut slots);
        let born = slots.clone();
        for factor in [0.0, 1e-30, f32::MIN_POSITIVE] {
            RULE.apply(&mut w, &mut slots, &[0.5, -1.0], factor);
            assert_eq!((w, &slots), ([0.25; 2], &born));
        }
    }
}
