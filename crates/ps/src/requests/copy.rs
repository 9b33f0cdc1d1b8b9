//! Requests of a server that copies partitions from this one and takes them over, and what it makes of the answers.

use std::collections::BTreeMap;

use elasticdl_spec::PartitionId;
use elasticdl_wire as wire;
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::{Frame, Payload};
use elasticdl_wire::ps::{self, Status, kind};

use super::Requests;
use crate::checkpoint::Head;
use crate::error::{Error, Result};
use crate::partition::Partition;
use crate::partition::copy::Copied;
use crate::partitions::Partitions;

/// Of one answer at most, whatever is asked for: a partition is locked while they are copied.
const ROWS_MAX: usize = 1 << 14;
const FLOATS_MAX: usize = 1 << 20;

/// The partitions that a connection's peer copies.
#[derive(Debug)]
pub(super) struct Copies<'p> {
    partitions: &'p Partitions,
    /// Each with its incarnation and the number of the copy.
    under_way: BTreeMap<PartitionId, (u64, u64)>,
    /// Floats of tensors that the peer has not fetched yet, as they were when it was told all else. They go in answers
    /// of their own: with their slots they may be longer than a frame, where values alone are not.
    tensors: BTreeMap<PartitionId, Vec<f32>>,
}

impl<'p> Copies<'p> {
    pub(super) fn new(partitions: &'p Partitions) -> Self {
        Copies { partitions, under_way: BTreeMap::new(), tensors: BTreeMap::new() }
    }

    /// The incarnation and the number of a copy that the peer makes; 0: it makes none.
    pub(super) fn get(&self, id: PartitionId) -> (u64, u64) {
        self.under_way.get(&id).copied().unwrap_or_default()
    }

    /// The partition is now what the peer will have: says what there is beside rows, and keeps its tensors.
    pub(super) fn put_head(&mut self, reply: &mut Frame, partition: &Partition, head: &Head) {
        reply.put_bytes(&serde_json::to_vec(head).expect("a head is JSON"));
        self.tensors.insert(head.partition, partition.tensor_floats());
    }
}

impl Drop for Copies<'_> {
    /// The peer is done, or gone: what it has taken over is needed here no more, and the rest goes on.
    fn drop(&mut self) {
        for (id, (incarnation, copy)) in std::mem::take(&mut self.under_way) {
            let taken = self.partitions.with(id, |partition| {
                let ours = partition.admit_copy(incarnation, copy) == Status::Ok;
                partition.end_copy(copy);
                ours && partition.is_handed_over()
            });
            if taken == Some(true) {
                self.partitions.let_go(id, incarnation);
            }
        }
    }
}

impl Requests<'_> {
    pub(super) fn copy(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let (id, incarnation, from_start, rows) = ps::take_copy(&mut payload)?;
        payload.end()?;
        let words_max = self.limits.words_max;
        let under_way = &mut self.copies.under_way;
        let copied = self.partitions.with(id, |partition| {
            if from_start && partition.incarnation() == incarnation && !partition.is_handed_over() {
                under_way.insert(id, (incarnation, partition.begin_copy()));
            }
            let (_, copy) = under_way.get(&id).copied().unwrap_or_default();
            match partition.admit_copy(incarnation, copy) {
                Status::Ok => {}
                other => return Err(other),
            }
            let copied = partition.copy_next(rows.min(ROWS_MAX), FLOATS_MAX.min(words_max / 2));
            Ok((copied, Left { rows: partition.unsent() as u64, version: partition.version() }))
        });
        reply.begin(kind::COPIED, request.request());
        match copied.unwrap_or(Err(Status::NotHere)) {
            Err(status) => reply.put_all(&[status.word(), 0, 0]),
            Ok((copied, left)) => {
                if left.rows > 0 {
                    failpoint::pass("ps.copied_from")
                        .map_err(|e| Error::io("having a partition copied", e))?;
                }
                reply.put_all(&[Status::Ok.word(), left.rows, left.version]);
                put_copied(reply, &copied);
            }
        }
        Ok(())
    }

    /// All of some partitions are handed over, or none: where a step is staged on one that would stay it could not be
    /// committed any more on one that has gone.
    pub(super) fn hand_over(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let parts = (0..payload.take_count(2)?).map(|_| ps::take_part(&mut payload));
        let parts = parts.collect::<wire::Result<Vec<_>>>()?;
        payload.end()?;
        reply.begin(kind::HANDED, request.request());
        let mut heads = Vec::new();
        for (id, incarnation) in &parts {
            let (_, copy) = self.copies.get(*id);
            let head =
                self.partitions.with(*id, |partition| match partition.admit_copy(*incarnation, copy) {
                    Status::Ok => Ok(partition.hand_over()),
                    other => Err(other),
                });
            match head.unwrap_or(Err(Status::NotHere)) {
                Ok(Some(head)) => heads.push(head),
                refusal => {
                    for (id, _) in &parts[..heads.len()] {
                        self.partitions.with(*id, |partition| partition.keep());
                    }
                    reply.put_all(&[refusal.err().unwrap_or(Status::Ok).word(), 0]);
                    return Ok(());
                }
            }
        }
        reply.put_all(&[Status::Ok.word(), 1]);
        let copies = &mut self.copies;
        for head in heads {
            self.partitions.with(head.partition, |partition| copies.put_head(reply, partition, &head));
        }
        Ok(())
    }

    /// Floats of the tensors of a partition that was handed over or is followed. They are kept until the last ones are
    /// asked for.
    pub(super) fn tensors(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let (id, from) = ps::take_tensors(&mut payload)?;
        payload.end()?;
        self.backed.iter().filter(|feed| feed.partition == id).for_each(|feed| feed.gets_ready());
        let kept = &mut self.copies.tensors;
        let rest = kept.get(&id).and_then(|floats| floats.get(from..)).unwrap_or_default();
        let some = &rest[..rest.len().min(FLOATS_MAX).min(self.limits.words_max / 2)];
        reply.begin(kind::FLOATS, request.request());
        reply.put(some.len() as u64);
        reply.put_floats(some);
        if some.len() == rest.len() {
            kept.remove(&id);
        }
        Ok(())
    }
}

