//! From a request's frame to its answer's frame. Knows no sockets.
//!
//! A frame is read twice: once to see that all of it is well-formed and has an answer of allowed length,
//! and once to do what it asks for. So nothing of a malformed frame is ever done.

use elasticdl_spec::PartitionId;
use elasticdl_wire as wire;
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::{Frame, Limits, Payload};
use elasticdl_wire::ps::{self, Answer, PullMode, Status, kind};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::partition::{Partition, Push, RowGradients};
use crate::partitions::Partitions;

/// What a connection needs to answer; its buffers are used again and again.
#[derive(Debug)]
pub struct Requests<'p> {
    partitions: &'p Partitions,
    limits: Limits,
    answers: Vec<Answer>,
    tables: Vec<RowGradients<'static>>,
    tensors: Vec<&'static [f32]>,
}

impl<'p> Requests<'p> {
    /// Answers from these partitions; an answer is no longer than a request may be.
    pub fn new(partitions: &'p Partitions, limits: Limits) -> Self {
        Requests { partitions, limits, answers: Vec::new(), tables: Vec::new(), tensors: Vec::new() }
    }

    /// Does what `request` asks for and writes the answer to `reply`.
    ///
    /// # Errors
    ///
    /// The request is malformed: nothing was done. Or a partition refuses its part (rows that live
    /// elsewhere, gradients that are not finite): nothing was changed there and in those after it.
    pub fn answer(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        match request.kind() {
            kind::PULL => self.pull(request, reply),
            kind::PUSH => self.push(request, reply, Partition::push),
            kind::STAGE => self.push(request, reply, Partition::stage),
            kind::COMMIT => self.commit(request, reply),
            kind::FENCE => self.fence(request, reply),
            other => Err(wire::Error::Malformed(format!("{other:#x} is no request")).into()),
        }
    }

