//! Steps of several batches: each is staged, and when the gate has decided which of them make the step, they are
//! applied together, as the mean of their gradients.
//!
//! A step is known by the version that its batches were computed from, the same in every partition: all apply the
//! same steps. So a step that is committed twice is told by the version, and what was computed from another one
//! is stale. What is staged and not in the step that was decided is dropped with it.

use std::collections::BTreeMap;

use elasticdl_spec::TaskId;
use elasticdl_wire::gate::{Batch, Decision};
use elasticdl_wire::ps::{Answer, PushHeader, Status};

use super::{Partition, Push, RowGradients};
use crate::error::Result;

/// Batches that wait for their step.
#[derive(Debug, Default)]
pub(super) struct Steps {
    held: BTreeMap<(TaskId, u64), Held>,
    /// Buffers of before, to be used again.
    spare: Vec<Held>,
}

/// A staged batch.
#[derive(Debug)]
struct Held {
    header: PushHeader,
    /// By table: ids and their gradients.
    tables: Vec<(Vec<u64>, Vec<f32>)>,
    tensors: Vec<Vec<f32>>,
}

impl Steps {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn hold(&mut self, push: &Push<'_>) {
        let PushHeader { task, batch, .. } = push.header;
        let room = self.held.remove(&(task, batch)).or_else(|| self.spare.pop());
        let mut held =
            room.unwrap_or_else(|| Held { header: push.header, tables: Vec::new(), tensors: Vec::new() });
        held.header = push.header;
        held.tables.resize_with(push.tables.len(), Default::default);
        for ((ids, gradients), rows) in held.tables.iter_mut().zip(push.tables) {
            ids.clear();
            ids.extend_from_slice(rows.ids);
            gradients.clear();
            gradients.extend_from_slice(rows.gradients);
        }
        held.tensors.resize_with(push.tensors.len(), Vec::new);
        for (copy, gradient) in held.tensors.iter_mut().zip(push.tensors) {
            copy.clear();
            copy.extend_from_slice(gradient);
        }
        self.held.insert((task, batch), held);
    }

    /// The batches of a step, in its order, taken out; `None` where one is not here under its lease. All others
    /// are dropped.
    fn take(&mut self, step: &[Batch]) -> Option<Vec<Held>> {
        let here = |b: &Batch| self.held.get(&(b.task, b.batch)).is_some_and(|h| h.header.lease == b.lease);
        if !step.iter().all(here) {
            return None;
        }
        let taken = step.iter().filter_map(|b| self.held.remove(&(b.task, b.batch))).collect();
        self.spare.extend(std::mem::take(&mut self.held).into_values());
        Some(taken)
    }
}

impl Partition {
    /// Keeps a batch until its step is committed. It may stand behind others of its task that are staged.
    pub(super) fn stage_for_step(&mut self, push: &Push<'_>) -> Result<Answer> {
        let PushHeader { task, batch, .. } = push.header;
        let judged = self.judge(push)?;
        let before = |mark: u64| (mark..batch).all(|b| self.steps.held.contains_key(&(task, b)));
        let stands = match judged.status {
            Status::Ok => true,
            Status::Gap => before(judged.mark),
            _ => return Ok(judged),
        };
        if push.version != self.memory.version {
            return Ok(Answer { status: Status::Stale, ..judged });
        }
        if !stands {
            return Ok(judged);
        }
        if judged.status == Status::Gap {
            self.check_values(push)?;
        }
        self.steps.hold(push);
        Ok(Answer { status: Status::Ok, ..judged })
    }

    /// Applies a step, once: `Duplicate` where that was done before, `Gap` where the step before it is missing here,
    /// `NotStaged` where one of its batches is.
    pub fn commit_step(&mut self, step: &Decision, incarnation: u64) -> Result<Answer> {
        step.batches.iter().try_for_each(|batch| self.check_purpose(batch.task))?;
        let status = match step.version.cmp(&self.memory.version) {
            _ if self.admit(incarnation) != Status::Ok => Status::WrongIncarnation,
            std::cmp::Ordering::Less => Status::Duplicate,
            std::cmp::Ordering::Greater => Status::Gap,
            std::cmp::Ordering::Equal => {
                match self.is_in_order(&step.batches).then(|| self.steps.take(&step.batches)) {
                    Some(Some(batches)) => {
                        self.apply_step(&batches);
                        self.steps.spare.extend(batches);
                        Status::Ok
                    }
                    _ => Status::NotStaged,
                }
            }
        };
        Ok(self.answer(status, 0))
    }

