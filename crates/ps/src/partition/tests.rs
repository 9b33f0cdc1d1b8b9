//! The rules of exactly-once, on rows: whatever is repeated, reordered or fenced, each batch counts once.

mod references;
mod rounds;

use std::collections::BTreeMap;

use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, ModelShape, OptimizerSpec, TableShape};
use proptest::prelude::*;

use elasticdl_wire::ps::Commit;

use super::*;
use crate::audit::digest;
use crate::marks::MARK_CLOSED;
use crate::optimizer::Rule;
use crate::table::Bounds;
use crate::test_model::{self, ids_of, model, model_with};

const HERE: PartitionId = PartitionId(2);

fn header(shard: u32, batch: u64, lease: u64) -> PushHeader {
    let lease = LeaseId { term: 1, n: lease };
    PushHeader { task: TaskId::train(0, shard), batch, lease, records: 10, factor: 1.0 }
}

/// Gradients of `value` for the first row of each table and all tensors.
struct Gradients {
    ids: Vec<u64>,
    rows: [Vec<f32>; 2],
    tensors: Vec<Vec<f32>>,
}

impl Gradients {
    fn of(partition: &Partition, value: f32) -> Self {
        Gradients {
            ids: ids_of(partition.id(), 1),
            rows: [vec![value; 3], vec![value; 2]],
            tensors: partition.tensors().iter().map(|t| vec![value; t.values().len()]).collect(),
        }
    }

    fn push(&self, to: &mut Partition, header: PushHeader, incarnation: u64) -> Result<Answer> {
        let tables: Vec<_> =
            self.rows.iter().map(|r| RowGradients { ids: &self.ids, gradients: r }).collect();
        let tensors: Vec<&[f32]> = self.tensors.iter().map(Vec::as_slice).collect();
        to.push(&Push { header, incarnation, version: 0, tables: &tables, tensors: &tensors })
    }
}

fn push(partition: &mut Partition, header: PushHeader) -> (Status, u64) {
    let incarnation = partition.incarnation();
    let answer = Gradients::of(partition, 1.0).push(partition, header, incarnation).unwrap();
    (answer.status, answer.mark)
}

/// A partition whose tables have no bounds, and one whose tables have: counts of ids without a row, bits of rows that were
/// trained, and what was refused must be as they were where nothing is applied.
fn both(incarnation: u64) -> [Partition; 2] {
    [model(), test_model::bounded_model(model().optimizer)]
        .map(|model| Partition::new(model, HERE, incarnation))
}

/// Everything of a partition that a push may change.
fn state(partition: &Partition) -> (Memory, Vec<f32>, Vec<Bounds>) {
    let mut floats = Vec::new();
    for table in partition.tables() {
        let (mut weights, mut slots) = (Vec::new(), Vec::new());
        table.copy_rows(0..table.len(), &mut weights, &mut slots);
        floats.extend(weights.into_iter().chain(slots));
    }
    for tensor in partition.tensors() {
        floats.extend(tensor.values().iter().chain(tensor.slots()));
    }
    let bounds = partition.tables().iter().map(Table::whole_bounds).collect();
    (partition.memory().clone(), floats, bounds)
}

#[test]
fn the_model_of_these_tests_has_tensors_in_its_partition_and_counts_that_a_push_moves() {
    let [plain, mut bounded] = both(1);
    assert!(!plain.tensors().is_empty());
    let before = state(&bounded).2;
    push(&mut bounded, header(0, 0, 1));
    let counted = state(&bounded).2;
    assert!(counted[0].strangers != before[0].strangers, "users are counted before they have a row");
    push(&mut bounded, header(0, 1, 1));
    assert!(state(&bounded).2[0] != counted[0], "and have one when they come again");
}

/// Defect 2 of the original: a retried push was applied twice.
#[test]
fn a_repeated_push_is_acknowledged_and_changes_nothing() {
    for mut partition in both(1) {
        assert_eq!(push(&mut partition, header(0, 0, 1)), (Status::Ok, 1));
        let before = state(&partition);
        assert_eq!(push(&mut partition, header(0, 0, 1)), (Status::Duplicate, 1));
        assert_eq!(state(&partition), before);
    }
}

