//! From a request's frame to its answer's frame. Knows no sockets.
//!
//! A frame is read twice: once to see that all of it is well-formed and has an answer of allowed length,
//! and once to do what it asks for. So nothing of a malformed frame is ever done.

pub(crate) mod copy;
pub(crate) mod follow;

use std::io;
use std::sync::Arc;

use elasticdl_spec::{PartitionId, Precision};
use elasticdl_wire as wire;
use elasticdl_wire::connection::Who;
use elasticdl_wire::failpoint;
use elasticdl_wire::floats;
use elasticdl_wire::frame::{Frame, Limits, Payload};
use elasticdl_wire::gate::{self, Said};
use elasticdl_wire::ps::{self, Answer, PullMode, Status, kind};

use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::model::Model;
use crate::partition::{Partition, Push, RowGradients};
use crate::partitions::{Held, Partitions};

/// What a connection needs to answer; its buffers are used again and again.
#[derive(Debug)]
pub struct Requests<'p> {
    partitions: &'p Partitions,
    limits: Limits,
    answers: Vec<Answer>,
    tables: Vec<RowGradients<'static>>,
    tensors: Vec<&'static [f32]>,
    rounded: Rounded,
    copies: copy::Copies<'p>,
    /// What the gate knows this connection by; given with its first question.
    connection: Option<u64>,
    who: Option<Who>,
    /// What the peer has a backup of.
    backed: Vec<Arc<Feed>>,
    /// What backups have to do before the answer goes out.
    due: Vec<(Arc<Feed>, u64)>,
}

/// Sends what there is of an answer.
type Send<'s> = dyn FnMut(&mut Frame) -> io::Result<()> + 's;

/// So much of an answer goes out before the rest is made: who asked receives it meanwhile, and it is still in the cache.
const PART_BYTES: usize = 64 << 10;
/// About so many bytes of rows are copied before others may have the partition, and what was copied goes out. Where a
/// batch is computed from one version, all of a partition's.
const COPIED_BYTES: usize = 256 << 10;
/// The rows copied at once are a multiple of this, so that their numbers, of 16 bits or more, fill whole words.
const COPIED_ROWS: usize = 4;

/// Room for what does not travel as f32: by table, its rows or gradients.
type Rounded = Vec<Vec<f32>>;

impl<'p> Requests<'p> {
    /// Answers from these partitions; an answer is no longer than a request may be.
    pub fn new(partitions: &'p Partitions, limits: Limits) -> Self {
        let rounded = vec![Vec::new(); partitions.model().shape.tables.len()];
        let (answers, tables, tensors) = (Vec::new(), Vec::new(), Vec::new());
        let copies = copy::Copies::new(partitions);
        Requests {
            partitions,
            limits,
            answers,
            tables,
            tensors,
            rounded,
            copies,
            connection: None,
            who: None,
            backed: Vec::new(),
            due: Vec::new(),
        }
    }

    /// The same for a peer that has said who it is.
    pub fn of(mut self, who: Who) -> Self {
        self.who = Some(who);
        self
    }

    /// Does what `request` asks for and writes the answer to `reply`.
    ///
    /// # Errors
    ///
    /// The request is malformed: nothing was done. Or a partition refuses its part (rows that live
    /// elsewhere, gradients that are not finite): nothing was changed there and in those after it.
    pub fn answer(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        self.answer_in_parts(request, reply, &mut |_| Ok(()))
    }

    /// The same, where whoever asked may have a part of the answer before the rest is made: `send` is given what there
    /// is of it. What it leaves in the frame, and what comes after it, is still to be sent in the end.
    ///
    /// # Errors
    ///
    /// The same, and sending failed. A part may be out already.
    pub fn answer_in_parts(&mut self, request: &Frame, reply: &mut Frame, send: &mut Send<'_>) -> Result<()> {
        self.due.clear();
        self.do_and_answer(request, reply, send)?;
        self.wait_for_backups()
    }

