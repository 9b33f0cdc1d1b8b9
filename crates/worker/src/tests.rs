//! For tests: parameter servers in memory that follow the rules of the protocol, a small model, records.
//!
//! [`World`] holds the partitions; [`MemoryStore`] is a [`Store`] on it without sockets, and
//! `tests/server.rs` serves it over frames. Rows learn by plain descent with a step of 1.

mod chaos;
mod deterministic;
mod gated;
mod optimizers;
mod server;
mod source;
mod tables;
mod tls;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use elasticdl_nn::{Gradients, Input, Model};
use elasticdl_spec::mix::{Rng, mix2};
use elasticdl_spec::placement::partition_of_tensor;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{
    Initializer, LeaseId, ModelShape, PartitionId, Position, Shard, TableShape, TaskId, TensorShape,
};
use elasticdl_wire::gate::{Batch, Decision};
use elasticdl_wire::ps::{Answer, PullMode, PushHeader, Status};

use crate::dedup::Keys;
use crate::error::{Error, Result};
use crate::stop::Level;
use crate::store::{Fence, Gated, Generation, Permit, Pulled, Push, Pushed, Store};
use crate::task::{Claim, Leased, LeasedTask};

pub(crate) use self::server::{FakeServer, Fault};
pub(crate) use self::source::{RECORDS, Spoil, ToySource};

pub(crate) const PARTITIONS: u32 = 3;
pub(crate) const FIELDS: usize = 4;
pub(crate) const NUMBERS: usize = 2;

/// A lease of the first master.
pub(crate) fn lease(n: u64) -> LeaseId {
    LeaseId { term: 1, n }
}

/// A leased task without a file.
pub(crate) fn leased(task: TaskId, n: u64) -> Arc<LeasedTask> {
    leased_at(task, n, Position::default())
}

/// A leased task without a file, at its place in the job.
pub(crate) fn leased_at(task: TaskId, n: u64, position: Position) -> Arc<LeasedTask> {
    let shard = Shard { path: "none".into(), first: 0, records: None, offset: 0, fingerprint: 0 };
    let leased = Leased::new(Claim { task, lease: lease(n) }, shard);
    Arc::new(LeasedTask::new(Leased { position, ..leased }))
}

/// One table of width 2, a bias and a weight per number.
pub(crate) fn shape() -> ModelShape {
    let init = Initializer::Uniform { bound: 0.1 };
    let tensor = |name: &str, len| TensorShape { name: name.into(), shape: vec![len], init };
    ModelShape {
        tables: vec![TableShape { name: "rows".into(), parts: vec![RowPart { width: 2, init }] }],
        tensors: vec![tensor("bias", 1), tensor("weights", NUMBERS)],
    }
}

/// One partition, in one life.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakePartition {
    pub incarnation: u64,
    pub version: u64,
    /// By task: the highest lease and the mark.
    pub marks: BTreeMap<TaskId, (LeaseId, u64)>,
    pub rows: BTreeMap<u64, Vec<f32>>,
    pub tensors: BTreeMap<usize, Vec<f32>>,
    /// Every batch that changed something here, in order.
    pub applied: Vec<(TaskId, u64)>,
    pub records: u64,
}

/// What was asked of the world, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Fence(TaskId),
    Pull,
    Push(TaskId, u64),
}

/// All partitions.
#[derive(Debug)]
pub(crate) struct World {
    pub shape: ModelShape,
    pub partitions: Vec<FakePartition>,
    pub ops: Vec<Op>,
    /// What happens when so many frames have come.
    pub troubles: BTreeMap<u64, Trouble>,
    pub frames: u64,
    saved: Vec<FakePartition>,
}

/// What a server's frames may meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// All partitions are saved.
    Save,
    /// A partition dies, and comes back as it was saved.
    Kill(usize),
}

impl World {
    pub fn new(shape: ModelShape) -> Self {
        assert_eq!(shape.tables.len(), 1, "the models that ship have one table");
        let mut partitions =
            vec![FakePartition { incarnation: 1, ..Default::default() }; PARTITIONS as usize];
        for (i, tensor) in shape.tensors.iter().enumerate() {
            let home = partition_of_tensor(&tensor.name, PARTITIONS).0 as usize;
            partitions[home].tensors.insert(i, tensor.init_values(7));
        }
        let saved = partitions.clone();
        World { shape, partitions, ops: vec![], troubles: BTreeMap::new(), frames: 0, saved }
    }

    /// A frame has come: time for trouble?
    pub fn frame(&mut self) {
        self.frames += 1;
        match self.troubles.remove(&self.frames) {
            Some(Trouble::Save) => self.saved.clone_from(&self.partitions),
            Some(Trouble::Kill(partition)) => {
                let saved = self.saved[partition].clone();
                self.restore(partition, &saved);
            }
            None => {}
        }
    }

    pub fn shared() -> Arc<Mutex<World>> {
        Arc::new(Mutex::new(World::new(shape())))
    }

