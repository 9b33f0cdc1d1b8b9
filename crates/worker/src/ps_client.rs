//! The parameter servers over TCP: [`PsClient`], a [`Store`] that blocks.
//!
//! A worker has two of them, one for pulls and one for pushes, each with a connection of its own to every
//! server, so that a large push does not delay the next pull. Both share a [`Directory`]. Nothing here
//! decides what a lost task or a changed incarnation means for the training: it is told.

mod directory;
mod gate;
mod links;
mod staged;

use std::sync::Arc;

use elasticdl_spec::placement::partition_of_tensor;
use elasticdl_spec::{LeaseId, ModelShape, PartitionId, Precision, TablesSpec, TaskId};
use elasticdl_wire::connection::{Caller, Who};
use elasticdl_wire::floats;
use elasticdl_wire::frame::{Frame, Payload};
use elasticdl_wire::gate::{self as gate_frames, Batch, Decision};
use elasticdl_wire::ps::{self, Answer, Commit, PullMode, Status, kind};
use elasticdl_wire::{Identity, Token};

use self::gate::Question;
use self::links::{Ask, Asked, Fill, Links, Pending, Whom};
use crate::dedup::Keys;
use crate::error::Result;
use crate::stop::{Level, Stop};
use crate::store::{Fence, Gated, Generation, Permit, Pulled, Push, Pushed, Store};

pub use self::directory::{Directory, Place, Places, Topology};

/// What a client needs to know.
#[derive(Clone)]
pub struct Config {
    /// The model as the servers see it.
    pub shape: Arc<ModelShape>,
    /// What the job says of single tables.
    pub tables: TablesSpec,
    /// How many partitions the job has.
    pub partitions: u32,
    /// Where they are.
    pub directory: Arc<Directory>,
    /// The job's token.
    pub token: Token,
    /// The job's certificate; plain without one.
    pub identity: Option<Identity>,
    /// Who asks.
    pub worker: u32,
    /// Whether a step is staged on all partitions before it is committed on any.
    pub staged: bool,
    /// Ends every wait.
    pub stop: Stop,
}

/// One thread's client of all servers.
pub struct PsClient {
    codec: Arc<Codec>,
    links: Links,
    staged: bool,
}

impl PsClient {
    /// A client that connects when first used.
    pub fn new(config: Config) -> Self {
        let Config { shape, tables, partitions, directory, token, identity, worker, staged, stop } = config;
        let codec = Arc::new(Codec::new(shape, &tables, partitions));
        let caller = Caller { token, identity, who: Who::Worker(worker) };
        PsClient { codec, links: Links::new(directory, caller, stop), staged }
    }
}

impl Store for PsClient {
    fn fence(&mut self, task: TaskId, lease: LeaseId) -> Result<Fence> {
        loop {
            let generation = self.links.generation();
            let asking = Asking {
                attempt: "raising a task's fence",
                answer: kind::FENCED,
                until: Level::Draining,
                within: generation,
            };
            let fill = &mut |frame: &mut Frame, request, parts: &[_]| {
                ps::fence(frame, request, task, lease, parts);
            };
            // Answers of lives that ended meanwhile say nothing about those that are now.
            let Some(answers) = self.answers(asking, fill)? else { continue };
            if answers.iter().any(|answer| answer.status == Status::Fenced) {
                return Ok(Fence::Lost);
            }
            let mut mark = answers.iter().map(|answer| answer.mark).min().unwrap_or(u64::MAX);
            if self.staged
                && let Some(batch) = staged::half_committed(&answers)
            {
                match self.finish(Commit { task, batch, lease }, generation)? {
                    Pushed::Applied => mark = batch + 1,
                    Pushed::Redo => continue,
                    Pushed::Lost => return Ok(Fence::Lost),
                }
            }
            return Ok(Fence::Held { mark, generation, incarnations: self.links.incarnations() });
        }
    }