    fn do_and_answer(&mut self, request: &Frame, reply: &mut Frame, send: &mut Send<'_>) -> Result<()> {
        match request.kind() {
            kind::PULL => self.pull(request, reply, send),
            kind::PUSH => self.push(request, reply, Partition::push),
            kind::STAGE => self.push(request, reply, Partition::stage),
            kind::COMMIT => self.commit(request, reply),
            kind::FENCE => self.fence(request, reply),
            kind::COPY => self.copy(request, reply),
            kind::HAND_OVER => self.hand_over(request, reply),
            kind::TENSORS => self.tensors(request, reply),
            kind::FOLLOW => self.follow(request, reply),
            kind::NEXT => self.next(request, reply),
            kind::GATE => self.gate(request, reply),
            kind::STEP => self.step(request, reply),
            other => Err(wire::Error::Malformed(format!("{other:#x} is no request")).into()),
        }
    }

    fn pull(&mut self, request: &Frame, reply: &mut Frame, send: &mut Send<'_>) -> Result<()> {
        let model = self.partitions.model();
        let words = check_pull(request.payload(), model)?;
        if words > self.limits.words_max as u64 {
            return Err(too_long("a pull", words, self.limits));
        }
        let mut payload = request.payload();
        let (mode, parts) = ps::take_pull(&mut payload)?;
        let bytes_max = if model.policy.is_none() { COPIED_BYTES } else { usize::MAX };
        reply.begin(kind::PULLED, request.request());
        reply.put(parts as u64);
        for _ in 0..parts {
            let mut part = Pulling::take(&mut payload, mode, bytes_max, model)?;
            let partition = part.partition;
            loop {
                // No partition is locked now, however long it takes.
                if reply.bytes() >= PART_BYTES {
                    send(reply).map_err(|e| wire::Error::io("sending a part of an answer", e))?;
                }
                match self.partitions.with(partition, |p| part.copy_some(p, &mut self.rounded, reply)) {
                    Some(more) => {
                        if !more? {
                            break;
                        }
                    }
                    None if part.begun => return Err(Error::Left { partition }),
                    None => {
                        reply.put_all(&[u64::from(partition.0), Status::NotHere.word(), 0]);
                        break;
                    }
                }
            }
        }
        self.partitions.count_pull();
        Ok(())
    }

