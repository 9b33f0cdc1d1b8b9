//! A virtual world: one job with all its processes, a clock that jumps from event to event, and one source
//! of chance. Everything that happens follows from the seed.

use std::rc::Rc;
use std::time::Duration;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::config::Exit;
use elasticdl_master::job::Answer;
use elasticdl_spec::mix::{Rng, mix2};
use elasticdl_wire::{gate, ps};

use crate::branches::Branches;
use crate::checkers::{Checkers, Violation};
use crate::disk::Disk;
use crate::gate::Word;
use crate::master::Master;
use crate::moving::Said;
use crate::net::{Pid, Question, Request};
use crate::processes::{Body, Process, Timer};
use crate::queue::Queue;
use crate::sabotage::Sabotage;
use crate::scenario::{Fault, Kind, Scenario};
use crate::trace::Trace;

/// More than this never happens in a world that gets somewhere: so much whatever it is like, and so much for each worker
/// on top of it, because those that a gate does not admit ask again and again.
const STEPS_MAX: u64 = 4_000_000;
const STEPS_MAX_BY_WORKER: u64 = 50_000;

/// A world.
pub struct World {
    pub(crate) now: Duration,
    pub(crate) queue: Queue<Action>,
    pub(crate) rng: Rng,
    pub(crate) scenario: Scenario,
    pub(crate) sabotage: Sabotage,
    /// In the order of their terms. One that works is away for that time.
    pub(crate) masters: Vec<Option<Box<Master>>>,
    pub(crate) processes: Vec<Process>,
    pub(crate) disk: Disk,
    pub(crate) checkers: Checkers,
    pub(crate) branches: Branches,
    pub(crate) trace: Trace,
    /// Whether nothing goes wrong any more.
    pub(crate) healed: bool,
    pub(crate) over: bool,
    /// Whether a master is about to start.
    pub(crate) starting: bool,
    pub(crate) ledger_fails: bool,
    pub(crate) slow_until: Duration,
    pub(crate) fails_until: Duration,
    pub(crate) try_next: u64,
}

/// Something that happens.
#[derive(Debug)]
pub enum Action {
    /// The supervisor starts a master.
    StartMaster,
    /// A question reaches a master.
    Question {
        /// Which master.
        master: usize,
        /// Who asks.
        pid: Pid,
        /// Which of its tries.
        try_number: u64,
        /// What.
        question: Box<Question>,
    },
    /// An answer reaches a process.
    Answered {
        /// Whom.
        pid: Pid,
        /// To which of its tries.
        try_number: u64,
        /// What.
        answer: Box<Answer>,
    },
    /// A process gives a call up.
    CallLate {
        /// Who.
        pid: Pid,
        /// Which of its tries.
        try_number: u64,
    },
    /// A worker's request reaches a server.
    Request {
        /// Which server.
        pid: Pid,
        /// What.
        request: Rc<Request>,
    },
    /// A server's answer reaches a worker.
    Reply {
        /// Which worker.
        pid: Pid,
        /// To which of its rounds.
        round: u64,
        /// What.
        answers: Rc<Vec<ps::Answer>>,
    },
    /// A server says something to another one.
    Peer {
        /// To which.
        pid: Pid,
        /// Which.
        from: Pid,
        /// Ties an answer to a question.
        number: u64,
        /// What.
        said: Box<Said>,
    },
    /// A worker's word reaches a server that may have the gate.
    Gate {
        /// Which server.
        pid: Pid,
        /// What.
        word: Word,
    },
    /// What the gate says reaches a worker.
    GateSaid {
        /// Which worker.
        pid: Pid,
        /// In which of its rounds.
        round: u64,
        /// To what.
        ask: gate::Ask,
        /// What.
        said: Box<gate::Said>,
    },
    /// A process has planned this for itself.
    Timer {
        /// Who.
        pid: Pid,
        /// What.
        timer: Timer,
    },
    /// A process is asked to end.
    Terminate {
        /// Who.
        pid: Pid,
    },
    /// A process is killed.
    Kill {
        /// Who.
        pid: Pid,
    },
    /// Time passes for a master.
    Tick {
        /// Which.
        master: usize,
    },
    /// The files are indexed up to here.
    Found {
        /// By which master.
        master: usize,
        /// How many shards were found before.
        number: usize,
    },
    /// A ledger's writes are on disk.
    Synced {
        /// Whose.
        master: usize,
    },
    /// A manifest is written.
    Manifest {
        /// By which master.
        master: usize,
        /// It.
        manifest: Box<Manifest>,
    },
    /// A master may see that a process is gone.
    ExitSeen {
        /// Which master.
        master: usize,
        /// Who is gone.
        exit: Box<Exit>,
    },
    /// A master whose job is over ends.
    MasterEnds {
        /// Which.
        master: usize,
    },
    /// Something goes wrong.
    Fault(Fault),
    /// Nothing goes wrong any more.
    Heal,
}

