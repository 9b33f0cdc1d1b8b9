//! A step in two halves: a batch is staged on every partition first, and committed when all have it.
//!
//! A worker that dies between two partitions leaves a batch applied in one of them and not in the other;
//! computed again, it would see rows that already hold it. Where every outcome must be the same to the bit,
//! workers therefore stage. Committed anywhere means commit everywhere: whoever takes the task over finds
//! marks that differ and commits what is still staged. Staged and committed nowhere is of no effect, and
//! replaced by the next stage. The rules of `marks.rs` are those of a push; the mark moves at the commit.

use elasticdl_spec::TaskId;
use elasticdl_wire::ps::{Answer, Commit, PushHeader, Status};

use super::{Partition, Push, RowGradients};
use crate::error::Result;
use crate::gate::Policy;

/// Room for one batch; its buffers are used again and again.
#[derive(Debug, Default)]
pub(super) struct Stage {
    held: Option<Held>,
    /// By table: ids and their gradients.
    tables: Vec<(Vec<u64>, Vec<f32>)>,
    tensors: Vec<Vec<f32>>,
}

/// Which batch is staged.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Held {
    task: TaskId,
    batch: u64,
    records: u64,
    factor: f32,
    version: u64,
}

impl Stage {
    /// Keeps a copy of `push` in place of what was here.
    fn hold(&mut self, push: &Push<'_>) {
        let PushHeader { task, batch, records, factor, .. } = push.header;
        self.held = Some(Held { task, batch, records, factor, version: push.version });
        self.tables.resize_with(push.tables.len(), Default::default);
        for ((ids, gradients), rows) in self.tables.iter_mut().zip(push.tables) {
            replace(ids, rows.ids);
            replace(gradients, rows.gradients);
        }
        self.tensors.resize_with(push.tensors.len(), Vec::new);
        for (copy, gradient) in self.tensors.iter_mut().zip(push.tensors) {
            replace(copy, gradient);
        }
    }

    /// The batch, where it is the one that is staged.
    fn held(&self, task: TaskId, batch: u64) -> Option<Held> {
        self.held.filter(|held| (held.task, held.batch) == (task, batch))
    }
}

fn replace<T: Copy>(copy: &mut Vec<T>, items: &[T]) {
    copy.clear();
    copy.extend_from_slice(items);
}

fn view((ids, gradients): &(Vec<u64>, Vec<f32>)) -> RowGradients<'_> {
    RowGradients { ids, gradients }
}

impl Partition {
    /// Whether something waits here to be committed. It is lost where the partition goes elsewhere.
    pub fn is_staging(&self) -> bool {
        self.stage.held.is_some() || !self.steps.is_empty()
    }

    /// Keeps a batch until it is committed, if its turn has come, and tells what became of it. Another one
    /// that was staged before is dropped, but where steps have several batches.
    ///
    /// # Errors
    ///
    /// As for a push: nothing changes then.
    pub fn stage(&mut self, push: &Push<'_>) -> Result<Answer> {
        if let Some(Policy::Steps(_)) = self.model.policy {
            return self.stage_for_step(push);
        }
        let judged = self.judge(push)?;
        if judged.status == Status::Ok {
            self.stage.hold(push);
        }
        Ok(judged)
    }