    /// A PUSH or a STAGE: what becomes of each part is `land`'s business.
    fn push(
        &mut self,
        request: &Frame,
        reply: &mut Frame,
        land: fn(&mut Partition, &Push<'_>) -> Result<Answer>,
    ) -> Result<()> {
        let model = self.partitions.model();
        let mut payload = request.payload();
        let (header, parts) = ps::take_push(&mut payload)?;
        let first = payload;
        for _ in 0..parts {
            let words = pass_push_part(&mut payload, model)?;
            // What a table's gradients take unpacked is no more than a frame may.
            if words > self.limits.words_max {
                return Err(too_long("gradients", words as u64, self.limits));
            }
        }
        payload.end()?;

        payload = first;
        self.answers.clear();
        for part in 0..parts {
            if part > 0 && request.kind() == kind::PUSH {
                between_partitions()?;
            }
            let (id, incarnation) = take_rounded(payload, model, &mut self.rounded)?;
            let from = payload.rest();
            let mut tables = emptied(std::mem::take(&mut self.tables));
            let mut tensors = emptied(std::mem::take(&mut self.tensors));
            let version = take_push_part(&mut payload, model, &self.rounded, &mut tables, &mut tensors)?;
            let push = Push { header, incarnation, version, tables: &tables, tensors: &tensors };
            let words = &from[..from.len() - payload.rest().len()];
            let put = |frame: &mut Frame| {
                frame.put_all(&request.payload().rest()[..ps::PUSH_HEADER_WORDS]);
                frame.put(1);
                frame.put_all(words);
            };
            let due = &mut self.due;
            let landed = self
                .partitions
                .with_held(id, |held| done(held, request.kind(), due, |p| land(p, &push), put));
            self.answers.push(landed.unwrap_or(Ok(not_here(id)))?);
            self.tables = emptied(tables);
            self.tensors = emptied(tensors);
        }
        self.partitions.count_push();
        ps::answers(reply, kind::PUSHED, request.request(), &self.answers);
        Ok(())
    }

    fn commit(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let (_, parts) = ps::take_commit(&mut payload)?;
        payload.take_all(2 * parts)?;
        payload.end()?;

        let mut payload = request.payload();
        let (commit, _) = ps::take_commit(&mut payload)?;
        self.answers.clear();
        for part in 0..parts {
            if part > 0 {
                between_partitions()?;
            }
            let (id, incarnation) = ps::take_part(&mut payload)?;
            let put = |frame: &mut Frame| ps::put_commit(frame, commit, &[(id, incarnation)]);
            let work = |p: &mut Partition| p.commit(commit, incarnation);
            let due = &mut self.due;
            let committed = self.partitions.with_held(id, |held| done(held, kind::COMMIT, due, work, put));
            self.answers.push(committed.unwrap_or(Ok(not_here(id)))?);
        }
        ps::answers(reply, kind::PUSHED, request.request(), &self.answers);
        Ok(())
    }

    fn fence(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let (task, lease, parts) = ps::take_fence(&mut payload)?;
        payload.take_all(2 * parts)?;
        payload.end()?;

        let mut payload = request.payload();
        ps::take_fence(&mut payload)?;
        self.answers.clear();
        for _ in 0..parts {
            let (id, incarnation) = ps::take_part(&mut payload)?;
            let put = |frame: &mut Frame| ps::put_fence(frame, task, lease, &[(id, incarnation)]);
            let work = |p: &mut Partition| p.fence(task, lease, incarnation);
            let due = &mut self.due;
            let fenced = self.partitions.with_held(id, |held| done(held, kind::FENCE, due, work, put));
            self.answers.push(fenced.unwrap_or(Ok(not_here(id)))?);
        }
        ps::answers(reply, kind::FENCED, request.request(), &self.answers);
        Ok(())
    }
}

impl Requests<'_> {
    /// Has partitions apply a step.
    fn step(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let (decision, parts) = gate::take_step(&mut payload)?;
        let mut rest = payload;
        rest.take_all(2 * parts)?;
        rest.end()?;
        self.answers.clear();
        for part in 0..parts {
            if part > 0 {
                between_partitions()?;
            }
            let (id, incarnation) = ps::take_part(&mut payload)?;
            let put = |frame: &mut Frame| gate::put_step(frame, &decision, &[(id, incarnation)]);
            let work = |p: &mut Partition| p.commit_step(&decision, incarnation);
            let due = &mut self.due;
            let committed = self.partitions.with_held(id, |held| done(held, kind::STEP, due, work, put));
            self.answers.push(committed.unwrap_or(Ok(not_here(id)))?);
        }
        ps::answers(reply, kind::PUSHED, request.request(), &self.answers);
        Ok(())
    }

    /// Asks the gate, which may wait for a moment.
    fn gate(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let (incarnation, ask, committed) = gate::take_ask(request.payload())?;
        let keeper = self.partitions.gatekeeper();
        let keeper = keeper.ok_or_else(|| wire::Error::Malformed("this job has no gate".into()))?;
        let beside = self.partitions.with(PartitionId(0), |p| (p.admit(incarnation), p.version()));
        let said = match beside {
            None => Said::only(Status::NotHere),
            Some((Status::Ok, version)) => {
                let connection = *self.connection.get_or_insert_with(|| keeper.connect());
                keeper.answer(connection, (incarnation, version), ask, committed)
            }
            Some((other, _)) => Said::only(other),
        };
        gate::said(reply, request.request(), &said);
        Ok(())
    }
}

/// A connection that ends gives back its permits, and what it had a backup of is without.
impl Drop for Requests<'_> {
    fn drop(&mut self) {
        self.backed.iter().for_each(|feed| self.partitions.backup_lost(feed));
        if let (Some(keeper), Some(connection)) = (self.partitions.gatekeeper(), self.connection) {
            keeper.lost(connection);
        }
    }
}

/// Has a partition do something, and notes it for its backup. Whatever the answer says the backup must have as well,
/// be it that the batch was applied before: so the answer waits for all that was done until now.
fn done(
    held: &mut Held,
    kind: u32,
    due: &mut Vec<(Arc<Feed>, u64)>,
    work: impl FnOnce(&mut Partition) -> Result<Answer>,
    put: impl FnOnce(&mut Frame),
) -> Result<Answer> {
    let answer = work(&mut held.partition)?;
    if let Some(feed) = held.feed.as_ref().filter(|_| answer.status != Status::WrongIncarnation) {
        let mut frame = Frame::default();
        frame.begin(kind, answer.version);
        put(&mut frame);
        due.push((Arc::clone(feed), feed.add(frame)));
    }
    Ok(answer)
}

