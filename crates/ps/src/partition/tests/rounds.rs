//! Where rows learn at once and tensors in rounds of several batches.

use std::sync::Arc;

use elasticdl_spec::TensorShape;

use super::*;
use crate::checkpoint::{Layer, Order, restore, write_now};

/// A row and a tensor that begin at 0 and lose their gradient, in rounds of 2.
fn partition() -> Partition {
    let init = Initializer::Zeros;
    let table = TableShape { name: "t".into(), parts: vec![RowPart { width: 1, init }] };
    let tensor = TensorShape { name: "d".into(), shape: vec![1], init };
    let shape = ModelShape { tables: vec![table], tensors: vec![tensor] };
    let mut model = Model::new("rounds", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 1, 1);
    model.policy = Some(Policy::Rounds(2));
    Partition::new(Arc::new(model), PartitionId(0), 1)
}

/// Pushes a batch that was pulled at a version; row and tensor get the same gradient.
fn push(to: &mut Partition, batch: u64, version: u64, gradient: f32, factor: f32) -> Status {
    let header = PushHeader { factor, ..header(0, batch, 1) };
    let gradient = [gradient];
    let tables = [RowGradients { ids: &[7], gradients: &gradient }];
    to.push(&Push { header, incarnation: 1, version, tables: &tables, tensors: &[&gradient] }).unwrap().status
}

fn weights(of: &Partition) -> (f32, f32) {
    let mut row = [0.0];
    of.read(0, &[7], &mut row);
    (row[0], of.tensors()[0].values()[0])
}

#[test]
fn rows_learn_at_once_and_tensors_the_mean_of_a_round() {
    let mut partition = partition();
    assert_eq!(push(&mut partition, 0, 0, -4.0, 1.0), Status::Ok);
    assert_eq!(weights(&partition), (4.0, 0.0));
    assert_eq!(push(&mut partition, 1, 0, -2.0, 0.5), Status::Ok, "the tensors are still those of its pull");
    assert_eq!(weights(&partition), (5.0, 2.25), "a mean of 3 with a mean factor of 0.75");
    assert_eq!(push(&mut partition, 1, 0, -2.0, 0.5), Status::Duplicate);
    assert_eq!(weights(&partition), (5.0, 2.25));
}

#[test]
fn a_batch_whose_tensors_have_moved_since_its_pull_is_refused_as_a_whole() {
    let mut partition = partition();
    push(&mut partition, 0, 0, -4.0, 1.0);
    push(&mut partition, 1, 0, -4.0, 1.0);
    for version in [0, 1] {
        assert_eq!(push(&mut partition, 2, version, -1.0, 1.0), Status::Stale);
        assert_eq!((weights(&partition), partition.version()), ((8.0, 4.0), 2));
    }
    assert_eq!(push(&mut partition, 2, 2, -1.0, 1.0), Status::Ok);
    assert_eq!(weights(&partition), (9.0, 4.0));
}

#[test]
fn what_is_gathered_is_in_a_checkpoint_and_is_applied_once_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut partition = partition();
    for batch in 0..3 {
        assert_eq!(push(&mut partition, batch, batch / 2 * 2, -4.0, 1.0), Status::Ok);
    }
    assert_eq!(weights(&partition), (12.0, 4.0));
    let sum =
        write_now(&mut partition, Order { checkpoint: 1, base: None, is_basis: false }, dir.path()).unwrap();
    let model = partition.model();
    let layers = [Layer { checkpoint: 1, dir: dir.path().into(), sum }];
    let mut restored = restore(model, PartitionId(0), 1, &layers).unwrap();
    assert_eq!(weights(&restored), (12.0, 4.0));
    let mut ended = restore(model, PartitionId(0), 1, &layers).unwrap();
    assert_eq!(push(&mut restored, 3, 2, -2.0, 1.0), Status::Ok);
    assert_eq!(weights(&restored), (14.0, 7.0), "the mean of one from before and one from after");
    for _ in 0..2 {
        ended.settle();
        assert_eq!(weights(&ended), (12.0, 8.0), "one alone is its own mean");
    }
}

#[test]
fn a_batch_without_records_has_its_place_in_a_round() {
    let mut partition = partition();
    push(&mut partition, 0, 0, -4.0, 1.0);
    let header = PushHeader { records: 0, ..header(0, 1, 1) };
    let tables = [RowGradients { ids: &[], gradients: &[] }];
    let empty = Push { header, incarnation: 1, version: 0, tables: &tables, tensors: &[&[-100.0]] };
    assert_eq!(partition.push(&empty).unwrap().status, Status::Ok);
    assert_eq!(weights(&partition), (4.0, 2.0));
}
