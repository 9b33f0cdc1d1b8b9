//! A small model for the tests of this crate: two tables, three tensors, four partitions.

use std::sync::Arc;

use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, ModelShape, OptimizerSpec, PartitionId, TableShape, TensorShape};

use crate::model::Model;

pub(crate) const PARTITIONS: u32 = 4;
pub(crate) const SEED: u64 = 11;

pub(crate) fn shape() -> ModelShape {
    let uniform = Initializer::Uniform { bound: 0.5 };
    let table = |name: &str, width: usize| TableShape {
        name: name.into(),
        parts: vec![
            RowPart { width: 1, init: Initializer::Zeros },
            RowPart { width: width - 1, init: uniform },
        ],
    };
    let tensor =
        |name: &str, shape: &[usize]| TensorShape { name: name.into(), shape: shape.into(), init: uniform };
    ModelShape {
        tables: vec![table("users", 3), table("items", 2)],
        tensors: vec![tensor("w1", &[3, 5]), tensor("b1", &[5]), tensor("w2", &[7])],
    }
}

pub(crate) fn model_with(optimizer: OptimizerSpec) -> Arc<Model> {
    Arc::new(Model::new("test", shape(), optimizer, SEED, PARTITIONS))
}

pub(crate) fn model() -> Arc<Model> {
    model_with(OptimizerSpec::Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 })
}

/// A model whose tables travel as f16 and as bf16.
pub(crate) fn rounded_model() -> Arc<Model> {
    let said = r#"{ "users": { "wire": "f16" }, "items": { "wire": "bf16" } }"#;
    let tables = serde_json::from_str(said).expect("a sound setting");
    Arc::new(
        Model::new("test", shape(), OptimizerSpec::Sgd { learning_rate: 1.0 }, SEED, PARTITIONS)
            .with_tables(&tables),
    )
}

/// A model whose tables have room for some tens of rows in each partition; users get a row when they are named twice.
pub(crate) fn bounded_model(optimizer: OptimizerSpec) -> Arc<Model> {
    let said =
        r#"{ "*": { "memory_max": "8Ki" }, "users": { "admit_after": 2 }, "items": { "evict": "age" } }"#;
    let tables = serde_json::from_str(said).expect("a sound setting");
    Arc::new(Model::new("test", shape(), optimizer, SEED, PARTITIONS).with_tables(&tables))
}

/// The first `count` ids that live in `partition`.
pub(crate) fn ids_of(partition: PartitionId, count: usize) -> Vec<u64> {
    (0..).filter(|id| partition_of_row(*id, PARTITIONS) == partition).take(count).collect()
}
