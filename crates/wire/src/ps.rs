//! What workers say to servers, and servers to each other when partitions move or are backed up, frame by frame.
//!
//! All numbers are words (see [`crate::frame`]); `[x]` repeats. Tables and tensors come in the order of
//! the plan's `ModelShape`; a partition's tensors are those that `placement::partition_of_tensor` puts
//! there, in that order too. Rows and their gradients travel in the precision of their table
//! ([`crate::floats`]), tensors as f32.
//!
//! | frame | payload |
//! | --- | --- |
//! | HELLO | token bytes, who calls |
//! | WELCOME | (nothing) |
//! | REFUSED | reason bytes; the server closes after it |
//! | PULL | mode, n, [partition, incarnation, [ids: count, ids] per table] × n |
//! | PULLED | n, [partition, status, version, rows per table, tensors if the mode asks for them] × n; rows and tensors only where status is Ok |
//! | PUSH | task, batch, lease term, lease n, records, factor (the bits of an f32), n, [partition, incarnation, version pulled, [count, ids, gradients] per table, tensors' gradients] × n |
//! | PUSHED | n, [partition, status, mark, version] × n |
//! | STAGE | like PUSH; answered by PUSHED |
//! | COMMIT | task, batch, lease term, lease n, n, [partition, incarnation] × n; answered by PUSHED |
//! | FENCE | task, lease term, lease n, n, [partition, incarnation] × n |
//! | FENCED | like PUSHED |
//! | COPY | partition, incarnation, whether from the start, rows at most |
//! | COPIED | status, rows left after these, version; where the status is Ok also table, rows that it has, ids, numbers of the rows (count, numbers; none unless the table has a bound in bytes, where a number may be another id's since the last answer), count of floats, rows with their slots |
//! | HAND_OVER | n, [partition, incarnation] × n |
//! | HANDED | status, whether they were handed over; if so [head as JSON bytes] × n |
//! | FOLLOW | partition, incarnation |
//! | FOLLOWED | status, whether it can be followed at this moment; if so head as JSON bytes, n, [table, rows that it has, ids, count of floats, rows with their slots] × n |
//! | TENSORS | partition that was handed over or is followed, number of a float: values and slots of each of its tensors, one after the other, as they were in that moment, from this one on |
//! | FLOATS | count, floats; none where there are no more |
//! | NEXT | how many of what was done are done here too |
//! | DID | whether it goes on, n, [kind, version after it, count, words of the payload] × n: PUSH, STAGE, COMMIT, STEP or FENCE of one partition, CLOSE or SETTLE |
//! | CLOSE | partition, incarnation, ranges of shards by epoch as JSON bytes; only in a DID |
//! | SETTLE | partition, incarnation; only in a DID |
//! | GATE, GATED, STEP | see [`crate::gate`] |
//!
//! A connection's requests are answered in the order in which they came, so several may be under way.

use elasticdl_spec::{LeaseId, PartitionId, TaskId};

use crate::connection::Who;
use crate::error::{Error, Result};
use crate::frame::{Frame, Payload};

/// Frame kinds.
pub mod kind {
    /// First frame of a connection.
    pub const HELLO: u32 = 0xED01;
    /// The token was right.
    pub const WELCOME: u32 = 0xED02;
    /// The request, or the connection, is refused; it may come after parts of an answer.
    pub const REFUSED: u32 = 0xED03;
    /// Rows and tensors, please.
    pub const PULL: u32 = 0xED04;
    /// Here they are.
    pub const PULLED: u32 = 0xED05;
    /// Gradients of one batch.
    pub const PUSH: u32 = 0xED06;
    /// What became of them.
    pub const PUSHED: u32 = 0xED07;
    /// This lease holds the task now; where are its marks?
    pub const FENCE: u32 = 0xED08;
    /// There.
    pub const FENCED: u32 = 0xED09;
    /// Gradients of one batch, to be kept until they are committed.
    pub const STAGE: u32 = 0xED0A;
    /// All partitions have the batch staged: apply it.
    pub const COMMIT: u32 = 0xED0B;
    /// To the gate; see [`crate::gate`].
    pub const GATE: u32 = 0xED10;
    /// What the gate says.
    pub const GATED: u32 = 0xED11;
    /// These staged batches make a step: apply it.
    pub const STEP: u32 = 0xED12;
    /// Another server copies a partition: rows that it has not got as they are now, please.
    pub const COPY: u32 = 0xED20;
    /// Here are some.
    pub const COPIED: u32 = 0xED21;
    /// Another server takes the partition over: serve it no more, and tell what is left.
    pub const HAND_OVER: u32 = 0xED22;
    /// It is yours.
    pub const HANDED: u32 = 0xED23;
    /// Another server backs the partition up: tell what it lacks still, and from now on what is done.
    pub const FOLLOW: u32 = 0xED24;
    /// From here on.
    pub const FOLLOWED: u32 = 0xED25;
    /// The backup has done so much: what comes next?
    pub const NEXT: u32 = 0xED26;
    /// This was done.
    pub const DID: u32 = 0xED27;
    /// Committed checkpoints cover these tasks.
    pub const CLOSE: u32 = 0xED28;
    /// No more batches come: what is gathered is applied.
    pub const SETTLE: u32 = 0xED29;
    /// What are the tensors of a partition that was handed over, or is followed?
    pub const TENSORS: u32 = 0xED2A;
    /// So much of them.
    pub const FLOATS: u32 = 0xED2B;
}

