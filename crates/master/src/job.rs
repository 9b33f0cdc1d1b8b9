//! A job's life, decided in one place: `step(now, event, effects)`.
//!
//! Everything from outside comes in as an [`Event`] with the time; everything to be done goes out as an
//! [`Effect`]. Nothing here reads a clock, a file or a socket, so a simulator can drive the very same
//! type. Questions carry a [`Ticket`]; their answers are effects too, because some must wait.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use elasticdl_spec::{LeaseId, Plan, Purpose, Shard, TaskId, placement};
use elasticdl_wire::control::{
    AloneReply, AloneRequest, BeatReply, CheckpointWrittenRequest, CopiedReply, CopiedRequest, JoinReply,
    LeaseReply, ReadyRequest, ReportRequest, Role, TopologyReply,
};
use serde_json::{Map, Value};

use crate::checkpoint::{Coordinator, Manifest};
use crate::config::{Best, Exit, Process, Waits};
use crate::evaluation::Evaluation;
use crate::fleet::{self, Fleet};
use crate::ledger::{Book, Entry, MemberRole, Quarantined, ShardNote, process_name};
use crate::status::{Phase, ScaleRequest, Status, StopRequest};
use crate::tasks::{Order, Tasks};
use crate::useful::Useful;

mod backups;
mod members;
mod moves;
mod phases;
mod recovery;
mod scale;
mod view;
mod work;

/// Ties an answer to its question.
pub type Ticket = u64;

/// A process that calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Caller {
    /// Worker (0) or server (1), as in the protocol.
    pub role: i32,
    /// Its number.
    pub id: u32,
    /// Its process.
    pub pid: u32,
}

impl Caller {
    fn role(self) -> Role {
        if self.role == Role::Server as i32 { Role::Server } else { Role::Worker }
    }
}

/// Something from outside.
#[derive(Debug)]
pub enum Event {
    /// A shard was found in the files.
    ShardFound(Purpose, Shard),
    /// No more shards of this purpose.
    AllFound(Purpose),
    /// The files cannot be indexed.
    IndexFailed(String),
    /// A process reports in.
    Joined(Ticket, Caller, String),
    /// A server serves its partitions, or cannot.
    Ready(Ticket, Caller, ReadyRequest),
    /// A sign of life, to be answered when there is something to do.
    Beat(Ticket, Caller, Value),
    /// Where are the partitions?
    TopologyAsked(Ticket),
    /// The loop begins.
    Begin,
    /// A worker wants a task, and has these leases in hand.
    LeaseAsked(Ticket, Caller, BTreeSet<LeaseId>, Need),
    /// A worker tells how far it is.
    Reported(Ticket, Caller, Box<ReportRequest>),
    /// A server has written its part of a checkpoint, or failed to.
    Written(Ticket, Caller, CheckpointWrittenRequest),
    /// A server has copied partitions that it is to have, or failed to.
    Copied(Ticket, Caller, CopiedRequest),
    /// A server has lost the backup of a partition.
    Alone(Ticket, Caller, AloneRequest),
    /// A manifest is durable, or could not be written.
    Committed(u64, Result<Box<Manifest>, String>),
    /// The export has ended.
    Exported(Result<Value, String>),
    /// A process was started, or could not be.
    Launched(Role, u32, Result<Process, String>),
    /// A process is gone.
    Exited(Exit),
    /// A process does not run yet.
    Waits(Waits),
    /// So many workers and servers, please.
    Scale(Ticket, ScaleRequest),
    /// No more workers than that, whatever is wanted; `None`: as many as are wanted.
    Allow(Ticket, Option<u32>),
    /// Stop.
    Stop(StopRequest),
    /// Time has passed.
    Tick,
}

/// How soon a worker needs a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// It has nothing to do.
    Now,
    /// It wants one in hand, for a time in which no master answers.
    Ahead,
}