/// What became of a world.
#[derive(Debug)]
pub struct Outcome {
    /// One number for all that happened.
    pub hash: u64,
    /// What must not have happened, at most one of each checker.
    pub violations: Vec<Violation>,
    /// What was met.
    pub branches: Branches,
    /// How long it lasted in its own time.
    pub lasted: Duration,
    /// How many things happened.
    pub steps: u64,
}

impl World {
    /// The world of a seed.
    pub fn new(seed: u64, kind: Kind, sabotage: Sabotage, trace: Trace) -> Self {
        let scenario = Scenario::draw(seed, kind);
        World {
            now: Duration::ZERO,
            queue: Queue::default(),
            rng: Rng::new(mix2(seed, 0x0d1ce)),
            checkers: Checkers::default(),
            scenario,
            sabotage,
            masters: Vec::new(),
            processes: Vec::new(),
            disk: Disk::default(),
            branches: Branches::default(),
            trace,
            healed: false,
            over: false,
            starting: false,
            ledger_fails: false,
            slow_until: Duration::ZERO,
            fails_until: Duration::ZERO,
            try_next: 0,
        }
    }

    /// Lets everything happen until the job is done, or cannot be any more.
    pub fn run(mut self) -> Outcome {
        for (at, fault) in self.scenario.faults.clone() {
            self.queue.plan(at, Action::Fault(fault));
        }
        self.queue.plan(self.scenario.heal, Action::Heal);
        self.describe();
        self.start_master();
        let steps_max = STEPS_MAX + STEPS_MAX_BY_WORKER * u64::from(self.scenario.plan.job.workers.max);
        let mut steps = 0;
        while !self.over && self.checkers.goes_on() {
            let Some((at, action)) = self.queue.pop() else { break };
            steps += 1;
            if at > self.scenario.limit || steps > steps_max {
                break;
            }
            self.now = at;
            self.happen(action);
        }
        if !self.over {
            crate::checkers::liveness::ended(&mut self, steps);
        }
        Outcome {
            hash: self.trace.hash(),
            violations: self.checkers.violations,
            branches: self.branches,
            lasted: self.now,
            steps,
        }
    }

    fn happen(&mut self, action: Action) {
        if let Some(until) = self.stopped_until(&action) {
            // It stays where it is until whoever it is for goes on.
            return self.queue.plan(until, action);
        }
        match action {
            Action::StartMaster => {
                self.starting = false;
                // A second one beside one that runs is a fault, and those are over by then.
                if !self.healed || self.leader().is_none() {
                    self.start_master();
                }
            }
            Action::Question { master, pid, try_number, question } => {
                self.asked(master, pid, try_number, *question);
            }
            Action::Answered { pid, try_number, answer } => self.answered(pid, try_number, *answer),
            Action::CallLate { pid, try_number } => self.call_late(pid, try_number),
            Action::Request { pid, request } => {
                self.with_server(pid, |world, pid, server| world.requested(pid, server, &request));
            }
            Action::Reply { pid, round, answers } => {
                self.with_worker(pid, |world, pid, worker| world.replied(pid, worker, round, &answers));
            }
            Action::Peer { pid, from, number, said } => {
                self.with_server(pid, |world, pid, server| world.peer_said(pid, server, from, number, *said));
            }
            Action::Gate { pid, word } => {
                self.with_server(pid, |world, pid, server| world.gate_asked(pid, server, word));
            }
            Action::GateSaid { pid, round, ask, said } => {
                self.with_worker(pid, |world, pid, worker| world.gate_said(pid, worker, round, ask, &said));
            }
            Action::Timer { pid, timer } => self.timer(pid, timer),
            Action::Terminate { pid } => self.terminated(pid),
            Action::Kill { pid } => self.end(pid, None),
            Action::Tick { master } => self.master_tick(master),
            Action::Found { master, number } => self.shard_found(master, number),
            Action::Synced { master } => self.synced(master),
            Action::Manifest { master, manifest } => self.manifest_written(master, manifest),
            Action::ExitSeen { master, exit } => self.exit_seen(master, *exit),
            Action::MasterEnds { master } => self.master_ends(master),
            Action::Fault(fault) => self.strike(fault),
            Action::Heal => self.heal(),
        }
    }

