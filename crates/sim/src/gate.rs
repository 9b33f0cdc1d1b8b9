//! The real gate in a virtual server, and virtual workers that ask it.
//!
//! A permit is of a connection; a worker that gives a call up closes its connection, and the server sees that at
//! the latest when the next one comes. Permits are given back until the gate has heard of it.

use std::rc::Rc;
use std::time::Duration;

use elasticdl_ps::gate::Gate;
use elasticdl_ps::gatekeeper::said;
use elasticdl_spec::PartitionId;
use elasticdl_wire::gate::{Ask, Batch, Said};
use elasticdl_wire::ps::{self, Status};
use elasticdl_worker::session::Input;
use elasticdl_worker::store::Generation;
use elasticdl_worker::task::Claim;

use crate::branches::Branch;
use crate::net::Pid;
use crate::pipeline::{Active, Step};
use crate::processes::{Body, Timer};
use crate::server::Server;
use crate::worker::Worker;
use crate::world::World;

/// How soon a worker that the gate does not admit asks again; a real server lets it wait as long.
const PATIENCE: Duration = Duration::from_millis(50);

/// A worker's word to the gate.
#[derive(Debug, Clone, Copy)]
pub struct Word {
    /// Who speaks, and in which of its rounds.
    pub from: (Pid, u64),
    /// Over which of its connections.
    pub connection: u64,
    /// To the gate beside this life of partition 0.
    pub incarnation: u64,
    /// What it asks.
    pub ask: Ask,
    /// Up to which version it knows that all is committed.
    pub committed: u64,
}

/// A batch that is staged on all partitions.
#[derive(Debug, Clone, Copy)]
pub struct Staged {
    /// Whose.
    pub claim: Claim,
    /// Its records.
    pub records: u64,
    /// The version that it was computed from.
    pub version: u64,
    /// In which lives.
    pub within: Generation,
}

fn number(pid: Pid, connection: u64) -> u64 {
    (u64::from(pid) << 32) | connection
}

impl World {
    /// Asks the gate, wherever it is; `false` where nobody knows.
    pub(crate) fn ask_gate(&mut self, pid: Pid, worker: &Worker, round: u64, ask: Ask) -> bool {
        let topology = worker.directory.known();
        let place = &topology.places[0];
        let committed = if worker.committed.0 == topology.generation { worker.committed.1 } else { 0 };
        let (connection, incarnation) = (worker.connection, place.incarnation);
        let word = Word { from: (pid, round), connection, incarnation, ask, committed };
        self.send_word(&place.address, word)
    }

    /// Asks what the step under way is about.
    pub(crate) fn ask_the_gate(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &worker.active else { return };
        let claim = active.leased.claim;
        let batch = Batch { task: claim.task, batch: active.batch, lease: claim.lease };
        let ask = match active.step {
            Step::Tell => Ask::Staged(active.permit.unwrap_or(0), batch),
            Step::Look => Ask::Look,
            _ => Ask::Admit(batch),
        };
        let round = active.round.number;
        self.ask_gate(pid, worker, round, ask);
    }

    /// A word reaches a server.
    pub(crate) fn gate_asked(&mut self, pid: Pid, server: &mut Server, word: Word) {
        let Word { from: (worker, round), connection, incarnation, ask, committed } = word;
        if !server.serving {
            return;
        }
        let newest = server.connections.entry(worker).or_insert(connection);
        if connection < *newest && matches!(ask, Ask::Admit(_)) {
            return; // A connection that is closed brings nothing any more.
        }
        let before = std::mem::replace(newest, connection.max(*newest));
        let (policy, patience) = (self.scenario.model.policy, self.scenario.model.permit_timeout);
        let answer = match (server.partitions.get(&PartitionId(0)), policy) {
            (Some(p), Some(policy)) if p.incarnation() == incarnation => {
                let version = p.version();
                let gate = server
                    .gate
                    .get_or_insert_with(|| (incarnation, Gate::new(policy, patience, incarnation, version)));
                if gate.0 != incarnation {
                    *gate = (incarnation, Gate::new(policy, patience, incarnation, version));
                }
                gate.1.observe(version);
                if connection > before {
                    gate.1.lost(number(worker, before));
                }
                said(&mut gate.1, self.now, number(worker, connection), ask, committed)
            }
            (Some(_), _) => Said::only(Status::WrongIncarnation),
            (None, _) => Said::only(Status::NotHere),
        };
        self.note("gate", [pid.into(), worker.into(), answer.status.word()], || {
            format!("pid {pid}: pid {worker} {ask:?}: {answer:?}")
        });
        if answer.status == Status::NotYet {
            self.branches.count(Branch::NotAdmitted);
        }
        self.send_said((worker, round), ask, answer);
    }

