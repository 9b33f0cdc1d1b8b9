//! Wide & Deep: logistic regression plus a dense network over numbers and factors.

use elasticdl_spec::{ModelShape, ModelSpec};

use super::{deep_tensors, embedding_table, linear_tensors};
use crate::Gradients;
use crate::layers::classifier::{Block, Classifier, Network};
use crate::layers::deep::Deep;
use crate::layers::embedding::Embedding;
use crate::layers::linear::Linear;

struct WideDeep {
    shape: ModelShape,
    embedding: Embedding,
    linear: Linear,
    deep: Deep,
}

/// The model, for records with so many numeric and categorical fields.
pub(super) fn classifier(
    spec: &ModelSpec,
    numeric: usize,
    categorical: usize,
) -> Classifier<impl Network + use<>> {
    let embedding = Embedding { fields: categorical, numeric, dim: spec.embedding_dim };
    let mut tensors = linear_tensors(numeric);
    tensors.extend(deep_tensors(embedding.line_width(), &spec.hidden));
    let deep = Deep::new(embedding.line_width(), &spec.hidden);
    let network = WideDeep {
        shape: ModelShape { tables: vec![embedding_table(spec.embedding_dim)], tensors },
        embedding,
        linear: Linear::new(numeric),
        deep,
    };
    Classifier::new(network, numeric, categorical)
}

impl Network for WideDeep {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        self.linear.load(tensors[0], tensors[1]);
        self.deep.load(&tensors[2..]);
    }

    fn forward(&mut self, block: &Block, logits: &mut [f32]) {
        self.linear.forward(block.numeric, logits);
        let x = self.deep.input(block.records);
        self.embedding.gather(block.numeric, block.rows, block.index, x, logits);
        self.deep.forward(logits);
    }

    fn backward(&mut self, block: &Block, slopes: &[f32], gradients: &mut Gradients) {
        self.linear.backward(block.numeric, slopes, &mut gradients.tensors);
        let (_, dx) = self.deep.backward(slopes, &mut gradients.tensors[2..]);
        self.embedding.scatter(block.index, slopes, dx, &mut gradients.tables[0]);
    }
}
