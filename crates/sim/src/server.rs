//! A virtual server: real partitions behind a virtual network and disk, doing what `ps/src/run.rs` does.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use elasticdl_master::job::Answer;
use elasticdl_ps::Partition;
use elasticdl_ps::checkpoint::{self, Cut, Encoder, Head, Order, Rows, Sum};
use elasticdl_ps::closed::Closed;
use elasticdl_ps::gate::{Gate, Policy};
use elasticdl_ps::marks::{MARK_CLOSED, Open};
use elasticdl_ps::partition::{Push, RowGradients};
use elasticdl_spec::{LeaseId, PartitionId, TaskId};
use elasticdl_wire::control::{
    Assignment, BeatReply, CheckpointWrittenRequest, File, JoinReply, Mark, ReadyRequest, WriteCheckpoint,
    beat_reply::What,
};
use elasticdl_wire::gate::Decision;
use elasticdl_wire::ps::{self, Commit, PushHeader, Status};

use crate::backing::{Backup, Did, Feed, Pending};
use crate::branches::Branch;
use crate::moving::Fetching;
use crate::net::{Asked, Part, Pid, Question, Request};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::world::World;

/// Beats come no faster than this.
const BEAT_PAUSE: Duration = Duration::from_millis(200);
/// Gradients of rows and tensors: learning rate 1 makes of each a 1.
const ONES: [f32; 8] = [-1.0; 8];
/// Where a server that forgets its closed tasks applies them: a task that nobody has.
const SHADOW: u32 = 1 << 20;

/// A server's own state.
#[derive(Debug, Default)]
pub struct Server {
    pub(crate) partitions: BTreeMap<PartitionId, Partition>,
    pub(crate) serving: bool,
    /// The gate, and the life of partition 0 that it is beside.
    pub(crate) gate: Option<(u64, Gate)>,
    /// The newest connection of each worker.
    pub(crate) connections: BTreeMap<Pid, u64>,
    /// Whether it gives signs of life.
    beats: bool,
    /// What is being opened.
    opening: Option<(Vec<Assignment>, Option<u64>)>,
    /// The last command carried out.
    seen: u64,
    checkpoint: Option<Writing>,
    /// The last move that was begun, and what is on its way here.
    seen_move: u64,
    seen_promotion: u64,
    pub(crate) fetching: Option<Fetching>,
    /// The copies that others make, by who makes them.
    pub(crate) copies: BTreeMap<(Pid, PartitionId), u64>,
    /// What goes to backups, by number; of each partition the number of the last.
    pub(crate) feeds: BTreeMap<u64, Feed>,
    pub(crate) followed: BTreeMap<PartitionId, u64>,
    /// Answers that wait for backups.
    pub(crate) pending: Vec<Pending>,
    pub(crate) backups: BTreeMap<PartitionId, Backup>,
}

impl Server {
    /// What it holds and serves.
    pub(crate) fn held(&self) -> Vec<Assignment> {
        let held = self.partitions.values().filter(|p| !p.is_handed_over());
        held.map(|p| Assignment {
            partition: p.id().0,
            incarnation: p.incarnation(),
            ..Assignment::default()
        })
        .collect()
    }
}

/// A checkpoint being written.
#[derive(Debug)]
struct Writing {
    command: u64,
    order: Order,
    todo: VecDeque<PartitionId>,
    files: Vec<File>,
    /// The file being written.
    file: Option<(File, Body)>,
}

/// What is in a file.
#[derive(Debug)]
enum Body {
    /// The partition was cut; its rows are still to be taken away.
    Cut(Box<Cut>),
    /// All of it.
    Bytes(Vec<u8>),
}

impl World {
    /// The master has answered a server.
    pub(crate) fn server_heard(
        &mut self,
        pid: Pid,
        server: &mut Server,
        question: &Question,
        answer: Answer,
    ) {
        match (question, answer) {
            (_, Answer::Join(reply)) => self.begin_opening(pid, server, *reply),
            (Question::Ready(ready), _) if !ready.error.is_empty() => self.end(pid, Some(1)),
            (Question::Ready(_), _) => self.beat_on(pid, server),
            (Question::Copied(asked), Answer::Copied(reply)) => self.copied_heard(pid, server, asked, reply),
            (Question::Written(_), _) => self.checkpoint_reported(pid, server),
            (Question::Alone(_, feed), Answer::Alone(reply)) => self.alone_heard(server, *feed, reply.alone),
            (_, Answer::Beat(reply)) => self.server_told(pid, server, reply),
            _ => {}
        }
    }

