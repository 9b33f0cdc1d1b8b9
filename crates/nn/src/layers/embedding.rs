//! Rows of the embedding table into the network's input matrix, and gradients back into rows.
//!
//! A row is one wide weight followed by `dim` factors. The input matrix holds a record per line:
//! first its numeric fields, then the factors of each categorical field.

use pulp::{Arch, Simd, WithSimd};

use super::{lanes, with_constant};

/// Records whose rows are fetched together; few enough that they stay in the first-level cache.
const GROUP: usize = 8;

/// Where the parts of a row and of a line of the input matrix are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Embedding {
    /// Categorical fields of a record.
    pub fields: usize,
    /// Numeric fields of a record.
    pub numeric: usize,
    /// Factors of a row.
    pub dim: usize,
}

impl Embedding {
    /// Weights per row.
    pub fn row_width(&self) -> usize {
        1 + self.dim
    }

    /// Values per line of the input matrix.
    pub fn line_width(&self) -> usize {
        self.numeric + self.fields * self.dim
    }

    /// Adds each record's wide weights to its logit.
    #[inline(always)]
    pub fn add_wide(&self, rows: &[f32], index: &[u32], logits: &mut [f32]) {
        if self.fields == 0 {
            return;
        }
        let width = self.row_width();
        for (index, logit) in index.chunks_exact(self.fields).zip(logits) {
            let mut sum = 0.0;
            for &i in index {
                sum += rows[i as usize * width];
            }
            *logit += sum;
        }
    }

    /// Adds the gradients of the wide weights to `gradient`, which is like `rows`.
    pub fn add_wide_gradient(&self, index: &[u32], slopes: &[f32], gradient: &mut [f32]) {
        if self.fields == 0 {
            return;
        }
        let width = self.row_width();
        for (index, slope) in index.chunks_exact(self.fields).zip(slopes) {
            index.iter().for_each(|&i| gradient[i as usize * width] += slope);
        }
    }

    /// Writes the input matrix and adds each record's wide weights to its logit.
    pub fn gather(&self, numeric: &[f32], rows: &[f32], index: &[u32], x: &mut [f32], logits: &mut [f32]) {
        assert_eq!(x.len(), logits.len() * self.line_width(), "a line per record");
        Arch::new().dispatch(Gather { layout: *self, numeric, rows, index, x, logits });
    }

    /// Adds to `gradient`, which is like the rows, the gradients of wide weights and factors, given
    /// the loss's derivatives by logit (`slopes`) and by the input matrix (`dx`).
    pub fn scatter(&self, index: &[u32], slopes: &[f32], dx: &[f32], gradient: &mut [f32]) {
        assert_eq!(dx.len(), slopes.len() * self.line_width(), "a line per record");
        Arch::new().dispatch(Scatter { layout: *self, index, slopes, dx, gradient });
    }
}

struct Gather<'a> {
    layout: Embedding,
    numeric: &'a [f32],
    rows: &'a [f32],
    index: &'a [u32],
    x: &'a mut [f32],
    logits: &'a mut [f32],
}

impl WithSimd for Gather<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Embedding { fields, numeric, dim } = self.layout;
        let line_width = self.layout.line_width();
        let lines = self.x.chunks_mut(GROUP * line_width);
        for (group, (lines, logits)) in lines.zip(self.logits.chunks_mut(GROUP)).enumerate() {
            let first = group * GROUP;
            let index = &self.index[first * fields..][..logits.len() * fields];
            // Reading the wide weights first has the rows of all these records on their way from
            // memory at once, before their factors are wanted one after the other.
            self.layout.add_wide(self.rows, index, logits);
            for (record, line) in lines.chunks_exact_mut(line_width).enumerate() {
                let (numbers, factors) = line.split_at_mut(numeric);
                numbers.copy_from_slice(&self.numeric[(first + record) * numeric..][..numeric]);
                let index = &index[record * fields..][..fields];
                with_constant!(dim, dim => {
                    for (&i, factors) in index.iter().zip(factors.chunks_exact_mut(dim)) {
                        factors.copy_from_slice(&self.rows[i as usize * (1 + dim) + 1..][..dim]);
                    }
                });
            }
        }
    }
}

struct Scatter<'a> {
    layout: Embedding,
    index: &'a [u32],
    slopes: &'a [f32],
    dx: &'a [f32],
    gradient: &'a mut [f32],
}

impl WithSimd for Scatter<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Embedding { fields, numeric, dim } = self.layout;
        let lines = self.dx.chunks_exact(self.layout.line_width());
        with_constant!(dim, dim => {
            for (record, (line, slope)) in lines.zip(self.slopes).enumerate() {
                let index = &self.index[record * fields..][..fields];
                for (&i, factors) in index.iter().zip(line[numeric..].chunks_exact(dim)) {
                    let row = &mut self.gradient[i as usize * (1 + dim)..][..1 + dim];
                    row[0] += slope;
                    lanes::add(simd, &mut row[1..], factors);
                }
            }
        });
    }
}