#[test]
fn a_push_ahead_of_its_turn_is_sent_back_to_the_mark() {
    for mut partition in both(1) {
        push(&mut partition, header(0, 0, 1));
        let before = state(&partition);
        assert_eq!(push(&mut partition, header(0, 2, 1)), (Status::Gap, 1));
        assert_eq!(state(&partition), before);
    }
}

#[test]
fn a_zombie_is_fenced_by_the_next_holder_even_before_its_first_push() {
    for mut partition in both(1) {
        push(&mut partition, header(0, 0, 1));
        let (task, lease) = (TaskId::train(0, 0), LeaseId { term: 1, n: 2 });
        let answer = partition.fence(task, lease, 1).unwrap();
        assert_eq!((answer.status, answer.mark), (Status::Ok, 1));
        let before = state(&partition);
        assert_eq!(push(&mut partition, header(0, 1, 1)), (Status::Fenced, 1));
        assert_eq!(state(&partition), before);
        assert_eq!(push(&mut partition, header(0, 1, 2)), (Status::Ok, 2));
        let answer = partition.fence(task, LeaseId { term: 1, n: 1 }, 1).unwrap();
        assert_eq!((answer.status, answer.mark), (Status::Fenced, 2));
    }
}

#[test]
fn a_gap_under_a_newer_lease_raises_the_fence_too() {
    let mut partition = Partition::new(model(), HERE, 1);
    assert_eq!(push(&mut partition, header(0, 3, 9)), (Status::Gap, 0));
    assert_eq!(push(&mut partition, header(0, 0, 8)), (Status::Fenced, 0));
}

#[test]
fn a_batch_that_touches_nothing_moves_the_mark_and_counts() {
    let mut partition = Partition::new(model(), PartitionId(0), 1);
    let nothing = [RowGradients { ids: &[], gradients: &[] }; 2];
    let zeros: Vec<Vec<f32>> = partition.tensors().iter().map(|t| vec![0.0; t.values().len()]).collect();
    let tensors: Vec<&[f32]> = zeros.iter().map(Vec::as_slice).collect();
    let push =
        Push { header: header(0, 0, 1), incarnation: 1, version: 0, tables: &nothing, tensors: &tensors };
    assert_eq!(partition.push(&push).unwrap().mark, 1);
    let tally = partition.memory().audit.epochs()[&0];
    assert_eq!((tally.batches, tally.records), (1, 10));
    assert_eq!(tally.digest, digest(TaskId::train(0, 0), 0));
    assert!(partition.tables().iter().all(|t| t.is_empty()));
}

#[test]
fn another_incarnation_is_refused_and_changes_nothing() {
    for mut partition in both(3) {
        let before = state(&partition);
        for incarnation in [2, 4] {
            let gradients = Gradients::of(&partition, 1.0);
            let answer = gradients.push(&mut partition, header(0, 0, 1), incarnation).unwrap();
            assert_eq!(answer.status, Status::WrongIncarnation);
            let answer =
                partition.fence(TaskId::train(0, 0), LeaseId { term: 1, n: 1 }, incarnation).unwrap();
            assert_eq!(answer.status, Status::WrongIncarnation);
            assert_eq!(partition.admit(incarnation), Status::WrongIncarnation);
        }
        assert_eq!(state(&partition), before);
    }
}

#[test]
fn a_closed_task_takes_no_more_gradients() {
    for mut partition in both(1) {
        push(&mut partition, header(0, 0, 1));
        partition.close([TaskId::train(0, 0), TaskId::train(0, 1)]);
        let before = state(&partition);
        assert_eq!(push(&mut partition, header(0, 1, 7)), (Status::Duplicate, MARK_CLOSED));
        assert_eq!(push(&mut partition, header(1, 0, 7)), (Status::Duplicate, MARK_CLOSED));
        assert_eq!(state(&partition), before);
        assert!(partition.memory().marks.open().is_empty());
        assert_eq!(push(&mut partition, header(2, 0, 7)), (Status::Ok, 1));
    }
}