    /// Gives signs of life from now on, where it does not do so already.
    pub(crate) fn beat_on(&mut self, pid: Pid, server: &mut Server) {
        if !std::mem::replace(&mut server.beats, true) {
            self.call(pid, Question::Beat(server.backs()));
        }
    }

    fn begin_opening(&mut self, pid: Pid, server: &mut Server, reply: JoinReply) {
        let restore_from = reply.restore_from.rsplit('-').next().and_then(|id| id.parse().ok());
        let held = |a: &&Assignment| {
            let held = server.partitions.get(&PartitionId(a.partition));
            held.is_none_or(|p| p.incarnation() != a.incarnation)
        };
        let missing = reply.partitions.iter().filter(held).count() as u32;
        let time = (0..missing).map(|_| self.disk_time()).sum();
        server.opening = Some((reply.partitions, restore_from));
        server.fetching = None;
        server.beats = false;
        self.set_timer(pid, time, Timer::Opened);
    }

    /// The files are read: what is not open in its incarnation is opened now.
    pub(crate) fn opened(&mut self, pid: Pid, server: &mut Server) {
        let Some((assignments, restore_from)) = server.opening.take() else { return };
        server.partitions.retain(|id, _| assignments.iter().any(|a| a.partition == id.0));
        for a in &assignments {
            let id = PartitionId(a.partition);
            if server.partitions.get(&id).is_some_and(|p| p.incarnation() == a.incarnation) {
                continue;
            }
            match self.open_partition(id, a, restore_from) {
                Ok(mut partition) => {
                    if let Some(floor) = a.floor {
                        partition.refuse_leases_below(LeaseId { term: floor.term, n: floor.n });
                    }
                    self.checkers.leases.opened(pid, &partition);
                    server.partitions.insert(id, partition);
                }
                Err((reason, user_error)) => {
                    let ready = ReadyRequest { error: reason, user_error, ..ReadyRequest::default() };
                    return self.call(pid, Question::Ready(ready));
                }
            }
        }
        server.serving = true;
        let ready = ReadyRequest { partitions: server.held(), ..ReadyRequest::default() };
        self.note("serving", [pid.into(), ready.partitions.len() as u64, 0], || {
            let lives = ready.partitions.iter().map(|a| format!("{}.{}", a.partition, a.incarnation));
            format!(
                "pid {pid}: partitions {} from checkpoint {restore_from:?}",
                lives.collect::<Vec<_>>().join(" ")
            )
        });
        self.call(pid, Question::Ready(ready));
    }

    fn open_partition(
        &mut self,
        id: PartitionId,
        a: &Assignment,
        restore_from: Option<u64>,
    ) -> Result<Partition, (String, bool)> {
        let model = &self.scenario.model;
        let Some(checkpoint) = restore_from else {
            return Ok(Partition::new(model.clone(), id, a.incarnation));
        };
        if self.disk_fails(1.0) {
            self.branches.count(Branch::CheckpointReadFailed);
            return Err(("the disk cannot be read now".into(), false));
        }
        let earlier = a.earlier.iter().map(|file| (file.checkpoint, file.bytes, file.crc32));
        let mut chain = Vec::new();
        for (checkpoint, bytes, crc32) in earlier.chain([(checkpoint, a.bytes, a.crc32)]) {
            let file = self.disk.checkpoint(checkpoint).and_then(|dir| dir.files.get(&id.0));
            let file = file.ok_or_else(|| (format!("checkpoint {checkpoint} has no file of {id}"), true))?;
            chain.push((checkpoint, &file[..], Sum { bytes, crc32 }));
        }
        let model = &self.scenario.model;
        let mut restored =
            checkpoint::decode(model, id, a.incarnation, &chain).map_err(|e| (e.chain(), true))?;
        if a.is_basis {
            restored.is_as_in(checkpoint);
        }
        self.branches.count(Branch::Restored);
        if !a.earlier.is_empty() {
            self.branches.count(Branch::RestoredChain);
        }
        Ok(restored)
    }

