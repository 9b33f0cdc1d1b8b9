//! The life of a job that runs a person's own program, decided in one place: `step(now, event, effects)`.
//!
//! A **member** is a process of ours beside one of the program: it starts it, ends it, and tells how it ended. All
//! members are there before any program starts: then a **round** begins, in which everybody knows everybody's
//! address. What must be started again within a round keeps its address; where that cannot be, or where all are
//! to start again, the next round begins when all are there. While some find no room the others give theirs back,
//! and all try again later: two jobs that have half of what they need do not wait for each other.
//!
//! Nothing here reads a clock, a file or a socket. A member asks what it is to do, is told what is wanted, and
//! does it: asked twice, it does it once.

use std::time::Duration;

use elasticdl_spec::command::CommandSpec;
use elasticdl_spec::{JobSpec, job::LimitsSpec};
use serde_json::{Map, Value, json};

use crate::config::{Exit, Placed, Process, Waits};
use crate::status::{Phase, Status, StopRequest};

pub mod book;
mod ends;
mod rounds;
pub mod run;
mod server;
mod turns;
pub mod variables;
mod view;

pub use book::{Book, End, Start};
pub use run::{Config, run};

/// Ties an answer to its question.
pub type Ticket = u64;

/// Something from outside.
#[derive(Debug, Clone)]
pub enum Event {
    /// The loop begins.
    Begin,
    /// A member tells how it is, and asks what to do.
    Turn(Ticket, Turn),
    /// A member's process was started, or could not be.
    Launched(u32, Result<Process, String>),
    /// A member's process is gone.
    Exited(Exit),
    /// It does not run yet.
    Waits(Waits),
    /// It does not run yet, but has room.
    Placed(Placed),
    /// Stop.
    Stop(StopRequest),
    /// Time has passed.
    Tick,
}

/// What a member says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Its rank.
    pub rank: u32,
    /// Its process.
    pub pid: u32,
    /// Where its program may listen.
    pub address: String,
    /// The last start it has made.
    pub start: Option<Start>,
    /// How that ended; `None`: it runs.
    pub end: Option<End>,
}

/// Something to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Write this down before anything that comes after it is done.
    Record(Box<Book>),
    /// Start the process of the member of this rank.
    Launch(u32),
    /// Ask it to end.
    Stop(u32, u32),
    /// End it at once.
    Kill(u32, u32),
    /// Answer a member.
    Answer(Ticket, Wanted),
    /// Tell the world.
    Emit(&'static str, Map<String, Value>),
    /// The job is over.
    Finish(Phase),
}

/// What a member is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Run no program; end the one that runs.
    Nothing,
    /// Make this start, where it was not made yet.
    Program(Box<Program>),
    /// End the program that runs, and then itself.
    Leave,
}

/// A start of the program, with all that it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Which.
    pub start: Start,
    /// The program and its arguments.
    pub run: Vec<String>,
    /// Its environment variables.
    pub environment: std::collections::BTreeMap<String, String>,
}

/// Where the job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There was no room: nothing is there, until it is tried again.
    Resting { until: Duration },
    /// Members are being started and waited for; nobody's program runs, or is about to end.
    Gathering {
        /// No round begins before.
        not_before: Duration,
        /// Since when some are missing.
        missing_since: Duration,
    },
    /// A round is under way.
    Running,
    /// The outcome is known; everybody leaves.
    Ending { phase: Phase, since: Duration, killed: bool },
    /// Over.
    Over(Phase),
}

/// A member.
#[derive(Debug, Clone, Default)]
struct Member {
    /// Its process, while it is there.
    process: Option<Process>,
    /// Whether its process was ordered and it is not known what came of it.
    launching: bool,
    /// Where it is; since it has called.
    address: Option<String>,
    /// Where the others believe it to be, in this round.
    place: Option<String>,
    /// Whether it was told to leave.
    leaving: bool,
    /// Whether it is being ended because it was not heard of: what it says from then on is too late.
    silenced: bool,
    /// Why it does not run yet, and whether that may pass.
    waits: Option<(String, bool)>,
    /// When it last called.
    heard: Duration,
    /// The start it is to make, or has made.
    start: Option<Start>,
    /// The start that it says it has made.
    made: Option<Start>,
    /// Whether its program runs, as it says, or as it was told since.
    runs: bool,
    /// How `start` ended.
    ended: Option<End>,
    /// Whether it alone is to be started again.
    due: bool,
    /// Not before this.
    not_before: Duration,
    /// How often its program was started.
    starts: u32,
    /// How often it alone was started again because it ended.
    restarts: u32,
    /// A call that waits for something to do, since when.
    turn: Option<(Ticket, Duration)>,
}

impl Member {
    fn is_there(&self) -> bool {
        self.address.is_some() && !self.leaving && !self.silenced
    }

    fn ended_well(&self) -> bool {
        self.ended.as_ref().is_some_and(End::is_good) && !self.due
    }
}