    fn admit(&mut self, batch: Batch, within: Generation, committed: u64) -> Result<Gated> {
        let (attempt, ask, until) =
            ("asking to begin a batch", gate_frames::Ask::Admit(batch), Level::Draining);
        self.ask_gate(Question { attempt, ask, until, within: Some(within), committed })
    }

    fn look(&mut self, within: Generation, committed: u64, until: Level) -> Result<Gated> {
        let (attempt, ask) = ("asking what was decided", gate_frames::Ask::Look);
        self.ask_gate(Question { attempt, ask, until, within: Some(within), committed })
    }

    fn stage(&mut self, push: &Push<'_>, permit: Permit) -> Result<Pushed> {
        self.stage_for_step(push, permit)
    }

    fn commit_step(&mut self, step: &Decision, within: Generation, until: Level) -> Result<Pushed> {
        self.apply_step(step, within, until)
    }

    fn give_back(&mut self, permit: Permit, became: Option<Pushed>) -> Result<()> {
        self.give_permit_back(permit, became)
    }

    fn pull(&mut self, keys: &Keys, mode: PullMode, into: &mut Pulled) -> Result<()> {
        self.codec.make_room(keys, into);
        let codec = &self.codec;
        self.links.ask(Ask {
            whom: Whom::All,
            attempt: "pulling",
            answer: kind::PULLED,
            until: Level::Draining,
            within: None,
            fill: &mut |frame, request, parts| codec.put_pull(frame, request, mode, parts, keys),
            take: &mut |payload, pending| codec.take_pulled(payload, mode, pending, keys, into),
        })?;
        Ok(())
    }

    fn push(&mut self, push: &Push<'_>) -> Result<Pushed> {
        if self.staged {
            return self.push_staged(push);
        }
        let codec = Arc::clone(&self.codec);
        self.land("pushing", push.generation, &mut |frame, request, parts| {
            ps::begin_push(frame, request, push.header, parts.len());
            codec.put_gradients(frame, parts, push);
        })
    }
}

/// A request that every partition answers with a status and a mark.
#[derive(Clone, Copy)]
struct Asking {
    attempt: &'static str,
    answer: u32,
    until: Level,
    within: Generation,
}

impl PsClient {
    /// Asks until every partition has answered; `None` where one has another life than `within` allows.
    fn answers(&mut self, asking: Asking, fill: &mut Fill<'_>) -> Result<Option<Vec<Answer>>> {
        let Asking { attempt, answer, until, within } = asking;
        let mut answers = vec![None; self.codec.partitions as usize];
        let asked = self.links.ask(Ask {
            whom: Whom::All,
            attempt,
            answer,
            until,
            within: Some(within),
            fill,
            take: &mut |payload, pending| {
                for answer in ps::take_answers(payload)? {
                    pending.check(answer.partition)?;
                    if !away(answer.status) {
                        pending.answered(answer.partition);
                        answers[answer.partition.0 as usize] = Some(answer);
                    }
                }
                Ok(())
            },
        })?;
        Ok((asked == Asked::Answered).then(|| answers.into_iter().flatten().collect()))
    }

    /// Has a batch applied, or staged, by every partition.
    fn land(&mut self, attempt: &'static str, within: Generation, fill: &mut Fill<'_>) -> Result<Pushed> {
        let asking = Asking { attempt, answer: kind::PUSHED, until: Level::Stopped, within };
        let Some(answers) = self.answers(asking, fill)? else { return Ok(Pushed::Redo) };
        let any = |status| answers.iter().any(|answer| answer.status == status);
        Ok(if any(Status::Fenced) {
            Pushed::Lost
        } else if any(Status::Gap) || any(Status::NotStaged) || any(Status::Stale) {
            Pushed::Redo
        } else {
            Pushed::Applied
        })
    }
}

/// Whether the partition is to be looked for again.
fn away(status: Status) -> bool {
    matches!(status, Status::WrongIncarnation | Status::NotHere)
}

