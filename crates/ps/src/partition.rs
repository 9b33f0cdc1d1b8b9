//! A partition: its part of all tables and tensors, and which batches went into it.
//!
//! This is the type that a server serves and that the simulator drives. It does no IO, takes no lock and
//! reads no clock; one caller at a time. A push is all or nothing: whatever can be wrong with it is found
//! before the first row changes, and rows, mark, version and audit change in one place.

pub mod copy;
mod cut;
mod stage;
mod steps;

use std::sync::Arc;

use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::{LeaseId, PartitionId, Purpose, TableShape, TableSpec, TaskId};
use elasticdl_wire::ps::{Answer, PushHeader, Status};

use self::stage::Stage;
use self::steps::Steps;
use crate::audit::Audit;
use crate::closed::Closed;
use crate::error::{Error, Result};
use crate::gate::Policy;
use crate::marks::Marks;
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::staleness::Staleness;
use crate::table::Table;
use crate::tensor::Tensor;

/// A part of a model, with the marks of the batches that made it what it is.
#[derive(Debug)]
pub struct Partition {
    id: PartitionId,
    incarnation: u64,
    model: Arc<Model>,
    /// The optimizer of rows, and that of tensors.
    optimizer: Optimizer,
    optimizer_of_tensors: Optimizer,
    /// All tables of the model, in its order; each holds the rows that live here.
    tables: Vec<Table>,
    /// The tensors that live here, in the order of the model.
    tensors: Vec<Tensor>,
    memory: Memory,
    /// What waits to be committed. It is not remembered: no checkpoint holds it.
    stage: Stage,
    steps: Steps,
    /// How stale the gradients were that this life of it has applied.
    staleness: Staleness,
    /// Another server has taken it over.
    handed_over: bool,
    /// The number of the last copy that another server has begun to make.
    copy: u64,
    /// How many floats were read or changed in this life of it.
    load: u64,
    /// The checkpoint whose rows are being taken away.
    cutting: Option<u64>,
}

/// What a partition remembers besides rows and tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// Which batches were applied.
    pub marks: Marks,
    /// The same, counted where rows changed.
    pub audit: Audit,
    /// How many pushes were applied.
    pub version: u64,
}

/// The gradients of one batch for one partition.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// Which batch, and by what right.
    pub header: PushHeader,
    /// The incarnation that the worker believes in.
    pub incarnation: u64,
    /// How many pushes the partition had applied when the batch was pulled.
    pub version: u64,
    /// Rows' gradients for every table of the model; a table that nothing touches comes with no ids.
    pub tables: &'a [RowGradients<'a>],
    /// Gradients of the tensors that live here.
    pub tensors: &'a [&'a [f32]],
}

/// Gradients of some rows of one table.
#[derive(Debug, Clone, Copy)]
pub struct RowGradients<'a> {
    /// The rows.
    pub ids: &'a [u64],
    /// Their gradients, one after the other.
    pub gradients: &'a [f32],
}

impl Partition {
    /// A partition in which nothing has happened.
    pub fn new(model: Arc<Model>, id: PartitionId, incarnation: u64) -> Self {
        let tensors = model.tensors_of(id).expect("a partition's number is below their count");
        let optimizer = Optimizer::new(model.optimizer);
        let optimizer_of_tensors = optimizer.of_tensors();
        let table = |(shape, spec): (&TableShape, &TableSpec)| {
            Table::new(shape.clone(), model.seed, &optimizer).with(*spec, model.partitions)
        };
        let (shape, seed) = (&model.shape, model.seed);
        Partition {
            id,
            incarnation,
            tables: shape.tables.iter().zip(model.tables()).map(table).collect(),
            tensors: tensors
                .iter()
                .map(|i| Tensor::new(shape.tensors[*i].clone(), seed, &optimizer_of_tensors))
                .map(|tensor| if gathers(&model) { tensor.gathering() } else { tensor })
                .collect(),
            memory: Memory::default(),
            stage: Stage::default(),
            steps: Steps::default(),
            staleness: Staleness::default(),
            handed_over: false,
            copy: 0,
            load: 0,
            cutting: None,
            optimizer,
            optimizer_of_tensors,
            model,
        }
    }

    /// Which partition it is.
    pub fn id(&self) -> PartitionId {
        self.id
    }

    /// Which life of it.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// How many pushes were applied.
    pub fn version(&self) -> u64 {
        self.memory.version
    }

    /// How stale the gradients were that this life of it has applied.
    pub fn staleness(&self) -> &Staleness {
        &self.staleness
    }

    /// How much work it was in this life: floats that were read or changed.
    pub fn load(&self) -> u64 {
        self.load
    }

    /// The model it is a part of.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The tables, in the order of the model.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The tensors that live here, in the order of the model.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Marks, audit and version.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Everything that a checkpoint brings back, to be filled in before the partition serves.
    pub(crate) fn restoring(&mut self) -> (&mut [Table], &mut [Tensor], &mut Memory) {
        (&mut self.tables, &mut self.tensors, &mut self.memory)
    }

