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

/// 0 where x ≤ 0, elsewhere y. Where x is NaN that is y: a comparison with "more than 0", or a
/// maximum, would turn NaN into 0 and hide it.
#[inline(always)]
pub(crate) fn clip<S: Simd>(simd: S, x: S::f32s, y: S::f32s) -> S::f32s {
    let zero = simd.splat_f32s(0.0);
    simd.select_f32s_m32s(simd.less_than_or_equal_f32s(x, zero), zero, y)
}
