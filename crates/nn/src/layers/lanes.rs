//! Slices of floats, eight at a time.
//!
//! Eight are read before any is written, so that the compiler need not know whether two slices
//! overlap to use one vector instruction for all of them.

/// What one vector register holds.
pub(crate) type Lanes = [f32; 8];

/// to ← to + from.
#[inline(always)]
pub(crate) fn add(to: &mut [f32], from: &[f32]) {
    update(to, from, |to, from| to + from);
}

/// to ← f(to, from), element by element.
#[inline(always)]
pub(crate) fn update(to: &mut [f32], from: &[f32], f: impl Fn(f32, f32) -> f32 + Copy) {
    debug_assert_eq!(to.len(), from.len(), "slices of one length");
    let (to_lanes, to_rest) = to.as_chunks_mut::<8>();
    let (from_lanes, from_rest) = from.as_chunks::<8>();
    for (to, from) in to_lanes.iter_mut().zip(from_lanes) {
        let (left, right) = (*to, *from);
        *to = std::array::from_fn(|i| f(left[i], right[i]));
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = f(*to, *from);
    }
}

/// Σ a·b, in eight running sums.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_lanes, a_rest) = a.as_chunks::<8>();
    let (b_lanes, b_rest) = b.as_chunks::<8>();
    let mut sums: Lanes = [0.0; 8];
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        sums = std::array::from_fn(|i| sums[i] + a[i] * b[i]);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sum(sums) + rest
}

/// The sum of all eight, added as a tree: three steps rather than seven.
#[inline(always)]
pub(crate) fn sum(x: Lanes) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|i| x[i] + x[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}