    /// Applies the staged batch if its turn has come. `NotStaged`: its turn has come, and it is not here.
    pub fn commit(&mut self, commit: Commit, incarnation: u64) -> Result<Answer> {
        let Commit { task, batch, lease } = commit;
        self.check_purpose(task)?;
        if self.admit(incarnation) != Status::Ok {
            return Ok(self.answer(Status::WrongIncarnation, 0));
        }
        let (status, mark) = self.memory.marks.judge(task, batch, lease);
        if status != Status::Ok {
            self.memory.marks.fence(task, lease);
            return Ok(self.answer(status, mark));
        }
        let Some(Held { records, factor, version, .. }) = self.stage.held(task, batch) else {
            self.memory.marks.fence(task, lease);
            return Ok(self.answer(Status::NotStaged, mark));
        };
        let mut stage = std::mem::take(&mut self.stage);
        let header = PushHeader { task, batch, lease, records, factor };
        let tables: Vec<RowGradients<'_>> = stage.tables.iter().map(view).collect();
        let tensors: Vec<&[f32]> = stage.tensors.iter().map(Vec::as_slice).collect();
        let mark = self.apply(&Push { header, incarnation, version, tables: &tables, tensors: &tensors });
        stage.held = None;
        self.stage = stage;
        Ok(self.answer(Status::Ok, mark))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use elasticdl_spec::shape::RowPart;
    use elasticdl_spec::{Initializer, LeaseId, ModelShape, OptimizerSpec, PartitionId, TableShape};
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::{Layer, Order, restore, write_now};
    use crate::model::Model;

    const ROW: u64 = 5;

    /// A partition with one row that counts: a gradient is subtracted from it.
    fn partition() -> Partition {
        let parts = vec![RowPart { width: 1, init: Initializer::Zeros }];
        let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
        let optimizer = OptimizerSpec::Sgd { learning_rate: 1.0 };
        Partition::new(Arc::new(Model::new("count", shape, optimizer, 1, 1)), PartitionId(0), 3)
    }

    fn lease(n: u64) -> LeaseId {
        LeaseId { term: 1, n }
    }

    fn stage(to: &mut Partition, shard: u32, batch: u64, n: u64, gradient: f32) -> (Status, u64) {
        let header =
            PushHeader { task: TaskId::train(0, shard), batch, lease: lease(n), records: 2, factor: 1.0 };
        let tables = [RowGradients { ids: &[ROW], gradients: &[gradient] }];
        let push = Push { header, incarnation: 3, version: 0, tables: &tables, tensors: &[] };
        to.stage(&push).map(|a| (a.status, a.mark)).unwrap()
    }

    fn commit(to: &mut Partition, shard: u32, batch: u64, n: u64) -> (Status, u64) {
        let commit = Commit { task: TaskId::train(0, shard), batch, lease: lease(n) };
        to.commit(commit, 3).map(|a| (a.status, a.mark)).unwrap()
    }

    fn row(of: &Partition) -> f32 {
        let mut row = [0.0];
        of.read(0, &[ROW], &mut row);
        row[0]
    }

    #[test]
    fn a_stage_changes_nothing_until_it_is_committed_and_then_counts_once() {
        let mut partition = partition();
        assert_eq!(stage(&mut partition, 0, 0, 1, -4.0), (Status::Ok, 0));
        assert_eq!((row(&partition), partition.version()), (0.0, 0));
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::Ok, 1));
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::Duplicate, 1), "a retry is acknowledged");
        assert_eq!(stage(&mut partition, 0, 0, 1, -4.0), (Status::Duplicate, 1));
        assert_eq!((row(&partition), partition.version()), (4.0, 1));
        let tally = partition.memory().audit.epochs()[&0];
        assert_eq!((tally.batches, tally.records), (1, 2));
    }

    #[test]
    fn a_later_stage_of_a_batch_replaces_the_earlier_one() {
        let mut partition = partition();
        stage(&mut partition, 0, 0, 1, -4.0);
        stage(&mut partition, 0, 0, 2, -7.0);
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::Fenced, 0), "the zombie commits nothing");
        assert_eq!(commit(&mut partition, 0, 0, 2), (Status::Ok, 1));
        assert_eq!(row(&partition), 7.0);
    }

    #[test]
    fn a_fence_keeps_what_is_staged_for_it_may_be_committed_elsewhere() {
        let mut partition = partition();
        stage(&mut partition, 0, 0, 1, -4.0);
        partition.fence(TaskId::train(0, 0), lease(2), 3).unwrap();
        assert_eq!(stage(&mut partition, 0, 0, 1, -9.0), (Status::Fenced, 0));
        assert_eq!(commit(&mut partition, 0, 0, 2), (Status::Ok, 1));
        assert_eq!(row(&partition), 4.0);
    }

    #[test]
    fn what_is_not_staged_cannot_be_committed() {
        let mut partition = partition();
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::NotStaged, 0));
        assert_eq!(commit(&mut partition, 0, 1, 1), (Status::Gap, 0));
        assert_eq!(stage(&mut partition, 0, 1, 1, -1.0), (Status::Gap, 0));
        stage(&mut partition, 0, 0, 1, -1.0);
        stage(&mut partition, 1, 0, 1, -1.0);
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::NotStaged, 0), "there is room for one batch");
        assert_eq!(commit(&mut partition, 1, 0, 1), (Status::Ok, 1));
        assert_eq!(row(&partition), 1.0);
    }

    #[test]
    fn another_incarnation_neither_stages_nor_commits() {
        let mut partition = partition();
        stage(&mut partition, 0, 0, 1, -1.0);
        let held = Commit { task: TaskId::train(0, 0), batch: 0, lease: lease(1) };
        assert_eq!(partition.commit(held, 2).unwrap().status, Status::WrongIncarnation);
        assert_eq!(partition.commit(held, 4).unwrap().status, Status::WrongIncarnation);
        assert!(partition.commit(Commit { task: TaskId::evaluate(0, 0), ..held }, 3).is_err());
        assert_eq!(row(&partition), 0.0);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_not_staged() {
        let mut partition = partition();
        let header =
            PushHeader { task: TaskId::train(0, 0), batch: 0, lease: lease(1), records: 1, factor: 1.0 };
        let tables = [RowGradients { ids: &[ROW], gradients: &[f32::NAN] }];
        assert!(
            partition
                .stage(&Push { header, incarnation: 3, version: 0, tables: &tables, tensors: &[] })
                .is_err()
        );
        assert_eq!(commit(&mut partition, 0, 0, 1), (Status::NotStaged, 0));
    }

    #[test]
    fn nothing_of_a_stage_is_in_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut partition = partition();
        stage(&mut partition, 0, 0, 1, -1.0);
        commit(&mut partition, 0, 0, 1);
        stage(&mut partition, 0, 1, 1, -1.0);
        let order = Order { checkpoint: 1, base: None, is_basis: false };
        let sum = write_now(&mut partition, order, dir.path()).unwrap();
        let chain = [Layer { checkpoint: 1, dir: dir.path().into(), sum }];
        let mut restored = restore(partition.model(), PartitionId(0), 3, &chain).unwrap();
        assert_eq!(row(&restored), 1.0);
        assert_eq!(commit(&mut restored, 0, 1, 1), (Status::NotStaged, 1));
    }

    proptest! {
        /// Goal: stages and commits in any order apply each batch at most once, and only what was staged last.
        #[test]
        fn any_order_of_stages_and_commits_counts_each_batch_once(
            events in proptest::collection::vec((any::<bool>(), 0..3u64, 0..4u64), 0..60),
        ) {
            let mut partition = partition();
            let (mut mark, mut highest, mut staged, mut sum) = (0, 0, None, 0.0);
            for (number, (stages, batch, n)) in events.into_iter().enumerate() {
                let gradient = number as f32 + 1.0;
                let answer = match stages {
                    true => stage(&mut partition, 0, batch, n, -gradient),
                    false => commit(&mut partition, 0, batch, n),
                };
                let expected = match (n < highest, batch.cmp(&mark)) {
                    (true, _) => Status::Fenced,
                    (_, std::cmp::Ordering::Less) => Status::Duplicate,
                    (_, std::cmp::Ordering::Greater) => Status::Gap,
                    _ if stages => {
                        staged = Some((batch, gradient));
                        Status::Ok
                    }
                    _ => match staged.filter(|(at, _)| *at == batch) {
                        None => Status::NotStaged,
                        Some((_, gradient)) => {
                            (mark, staged, sum) = (mark + 1, None, sum + gradient);
                            Status::Ok
                        }
                    },
                };
                highest = highest.max(n);
                prop_assert_eq!(answer, (expected, mark));
                prop_assert_eq!(row(&partition), sum);
            }
            prop_assert_eq!(partition.version(), mark);
        }
    }
}
