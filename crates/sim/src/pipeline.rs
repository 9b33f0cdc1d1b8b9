//! A task on its way through a virtual worker: fence, pull, compute, push, one batch at a time, each asked of
//! all partitions until all have answered, as the real pipeline and its client do.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_ps::marks::MARK_CLOSED;
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{PartitionId, Purpose};
use elasticdl_wire::gate::Decision;
use elasticdl_wire::ps::{self, Commit, PushHeader, Status};
use elasticdl_worker::pipeline::Outcome;
use elasticdl_worker::ps_client::Topology;
use elasticdl_worker::session::Input;
use elasticdl_worker::store::Generation;
use elasticdl_worker::task::{Claim, Leased};

use crate::branches::Branch;
use crate::net::{Asked, Part, Pid, Request};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::scenario::Scenario;
use crate::worker::Worker;
use crate::world::World;

/// How long a server may take to answer before it is asked again.
pub(crate) const ROUND_DEADLINE: Duration = Duration::from_millis(700);

/// The task under way.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) leased: Leased,
    pub(crate) batches: u64,
    pub(crate) step: Step,
    /// The batch under way.
    pub(crate) batch: u64,
    /// The lives in which the fence was raised.
    pub(crate) within: Generation,
    pub(crate) incarnations: Vec<u64>,
    /// By partition: how many pushes it had applied when the batch was pulled.
    pub(crate) versions: BTreeMap<PartitionId, u64>,
    /// What the batch was admitted by, where there is a gate.
    pub(crate) permit: Option<u64>,
    /// The version that it is to be computed from, where several batches make a step.
    pub(crate) version: u64,
    /// The step that is being committed.
    pub(crate) step_decided: Option<Rc<Decision>>,
    pub(crate) round: Round,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Fence,
    /// The gate is asked.
    Admit,
    /// The gate is told that the batch is staged everywhere.
    Tell,
    /// The gate is asked what was decided.
    Look,
    /// What it has decided is committed.
    Decided,
    Pull,
    Compute,
    Push,
    /// The two halves of a push where steps are staged.
    Stage,
    Commit,
    /// A step that is committed somewhere is committed everywhere.
    Finish,
}

impl Step {
    /// Whether a batch is on its way to the partitions.
    pub(crate) fn lands(self) -> bool {
        matches!(self, Step::Push | Step::Stage | Step::Commit | Step::Tell | Step::Look | Step::Decided)
    }

    /// Whether it is the gate that is asked.
    pub(crate) fn asks_gate(self) -> bool {
        matches!(self, Step::Admit | Step::Tell | Step::Look)
    }
}

/// A request to all partitions, repeated until all have answered.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) number: u64,
    pub(crate) pending: Vec<PartitionId>,
    /// Servers that were asked and have not answered.
    pub(crate) outstanding: u32,
    pub(crate) answers: Vec<ps::Answer>,
}

impl World {
    pub(crate) fn begin_task(&mut self, pid: Pid, worker: &mut Worker, leased: Leased) {
        let batches = self.scenario.batches(&leased.shard);
        let step = match leased.claim.task.purpose {
            Purpose::Train => Step::Fence,
            Purpose::Evaluate => Step::Pull,
        };
        let Claim { task, lease } = leased.claim;
        self.note("begin", [pid.into(), task.as_u64(), lease.n], || {
            format!("pid {pid}: {task} lease {lease}")
        });
        worker.active = Some(Active {
            leased,
            batches,
            step,
            batch: 0,
            within: Generation::default(),
            incarnations: Vec::new(),
            versions: BTreeMap::new(),
            permit: None,
            version: 0,
            step_decided: None,
            round: Round::default(),
        });
        self.begin_round(pid, worker);
    }

    pub(crate) fn let_go(&mut self, pid: Pid, worker: &mut Worker, claim: Claim) {
        worker.queue.retain(|leased| leased.claim != claim);
        if let Some(active) = worker.active.take_if(|active| active.leased.claim == claim) {
            self.give_back(pid, worker, active.permit, false);
        }
        self.proceed(pid, worker);
    }

    /// A step of the task begins: all partitions are to answer.
    pub(crate) fn begin_round(&mut self, pid: Pid, worker: &mut Worker) {
        let generation = worker.directory.known().generation;
        let Some(active) = &mut worker.active else { return };
        if active.step == Step::Fence {
            active.within = generation;
        }
        active.round.pending = (0..self.scenario.partitions()).map(PartitionId).collect();
        active.round.answers.clear();
        worker.backoff.reset();
        self.ask_partitions(pid, worker);
    }

