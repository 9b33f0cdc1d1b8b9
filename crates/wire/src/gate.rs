//! What workers say to the gate, the one that admits batches where staleness is bounded or steps have several
//! batches, and of what it has decided. It is with the server of partition 0.
//!
//! | frame | payload |
//! | --- | --- |
//! | GATE | what, incarnation of partition 0, permit, task, batch, lease term, lease n, committed |
//! | GATED | status, permit, version, decided version, n, [task, batch, lease term, lease n] × n |
//! | STEP | version, n, [task, batch, lease term, lease n] × n, m, [partition, incarnation] × m; answered by PUSHED |
//!
//! Numbers that a request has no use for are 0. A permit is of the connection that asked for it; it may be given
//! back over another one, and is given back by itself when its connection ends.

use elasticdl_spec::{LeaseId, PartitionId, TaskId};

use crate::error::{Error, Result};
use crate::frame::{Frame, Payload};
use crate::ps::{Status, kind, put_part};

/// A batch, and by what right it is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Batch {
    /// The task.
    pub task: TaskId,
    /// The batch's index in the task.
    pub batch: u64,
    /// The lease.
    pub lease: LeaseId,
}

impl Batch {
    const NONE: [u64; 4] = [0; 4];

    fn words(self) -> [u64; 4] {
        [self.task.as_u64(), self.batch, self.lease.term, self.lease.n]
    }

    fn from_words(words: &[u64]) -> Self {
        let lease = LeaseId { term: words[2], n: words[3] };
        Batch { task: TaskId::from_u64(words[0]), batch: words[1], lease }
    }
}

/// What the gate is asked or told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// May this batch be pulled now?
    Admit(Batch),
    /// The batch of this permit is applied by all partitions.
    Landed(u64),
    /// Nothing will become of the batch of this permit.
    Dropped(u64),
    /// The batch of this permit is staged on all partitions.
    Staged(u64, Batch),
    /// What was decided last?
    Look,
}

/// Which batches make a step: all of them were computed from the weights of this version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// How many batches every partition has applied before the step.
    pub version: u64,
    /// The batches, in the order in which their gradients are summed.
    pub batches: Vec<Batch>,
}

impl Decision {
    /// How many batches every partition has applied after it.
    pub fn end(&self) -> u64 {
        self.version + self.batches.len() as u64
    }
}

/// What the gate says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// `Ok`, `NotYet`, `Stale` for a permit that is no more, or why this is not the gate.
    pub status: Status,
    /// The permit, where one was asked for and is given.
    pub permit: u64,
    /// The version that its batch is to be computed from; where steps are.
    pub version: u64,
    /// The last decision, where whoever asks may not know it yet.
    pub decision: Option<Decision>,
}

impl Said {
    /// A status and nothing else.
    pub fn only(status: Status) -> Self {
        Said { status, permit: 0, version: 0, decision: None }
    }
}

/// A GATE: asks the gate of this life of partition 0. Whoever asks knows that all is committed up to a version.
pub fn ask(frame: &mut Frame, request: u64, incarnation: u64, ask: Ask, committed: u64) {
    let (what, permit, batch) = match ask {
        Ask::Admit(batch) => (0, 0, batch.words()),
        Ask::Landed(permit) => (1, permit, Batch::NONE),
        Ask::Dropped(permit) => (2, permit, Batch::NONE),
        Ask::Staged(permit, batch) => (3, permit, batch.words()),
        Ask::Look => (4, 0, Batch::NONE),
    };
    frame.begin(kind::GATE, request);
    frame.put_all(&[what, incarnation, permit]);
    frame.put_all(&batch);
    frame.put(committed);
}

/// Reads a GATE: the incarnation, what is asked, and up to which version all is known to be committed.
pub fn take_ask(mut payload: Payload<'_>) -> Result<(u64, Ask, u64)> {
    let words = payload.take_all(8)?;
    payload.end()?;
    let (permit, batch) = (words[2], Batch::from_words(&words[3..7]));
    let ask = match words[0] {
        0 => Ask::Admit(batch),
        1 => Ask::Landed(permit),
        2 => Ask::Dropped(permit),
        3 => Ask::Staged(permit, batch),
        4 => Ask::Look,
        other => return Err(Error::Malformed(format!("{other} is no question to the gate"))),
    };
    Ok((words[1], ask, words[7]))
}