#[test]
fn a_gradient_that_is_not_finite_leaves_everything_as_it_was() {
    for mut partition in both(1) {
        push(&mut partition, header(0, 0, 1));
        let before = state(&partition);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut rows = Gradients::of(&partition, 1.0);
            rows.rows[1][1] = bad;
            let error = rows.push(&mut partition, header(0, 1, 2), 1).unwrap_err();
            let text =
                "push of train/0/0 batch 1 to partition-2: the gradient of table \"items\" is not finite";
            assert_eq!(error.to_string(), text);
            let mut tensors = Gradients::of(&partition, 1.0);
            *tensors.tensors[0].last_mut().unwrap() = bad;
            assert!(tensors.push(&mut partition, header(0, 1, 2), 1).is_err());
            assert_eq!(state(&partition), before);
        }
        assert_eq!(push(&mut partition, header(0, 1, 1)), (Status::Ok, 2));
    }
}

#[test]
fn a_push_that_does_not_fit_the_model_is_refused_before_anything_changes() {
    for mut partition in both(1) {
        let before = state(&partition);
        let mut refused = |spoil: &dyn Fn(&mut Gradients), expected: &str| {
            let mut gradients = Gradients::of(&partition, 1.0);
            spoil(&mut gradients);
            let error = gradients.push(&mut partition, header(0, 0, 1), 1).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(state(&partition), before);
        };
        refused(&|g| g.rows[1].truncate(1), "1 floats for table \"items\", 2 due");
        refused(&|g| g.tensors[0].truncate(1), "1 floats for tensor");
        refused(&|g| g.tensors.clear(), "2 tables and 0 tensors");
        refused(&|g| g.ids = ids_of(PartitionId(3), 1), "of table \"users\" lives in partition-3");
    }
}

#[test]
fn evaluation_tasks_neither_push_nor_fence() {
    let mut partition = Partition::new(model(), HERE, 1);
    let task = TaskId::evaluate(0, 0);
    assert!(partition.fence(task, LeaseId { term: 1, n: 1 }, 1).is_err());
    let header = PushHeader { task, ..header(0, 0, 1) };
    assert!(Gradients::of(&partition, 1.0).push(&mut partition, header, 1).is_err());
    assert!(partition.memory().marks.open().is_empty());
}

/// Goal: each optimizer reaches rows and tensors, by the factor that the push carries.
#[test]
fn every_optimizer_moves_rows_and_tensors_by_the_factor_of_the_push() {
    for spec in crate::optimizer::tests::ALL {
        let mut partition = Partition::new(model_with(spec), HERE, 1);
        let mut before = [0.0; 3];
        let id = ids_of(HERE, 1);
        partition.pull(0, &id, &mut before).unwrap();
        let tensors: Vec<Vec<f32>> = partition.tensors().iter().map(|t| t.values().to_vec()).collect();
        assert!(!tensors.is_empty(), "some tensor lives here");
        let pushed = PushHeader { factor: 0.5, ..header(0, 0, 1) };
        assert_eq!(push(&mut partition, pushed), (Status::Ok, 1));

        let rows = Optimizer::new(spec);
        let expected = |rule: &Optimizer, weights: &[f32]| {
            let (mut moved, mut slots) = (weights.to_vec(), vec![0.0; rule.slots(weights.len())]);
            rule.begin(&mut slots);
            rule.apply(&mut moved, &mut slots, &vec![1.0; weights.len()], 0.5);
            moved
        };
        let mut after = [0.0; 3];
        partition.read(0, &id, &mut after);
        assert_eq!(after, expected(&rows, &before)[..], "{spec:?}");
        assert!(after.iter().zip(before).all(|(a, b)| *a < b), "{spec:?} {before:?} {after:?}");
        for (tensor, before) in partition.tensors().iter().zip(&tensors) {
            assert_eq!(tensor.values(), expected(&rows.of_tensors(), before), "{spec:?}");
        }
    }
}

