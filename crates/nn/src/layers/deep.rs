//! The dense network: ReLU layers and one output, on Burn's CPU backend.
//!
//! Burn multiplies the matrices. The backward pass is written out here rather than taken from
//! autodiff: bias, ReLU and their gradients are then one pass over a matrix in place, and nothing
//! is copied on the way in or out.

use burn::tensor::{Device, Tensor, TensorData};
use pulp::{Arch, Simd, WithSimd};

use super::lanes;

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
    /// Which vectors this processor has.
    arch: Arch,
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
        Deep {
            widths,
            weights,
            biases,
            out,
            inputs: Vec::new(),
            x: None,
            dx: None,
            device,
            arch: Arch::new(),
        }
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
            let mut data = self.inputs[layer].clone().matmul(weight.clone()).into_data();
            let y = floats_mut(&mut data);
            self.arch.dispatch(AddBiasAndClip { y, bias });
            if layer + 1 == self.weights.len() {
                self.arch.dispatch(AddOutputs { y, weights: &self.out, logits });
            }
            self.inputs.push(Tensor::from_data(data, &self.device));
        }
    }

    /// Adds the gradients, in the order of `load`, for `slopes`, the loss's derivatives by each
    /// logit. Returns the input matrix and the derivatives by it.
    pub fn backward(&mut self, slopes: &[f32], gradients: &mut [Vec<f32>]) -> (&[f32], &mut [f32]) {
        let arch = self.arch;
        let (of_layers, of_out) = gradients.split_at_mut(2 * self.weights.len());
        // The last layer's outputs are needed no more, so their place takes the derivatives.
        let mut data = self.pop_input();
        let (weights, gradient) = (&self.out[..], &mut of_out[0][..]);
        arch.dispatch(OutputGradient { y: floats_mut(&mut data), slopes, weights, gradient });
        for (layer, weight) in self.weights.iter().enumerate().rev() {
            let (of_weight, of_bias) = of_layers[2 * layer..].split_at_mut(1);
            arch.dispatch(AddLines { matrix: floats(&data), sums: &mut of_bias[0] });
            let dy = Tensor::<2>::from_data(data, &self.device);
            let dw = self.inputs[layer].clone().transpose().matmul(dy.clone()).into_data();
            arch.dispatch(AddLines { matrix: floats(&dw), sums: &mut of_weight[0] });
            data = dy.matmul(weight.clone().transpose()).into_data();
            if layer > 0 {
                let y = self.inputs.pop().expect("an input per layer").into_data();
                arch.dispatch(ClipGradient { dy: floats_mut(&mut data), y: floats(&y) });
            }
        }
        let x = self.pop_input();
        (floats(self.x.insert(x)), floats_mut(self.dx.insert(data)))
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

/// y ← ReLU(y + bias), line by line.
struct AddBiasAndClip<'a> {
    y: &'a mut [f32],
    bias: &'a [f32],
}

impl WithSimd for AddBiasAndClip<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for line in self.y.chunks_exact_mut(self.bias.len()) {
            lanes::update_each(line, self.bias, |y, bias| lanes::clip(y + bias, y + bias));
        }
    }
}

/// Adds to each logit the dot product of its line with the output's weights.
struct AddOutputs<'a> {
    y: &'a [f32],
    weights: &'a [f32],
    logits: &'a mut [f32],
}

impl WithSimd for AddOutputs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (line, logit) in self.y.chunks_exact(self.weights.len()).zip(self.logits) {
            *logit += lanes::dot(simd, line, self.weights);
        }
    }
}

/// Adds the output weights' gradient and replaces `y`, the last layer's outputs, by the
/// derivatives by what went into its ReLU.
struct OutputGradient<'a> {
    y: &'a mut [f32],
    slopes: &'a [f32],
    weights: &'a [f32],
    gradient: &'a mut [f32],
}

impl WithSimd for OutputGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for (line, &slope) in self.y.chunks_exact_mut(self.weights.len()).zip(self.slopes) {
            let slopes = simd.splat_f32s(slope);
            lanes::update(simd, self.gradient, line, |gradient, y| simd.mul_add_e_f32s(slopes, y, gradient));
            lanes::update_each(line, self.weights, |y, weight| lanes::clip(y, slope * weight));
        }
    }
}

/// Adds the lines of a matrix to `sums`.
struct AddLines<'a> {
    matrix: &'a [f32],
    sums: &'a mut [f32],
}

impl WithSimd for AddLines<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for line in self.matrix.chunks_exact(self.sums.len()) {
            lanes::add(simd, self.sums, line);
        }
    }
}

/// Zeroes the derivatives where ReLU gave 0. `y` are its outputs.
struct ClipGradient<'a> {
    dy: &'a mut [f32],
    y: &'a [f32],
}

impl WithSimd for ClipGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        lanes::update_each(self.dy, self.y, |dy, y| lanes::clip(y, dy));
    }
}
