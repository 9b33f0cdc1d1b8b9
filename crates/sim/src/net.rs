//! Messages: who says what to whom, and what the network does to it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use elasticdl_master::job::{Answer, Caller, Event, Need, Ticket};
use elasticdl_spec::{LeaseId, PartitionId, TaskId};
use elasticdl_wire::control::{
    AloneRequest, CheckpointWrittenRequest, CopiedRequest, ReadyRequest, ReportRequest, Role,
};
use elasticdl_wire::gate::{Ask, Decision, Said};
use elasticdl_wire::ps::{self, Commit, PushHeader};

use crate::branches::Branch;
use crate::gate::Word;
use crate::processes::Process;
use crate::world::{Action, World};

/// A process of the virtual world. Numbers are not used again.
pub type Pid = u32;

/// What the master is asked.
#[derive(Debug, Clone)]
pub enum Question {
    /// Join, with the address of a server.
    Join,
    /// A server serves.
    Ready(ReadyRequest),
    /// A sign of life, and by partition the life that a server has a backup of.
    Beat(BTreeMap<u32, u64>),
    /// Where are the partitions?
    Topology,
    /// A task, please; these leases are in hand.
    Lease(BTreeSet<LeaseId>, Need),
    /// How far a task is.
    Report(Box<ReportRequest>),
    /// A checkpoint is written.
    Written(CheckpointWrittenRequest),
    /// Partitions are copied, or cannot be.
    Copied(CopiedRequest),
    /// A backup is lost, to which so much went by this feed.
    Alone(AloneRequest, u64),
}

impl Question {
    /// The event that it is for a job; `address` is that of the caller.
    pub fn into_event(self, ticket: Ticket, caller: Caller, address: String) -> Event {
        match self {
            Question::Join => Event::Joined(ticket, caller, address),
            Question::Ready(ready) => Event::Ready(ticket, caller, ready),
            Question::Beat(backs) => Event::Beat(ticket, caller, serde_json::json!({ "backs": backs })),
            Question::Topology => Event::TopologyAsked(ticket),
            Question::Lease(held, need) => Event::LeaseAsked(ticket, caller, held, need),
            Question::Report(report) => Event::Reported(ticket, caller, report),
            Question::Written(written) => Event::Written(ticket, caller, written),
            Question::Copied(copied) => Event::Copied(ticket, caller, copied),
            Question::Alone(asked, _) => Event::Alone(ticket, caller, asked),
        }
    }

    /// Its name in traces.
    pub fn name(&self) -> &'static str {
        match self {
            Question::Join => "join",
            Question::Ready(_) => "ready",
            Question::Beat(_) => "beat",
            Question::Topology => "topology",
            Question::Lease(..) => "lease",
            Question::Report(_) => "report",
            Question::Written(_) => "written",
            Question::Copied(_) => "copied",
            Question::Alone(..) => "alone",
        }
    }
}

/// What partitions of one server are asked.
#[derive(Debug)]
pub struct Request {
    /// Who asks, and in which round.
    pub from: (Pid, u64),
    /// What is asked of each of them.
    pub what: Asked,
    /// What is asked of which partitions.
    pub parts: Vec<Part>,
}

/// What is asked of one partition.
#[derive(Debug, Clone)]
pub struct Part {
    /// Which partition.
    pub id: PartitionId,
    /// The incarnation that the worker believes in.
    pub incarnation: u64,
    /// The version that it pulled.
    pub version: u64,
    /// The rows in question.
    pub rows: Vec<u64>,
}

/// What a partition is asked.
#[derive(Debug, Clone)]
pub enum Asked {
    /// To raise a fence.
    Fence(TaskId, LeaseId),
    /// For rows.
    Pull,
    /// To apply a batch.
    Push(PushHeader),
    /// To keep a batch until it is committed.
    Stage(PushHeader),
    /// To apply the batch that is kept.
    Commit(Commit),
    /// To apply the batches that make a step.
    Step(Rc<Decision>),
}

impl World {
    /// Sends something: it may be lost, come twice, come late.
    fn send(&mut self, extra: Duration, make: impl Fn() -> Action) {
        let net = self.scenario.net;
        let mut copies = 1;
        if !self.healed {
            if self.rng.uniform() < net.loss {
                return self.branches.count(Branch::MessageLost);
            }
            if self.rng.uniform() < net.twice {
                self.branches.count(Branch::MessageDoubled);
                copies = 2;
            }
        }
        for _ in 0..copies {
            let mut delay = extra + net.base + net.jitter.mul_f64(self.rng.uniform().powi(3));
            if !self.healed && self.rng.uniform() < net.late {
                self.branches.count(Branch::MessageLate);
                delay += net.late_max.mul_f64(self.rng.uniform());
            }
            self.queue.plan(self.now + delay, make());
        }
    }

    /// Asks a master; `try_number` ties the answer to it.
    pub(crate) fn send_question(&mut self, pid: Pid, try_number: u64, question: &Question, after: Duration) {
        let process = &self.processes[pid as usize];
        if process.cut_until > self.now {
            return self.branches.count(Branch::MessageLost);
        }
        let master = process.route;
        self.send(after, || Action::Question {
            master,
            pid,
            try_number,
            question: Box::new(question.clone()),
        });
    }

    /// Answers a process.
    pub(crate) fn send_answer(&mut self, pid: Pid, try_number: u64, answer: Answer) {
        if self.processes[pid as usize].cut_until > self.now {
            return self.branches.count(Branch::MessageLost);
        }
        self.send(Duration::ZERO, || Action::Answered { pid, try_number, answer: Box::new(answer.clone()) });
    }

    /// Where a process is found: by its own number, or by that of the server that it is.
    pub(crate) fn address_of(&self, pid: Pid) -> String {
        let process = &self.processes[pid as usize];
        if self.scenario.net.same_address { format!("ps-{}", process.id) } else { pid.to_string() }
    }

    /// Who is found at an address now.
    pub(crate) fn at_address(&self, address: &str) -> Option<Pid> {
        let Some(id) = address.strip_prefix("ps-") else { return address.parse().ok() };
        let id: u32 = id.parse().ok()?;
        let is_it = |p: &Process| p.alive && p.role == Role::Server && p.id == id;
        self.processes.iter().rposition(is_it).map(|pid| pid as Pid)
    }

    /// Asks whoever is at an address.
    pub(crate) fn send_request(&mut self, address: &str, request: Request) {
        let Some(server) = self.at_address(address) else { return };
        let request = Rc::new(request);
        self.send(Duration::ZERO, || Action::Request { pid: server, request: Rc::clone(&request) });
    }

    /// Says something to the gate, if somebody is at the address.
    pub(crate) fn send_word(&mut self, address: &str, word: Word) -> bool {
        let Some(server) = self.at_address(address) else { return false };
        self.send(Duration::ZERO, || Action::Gate { pid: server, word });
        true
    }

    /// The gate answers a worker.
    pub(crate) fn send_said(&mut self, (pid, round): (Pid, u64), ask: Ask, said: Said) {
        self.send(Duration::ZERO, || Action::GateSaid { pid, round, ask, said: Box::new(said.clone()) });
    }

    /// Answers a worker.
    pub(crate) fn send_reply(&mut self, (pid, round): (Pid, u64), answers: Vec<ps::Answer>) {
        let answers = Rc::new(answers);
        self.send(Duration::ZERO, || Action::Reply { pid, round, answers: Rc::clone(&answers) });
    }
}