#[test]
fn a_staged_batch_is_committed_with_the_factor_it_came_with() {
    let mut partition = Partition::new(counting_model(), PartitionId(0), 1);
    let rows = [RowGradients { ids: &[7], gradients: &[-8.0] }];
    let header = PushHeader { factor: 0.25, ..header(0, 0, 1) };
    partition.stage(&Push { header, incarnation: 1, version: 0, tables: &rows, tensors: &[] }).unwrap();
    let commit = Commit { task: header.task, batch: 0, lease: header.lease };
    assert_eq!(partition.commit(commit, 1).unwrap().status, Status::Ok);
    let mut row = [0.0];
    partition.read(0, &[7], &mut row);
    assert_eq!(row, [2.0]);
}

#[test]
fn what_a_job_says_of_a_table_counts_for_that_table() {
    let said = serde_json::from_str(r#"{ "*": { "l2": 0.0 }, "users": { "l2": 0.5 } }"#).unwrap();
    let sgd = OptimizerSpec::Sgd { learning_rate: 1.0 };
    let model = Arc::new(Model::new("test", test_model::shape(), sgd, 1, 1).with_tables(&said));
    let mut partition = Partition::new(model, PartitionId(0), 1);
    let (mut users, mut items) = ([0.0; 3], [0.0; 2]);
    partition.pull(0, &[1], &mut users).unwrap();
    partition.pull(1, &[1], &mut items).unwrap();
    let rows =
        [RowGradients { ids: &[1], gradients: &[0.0; 3] }, RowGradients { ids: &[1], gradients: &[0.0; 2] }];
    let zeros: Vec<Vec<f32>> = partition.tensors().iter().map(|t| vec![0.0; t.values().len()]).collect();
    let tensors: Vec<&[f32]> = zeros.iter().map(Vec::as_slice).collect();
    let push = Push { header: header(0, 0, 1), incarnation: 1, version: 0, tables: &rows, tensors: &tensors };
    partition.push(&push).unwrap();
    let (mut users_after, mut items_after) = ([0.0; 3], [0.0; 2]);
    partition.read(0, &[1], &mut users_after);
    partition.read(1, &[1], &mut items_after);
    assert_eq!((users_after, items_after), (users.map(|w| w - 0.5 * w), items));
    assert!(users[1] != 0.0, "there is something to pull on");
}

// ---- any interleaving ----

const TASKS: u32 = 3;
const BATCHES: u64 = 4;

/// A model whose every batch adds 1 to a row of its own, exactly, in any order.
fn counting_model() -> Arc<Model> {
    let parts = vec![RowPart { width: 1, init: Initializer::Zeros }];
    let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
    Arc::new(Model::new("count", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 1, 1))
}

fn row_of(task: u32, batch: u64) -> u64 {
    u64::from(task) * BATCHES + batch
}

fn count_push(partition: &mut Partition, task: u32, batch: u64, lease: u64) -> Answer {
    let rows = [RowGradients { ids: &[row_of(task, batch)], gradients: &[-1.0] }];
    let push =
        Push { header: header(task, batch, lease), incarnation: 1, version: 0, tables: &rows, tensors: &[] };
    partition.push(&push).unwrap()
}

#[derive(Debug, Clone)]
enum Event {
    /// A push that arrives late, early, again or from a zombie.
    Stray { task: u32, batch: u64, lease: u64 },
    /// A worker takes the task over.
    Fence { task: u32, lease: u64 },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let stray =
        (0..TASKS, 0..BATCHES, 0..6u64).prop_map(|(task, batch, lease)| Event::Stray { task, batch, lease });
    let fence = (0..TASKS, 0..6u64).prop_map(|(task, lease)| Event::Fence { task, lease });
    proptest::collection::vec(prop_oneof![4 => stray, 1 => fence], 0..80)
}

proptest! {
    /// Goal: after any mess, workers that go on from the marks leave every batch applied exactly once.
    #[test]
    fn any_interleaving_of_retries_and_leases_applies_each_batch_once(events in events()) {
        let mut partition = Partition::new(counting_model(), PartitionId(0), 1);
        // The serial model: per task the mark and the highest lease, applied by the letter of the rules in `marks.rs`.
        let mut model: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for event in events {
            match event {
                Event::Stray { task, batch, lease } => {
                    let answer = count_push(&mut partition, task, batch, lease);
                    let (mark, highest) = model.entry(task).or_insert((0, lease));
                    let expected = if lease < *highest {
                        Status::Fenced
                    } else if batch < *mark {
                        Status::Duplicate
                    } else if batch == *mark {
                        *mark += 1;
                        Status::Ok
                    } else {
                        Status::Gap
                    };
                    *highest = (*highest).max(lease);
                    prop_assert_eq!((answer.status, answer.mark), (expected, *mark));
                }
                Event::Fence { task, lease } => {
                    let (mark, highest) = model.entry(task).or_insert((0, lease));
                    let expected = if lease < *highest { Status::Fenced } else { Status::Ok };
                    *highest = (*highest).max(lease);
                    let lease = LeaseId { term: 1, n: lease };
                    let answer = partition.fence(TaskId::train(0, task), lease, 1).unwrap();
                    prop_assert_eq!((answer.status, answer.mark), (expected, *mark));
                }
            }
        }
        // The faults stop: one more worker takes every task and finishes it from its mark.
        for task in 0..TASKS {
            let lease = LeaseId { term: 1, n: 100 };
            let mark = partition.fence(TaskId::train(0, task), lease, 1).unwrap().mark;
            for batch in mark..BATCHES {
                prop_assert_eq!(count_push(&mut partition, task, batch, 100).status, Status::Ok);
            }
        }
        let ids: Vec<u64> = (0..u64::from(TASKS) * BATCHES).collect();
        let mut counts = vec![0.0; ids.len()];
        partition.read(0, &ids, &mut counts);
        prop_assert_eq!(&counts, &vec![1.0; ids.len()]);
        let tally = partition.memory().audit.epochs()[&0];
        let all = (0..TASKS).flat_map(|t| (0..BATCHES).map(move |b| digest(TaskId::train(0, t), b)));
        prop_assert_eq!(tally.digest, all.fold(0, u64::wrapping_add));
        prop_assert_eq!(tally.batches, u64::from(TASKS) * BATCHES);
        prop_assert_eq!(partition.version(), tally.batches);
    }
}

/// Goal: exact figures: what was applied between pull and push divides the rate, and the histogram tells of it.
#[test]
fn staleness_is_counted_and_divides_the_rate_where_the_job_says_so() {
    let place = PartitionId(1);
    let (id, gradients) = (ids_of(place, 1)[0], [-1.0, 0.0, 0.0]);
    let rows =
        [RowGradients { ids: &[id], gradients: &gradients }, RowGradients { ids: &[], gradients: &[] }];
    for modulates in [false, true] {
        let mut model = (*model_with(OptimizerSpec::Sgd { learning_rate: 1.0 })).clone();
        model.modulates = modulates;
        let mut partition = Partition::new(Arc::new(model), place, 1);
        let zeros: Vec<Vec<f32>> = partition.tensors().iter().map(|t| vec![0.0; t.values().len()]).collect();
        let tensors: Vec<&[f32]> = zeros.iter().map(Vec::as_slice).collect();
        let mut due = 0.0;
        // Batch n is applied after n others: this many of them came between its pull and its push.
        for (batch, staleness) in [0, 0, 1, 3].into_iter().enumerate() {
            let (header, version) = (header(0, batch as u64, 1), batch as u64 - staleness);
            let push = Push { header, incarnation: 1, version, tables: &rows, tensors: &tensors };
            partition.push(&push).unwrap();
            due += if modulates { 1.0 / staleness.max(1) as f32 } else { 1.0 };
            let mut row = [0.0; 3];
            partition.read(0, &[id], &mut row);
            assert_eq!(row[0], due, "batch {batch}, {modulates}");
        }
        assert_eq!(serde_json::to_string(partition.staleness()).unwrap(), "[2,1,1]");
    }
}
