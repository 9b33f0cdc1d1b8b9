//! The partitions in the worker's own process: a [`Store`] without sockets and frames.

use std::sync::Arc;

use elasticdl_ps::partition::{self, RowGradients};
use elasticdl_ps::{Partition, Partitions};
use elasticdl_spec::{LeaseId, PartitionId, TableShape, TaskId};
use elasticdl_wire::gate::{Batch, Decision};
use elasticdl_wire::ps::{Answer, PullMode, Status};
use elasticdl_worker::Result;
use elasticdl_worker::dedup::Keys;
use elasticdl_worker::stop::Level;
use elasticdl_worker::store::{Fence, Gated, Generation, Permit, Pulled, Push, Pushed, Store};

/// Every partition is here, in its first life.
const LIFE: u64 = 1;
const HERE: &str = "all partitions are here";
const FITS: &str = "a worker asks for what fits the model";

/// Partitions that are asked by plain calls.
pub struct Beside(pub Arc<Partitions>);

impl Beside {
    fn ids(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.0.model().partitions).map(PartitionId)
    }
}

impl Store for Beside {
    fn fence(&mut self, task: TaskId, lease: LeaseId) -> Result<Fence> {
        let fence = |id| self.0.with(id, |p| p.fence(task, lease, LIFE)).expect(HERE).expect(FITS);
        let answers: Vec<Answer> = self.ids().map(fence).collect();
        assert!(answers.iter().all(|answer| answer.status == Status::Ok), "nobody else holds a task");
        let mark = answers.iter().map(|answer| answer.mark).min().expect("a job has partitions");
        let incarnations = vec![LIFE; answers.len()].into();
        Ok(Fence::Held { mark, generation: Generation::default(), incarnations })
    }

    fn pull(&mut self, keys: &Keys, mode: PullMode, into: &mut Pulled) -> Result<()> {
        let model = self.0.model();
        into.versions.resize(model.partitions as usize, 0);
        into.rows.resize_with(model.shape.tables.len(), Vec::new);
        for (rows, table) in into.rows.iter_mut().zip(&model.shape.tables) {
            rows.resize(keys.unique() * table.width(), 0.0);
        }
        into.tensors.resize_with(model.shape.tensors.len(), Vec::new);
        for id in self.ids() {
            let part = keys.part(id);
            let ids = &keys.ids()[part.clone()];
            let pull = |partition: &mut Partition| {
                into.versions[id.0 as usize] = partition.version();
                for (table, rows) in into.rows.iter_mut().enumerate() {
                    let width = model.shape.tables[table].width();
                    let out = &mut rows[part.start * width..part.end * width];
                    partition.pull(table, ids, out).expect(FITS);
                }
                let tensors = model.tensors_of(id).expect(HERE);
                for (tensor, &place) in partition.tensors().iter().zip(tensors).filter(|_| mode.tensors) {
                    into.tensors[place].clear();
                    into.tensors[place].extend_from_slice(tensor.values());
                }
            };
            self.0.with(id, pull).expect(HERE);
        }
        Ok(())
    }

    fn push(&mut self, push: &Push<'_>) -> Result<Pushed> {
        let model = self.0.model();
        for id in self.ids() {
            let part = push.keys.part(id);
            let ids = &push.keys.ids()[part.clone()];
            let tables: Vec<RowGradients<'_>> = push
                .gradients
                .tables
                .iter()
                .zip(model.shape.tables.iter().map(TableShape::width))
                .map(|(all, width)| RowGradients {
                    ids,
                    gradients: &all[part.start * width..part.end * width],
                })
                .collect();
            let tensors = model.tensors_of(id).expect(HERE);
            let tensors: Vec<&[f32]> = tensors.iter().map(|&t| &push.gradients.tensors[t][..]).collect();
            let own = partition::Push {
                header: push.header,
                incarnation: LIFE,
                version: push.versions[id.0 as usize],
                tables: &tables,
                tensors: &tensors,
            };
            let answer = self.0.with(id, |p| p.push(&own)).expect(HERE).expect(FITS);
            assert_eq!(answer.status, Status::Ok, "each batch counts once");
        }
        Ok(Pushed::Applied)
    }

    fn admit(&mut self, _: Batch, _: Generation, _: u64) -> Result<Gated> {
        unreachable!("the job has no gate")
    }

    fn look(&mut self, _: Generation, _: u64, _: Level) -> Result<Gated> {
        unreachable!("the job has no gate")
    }

    fn stage(&mut self, _: &Push<'_>, _: Permit) -> Result<Pushed> {
        unreachable!("the job has no steps")
    }

    fn commit_step(&mut self, _: &Decision, _: Generation, _: Level) -> Result<Pushed> {
        unreachable!("the job has no steps")
    }

    fn give_back(&mut self, _: Permit, _: Option<Pushed>) -> Result<()> {
        unreachable!("the job has no gate")
    }
}