    /// Whether every batch stands at its mark when those before it in the step are applied.
    fn is_in_order(&self, step: &[Batch]) -> bool {
        let mut marks: BTreeMap<TaskId, u64> = BTreeMap::new();
        step.iter().all(|b| {
            let mark = marks.entry(b.task).or_insert_with(|| self.memory.marks.mark(b.task));
            let stands = *mark == b.batch;
            *mark = mark.saturating_add(1);
            stands
        })
    }

    fn apply_step(&mut self, batches: &[Held]) {
        // A batch of which every record was set aside teaches nothing, and is no part of the mean.
        let taught: Vec<&Held> = batches.iter().filter(|held| held.header.records > 0).collect();
        if let [one] = taught[..] {
            let tables: Vec<RowGradients<'_>> =
                one.tables.iter().map(|(ids, gradients)| RowGradients { ids, gradients }).collect();
            let tensors: Vec<&[f32]> = one.tensors.iter().map(Vec::as_slice).collect();
            self.learn(&tables, &tensors, one.header.factor);
        } else if !taught.is_empty() {
            let share = 1.0 / taught.len() as f32;
            let factor = taught.iter().map(|held| held.header.factor).sum::<f32>() * share;
            let tables: Vec<(Vec<u64>, Vec<f32>)> =
                (0..self.tables.len()).map(|table| mean_of_rows(&taught, table, share)).collect();
            let tensors: Vec<Vec<f32>> =
                (0..self.tensors.len()).map(|tensor| mean_of_tensors(&taught, tensor, share)).collect();
            let tables: Vec<RowGradients<'_>> =
                tables.iter().map(|(ids, gradients)| RowGradients { ids, gradients }).collect();
            let tensors: Vec<&[f32]> = tensors.iter().map(Vec::as_slice).collect();
            self.learn(&tables, &tensors, factor);
        }
        for held in batches {
            self.staleness.count(0);
            self.count(&held.header);
        }
    }
}

/// The rows of one table that any of the batches touches, each once, with the sum of its gradients times `share`.
fn mean_of_rows(batches: &[&Held], table: usize, share: f32) -> (Vec<u64>, Vec<f32>) {
    let mut places: Vec<(u64, usize, usize)> = Vec::new();
    for (number, held) in batches.iter().enumerate() {
        places.extend(held.tables[table].0.iter().enumerate().map(|(at, id)| (*id, number, at)));
    }
    places.sort_unstable();
    let (mut ids, mut means) = (Vec::new(), Vec::<f32>::new());
    for (id, number, at) in places {
        let (own, gradients) = &batches[number].tables[table];
        let width = gradients.len() / own.len();
        let gradient = &gradients[at * width..(at + 1) * width];
        if ids.last() == Some(&id) {
            let from = means.len() - width;
            means[from..].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        } else {
            ids.push(id);
            means.extend_from_slice(gradient);
        }
    }
    means.iter_mut().for_each(|sum| *sum *= share);
    (ids, means)
}