    /// Whether a request is meant for this life of the partition: `Ok` or `WrongIncarnation`.
    pub fn admit(&self, incarnation: u64) -> Status {
        match incarnation == self.incarnation && !self.handed_over {
            true => Status::Ok,
            false => Status::WrongIncarnation,
        }
    }

    /// Leases below `floor` are refused from now on, whatever their task.
    pub fn refuse_leases_below(&mut self, floor: LeaseId) {
        self.memory.marks.raise_floor(floor);
    }

    /// Copies rows of a table to `out`; unknown ones are born.
    pub fn pull(&mut self, table: usize, ids: &[u64], out: &mut [f32]) -> Result<()> {
        self.check_ids(table, ids)?;
        self.load += out.len() as u64;
        self.tables[table].pull(ids, out);
        Ok(())
    }

    /// Copies rows of a table to `out`; unknown ones come as zeros and stay unborn.
    pub fn read(&self, table: usize, ids: &[u64], out: &mut [f32]) {
        self.tables[table].read(ids, out);
    }

    /// A worker holds `task` by `lease` now: raises the fence and tells the mark, unless a newer lease
    /// was seen.
    pub fn fence(&mut self, task: TaskId, lease: LeaseId, incarnation: u64) -> Result<Answer> {
        self.check_purpose(task)?;
        let (status, mark) = match self.admit(incarnation) {
            Status::Ok => self.memory.marks.fence(task, lease),
            other => (other, 0),
        };
        Ok(self.answer(status, mark))
    }

    /// Applies a batch if its turn has come, and tells what became of it.
    ///
    /// # Errors
    ///
    /// What does not fit the model and what is not finite is refused as a whole: nothing changes, the
    /// mark stays.
    pub fn push(&mut self, push: &Push<'_>) -> Result<Answer> {
        let judged = self.judge(push)?;
        if judged.status != Status::Ok {
            return Ok(judged);
        }
        let mark = self.apply(push);
        Ok(self.answer(Status::Ok, mark))
    }

    /// Whether the turn of a batch has come; `Ok` only where nothing is wrong with it. In any case its
    /// lease is known from now on.
    fn judge(&mut self, push: &Push<'_>) -> Result<Answer> {
        let PushHeader { task, batch, lease, .. } = push.header;
        self.check_purpose(task)?;
        self.check_shape(push)?;
        if self.admit(push.incarnation) != Status::Ok {
            return Ok(self.answer(Status::WrongIncarnation, 0));
        }
        let (status, mark) = self.memory.marks.judge(task, batch, lease);
        let status = if status == Status::Ok && self.is_too_stale(push) { Status::Stale } else { status };
        if status == Status::Ok {
            self.check_values(push)?;
        }
        // A gap or a duplicate under a newer lease tells of that lease all the same.
        self.memory.marks.fence(task, lease);
        Ok(self.answer(status, mark))
    }

    /// Whether more were applied since the batch was pulled than the job allows.
    fn is_too_stale(&self, push: &Push<'_>) -> bool {
        let version = self.memory.version;
        match self.model.policy {
            Some(Policy::Bounded(most)) => version.saturating_sub(push.version) > most,
            // Rows may be stale. Tensors are those of the pull as long as they have not moved.
            Some(Policy::Rounds(_)) => {
                self.tensors.first().is_some_and(|tensor| push.version + tensor.gathered() < version)
            }
            Some(Policy::Steps(_)) | None => false,
        }
    }

    /// No more batches come: what is gathered and too little for a round is applied all the same.
    pub fn settle(&mut self) {
        self.tensors.iter_mut().for_each(|tensor| tensor.apply_gathered(&self.optimizer_of_tensors));
    }

    /// Committed checkpoints cover these tasks: their marks shrink to the closed set.
    pub fn close(&mut self, tasks: impl IntoIterator<Item = TaskId>) {
        for task in tasks {
            assert_eq!(task.purpose, Purpose::Train, "only training tasks have marks");
            self.memory.marks.close(task);
        }
    }

    /// The same for all tasks of a closed set, which may hold those that were closed before.
    pub fn close_all(&mut self, covered: &Closed) {
        self.memory.marks.close_all(covered);
    }

