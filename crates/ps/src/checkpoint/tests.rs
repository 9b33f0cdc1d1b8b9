//! What is written comes back bit by bit, and what is damaged or foreign does not come back at all.

mod bounds;
mod cuts;
mod servers;

use std::fs;
use std::sync::Arc;

use elasticdl_spec::{Initializer, LeaseId};
use elasticdl_wire::ps::PushHeader;
use proptest::prelude::*;

use super::*;
use crate::error::Error;
use crate::model::Model;
use crate::partition::{Partition, Push, RowGradients};
use crate::test_model::{self, PARTITIONS, SEED, bounded_model, ids_of, model, model_with, shape};

const ADAM: OptimizerSpec =
    OptimizerSpec::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const SGD: OptimizerSpec = OptimizerSpec::Sgd { learning_rate: 0.1 };
const HERE: PartitionId = PartitionId(2);

/// Pushes `batches` of a task, each touching `rows` rows.
fn train(partition: &mut Partition, shard: u32, batches: u64, rows: usize) {
    let ids = ids_of(partition.id(), rows);
    for batch in 0..batches {
        let value = |i: usize| ((i as u64 + 7 * batch) % 13) as f32 * 0.25 - 1.5;
        let users: Vec<f32> = (0..rows * 3).map(value).collect();
        let items: Vec<f32> = (0..rows * 2).map(value).collect();
        let tensors: Vec<Vec<f32>> =
            partition.tensors().iter().map(|t| (0..t.values().len()).map(value).collect()).collect();
        let tensors: Vec<&[f32]> = tensors.iter().map(Vec::as_slice).collect();
        let header = PushHeader {
            task: TaskId::train(1, shard),
            batch,
            lease: LeaseId { term: 2, n: u64::from(shard) },
            records: 64,
            factor: 1.0,
        };
        let tables =
            [RowGradients { ids: &ids, gradients: &users }, RowGradients { ids: &ids, gradients: &items }];
        let incarnation = partition.incarnation();
        partition
            .push(&Push { header, incarnation, version: 0, tables: &tables, tensors: &tensors })
            .unwrap();
    }
}

const WHOLE: Order = Order { checkpoint: 1, base: None, is_basis: false };

fn written(partition: &mut Partition, dir: &Path) -> Sum {
    write_now(partition, WHOLE, dir).unwrap()
}

/// A partition from one file.
fn restore(
    model: &Arc<Model>,
    dir: &Path,
    id: PartitionId,
    incarnation: u64,
    sum: Sum,
) -> Result<Partition, Error> {
    super::restore(model, id, incarnation, &[Layer { checkpoint: 1, dir: dir.into(), sum }])
}

/// All that a partition is, as text: bits of floats, not their printed form.
fn bits(partition: &Partition) -> String {
    let bits = |floats: &[f32]| floats.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let tables = partition.tables().iter().map(|t| {
        let (mut weights, mut slots) = (Vec::new(), Vec::new());
        t.copy_rows(0..t.len(), &mut weights, &mut slots);
        let (width, per_row) = (t.shape().width(), t.slots());
        let row = |(i, id): (usize, &u64)| {
            (*id, (bits(&weights[i * width..][..width]), bits(&slots[i * per_row..][..per_row])))
        };
        t.ids().iter().enumerate().map(row).collect::<BTreeMap<_, _>>()
    });
    let tensors = partition.tensors().iter().map(|t| (bits(t.values()), bits(t.slots())));
    let (tables, tensors): (Vec<_>, Vec<_>) = (tables.collect(), tensors.collect());
    // Rows of tables with a bound keep their numbers, and all that says who goes next.
    let bounds = partition.tables().iter().filter(|t| t.counts().is_some());
    let bounds = bounds.map(|t| (t.is_numbered().then(|| t.ids()), t.whole_bounds()));
    let bounds: Vec<_> = bounds.collect();
    format!("{tables:?} {tensors:?} {:?} {bounds:?}", partition.memory())
}

fn trained(optimizer: OptimizerSpec) -> Partition {
    let mut partition = Partition::new(model_with(optimizer), HERE, 3);
    train(&mut partition, 0, 3, 40);
    train(&mut partition, 5, 2, 90);
    partition.close([TaskId::train(0, 1), TaskId::train(0, 2), TaskId::train(1, 0)]);
    partition
}