/// One partition has applied a batch, and the next one has not.
fn between_partitions() -> Result<()> {
    failpoint::pass("ps.between_partitions").map_err(|e| wire::Error::io("applying a push", e).into())
}

/// Reads a whole PULL and tells how many words its answer can have.
fn check_pull(mut payload: Payload<'_>, model: &Model) -> Result<u64> {
    let (mode, parts) = ps::take_pull(&mut payload)?;
    let mut words = 1;
    for _ in 0..parts {
        let (id, _) = ps::take_part(&mut payload)?;
        words += 3;
        for (table, spec) in model.shape.tables.iter().zip(model.tables()) {
            let count = ps::take_ids(&mut payload)?.len().saturating_mul(table.width());
            words += floats::words(spec.wire, count) as u64;
        }
        if mode.tensors {
            let lengths = tensors_of(model, id)?.iter().map(|i| model.shape.tensors[*i].len());
            words += lengths.map(|floats| floats.div_ceil(2) as u64).sum::<u64>();
        }
    }
    payload.end()?;
    Ok(words)
}

/// A partition's part of a PULL, on its way into the answer.
struct Pulling<'a> {
    partition: PartitionId,
    incarnation: u64,
    mode: PullMode,
    /// So much may be copied at once.
    bytes_max: usize,
    /// Whether something of it is in the answer.
    begun: bool,
    /// The table whose rows are being copied, and those of its ids that are left.
    table: usize,
    ids: &'a [u64],
    /// The ids of the tables after it.
    later: Payload<'a>,
}

impl<'a> Pulling<'a> {
    /// Takes a part from a request, and with it what is asked for of all tables.
    fn take(payload: &mut Payload<'a>, mode: PullMode, bytes_max: usize, model: &Model) -> Result<Self> {
        let (partition, incarnation) = ps::take_part(payload)?;
        let mut later = *payload;
        for _ in &model.shape.tables {
            ps::take_ids(payload)?;
        }
        let ids = if model.shape.tables.is_empty() { &[] } else { ps::take_ids(&mut later)? };
        Ok(Pulling { partition, incarnation, mode, bytes_max, begun: false, table: 0, ids, later })
    }

    /// Copies as much as may be copied at once. `false`: that was all.
    fn copy_some(&mut self, of: &mut Partition, rounded: &mut Rounded, reply: &mut Frame) -> Result<bool> {
        let status = of.admit(self.incarnation);
        if !std::mem::replace(&mut self.begun, true) {
            reply.put_all(&[u64::from(of.id().0), status.word(), of.version()]);
            if status != Status::Ok {
                return Ok(false);
            }
        } else if status != Status::Ok {
            return Err(Error::Left { partition: self.partition });
        }
        let mut left = self.bytes_max;
        while let Some(room) = rounded.get_mut(self.table) {
            let width = of.tables()[self.table].shape().width();
            let (ids, rest) = self.ids.split_at(self.ids.len().min(rows_of(left, width)));
            copy_rows(of, self.table, ids, self.mode, room, reply)?;
            self.ids = rest;
            left = left.saturating_sub(ids.len() * width * 4);
            if self.ids.is_empty() {
                self.table += 1;
                if self.table < rounded.len() {
                    self.ids = ps::take_ids(&mut self.later)?;
                }
            }
            if left == 0 && self.table < rounded.len() {
                return Ok(true);
            }
        }
        if self.mode.tensors {
            of.tensors().iter().for_each(|tensor| reply.put_floats(tensor.values()));
        }
        Ok(false)
    }
}

/// Copies rows of a table into an answer.
fn copy_rows(
    partition: &mut Partition,
    table: usize,
    ids: &[u64],
    mode: PullMode,
    room: &mut Vec<f32>,
    reply: &mut Frame,
) -> Result<()> {
    let width = partition.tables()[table].shape().width();
    let precision = partition.model().tables()[table].wire;
    let mut copy = |ids: &[u64], out: &mut [f32]| match mode.births {
        true => partition.pull(table, ids, out),
        false => {
            partition.read(table, ids, out);
            Ok(())
        }
    };
    if precision == Precision::F32 {
        return copy(ids, reply.grow_floats(ids.len() * width));
    }
    // However many are copied at once, what is rounded needs no more room than an answer.
    for ids in ids.chunks(rows_of(COPIED_BYTES, width)) {
        room.resize(ids.len() * width, 0.0);
        copy(ids, room)?;
        floats::put(reply, precision, room);
    }
    Ok(())
}

