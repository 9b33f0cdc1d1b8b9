//! Virtual processes: how they begin and end, and how they call the master until it answers.

use std::time::Duration;

use elasticdl_master::config::Exit;
use elasticdl_master::job::{Answer, Caller};
use elasticdl_wire::control::Role;

use crate::branches::Branch;
use crate::net::{Pid, Question};
use crate::server::Server;
use crate::worker::Worker;
use crate::world::{Action, World};

/// How long a call may take; a beat is held by the master for about a second.
const CALL_DEADLINE: Duration = Duration::from_millis(2500);
/// How soon a process notices that its connection is gone.
const RESET: Duration = Duration::from_millis(20);
/// The longest pause between two tries.
const PAUSE_LONGEST: Duration = Duration::from_secs(1);

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Worker or server.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Whether it runs.
    pub alive: bool,
    /// Stopped until then.
    pub paused_until: Duration,
    /// Cut off from the master until then.
    pub cut_until: Duration,
    /// The master that it talks to.
    pub route: usize,
    /// What it is.
    pub body: Option<Body>,
    calls: Vec<Call>,
    /// When a master last answered.
    heard: Duration,
    /// Whether it joins, and what it was about to ask before it was told to.
    joining: Option<Vec<Question>>,
}

/// What a process is.
#[derive(Debug)]
pub enum Body {
    /// A worker.
    Worker(Box<Worker>),
    /// A server.
    Server(Box<Server>),
}

/// A call that waits for its answer.
#[derive(Debug)]
struct Call {
    try_number: u64,
    tries: u32,
    question: Question,
}

/// Something that a process has planned for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// A worker's clock.
    Tick,
    /// The pause before a worker asks for a task is over.
    Ask,
    /// The next sign of life.
    Beat,
    /// A worker has computed its batch.
    Computed(u64),
    /// Not all servers have answered in this round.
    RoundLate(u64),
    /// The pause after that round is over.
    AskAgain(u64),
    /// The gate is asked again in this round.
    AskGate(u64),
    /// A server has read its partitions.
    Opened,
    /// A server has written a file.
    FileWritten(u64),
    /// Another server has not answered.
    PeerLate(u64),
    /// A pause before another server is asked again is over.
    PeerAgain(u64),
    /// A backup should have done something by now: by which feed, and what.
    BackupLate(u64, u64),
}

impl World {
    /// Starts a process.
    pub(crate) fn spawn(&mut self, role: Role, id: u32, route: usize) -> Pid {
        let pid = self.processes.len() as Pid;
        let body = match role {
            Role::Worker => Body::Worker(Box::new(Worker::new(pid, self.now, &self.scenario))),
            Role::Server => Body::Server(Box::default()),
        };
        self.processes.push(Process {
            role,
            id,
            alive: true,
            paused_until: Duration::ZERO,
            cut_until: Duration::ZERO,
            route,
            body: Some(body),
            calls: Vec::new(),
            heard: self.now,
            joining: Some(Vec::new()),
        });
        self.note("start", [pid.into(), id.into(), 0], || format!("pid {pid}: {role:?} {id}"));
        self.call(pid, Question::Join);
        pid
    }

    /// A process is gone, whyever. Masters that watch it will see it.
    pub(crate) fn end(&mut self, pid: Pid, code: Option<i32>) {
        let process = &mut self.processes[pid as usize];
        if !process.alive {
            return;
        }
        process.alive = false;
        process.body = None;
        process.calls.clear();
        let (role, id) = (process.role, process.id);
        if role == Role::Worker {
            self.connections_lost(pid);
        }
        self.note("exit", [pid.into(), id.into(), code.is_some().into()], || {
            format!("pid {pid}: {role:?} {id} code {code:?}")
        });
        let signal = code.is_none().then_some(9);
        for master in 0..self.masters.len() {
            let exit = Exit { role, id, pid, code, signal, last_lines: vec![], outside: None };
            let soon = Duration::from_micros(500 + self.rng.below(5000));
            self.queue.plan(self.now + soon, Action::ExitSeen { master, exit: Box::new(exit) });
        }
    }

    /// Who a process is, to a master.
    pub(crate) fn caller(&self, pid: Pid) -> Caller {
        let process = &self.processes[pid as usize];
        Caller { role: process.role as i32, id: process.id, pid }
    }

    /// Calls the master until it answers.
    pub(crate) fn call(&mut self, pid: Pid, question: Question) {
        self.call_after(pid, question, Duration::ZERO);
    }

    /// The same after a pause.
    pub(crate) fn call_after(&mut self, pid: Pid, question: Question, pause: Duration) {
        self.processes[pid as usize].calls.push(Call { try_number: 0, tries: 0, question });
        let at = self.processes[pid as usize].calls.len() - 1;
        self.try_call(pid, at, pause);
    }

    fn try_call(&mut self, pid: Pid, at: usize, pause: Duration) {
        self.try_next += 1;
        let try_number = self.try_next;
        let call = &mut self.processes[pid as usize].calls[at];
        call.try_number = try_number;
        call.tries += 1;
        let question = call.question.clone();
        let reachable = self.is_up(self.processes[pid as usize].route);
        let deadline = if reachable { CALL_DEADLINE } else { RESET };
        if reachable {
            self.send_question(pid, try_number, &question, pause);
        }
        self.queue.plan(self.now + pause + deadline, Action::CallLate { pid, try_number });
    }