    fn server_told(&mut self, pid: Pid, server: &mut Server, reply: BeatReply) {
        match reply.what {
            Some(What::Leave(true)) => return self.end(pid, Some(0)),
            Some(What::WriteCheckpoint(order))
                if reply.command > server.seen && server.checkpoint.is_none() =>
            {
                self.begin_checkpoint(pid, server, reply.command, &order);
            }
            Some(What::Promote(order)) if reply.command > server.seen_promotion => {
                server.seen_promotion = reply.command;
                self.promoted(pid, server, reply.command, &order);
            }
            Some(What::Forget(order)) => {
                for a in order.partitions {
                    let stale = |b: &mut Backup| b.partition.incarnation() == a.incarnation;
                    if server.backups.get_mut(&PartitionId(a.partition)).is_some_and(stale) {
                        self.branches.count(Branch::BackupDropped);
                        server.backups.remove(&PartitionId(a.partition));
                    }
                }
            }
            Some(What::Move(order)) if reply.command > server.seen_move && server.fetching.is_none() => {
                server.seen_move = reply.command;
                self.begin_fetching(pid, server, reply.command, &order);
            }
            _ => {}
        }
        self.set_timer(pid, BEAT_PAUSE, Timer::Beat);
    }

    /// Closes what earlier checkpoints cover, then writes this one, partition by partition.
    fn begin_checkpoint(&mut self, pid: Pid, server: &mut Server, command: u64, order: &WriteCheckpoint) {
        let covered: Closed = serde_json::from_str(&order.covered).expect("the master sends ranges");
        server.partitions.values_mut().for_each(|p| p.close_all(&covered));
        let lives: Vec<_> = server.partitions.values().map(|p| (p.id(), p.incarnation())).collect();
        let covered = Rc::new(covered);
        for (id, life) in &lives {
            server.also(*id, *life, Did::Close(Rc::clone(&covered)));
        }
        if order.last {
            self.branches.count(Branch::Settled);
            server.partitions.values_mut().for_each(Partition::settle);
            for (id, life) in &lives {
                server.also(*id, *life, Did::Settle);
            }
        }
        let todo = server.held().iter().map(|held| PartitionId(held.partition)).collect();
        let id = order.checkpoint;
        self.note("cut begins", [pid.into(), id, order.base], || {
            format!("pid {pid}: checkpoint {id} on {}", order.base)
        });
        let base = (order.base != 0).then_some(order.base);
        let order = Order { checkpoint: id, base, is_basis: order.is_basis };
        server.checkpoint = Some(Writing { command, order, todo, files: Vec::new(), file: None });
        self.write_next(pid, server);
    }

    fn write_next(&mut self, pid: Pid, server: &mut Server) {
        let time = self.disk_time();
        let early = self.sabotage == Sabotage::CommitBeforeDurable;
        let Some(writing) = &mut server.checkpoint else { return };
        let Some(partition) = writing.todo.pop_front() else {
            let (checkpoint, files) = (writing.order.checkpoint, std::mem::take(&mut writing.files));
            return self
                .tell_written(pid, CheckpointWrittenRequest { checkpoint, files, ..Default::default() });
        };
        let Some(held) = server.partitions.get_mut(&partition) else {
            return self.write_next(pid, server); // It was let go of meanwhile.
        };
        let id = writing.order.checkpoint;
        writing.file = Some(match early {
            true => encoded(held, writing.order),
            false => {
                let cut = Cut::begin(held, writing.order);
                (file_of(cut.head()), Body::Cut(Box::new(cut)))
            }
        });
        let time = if early { time * 40 } else { time };
        self.note("cut", [pid.into(), id, partition.0.into()], || {
            format!("pid {pid}: checkpoint {id} {partition}")
        });
        self.set_timer(pid, time, Timer::FileWritten(id));
        if early {
            self.tell_early(pid, server);
        }
    }

