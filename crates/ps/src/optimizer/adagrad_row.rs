//! Adagrad with one accumulator per row, of the mean of squares of the row's gradient:
//!
//! ```text
//! a += mean(g²)
//! w -= lr · g / (√a + ε)
//! ```
//!
//! Slots: one `a`, starting at `initial_accumulator`. A row takes little more memory than its weights. That is
//! of use where there are many rows; the weights of a dense tensor have little in common, so tensors are
//! trained with Adagrad per element (see [`super::Optimizer::of_tensors`]).

use super::Rule;

/// How many sums of squares are kept side by side, so that they are formed many at a time.
const LANES: usize = 8;

/// Adagrad per row.
#[derive(Debug, Clone)]
pub struct AdagradRow {
    /// Step size.
    pub learning_rate: f32,
    /// What the accumulator starts with.
    pub initial_accumulator: f32,
    /// Added to the root.
    pub epsilon: f32,
}

impl Rule for AdagradRow {
    fn slots(&self, _weights: usize) -> usize {
        1
    }

    fn begin(&self, slots: &mut [f32]) {
        slots.fill(self.initial_accumulator);
    }

    #[inline(always)]
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        assert_eq!(weights.len(), gradient.len(), "a gradient is as long as its weights");
        assert_eq!(1, slots.len(), "there is an accumulator per row");
        slots[0] += sum_of_squares(gradient) / gradient.len() as f32;
        // One division for the row: the same for every weight of it.
        let rate = self.learning_rate * factor / (slots[0].sqrt() + self.epsilon);
        for (w, g) in weights.iter_mut().zip(gradient) {
            *w -= rate * g;
        }
    }
}

/// In an order that depends on the length alone.
#[inline(always)]
fn sum_of_squares(gradient: &[f32]) -> f32 {
    let (chunks, rest) = gradient.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for chunk in chunks {
        for (sum, g) in lanes.iter_mut().zip(chunk) {
            *sum += g * g;
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|g| g * g).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rows_are_summed_whole() {
        let gradient: Vec<f32> = (1..=21).map(|x| x as f32).collect();
        assert_eq!(sum_of_squares(&gradient), 3311.0);
        assert_eq!(sum_of_squares(&gradient[..8]), 204.0);
        assert_eq!(sum_of_squares(&gradient[..3]), 14.0);
    }
}
