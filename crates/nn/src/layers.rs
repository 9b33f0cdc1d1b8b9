//! What the models are made of. Each layer reads and writes plain slices for a block of records
//! and has its gradient written out by hand; the tests hold it against Burn's autodiff.

pub(crate) mod classifier;
pub(crate) mod deep;
pub(crate) mod embedding;
pub(crate) mod fm;
pub(crate) mod lanes;
pub(crate) mod linear;
pub(crate) mod loss;

/// Runs `body` compiled for the widest vectors this processor has.
///
/// The binary is built for any x86-64, where vectors have 4 lanes. The choice is made at run time,
/// so `body` and what it calls must be `#[inline(always)]` to be part of it.
#[inline(always)]
pub(crate) fn vectorized(body: impl FnMut()) {
    struct Kernel<F>(F);
    impl<F: FnMut()> pulp::WithSimd for Kernel<F> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: pulp::Simd>(mut self, _: S) {
            // A call through `FnMut` is the body itself; one through `FnOnce` would go by way of
            // an adapter that is not inlined.
            (self.0)();
        }
    }
    pulp::Arch::new().dispatch(Kernel(body));
}

/// Evaluates `$body` with `$dim` a constant where it is a usual one, so that its loops over a row
/// become straight vector code.
macro_rules! with_constant {
    ($value:expr, $dim:ident => $body:expr) => {
        match $value {
            4 => with_constant!(@ 4, $dim => $body),
            8 => with_constant!(@ 8, $dim => $body),
            16 => with_constant!(@ 16, $dim => $body),
            32 => with_constant!(@ 32, $dim => $body),
            other => with_constant!(@ other, $dim => $body),
        }
    };
    (@ $value:expr, $dim:ident => $body:expr) => {{
        let $dim: usize = $value;
        $body
    }};
}
pub(crate) use with_constant;