    /// Until when the one that this is for is stopped. What is for the dead happens to nobody.
    fn stopped_until(&self, action: &Action) -> Option<Duration> {
        let until = match action {
            Action::Question { master, .. }
            | Action::Tick { master }
            | Action::Found { master, .. }
            | Action::Synced { master }
            | Action::Manifest { master, .. }
            | Action::ExitSeen { master, .. }
            | Action::MasterEnds { master } => self.masters.get(*master)?.as_ref()?.paused_until,
            Action::Answered { pid, .. }
            | Action::CallLate { pid, .. }
            | Action::Request { pid, .. }
            | Action::Reply { pid, .. }
            | Action::Peer { pid, .. }
            | Action::Gate { pid, .. }
            | Action::GateSaid { pid, .. }
            | Action::Timer { pid, .. }
            | Action::Terminate { pid } => self.processes[*pid as usize].paused_until,
            Action::StartMaster | Action::Kill { .. } | Action::Fault(_) | Action::Heal => return None,
        };
        (until > self.now).then_some(until)
    }

    fn timer(&mut self, pid: Pid, timer: Timer) {
        match self.processes[pid as usize].body {
            Some(Body::Worker(_)) => {
                self.with_worker(pid, |world, pid, worker| world.worker_timer(pid, worker, timer));
            }
            Some(Body::Server(_)) => match timer {
                Timer::Beat => self.with_server(pid, |world, pid, server| {
                    world.call(pid, Question::Beat(server.backs()));
                }),
                Timer::BackupLate(feed, due) => {
                    self.with_server(pid, |world, pid, server| world.backup_late(pid, server, feed, due));
                }
                Timer::Opened => self.with_server(pid, World::opened),
                Timer::FileWritten(id) => {
                    self.with_server(pid, |world, pid, server| world.file_written(pid, server, id));
                }
                Timer::PeerLate(number) => {
                    self.with_server(pid, |world, pid, server| world.peer_late(pid, server, number));
                }
                Timer::PeerAgain(number) => {
                    self.with_server(pid, |world, pid, server| world.peer_again(pid, server, number));
                }
                _ => {}
            },
            None => {}
        }
    }

    fn terminated(&mut self, pid: Pid) {
        match self.processes[pid as usize].body {
            Some(Body::Worker(_)) => self.with_worker(pid, World::terminate),
            Some(Body::Server(_)) => self.end(pid, Some(0)),
            None => {}
        }
    }

    /// How long a write to disk takes now.
    pub(crate) fn disk_time(&mut self) -> Duration {
        let slow = if self.slow_until > self.now { 10.0 + 60.0 * self.rng.uniform() } else { 1.0 };
        self.scenario.disk.sync.mul_f64(slow * (0.5 + self.rng.uniform()))
    }

    /// Whether the disk fails now, in an operation that meets this share of its failures.
    pub(crate) fn disk_fails(&mut self, share: f64) -> bool {
        if self.healed {
            return false;
        }
        let rate = if self.fails_until > self.now { 0.8 } else { self.scenario.disk.fail };
        rate > 0.0 && self.rng.uniform() < rate * share
    }

    /// Notes what happens.
    pub(crate) fn note(&mut self, kind: &'static str, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, kind, facts, text);
    }

    /// Something happened that must not.
    pub(crate) fn fail(&mut self, checker: &'static str, what: String) {
        self.note("VIOLATION", [0; 3], || format!("{checker}: {what}"));
        self.checkers.found(self.now, checker, what);
    }

    /// The job says that it is done: is it?
    pub(crate) fn job_done(&mut self) {
        self.over = true;
        if let Err(reason) = crate::checkers::exact::check(&self.scenario, &self.disk) {
            self.fail("exact", reason);
        }
    }

    fn describe(&mut self) {
        let job = &self.scenario.plan.job;
        let text = format!(
            "{} workers{}, {} servers, {} partitions, {} shards, {} epochs, {} to validate; net {:?}; disk {:?}; heals at {:?}",
            job.workers_at_start(),
            if job.workers.count.is_none() { " and more where they are of use" } else { "" },
            job.servers.count,
            job.servers.partitions,
            self.scenario.shards.len(),
            job.train.epochs,
            self.scenario.validation.len(),
            self.scenario.net,
            self.scenario.disk,
            self.scenario.heal,
        );
        self.note("world", [0; 3], || text);
    }
}
