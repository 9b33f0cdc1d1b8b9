//! The models that ship, one per file.
//!
//! All of them share one table, `embedding`, for every categorical field: a field's name salts
//! its ids, so that its values have rows of their own.

mod counting;
mod deepfm;
mod lr;
mod wide_deep;

use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, ModelSpec, TableShape, TensorShape, Zoo};

use crate::{Error, Model, Result};

/// Half the range from which factors are born: small, so that an id seen once changes little.
const FACTOR_BOUND: f32 = 0.02;

/// Builds the model a job asks for, for records with so many numeric and categorical fields.
pub fn build(spec: &ModelSpec, numeric_fields: usize, categorical_fields: usize) -> Result<Box<dyn Model>> {
    let zero = |what: &str| Error::Zero { zoo: spec.zoo, what: what.into() };
    if numeric_fields + categorical_fields == 0 {
        return Err(zero("the number of fields"));
    }
    if spec.zoo == Zoo::Counting && categorical_fields == 0 {
        return Err(zero("the number of categorical fields"));
    }
    let is_deep = matches!(spec.zoo, Zoo::WideDeep | Zoo::Deepfm);
    if is_deep && spec.embedding_dim == 0 {
        return Err(zero("model.embedding_dim"));
    }
    if is_deep && spec.hidden.contains(&0) {
        return Err(zero("every width in model.hidden"));
    }
    if is_deep && spec.hidden.is_empty() {
        return Err(zero("the number of widths in model.hidden"));
    }
    Ok(match spec.zoo {
        Zoo::Lr => Box::new(lr::classifier(numeric_fields, categorical_fields)),
        Zoo::WideDeep => Box::new(wide_deep::classifier(spec, numeric_fields, categorical_fields)),
        Zoo::Deepfm => Box::new(deepfm::classifier(spec, numeric_fields, categorical_fields)),
        Zoo::Counting => Box::new(counting::Counting::new(categorical_fields)),
    })
}

/// The one table: a wide weight and `dim` factors per id.
fn embedding_table(dim: usize) -> TableShape {
    let mut parts = vec![RowPart { width: 1, init: Initializer::Zeros }];
    if dim > 0 {
        parts.push(RowPart { width: dim, init: Initializer::Uniform { bound: FACTOR_BOUND } });
    }
    TableShape { name: "embedding".into(), parts }
}

/// The linear part's tensors: bias, and a weight per numeric field.
fn linear_tensors(numeric_fields: usize) -> Vec<TensorShape> {
    vec![
        tensor("bias".into(), vec![1], Initializer::Zeros),
        tensor("wide.numeric".into(), vec![numeric_fields], Initializer::Zeros),
    ]
}

/// The dense network's tensors, in the order its layer takes them.
fn deep_tensors(inputs: usize, hidden: &[usize]) -> Vec<TensorShape> {
    let mut tensors = Vec::new();
    let mut fan_in = inputs;
    for (layer, &width) in hidden.iter().enumerate() {
        // He's bound: ReLU halves the variance, so it starts doubled.
        let init = Initializer::Uniform { bound: (6.0 / fan_in as f32).sqrt() };
        tensors.push(tensor(format!("deep.{layer}.weight"), vec![fan_in, width], init));
        tensors.push(tensor(format!("deep.{layer}.bias"), vec![width], Initializer::Zeros));
        fan_in = width;
    }
    // Glorot's bound: nothing is clipped after the output.
    let init = Initializer::Uniform { bound: (6.0 / (fan_in + 1) as f32).sqrt() };
    tensors.push(tensor("deep.out.weight".into(), vec![fan_in], init));
    tensors
}

fn tensor(name: String, shape: Vec<usize>, init: Initializer) -> TensorShape {
    TensorShape { name, shape, init }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(zoo: Zoo, embedding_dim: usize, hidden: &[usize]) -> ModelSpec {
        ModelSpec { zoo, embedding_dim, hidden: hidden.into() }
    }

    fn names_and_shapes(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
        let model = build(spec, 13, 26).expect("a valid model");
        model.shape().tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect()
    }

    #[test]
    fn deep_models_have_named_tensors_in_layer_order() {
        let expected = [
            ("bias", vec![1]),
            ("wide.numeric", vec![13]),
            ("deep.0.weight", vec![13 + 26 * 16, 400]),
            ("deep.0.bias", vec![400]),
            ("deep.1.weight", vec![400, 30]),
            ("deep.1.bias", vec![30]),
            ("deep.out.weight", vec![30]),
        ]
        .map(|(name, shape)| (name.to_string(), shape));
        for zoo in [Zoo::Deepfm, Zoo::WideDeep] {
            assert_eq!(names_and_shapes(&spec(zoo, 16, &[400, 30])), expected);
        }
        assert_eq!(names_and_shapes(&spec(Zoo::Lr, 16, &[400, 30])), expected[..2]);
    }

    #[test]
    fn rows_hold_a_wide_weight_and_small_factors() {
        for (zoo, width) in [(Zoo::Lr, 1), (Zoo::WideDeep, 9), (Zoo::Deepfm, 9)] {
            let model = build(&spec(zoo, 8, &[4]), 13, 26).expect("a valid model");
            let [table] = &model.shape().tables[..] else { panic!("{zoo} has one table") };
            assert_eq!((table.name.as_str(), table.width()), ("embedding", width));
            let mut row = vec![9.0; width];
            table.init_row(1, 77, &mut row);
            assert_eq!(row[0], 0.0);
            assert!(row[1..].iter().all(|v| *v != 0.0 && v.abs() <= FACTOR_BOUND), "{row:?}");
        }
    }

    #[test]
    fn layers_keep_the_size_of_what_flows_through_them() {
        let tensors = deep_tensors(600, &[150]);
        assert_eq!(tensors[0].init, Initializer::Uniform { bound: 0.1 });
        assert_eq!(tensors[1].init, Initializer::Zeros);
        assert_eq!(tensors[2].init, Initializer::Uniform { bound: (6.0f32 / 151.0).sqrt() });
    }

    #[test]
    fn empty_models_are_refused_with_the_setting_to_change() {
        for (spec, fields, what) in [
            (spec(Zoo::Lr, 1, &[]), 0, "the number of fields"),
            (spec(Zoo::Deepfm, 0, &[4]), 3, "model.embedding_dim"),
            (spec(Zoo::Deepfm, 4, &[4, 0]), 3, "every width in model.hidden"),
            (spec(Zoo::WideDeep, 4, &[]), 3, "the number of widths in model.hidden"),
            (spec(Zoo::Counting, 4, &[4]), 0, "the number of fields"),
        ] {
            let error = build(&spec, 0, fields).err().expect("nothing to compute");
            assert_eq!(error, Error::Zero { zoo: spec.zoo, what: what.into() });
            assert_eq!(error.kind(), elasticdl_spec::Kind::User);
        }
    }
}