/// A GATED.
pub fn said(frame: &mut Frame, request: u64, said: &Said) {
    frame.begin(kind::GATED, request);
    let (version, batches) = said.decision.as_ref().map_or((0, &[][..]), |d| (d.version, &d.batches));
    frame.put_all(&[said.status.word(), said.permit, said.version, version, batches.len() as u64]);
    batches.iter().for_each(|batch| frame.put_all(&batch.words()));
}

/// Reads a GATED.
pub fn take_said(mut payload: Payload<'_>) -> Result<Said> {
    let words = payload.take_all(4)?;
    let (status, permit, version, decided) = (Status::from_word(words[0])?, words[1], words[2], words[3]);
    let count = payload.take_count(4)?;
    let batches: Vec<Batch> = payload.take_all(4 * count)?.chunks_exact(4).map(Batch::from_words).collect();
    payload.end()?;
    let decision = (count > 0).then_some(Decision { version: decided, batches });
    Ok(Said { status, permit, version, decision })
}

/// A STEP for these partitions and their incarnations.
pub fn step(frame: &mut Frame, request: u64, decision: &Decision, parts: &[(PartitionId, u64)]) {
    frame.begin(kind::STEP, request);
    put_step(frame, decision, parts);
}

/// What comes after a STEP's beginning.
pub fn put_step(frame: &mut Frame, decision: &Decision, parts: &[(PartitionId, u64)]) {
    frame.put_all(&[decision.version, decision.batches.len() as u64]);
    decision.batches.iter().for_each(|batch| frame.put_all(&batch.words()));
    frame.put(parts.len() as u64);
    for &(partition, incarnation) in parts {
        put_part(frame, partition, incarnation);
    }
}

/// Reads the beginning of a STEP: what was decided and how many partitions follow.
pub fn take_step(payload: &mut Payload<'_>) -> Result<(Decision, usize)> {
    let version = payload.take()?;
    let count = payload.take_count(4)?;
    let batches = payload.take_all(4 * count)?.chunks_exact(4).map(Batch::from_words).collect();
    Ok((Decision { version, batches }, payload.take_count(2)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(n: u64) -> Batch {
        Batch { task: TaskId::train(1, n as u32), batch: n, lease: LeaseId { term: 2, n } }
    }

    #[test]
    fn every_question_survives() {
        let mut frame = Frame::default();
        let permits = [Ask::Landed(9), Ask::Dropped(3), Ask::Staged(8, batch(4))];
        for question in permits.into_iter().chain([Ask::Admit(batch(3)), Ask::Look]) {
            ask(&mut frame, 5, 7, question, 11);
            assert_eq!((frame.kind(), frame.request()), (kind::GATE, 5));
            assert_eq!(take_ask(frame.payload()).unwrap(), (7, question, 11));
        }
        frame.begin(kind::GATE, 1);
        frame.put_all(&[5, 0, 0, 0, 0, 0, 0, 0]);
        assert!(take_ask(frame.payload()).is_err(), "there is no sixth question");
    }

    #[test]
    fn a_step_survives() {
        let mut frame = Frame::default();
        let decision = Decision { version: 6, batches: vec![batch(1), batch(2)] };
        step(&mut frame, 5, &decision, &[(PartitionId(4), 2)]);
        let mut payload = frame.payload();
        assert_eq!(take_step(&mut payload).unwrap(), (decision, 1));
        assert_eq!(crate::ps::take_part(&mut payload).unwrap(), (PartitionId(4), 2));
        payload.end().unwrap();
    }

    #[test]
    fn every_answer_survives() {
        let mut frame = Frame::default();
        let decision = Decision { version: 6, batches: vec![batch(1), batch(2)] };
        assert_eq!(decision.end(), 8);
        let full = Said { status: Status::Ok, permit: 3, version: 8, decision: Some(decision) };
        for answer in [full, Said::only(Status::NotYet), Said::only(Status::Stale)] {
            said(&mut frame, 5, &answer);
            assert_eq!(take_said(frame.payload()).unwrap(), answer);
        }
    }
}