    /// Every connection to this master is reset.
    pub(crate) fn reset_connections(&mut self, master: usize) {
        let mut late = Vec::new();
        for (pid, process) in self.processes.iter().enumerate() {
            if process.alive && process.route == master {
                late.extend(process.calls.iter().map(|call| (pid as Pid, call.try_number)));
            }
        }
        for (pid, try_number) in late {
            let soon = Duration::from_micros(self.rng.below(RESET.as_micros() as u64));
            self.queue.plan(self.now + soon, Action::CallLate { pid, try_number });
        }
    }

    /// A call was not answered in time: it is made again, maybe to another master.
    pub(crate) fn call_late(&mut self, pid: Pid, try_number: u64) {
        let process = &self.processes[pid as usize];
        let Some(at) = process.calls.iter().position(|call| call.try_number == try_number) else { return };
        if self.now.saturating_sub(process.heard) > self.scenario.plan.job.limits.orphan {
            self.branches.count(Branch::Orphaned);
            return self.end(pid, Some(1));
        }
        self.processes[pid as usize].route = self.route_for(pid);
        let call = &self.processes[pid as usize].calls[at];
        if matches!(call.question, Question::Topology) {
            // Asked once: whoever waits for it goes on with what it knows.
            self.processes[pid as usize].calls.remove(at);
            return self.with_worker(pid, World::topology_unheard);
        }
        let doubled = Duration::from_millis(20).saturating_mul(1 << call.tries.min(10)).min(PAUSE_LONGEST);
        let pause = doubled.mul_f64(1.0 - 0.25 * self.rng.uniform());
        self.try_call(pid, at, pause);
    }

    /// A master has answered.
    pub(crate) fn answered(&mut self, pid: Pid, try_number: u64, answer: Answer) {
        let now = self.now;
        let process = &mut self.processes[pid as usize];
        let Some(at) = process.calls.iter().position(|call| call.try_number == try_number) else { return };
        let question = process.calls.remove(at).question;
        process.heard = now;
        if let Answer::Refused(_) = answer {
            return self.refused(pid, question);
        }
        if let Answer::Join(_) = answer {
            let waiting = self.processes[pid as usize].joining.take().unwrap_or_default();
            for question in waiting {
                self.call_after(pid, question, Duration::from_millis(20));
            }
        }
        match self.processes[pid as usize].role {
            Role::Worker => {
                self.with_worker(pid, |world, pid, worker| world.worker_heard(pid, worker, answer))
            }
            Role::Server => {
                self.with_server(pid, |world, pid, server| {
                    world.server_heard(pid, server, &question, answer)
                });
            }
        }
    }

    /// The master does not know this process: it joins first, or ends where it may not.
    fn refused(&mut self, pid: Pid, question: Question) {
        self.branches.count(Branch::Stranger);
        let is_server = self.processes[pid as usize].role == Role::Server;
        match question {
            Question::Join => {
                self.branches.count(Branch::NotOurs);
                self.end(pid, Some(1));
            }
            // The next beat will hear the same.
            Question::Ready(_) if is_server => self.with_server(pid, World::beat_on),
            Question::Written(_) => self.with_server(pid, World::checkpoint_reported),
            Question::Copied(_) => self.with_server(pid, |_, _, server| server.fetching = None),
            question => {
                let beat_of_server = is_server && matches!(question, Question::Beat(_));
                let process = &mut self.processes[pid as usize];
                let is_new = process.joining.is_none();
                let waiting = process.joining.get_or_insert_default();
                // A server beats again once it serves.
                if !beat_of_server {
                    waiting.push(question);
                }
                if is_new {
                    self.call(pid, Question::Join);
                }
            }
        }
    }

    /// Works on a worker, if it still runs.
    pub(crate) fn with_worker(&mut self, pid: Pid, work: impl FnOnce(&mut World, Pid, &mut Worker)) {
        let body = self.processes[pid as usize].body.take();
        let Some(Body::Worker(mut worker)) = body else {
            self.processes[pid as usize].body = body;
            return;
        };
        work(self, pid, &mut worker);
        if self.processes[pid as usize].alive {
            self.processes[pid as usize].body = Some(Body::Worker(worker));
        }
    }

    /// Works on a server, if it still runs.
    pub(crate) fn with_server(&mut self, pid: Pid, work: impl FnOnce(&mut World, Pid, &mut Server)) {
        let body = self.processes[pid as usize].body.take();
        let Some(Body::Server(mut server)) = body else {
            self.processes[pid as usize].body = body;
            return;
        };
        work(self, pid, &mut server);
        if self.processes[pid as usize].alive {
            self.processes[pid as usize].body = Some(Body::Server(server));
        }
    }

    /// Plans something for a process.
    pub(crate) fn set_timer(&mut self, pid: Pid, after: Duration, timer: Timer) {
        self.queue.plan(self.now + after, Action::Timer { pid, timer });
    }
}