/// What a pull is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullMode {
    /// Whether unknown rows are born, or come as what they would be born as where their table has a bound; else they come
    /// as zeros and stay unborn.
    pub births: bool,
    /// Whether the dense tensors come too.
    pub tensors: bool,
}

impl PullMode {
    fn word(self) -> u64 {
        u64::from(self.births) | (u64::from(self.tensors) << 1)
    }

    fn from_word(word: u64) -> Result<Self> {
        if word > 3 {
            return Err(Error::Malformed(format!("pull mode {word}")));
        }
        Ok(PullMode { births: word & 1 != 0, tensors: word & 2 != 0 })
    }
}

/// What a partition says to its part of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// The batch was applied before; nothing changed.
    Duplicate,
    /// A newer lease holds the task.
    Fenced,
    /// Batches before this one are missing: send again from the mark.
    Gap,
    /// The partition has another incarnation here.
    WrongIncarnation,
    /// The partition is not here.
    NotHere,
    /// The batch is to be committed and was not staged: send it again.
    NotStaged,
    /// Too many others were applied since the batch was pulled: pull it again.
    Stale,
    /// Ask again.
    NotYet,
}

impl Status {
    const ALL: [Status; 9] = [
        Status::Ok,
        Status::Duplicate,
        Status::Fenced,
        Status::Gap,
        Status::WrongIncarnation,
        Status::NotHere,
        Status::NotStaged,
        Status::Stale,
        Status::NotYet,
    ];

    /// Its word.
    pub fn word(self) -> u64 {
        self as u64
    }

    /// The status with this word.
    pub fn from_word(word: u64) -> Result<Self> {
        let known = usize::try_from(word).ok().and_then(|i| Status::ALL.get(i));
        known.copied().ok_or_else(|| Error::Malformed(format!("status {word}")))
    }
}

/// Begins a PULL; `parts` partitions follow, each by [`put_part`] and the ids of every table.
pub fn begin_pull(frame: &mut Frame, request: u64, mode: PullMode, parts: usize) {
    frame.begin(kind::PULL, request);
    frame.put_all(&[mode.word(), parts as u64]);
}

/// Reads the beginning of a PULL: the mode and how many partitions follow.
pub fn take_pull(payload: &mut Payload<'_>) -> Result<(PullMode, usize)> {
    Ok((PullMode::from_word(payload.take()?)?, payload.take_count(2)?))
}

/// Puts a partition's number and incarnation.
pub fn put_part(frame: &mut Frame, partition: PartitionId, incarnation: u64) {
    frame.put_all(&[u64::from(partition.0), incarnation]);
}

/// Reads a partition's number and incarnation.
pub fn take_part(payload: &mut Payload<'_>) -> Result<(PartitionId, u64)> {
    Ok((take_partition(payload)?, payload.take()?))
}

/// Reads a partition's number.
pub fn take_partition(payload: &mut Payload<'_>) -> Result<PartitionId> {
    let word = payload.take()?;
    let number = u32::try_from(word).map_err(|_| Error::Malformed(format!("partition {word}")))?;
    Ok(PartitionId(number))
}

/// Puts a table's ids with their count.
pub fn put_ids(frame: &mut Frame, ids: &[u64]) {
    frame.put(ids.len() as u64);
    frame.put_all(ids);
}

/// Reads a table's ids.
pub fn take_ids<'a>(payload: &mut Payload<'a>) -> Result<&'a [u64]> {
    let count = payload.take_count(1)?;
    payload.take_all(count)
}