    /// The gate has answered a worker.
    pub(crate) fn gate_said(&mut self, pid: Pid, worker: &mut Worker, round: u64, ask: Ask, said: &Said) {
        let away = matches!(said.status, Status::WrongIncarnation | Status::NotHere);
        match ask {
            Ask::Landed(permit) | Ask::Dropped(permit) if !away => {
                worker.owed.retain(|(owed, _)| *owed != permit);
                return;
            }
            _ => {}
        }
        let within = worker.directory.known().generation;
        let waits = |a: &&mut Active| a.round.number == round && a.step.asks_gate();
        let Some(active) = worker.active.as_mut().filter(waits) else {
            // Nobody waits for it any more.
            let unused = (matches!(ask, Ask::Admit(_)) && said.status == Status::Ok).then_some(said.permit);
            return self.give_back(pid, worker, unused, false);
        };
        if away {
            return self.pause_round(pid, worker);
        }
        if active.within != within {
            return self.redo(pid, worker);
        }
        if active.step == Step::Tell {
            return if said.status == Status::Ok { self.staged(pid, worker) } else { self.redo(pid, worker) };
        }
        if said.status == Status::Ok {
            (active.permit, active.version) = (Some(said.permit), said.version);
        }
        if let Some(decision) = &said.decision {
            active.step_decided = Some(Rc::new(decision.clone()));
            active.step = Step::Decided;
            return self.begin_round(pid, worker);
        }
        if said.status == Status::Ok {
            active.step = Step::Pull;
            return self.begin_round(pid, worker);
        }
        self.set_timer(pid, PATIENCE, Timer::AskGate(round));
    }

    /// The batch under way is staged, and the gate knows it: on with the next one.
    fn staged(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &mut worker.active else { return };
        let claim = active.leased.claim;
        let records = self.scenario.taught(claim.task, &active.leased.shard, active.batch);
        let quarantined = active.is_quarantined();
        let staged = Staged {
            claim,
            records: records.end - records.start,
            version: active.version,
            within: active.within,
        };
        let (total, examples) = (active.set_aside(&self.scenario), Vec::new());
        active.permit = None;
        active.batch += 1;
        worker.staged.push(staged);
        if quarantined {
            self.session(pid, worker, Input::Bad { claim, total, examples });
        }
        if worker.active.as_ref().is_some_and(|a| a.leased.claim == claim) {
            self.next_batch(pid, worker);
        }
    }

    /// All partitions have applied a step, now or before.
    pub(crate) fn step_committed(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &mut worker.active else { return };
        let Some(decision) = active.step_decided.take() else { return };
        let done = |a: &ps::Answer| matches!(a.status, Status::Ok | Status::Duplicate);
        if let Some(answer) = active.round.answers.iter().find(|a| !done(a)) {
            let what = format!("step {decision:?} was decided, and {answer:?} cannot apply it");
            worker.active = None;
            return self.fail("staged", what);
        }
        let (claim, batch, within) = (active.leased.claim, active.batch, active.within);
        let decided = decision.batches.iter().any(|b| (b.task, b.batch) == (claim.task, batch));
        let ended = active.batch >= active.batches;
        let permit = active.permit;
        active.step = if permit.is_some() { Step::Pull } else { Step::Admit };
        let before = if worker.committed.0 == within { worker.committed.1 } else { 0 };
        worker.committed = (within, before.max(decision.end()));
        let over = |s: &mut Staged| s.within == within && s.version < decision.end();
        let over: Vec<Staged> = worker.staged.extract_if(.., over).collect();
        for Staged { claim, records, .. } in over {
            self.session(pid, worker, Input::Applied { claim, records, loss_sum: 1.0 });
        }
        if worker.active.as_ref().is_none_or(|a| a.leased.claim != claim) {
            return;
        }
        if decided && !ended {
            self.branches.count(Branch::StepLate);
            return self.redo(pid, worker);
        }
        match permit {
            Some(_) => self.begin_round(pid, worker),
            None => self.next_batch(pid, worker),
        }
    }

    /// What the batch under way was admitted by is given back; whatever it has become.
    pub(crate) fn give_back(&mut self, pid: Pid, worker: &mut Worker, permit: Option<u64>, landed: bool) {
        let Some(permit) = permit else { return };
        worker.owed.push((permit, landed));
        self.tell_owed(pid, worker);
    }

    /// Tells the gate of all permits that it has not heard of yet.
    pub(crate) fn tell_owed(&mut self, pid: Pid, worker: &mut Worker) {
        for (permit, landed) in worker.owed.clone() {
            let ask = if landed { Ask::Landed(permit) } else { Ask::Dropped(permit) };
            self.ask_gate(pid, worker, 0, ask);
        }
    }

    /// A worker is gone, and so are its connections.
    pub(crate) fn connections_lost(&mut self, worker: Pid) {
        for process in &mut self.processes {
            let Some(Body::Server(server)) = &mut process.body else { continue };
            if let (Some((_, gate)), Some(newest)) = (&mut server.gate, server.connections.get(&worker)) {
                gate.lost(number(worker, *newest));
            }
        }
    }
}