    /// Asks those that have not answered.
    pub(crate) fn ask_partitions(&mut self, pid: Pid, worker: &mut Worker) {
        let topology = worker.directory.known();
        worker.round_next += 1;
        let number = worker.round_next;
        let Some(active) = &mut worker.active else { return };
        if active.step == Step::Compute {
            return;
        }
        let other = active.within != topology.generation && self.sabotage != Sabotage::IncarnationsOff;
        match active.step {
            Step::Fence if active.within != topology.generation => return self.begin_round(pid, worker),
            Step::Push | Step::Stage | Step::Commit | Step::Finish | Step::Decided if other => {
                return self.redo(pid, worker);
            }
            Step::Admit | Step::Tell | Step::Look if other => return self.redo(pid, worker),
            _ => {}
        }
        active.round.number = number;
        if active.step.asks_gate() {
            self.ask_the_gate(pid, worker);
            return self.set_timer(pid, ROUND_DEADLINE, Timer::RoundLate(number));
        }
        let requests = requests_of(self, (pid, number), active, &topology);
        active.round.outstanding = requests.len() as u32;
        let (step, pending) = (active.step, active.round.pending.len());
        self.note("ask", [pid.into(), number, pending as u64], || {
            let addresses: Vec<&String> = requests.iter().map(|(address, _)| address).collect();
            format!("pid {pid}: {step:?} {pending} partitions at {addresses:?}")
        });
        let poisoned = self.scenario.poisoned.contains(&(active.leased.claim.task, active.batch + 1));
        let stray = active.step == Step::Push && active.batch + 1 < active.batches && !poisoned;
        if stray && !self.healed && self.rng.uniform() < self.scenario.net.stray {
            // Nobody waits for its answer: the worker may as well have died after it.
            self.branches.count(Branch::Stray);
            active.batch += 1;
            let strays = requests_of(self, (pid, 0), active, &topology);
            active.batch -= 1;
            strays.into_iter().for_each(|(address, request)| self.send_request(&address, request));
        }
        for (address, request) in requests {
            self.send_request(&address, request);
        }
        self.set_timer(pid, ROUND_DEADLINE, Timer::RoundLate(number));
    }

    /// A server has answered.
    pub(crate) fn replied(&mut self, pid: Pid, worker: &mut Worker, round: u64, answers: &[ps::Answer]) {
        let Some(active) = worker.active.as_mut().filter(|a| a.round.number == round) else { return };
        if active.step == Step::Compute {
            return;
        }
        for answer in answers {
            let due = active.round.pending.iter().position(|p| *p == answer.partition);
            let away = matches!(answer.status, Status::WrongIncarnation | Status::NotHere);
            if let Some(at) = due.filter(|_| !away) {
                active.round.pending.remove(at);
                active.round.answers.push(*answer);
            }
        }
        active.round.outstanding = active.round.outstanding.saturating_sub(1);
        if active.round.pending.is_empty() {
            self.complete(pid, worker);
        } else if active.round.outstanding == 0 {
            self.pause_round(pid, worker);
        }
    }

    /// A pause, then a look at who serves what, then those that are left are asked again.
    pub(crate) fn pause_round(&mut self, pid: Pid, worker: &mut Worker) {
        let pause = worker.backoff.pause();
        worker.round_next += 1;
        let number = worker.round_next;
        let Some(active) = &mut worker.active else { return };
        if active.step == Step::Admit {
            worker.connection += 1; // The pusher's connection carries no permits.
        }
        // Answers that come from now on are of a connection that is closed.
        active.round.number = number;
        self.set_timer(pid, pause, Timer::AskAgain(number));
    }

    /// The master did not tell the topology in time.
    pub(crate) fn topology_unheard(&mut self, pid: Pid, worker: &mut Worker) {
        self.ask_partitions(pid, worker);
    }

