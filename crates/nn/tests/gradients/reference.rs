//! The same models written twice more, as plainly as possible: in Burn tensors under autodiff, and
//! in doubles with loops.

use std::ops::Range;

use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use elasticdl_nn::{Gradients, Input, TableInput, build};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::{ModelShape, ModelSpec, Zoo};

/// A model with random weights, and records for it.
#[derive(Clone)]
pub struct Case {
    pub spec: ModelSpec,
    pub shape: ModelShape,
    pub records: usize,
    pub numeric_fields: usize,
    pub fields: usize,
    pub unique: usize,
    pub numeric: Vec<f32>,
    pub index: Vec<u32>,
    pub labels: Vec<f32>,
    pub rows: Vec<f32>,
    pub tensors: Vec<Vec<f32>>,
}

impl Case {
    pub fn new(spec: ModelSpec, records: usize, numeric_fields: usize, fields: usize, unique: usize) -> Self {
        let shape = build(&spec, numeric_fields, fields).expect("a valid model").shape().clone();
        let mut rng = Rng::new(records as u64);
        // Large weights, biases too: nothing may hide behind a zero.
        let mut draw = |count: usize, size: f32| -> Vec<f32> {
            (0..count).map(|_| (rng.uniform() as f32 - 0.5) * size).collect()
        };
        let rows = draw(unique * shape.tables[0].width(), 1.0);
        let tensors = shape.tensors.iter().map(|t| draw(t.len(), 1.0)).collect();
        let numeric = draw(records * numeric_fields, 2.0);
        let index = (0..records * fields).map(|_| rng.below(unique as u64) as u32).collect();
        let labels = (0..records).map(|_| rng.below(2) as f32).collect();
        Case { spec, shape, records, numeric_fields, fields, unique, numeric, index, labels, rows, tensors }
    }

    pub fn dense(&self) -> Vec<&[f32]> {
        self.tensors.iter().map(Vec::as_slice).collect()
    }

    pub fn tables(&self) -> [TableInput<'_>; 1] {
        [TableInput { rows: &self.rows, index: &self.index }]
    }

    pub fn input<'a>(&'a self, tables: &'a [TableInput<'a>]) -> Input<'a> {
        Input { records: self.records, numeric: &self.numeric, labels: &self.labels, tables }
    }

    /// Some of the records, with the same weights.
    pub fn part(&self, records: Range<usize>) -> Case {
        let (start, end) = (records.start, records.end);
        Case {
            records: records.len(),
            numeric: self.numeric[start * self.numeric_fields..end * self.numeric_fields].into(),
            index: self.index[start * self.fields..end * self.fields].into(),
            labels: self.labels[records].into(),
            ..self.clone()
        }
    }

    fn dim(&self) -> usize {
        self.shape.tables[0].width() - 1
    }
}