    /// The partition dies and comes back as it was in `saved`.
    pub fn restore(&mut self, partition: usize, saved: &FakePartition) {
        let incarnation = self.partitions[partition].incarnation + 1;
        self.partitions[partition] = FakePartition { incarnation, ..saved.clone() };
    }

    pub fn fence(&mut self, at: PartitionId, incarnation: u64, task: TaskId, lease: LeaseId) -> Answer {
        let partition = &mut self.partitions[at.0 as usize];
        let answer = |status, mark| Answer { partition: at, status, mark, version: 0 };
        if partition.incarnation != incarnation {
            return answer(Status::WrongIncarnation, 0);
        }
        let (highest, mark) = partition.marks.entry(task).or_insert((lease, 0));
        if lease < *highest {
            return answer(Status::Fenced, *mark);
        }
        *highest = lease;
        answer(Status::Ok, *mark)
    }

    /// The row of this id; zeros for one that is not born.
    pub fn row(&mut self, at: PartitionId, id: u64, births: bool) -> Vec<f32> {
        let table = &self.shape.tables[0];
        let rows = &mut self.partitions[at.0 as usize].rows;
        if !births && !rows.contains_key(&id) {
            return vec![0.0; table.width()];
        }
        let born = || {
            let mut row = vec![0.0; table.width()];
            table.init_row(7, id, &mut row);
            row
        };
        rows.entry(id).or_insert_with(born).clone()
    }

    /// Applies a partition's part of a push, by the rules.
    pub fn push(
        &mut self,
        at: PartitionId,
        incarnation: u64,
        header: PushHeader,
        (ids, gradients): (&[u64], &[f32]),
        tensors: &[(usize, &[f32])],
    ) -> Answer {
        let partition = &mut self.partitions[at.0 as usize];
        let PushHeader { task, batch, lease, records, .. } = header;
        let answer = |status, mark, version| Answer { partition: at, status, mark, version };
        if partition.incarnation != incarnation {
            return answer(Status::WrongIncarnation, 0, 0);
        }
        let (highest, mark) = partition.marks.entry(task).or_insert((lease, 0));
        if lease < *highest {
            return answer(Status::Fenced, *mark, partition.version);
        }
        *highest = lease;
        if batch != *mark {
            let status = if batch < *mark { Status::Duplicate } else { Status::Gap };
            return answer(status, *mark, partition.version);
        }
        *mark += 1;
        let mark = *mark;
        partition.version += 1;
        partition.records += records;
        partition.applied.push((task, batch));
        let width = self.shape.tables[0].width();
        for (id, gradient) in ids.iter().zip(gradients.chunks_exact(width)) {
            let row = partition.rows.get_mut(id).expect("a row is pulled before it is pushed");
            row.iter_mut().zip(gradient).for_each(|(w, g)| *w -= g);
        }
        for (tensor, gradient) in tensors {
            let values = partition.tensors.get_mut(tensor).expect("a tensor lives where it is pushed");
            values.iter_mut().zip(*gradient).for_each(|(w, g)| *w -= g);
        }
        answer(Status::Ok, mark, partition.version)
    }
}

/// Something to do just before the n-th push reaches the world.
pub(crate) type OnPush = Box<dyn FnMut(&mut World, PushHeader) + Send>;

/// The world without sockets.
pub(crate) struct MemoryStore {
    pub world: Arc<Mutex<World>>,
    pub on_push: Option<OnPush>,
}

impl MemoryStore {
    pub fn new(world: &Arc<Mutex<World>>) -> Box<Self> {
        Box::new(MemoryStore { world: Arc::clone(world), on_push: None })
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
}

fn generation(world: &World) -> Generation {
    Generation(world.partitions.iter().map(|p| p.incarnation).sum())
}

fn parts(world: &World) -> Vec<(PartitionId, u64)> {
    (0..).map(PartitionId).zip(world.partitions.iter().map(|p| p.incarnation)).collect()
}

impl Store for MemoryStore {
    fn fence(&mut self, task: TaskId, lease: LeaseId) -> Result<Fence> {
        let mut world = self.world();
        world.ops.push(Op::Fence(task));
        let answers: Vec<Answer> =
            parts(&world).into_iter().map(|(p, i)| world.fence(p, i, task, lease)).collect();
        if answers.iter().any(|a| a.status == Status::Fenced) {
            return Ok(Fence::Lost);
        }
        let mark = answers.iter().map(|a| a.mark).min().expect("a job has partitions");
        let incarnations = world.partitions.iter().map(|p| p.incarnation).collect();
        Ok(Fence::Held { mark, generation: generation(&world), incarnations })
    }

    fn admit(&mut self, _: Batch, _: Generation, _: u64) -> Result<Gated> {
        unreachable!("no pipeline with this store has a gate")
    }

    fn look(&mut self, _: Generation, _: u64, _: Level) -> Result<Gated> {
        unreachable!("no pipeline with this store has a gate")
    }

    fn stage(&mut self, _: &Push<'_>, _: Permit) -> Result<Pushed> {
        unreachable!("no pipeline with this store has steps")
    }

    fn commit_step(&mut self, _: &Decision, _: Generation, _: Level) -> Result<Pushed> {
        unreachable!("no pipeline with this store has steps")
    }

