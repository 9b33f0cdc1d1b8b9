//! The parameter servers over TCP: [`PsClient`], a [`Store`] that blocks.
//!
//! A worker has two of them, one for pulls and one for pushes, each with a connection of its own to every
//! server, so that a large push does not delay the next pull. Both share a [`Directory`]. Nothing here
//! decides what a lost task or a changed incarnation means for the training: it is told.

mod connection;
mod directory;
mod links;

use std::sync::Arc;

use elasticdl_spec::placement::partition_of_tensor;
use elasticdl_spec::{LeaseId, ModelShape, PartitionId, TaskId};
use elasticdl_wire::Token;
use elasticdl_wire::frame::{Frame, Payload};
use elasticdl_wire::ps::{self, PullMode, Status, kind};

use self::links::{Ask, Asked, Links, Pending};
use crate::dedup::Keys;
use crate::error::Result;
use crate::stop::{Level, Stop};
use crate::store::{Fence, Pulled, Push, Pushed, Store};

pub use self::directory::{Directory, Place, Places, Topology};

/// What a client needs to know.
#[derive(Clone)]
pub struct Config {
    /// The model as the servers see it.
    pub shape: Arc<ModelShape>,
    /// How many partitions the job has.
    pub partitions: u32,
    /// Where they are.
    pub directory: Arc<Directory>,
    /// The job's token.
    pub token: Token,
    /// Who asks.
    pub worker: u32,
    /// Ends every wait.
    pub stop: Stop,
}

/// One thread's client of all servers.
pub struct PsClient {
    codec: Codec,
    links: Links,
}

impl PsClient {
    /// A client that connects when first used.
    pub fn new(config: Config) -> Self {
        let Config { shape, partitions, directory, token, worker, stop } = config;
        PsClient { codec: Codec::new(shape, partitions), links: Links::new(directory, token, worker, stop) }
    }
}

impl Store for PsClient {
    fn fence(&mut self, task: TaskId, lease: LeaseId) -> Result<Fence> {
        let (mut mark, mut lost) = (u64::MAX, false);
        let asked = self.links.ask(Ask {
            attempt: "raising a task's fence",
            answer: kind::FENCED,
            until: Level::Draining,
            within: None,
            fill: &mut |frame, request, parts| ps::fence(frame, request, task, lease, parts),
            take: &mut |payload, pending| {
                for answer in ps::take_answers(payload)? {
                    pending.check(answer.partition)?;
                    if away(answer.status) {
                        continue;
                    }
                    pending.answered(answer.partition);
                    lost |= answer.status == Status::Fenced;
                    mark = mark.min(answer.mark);
                }
                Ok(())
            },
        })?;
        match asked {
            Asked::Answered(_) if lost => Ok(Fence::Lost),
            Asked::Answered(generation) => Ok(Fence::Held { mark, generation }),
            Asked::OtherGeneration => unreachable!("a fence is not bound to a generation"),
        }
    }

    fn pull(&mut self, keys: &Keys, mode: PullMode, into: &mut Pulled) -> Result<()> {
        self.codec.make_room(keys, into);
        let codec = &self.codec;
        self.links.ask(Ask {
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
        let (mut lost, mut gap) = (false, false);
        let codec = &self.codec;
        let asked = self.links.ask(Ask {
            attempt: "pushing",
            answer: kind::PUSHED,
            until: Level::Stopped,
            within: Some(push.generation),
            fill: &mut |frame, request, parts| codec.put_push(frame, request, parts, push),
            take: &mut |payload, pending| {
                for answer in ps::take_answers(payload)? {
                    pending.check(answer.partition)?;
                    if away(answer.status) {
                        continue;
                    }
                    pending.answered(answer.partition);
                    lost |= answer.status == Status::Fenced;
                    gap |= answer.status == Status::Gap;
                }
                Ok(())
            },
        })?;
        Ok(match asked {
            Asked::Answered(_) if lost => Pushed::Lost,
            Asked::Answered(_) if !gap => Pushed::Applied,
            _ => Pushed::Redo,
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
    /// By table: floats per row.
    widths: Vec<usize>,
}

impl Codec {
    fn new(shape: Arc<ModelShape>, partitions: u32) -> Self {
        let mut tensors = vec![vec![]; partitions as usize];
        for (i, tensor) in shape.tensors.iter().enumerate() {
            tensors[partition_of_tensor(&tensor.name, partitions).0 as usize].push(i);
        }
        let widths = shape.tables.iter().map(|table| table.width()).collect();
        Codec { shape, partitions, tensors, widths }
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
            for (rows, width) in into.rows.iter_mut().zip(&self.widths) {
                let rows = &mut rows[part.start * width..part.end * width];
                rows.copy_from_slice(payload.take_floats(rows.len())?);
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

    fn put_push(&self, frame: &mut Frame, request: u64, parts: &[(PartitionId, u64)], push: &Push<'_>) {
        ps::begin_push(frame, request, push.header, parts.len());
        for &(partition, incarnation) in parts {
            ps::put_part(frame, partition, incarnation);
            frame.put(push.versions[partition.0 as usize]);
            let part = push.keys.part(partition);
            for (gradients, width) in push.gradients.tables.iter().zip(&self.widths) {
                ps::put_ids(frame, &push.keys.ids()[part.clone()]);
                frame.put_floats(&gradients[part.start * width..part.end * width]);
            }
            for &tensor in self.tensors_of(partition) {
                frame.put_floats(&push.gradients.tensors[tensor]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
