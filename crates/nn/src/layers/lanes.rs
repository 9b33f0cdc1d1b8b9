//! Slices of floats, as many at a time as a vector register holds.
//!
//! Everything is `#[inline(always)]`: a kernel that is compiled for wide vectors has to contain
//! what it calls.

use pulp::Simd;

/// to ← f(to, from), element by element; the slices have one length.
#[inline(always)]
pub(crate) fn update<S: Simd>(
    simd: S,
    to: &mut [f32],
    from: &[f32],
    f: impl Fn(S::f32s, S::f32s) -> S::f32s,
) {
    let (to, to_rest) = S::as_mut_simd_f32s(to);
    let (from, from_rest) = S::as_simd_f32s(from);
    for (to, from) in to.iter_mut().zip(from) {
        *to = f(*to, *from);
    }
    if !to_rest.is_empty() {
        let rest = f(simd.partial_load_f32s(to_rest), simd.partial_load_f32s(from_rest));
        simd.partial_store_f32s(to_rest, rest);
    }
}

/// to ← f(to, a, b), element by element; the slices have one length.
#[inline(always)]
pub(crate) fn update2<S: Simd>(
    simd: S,
    to: &mut [f32],
    (a, b): (&[f32], &[f32]),
    f: impl Fn(S::f32s, S::f32s, S::f32s) -> S::f32s,
) {
    let (to, to_rest) = S::as_mut_simd_f32s(to);
    let (a, a_rest) = S::as_simd_f32s(a);
    let (b, b_rest) = S::as_simd_f32s(b);
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        *to = f(*to, *a, *b);
    }
    if !to_rest.is_empty() {
        let (a, b) = (simd.partial_load_f32s(a_rest), simd.partial_load_f32s(b_rest));
        let rest = f(simd.partial_load_f32s(to_rest), a, b);
        simd.partial_store_f32s(to_rest, rest);
    }
}

/// to ← to + from.
#[inline(always)]
pub(crate) fn add<S: Simd>(simd: S, to: &mut [f32], from: &[f32]) {
    update(simd, to, from, |to, from| simd.add_f32s(to, from));
}

/// Σ a·b.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = S::as_simd_f32s(a);
    let (b, b_rest) = S::as_simd_f32s(b);
    let mut sum = simd.mul_f32s(simd.partial_load_f32s(a_rest), simd.partial_load_f32s(b_rest));
    for (&a, &b) in a.iter().zip(b) {
        sum = simd.mul_add_e_f32s(a, b, sum);
    }
    simd.reduce_sum_f32s(sum)
}

/// to ← f(to, from), element by element, for what [`Simd`] has no fast operation for.
///
/// Eight are read before any is written, so that the compiler need not know whether the slices
/// overlap to make vector code of `f`.
#[inline(always)]
pub(crate) fn update_each(to: &mut [f32], from: &[f32], f: impl Fn(f32, f32) -> f32) {
    let (to, to_rest) = to.as_chunks_mut::<8>();
    let (from, from_rest) = from.as_chunks::<8>();
    for (to, from) in to.iter_mut().zip(from) {
        let (left, right) = (*to, *from);
        *to = std::array::from_fn(|i| f(left[i], right[i]));
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = f(*to, *from);
    }
}

/// 0 where x ≤ 0, elsewhere y. Where x is NaN that is y: a comparison with "more than 0", or a
/// maximum, would turn NaN into 0 and hide it. Bits rather than a branch keep it vector code.
#[inline(always)]
pub(crate) fn clip(x: f32, y: f32) -> f32 {
    let dropped = u32::from(x <= 0.0);
    f32::from_bits(y.to_bits() & dropped.wrapping_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clip_is_relu_that_keeps_nan() {
        assert_eq!([-1.0, -0.0, 0.0, 2.0].map(|x| clip(x, 7.0)), [0.0, 0.0, 0.0, 7.0]);
        assert_eq!(clip(f32::NAN, 7.0), 7.0);
        assert!(clip(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn every_length_is_covered_to_its_end() {
        struct Check;
        impl pulp::WithSimd for Check {
            type Output = ();
            fn with_simd<S: Simd>(self, simd: S) {
                for len in 0..40 {
                    let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
                    let mut sum = a.clone();
                    add(simd, &mut sum, &a);
                    update2(simd, &mut sum, (&a, &a), |sum, a, b| simd.mul_add_e_f32s(a, b, sum));
                    update_each(&mut sum, &a, |sum, a| sum - a);
                    let expected: Vec<f32> = a.iter().map(|x| x + x * x).collect();
                    assert_eq!(sum, expected);
                    assert_eq!(dot(simd, &a, &a), a.iter().map(|x| x * x).sum::<f32>());
                }
            }
        }
        pulp::Arch::new().dispatch(Check);
        pulp::WithSimd::with_simd(Check, pulp::Scalar::new());
    }
}