    /// All partitions have answered.
    fn complete(&mut self, pid: Pid, worker: &mut Worker) {
        let topology = worker.directory.known();
        let Some(active) = &mut worker.active else { return };
        let any = |status| active.round.answers.iter().any(|answer| answer.status == status);
        match active.step {
            Step::Fence | Step::Push | Step::Stage | Step::Commit | Step::Finish if any(Status::Fenced) => {
                self.lost(pid, worker);
            }
            Step::Admit | Step::Tell | Step::Look => {}
            Step::Decided => self.step_committed(pid, worker),
            Step::Stage if self.scenario.is_synchronous() => {
                match active.round.answers.iter().all(|a| a.status == Status::Ok) {
                    true => {
                        active.step = Step::Tell;
                        self.begin_round(pid, worker);
                    }
                    false => self.redo(pid, worker),
                }
            }
            Step::Fence => {
                let marks = || active.round.answers.iter().map(|answer| answer.mark);
                let (lowest, highest) = (marks().min().unwrap_or(MARK_CLOSED), marks().max().unwrap_or(0));
                if lowest < highest {
                    self.branches.count(Branch::MarksDiffer);
                }
                active.batch = lowest;
                active.incarnations = topology.places.iter().map(|place| place.incarnation).collect();
                let open = || marks().filter(|mark| *mark != MARK_CLOSED);
                if self.scenario.is_deterministic() && open().min() < open().max() {
                    active.step = Step::Finish;
                    return self.begin_round(pid, worker);
                }
                self.next_batch(pid, worker);
            }
            Step::Push | Step::Stage | Step::Commit
                if any(Status::Gap) || any(Status::NotStaged) || any(Status::Stale) =>
            {
                self.redo(pid, worker);
            }
            Step::Stage => {
                active.step = Step::Commit;
                self.begin_round(pid, worker);
            }
            Step::Push | Step::Commit => self.applied(pid, worker),
            Step::Finish => self.half_committed(pid, worker),
            Step::Pull if active.leased.claim.task.purpose == Purpose::Evaluate => {
                self.finish(pid, worker);
            }
            Step::Pull if self.scenario.is_synchronous() && active.is_pulled_elsewhere() => {
                self.redo(pid, worker);
            }
            Step::Pull => {
                active.versions = active.round.answers.iter().map(|a| (a.partition, a.version)).collect();
                self.compute(pid, worker);
            }
            Step::Compute => {}
        }
    }

    /// A batch is applied everywhere.
    fn applied(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &mut worker.active else { return };
        let (claim, batch) = (active.leased.claim, active.batch);
        let records = self.scenario.taught(claim.task, &active.leased.shard, batch);
        if active.is_quarantined() {
            let (total, examples) = (active.set_aside(&self.scenario), Vec::new());
            self.session(pid, worker, Input::Bad { claim, total, examples });
        }
        let Some(active) = worker.active.as_mut().filter(|a| a.leased.claim == claim) else { return };
        active.batch += 1;
        active.step = Step::Compute;
        let permit = active.permit.take();
        self.give_back(pid, worker, permit, true);
        let records = records.end - records.start;
        self.session(pid, worker, Input::Applied { claim, records, loss_sum: 1.0 });
        if worker.active.as_ref().is_some_and(|a| a.leased.claim == claim && a.step == Step::Compute) {
            self.next_batch(pid, worker);
        }
    }

    /// A step that was committed somewhere only is to be committed everywhere by now.
    fn half_committed(&mut self, pid: Pid, worker: &mut Worker) {
        self.branches.count(Branch::HalfCommitted);
        let Some(active) = &mut worker.active else { return };
        let wrong = |a: &&ps::Answer| {
            let done = matches!(a.status, Status::Ok | Status::Duplicate);
            !done || (a.mark != MARK_CLOSED && a.mark != active.batch + 1)
        };
        if let Some(answer) = active.round.answers.iter().find(wrong) {
            let (task, batch) = (active.leased.claim.task, active.batch);
            let what = format!("{task} batch {batch} is committed elsewhere, and {answer:?} cannot be");
            return self.fail("staged", what);
        }
        active.batch += 1;
        self.next_batch(pid, worker);
    }

    pub(crate) fn next_batch(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &mut worker.active else { return };
        let claim = active.leased.claim;
        let staged = worker.staged.iter().any(|staged| staged.claim == claim);
        if (active.batch >= active.batches || worker.ending) && staged {
            active.step = Step::Look;
            return self.begin_round(pid, worker);
        }
        if active.batch >= active.batches {
            return self.finish(pid, worker);
        }
        if self.scenario.plan.job.is_gated() {
            active.step = Step::Admit;
            self.begin_round(pid, worker);
        } else if self.scenario.pulls {
            active.step = Step::Pull;
            self.begin_round(pid, worker);
        } else {
            self.compute(pid, worker);
        }
    }

    fn compute(&mut self, pid: Pid, worker: &mut Worker) {
        worker.round_next += 1;
        let number = worker.round_next;
        let Some(active) = &mut worker.active else { return };
        active.step = Step::Compute;
        active.round.number = number;
        let time = self.scenario.compute.mul_f64(0.5 + self.rng.uniform());
        self.set_timer(pid, time, Timer::Computed(number));
    }

