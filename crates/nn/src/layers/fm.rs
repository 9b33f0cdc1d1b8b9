//! The factorization machine's second order: every pair of a record's factor vectors, multiplied.
//!
//! Σ over pairs of vᵢ·vⱼ is half of (Σv)² − Σv², which is linear in the number of fields.

use pulp::{Arch, Simd, WithSimd};

use super::embedding::Embedding;
use super::{lanes, with_constant};

/// The pairwise part of a logit, over the factors in the input matrix.
pub(crate) struct PairwiseProducts {
    layout: Embedding,
    /// Sums of a block's factor vectors: records × dim.
    sums: Vec<f32>,
}

impl PairwiseProducts {
    /// For input matrices of this layout.
    pub fn new(layout: Embedding) -> Self {
        PairwiseProducts { layout, sums: Vec::new() }
    }

    /// Adds each record's pairwise products to its logit.
    pub fn forward(&mut self, x: &[f32], logits: &mut [f32]) {
        self.sums.resize(logits.len() * self.layout.dim, 0.0);
        Arch::new().dispatch(Forward { layout: self.layout, x, sums: &mut self.sums, logits });
    }

    /// Adds to `dx` the derivatives by the factors of the block that `forward` saw last.
    pub fn backward(&self, x: &[f32], slopes: &[f32], dx: &mut [f32]) {
        Arch::new().dispatch(Backward { layout: self.layout, x, sums: &self.sums, slopes, dx });
    }
}

struct Forward<'a> {
    layout: Embedding,
    x: &'a [f32],
    sums: &'a mut [f32],
    logits: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let layout = self.layout;
        with_constant!(layout.dim, dim => {
            let lines = self.x.chunks_exact(layout.line_width());
            for ((line, sums), logit) in lines.zip(self.sums.chunks_exact_mut(dim)).zip(self.logits) {
                *logit += products(simd, dim, &line[layout.numeric..], sums);
            }
        });
    }
}

/// The pairwise products of a record's factor vectors, which are summed into `sums`.
#[inline(always)]
fn products<S: Simd>(simd: S, dim: usize, factors: &[f32], sums: &mut [f32]) -> f32 {
    let (sum_lanes, sum_rest) = S::as_mut_simd_f32s(sums);
    let mut twice = simd.splat_f32s(0.0);
    for (column, out) in sum_lanes.iter_mut().enumerate() {
        let (mut sum, mut squares) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
        for vector in factors.chunks_exact(dim) {
            let v = S::as_simd_f32s(vector).0[column];
            sum = simd.add_f32s(sum, v);
            squares = simd.mul_add_e_f32s(v, v, squares);
        }
        *out = sum;
        twice = simd.add_f32s(twice, simd.sub_f32s(simd.mul_f32s(sum, sum), squares));
    }
    let mut rest = 0.0;
    let first = dim - sum_rest.len();
    for (column, out) in sum_rest.iter_mut().enumerate() {
        let (mut sum, mut squares) = (0.0, 0.0);
        for vector in factors.chunks_exact(dim) {
            let v = vector[first + column];
            sum += v;
            squares += v * v;
        }
        *out = sum;
        rest += sum * sum - squares;
    }
    0.5 * (simd.reduce_sum_f32s(twice) + rest)
}

struct Backward<'a> {
    layout: Embedding,
    x: &'a [f32],
    sums: &'a [f32],
    slopes: &'a [f32],
    dx: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (layout, width) = (self.layout, self.layout.line_width());
        with_constant!(layout.dim, dim => {
            let lines = self.x.chunks_exact(width).zip(self.dx.chunks_exact_mut(width));
            for (((line, dx), sums), &slope) in lines.zip(self.sums.chunks_exact(dim)).zip(self.slopes) {
                let slope = simd.splat_f32s(slope);
                let fields = line[layout.numeric..].chunks_exact(dim);
                for (factors, dx) in fields.zip(dx[layout.numeric..].chunks_exact_mut(dim)) {
                    // The derivative by a vector is the sum of all the others.
                    lanes::update2(simd, dx, (sums, factors), |dx, sum, v| {
                        simd.mul_add_e_f32s(slope, simd.sub_f32s(sum, v), dx)
                    });
                }
            }
        });
    }
}