/// About so many rows of this width are so many bytes.
fn rows_of(bytes: usize, width: usize) -> usize {
    (bytes / (4 * width)).next_multiple_of(COPIED_ROWS).max(COPIED_ROWS)
}

fn too_long(what: &str, words: u64, limits: Limits) -> Error {
    let (bytes, limit) = (words.saturating_mul(8), limits.words_max * 8);
    wire::Error::Malformed(format!("{what} of {bytes} bytes, {limit} is the limit")).into()
}

/// Passes over a partition's part of a PUSH, all of which must be there. Tells how many words its gradients take that do
/// not travel as f32, once they are.
fn pass_push_part(payload: &mut Payload<'_>, model: &Model) -> Result<usize> {
    let mut unpacked = 0usize;
    let (id, _) = ps::take_part(payload)?;
    payload.take()?;
    for (table, spec) in model.shape.tables.iter().zip(model.tables()) {
        let count = ps::take_ids(payload)?.len().saturating_mul(table.width());
        payload.take_all(floats::words(spec.wire, count))?;
        if spec.wire != Precision::F32 {
            unpacked = unpacked.saturating_add(floats::words(Precision::F32, count));
        }
    }
    for tensor in tensors_of(model, id)? {
        payload.take_floats(model.shape.tensors[*tensor].len())?;
    }
    Ok(unpacked)
}

/// Reads from a partition's part of a PUSH the gradients that do not travel as f32, and whose they are.
fn take_rounded(
    mut payload: Payload<'_>,
    model: &Model,
    rounded: &mut Rounded,
) -> Result<(PartitionId, u64)> {
    let whose = ps::take_part(&mut payload)?;
    payload.take()?;
    for ((table, spec), room) in model.shape.tables.iter().zip(model.tables()).zip(rounded) {
        let count = ps::take_ids(&mut payload)?.len() * table.width();
        match spec.wire {
            Precision::F32 => {
                payload.take_floats(count)?;
            }
            precision => {
                room.resize(count, 0.0);
                floats::take(&mut payload, precision, room)?;
            }
        }
    }
    Ok(whose)
}

/// Reads a partition's part of a PUSH and tells the version it was computed from; its gradients take the place of what
/// the vectors held.
fn take_push_part<'a, 'p: 'a>(
    payload: &mut Payload<'p>,
    model: &Model,
    rounded: &'a Rounded,
    tables: &mut Vec<RowGradients<'a>>,
    tensors: &mut Vec<&'a [f32]>,
) -> Result<u64> {
    tables.clear();
    tensors.clear();
    let (id, _) = ps::take_part(payload)?;
    let version = payload.take()?;
    for ((table, spec), room) in model.shape.tables.iter().zip(model.tables()).zip(rounded) {
        let ids = ps::take_ids(payload)?;
        let count = ids.len() * table.width();
        let gradients = match spec.wire {
            Precision::F32 => payload.take_floats(count)?,
            precision => {
                payload.take_all(floats::words(precision, count))?;
                &room[..]
            }
        };
        tables.push(RowGradients { ids, gradients });
    }
    for tensor in tensors_of(model, id)? {
        tensors.push(payload.take_floats(model.shape.tensors[*tensor].len())?);
    }
    Ok(version)
}

fn tensors_of(model: &Model, id: PartitionId) -> Result<&[usize]> {
    model.tensors_of(id).ok_or_else(|| Error::Misfit {
        partition: id,
        reason: format!("the model has {} partitions", model.partitions),
    })
}

fn not_here(partition: PartitionId) -> Answer {
    Answer { partition, status: Status::NotHere, mark: 0, version: 0 }
}

/// An empty vector with the memory of another whose items had a different lifetime.
fn emptied<T, U>(mut items: Vec<T>) -> Vec<U> {
    items.clear();
    items.into_iter().map(|_| unreachable!("there are no items")).collect()
}

#[cfg(test)]
mod tests;