/// Which batch of which task a push belongs to, and by what right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PushHeader {
    /// The task.
    pub task: TaskId,
    /// The batch's index in the task, from 0.
    pub batch: u64,
    /// The lease under which it was computed.
    pub lease: LeaseId,
    /// Records in the batch.
    pub records: u64,
    /// What the learning rate is multiplied by for this batch: finite and not negative. It comes from the
    /// batch's place in the job, so that whoever sends the batch again sends the same.
    pub factor: f32,
}

/// Words of a push's header, before the number of its partitions.
pub const PUSH_HEADER_WORDS: usize = 6;

/// Begins a PUSH; `parts` partitions follow.
pub fn begin_push(frame: &mut Frame, request: u64, header: PushHeader, parts: usize) {
    begin_gradients(frame, kind::PUSH, request, header, parts);
}

/// Begins a STAGE; `parts` partitions follow, as in a PUSH.
pub fn begin_stage(frame: &mut Frame, request: u64, header: PushHeader, parts: usize) {
    begin_gradients(frame, kind::STAGE, request, header, parts);
}

fn begin_gradients(frame: &mut Frame, kind: u32, request: u64, header: PushHeader, parts: usize) {
    frame.begin(kind, request);
    let PushHeader { task, batch, lease, records, factor } = header;
    let factor = u64::from(factor.to_bits());
    frame.put_all(&[task.as_u64(), batch, lease.term, lease.n, records, factor, parts as u64]);
}

/// Reads the beginning of a PUSH or STAGE: its header and how many partitions follow.
pub fn take_push(payload: &mut Payload<'_>) -> Result<(PushHeader, usize)> {
    let words = payload.take_all(PUSH_HEADER_WORDS)?;
    let header = PushHeader {
        task: TaskId::from_u64(words[0]),
        batch: words[1],
        lease: LeaseId { term: words[2], n: words[3] },
        records: words[4],
        factor: factor_of(words[5])?,
    };
    Ok((header, payload.take_count(3)?))
}

fn factor_of(word: u64) -> Result<f32> {
    let factor = u32::try_from(word).ok().map(f32::from_bits);
    let sound = factor.filter(|factor| factor.is_finite() && *factor >= 0.0);
    sound.ok_or_else(|| Error::Malformed(format!("a factor of the learning rate whose word is {word:#x}")))
}

/// Which staged batch is to be applied, and by what right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// The task.
    pub task: TaskId,
    /// The batch's index in the task.
    pub batch: u64,
    /// The lease of whoever commits; it may be newer than that of whoever staged.
    pub lease: LeaseId,
}

/// A COMMIT for these partitions and their incarnations.
pub fn commit(frame: &mut Frame, request: u64, commit: Commit, parts: &[(PartitionId, u64)]) {
    frame.begin(kind::COMMIT, request);
    put_commit(frame, commit, parts);
}

/// What comes after a COMMIT's beginning.
pub fn put_commit(frame: &mut Frame, commit: Commit, parts: &[(PartitionId, u64)]) {
    let Commit { task, batch, lease } = commit;
    frame.put_all(&[task.as_u64(), batch, lease.term, lease.n, parts.len() as u64]);
    for &(partition, incarnation) in parts {
        put_part(frame, partition, incarnation);
    }
}

/// Reads the beginning of a COMMIT: what to commit and how many partitions follow.
pub fn take_commit(payload: &mut Payload<'_>) -> Result<(Commit, usize)> {
    let words = payload.take_all(4)?;
    let lease = LeaseId { term: words[2], n: words[3] };
    let commit = Commit { task: TaskId::from_u64(words[0]), batch: words[1], lease };
    Ok((commit, payload.take_count(2)?))
}

/// A FENCE for these partitions and their incarnations.
pub fn fence(frame: &mut Frame, request: u64, task: TaskId, lease: LeaseId, parts: &[(PartitionId, u64)]) {
    frame.begin(kind::FENCE, request);
    put_fence(frame, task, lease, parts);
}

/// What comes after a FENCE's beginning.
pub fn put_fence(frame: &mut Frame, task: TaskId, lease: LeaseId, parts: &[(PartitionId, u64)]) {
    frame.put_all(&[task.as_u64(), lease.term, lease.n, parts.len() as u64]);
    for &(partition, incarnation) in parts {
        put_part(frame, partition, incarnation);
    }
}

/// Reads the beginning of a FENCE: task, lease and how many partitions follow.
pub fn take_fence(payload: &mut Payload<'_>) -> Result<(TaskId, LeaseId, usize)> {
    let words = payload.take_all(3)?;
    let lease = LeaseId { term: words[1], n: words[2] };
    Ok((TaskId::from_u64(words[0]), lease, payload.take_count(2)?))
}