fn mean_of_tensors(batches: &[&Held], tensor: usize, share: f32) -> Vec<f32> {
    let mut mean = batches[0].tensors[tensor].clone();
    for held in &batches[1..] {
        mean.iter_mut().zip(&held.tensors[tensor]).for_each(|(sum, g)| *sum += g);
    }
    mean.iter_mut().for_each(|sum| *sum *= share);
    mean
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use elasticdl_spec::shape::RowPart;
    use elasticdl_spec::{
        Initializer, LeaseId, ModelShape, OptimizerSpec, PartitionId, TableShape, TensorShape,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::gate::Policy;
    use crate::model::Model;

    /// A table of width 1 and a tensor of one number, both of which begin at 0 and lose their gradient times 1.
    fn partition() -> Partition {
        partition_of("{}")
    }

    /// The same with what a job says of its table.
    fn partition_of(tables: &str) -> Partition {
        let init = Initializer::Zeros;
        let table = TableShape { name: "t".into(), parts: vec![RowPart { width: 1, init }] };
        let tensor = TensorShape { name: "d".into(), shape: vec![1], init };
        let shape = ModelShape { tables: vec![table], tensors: vec![tensor] };
        let mut model = Model::new("steps", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 1, 1);
        model.policy = Some(Policy::Steps(2));
        let model = model.with_tables(&serde_json::from_str(tables).expect("a sound setting"));
        Partition::new(Arc::new(model), PartitionId(0), 3)
    }

    fn batch(shard: u32, batch: u64, n: u64) -> Batch {
        Batch { task: TaskId::train(0, shard), batch, lease: LeaseId { term: 1, n } }
    }

    fn stage(to: &mut Partition, b: Batch, version: u64, rows: &[(u64, f32)], tensor: f32) -> Status {
        let header = PushHeader { task: b.task, batch: b.batch, lease: b.lease, records: 1, factor: 1.0 };
        let (ids, gradients): (Vec<u64>, Vec<f32>) = rows.iter().copied().unzip();
        let tables = [RowGradients { ids: &ids, gradients: &gradients }];
        let push = Push { header, incarnation: 3, version, tables: &tables, tensors: &[&[tensor]] };
        to.stage(&push).unwrap().status
    }

    fn commit(to: &mut Partition, version: u64, batches: &[Batch]) -> Status {
        to.commit_step(&Decision { version, batches: batches.to_vec() }, 3).unwrap().status
    }

    fn weights(of: &Partition, ids: &[u64]) -> (Vec<f32>, f32) {
        let mut rows = vec![0.0; ids.len()];
        of.read(0, ids, &mut rows);
        (rows, of.tensors()[0].values()[0])
    }

    /// Goal: by hand: a row of both batches gets the mean, a row of one half its gradient, the tensor the mean.
    #[test]
    fn a_step_applies_the_mean_of_its_gradients_once() {
        let mut partition = partition();
        let (a, b) = (batch(0, 0, 1), batch(1, 0, 2));
        assert_eq!(stage(&mut partition, a, 0, &[(7, -4.0), (8, -2.0)], -1.0), Status::Ok);
        assert_eq!(stage(&mut partition, b, 0, &[(9, -8.0), (7, -2.0)], -3.0), Status::Ok);
        assert_eq!(weights(&partition, &[7, 8, 9]), (vec![0.0; 3], 0.0), "nothing moves before the commit");
        assert!(partition.is_staging());
        assert_eq!(commit(&mut partition, 0, &[a, b]), Status::Ok);
        assert_eq!(weights(&partition, &[7, 8, 9]), (vec![3.0, 1.0, 4.0], 2.0));
        assert_eq!((partition.version(), partition.is_staging()), (2, false));
        assert_eq!(commit(&mut partition, 0, &[a, b]), Status::Duplicate, "a retry is acknowledged");
        assert_eq!(weights(&partition, &[7, 8, 9]), (vec![3.0, 1.0, 4.0], 2.0));
        let tally = partition.memory().audit.epochs()[&0];
        assert_eq!((tally.batches, tally.records), (2, 2));
    }

    /// Goal: whoever is named by both batches of a step is counted once, and not before the step is committed.
    #[test]
    fn a_step_counts_an_id_once_towards_a_row() {
        let mut partition = partition_of(r#"{ "t": { "admit_after": 2 } }"#);
        for (step, due) in [(0, 0.0), (1, 3.0), (2, 6.0)] {
            let (a, b) = (batch(0, step, 1), batch(1, step, 2));
            for (each, gradient) in [(a, -4.0), (b, -2.0)] {
                assert_eq!(stage(&mut partition, each, 2 * step, &[(7, gradient)], 0.0), Status::Ok);
            }
            let counts = partition.tables()[0].whole_bounds();
            assert_eq!(counts.counts.refused, step.min(1));
            assert_eq!(commit(&mut partition, 2 * step, &[a, b]), Status::Ok);
            assert_eq!(commit(&mut partition, 2 * step, &[a, b]), Status::Duplicate);
            assert_eq!(weights(&partition, &[7]).0, [due]);
        }
    }

    #[test]
    fn several_batches_of_one_task_are_in_one_step() {
        let mut partition = partition();
        let (a, b) = (batch(0, 0, 1), batch(0, 1, 1));
        assert_eq!(
            stage(&mut partition, b, 0, &[(7, -4.0)], 0.0),
            Status::Gap,
            "the one before it is not here"
        );
        assert_eq!(stage(&mut partition, a, 0, &[(7, -4.0)], 0.0), Status::Ok);
        assert_eq!(stage(&mut partition, b, 0, &[(7, -2.0)], 0.0), Status::Ok);
        assert_eq!(commit(&mut partition, 0, &[b]), Status::NotStaged, "out of order");
        assert_eq!(commit(&mut partition, 0, &[a, b]), Status::Ok);
        assert_eq!(weights(&partition, &[7]).0, [3.0]);
        assert_eq!(partition.memory().marks.mark(a.task), 2);
        assert_eq!(stage(&mut partition, b, 2, &[(7, -2.0)], 0.0), Status::Duplicate);
    }

    #[test]
    fn what_was_computed_from_other_weights_is_stale_and_what_is_left_over_is_dropped() {
        let mut partition = partition();
        let (a, b, late) = (batch(0, 0, 1), batch(1, 0, 2), batch(2, 0, 3));
        for each in [a, b, late] {
            assert_eq!(stage(&mut partition, each, 0, &[(7, -1.0)], 0.0), Status::Ok);
        }
        assert_eq!(commit(&mut partition, 2, &[a]), Status::Gap, "the step before it is missing");
        assert_eq!(commit(&mut partition, 0, &[a, b]), Status::Ok);
        assert!(!partition.is_staging());
        assert_eq!(commit(&mut partition, 2, &[late]), Status::NotStaged);
        assert_eq!(stage(&mut partition, late, 0, &[(7, -1.0)], 0.0), Status::Stale);
        assert_eq!(stage(&mut partition, late, 2, &[(7, -1.0)], 0.0), Status::Ok);
        assert_eq!(commit(&mut partition, 2, &[late]), Status::Ok);
        assert_eq!(weights(&partition, &[7]).0, [2.0], "one alone is its own mean");
    }

    #[test]
    fn a_newer_lease_replaces_what_is_staged_and_the_step_names_the_lease() {
        let mut partition = partition();
        let (old, new) = (batch(0, 0, 1), batch(0, 0, 2));
        stage(&mut partition, old, 0, &[(7, -1.0)], 0.0);
        stage(&mut partition, new, 0, &[(7, -5.0)], 0.0);
        assert_eq!(stage(&mut partition, old, 0, &[(7, -1.0)], 0.0), Status::Fenced);
        assert_eq!(commit(&mut partition, 0, &[old]), Status::NotStaged);
        assert_eq!(commit(&mut partition, 0, &[new]), Status::Ok);
        assert_eq!(weights(&partition, &[7]).0, [5.0]);
    }

    #[test]
    fn a_batch_without_records_is_no_part_of_the_mean() {
        let mut partition = partition();
        let (a, b) = (batch(0, 0, 1), batch(1, 0, 2));
        stage(&mut partition, a, 0, &[(7, -4.0)], -2.0);
        let header = PushHeader { task: b.task, batch: 0, lease: b.lease, records: 0, factor: 1.0 };
        let tables = [RowGradients { ids: &[], gradients: &[] }];
        let push = Push { header, incarnation: 3, version: 0, tables: &tables, tensors: &[&[0.0]] };
        assert_eq!(partition.stage(&push).unwrap().status, Status::Ok);
        assert_eq!(commit(&mut partition, 0, &[a, b]), Status::Ok);
        assert_eq!(weights(&partition, &[7]), (vec![4.0], 2.0));
        assert_eq!(partition.version(), 2);
    }

    proptest! {
        /// Goal: stages, commits and repetitions in any order apply each step once, and only whole steps.
        #[test]
        fn any_order_of_stages_and_commits_applies_whole_steps_once(
            events in proptest::collection::vec((0..4u8, 0..3u32, 0..4u64), 0..80),
        ) {
            let mut partition = partition();
            let (mut sum, mut last) = (0.0f32, None);
            for (what, shard, index) in events {
                let version = partition.version();
                let mark = partition.memory().marks.mark(TaskId::train(0, shard));
                match what {
                    0 | 1 => {
                        let staged = stage(&mut partition, batch(shard, mark + index / 3, 1), version, &[(7, -1.0)], 0.0);
                        prop_assert!(matches!(staged, Status::Ok | Status::Gap));
                    }
                    2 => {
                        let held: Vec<Batch> = partition.steps.held.keys().map(|(task, b)| Batch { task: *task, batch: *b, lease: LeaseId { term: 1, n: 1 } }).collect();
                        if !held.is_empty() {
                            prop_assert_eq!(commit(&mut partition, version, &held), Status::Ok);
                            sum += 1.0;
                            last = Some((version, held));
                        }
                    }
                    _ => if let Some((version, step)) = &last {
                        prop_assert_eq!(commit(&mut partition, *version, step), Status::Duplicate);
                    }
                }
                prop_assert_eq!(weights(&partition, &[7]).0[0], sum);
            }
            let tally = partition.memory().audit.epochs().get(&0).map_or(0, |tally| tally.batches);
            prop_assert_eq!(tally, partition.version());
        }
    }
}
