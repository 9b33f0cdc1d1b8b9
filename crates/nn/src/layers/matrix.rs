//! Products of row-major matrices, by the `gemm` crate on the calling thread.
#![expect(unsafe_code, reason = "gemm's only entry point takes pointers")]

/// A row-major matrix, or the transpose of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// Steps in `values` from a row to the next, and from a column to the next.
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// The values, line by line, as a matrix of lines so long.
    pub fn new(values: &'a [f32], columns: usize) -> Self {
        assert!(columns > 0 && values.len().is_multiple_of(columns), "whole lines");
        let rows = values.len() / columns;
        Matrix { values, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Rows for columns; nothing moves.
    pub fn transposed(self) -> Self {
        Matrix {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// out ← left · right.
pub(crate) fn multiply(left: Matrix, right: Matrix, out: &mut [f32]) {
    product(left, right, out, false);
}

/// out ← out + left · right.
pub(crate) fn add_product(left: Matrix, right: Matrix, out: &mut [f32]) {
    product(left, right, out, true);
}

fn product(left: Matrix, right: Matrix, out: &mut [f32], add: bool) {
    let (m, k, n) = (left.rows, left.columns, right.columns);
    assert_eq!(k, right.rows, "as many columns on the left as rows on the right");
    assert_eq!(out.len(), m * n, "a value per row on the left and column on the right");
    // SAFETY: a `Matrix` reaches rows · columns values of its slice and no further, `out` has m · n, and
    // being borrowed mutably it overlaps neither factor. No stride is above `isize::MAX`: slices are not
    // that long.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            add,
            left.values.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(matrix: Matrix, row: usize, column: usize) -> f32 {
        matrix.values[row * matrix.row_stride + column * matrix.column_stride]
    }

    proptest! {
        #[test]
        fn products_are_those_of_the_definition(
            m in 1..40usize, k in 1..40usize, n in 1..40usize,
            left_transposed: bool, right_transposed: bool,
        ) {
            // Small whole numbers: every sum is exact, whatever its order.
            let fill = |len: usize, seed: usize| -> Vec<f32> {
                (0..len).map(|i| ((i * 7 + seed) % 11) as f32 - 5.0).collect()
            };
            let (a, b, c) = (fill(m * k, 1), fill(k * n, 2), fill(m * n, 3));
            let left = if left_transposed { Matrix::new(&a, m).transposed() } else { Matrix::new(&a, k) };
            let right = if right_transposed { Matrix::new(&b, k).transposed() } else { Matrix::new(&b, n) };
            let mut product = vec![f32::NAN; m * n];
            multiply(left, right, &mut product);
            let mut sum = c.clone();
            add_product(left, right, &mut sum);
            for row in 0..m {
                for column in 0..n {
                    let wanted: f32 = (0..k).map(|i| at(left, row, i) * at(right, i, column)).sum();
                    prop_assert_eq!(product[row * n + column], wanted);
                    prop_assert_eq!(sum[row * n + column], c[row * n + column] + wanted);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "as many columns on the left as rows on the right")]
    fn factors_that_do_not_fit_are_a_bug() {
        multiply(Matrix::new(&[1.0; 6], 3), Matrix::new(&[1.0; 6], 3), &mut [0.0; 6]);
    }
}