/// A COPY of at most `rows` rows of a partition; with `from_start` all rows are to come again.
pub fn copy(frame: &mut Frame, request: u64, part: (PartitionId, u64), from_start: bool, rows: usize) {
    frame.begin(kind::COPY, request);
    put_part(frame, part.0, part.1);
    frame.put_all(&[u64::from(from_start), rows as u64]);
}

/// Reads a COPY: the partition, its incarnation, whether from the start, and how many rows at most.
pub fn take_copy(payload: &mut Payload<'_>) -> Result<(PartitionId, u64, bool, usize)> {
    let (partition, incarnation) = take_part(payload)?;
    let words = payload.take_all(2)?;
    let rows = usize::try_from(words[1]).unwrap_or(usize::MAX);
    match words[0] {
        0 | 1 => Ok((partition, incarnation, words[0] == 1, rows)),
        other => Err(Error::Malformed(format!("a copy that begins {other}"))),
    }
}

/// A HAND_OVER of these partitions, all of them or none.
pub fn hand_over(frame: &mut Frame, request: u64, parts: &[(PartitionId, u64)]) {
    frame.begin(kind::HAND_OVER, request);
    frame.put(parts.len() as u64);
    parts.iter().for_each(|part| put_part(frame, part.0, part.1));
}

/// A FOLLOW of this life of a partition.
pub fn follow(frame: &mut Frame, request: u64, part: (PartitionId, u64)) {
    frame.begin(kind::FOLLOW, request);
    put_part(frame, part.0, part.1);
}

/// A TENSORS of a partition, from this float on.
pub fn tensors(frame: &mut Frame, request: u64, partition: PartitionId, from: usize) {
    frame.begin(kind::TENSORS, request);
    frame.put_all(&[u64::from(partition.0), from as u64]);
}

/// Reads a TENSORS: the partition, and from which float on.
pub fn take_tensors(payload: &mut Payload<'_>) -> Result<(PartitionId, usize)> {
    Ok((take_partition(payload)?, usize::try_from(payload.take()?).unwrap_or(usize::MAX)))
}

/// A NEXT of a backup that has done so many.
pub fn next(frame: &mut Frame, request: u64, done: u64) {
    frame.begin(kind::NEXT, request);
    frame.put(done);
}

/// A DID: what was done, or that the backup is none any more.
pub fn did(frame: &mut Frame, request: u64, what: Option<&[Frame]>) {
    frame.begin(kind::DID, request);
    frame.put_all(&[u64::from(what.is_some()), what.map_or(0, <[Frame]>::len) as u64]);
    for one in what.into_iter().flatten() {
        let words = one.payload().rest();
        frame.put_all(&[u64::from(one.kind()), one.request(), words.len() as u64]);
        frame.put_all(words);
    }
}

/// Reads a DID: frames in the order in which they are to be done. `None`: the backup is none any more.
pub fn take_did(mut payload: Payload<'_>) -> Result<Option<Vec<Frame>>> {
    let goes_on = payload.take()?;
    let mut done = Vec::new();
    for _ in 0..payload.take_count(3)? {
        let (kind, version) = (payload.take()?, payload.take()?);
        let kind = u32::try_from(kind).map_err(|_| Error::Malformed(format!("a frame of kind {kind:#x}")))?;
        let count = payload.take_count(1)?;
        let mut frame = Frame::default();
        frame.begin(kind, version);
        frame.put_all(payload.take_all(count)?);
        done.push(frame);
    }
    payload.end()?;
    Ok((goes_on == 1).then_some(done))
}

/// A partition's answer to a push, a stage, a commit or a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Who answers.
    pub partition: PartitionId,
    /// What it says.
    pub status: Status,
    /// The next batch of the task it has not applied; `u64::MAX` for a task it has closed.
    pub mark: u64,
    /// How many pushes it has applied in all.
    pub version: u64,
}

/// Begins PUSHED or FENCED with the answers.
pub fn answers(frame: &mut Frame, kind: u32, request: u64, answers: &[Answer]) {
    frame.begin(kind, request);
    frame.put(answers.len() as u64);
    for a in answers {
        frame.put_all(&[u64::from(a.partition.0), a.status.word(), a.mark, a.version]);
    }
}

