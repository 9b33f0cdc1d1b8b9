//! The models that ship, one per file.
//!
//! All of them share one table, `embedding`, for every categorical field: a field's name salts
//! its ids, so that its values have rows of their own.

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
    if spec.zoo != Zoo::Lr && spec.embedding_dim == 0 {
        return Err(zero("model.embedding_dim"));
    }
    if spec.zoo != Zoo::Lr && spec.hidden.contains(&0) {
        return Err(zero("every width in model.hidden"));
    }
    if spec.zoo != Zoo::Lr && spec.hidden.is_empty() {
        return Err(zero("the number of widths in model.hidden"));
    }
    Ok(match spec.zoo {
        Zoo::Lr => Box::new(lr::classifier(numeric_fields, categorical_fields)),
        Zoo::WideDeep => Box::new(wide_deep::classifier(spec, numeric_fields, categorical_fields)),
        Zoo::Deepfm => Box::new(deepfm::classifier(spec, numeric_fields, categorical_fields)),
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