/// Turns keys and gradients into payloads and back, by the model's shape.
struct Codec {
    shape: Arc<ModelShape>,
    partitions: u32,
    /// By partition: the tensors that live there, in shape order.
    tensors: Vec<Vec<usize>>,
    /// By table: floats per row, and how they travel.
    widths: Vec<usize>,
    precisions: Vec<Precision>,
}

impl Codec {
    fn new(shape: Arc<ModelShape>, tables_spec: &TablesSpec, partitions: u32) -> Self {
        let mut tensors = vec![vec![]; partitions as usize];
        for (i, tensor) in shape.tensors.iter().enumerate() {
            tensors[partition_of_tensor(&tensor.name, partitions).0 as usize].push(i);
        }
        let widths = shape.tables.iter().map(|table| table.width()).collect();
        let precisions = shape.tables.iter().map(|table| tables_spec.of(&table.name).wire).collect();
        Codec { shape, partitions, tensors, widths, precisions }
    }

    fn tensors_of(&self, partition: PartitionId) -> &[usize] {
        &self.tensors[partition.0 as usize]
    }

    fn make_room(&self, keys: &Keys, into: &mut Pulled) {
        assert_eq!(keys.partitions(), self.partitions as usize, "keys are dealt to the job's partitions");
        into.versions.resize(self.partitions as usize, 0);
        into.rows.resize_with(self.widths.len(), Vec::new);
        for (rows, width) in into.rows.iter_mut().zip(&self.widths) {
            rows.resize(keys.unique() * width, 0.0);
        }
        into.tensors.resize_with(self.shape.tensors.len(), Vec::new);
        for (values, tensor) in into.tensors.iter_mut().zip(&self.shape.tensors) {
            values.resize(tensor.len(), 0.0);
        }
    }

    fn put_pull(
        &self,
        frame: &mut Frame,
        request: u64,
        mode: PullMode,
        parts: &[(PartitionId, u64)],
        keys: &Keys,
    ) {
        ps::begin_pull(frame, request, mode, parts.len());
        for &(partition, incarnation) in parts {
            ps::put_part(frame, partition, incarnation);
            for _ in &self.widths {
                ps::put_ids(frame, &keys.ids()[keys.part(partition)]);
            }
        }
    }

    fn take_pulled(
        &self,
        mut payload: Payload<'_>,
        mode: PullMode,
        pending: &mut Pending,
        keys: &Keys,
        into: &mut Pulled,
    ) -> elasticdl_wire::Result<()> {
        for _ in 0..payload.take_count(3)? {
            let partition = ps::take_partition(&mut payload)?;
            let status = Status::from_word(payload.take()?)?;
            let version = payload.take()?;
            pending.check(partition)?;
            if status != Status::Ok {
                continue;
            }
            into.versions[partition.0 as usize] = version;
            let part = keys.part(partition);
            for ((rows, width), precision) in into.rows.iter_mut().zip(&self.widths).zip(&self.precisions) {
                floats::take(&mut payload, *precision, &mut rows[part.start * width..part.end * width])?;
            }
            if mode.tensors {
                for &tensor in self.tensors_of(partition) {
                    let pulled = payload.take_floats(into.tensors[tensor].len())?;
                    into.tensors[tensor].copy_from_slice(pulled);
                }
            }
            pending.answered(partition);
        }
        payload.end()
    }

    /// Puts the parts of a PUSH or STAGE.
    fn put_gradients(&self, frame: &mut Frame, parts: &[(PartitionId, u64)], push: &Push<'_>) {
        for &(partition, incarnation) in parts {
            ps::put_part(frame, partition, incarnation);
            frame.put(push.versions[partition.0 as usize]);
            let part = push.keys.part(partition);
            let gradients = push.gradients.tables.iter().zip(&self.widths).zip(&self.precisions);
            for ((gradients, width), precision) in gradients {
                ps::put_ids(frame, &push.keys.ids()[part.clone()]);
                floats::put(frame, *precision, &gradients[part.start * width..part.end * width]);
            }
            for &tensor in self.tensors_of(partition) {
                frame.put_floats(&push.gradients.tensors[tensor]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
