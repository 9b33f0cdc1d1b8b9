//! The dense network: ReLU layers and one output.
//!
//! The backward pass is written out: bias, ReLU and their gradients are one pass over a matrix in place,
//! a weight's gradient is added where it belongs by the product itself, and every matrix keeps its place
//! from one block of records to the next.

use pulp::{Arch, Simd, WithSimd};

use super::lanes;
use super::matrix::{Matrix, add_product, multiply};

/// ReLU layers and one output without a bias of its own.
pub(crate) struct Deep {
    /// Inputs, then the outputs of each layer.
    widths: Vec<usize>,
    /// widths[i] × widths[i + 1].
    weights: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
    /// Weights of the last layer's outputs.
    out: Vec<f32>,
    /// What each layer was given in the last `forward`, then the last layer's outputs; a line per record.
    inputs: Vec<Vec<f32>>,
    /// The derivatives by a layer's outputs and by its inputs while `backward` passes it.
    dy: Vec<f32>,
    dx: Vec<f32>,
    /// Which vectors this processor has.
    arch: Arch,
}

impl Deep {
    /// All zero, with so many inputs.
    pub fn new(inputs: usize, hidden: &[usize]) -> Self {
        assert!(!hidden.is_empty(), "a dense network has at least one layer");
        let widths: Vec<usize> = std::iter::once(inputs).chain(hidden.iter().copied()).collect();
        let weights = widths.windows(2).map(|w| vec![0.0; w[0] * w[1]]).collect();
        let biases = hidden.iter().map(|&width| vec![0.0; width]).collect();
        let out = vec![0.0; widths[hidden.len()]];
        let inputs = vec![Vec::new(); widths.len()];
        Deep { widths, weights, biases, out, inputs, dy: Vec::new(), dx: Vec::new(), arch: Arch::new() }
    }

    /// Takes the values: weight and bias of each layer, then the output's weights.
    pub fn load(&mut self, tensors: &[&[f32]]) {
        assert_eq!(tensors.len(), 2 * self.weights.len() + 1, "two tensors per layer and the output");
        let layers = self.weights.iter_mut().zip(&mut self.biases);
        for ((weight, bias), values) in layers.zip(tensors.chunks_exact(2)) {
            weight.copy_from_slice(values[0]);
            bias.copy_from_slice(values[1]);
        }
        self.out.copy_from_slice(tensors[tensors.len() - 1]);
    }

    /// The input matrix, a line per record, to be written before `forward`.
    pub fn input(&mut self, records: usize) -> &mut [f32] {
        for (matrix, width) in self.inputs.iter_mut().zip(&self.widths) {
            matrix.resize(records * width, 0.0);
        }
        &mut self.inputs[0]
    }

    /// Adds the network's output for each line of the input matrix to its logit.
    pub fn forward(&mut self, logits: &mut [f32]) {
        for (layer, (weight, bias)) in self.weights.iter().zip(&self.biases).enumerate() {
            let (before, after) = self.inputs.split_at_mut(layer + 1);
            let (x, y) = (&before[layer], &mut after[0]);
            multiply(Matrix::new(x, self.widths[layer]), Matrix::new(weight, bias.len()), y);
            self.arch.dispatch(AddBiasAndClip { y, bias });
        }
        let y = self.inputs.last().expect("at least one layer");
        self.arch.dispatch(AddOutputs { y, weights: &self.out, logits });
    }

    /// Adds the gradients, in the order of `load`, for `slopes`, the loss's derivatives by each
    /// logit. Returns the input matrix and the derivatives by it.
    pub fn backward(&mut self, slopes: &[f32], gradients: &mut [Vec<f32>]) -> (&[f32], &mut [f32]) {
        let arch = self.arch;
        let (of_layers, of_out) = gradients.split_at_mut(2 * self.weights.len());
        // The last layer's outputs are needed no more, so their place takes the derivatives.
        std::mem::swap(&mut self.dy, self.inputs.last_mut().expect("at least one layer"));
        let (weights, gradient) = (&self.out[..], &mut of_out[0][..]);
        arch.dispatch(OutputGradient { y: &mut self.dy, slopes, weights, gradient });
        for (layer, weight) in self.weights.iter().enumerate().rev() {
            let (of_weight, of_bias) = of_layers[2 * layer..].split_at_mut(1);
            arch.dispatch(AddLines { matrix: &self.dy, sums: &mut of_bias[0] });
            let (x, width) = (&self.inputs[layer], self.widths[layer]);
            let dy = Matrix::new(&self.dy, self.widths[layer + 1]);
            add_product(Matrix::new(x, width).transposed(), dy, &mut of_weight[0]);
            self.dx.resize(x.len(), 0.0);
            multiply(dy, Matrix::new(weight, self.widths[layer + 1]).transposed(), &mut self.dx);
            if layer > 0 {
                arch.dispatch(ClipGradient { dy: &mut self.dx, y: x });
                std::mem::swap(&mut self.dy, &mut self.dx);
            }
        }
        (&self.inputs[0], &mut self.dx)
    }
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
