//! The part of a logit that is linear in the numeric fields: bias + w·x.

/// Records handled together: each one's sum is a chain of additions, and several chains keep the
/// processor busy where one would wait.
const LANES: usize = 8;

/// Bias and weights of the numeric fields.
pub(crate) struct Linear {
    bias: f32,
    weights: Vec<f32>,
}

impl Linear {
    /// All zero, for so many fields.
    pub fn new(numeric_fields: usize) -> Self {
        Linear { bias: 0.0, weights: vec![0.0; numeric_fields] }
    }

    /// Takes the values.
    pub fn load(&mut self, bias: &[f32], weights: &[f32]) {
        self.bias = bias[0];
        self.weights.copy_from_slice(weights);
    }

    /// Writes a logit per record.
    pub fn forward(&self, numeric: &[f32], logits: &mut [f32]) {
        let fields = self.weights.len();
        assert_eq!(numeric.len(), logits.len() * fields, "a value per record and field");
        logits.fill(self.bias);
        if fields == 0 {
            return;
        }
        for (logits, numeric) in logits.chunks_mut(LANES).zip(numeric.chunks(LANES * fields)) {
            for (field, weight) in self.weights.iter().enumerate() {
                for (record, logit) in logits.iter_mut().enumerate() {
                    *logit += weight * numeric[record * fields + field];
                }
            }
        }
    }

    /// Adds the gradients: bias and weights are the first two of `tensors`.
    pub fn backward(&self, numeric: &[f32], slopes: &[f32], tensors: &mut [Vec<f32>]) {
        tensors[0][0] += slopes.iter().sum::<f32>();
        if self.weights.is_empty() {
            return;
        }
        let weights = &mut tensors[1];
        for (numeric, slope) in numeric.chunks_exact(self.weights.len()).zip(slopes) {
            weights.iter_mut().zip(numeric).for_each(|(g, x)| *g += slope * x);
        }
    }
}