/// Something to be done.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Write this down. What comes after it in the list may only be done once it is written.
    Record(Entry),
    /// Answer a question.
    Answer(Ticket, Answer),
    /// Carry out an order on the fleet.
    Fleet(fleet::Order),
    /// End a process at once.
    Kill(Role, u32, u32),
    /// Write the manifest of a checkpoint whose files are durable.
    Commit(Box<Manifest>),
    /// The checkpoint with this number is the one to go back to: older ones may go.
    Prune(u64),
    /// Export the checkpoint with this number.
    Export(u64),
    /// Tell the world.
    Emit(&'static str, Map<String, Value>),
    /// The job is over.
    Finish(Phase),
}

/// An answer to a question.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// To [`Event::Joined`].
    Join(Box<JoinReply>),
    /// To [`Event::Beat`].
    Beat(BeatReply),
    /// To [`Event::TopologyAsked`].
    Topology(TopologyReply),
    /// To [`Event::LeaseAsked`].
    Lease(LeaseReply),
    /// To [`Event::Copied`].
    Copied(CopiedReply),
    /// To [`Event::Alone`].
    Alone(AloneReply),
    /// To [`Event::Reported`]: whether the lease is still held.
    Report(bool),
    /// To whatever needs no more than that.
    Noted,
    /// To whatever comes from a process that is not one of ours, or asks the impossible.
    Refused(String),
}

/// Where a partition is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    server: u32,
    incarnation: u64,
    /// The incarnation from which on nothing was lost: what it and later ones have acknowledged holds.
    since: u64,
    /// Set while its server serves it.
    address: Option<String>,
    /// The server with a backup of this life of it, which lacks nothing.
    backup: Option<u32>,
}

/// What is known of a process beside its state in the fleet.
#[derive(Debug, Clone, Default)]
struct Known {
    address: String,
    records: u64,
    gauges: Value,
    /// Whether a server has said that it serves what it has.
    serves: bool,
    /// When it last called.
    heard: Duration,
    /// Why it does not run yet.
    waits: Option<String>,
}

/// A beat that waits for something to do.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    since: Duration,
}

/// A job.
pub struct Job {
    plan: Plan,
    /// The plan as every process gets it.
    plan_json: String,
    /// Directory of the checkpoints, as the servers are told.
    checkpoint_dir: String,
    best: Option<Best>,
    exports: bool,
    term: u64,
    lease_next: u64,
    phase: Phase,
    error: Option<String>,
    tasks: Tasks,
    evaluation: Evaluation,
    fleet: Fleet,
    /// Finds out how many workers are of use; `None` where somebody has said how many there are to be.
    useful: Option<Useful>,
    /// Records that this master was told of, including those that are trained again.
    told: u64,
    checkpoints: Coordinator,
    /// The newest committed checkpoint: what a restarted server restores.
    committed: Option<Manifest>,
    /// The checkpoint that was begun when all training was done.
    last_cut: Option<u64>,
    places: Vec<Place>,
    /// Partitions on their way to another server.
    moving: Option<moves::Moving>,
    backups: backups::Backups,
    /// No other move before this.
    moves_not_before: Duration,
    loads: moves::Loads,
    servers_wanted: u32,
    /// Whether partitions are still to be dealt to as many servers as are wanted.
    spreading: bool,
    /// Servers that are to join again, because what they are to hold has changed.
    rejoin: BTreeSet<u32>,
    /// Partitions that were on their way when an earlier master died.
    arriving: BTreeSet<u32>,
    known: BTreeMap<(i32, u32), Known>,
    beats: BTreeMap<Caller, Waiting>,
    command_next: u64,
    /// When training began, ended, and from how many records it started in this run.
    training: Option<(Duration, Option<Duration>, u64)>,
    window: VecDeque<(Duration, u64, f64)>,
    last_progress: Duration,
    /// When time was last seen to pass.
    ticked: Duration,
    last_scores: Option<(f64, Option<f64>)>,
    stopping_since: Duration,
    /// The checkpoint that each server was last told to write, and the number of that command.
    checkpoint_told: BTreeMap<u32, (u64, u64)>,
    /// Whether the final evaluation is over.
    evaluated_last: bool,
    exporting: bool,
    /// The last log lines of the process that died last.
    last_words: Vec<String>,
    /// Failures that another try may mend, by task and batch.
    failures: BTreeMap<(TaskId, u64), u32>,
    /// Batches that are set aside.
    quarantined: Vec<Quarantined>,
    /// Training shards as the ledger remembers them.
    shard_notes: BTreeMap<u32, ShardNote>,
    /// Whether those were all.
    was_indexed: bool,
    /// No lease below this one counts.
    floor: Option<LeaseId>,
    /// Tasks that were done and are being applied again, since when.
    replay: Option<Replay>,
    /// Records of all tasks that were ever opened again.
    replayed: u64,
    /// Whether this master has given a lease.
    has_leased: bool,
    /// Whether an earlier master has led this job.
    goes_on: bool,
}