/// Defect 3 of the original: no slots in checkpoints, the version lost, a crash with slotted optimizers.
#[test]
fn a_restored_partition_is_the_same_bit_by_bit_and_trains_on_alike() {
    for optimizer in crate::optimizer::tests::ALL {
        let dir = tempfile::tempdir().unwrap();
        let mut partition = trained(optimizer);
        let sum = written(&mut partition, dir.path());
        let mut restored = restore(partition.model(), dir.path(), HERE, 4, sum).unwrap();
        assert_eq!(bits(&restored), bits(&partition));
        assert_eq!((restored.incarnation(), restored.version()), (4, 5));
        train(&mut restored, 9, 2, 120);
        train(&mut partition, 9, 2, 120);
        assert_eq!(bits(&restored), bits(&partition));
    }
}

#[test]
fn an_empty_partition_survives() {
    let dir = tempfile::tempdir().unwrap();
    let empty = ModelShape::default();
    let model = Arc::new(Model::new("empty", empty, SGD, SEED, 1));
    let mut partition = Partition::new(Arc::clone(&model), PartitionId(0), 1);
    let sum = written(&mut partition, dir.path());
    let restored = restore(&model, dir.path(), PartitionId(0), 2, sum).unwrap();
    assert_eq!(bits(&restored), bits(&partition));
}

#[test]
fn the_sum_is_that_of_the_file_and_no_temporary_file_stays() {
    let dir = tempfile::tempdir().unwrap();
    let sum = written(&mut trained(ADAM), dir.path());
    let bytes = fs::read(path_of(dir.path(), HERE)).unwrap();
    assert_eq!((sum.bytes, sum.crc32), (bytes.len() as u64, crc32fast::hash(&bytes)));
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["partition-002.arrow"]);
}

#[test]
fn a_failed_write_tells_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = write_now(&mut trained(SGD), WHOLE, &missing).unwrap_err();
    assert!(error.chain().contains("missing/partition-002.arrow: No such file"), "{}", error.chain());

    // A directory in the way of the final name: the rename fails after the file is written.
    fs::create_dir(path_of(dir.path(), HERE)).unwrap();
    assert!(write_now(&mut trained(SGD), WHOLE, dir.path()).is_err());
    assert!(!dir.path().join(".partition-002.arrow.unfinished").exists());
}

/// Goal: a full disk is an error with its reason, found here by writing to the device that is always full.
#[test]
fn a_full_disk_is_an_error_and_the_temporary_file_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().join(".partition-002.arrow.unfinished");
    std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
    let error = write_now(&mut trained(SGD), WHOLE, dir.path()).unwrap_err();
    assert!(error.chain().contains("No space left on device"), "{}", error.chain());
    assert!(fs::symlink_metadata(&temporary).is_err(), "the temporary name is free again");
}

#[test]
fn a_truncated_file_is_called_truncated_wherever_it_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let mut partition = trained(ADAM);
    let sum = written(&mut partition, dir.path());
    let path = path_of(dir.path(), HERE);
    let bytes = fs::read(&path).unwrap();
    for cut in (0..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
        fs::write(&path, &bytes[..cut]).unwrap();
        let error = restore(partition.model(), dir.path(), HERE, 4, sum).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. }), "cut at {cut}: {error}");
        assert!(error.to_string().contains(&format!("{cut} of {} bytes", bytes.len())), "{error}");
        // Without a sum to compare with, it must not panic and not look whole.
        if let Ok(reader) = read_head(&path) {
            panic!("cut at {cut} it has a head: {reader:?}");
        }
    }
}

#[test]
fn a_flipped_bit_is_called_damage_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut partition = trained(SGD);
    let sum = written(&mut partition, dir.path());
    let path = path_of(dir.path(), HERE);
    let bytes = fs::read(&path).unwrap();
    for place in (0..bytes.len()).step_by(61).chain([bytes.len() - 1]) {
        let mut damaged = bytes.clone();
        damaged[place] ^= 1 << (place % 8);
        fs::write(&path, &damaged).unwrap();
        let error = restore(partition.model(), dir.path(), HERE, 4, sum).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "flipped at {place}: {error}");
    }
    fs::write(&path, [&bytes[..], b"more"].concat()).unwrap();
    let error = restore(partition.model(), dir.path(), HERE, 4, sum).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