/// A job that runs a person's own program.
#[derive(Debug)]
pub struct Gang {
    job: String,
    command: CommandSpec,
    limits: LimitsSpec,
    grace: Duration,
    term: u64,
    stage: Stage,
    /// The last round that this master, or the one before, has begun.
    round: u32,
    /// All rounds of the job.
    rounds: u32,
    members: Vec<Member>,
    /// How often all were started again because one ended.
    restarts: u32,
    /// How often in a row there was no room for all.
    tries: u32,
    /// Why there was none.
    no_room: Option<String>,
    error: Option<String>,
    /// Members whose process was gone when this master came.
    lost: Vec<u32>,
    adopted: u32,
    /// Whether it was told that the program runs under this master.
    announced: bool,
    /// When time was last seen to pass.
    ticked: Duration,
    /// Whether something changed that must be remembered.
    changed: bool,
}

/// What a gang is made from.
#[derive(Debug)]
pub struct Origin<'a> {
    /// The job; it has a command.
    pub job: &'a JobSpec,
    /// What the masters before remember. Of its processes only those that still run are left in it.
    pub book: Book,
    /// Ranks of members that ran for the master before and are gone.
    pub lost: Vec<u32>,
    /// Whether a job that had stopped or failed is to run again.
    pub resume: bool,
    /// Which master this is.
    pub term: u64,
}

impl Gang {
    /// A gang as its book has it; [`Event::Begin`] is to follow.
    ///
    /// # Panics
    ///
    /// The job has no command.
    pub fn new(origin: Origin<'_>) -> Self {
        let Origin { job, mut book, lost, resume, term } = origin;
        let command = job.command.clone().expect("a gang runs a command");
        if book.finished.is_some_and(|phase| phase == Phase::Stopped || (resume && phase == Phase::Failed)) {
            book.begin_again();
        }
        let size = command.size() as usize;
        let mut members: Vec<Member> = book.members.iter().map(|note| note.member()).collect();
        members.resize_with(size, Member::default);
        let adopted = members.iter().filter(|member| member.process.is_some()).count() as u32;
        let gathering = Stage::Gathering { not_before: Duration::ZERO, missing_since: Duration::ZERO };
        let stage = match (book.finished, book.ending, book.running) {
            (Some(phase), ..) => Stage::Over(phase),
            (None, Some(phase), _) => Stage::Ending { phase, since: Duration::ZERO, killed: false },
            (None, None, true) => Stage::Running,
            (None, None, false) => gathering,
        };
        Gang {
            job: job.name.clone(),
            limits: job.limits.clone(),
            grace: job.kubernetes.grace,
            term,
            stage,
            round: 0,
            rounds: book.rounds,
            members,
            restarts: book.restarts,
            tries: 0,
            no_room: None,
            error: book.error,
            lost,
            adopted,
            announced: false,
            ticked: Duration::ZERO,
            changed: true,
            command,
        }
    }

    /// Takes in what happened and says what is to be done.
    pub fn step(&mut self, now: Duration, event: Event, effects: &mut Vec<Effect>) {
        let from = effects.len();
        match event {
            Event::Begin => self.begin(now, effects),
            Event::Turn(ticket, turn) => self.turn(now, ticket, turn, effects),
            Event::Launched(rank, outcome) => self.launched(now, rank, outcome, effects),
            Event::Exited(exit) => self.exited(now, exit, effects),
            Event::Waits(waits) => self.waits(waits, effects),
            Event::Placed(placed) => self.placed(placed),
            Event::Stop(stop) => self.stop(now, stop, effects),
            Event::Tick => self.tick(now, effects),
        }
        self.advance(now, effects);
        self.answer(now, effects);
        if std::mem::take(&mut self.changed) {
            effects.insert(from, Effect::Record(Box::new(self.book())));
        }
    }

    /// Where the job is.
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Resting { .. } | Stage::Gathering { .. } => Phase::Starting,
            Stage::Running => Phase::Running,
            Stage::Ending { .. } => Phase::Stopping,
            Stage::Over(phase) => phase,
        }
    }

    /// The job as people see it.
    pub fn status(&self, now: Duration) -> Status {
        view::status(self, now)
    }

    /// How long a program that is to end may take, and how long a member does without a master.
    pub fn patience(&self) -> (Duration, Duration) {
        (self.grace, self.limits.orphan)
    }

    fn begin(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let facts = fields([
            ("job", json!(self.job)),
            ("term", json!(self.term)),
            ("members", json!(self.members.len())),
            ("adopted", json!(self.adopted)),
        ]);
        effects.push(Effect::Emit("started", facts));
        if let Stage::Over(phase) = self.stage {
            return self.over(phase, effects);
        }
        let ending = matches!(self.stage, Stage::Ending { .. });
        for rank in std::mem::take(&mut self.lost).into_iter().filter(|_| !ending) {
            let why = "it was gone when the next master came".to_string();
            self.gone(now, rank, ends::Gone::Own(End { last_lines: vec![why], ..End::unknown() }), effects);
        }
    }

    fn name(&self, rank: u32) -> String {
        self.command.member(rank).to_string()
    }
}

/// Fields of an event.
fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

#[cfg(test)]
mod tests;