/// What is being applied again since a server died.
#[derive(Debug)]
struct Replay {
    since: Duration,
    tasks: BTreeSet<TaskId>,
    count: usize,
}

/// What a job is made from.
pub struct Start {
    /// The job and its model.
    pub plan: Plan,
    /// Where checkpoints go.
    pub checkpoint_dir: String,
    /// What the ledger says. Of its processes only those that still run are left in it.
    pub book: Book,
    /// The checkpoint that the ledger calls committed.
    pub committed: Option<Manifest>,
    /// The number of the next checkpoint.
    pub checkpoint_next: u64,
    /// How old the committed checkpoint is, or the job where there is none.
    pub checkpoint_age: Duration,
    /// What the data allows at best.
    pub best: Option<Best>,
    /// Whether the model is exported at the end.
    pub exports: bool,
    /// Which master this is.
    pub term: u64,
    /// No more workers than that at first.
    pub workers_allowed: Option<u32>,
}

impl Job {
    /// A job as the ledger has it; [`Event::Begin`] is to follow.
    pub fn new(start: Start) -> Self {
        let Start { plan, book, committed, term, .. } = start;
        assert_eq!(book.committed, committed.as_ref().map(|m| m.id), "the committed checkpoint is at hand");
        let job = &plan.job;
        let order = if job.data.shuffle { Order::Shuffled(job.train.seed) } else { Order::Files };
        let servers_wanted = book.servers_wanted.unwrap_or(job.servers.count).min(job.servers.partitions);
        let mut tasks = Tasks::new(job.train.epochs, order);
        tasks.load(Duration::ZERO, &book);
        let workers = book.workers_wanted.unwrap_or_else(|| job.workers_at_start());
        let automatic = book.workers_wanted.map_or(job.workers.count.is_none(), |_| book.workers_automatic);
        let useful = automatic.then(|| Useful::new(job.kubernetes.workers_min, job.workers.max, workers));
        let workers = useful.as_ref().map_or(workers, |useful| useful.target().workers);
        let mut made = Job {
            plan_json: serde_json::to_string(&plan).expect("a plan is JSON"),
            checkpoint_dir: start.checkpoint_dir,
            best: start.best,
            exports: start.exports,
            term,
            lease_next: 1,
            phase: Phase::Starting,
            error: None,
            tasks,
            evaluation: Evaluation::new(job.evaluate.clone(), job.train.batch),
            fleet: Fleet::new(servers_wanted, workers, job.limits.restarts),
            useful,
            told: 0,
            checkpoints: Coordinator::new(
                job.checkpoint.every,
                start.checkpoint_next.max(book.cut + 1),
                start.checkpoint_age,
            ),
            committed,
            last_cut: None,
            places: places(&book, job.servers.partitions, servers_wanted),
            moving: None,
            backups: backups::Backups::default(),
            moves_not_before: Duration::ZERO,
            loads: moves::Loads::default(),
            servers_wanted,
            spreading: false,
            rejoin: BTreeSet::new(),
            arriving: book.arriving.clone(),
            known: BTreeMap::new(),
            beats: BTreeMap::new(),
            // Above those of any master before, so that no server takes a command for an old one.
            command_next: (term << 32) + 1,
            training: None,
            window: VecDeque::new(),
            last_progress: Duration::ZERO,
            ticked: Duration::ZERO,
            last_scores: None,
            stopping_since: Duration::ZERO,
            checkpoint_told: BTreeMap::new(),
            evaluated_last: false,
            exporting: false,
            last_words: Vec::new(),
            failures: BTreeMap::new(),
            quarantined: book.quarantined.clone(),
            shard_notes: book.shards.clone(),
            was_indexed: book.indexed,
            floor: book.floor,
            replay: None,
            replayed: book.replayed,
            has_leased: false,
            goes_on: !book.is_empty(),
            plan,
        };
        made.fleet.allow(start.workers_allowed);
        made.adopt(&book);
        made
    }

