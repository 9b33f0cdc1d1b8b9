//! Floats in a payload, in the precision that a table's rows and gradients travel in. In memory they are always f32.
//!
//! Rounding is to the nearest, and what is finite stays finite: a gradient beyond the largest number of a precision
//! arrives as that number. What is not finite arrives so, and is refused as ever.

use elasticdl_spec::Precision;
use half::{bf16, f16};

use crate::error::Result;
use crate::frame::{Frame, Payload};

/// How many words so many floats take.
pub fn words(precision: Precision, count: usize) -> usize {
    match precision {
        Precision::F32 => count.div_ceil(2),
        Precision::Bf16 | Precision::F16 => count.div_ceil(4),
    }
}

/// Appends floats.
pub fn put(frame: &mut Frame, precision: Precision, floats: &[f32]) {
    match precision {
        Precision::F32 => frame.put_floats(floats),
        Precision::Bf16 => {
            put_halves(frame, floats, |x| bf16::from_f32(kept(x, bf16::MAX.to_f32())).to_bits())
        }
        Precision::F16 => put_halves(frame, floats, |x| f16::from_f32(kept(x, f16::MAX.to_f32())).to_bits()),
    }
}

/// Reads as many floats as `out` has room for.
pub fn take(payload: &mut Payload<'_>, precision: Precision, out: &mut [f32]) -> Result<()> {
    match precision {
        Precision::F32 => out.copy_from_slice(payload.take_floats(out.len())?),
        Precision::Bf16 => take_halves(payload, out, |bits| bf16::from_bits(bits).to_f32())?,
        Precision::F16 => take_halves(payload, out, |bits| f16::from_bits(bits).to_f32())?,
    }
    Ok(())
}

#[inline(always)]
fn put_halves(frame: &mut Frame, floats: &[f32], bits: impl Fn(f32) -> u16) {
    for (to, x) in frame.grow_halves(floats.len()).iter_mut().zip(floats) {
        *to = bits(*x);
    }
}

#[inline(always)]
fn take_halves(payload: &mut Payload<'_>, out: &mut [f32], float: impl Fn(u16) -> f32) -> Result<()> {
    let halves = payload.take_halves(out.len())?;
    for (to, bits) in out.iter_mut().zip(halves) {
        *to = float(*bits);
    }
    Ok(())
}

/// The float, or the largest one of its sign that can be sent.
#[inline(always)]
fn kept(x: f32, most: f32) -> f32 {
    if x.is_finite() { x.clamp(-most, most) } else { x }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    fn sent(precision: Precision, floats: &[f32]) -> Vec<f32> {
        let mut frame = Frame::default();
        frame.begin(1, 1);
        put(&mut frame, precision, floats);
        frame.put(7);
        let mut payload = frame.payload();
        let mut out = vec![9.0; floats.len()];
        take(&mut payload, precision, &mut out).unwrap();
        assert_eq!(frame.bytes(), 8 * (3 + words(precision, floats.len())));
        assert_eq!(payload.take().unwrap(), 7, "and what follows is where it was put");
        out
    }

    #[test]
    fn small_whole_numbers_survive_in_every_precision() {
        for precision in ALL {
            for count in 0..9 {
                let floats: Vec<f32> = (0..count).map(|x| x as f32 - 3.0).collect();
                assert_eq!(sent(precision, &floats), floats, "{precision:?}");
            }
        }
    }

    #[test]
    fn what_is_finite_stays_finite_and_what_is_not_does_not() {
        for (precision, most) in [(Precision::Bf16, 3.389_531_4e38), (Precision::F16, 65_504.0)] {
            assert_eq!(sent(precision, &[f32::MAX, f32::MIN]), [most, -most], "{precision:?}");
            let odd = sent(precision, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
            assert_eq!(odd[..2], [f32::INFINITY, f32::NEG_INFINITY]);
            assert!(odd[2].is_nan());
        }
    }

    #[test]
    fn a_payload_that_is_too_short_is_refused() {
        let mut frame = Frame::default();
        frame.begin(1, 1);
        frame.put(0);
        for precision in ALL {
            assert!(take(&mut frame.payload(), precision, &mut [0.0; 5]).is_err(), "{precision:?}");
        }
    }

    proptest! {
        /// Goal: the relative error is at most half of the last bit: 2^-9 and 2^-12.
        #[test]
        fn numbers_are_rounded_to_the_nearest(x in -1000.0f32..1000.0) {
            for (precision, bits) in [(Precision::Bf16, 9), (Precision::F16, 12)] {
                let error = (sent(precision, &[x])[0] - x).abs();
                prop_assert!(error <= x.abs() * 0.5f32.powi(bits - 1) + 3e-8, "{precision:?} {x} {error}");
            }
        }
    }
}
