//! Logistic regression: a bias, a weight per numeric field, a weight per id.

use elasticdl_spec::ModelShape;

use super::{embedding_table, linear_tensors};
use crate::Gradients;
use crate::layers::classifier::{Block, Classifier, Network};
use crate::layers::embedding::Embedding;
use crate::layers::linear::Linear;

struct Lr {
    shape: ModelShape,
    embedding: Embedding,
    linear: Linear,
}

/// The model, for records with so many numeric and categorical fields.
pub(super) fn classifier(numeric: usize, categorical: usize) -> Classifier<impl Network + use<>> {
    let network = Lr {
        shape: ModelShape { tables: vec![embedding_table(0)], tensors: linear_tensors(numeric) },
        embedding: Embedding { fields: categorical, numeric, dim: 0 },
        linear: Linear::new(numeric),
    };
    Classifier::new(network, numeric, categorical)
}

impl Network for Lr {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        self.linear.load(tensors[0], tensors[1]);
    }

    fn forward(&mut self, block: &Block, logits: &mut [f32]) {
        self.linear.forward(block.numeric, logits);
        self.embedding.add_wide(block.rows, block.index, logits);
    }

    fn backward(&mut self, block: &Block, slopes: &[f32], gradients: &mut Gradients) {
        self.linear.backward(block.numeric, slopes, &mut gradients.tensors);
        self.embedding.add_wide_gradient(block.index, slopes, &mut gradients.tables[0]);
    }
}