    /// A file is on disk, or cannot be.
    pub(crate) fn file_written(&mut self, pid: Pid, server: &mut Server, id: u64) {
        let failed = self.disk_fails(0.2);
        let torn = self.sabotage == Sabotage::TornCut;
        let Some(writing) = server.checkpoint.as_mut().filter(|w| w.order.checkpoint == id) else { return };
        let Some((mut file, body)) = writing.file.take() else { return };
        let held = server.partitions.get_mut(&PartitionId(file.partition));
        let bytes = match (body, held) {
            (Body::Bytes(bytes), _) => Some(bytes),
            (Body::Cut(mut cut), Some(held)) => take_all(&mut file, &mut cut, held),
            (Body::Cut(_), None) => None,
        };
        let written = bytes
            .filter(|_| !failed)
            .is_some_and(|bytes| self.disk.put_file(id, file.partition, Rc::new(bytes)));
        if let Some(held) = server.partitions.get_mut(&PartitionId(file.partition)) {
            if written { held.end_cut(id) } else { held.abandon_cut(id) }
        }
        if !written {
            self.branches.count(Branch::CheckpointWriteFailed);
            writing.todo.clear();
            let error = "the disk takes nothing now".to_string();
            return self
                .tell_written(pid, CheckpointWrittenRequest { checkpoint: id, error, ..Default::default() });
        }
        if file.base != 0 {
            self.branches.count(Branch::FileAdds);
        }
        if torn && let Some(held) = server.partitions.get(&PartitionId(file.partition)) {
            file.marks = marks_of(held.memory().marks.open());
        }
        writing.files.push(file);
        if self.sabotage != Sabotage::CommitBeforeDurable {
            self.write_next(pid, server);
        }
    }

    /// Tells of all files while the first is being written: sabotage.
    fn tell_early(&mut self, pid: Pid, server: &mut Server) {
        let Some(writing) = &mut server.checkpoint else { return };
        let mut files: Vec<File> = writing.file.iter().map(|(file, _)| file.clone()).collect();
        for partition in std::mem::take(&mut writing.todo) {
            let Some(held) = server.partitions.get_mut(&partition) else { continue };
            files.push(encoded(held, writing.order).0);
        }
        let checkpoint = writing.order.checkpoint;
        self.tell_written(pid, CheckpointWrittenRequest { checkpoint, files, ..Default::default() });
    }

    fn tell_written(&mut self, pid: Pid, written: CheckpointWrittenRequest) {
        if self.sabotage != Sabotage::NoCheckpoints {
            self.call(pid, Question::Written(written));
        }
    }

    /// The master knows of the checkpoint, or has no use for it.
    pub(crate) fn checkpoint_reported(&mut self, _: Pid, server: &mut Server) {
        if let Some(writing) = server.checkpoint.take() {
            server.seen = writing.command;
        }
    }

    /// Workers ask.
    pub(crate) fn requested(&mut self, pid: Pid, server: &mut Server, request: &Request) {
        if !server.serving {
            return;
        }
        let cut = !self.healed && request.parts.len() > 1 && self.rng.uniform() < self.scenario.net.cut;
        let done = if cut {
            1 + self.rng.below(request.parts.len() as u64 - 1) as usize
        } else {
            request.parts.len()
        };
        let (mut answers, mut due) = (Vec::with_capacity(done), Vec::new());
        for part in &request.parts[..done] {
            let answer = match server.partitions.get_mut(&part.id) {
                Some(partition) => self.ask_partition(pid, partition, &request.what, part),
                None => ps::Answer { partition: part.id, status: Status::NotHere, mark: 0, version: 0 },
            };
            let refused = matches!(answer.status, Status::WrongIncarnation | Status::NotHere);
            if !refused && !matches!(request.what, Asked::Pull) {
                let did = Did::Asked(request.what.clone(), part.clone());
                due.extend(server.also(part.id, part.incarnation, did));
            }
            answers.push(answer);
        }
        if cut {
            self.branches.count(Branch::FrameCut);
            return self.feed_backups(pid, server);
        }
        self.reply_when_backed(pid, server, due, request.from, answers);
    }

