//! The models' hand-written gradients against two independent judges: Burn's autodiff of the same
//! formulas, and finite differences of a plain double-precision version.

mod reference;

use elasticdl_nn::{Gradients, build};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::{ModelSpec, Zoo};
use reference::{Case, autodiff, loss_in_doubles};

fn specs() -> Vec<ModelSpec> {
    let spec = |zoo, embedding_dim, hidden: &[usize]| ModelSpec { zoo, embedding_dim, hidden: hidden.into() };
    vec![
        spec(Zoo::Lr, 1, &[]),
        spec(Zoo::WideDeep, 5, &[12, 7]),
        spec(Zoo::WideDeep, 8, &[16, 4]),
        spec(Zoo::Deepfm, 3, &[9]),
        spec(Zoo::Deepfm, 8, &[16, 4]),
        spec(Zoo::Deepfm, 16, &[40, 33, 17]),
        spec(Zoo::Deepfm, 20, &[2, 200]),
    ]
}

/// Loss and gradients by the model under test.
fn train(case: &Case, batch_records: usize) -> (f64, Gradients) {
    let mut model = build(&case.spec, case.numeric_fields, case.fields).expect("a valid model");
    let mut gradients = Gradients::default();
    gradients.reset(model.shape(), &[case.unique]);
    model.load(&case.dense());
    let loss = model.train(&case.input(&case.tables()), batch_records, &mut gradients);
    (loss, gradients)
}

fn assert_close(name: &str, ours: &[f32], theirs: &[f32], tolerance: f32) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    let largest = theirs.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    assert!(largest > 0.0, "{name}: a gradient that is all zero proves nothing");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= tolerance * largest, "{name}[{i}]: {a} is not {b} (largest {largest})");
    }
}

#[test]
fn gradients_are_those_of_burns_autodiff() {
    for spec in specs() {
        // More records than any block holds, and a remainder.
        for (records, numeric, fields) in [(1, 1, 1), (37, 0, 4), (29, 3, 0), (2100, 5, 6)] {
            if fields < 2 && spec.zoo == Zoo::Deepfm && numeric == 0 {
                continue;
            }
            let case = Case::new(spec.clone(), records, numeric, fields, 11);
            let (loss, ours) = train(&case, 3000);
            let (their_loss, theirs) = autodiff(&case, 3000);
            let name = format!("{:?} {records} records", case.spec);
            assert!((loss - their_loss).abs() < 1e-5 * their_loss.abs(), "{name}: {loss} {their_loss}");
            for ((a, b), shape) in ours.tensors.iter().zip(&theirs.tensors).zip(&case.shape.tensors) {
                if !a.is_empty() {
                    assert_close(&format!("{name} {}", shape.name), a, b, 2e-5);
                }
            }
            if fields > 0 {
                assert_close(&format!("{name} table"), &ours.tables[0], &theirs.tables[0], 2e-5);
            }
        }
    }
}

#[test]
fn gradients_are_finite_differences_of_the_loss() {
    for spec in specs() {
        let case = Case::new(spec, 40, 3, 5, 5);
        let (loss, ours) = train(&case, 40);
        let expected = loss_in_doubles(&case, |_, _| 0.0);
        assert!((loss - expected).abs() < 1e-5 * expected, "{:?}: {loss} {expected}", case.spec);
        let mut rng = Rng::new(3);
        let step = 1e-6;
        for (part, gradient) in ours.tables.iter().chain(&ours.tensors).enumerate() {
            let largest = gradient.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            for _ in 0..20 {
                let at = rng.below(gradient.len() as u64) as usize;
                let moved = |by: f64| {
                    loss_in_doubles(&case, |p, i| if (p, i) == (part, at) { by } else { 0.0 }) / 40.0
                };
                let slope = ((moved(step) - moved(-step)) / (2.0 * step)) as f32;
                let off = (gradient[at] - slope).abs();
                assert!(
                    off <= 1e-4 * largest,
                    "{:?} part {part} [{at}]: {} {slope}",
                    case.spec,
                    gradient[at]
                );
            }
        }
    }
}

#[test]
fn parts_of_a_batch_add_up_to_the_whole() {
    let spec = ModelSpec { zoo: Zoo::Deepfm, embedding_dim: 8, hidden: vec![16, 4] };
    let case = Case::new(spec, 1000, 13, 26, 17);
    let (loss, whole) = train(&case, 1000);
    let (mut sum, mut sum_loss) = (Gradients::default(), 0.0);
    sum.reset(&case.shape, &[case.unique]);
    for part in [0..311, 311..1000] {
        let (loss, gradients) = train(&case.part(part), 1000);
        sum_loss += loss;
        sum.add(&gradients);
    }
    assert!((loss - sum_loss).abs() < 1e-6 * loss, "{loss} {sum_loss}");
    assert_close("table", &sum.tables[0], &whole.tables[0], 1e-5);
    for (a, b) in sum.tensors.iter().zip(&whole.tensors) {
        assert_close("tensor", a, b, 1e-5);
    }
}

#[test]
fn gradients_are_added_to_what_is_there() {
    let case = Case::new(specs().remove(4), 50, 2, 3, 8);
    let (_, once) = train(&case, 50);
    let mut model = build(&case.spec, 2, 3).expect("a valid model");
    model.load(&case.dense());
    let mut twice = Gradients::default();
    twice.reset(model.shape(), &[case.unique]);
    let tables = case.tables();
    model.train(&case.input(&tables), 50, &mut twice);
    model.train(&case.input(&tables), 50, &mut twice);
    for (a, b) in once.tensors.iter().chain(&once.tables).zip(twice.tensors.iter().chain(&twice.tables)) {
        let doubled: Vec<f32> = a.iter().map(|x| 2.0 * x).collect();
        assert_close("twice", b, &doubled, 1e-6);
    }
}

#[test]
fn predictions_explain_the_loss() {
    for spec in specs() {
        let case = Case::new(spec, 1500, 3, 4, 23);
        let (loss, _) = train(&case, 1500);
        let mut model = build(&case.spec, 3, 4).expect("a valid model");
        model.load(&case.dense());
        let tables = case.tables();
        let mut probabilities = vec![9.0];
        model.predict(&case.input(&tables), &mut probabilities);
        let mut scores = elasticdl_spec::scores::Scores::default();
        probabilities.iter().zip(&case.labels).for_each(|(p, y)| scores.add(*p, *y));
        assert_eq!(scores.records(), 1500);
        assert!(
            (scores.logloss().expect("there are records") * 1500.0 - loss).abs() < 1e-4 * loss,
            "{:?}",
            case.spec
        );
    }
}

#[test]
fn nan_in_an_input_shows_in_the_loss() {
    for spec in specs() {
        let clean = Case::new(spec, 100, 3, 4, 2);
        assert!(train(&clean, 100).0.is_finite());
        let mut in_numbers = clean.clone();
        in_numbers.numeric[150] = f32::NAN;
        assert!(train(&in_numbers, 100).0.is_nan(), "{:?}", clean.spec);
        let mut in_rows = clean.clone();
        in_rows.rows.fill(f32::NAN);
        assert!(train(&in_rows, 100).0.is_nan(), "{:?}", clean.spec);
        for tensor in 0..clean.tensors.len() {
            let mut in_tensor = clean.clone();
            in_tensor.tensors[tensor].fill(f32::NAN);
            assert!(train(&in_tensor, 100).0.is_nan(), "{:?} tensor {tensor}", clean.spec);
        }
    }
}
