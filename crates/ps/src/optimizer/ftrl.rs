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
    use crate::optimizer::tests::{FACTORS, STEADY, check};

    const SUMS: [f64; 4] = [1.85, 13.1725, 0.172601, 4.350001];

    fn rule(l1: f32, l2: f32, beta: f32) -> Ftrl {
        Ftrl { learning_rate: 0.1, initial_accumulator: 0.1, l1, l2, beta }
    }

    fn slots(z: [f64; 4], rate: f64) -> Vec<f64> {
        [&SUMS[..], &z, &[rate]].concat()
    }

    /// `tf.raw_ops.ResourceApplyFtrl` in f64 with `lr=0.1`, `lr_power=-0.5` and accumulators of 0.1; β is
    /// `l2 + β/(2·lr)` to it, as Keras has it.
    #[test]
    fn moves_as_tensorflow_does() {
        let plain = [
            [0.380962091, -0.369053552, 0.0, -0.000316226185],
            [0.467028387, -0.467082168, -0.000316226185, -0.000316226185],
            [0.458453458, -0.471977722, -0.0304672236, -0.000316226185],
            [0.458453458, -0.471977722, -0.0304672236, -0.000316226185],
            [0.458453457, -0.389319292, -0.0906599757, 0.0841990786],
            [0.406988434, -0.389319292, -0.0882529632, -0.0116935707],
        ];
        let z = [-5.535_641, 14.129_931, 0.366_649_38, 0.243_888_78];
        check(&rule(0.0, 0.0, 0.0), STEADY, plain, &slots(z, 0.1));
        let pulled = [
            [0.373790546, -0.358752431, 0.0, 0.0],
            [0.459414681, -0.456493604, 0.0, 0.0],
            [0.450883644, -0.46137482, -0.0239883444, 0.0],
            [0.450883644, -0.46137482, -0.0239883444, 0.0],
            [0.450883643, -0.378852813, -0.0833239193, 0.0801527657],
            [0.399644649, -0.378852813, -0.0809511742, -0.0135524613],
        ];
        let z = [-5.479_733_5, 13.792_792, 0.361_170_96, 0.303_472_17];
        check(&rule(0.02, 0.03, 0.0), STEADY, pulled, &slots(z, 0.1));
        let with_beta = [
            [0.203515478, -0.161443364, 0.0, 0.0],
            [0.26347129, -0.239991154, 0.0, 0.0],
            [0.25749111, -0.24391477, -0.00966974841, 0.0],
            [0.25749111, -0.24391477, -0.00966974841, 0.0],
            [0.257491109, -0.171370289, -0.0368043635, 0.0436403197],
            [0.219980668, -0.171370289, -0.0357191207, -0.031986721],
        ];
        let z = [-4.125_163, 7.106_836_5, 0.349_134_83, 0.848_988_85];
        check(&rule(0.02, 0.03, 0.5), STEADY, with_beta, &slots(z, 0.1));
    }

    /// The formula above in numpy's f64:
    ///
    /// ```python
    /// lr = 0.1 * factor; m = n + g * g
    /// z = z + g - ((np.sqrt(m) + beta) / lr - (np.sqrt(n) + beta) / (last or lr)) * w
    /// w = -(z - np.clip(z, -l1, l1)) / ((np.sqrt(m) + beta) / lr + 2 * l2); n, last = m, lr
    /// ```
    #[test]
    fn moves_by_its_formula_where_the_rate_varies() {
        let varying = [
            [0.22782605, -0.176876684, 0.0, 0.0],
            [0.287781863, -0.255424474, 0.0, 0.0],
            [0.281801682, -0.25934809, -0.00966974841, 0.0],
            [0.281801682, -0.25934809, -0.00966974841, 0.0],
            [0.281801682, -0.241192213, -0.0164866977, 0.0109549934],
            [0.278039752, -0.241192213, -0.0163775337, 0.00322183565],
        ];
        let z = [-51.756_165, 99.632_24, 1.520_268_5, -0.853_252_3];
        check(&rule(0.02, 0.03, 0.5), FACTORS, varying, &slots(z, 0.01));
    }

    /// Goal: what TensorFlow's formula does not do when the rate falls to a tenth.
    #[test]
    fn another_rate_alone_moves_no_weight() {
        let rule = rule(0.02, 0.03, 0.5);
        let (mut w, mut slots) = ([0.0f32; 2], vec![0.0; 5]);
        rule.begin(&mut slots);
        rule.apply(&mut w, &mut slots, &[0.5, -1.0], 1.0);
        let trained = w;
        assert!(w[0] < -0.01 && w[1] > 0.01, "{w:?}");
        for factor in [0.1, 1.0, 0.003] {
            rule.apply(&mut w, &mut slots, &[0.0, 0.0], factor);
            assert!(w.iter().zip(trained).all(|(a, b)| (a - b).abs() < 1e-6), "{w:?} {trained:?}");
        }
    }

    #[test]
    fn a_rate_of_nothing_is_no_step() {
        let rule = rule(0.02, 0.03, 0.5);
        let (mut w, mut slots) = ([0.25f32; 2], vec![0.0; 5]);
        rule.begin(&mut slots);
        let born = slots.clone();
        for factor in [0.0, 1e-30, f32::MIN_POSITIVE] {
            rule.apply(&mut w, &mut slots, &[0.5, -1.0], factor);
            assert_eq!((w, &slots), ([0.25; 2], &born));
        }
    }
}