    fn ask_partition(
        &mut self,
        pid: Pid,
        partition: &mut Partition,
        what: &Asked,
        part: &Part,
    ) -> ps::Answer {
        let incarnation = match self.sabotage {
            Sabotage::IncarnationsOff => partition.incarnation(),
            _ => part.incarnation,
        };
        let rows = &part.rows[..];
        let from = From { incarnation, version: part.version, rows };
        match what {
            Asked::Fence(task, lease) => {
                let mut answer =
                    partition.fence(*task, *lease, incarnation).expect("only training tasks are fenced");
                self.count_fence(&answer);
                if self.sabotage == Sabotage::ClosedOff && answer.mark == MARK_CLOSED {
                    answer.mark = 0;
                }
                self.checkers.leases.fenced(pid, *task, *lease, &answer);
                answer
            }
            Asked::Pull => {
                let mut out = [0.0; 8];
                let status = partition.admit(incarnation);
                if status == Status::Ok {
                    partition
                        .pull(0, rows, &mut out[..rows.len()])
                        .expect("rows are dealt to their partitions");
                }
                ps::Answer { partition: partition.id(), status, mark: 0, version: partition.version() }
            }
            Asked::Push(header) => {
                let answer = self.push(partition, *header, from);
                self.count_push(&answer);
                self.note_push("push", pid, header, &answer)
            }
            Asked::Stage(header) => {
                let answer = land(partition, *header, from, Partition::stage);
                match answer.status {
                    Status::Ok => self.branches.count(Branch::Staged),
                    Status::Stale => self.branches.count(Branch::StepStale),
                    _ => {}
                }
                self.note_push("stage", pid, header, &answer)
            }
            Asked::Step(step) => self.ask_step(pid, partition, incarnation, step),
            Asked::Commit(commit) => {
                let answer =
                    partition.commit(*commit, incarnation).expect("only training tasks are committed");
                if answer.status == Status::Ok {
                    self.branches.count(Branch::StepCommitted);
                }
                let Commit { task, batch, lease } = *commit;
                self.note_push(
                    "commit",
                    pid,
                    &PushHeader { task, batch, lease, records: 0, factor: 1.0 },
                    &answer,
                )
            }
        }
    }

    fn ask_step(
        &mut self,
        pid: Pid,
        partition: &mut Partition,
        incarnation: u64,
        step: &Rc<Decision>,
    ) -> ps::Answer {
        let answer = partition.commit_step(step, incarnation).expect("only training tasks make steps");
        match answer.status {
            Status::Ok => self.branches.count(Branch::StepApplied),
            Status::Duplicate => self.branches.count(Branch::StepAgain),
            _ => {}
        }
        self.note("step", [pid.into(), step.version, answer.status.word()], || {
            format!("{} from {}: {:?} {:?}", answer.partition, step.version, answer.status, step.batches)
        });
        answer
    }

    fn note_push(
        &mut self,
        kind: &'static str,
        pid: Pid,
        header: &PushHeader,
        answer: &ps::Answer,
    ) -> ps::Answer {
        let PushHeader { task, batch, lease, .. } = *header;
        self.note(kind, [task.as_u64(), batch, answer.status.word()], || {
            let ps::Answer { partition, status, mark, .. } = answer;
            format!("{task} batch {batch} lease {lease} at {partition}: {status:?}, mark {mark}")
        });
        self.checkers.leases.pushed(self.now, pid, header, answer);
        *answer
    }

    fn push(&mut self, partition: &mut Partition, header: PushHeader, from: From<'_>) -> ps::Answer {
        let late = partition.version().saturating_sub(from.version);
        let gathered = partition.tensors().first().map(|tensor| tensor.gathered());
        let mut answer = land(partition, header, from, Partition::push);
        if self.sabotage == Sabotage::StaleOff && answer.status == Status::Stale {
            answer = land(partition, header, From { version: partition.version(), ..from }, Partition::push);
        }
        if let (Some(Policy::Bounded(most)), Status::Ok) = (self.scenario.model.policy, answer.status)
            && late > most
        {
            let PushHeader { task, batch, .. } = header;
            let id = partition.id();
            self.fail(
                "bound",
                format!("{id} applied {task} batch {batch} after {late} others, and {most} are allowed"),
            );
        }
        if let (Some(Policy::Rounds(_)), Status::Ok, Some(gathered)) =
            (self.scenario.model.policy, answer.status, gathered)
            && late > gathered
        {
            let (id, PushHeader { task, batch, .. }) = (partition.id(), header);
            self.fail("bound", format!("{id} applied {task} batch {batch}, and its tensors had moved since"));
        }
        let mut land = |header| land(partition, header, from, Partition::push);
        let closed = answer.mark == MARK_CLOSED;
        match (self.sabotage, answer.status) {
            (Sabotage::MarksOff, Status::Duplicate) if !closed => {
                land(PushHeader { batch: answer.mark, ..header });
                answer
            }
            (Sabotage::ClosedOff, Status::Duplicate) if closed => {
                let task = TaskId::train(header.task.epoch, header.task.shard + SHADOW);
                let batch = partition.memory().marks.open().get(&task).map_or(0, |open| open.mark);
                self::land(partition, PushHeader { task, batch, ..header }, from, Partition::push);
                answer
            }
            (Sabotage::FencingOff, Status::Fenced) => {
                let lease = partition.memory().marks.open().get(&header.task).map(|open| open.lease);
                let header = PushHeader { lease: lease.unwrap_or(header.lease), ..header };
                self::land(partition, header, from, Partition::push)
            }
            _ => answer,
        }
    }

