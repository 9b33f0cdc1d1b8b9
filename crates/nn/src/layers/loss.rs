//! Binary cross-entropy from logits, stable for logits of any size.

/// 1 / (1 + e^-z) without overflow; NaN stays NaN.
#[inline]
pub(crate) fn sigmoid(z: f32) -> f32 {
    let small = (-z.abs()).exp();
    let tail = small / (1.0 + small);
    if z >= 0.0 { 1.0 - tail } else { tail }
}

/// Sum of the records' losses. Turns each logit into the derivative of (loss × `scale`) by it.
pub(crate) fn cross_entropy(logits: &mut [f32], labels: &[f32], scale: f32) -> f64 {
    assert_eq!(logits.len(), labels.len(), "a label per logit");
    let mut sum = 0.0;
    for (z, &label) in logits.iter_mut().zip(labels) {
        let small = (-z.abs()).exp();
        // ln(1 + e^z) − z·label, with the large part of it taken out of the logarithm.
        let loss = (z.max(0.0) - *z * label) + small.ln_1p();
        sum += f64::from(loss);
        let tail = small / (1.0 + small);
        let probability = if *z >= 0.0 { 1.0 - tail } else { tail };
        *z = (probability - label) * scale;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_slope_match_the_definition_in_double_precision() {
        for z in [-30.0f32, -4.0, -0.1, 0.0, 0.3, 2.0, 12.0] {
            for label in [0.0f32, 1.0] {
                let p = 1.0 / (1.0 + (-f64::from(z)).exp());
                let expected = if label == 1.0 { -p.ln() } else { -(1.0 / (1.0 + f64::from(z).exp())).ln() };
                let mut slope = [z];
                let loss = cross_entropy(&mut slope, &[label], 0.5);
                assert!((loss - expected).abs() <= 1e-6 * (1.0 + expected), "{z} {label}: {loss} {expected}");
                assert!((f64::from(slope[0]) - 0.5 * (p - f64::from(label))).abs() < 1e-7);
                assert!((f64::from(sigmoid(z)) - p).abs() < 1e-7);
            }
        }
    }

    #[test]
    fn huge_logits_stay_finite_and_nan_stays_nan() {
        let mut logits = [1e30, -1e30];
        assert_eq!(cross_entropy(&mut logits, &[1.0, 0.0], 1.0), 0.0);
        assert_eq!(logits, [0.0, 0.0]);
        let mut logits = [f32::NAN];
        assert!(cross_entropy(&mut logits, &[0.0], 1.0).is_nan());
        assert!(logits[0].is_nan());
        assert!(sigmoid(f32::NAN).is_nan());
    }
}