    /// A partition came back without batches that it had: from the marks again.
    pub(crate) fn redo(&mut self, pid: Pid, worker: &mut Worker) {
        self.branches.count(Branch::Redo);
        let Some(active) = &mut worker.active else { return };
        let Claim { task, lease } = active.leased.claim;
        active.step = Step::Fence;
        let permit = active.permit.take();
        let generation = worker.directory.known().generation;
        worker.staged.retain(|staged| staged.within == generation);
        self.give_back(pid, worker, permit, false);
        self.note("redo", [pid.into(), task.as_u64(), lease.n], || {
            format!("pid {pid}: {task} lease {lease}")
        });
        self.begin_round(pid, worker);
    }

    fn lost(&mut self, pid: Pid, worker: &mut Worker) {
        self.branches.count(Branch::TaskLost);
        let Some(active) = worker.active.take() else { return };
        self.give_back(pid, worker, active.permit, false);
        self.session(pid, worker, Input::Ended(active.leased.claim, Outcome::Lost));
    }

    /// Every batch of the task is acknowledged by every partition.
    fn finish(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = worker.active.take() else { return };
        let Claim { task, lease } = active.leased.claim;
        self.note("done", [pid.into(), task.as_u64(), lease.n], || {
            format!("pid {pid}: {task} lease {lease}")
        });
        let evaluates = task.purpose == Purpose::Evaluate;
        let scores = || serde_json::to_string(&Scores::default()).expect("scores are JSON");
        let outcome = Outcome::Done {
            records: active.leased.shard.records.unwrap_or(0) - active.set_aside(&self.scenario),
            batches: active.batches,
            incarnations: active.incarnations,
            scores: evaluates.then(scores),
        };
        self.session(pid, worker, Input::Ended(active.leased.claim, outcome));
    }
}

impl Active {
    /// Whether a partition was pulled from at another version than the step's.
    fn is_pulled_elsewhere(&self) -> bool {
        self.round.answers.iter().any(|answer| answer.version != self.version)
    }

    /// Whether the batch under way is set aside.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.leased.quarantined.contains(&self.batch)
    }

    /// Records of all batches of the task that are set aside.
    pub(crate) fn set_aside(&self, scenario: &Scenario) -> u64 {
        let records = |batch: &u64| scenario.records(&self.leased.shard, *batch);
        self.leased.quarantined.iter().map(records).map(|records| records.end - records.start).sum()
    }
}

/// Whether this is the round that the worker waits for.
pub(crate) fn is_round(worker: &Worker, number: u64) -> bool {
    worker.active.as_ref().is_some_and(|a| a.round.number == number && a.step != Step::Compute)
}

/// What is to be asked of which server.
fn requests_of(
    world: &World,
    from: (Pid, u64),
    active: &Active,
    topology: &Topology,
) -> Vec<(String, Request)> {
    let Claim { task, lease } = active.leased.claim;
    let (shard, batch) = (&active.leased.shard, active.batch);
    let records = if active.is_quarantined() { 0..0 } else { world.scenario.records(shard, batch) };
    let header = PushHeader { task, batch, lease, records: records.end - records.start, factor: 1.0 };
    let what = match active.step {
        Step::Fence => Asked::Fence(task, lease),
        Step::Decided => Asked::Step(Rc::clone(active.step_decided.as_ref().expect("it is being committed"))),
        Step::Admit | Step::Tell | Step::Look | Step::Pull | Step::Compute => Asked::Pull,
        Step::Push => Asked::Push(header),
        Step::Stage => Asked::Stage(header),
        Step::Commit | Step::Finish => Asked::Commit(Commit { task, batch, lease }),
    };
    let births = active.step != Step::Fence && task.purpose == Purpose::Train;
    let partitions = world.scenario.partitions();
    let mut requests: Vec<(String, Request)> = Vec::new();
    for id in &active.round.pending {
        let place = &topology.places[id.0 as usize];
        if place.address.is_empty() {
            continue;
        }
        let lives_here = |record: &u64| births && partition_of_row(*record, partitions) == *id;
        let part = Part {
            id: *id,
            incarnation: place.incarnation,
            version: active.versions.get(id).copied().unwrap_or(0),
            rows: records.clone().filter(lives_here).collect(),
        };
        match requests.iter_mut().find(|(address, _)| *address == place.address) {
            Some((_, request)) => request.parts.push(part),
            None => requests
                .push((place.address.clone(), Request { from, what: what.clone(), parts: vec![part] })),
        }
    }
    requests
}
