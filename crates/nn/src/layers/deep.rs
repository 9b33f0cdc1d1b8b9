//! The dense network: ReLU layers and one output, on Burn's CPU backend.
//!
//! Burn multiplies the matrices. The backward pass is written out here rather than taken from
//! autodiff: bias, ReLU and their gradients are then one pass over a matrix in place, and nothing
//! is copied on the way in or out.

use burn::tensor::{Device, Tensor, TensorData};

use super::{lanes, vectorized};

/// ReLU layers and one output without a bias of its own.
pub(crate) struct Deep {
    /// Inputs, then the outputs of each layer.
    widths: Vec<usize>,
    /// widths[i] × widths[i + 1].
    weights: Vec<Tensor<2>>,
    biases: Vec<Vec<f32>>,
    /// Weights of the last layer's outputs.
    out: Vec<f32>,
    /// What each layer was given in the last `forward`, then the last layer's outputs.
    inputs: Vec<Tensor<2>>,
    /// The input matrix while no tensor has it, and the derivatives by it.
    x: Option<TensorData>,
    dx: Option<TensorData>,
    device: Device,
}

impl Deep {
    /// All zero, with so many inputs.
    pub fn new(inputs: usize, hidden: &[usize]) -> Self {
        assert!(!hidden.is_empty(), "a dense network has at least one layer");
        let widths: Vec<usize> = std::iter::once(inputs).chain(hidden.iter().copied()).collect();
        let device = Device::flex();
        let weights = widths.windows(2).map(|w| Tensor::zeros([w[0], w[1]], &device)).collect();
        let biases = hidden.iter().map(|&width| vec![0.0; width]).collect();
        let out = vec![0.0; widths[hidden.len()]];
        Deep { widths, weights, biases, out, inputs: Vec::new(), x: None, dx: None, device }
    }

    /// Takes the values: weight and bias of each layer, then the output's weights.
    pub fn load(&mut self, tensors: &[&[f32]]) {
        assert_eq!(tensors.len(), 2 * self.weights.len() + 1, "two tensors per layer and the output");
        let layers = self.weights.iter_mut().zip(&mut self.biases);
        for ((weight, bias), values) in layers.zip(tensors.chunks_exact(2)) {
            weight.inplace(|weight| {
                let mut data = weight.into_data();
                floats_mut(&mut data).copy_from_slice(values[0]);
                Tensor::from_data(data, &self.device)
            });
            bias.copy_from_slice(values[1]);
        }
        self.out.copy_from_slice(tensors[tensors.len() - 1]);
    }

    /// The input matrix, a line per record, to be written before `forward`.
    pub fn input(&mut self, records: usize) -> &mut [f32] {
        if !self.inputs.is_empty() {
            self.x = Some(self.inputs.swap_remove(0).into_data());
            self.inputs.clear();
        }
        let len = records * self.widths[0];
        let kept = self.x.take().filter(|x| x.num_elements() == len);
        floats_mut(
            self.x.insert(
                kept.unwrap_or_else(|| TensorData::new(vec![0.0f32; len], [records, self.widths[0]])),
            ),
        )
    }

    /// Adds the network's output for each line of the input matrix to its logit.
    pub fn forward(&mut self, logits: &mut [f32]) {
        let x = self.x.take().expect("the input matrix was written");
        self.inputs.push(Tensor::from_data(x, &self.device));
        for (layer, (weight, bias)) in self.weights.iter().zip(&self.biases).enumerate() {
            let mut y = self.inputs[layer].clone().matmul(weight.clone()).into_data();
            let values = floats_mut(&mut y);
            vectorized(
                #[inline(always)]
                || add_bias_and_clip(values, bias),
            );
            if layer + 1 == self.weights.len() {
                vectorized(
                    #[inline(always)]
                    || add_dot_products(values, &self.out, logits),
                );
            }
            self.inputs.push(Tensor::from_data(y, &self.device));
        }
    }

    /// Adds the gradients, in the order of `load`, for `slopes`, the loss's derivatives by each
    /// logit. Returns the input matrix and the derivatives by it.
    pub fn backward(&mut self, slopes: &[f32], gradients: &mut [Vec<f32>]) -> (&[f32], &mut [f32]) {
        let (of_layers, of_out) = gradients.split_at_mut(2 * self.weights.len());
        // The last layer's outputs are needed no more, so their place takes the derivatives.
        let mut dy = self.pop_input();
        let values = floats_mut(&mut dy);
        vectorized(
            #[inline(always)]
            || output_gradient(values, slopes, &self.out, &mut of_out[0]),
        );
        for (layer, weight) in self.weights.iter().enumerate().rev() {
            let (of_weight, of_bias) = of_layers[2 * layer..].split_at_mut(1);
            vectorized(
                #[inline(always)]
                || add_column_sums(floats(&dy), &mut of_bias[0]),
            );
            let slopes = Tensor::<2>::from_data(dy, &self.device);
            let dw = self.inputs[layer].clone().transpose().matmul(slopes.clone()).into_data();
            vectorized(
                #[inline(always)]
                || lanes::add(&mut of_weight[0], floats(&dw)),
            );
            dy = slopes.matmul(weight.clone().transpose()).into_data();
            if layer > 0 {
                let x = self.inputs.pop().expect("an input per layer").into_data();
                let values = floats_mut(&mut dy);
                vectorized(
                    #[inline(always)]
                    || zero_where_clipped(values, floats(&x)),
                );
            }
        }
        let x = self.pop_input();
        (floats(self.x.insert(x)), floats_mut(self.dx.insert(dy)))
    }

    fn pop_input(&mut self) -> TensorData {
        self.inputs.pop().expect("backward follows forward").into_data()
    }
}

/// The values of a matrix of ours.
fn floats(data: &TensorData) -> &[f32] {
    data.as_slice().expect("all tensors here are f32")
}

fn floats_mut(data: &mut TensorData) -> &mut [f32] {
    data.as_mut_slice().expect("all tensors here are f32")
}

#[inline(always)]
fn add_bias_and_clip(y: &mut [f32], bias: &[f32]) {
    for line in y.chunks_exact_mut(bias.len()) {
        // Not `max`, which would turn NaN into 0 and hide it.
        lanes::update(line, bias, |y, bias| if y + bias <= 0.0 { 0.0 } else { y + bias });
    }
}

#[inline(always)]
fn add_dot_products(y: &[f32], weights: &[f32], logits: &mut [f32]) {
    for (line, logit) in y.chunks_exact(weights.len()).zip(logits) {
        *logit += lanes::dot(line, weights);
    }
}

/// Adds the output weights' gradient and replaces `y`, the last layer's outputs, by the
/// derivatives by what went into its ReLU.
#[inline(always)]
fn output_gradient(y: &mut [f32], slopes: &[f32], weights: &[f32], gradient: &mut [f32]) {
    for (line, slope) in y.chunks_exact_mut(weights.len()).zip(slopes) {
        lanes::update(gradient, line, |gradient, y| gradient + slope * y);
        lanes::update(line, weights, |y, weight| if y <= 0.0 { 0.0 } else { slope * weight });
    }
}

#[inline(always)]
fn add_column_sums(matrix: &[f32], sums: &mut [f32]) {
    for line in matrix.chunks_exact(sums.len()) {
        lanes::add(sums, line);
    }
}

/// Zeroes the derivatives where ReLU gave 0. `clipped` are its outputs.
#[inline(always)]
fn zero_where_clipped(dy: &mut [f32], clipped: &[f32]) {
    lanes::update(dy, clipped, |dy, y| if y <= 0.0 { 0.0 } else { dy });
}
