//! A batch's gradient is kept from growing too large before it leaves the worker. Pure.

use elasticdl_nn::Gradients;
use elasticdl_spec::job::ClipSpec;

/// Clips the finite gradient of a whole batch: first each number, then all of it by its norm.
pub(super) fn clip(gradients: &mut Gradients, clip: ClipSpec) {
    if let Some(most) = clip.value {
        each(gradients).for_each(|g| *g = g.clamp(-most, most));
    }
    if let Some(longest) = clip.norm.map(f64::from) {
        let norm = norm(gradients);
        if norm > longest {
            let scale = (longest / norm) as f32;
            each(gradients).for_each(|g| *g *= scale);
        }
    }
}

fn each(gradients: &mut Gradients) -> impl Iterator<Item = &mut f32> {
    gradients.tables.iter_mut().chain(&mut gradients.tensors).flatten()
}

/// The length of the whole gradient, rows and tensors. The squares of finite floats fit f64, and are summed in
/// an order that depends on the lengths alone, so that the same batch has the same norm wherever it is computed.
fn norm(gradients: &Gradients) -> f64 {
    let parts = gradients.tables.iter().chain(&gradients.tensors);
    parts.map(|part| sum_of_squares(part)).sum::<f64>().sqrt()
}

fn sum_of_squares(part: &[f32]) -> f64 {
    const LANES: usize = 8;
    let (chunks, rest) = part.as_chunks::<LANES>();
    let square = |g: &f32| f64::from(*g) * f64::from(*g);
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(sum, g)| *sum += square(g));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradients() -> Gradients {
        Gradients { tables: vec![vec![3.0, 0.0], vec![-4.0]], tensors: vec![vec![12.0], vec![]] }
    }

    fn clipped(value: Option<f32>, norm: Option<f32>) -> Gradients {
        let mut gradients = gradients();
        clip(&mut gradients, ClipSpec { value, norm });
        gradients
    }

    #[test]
    fn the_norm_is_that_of_rows_and_tensors_together() {
        assert_eq!(norm(&gradients()), 13.0);
        let long = Gradients { tables: vec![(1..=24).map(|x| x as f32).collect()], tensors: vec![] };
        assert_eq!(norm(&long), 70.0);
        let huge = Gradients { tables: vec![vec![f32::MAX; 9]], tensors: vec![] };
        assert_eq!(norm(&huge), 3.0 * f64::from(f32::MAX));
    }

    #[test]
    fn a_gradient_that_is_too_long_is_shortened_and_keeps_its_direction() {
        let half = clipped(None, Some(6.5));
        assert_eq!((&half.tables[0][..], &half.tables[1][..]), (&[1.5, 0.0][..], &[-2.0][..]));
        assert_eq!(half.tensors[0], [6.0]);
        assert_eq!(clipped(None, Some(13.0)).tensors, gradients().tensors, "long enough is not too long");
    }

    #[test]
    fn values_are_clipped_before_the_norm() {
        let kept = clipped(Some(3.5), None);
        assert_eq!((&kept.tables, &kept.tensors[0]), (&vec![vec![3.0, 0.0], vec![-3.5]], &vec![3.5]));
        let both = clipped(Some(4.0), Some(1e3));
        assert_eq!((&both.tables, &both.tensors[0]), (&vec![vec![3.0, 0.0], vec![-4.0]], &vec![4.0]));
        let both = clipped(Some(3.0), Some(3.0));
        let third = 3.0 / 27f32.sqrt();
        assert!((both.tensors[0][0] - 3.0 * third).abs() < 1e-6, "{both:?}");
    }

    #[test]
    fn nothing_said_changes_nothing() {
        assert_eq!(clipped(None, None).tables, gradients().tables);
        let mut none = Gradients::default();
        clip(&mut none, ClipSpec { value: Some(1.0), norm: Some(1.0) });
        assert!(none.tables.is_empty());
    }
}