    /// Takes in what happened and says what is to be done.
    pub fn step(&mut self, now: Duration, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Begin => self.begin(now, effects),
            Event::ShardFound(Purpose::Train, shard) => self.shard_found(now, shard, effects),
            Event::ShardFound(Purpose::Evaluate, shard) => self.evaluation.add_shard(shard),
            Event::AllFound(Purpose::Train) => self.all_found(now, effects),
            Event::AllFound(Purpose::Evaluate) => self.evaluation.all_found(),
            Event::IndexFailed(error) => self.fail(now, error, effects),
            Event::Joined(ticket, caller, address) => self.joined(now, ticket, caller, address, effects),
            Event::Ready(ticket, caller, ready) => self.ready(now, ticket, caller, ready, effects),
            Event::Beat(ticket, caller, gauges) => self.beat(now, ticket, caller, gauges, effects),
            Event::TopologyAsked(ticket) => {
                effects.push(Effect::Answer(ticket, Answer::Topology(self.topology())));
            }
            Event::LeaseAsked(ticket, caller, held, need) => {
                self.lease(now, ticket, caller, &held, need, effects);
            }
            Event::Reported(ticket, caller, report) => self.report(now, ticket, caller, *report, effects),
            Event::Written(ticket, caller, written) => self.written(now, ticket, caller, written, effects),
            Event::Copied(ticket, caller, copied) => self.copied(now, ticket, caller, &copied, effects),
            Event::Alone(ticket, caller, asked) => self.alone(now, ticket, caller, &asked, effects),
            Event::Committed(id, outcome) => self.commit_over(now, id, outcome, effects),
            Event::Exported(outcome) => self.exported(now, outcome, effects),
            Event::Launched(role, id, outcome) => self.launched(now, role, id, outcome, effects),
            Event::Exited(exit) => self.exited(now, exit, effects),
            Event::Waits(waits) => self.waits(waits, effects),
            Event::Scale(ticket, wanted) => self.scale(now, ticket, wanted, effects),
            Event::Allow(ticket, workers) => self.allow(now, ticket, workers, effects),
            Event::Stop(stop) => self.stop(now, stop, effects),
            Event::Tick => self.tick(now, effects),
        }
        self.advance(now, effects);
    }

    /// Where the job is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The job as people see it.
    pub fn status(&self, now: Duration) -> Status {
        view::status(self, now)
    }

    fn next_lease(&mut self) -> LeaseId {
        let n = self.lease_next;
        self.lease_next += 1;
        LeaseId { term: self.term, n }
    }
}

/// Where partitions are, as the ledger has it. Where no server runs, each of those that will be started gets its share.
fn places(book: &Book, partitions: u32, servers: u32) -> Vec<Place> {
    let running = book.processes.values().any(|running| running.role == MemberRole::Server);
    let place = |p| {
        let dealt = placement::server_of_partition(elasticdl_spec::PartitionId(p), servers).0;
        let server = book.servers.get(&p).copied().filter(|_| running).unwrap_or(dealt);
        let runs = |id: &u32| book.processes.contains_key(&process_name(MemberRole::Server, *id));
        Place {
            server,
            incarnation: book.incarnation(p),
            since: book.since(p),
            address: None,
            backup: book.backups.get(&p).copied().filter(runs),
        }
    };
    (0..partitions).map(place).collect()
}

/// Fields of an event, beside those that every event has.
fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    let taken = |key: &&str| ["event", "seq", "seconds", "unix_ms"].contains(key);
    assert!(!pairs.iter().any(|(key, _)| taken(key)), "every event has that already");
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

#[cfg(test)]
mod tests;