/// Loss and gradients by Burn's autodiff, all in tensors.
pub fn autodiff(case: &Case, batch_records: usize) -> (f64, Gradients) {
    let device = Device::flex().autodiff();
    let matrix = |values: &[f32], lines: usize, columns: usize| {
        Tensor::<2>::from_data(TensorData::new(values.to_vec(), [lines, columns]), &device)
    };
    let (n, fields, dim) = (case.records, case.fields, case.dim());
    let rows = matrix(&case.rows, case.unique, 1 + dim).require_grad();
    let tensors: Vec<Tensor<2>> = (case.shape.tensors.iter().zip(&case.tensors))
        .filter(|(_, values)| !values.is_empty())
        .map(|(shape, values)| {
            // A vector that multiplies from the right is a column, one that is added is a line.
            let last = *shape.shape.last().expect("no scalar tensors");
            let column = shape.name == "wide.numeric" || shape.name == "deep.out.weight";
            let (lines, columns) = if column { (last, 1) } else { (values.len() / last, last) };
            matrix(values, lines, columns).require_grad()
        })
        .collect();
    let mut named = tensors.iter();
    let mut next = || named.next().expect("one per name").clone();

    let mut logits = next().repeat_dim(0, n);
    let mut inputs: Vec<Tensor<2>> = Vec::new();
    if case.numeric_fields > 0 {
        let numeric = matrix(&case.numeric, n, case.numeric_fields);
        logits = logits + numeric.clone().matmul(next());
        inputs.push(numeric);
    }
    if fields > 0 {
        let index: Vec<i64> = case.index.iter().map(|&i| i64::from(i)).collect();
        let index = Tensor::<1, Int>::from_data(TensorData::new(index, [n * fields]), &device);
        let picked = rows.clone().select(0, index).reshape([n, fields, 1 + dim]);
        logits = logits + picked.clone().narrow(2, 0, 1).sum_dim(1).reshape([n, 1]);
        if dim > 0 {
            let factors = picked.narrow(2, 1, dim);
            if case.spec.zoo == Zoo::Deepfm {
                let of_sums = factors.clone().sum_dim(1).powi_scalar(2).sum_dim(2);
                let of_each = factors.clone().powi_scalar(2).sum_dim(1).sum_dim(2);
                logits = logits + ((of_sums - of_each) * 0.5).reshape([n, 1]);
            }
            inputs.push(factors.reshape([n, fields * dim]));
        }
    }
    if case.spec.zoo != Zoo::Lr {
        let mut h = Tensor::cat(inputs, 1);
        for _ in &case.spec.hidden {
            h = relu(h.matmul(next()) + next());
        }
        logits = logits + h.matmul(next());
    }
    let labels = matrix(&case.labels, n, 1);
    // ln(1 + e^z) − z·label; the test's logits are small enough for the plain form.
    let losses = (logits.clone().exp() + 1.0).log() - logits * labels;
    let sum = losses.sum();
    let loss = f64::from(sum.clone().into_scalar::<f32>());
    let found = (sum / batch_records as f32).backward();
    let values = |t: &Tensor<2>| {
        let gradient = t.grad(&found).map(|g| g.into_data().try_to_vec::<f32>().expect("f32"));
        gradient.unwrap_or_else(|| vec![0.0; t.shape().num_elements()])
    };
    let mut gradients = Gradients { tables: vec![values(&rows)], tensors: Vec::new() };
    let mut of_tensors = tensors.iter();
    for shape in &case.shape.tensors {
        let found = if shape.is_empty() { Vec::new() } else { values(of_tensors.next().expect("as above")) };
        gradients.tensors.push(found);
    }
    (loss, gradients)
}

/// The sum of losses in doubles, with element i of part p moved by `moved(p, i)`. Part 0 is the
/// table, the others are the tensors.
pub fn loss_in_doubles(case: &Case, moved: impl Fn(usize, usize) -> f64) -> f64 {
    let width = case.dim() + 1;
    let row = |i: usize| f64::from(case.rows[i]) + moved(0, i);
    let tensor = |t: usize, i: usize| f64::from(case.tensors[t][i]) + moved(t + 1, i);
    let mut sum = 0.0;
    for record in 0..case.records {
        let numeric: Vec<f64> = (0..case.numeric_fields)
            .map(|f| f64::from(case.numeric[record * case.numeric_fields + f]))
            .collect();
        let index = &case.index[record * case.fields..(record + 1) * case.fields];
        let factors: Vec<Vec<f64>> =
            (index.iter()).map(|&i| (1..width).map(|d| row(i as usize * width + d)).collect()).collect();
        let mut z = tensor(0, 0);
        z += numeric.iter().enumerate().map(|(f, x)| x * tensor(1, f)).sum::<f64>();
        z += index.iter().map(|&i| row(i as usize * width)).sum::<f64>();
        if case.spec.zoo == Zoo::Deepfm {
            for (a, left) in factors.iter().enumerate() {
                for right in &factors[a + 1..] {
                    z += left.iter().zip(right).map(|(l, r)| l * r).sum::<f64>();
                }
            }
        }
        if case.spec.zoo != Zoo::Lr {
            let mut h: Vec<f64> = numeric.into_iter().chain(factors.into_iter().flatten()).collect();
            for (layer, &columns) in case.spec.hidden.iter().enumerate() {
                let (weight, bias) = (2 + 2 * layer, 3 + 2 * layer);
                h = (0..columns)
                    .map(|c| {
                        let dot: f64 =
                            (h.iter().enumerate()).map(|(i, x)| x * tensor(weight, i * columns + c)).sum();
                        (dot + tensor(bias, c)).max(0.0)
                    })
                    .collect();
            }
            let out = 2 + 2 * case.spec.hidden.len();
            z += h.iter().enumerate().map(|(i, x)| x * tensor(out, i)).sum::<f64>();
        }
        sum += (1.0 + z.exp()).ln() - z * f64::from(case.labels[record]);
    }
    sum
}