    fn apply(&mut self, push: &Push<'_>) -> u64 {
        let PushHeader { records, factor: whole, .. } = push.header;
        let staleness = self.memory.version.saturating_sub(push.version);
        self.staleness.count(staleness);
        let factor = if self.model.modulates { whole / staleness.max(1) as f32 } else { whole };
        // A batch of which every record was set aside teaches nothing, and moves the mark all the same.
        let teaches = records > 0;
        match self.model.policy {
            Some(Policy::Rounds(size)) => {
                if teaches {
                    self.learn(push.tables, &[], factor);
                }
                for (tensor, gradient) in self.tensors.iter_mut().zip(push.tensors) {
                    tensor.gather(teaches.then_some(gradient), whole);
                    if tensor.gathered() >= size {
                        tensor.apply_gathered(&self.optimizer_of_tensors);
                    }
                }
            }
            _ if teaches => self.learn(push.tables, push.tensors, factor),
            _ => {}
        }
        self.count(&push.header)
    }

    /// Rows and tensors learn; [`Partition::count`] follows for each batch that is in them.
    fn learn(&mut self, tables: &[RowGradients<'_>], tensors: &[&[f32]], factor: f32) {
        for (table, rows) in self.tables.iter_mut().zip(tables) {
            self.load += rows.gradients.len() as u64;
            table.push(rows.ids, rows.gradients, &self.optimizer, factor);
        }
        for (tensor, gradient) in self.tensors.iter_mut().zip(tensors) {
            // Once for the pull that comes with every batch, and once for this.
            self.load += 2 * gradient.len() as u64;
            tensor.push(gradient, &self.optimizer_of_tensors, factor);
        }
    }

    /// The only place where mark, version and audit change: a batch is applied. Tells the new mark.
    fn count(&mut self, header: &PushHeader) -> u64 {
        let PushHeader { task, batch, lease, records, .. } = *header;
        self.memory.audit.count(task, batch, records);
        self.memory.version += 1;
        self.memory.marks.fence(task, lease);
        let mark = self.memory.marks.advance(task);
        assert_eq!(mark, batch + 1, "only the batch at the mark is applied");
        mark
    }

    fn answer(&self, status: Status, mark: u64) -> Answer {
        Answer { partition: self.id, status, mark, version: self.memory.version }
    }

    fn check_purpose(&self, task: TaskId) -> Result<()> {
        match task.purpose {
            Purpose::Train => Ok(()),
            Purpose::Evaluate => Err(self.misfit(format!("{task} is no training task and changes nothing"))),
        }
    }

    fn check_shape(&self, push: &Push<'_>) -> Result<()> {
        if push.tables.len() != self.tables.len() || push.tensors.len() != self.tensors.len() {
            return Err(self.misfit(format!(
                "gradients of {} tables and {} tensors, where {} and {} live",
                push.tables.len(),
                push.tensors.len(),
                self.tables.len(),
                self.tensors.len()
            )));
        }
        for (i, (table, rows)) in self.tables.iter().zip(push.tables).enumerate() {
            let due = rows.ids.len() * table.shape().width();
            if rows.gradients.len() != due {
                let name = &table.shape().name;
                return Err(
                    self.misfit(format!("{} floats for table {name:?}, {due} due", rows.gradients.len()))
                );
            }
            self.check_ids(i, rows.ids)?;
        }
        for (tensor, gradient) in self.tensors.iter().zip(push.tensors) {
            let (name, due) = (&tensor.shape().name, tensor.values().len());
            if gradient.len() != due {
                return Err(self.misfit(format!("{} floats for tensor {name:?}, {due} due", gradient.len())));
            }
        }
        Ok(())
    }

    /// A row in the wrong partition would never be found again.
    fn check_ids(&self, table: usize, ids: &[u64]) -> Result<()> {
        let partitions = self.model.partitions;
        match ids.iter().find(|id| partition_of_row(**id, partitions) != self.id) {
            None => Ok(()),
            Some(id) => {
                let name = &self.tables[table].shape().name;
                let place = partition_of_row(*id, partitions);
                Err(self.misfit(format!("row {id} of table {name:?} lives in {place}")))
            }
        }
    }

    fn check_values(&self, push: &Push<'_>) -> Result<()> {
        let refused = |of: String| Error::NotFinite {
            task: push.header.task,
            batch: push.header.batch,
            partition: self.id,
            of,
        };
        for (table, rows) in self.tables.iter().zip(push.tables) {
            if !all_finite(rows.gradients) {
                return Err(refused(format!("table {:?}", table.shape().name)));
            }
        }
        for (tensor, gradient) in self.tensors.iter().zip(push.tensors) {
            if !all_finite(gradient) {
                return Err(refused(format!("tensor {:?}", tensor.shape().name)));
            }
        }
        Ok(())
    }

    fn misfit(&self, reason: String) -> Error {
        Error::Misfit { partition: self.id, reason }
    }
}

/// Whether tensors' gradients are gathered before they are applied.
fn gathers(model: &Model) -> bool {
    matches!(model.policy, Some(Policy::Rounds(_)))
}

/// Looks at every float without stopping at the first bad one: that way it is done many at a time.
fn all_finite(floats: &[f32]) -> bool {
    floats.iter().fold(true, |finite, x| finite & x.is_finite())
}

#[cfg(test)]
mod tests;