#[test]
fn a_missing_file_is_the_users_to_find() {
    let dir = tempfile::tempdir().unwrap();
    let sum = Sum { bytes: 1, crc32: 1 };
    let error = restore(&model(), dir.path(), HERE, 4, sum).unwrap_err();
    assert_eq!(error.kind(), elasticdl_spec::Kind::User);
    assert!(error.chain().contains("partition-002.arrow: No such file"), "{}", error.chain());
}

#[test]
fn a_file_of_another_model_names_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let sum = written(&mut trained(SGD), dir.path());
    let refused = |change: &dyn Fn(&mut ModelShape), expected: &str| {
        let mut other = shape();
        change(&mut other);
        let model = Arc::new(Model::new("test", other, SGD, SEED, PARTITIONS));
        let error = restore(&model, dir.path(), HERE, 4, sum).unwrap_err().to_string();
        assert!(error.contains("partition-002.arrow is of another model: "), "{error}");
        assert!(error.ends_with(expected), "{error}");
    };
    refused(
        &|s| s.tables[1].parts[1].width = 4,
        "rows of table \"items\" have 2 weights in the file and 5 here",
    );
    refused(
        &|s| s.tables[0].name = "people".into(),
        "table \"users\" is in the file and not in this job's model",
    );
    refused(&|s| s.tables.push(s.tables[0].clone()), "its tables are in another order");
    refused(&|s| s.tensors[0].shape = vec![5, 3], "tensor \"w1\" is [3, 5] in the file and [5, 3] here");
    refused(&|s| s.tensors[2].init = Initializer::Zeros, "tensor \"w2\" is born otherwise");
    let named = |name: &str| {
        let name = name.to_string();
        move |s: &mut ModelShape| s.tensors[1].name = name.clone()
    };
    refused(&named("b2"), "tensor \"b1\" is in the file and not in this job's model");
}

#[test]
fn a_file_of_another_optimizer_seed_or_place_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let sum = written(&mut trained(SGD), dir.path());
    let refused = |optimizer, seed, partitions, expected: &str| {
        let model = Arc::new(Model::new("test", shape(), optimizer, seed, partitions));
        let error = restore(&model, dir.path(), HERE, 4, sum).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    };
    refused(ADAM, SEED, PARTITIONS, "of another optimizer: sgd in the file, adam in this job");
    refused(SGD, SEED + 1, PARTITIONS, "of another seed: 11 in the file, 12 here");
    refused(SGD, SEED, 8, "of another place: partition-2 of 4 in the file, partition-2 of 8 here");
    // Another learning rate is no other optimizer: a person may lower it and resume.
    let slower = model_with(OptimizerSpec::Sgd { learning_rate: 0.01 });
    assert!(restore(&slower, dir.path(), HERE, 4, sum).is_ok());
}

#[test]
fn a_swapped_file_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let sum = written(&mut trained(SGD), dir.path());
    fs::rename(path_of(dir.path(), HERE), path_of(dir.path(), PartitionId(1))).unwrap();
    let error = restore(&model_with(SGD), dir.path(), PartitionId(1), 4, sum).unwrap_err();
    assert!(error.to_string().ends_with("partition-2 of 4 in the file, partition-1 of 4 here"), "{error}");
}

#[test]
fn an_arrow_file_of_somebody_else_is_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("partition-000.arrow");
    let schema =
        arrow_schema::Schema::new(vec![arrow_schema::Field::new("x", arrow_schema::DataType::Int8, true)]);
    let file = fs::File::create(&path).unwrap();
    arrow_ipc::writer::FileWriter::try_new(file, &schema).unwrap().finish().unwrap();
    let error = read_head(&path).unwrap_err();
    assert!(matches!(error, Error::Foreign { of: "format", .. }), "{error}");
}