pub(super) fn put_copied(reply: &mut Frame, copied: &Copied) {
    let Copied { table, ids, numbers, rows, rows_of_all } = copied;
    reply.put_all(&[*table as u64, *rows_of_all as u64]);
    ps::put_ids(reply, ids);
    reply.put(numbers.len() as u64);
    numbers.iter().for_each(|number| reply.put(u64::from(*number)));
    reply.put(rows.len() as u64);
    reply.put_floats(rows);
}

/// What is left where rows are copied from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    /// Rows that are still to come.
    pub rows: u64,
    /// How many pushes were applied there.
    pub version: u64,
}

/// Reads an answer to a COPY: some rows, and what is left. `None`: this life of the partition is not there.
pub(crate) fn take_copied(mut payload: Payload<'_>, into: &mut Copied) -> wire::Result<Option<Left>> {
    let status = Status::from_word(payload.take()?)?;
    let left = Left { rows: payload.take()?, version: payload.take()? };
    if status != Status::Ok {
        payload.end()?;
        return Ok(None);
    }
    take_some_rows(&mut payload, into)?;
    payload.end()?;
    Ok(Some(left))
}

pub(super) fn take_some_rows(payload: &mut Payload<'_>, into: &mut Copied) -> wire::Result<()> {
    into.table = usize::try_from(payload.take()?).unwrap_or(usize::MAX);
    into.rows_of_all = usize::try_from(payload.take()?).unwrap_or(usize::MAX);
    into.ids.clear();
    into.ids.extend_from_slice(ps::take_ids(payload)?);
    into.numbers.clear();
    let numbers = ps::take_ids(payload)?.iter();
    into.numbers.extend(numbers.map(|number| u32::try_from(*number).unwrap_or(u32::MAX)));
    let floats = usize::try_from(payload.take()?).unwrap_or(usize::MAX);
    into.rows.clear();
    into.rows.extend_from_slice(payload.take_floats(floats)?);
    Ok(())
}

/// What became of a request to hand partitions over.
#[derive(Debug)]
pub(crate) enum Handed {
    /// What each has beside rows and tensors: they are served there no more.
    Yes(Vec<Head>),
    /// Not at this moment.
    NotNow,
    /// One of them is not there in this life.
    NotThere,
}

/// Reads an answer to a HAND_OVER of these partitions.
pub(crate) fn take_handed(mut payload: Payload<'_>, parts: &[(PartitionId, u64)]) -> wire::Result<Handed> {
    let (status, given) = (Status::from_word(payload.take()?)?, payload.take()?);
    if status != Status::Ok || given == 0 {
        payload.end()?;
        return Ok(if status == Status::Ok { Handed::NotNow } else { Handed::NotThere });
    }
    let all = parts.iter().map(|(id, _)| take_head(&mut payload, *id)).collect::<wire::Result<_>>()?;
    payload.end()?;
    Ok(Handed::Yes(all))
}

pub(super) fn take_head(payload: &mut Payload<'_>, id: PartitionId) -> wire::Result<Head> {
    let malformed = |e: serde_json::Error| wire::Error::Malformed(format!("the head of {id}: {e}"));
    serde_json::from_slice(payload.take_bytes()?).map_err(malformed)
}

/// Reads an answer to a TENSORS: the floats that come next, of at most so many.
pub(crate) fn take_tensors(mut payload: Payload<'_>, most: usize) -> wire::Result<&[f32]> {
    let count = usize::try_from(payload.take()?).unwrap_or(usize::MAX);
    if count == 0 || count > most {
        return Err(wire::Error::Malformed(format!("{count} floats of tensors where {most} are left")));
    }
    let floats = payload.take_floats(count)?;
    payload.end()?;
    Ok(floats)
}
