//! What the models are made of. Each layer reads and writes plain slices for a block of records
//! and has its gradient written out by hand; the tests hold it against Burn's autodiff.
//!
//! The binary is built for any x86-64, where a vector register has 4 lanes. So the inner loops are
//! kernels ([`pulp::WithSimd`]): compiled for wider vectors too, and chosen when they run.

pub(crate) mod classifier;
pub(crate) mod deep;
pub(crate) mod embedding;
pub(crate) mod fm;
pub(crate) mod lanes;
pub(crate) mod linear;
pub(crate) mod loss;
pub(crate) mod matrix;

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