    fn give_back(&mut self, _: Permit, _: Option<Pushed>) -> Result<()> {
        unreachable!("no pipeline with this store has a gate")
    }

    fn pull(&mut self, keys: &Keys, mode: PullMode, into: &mut Pulled) -> Result<()> {
        let mut world = self.world();
        world.ops.push(Op::Pull);
        into.rows.resize(1, vec![]);
        into.rows[0].clear();
        into.tensors.resize(world.shape.tensors.len(), vec![]);
        into.versions.clear();
        for (p, _) in parts(&world) {
            for &id in &keys.ids()[keys.part(p)] {
                into.rows[0].extend(world.row(p, id, mode.births));
            }
            let partition = &world.partitions[p.0 as usize];
            into.versions.push(partition.version);
            for (tensor, values) in &partition.tensors {
                into.tensors[*tensor].clone_from(values);
            }
        }
        Ok(())
    }

    fn push(&mut self, push: &Push<'_>) -> Result<Pushed> {
        let mut world = self.world.lock().unwrap();
        if let Some(on_push) = &mut self.on_push {
            on_push(&mut world, push.header);
        }
        world.ops.push(Op::Push(push.header.task, push.header.batch));
        if generation(&world) != push.generation {
            return Ok(Pushed::Redo);
        }
        let mut outcome = Pushed::Applied;
        for (p, incarnation) in parts(&world) {
            let part = push.keys.part(p);
            let rows = &push.gradients.tables[0][part.start * 2..part.end * 2];
            let tensors: Vec<(usize, &[f32])> = world.partitions[p.0 as usize]
                .tensors
                .keys()
                .map(|t| (*t, push.gradients.tensors[*t].as_slice()))
                .collect();
            let answer = world.push(p, incarnation, push.header, (&push.keys.ids()[part], rows), &tensors);
            match answer.status {
                Status::Ok | Status::Duplicate => {}
                Status::Fenced => outcome = Pushed::Lost,
                Status::Gap | Status::NotStaged => outcome = Pushed::Redo,
                Status::Stale | Status::NotYet => unreachable!("no bound is set here"),
                Status::WrongIncarnation | Status::NotHere => {
                    return Err(Error::Stopped { attempt: "pushing to a partition that is away" });
                }
            }
        }
        Ok(outcome)
    }
}

/// Logistic regression over [`shape`]: a row adds its first weight, and half of its second.
pub(crate) struct ToyModel {
    shape: ModelShape,
    bias: f32,
    weights: Vec<f32>,
}

impl ToyModel {
    pub fn boxed() -> Box<dyn Model> {
        Box::new(ToyModel { shape: shape(), bias: 0.0, weights: vec![] })
    }

    fn probability(&self, input: &Input, record: usize) -> f32 {
        let index = &input.tables[0].index[record * FIELDS..][..FIELDS];
        let numeric = &input.numeric[record * NUMBERS..][..NUMBERS];
        let rows = input.tables[0].rows;
        let sparse: f32 = index.iter().map(|&i| rows[i as usize * 2] + 0.5 * rows[i as usize * 2 + 1]).sum();
        let dense: f32 = numeric.iter().zip(&self.weights).map(|(x, w)| x * w).sum();
        1.0 / (1.0 + (-(self.bias + dense + sparse)).exp())
    }
}

impl Model for ToyModel {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        self.bias = tensors[0][0];
        self.weights = tensors[1].to_vec();
    }

    fn train(&mut self, input: &Input, batch_records: usize, gradients: &mut Gradients) -> f64 {
        let mut loss = 0.0;
        for record in 0..input.records {
            let (p, label) = (self.probability(input, record), input.labels[record]);
            loss -= f64::from(if label > 0.5 { p } else { 1.0 - p }).ln();
            let slope = (p - label) / batch_records as f32;
            for &i in &input.tables[0].index[record * FIELDS..][..FIELDS] {
                gradients.tables[0][i as usize * 2] += slope;
                gradients.tables[0][i as usize * 2 + 1] += 0.5 * slope;
            }
            gradients.tensors[0][0] += slope;
            for (g, x) in gradients.tensors[1].iter_mut().zip(&input.numeric[record * NUMBERS..]) {
                *g += slope * x;
            }
        }
        loss
    }

    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>) {
        probabilities.clear();
        probabilities.extend((0..input.records).map(|record| self.probability(input, record)));
    }
}

/// Batch `index` of a task: always the same records.
pub(crate) fn batch(task: TaskId, index: u64, records: usize) -> elasticdl_data::Batch {
    let mut rng = Rng::new(mix2(task.as_u64(), index));
    let mut draw = |n: usize| (0..n).map(|_| rng.uniform() as f32).collect::<Vec<_>>();
    let numeric = draw(records * NUMBERS);
    let labels = draw(records).iter().map(|x| f32::from(u8::from(*x < 0.3))).collect();
    let ids = (0..records * FIELDS).map(|_| mix2(3, rng.below(40))).collect();
    elasticdl_data::Batch { records, labels, numeric, ids }
}