    fn pull(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let model = self.partitions.model();
        let words = check_pull(request.payload(), model)?;
        if words > self.limits.words_max as u64 {
            let limit = self.limits.words_max * 8;
            return Err(wire::Error::Malformed(format!(
                "a pull of {} bytes, {limit} is the limit",
                words.saturating_mul(8)
            ))
            .into());
        }
        let mut payload = request.payload();
        let (mode, parts) = ps::take_pull(&mut payload)?;
        reply.begin(kind::PULLED, request.request());
        reply.put(parts as u64);
        for _ in 0..parts {
            let (id, incarnation) = ps::take_part(&mut payload)?;
            let ids = payload;
            for _ in &model.shape.tables {
                ps::take_ids(&mut payload)?;
            }
            let pulled = self.partitions.with(id, |p| pull_part(p, incarnation, mode, ids, reply));
            match pulled {
                Some(outcome) => outcome?,
                None => reply.put_all(&[u64::from(id.0), Status::NotHere.word(), 0]),
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
        let mut tables = emptied(std::mem::take(&mut self.tables));
        let mut tensors = emptied(std::mem::take(&mut self.tensors));
        let mut payload = request.payload();
        let (header, parts) = ps::take_push(&mut payload)?;
        let first = payload;
        for _ in 0..parts {
            take_push_part(&mut payload, model, &mut tables, &mut tensors)?;
        }
        payload.end()?;

        payload = first;
        self.answers.clear();
        for part in 0..parts {
            if part > 0 && request.kind() == kind::PUSH {
                between_partitions()?;
            }
            let (id, incarnation) = take_push_part(&mut payload, model, &mut tables, &mut tensors)?;
            let push = Push { header, incarnation, tables: &tables, tensors: &tensors };
            let answer = self.partitions.with(id, |p| land(p, &push)).unwrap_or(Ok(not_here(id)))?;
            self.answers.push(answer);
        }
        self.tables = emptied(tables);
        self.tensors = emptied(tensors);
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
            let committed = self.partitions.with(id, |p| p.commit(commit, incarnation));
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
            let fenced = self.partitions.with(id, |p| p.fence(task, lease, incarnation));
            self.answers.push(fenced.unwrap_or(Ok(not_here(id)))?);
        }
        ps::answers(reply, kind::FENCED, request.request(), &self.answers);
        Ok(())
    }
}

/// One partition has applied a batch, and the next one has not.
fn between_partitions() -> Result<()> {
    if failpoint::reached("ps.between_partitions") {
        let broken = std::io::Error::other("a failpoint says so");
        return Err(wire::Error::io("applying a push", broken).into());
    }
    Ok(())
}

/// Reads a whole PULL and tells how many words its answer can have.
fn check_pull(mut payload: Payload<'_>, model: &Model) -> Result<u64> {
    let (mode, parts) = ps::take_pull(&mut payload)?;
    let mut words = 1;
    for _ in 0..parts {
        let (id, _) = ps::take_part(&mut payload)?;
        words += 3;
        for table in &model.shape.tables {
            let floats = ps::take_ids(&mut payload)?.len().saturating_mul(table.width());
            words += floats.div_ceil(2) as u64;
        }
        if mode.tensors {
            let lengths = tensors_of(model, id)?.iter().map(|i| model.shape.tensors[*i].len());
            words += lengths.map(|floats| floats.div_ceil(2) as u64).sum::<u64>();
        }
    }
    payload.end()?;
    Ok(words)
}

fn pull_part(
    partition: &mut Partition,
    incarnation: u64,
    mode: PullMode,
    mut payload: Payload<'_>,
    reply: &mut Frame,
) -> Result<()> {
    let status = partition.admit(incarnation);
    reply.put_all(&[u64::from(partition.id().0), status.word(), partition.version()]);
    if status != Status::Ok {
        return Ok(());
    }
    for table in 0..partition.tables().len() {
        let ids = ps::take_ids(&mut payload)?;
        let out = reply.grow_floats(ids.len() * partition.tables()[table].shape().width());
        if mode.births {
            partition.pull(table, ids, out)?;
        } else {
            partition.read(table, ids, out);
        }
    }
    if mode.tensors {
        partition.tensors().iter().for_each(|tensor| reply.put_floats(tensor.values()));
    }
    Ok(())
}

/// Reads a partition's part of a PUSH; its gradients take the place of what the vectors held.
fn take_push_part<'a>(
    payload: &mut Payload<'a>,
    model: &Model,
    tables: &mut Vec<RowGradients<'a>>,
    tensors: &mut Vec<&'a [f32]>,
) -> Result<(PartitionId, u64)> {
    tables.clear();
    tensors.clear();
    let (id, incarnation) = ps::take_part(payload)?;
    // How far the rows have moved since they were pulled: nothing depends on it yet.
    let _version_pulled = payload.take()?;
    for table in &model.shape.tables {
        let ids = ps::take_ids(payload)?;
        let gradients = payload.take_floats(ids.len().saturating_mul(table.width()))?;
        tables.push(RowGradients { ids, gradients });
    }
    for tensor in tensors_of(model, id)? {
        tensors.push(payload.take_floats(model.shape.tensors[*tensor].len())?);
    }
    Ok((id, incarnation))
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
mod tests {
    use elasticdl_spec::{LeaseId, TaskId};
    use proptest::prelude::*;

    use super::*;
    use crate::test_model::model;

    fn partitions() -> Partitions {
        let partitions = Partitions::new(model());
        (0..3).for_each(|id| partitions.open(Partition::new(model(), PartitionId(id), 1)));
        partitions
    }

    #[test]
    fn buffers_are_used_again_for_the_next_request() {
        let items = vec![1u64; 100];
        let place = items.as_ptr() as usize;
        let again: Vec<i64> = emptied(items);
        assert_eq!((again.len(), again.capacity(), again.as_ptr() as usize), (0, 100, place));
    }

    /// A frame with an empty batch for these partitions.
    fn stage(frame: &mut Frame, parts: &[u32]) {
        let lease = LeaseId { term: 1, n: 1 };
        ps::begin_stage(
            frame,
            7,
            ps::PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 0, factor: 1.0 },
            parts.len(),
        );
        for part in parts {
            ps::put_part(frame, PartitionId(*part), 1);
            frame.put_all(&[0, 0, 0]);
            for tensor in model().tensors_of(PartitionId(*part)).unwrap() {
                frame.put_floats(&vec![0.0; model().shape.tensors[*tensor].len()]);
            }
        }
    }

    #[test]
    fn a_batch_is_staged_and_committed_by_frames() {
        let partitions = partitions();
        let mut requests = Requests::new(&partitions, Limits::default());
        let (mut frame, mut reply) = (Frame::default(), Frame::default());
        let mut answers = |frame: &Frame| {
            requests.answer(frame, &mut reply).unwrap();
            ps::expect(&reply, kind::PUSHED, 7).unwrap();
            let answers = ps::take_answers(reply.payload()).unwrap();
            answers.into_iter().map(|a| (a.partition.0, a.status, a.mark)).collect::<Vec<_>>()
        };
        stage(&mut frame, &[0, 2]);
        assert_eq!(answers(&frame), [(0, Status::Ok, 0), (2, Status::Ok, 0)]);
        let lease = LeaseId { term: 1, n: 1 };
        let commit = ps::Commit { task: TaskId::train(0, 0), batch: 0, lease };
        let parts = [0, 1, 2, 3].map(|p| (PartitionId(p), 1));
        ps::commit(&mut frame, 7, commit, &parts);
        assert_eq!(
            answers(&frame),
            [(0, Status::Ok, 1), (1, Status::NotStaged, 0), (2, Status::Ok, 1), (3, Status::NotHere, 0)]
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Goal: whatever a frame holds, it is answered or refused: no panic, no half-changed partition.
        #[test]
        fn any_words_are_answered_or_refused(
            request in prop_oneof![
                Just(kind::PULL), Just(kind::PUSH), Just(kind::FENCE), Just(kind::STAGE), Just(kind::COMMIT),
                any::<u32>(),
            ],
            words in proptest::collection::vec(prop_oneof![8 => 0..4u64, 1 => any::<u64>()], 0..60),
        ) {
            let partitions = partitions();
            let mut requests = Requests::new(&partitions, Limits { words_max: 1 << 12 });
            let (mut frame, mut reply) = (Frame::default(), Frame::default());
            frame.begin(request, 1);
            frame.put_all(&words);
            if requests.answer(&frame, &mut reply).is_ok() {
                prop_assert_eq!(reply.request(), 1);
            }
            prop_assert!(partitions.gauges().is_ok(), "a partition was left half-changed");
            prop_assert!(reply.bytes() <= 8 * ((1 << 12) + 2));
        }
    }
}