    fn count_push(&mut self, answer: &ps::Answer) {
        let branch = match answer.status {
            Status::Ok => Branch::PushApplied,
            Status::Duplicate if answer.mark == MARK_CLOSED => Branch::PushClosed,
            Status::Duplicate => Branch::PushDuplicate,
            Status::Fenced => Branch::PushFenced,
            Status::Gap => Branch::PushGap,
            Status::Stale if self.scenario.plan.job.is_hybrid() => Branch::TensorsStale,
            Status::Stale => Branch::PushStale,
            Status::WrongIncarnation | Status::NotHere | Status::NotStaged | Status::NotYet => {
                Branch::WrongIncarnation
            }
        };
        self.branches.count(branch);
    }

    fn count_fence(&mut self, answer: &ps::Answer) {
        let branch = match answer.status {
            Status::Ok if answer.mark == MARK_CLOSED => Branch::FenceClosed,
            Status::Ok => Branch::FenceRaised,
            Status::Fenced => Branch::FenceRefused,
            _ => Branch::WrongIncarnation,
        };
        self.branches.count(branch);
    }
}

/// What a batch was computed from.
#[derive(Debug, Clone, Copy)]
struct From<'a> {
    incarnation: u64,
    version: u64,
    rows: &'a [u64],
}

/// Does what was asked, as a backup does.
pub(crate) fn apply(partition: &mut Partition, what: &Asked, part: &Part) {
    let from = From { incarnation: part.incarnation, version: part.version, rows: &part.rows };
    match what {
        Asked::Fence(task, lease) => drop(partition.fence(*task, *lease, part.incarnation)),
        Asked::Pull => {}
        Asked::Push(header) => drop(land(partition, *header, from, Partition::push)),
        Asked::Stage(header) => drop(land(partition, *header, from, Partition::stage)),
        Asked::Commit(commit) => drop(partition.commit(*commit, part.incarnation)),
        Asked::Step(step) => drop(partition.commit_step(step, part.incarnation)),
    }
}

fn land(
    partition: &mut Partition,
    header: PushHeader,
    from: From<'_>,
    land: fn(&mut Partition, &Push<'_>) -> elasticdl_ps::Result<ps::Answer>,
) -> ps::Answer {
    let From { incarnation, version, rows } = from;
    let tables = [RowGradients { ids: rows, gradients: &ONES[..rows.len()] }];
    let tensors: Vec<&[f32]> = partition.tensors().iter().map(|t| &ONES[..t.values().len()]).collect();
    let push = Push { header, incarnation, version, tables: &tables, tensors: &tensors };
    land(partition, &push).expect("pushes fit the model")
}

/// The file of a partition, cut and written in one moment.
fn encoded(held: &mut Partition, order: Order) -> (File, Body) {
    let mut cut = Cut::begin(held, order);
    let mut file = file_of(cut.head());
    let bytes = take_all(&mut file, &mut cut, held).expect("nothing has happened to it");
    held.end_cut(order.checkpoint);
    (file, Body::Bytes(bytes))
}

/// The rows of a cut, taken away from the partition. `None`: it is not the one that was cut.
fn take_all(file: &mut File, cut: &mut Cut, held: &mut Partition) -> Option<Vec<u8>> {
    let mut encoder = Encoder::new(cut, Vec::new()).expect("memory takes everything");
    let mut rows = Rows::default();
    while let Some((table, _)) = cut.take_rows(held, &mut rows).ok()? {
        encoder.put(table, &mut rows).expect("memory takes everything");
    }
    let (bytes, sum) = encoder.finish().expect("memory takes everything");
    (file.bytes, file.crc32) = (sum.bytes, sum.crc32);
    Some(bytes)
}

/// What the master is told of a partition's file; its length and sum are still to come.
fn file_of(head: &Head) -> File {
    let (partition, incarnation, base) = (head.partition.0, head.incarnation, head.base.unwrap_or(0));
    File { partition, incarnation, base, marks: marks_of(&head.marks), ..File::default() }
}

fn marks_of(open: &BTreeMap<TaskId, Open>) -> Vec<Mark> {
    let mark =
        |(task, open): (&TaskId, &Open)| Mark { epoch: task.epoch, shard: task.shard, mark: open.mark };
    open.iter().map(mark).collect()
}