/// Reads the answers of PUSHED or FENCED.
pub fn take_answers(mut payload: Payload<'_>) -> Result<Vec<Answer>> {
    let count = payload.take_count(4)?;
    let mut answers = Vec::with_capacity(count);
    for _ in 0..count {
        let partition = take_partition(&mut payload)?;
        let status = Status::from_word(payload.take()?)?;
        answers.push(Answer { partition, status, mark: payload.take()?, version: payload.take()? });
    }
    payload.end()?;
    Ok(answers)
}

/// The first frame of a connection.
pub fn hello(frame: &mut Frame, token: &str, who: Who) {
    frame.begin(kind::HELLO, 0);
    frame.put_bytes(token.as_bytes());
    frame.put(who.word());
}

/// A refusal with its reason.
pub fn refused(frame: &mut Frame, request: u64, reason: &str) {
    frame.begin(kind::REFUSED, request);
    frame.put_bytes(reason.as_bytes());
}

/// Checks that an answer is of the kind and number that are due.
pub fn expect(frame: &Frame, kind: u32, request: u64) -> Result<()> {
    if frame.kind() == kind::REFUSED {
        return Err(Error::Refused(frame.payload().take_text()?));
    }
    if frame.kind() != kind || frame.request() != request {
        return Err(Error::Malformed(format!(
            "answer {:#x} to request {} where {kind:#x} to {request} was due",
            frame.kind(),
            frame.request()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_header_survives() {
        let header = PushHeader {
            task: TaskId::train(2, 9),
            batch: 4,
            lease: LeaseId { term: 1, n: 77 },
            records: 512,
            factor: 0.375,
        };
        let mut frame = Frame::default();
        begin_push(&mut frame, 5, header, 1);
        put_part(&mut frame, PartitionId(3), 8);
        frame.put(0);
        let mut payload = frame.payload();
        assert_eq!(take_push(&mut payload).unwrap(), (header, 1));
        assert_eq!(take_part(&mut payload).unwrap(), (PartitionId(3), 8));
        begin_stage(&mut frame, 5, header, 1);
        frame.put_all(&[0, 0, 0]);
        assert_eq!((frame.kind(), take_push(&mut frame.payload()).unwrap()), (kind::STAGE, (header, 1)));
    }

    #[test]
    fn a_factor_that_is_no_factor_is_refused() {
        let lease = LeaseId { term: 1, n: 1 };
        for (factor, sound) in
            [(0.0, true), (1.0, true), (-0.5, false), (f32::NAN, false), (f32::INFINITY, false)]
        {
            let mut frame = Frame::default();
            begin_push(
                &mut frame,
                5,
                PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 1, factor },
                0,
            );
            assert_eq!(take_push(&mut frame.payload()).is_ok(), sound, "{factor}");
        }
        assert!(factor_of(1 << 32).is_err(), "more bits than a float has");
    }

    #[test]
    fn a_commit_survives() {
        let lease = LeaseId { term: 3, n: 1 };
        let sent = Commit { task: TaskId::train(1, 4), batch: 9, lease };
        let mut frame = Frame::default();
        commit(&mut frame, 2, sent, &[(PartitionId(0), 7), (PartitionId(5), 8)]);
        let mut payload = frame.payload();
        assert_eq!(take_commit(&mut payload).unwrap(), (sent, 2));
        assert_eq!(take_part(&mut payload).unwrap(), (PartitionId(0), 7));
        assert_eq!(take_part(&mut payload).unwrap(), (PartitionId(5), 8));
        payload.end().unwrap();
    }

    #[test]
    fn every_status_has_its_word() {
        for status in Status::ALL {
            assert_eq!(Status::from_word(status.word()).unwrap(), status);
        }
    }

    #[test]
    fn answers_survive_and_odd_ones_are_refused() {
        let answer = Answer { partition: PartitionId(1), status: Status::Gap, mark: 3, version: 10 };
        let mut frame = Frame::default();
        answers(&mut frame, kind::PUSHED, 9, &[answer]);
        expect(&frame, kind::PUSHED, 9).unwrap();
        assert_eq!(take_answers(frame.payload()).unwrap(), [answer]);
        assert!(expect(&frame, kind::PUSHED, 10).is_err());

        frame.set(4, 99);
        assert!(take_answers(frame.payload()).is_err(), "status 99 does not exist");
    }

    #[test]
    fn a_refusal_carries_its_reason() {
        let mut frame = Frame::default();
        refused(&mut frame, 1, "wrong token");
        let error = expect(&frame, kind::PULLED, 1).unwrap_err();
        assert_eq!(error.to_string(), "refused: wrong token");
    }
}
