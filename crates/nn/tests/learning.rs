//! Models learn what they are able to learn, and no more.

use elasticdl_nn::{Gradients, Input, TableInput, build};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{ModelSpec, Zoo};

const IDS: usize = 8;

/// Records of two ids each, whose label is 1 where exactly one of them is odd: neither id alone
/// says anything.
struct ExclusiveOr {
    index: Vec<u32>,
    labels: Vec<f32>,
}

impl ExclusiveOr {
    fn new(records: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut data = ExclusiveOr { index: Vec::new(), labels: Vec::new() };
        for _ in 0..records {
            let (left, right) = (rng.below(IDS as u64) as u32, rng.below(IDS as u64) as u32);
            data.index.extend([left, IDS as u32 + right]);
            data.labels.push(((left + right) % 2) as f32);
        }
        data
    }

    fn input<'a>(&'a self, tables: &'a [TableInput<'a>]) -> Input<'a> {
        Input { records: self.labels.len(), numeric: &[], labels: &self.labels, tables }
    }
}

/// Trains with Adagrad on the whole data, and scores on other records.
fn scores_after_training(zoo: Zoo, steps: usize) -> Scores {
    let spec = ModelSpec { zoo, embedding_dim: 4, hidden: vec![16] };
    let mut model = build(&spec, 0, 2).expect("a valid model");
    let shape = model.shape().clone();
    let width = shape.tables[0].width();
    let mut rows = vec![0.0; 2 * IDS * width];
    for (id, row) in rows.chunks_exact_mut(width).enumerate() {
        shape.tables[0].init_row(1, id as u64, row);
    }
    let mut tensors: Vec<Vec<f32>> = shape.tensors.iter().map(|t| t.init_values(1)).collect();
    let mut squares = Gradients::default();
    squares.reset(&shape, &[2 * IDS]);
    let train = ExclusiveOr::new(500, 1);
    let mut gradients = Gradients::default();
    for _ in 0..steps {
        gradients.reset(&shape, &[2 * IDS]);
        model.load(&tensors.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let tables = [TableInput { rows: &rows, index: &train.index }];
        let loss = model.train(&train.input(&tables), 500, &mut gradients);
        assert!(loss.is_finite(), "{zoo} diverged");
        adagrad(&mut rows, &gradients.tables[0], &mut squares.tables[0]);
        for (i, tensor) in tensors.iter_mut().enumerate() {
            adagrad(tensor, &gradients.tensors[i], &mut squares.tensors[i]);
        }
    }
    let test = ExclusiveOr::new(2000, 2);
    let tables = [TableInput { rows: &rows, index: &test.index }];
    let mut probabilities = Vec::new();
    model.load(&tensors.iter().map(Vec::as_slice).collect::<Vec<_>>());
    model.predict(&Input { labels: &[], ..test.input(&tables) }, &mut probabilities);
    let mut scores = Scores::default();
    probabilities.iter().zip(&test.labels).for_each(|(p, y)| scores.add(*p, *y));
    scores
}

fn adagrad(weights: &mut [f32], gradient: &[f32], squares: &mut [f32]) {
    for ((w, g), s) in weights.iter_mut().zip(gradient).zip(squares) {
        *s += g * g;
        *w -= 0.1 * g / (s.sqrt() + 1e-8);
    }
}

#[test]
fn deepfm_and_wide_deep_learn_an_interaction() {
    for zoo in [Zoo::Deepfm, Zoo::WideDeep] {
        let scores = scores_after_training(zoo, 300);
        assert!(scores.logloss().is_some_and(|loss| loss < 0.1), "{zoo}: {:?}", scores.logloss());
        assert!(scores.auc() > Some(0.99), "{zoo}: {:?}", scores.auc());
    }
}

#[test]
fn logistic_regression_cannot_learn_an_interaction() {
    let scores = scores_after_training(Zoo::Lr, 300);
    assert!(scores.logloss() > Some(0.6), "{:?}", scores.logloss());
    assert!(scores.auc() < Some(0.6) && scores.auc().is_some(), "{:?}", scores.auc());
}
