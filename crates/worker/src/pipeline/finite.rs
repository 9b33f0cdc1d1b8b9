//! Finds numbers that are none before they reach a server.

use elasticdl_nn::Gradients;
use elasticdl_spec::ModelShape;

use crate::dedup::Keys;

/// What of a batch is NaN or infinite, in words; `None` where all is well.
pub(super) fn non_finite(
    shape: &ModelShape,
    keys: &Keys,
    loss_sum: f64,
    gradients: &Gradients,
) -> Option<String> {
    if !loss_sum.is_finite() {
        return Some(format!("the loss is {loss_sum}"));
    }
    for (tensor, gradient) in shape.tensors.iter().zip(&gradients.tensors) {
        if let Some(at) = position(gradient) {
            return Some(format!("the gradient of tensor {} is {}", tensor.name, gradient[at]));
        }
    }
    for (table, gradient) in shape.tables.iter().zip(&gradients.tables) {
        if let Some(at) = position(gradient) {
            let id = keys.ids()[at / table.width()];
            return Some(format!("the gradient of row {id} of table {} is {}", table.name, gradient[at]));
        }
    }
    None
}

/// Where the first number that is none stands. All of them are looked at in one pass without branches,
/// since almost always all is well.
fn position(numbers: &[f32]) -> Option<usize> {
    const EXPONENT: u32 = 0x7f80_0000;
    let is_none = |x: &f32| x.to_bits() & EXPONENT == EXPONENT;
    let any = numbers.iter().fold(false, |any, x| any | is_none(x));
    if any { numbers.iter().position(is_none) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_that_is_none_is_found() {
        assert_eq!(position(&[]), None);
        assert_eq!(position(&[0.0, -1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45]), None);
        assert_eq!(position(&[1.0, f32::NAN, f32::INFINITY]), Some(1));
        assert_eq!(position(&[1.0, 2.0, f32::NEG_INFINITY]), Some(2));
    }
}