/// The whole model over all partitions, as export reads it.
#[test]
fn a_reader_shows_every_row_once_and_every_tensor_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected: BTreeMap<(String, u64), Vec<f32>> = BTreeMap::new();
    let mut tensors: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut sums = Vec::new();
    for id in (0..PARTITIONS).map(PartitionId) {
        let mut partition = Partition::new(model_with(ADAM), id, 1);
        train(&mut partition, 0, 2, 50);
        for table in partition.tables() {
            let (mut weights, mut slots) = (Vec::new(), Vec::new());
            table.copy_rows(0..table.len(), &mut weights, &mut slots);
            for (id, row) in table.ids().iter().zip(weights.chunks(table.shape().width())) {
                expected.insert((table.shape().name.clone(), *id), row.to_vec());
            }
        }
        for tensor in partition.tensors() {
            tensors.insert(tensor.shape().name.clone(), tensor.values().to_vec());
        }
        sums.push(written(&mut partition, dir.path()));
    }
    let chains: Vec<Vec<Layer>> =
        sums.into_iter().map(|sum| vec![Layer { checkpoint: 1, dir: dir.path().into(), sum }]).collect();
    let reader = Reader::open(chains.clone()).unwrap();
    reader.verify().unwrap();
    assert_eq!((reader.rows(0), reader.rows(1)), (200, 200));
    assert_eq!(*reader.shape(), shape());
    reader
        .visit(|piece| {
            match piece {
                Piece::Rows { table, ids, weights } => {
                    for (id, row) in ids.iter().zip(weights.chunks(table.width())) {
                        assert_eq!(expected.remove(&(table.name.clone(), *id)).as_deref(), Some(row));
                    }
                }
                Piece::Tensor { tensor, values } => {
                    assert_eq!(tensors.remove(&tensor.name).as_deref(), Some(values));
                }
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    assert!(expected.is_empty() && tensors.is_empty(), "{expected:?} {tensors:?}");

    fs::remove_file(path_of(dir.path(), PartitionId(3))).unwrap();
    assert!(Reader::open(chains).unwrap_err().chain().contains("partition-003.arrow"));
}

#[test]
fn a_tensor_longer_than_a_piece_comes_back_whole() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = elasticdl_spec::TensorShape {
        name: "big".into(),
        shape: vec![1100, 1000],
        init: Initializer::Normal { deviation: 1.0 },
    };
    let shape = ModelShape { tables: vec![], tensors: vec![tensor.clone()] };
    let model = Arc::new(Model::new("big", shape, ADAM, SEED, 1));
    let mut partition = Partition::new(Arc::clone(&model), PartitionId(0), 1);
    let sum = written(&mut partition, dir.path());
    let restored = restore(&model, dir.path(), PartitionId(0), 2, sum).unwrap();
    assert_eq!(restored.tensors(), partition.tensors());
    let mut whole = 0;
    let chain = vec![Layer { checkpoint: 1, dir: dir.path().into(), sum }];
    let reader = Reader::open(vec![chain]).unwrap();
    reader
        .visit(|piece| {
            let Piece::Tensor { values, .. } = piece else { panic!("{piece:?}") };
            assert_eq!(values, tensor.init_values(SEED));
            whole += 1;
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(whole, 1);
}

#[test]
fn more_rows_than_a_record_batch_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut shape = shape();
    shape.tensors.clear();
    let model = Arc::new(Model::new("many", shape, SGD, SEED, 1));
    let mut partition = Partition::new(Arc::clone(&model), PartitionId(0), 1);
    let ids: Vec<u64> = (0..150_000).collect();
    let mut out = vec![0.0; ids.len() * 3];
    partition.pull(0, &ids, &mut out).unwrap();
    let sum = written(&mut partition, dir.path());
    let restored = restore(&model, dir.path(), PartitionId(0), 2, sum).unwrap();
    let mut again = vec![0.0; ids.len() * 3];
    restored.read(0, &ids, &mut again);
    assert_eq!(out, again);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_history_survives_a_checkpoint(
        tasks in proptest::collection::vec((0..6u32, 1..4u64, 0..60usize), 0..6),
        closed in proptest::collection::vec(0..6u32, 0..4),
        optimizer in proptest::sample::select(&crate::optimizer::tests::ALL[..]),
        place in 0..test_model::PARTITIONS,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let id = PartitionId(place);
        let mut partition = Partition::new(model_with(optimizer), id, 1);
        for (shard, batches, rows) in tasks {
            train(&mut partition, shard, batches, rows);
        }
        partition.close(closed.into_iter().map(|shard| TaskId::train(1, shard)));
        let sum = written(&mut partition, dir.path());
        let restored = restore(partition.model(), dir.path(), id, 2, sum).unwrap();
        prop_assert_eq!(bits(&restored), bits(&partition));
        let head = read_head(&path_of(dir.path(), id)).unwrap();
        prop_assert_eq!(head.version, partition.version());
        prop_assert_eq!(&head.marks, partition.memory().marks.open());
    }
}
