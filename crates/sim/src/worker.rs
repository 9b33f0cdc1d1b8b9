//! A virtual worker: the real session, and a small pipeline that fences, pulls, computes and pushes as the
//! real one does, one batch at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elasticdl_master::job::Answer;
use elasticdl_ps::marks::MARK_CLOSED;
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{LeaseId, PartitionId, Purpose};
use elasticdl_wire::control::{TopologyReply, beat_reply};
use elasticdl_wire::ps::{self, Commit, PushHeader, Status};
use elasticdl_wire::retry::Backoff;
use elasticdl_worker::pipeline::Outcome;
use elasticdl_worker::ps_client::{Directory, Place, Places, Topology};
use elasticdl_worker::run::{request, understand};
use elasticdl_worker::session::{Effect, Input, Session};
use elasticdl_worker::store::Generation;
use elasticdl_worker::task::{Claim, Leased};

use crate::branches::Branch;
use crate::net::{Asked, Pid, Question, Request};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::scenario::Scenario;
use crate::world::World;

/// How often a worker looks at its clock.
const TICK: Duration = Duration::from_millis(250);
/// The least time between two signs of life.
const BEAT_PAUSE: Duration = Duration::from_millis(100);
/// How long a server may take to answer before it is asked again.
const ROUND_DEADLINE: Duration = Duration::from_millis(700);
/// How long batches in flight may take to land when the worker is to leave, and reports after that.
const DRAIN_MAX: Duration = Duration::from_secs(10);
const FAREWELL_MAX: Duration = Duration::from_secs(3);

/// A worker's own state.
pub struct Worker {
    began: Duration,
    session: Session,
    directory: Directory,
    heard: Arc<Heard>,
    /// Tasks given and not begun.
    queue: VecDeque<Leased>,
    active: Option<Active>,
    /// Whether the session knows that another task is wanted.
    wanted: bool,
    joined: bool,
    /// The leases in hand when it decided to ask.
    in_hand: Vec<LeaseId>,
    round_next: u64,
    backoff: Backoff,
    /// Whether stages are to end, and have ended.
    ending: bool,
    ended: bool,
    leave_by: Option<Duration>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("session", &self.session).field("active", &self.active).finish()
    }
}

/// The task under way.
#[derive(Debug)]
struct Active {
    leased: Leased,
    batches: u64,
    step: Step,
    /// The batch under way.
    batch: u64,
    /// The lives in which the fence was raised.
    within: Generation,
    incarnations: Vec<u64>,
    round: Round,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Fence,
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
    fn lands(self) -> bool {
        matches!(self, Step::Push | Step::Stage | Step::Commit)
    }
}

/// A request to all partitions, repeated until all have answered.
#[derive(Debug, Default)]
struct Round {
    number: u64,
    pending: Vec<PartitionId>,
    /// Servers that were asked and have not answered.
    outstanding: u32,
    answers: Vec<ps::Answer>,
}

/// The last topology heard, on its way into the directory.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<(PartitionId, Place)>>);

struct Source(Arc<Heard>);

impl Places for Source {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        Ok(self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Worker {
    /// A worker that has just started.
    pub fn new(pid: Pid, now: Duration, scenario: &Scenario) -> Self {
        let heard = Arc::<Heard>::default();
        let staged = scenario.is_deterministic();
        Worker {
            began: now,
            session: if staged { Session::one_after_the_other() } else { Session::default() },
            directory: Directory::new(scenario.partitions(), Box::new(Source(Arc::clone(&heard)))),
            heard,
            queue: VecDeque::new(),
            active: None,
            wanted: false,
            joined: false,
            in_hand: Vec::new(),
            round_next: 0,
            backoff: Backoff::new(Duration::from_millis(10), Duration::from_secs(1), pid.into()),
            ending: false,
            ended: false,
            leave_by: None,
        }
    }

    fn learn(&self, reply: TopologyReply) {
        let place = |p: elasticdl_wire::control::Place| {
            (PartitionId(p.partition), Place { incarnation: p.incarnation, address: p.address })
        };
        let places = reply.places.into_iter().map(place).collect();
        *self.heard.0.lock().unwrap_or_else(PoisonError::into_inner) = places;
        self.directory.refresh().expect("the master names partitions that exist");
    }
}

impl World {
    /// The master has answered a worker.
    pub(crate) fn worker_heard(&mut self, pid: Pid, worker: &mut Worker, answer: Answer) {
        match answer {
            Answer::Join(_) => {
                if !std::mem::replace(&mut worker.joined, true) {
                    self.call(pid, Question::Beat);
                    self.set_timer(pid, TICK, Timer::Tick);
                    self.session(pid, worker, Input::Wanted);
                }
            }
            Answer::Lease(reply) => {
                let input = understand(reply).expect("the master answers in its own words");
                self.session(pid, worker, input);
            }
            Answer::Report(held) => self.session(pid, worker, Input::Reported { held }),
            Answer::Beat(reply) => match reply.what {
                Some(beat_reply::What::Leave(true)) => self.drain(pid, worker, FAREWELL_MAX),
                _ => self.set_timer(pid, BEAT_PAUSE, Timer::Beat),
            },
            Answer::Topology(reply) => {
                worker.learn(reply);
                self.ask_partitions(pid, worker);
            }
            Answer::Noted | Answer::Refused(_) => {}
        }
    }

    /// SIGTERM, or the master sends it away.
    pub(crate) fn drain(&mut self, pid: Pid, worker: &mut Worker, within: Duration) {
        worker.leave_by.get_or_insert(self.now + within);
        if worker.joined {
            self.session(pid, worker, Input::Drain);
        } else {
            self.end(pid, Some(0));
        }
    }

    /// Somebody asks the process to end.
    pub(crate) fn terminate(&mut self, pid: Pid, worker: &mut Worker) {
        self.drain(pid, worker, DRAIN_MAX);
    }

    /// Something that a worker has waited for.
    pub(crate) fn worker_timer(&mut self, pid: Pid, worker: &mut Worker, timer: Timer) {
        match timer {
            Timer::Tick => self.worker_tick(pid, worker),
            Timer::Ask if worker.ending => self.session(pid, worker, Input::Wait(Duration::ZERO)),
            Timer::Ask => self.call(pid, Question::Lease(worker.in_hand.clone())),
            Timer::Beat => self.call(pid, Question::Beat),
            Timer::Computed(round) => {
                let computing = |a: &&mut Active| a.step == Step::Compute && a.round.number == round;
                if let Some(active) = worker.active.as_mut().filter(computing) {
                    let (claim, batch) = (active.leased.claim, active.batch);
                    if self.scenario.poisoned.contains(&(claim.task, batch)) && !active.is_quarantined() {
                        worker.active = None;
                        let outcome = Outcome::Failed { error: "it is poisoned".into(), batch, fatal: false };
                        return self.session(pid, worker, Input::Ended(claim, outcome));
                    }
                    active.step = if self.scenario.is_deterministic() { Step::Stage } else { Step::Push };
                    self.begin_round(pid, worker);
                }
            }
            Timer::RoundLate(number) => {
                if is_round(worker, number) {
                    self.pause_round(pid, worker);
                }
            }
            Timer::AskAgain(number) => {
                if is_round(worker, number) {
                    self.call(pid, Question::Topology);
                }
            }
            Timer::Opened | Timer::FileWritten(_) => {}
        }
    }

    fn worker_tick(&mut self, pid: Pid, worker: &mut Worker) {
        self.set_timer(pid, TICK, Timer::Tick);
        if worker.leave_by.is_some_and(|by| self.now > by) {
            if worker.ended {
                return self.end(pid, Some(0));
            }
            worker.active = None;
            worker.leave_by = Some(self.now + FAREWELL_MAX);
            self.end_stages(pid, worker);
        }
        self.session(pid, worker, Input::Tick);
    }

    /// Has the session take an input in, and does what it decides.
    fn session(&mut self, pid: Pid, worker: &mut Worker, input: Input) {
        let mut effects = Vec::new();
        worker.session.step(self.now - worker.began, input, &mut effects);
        for effect in effects {
            match effect {
                Effect::Ask(pause) => {
                    worker.in_hand = worker.session.leases();
                    self.set_timer(pid, pause, Timer::Ask);
                }
                Effect::Start(leased) => {
                    worker.wanted = false;
                    worker.queue.push_back(leased);
                }
                Effect::Drop(claim) => {
                    self.branches.count(Branch::LeaseDropped);
                    self.let_go(pid, worker, claim);
                }
                Effect::Report(report) => {
                    if report.state == elasticdl_worker::session::State::Returned {
                        self.branches.count(Branch::Returned);
                    }
                    self.call(pid, Question::Report(Box::new(request(report))));
                }
                Effect::EndStages => {
                    worker.ending = true;
                    worker.queue.clear();
                }
                Effect::Leave => {
                    self.branches.count(Branch::Drained);
                    return self.end(pid, Some(0));
                }
            }
        }
        self.proceed(pid, worker);
    }

    /// Begins the next task, asks for another one, or ends.
    fn proceed(&mut self, pid: Pid, worker: &mut Worker) {
        if !self.processes[pid as usize].alive {
            return;
        }
        if worker.ending {
            let in_flight = worker.active.as_ref().is_some_and(|active| active.step.lands());
            if !in_flight {
                worker.active = None;
                self.end_stages(pid, worker);
            }
            return;
        }
        if worker.active.is_none()
            && let Some(leased) = worker.queue.pop_front()
        {
            self.begin_task(pid, worker, leased);
        }
        if worker.joined && worker.queue.is_empty() && !std::mem::replace(&mut worker.wanted, true) {
            self.session(pid, worker, Input::Wanted);
        }
    }

    fn end_stages(&mut self, pid: Pid, worker: &mut Worker) {
        worker.ending = true;
        if !std::mem::replace(&mut worker.ended, true) {
            self.session(pid, worker, Input::StagesEnded);
        }
    }

    fn begin_task(&mut self, pid: Pid, worker: &mut Worker, leased: Leased) {
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
            round: Round::default(),
        });
        self.begin_round(pid, worker);
    }

    fn let_go(&mut self, pid: Pid, worker: &mut Worker, claim: Claim) {
        worker.queue.retain(|leased| leased.claim != claim);
        if worker.active.as_ref().is_some_and(|active| active.leased.claim == claim) {
            worker.active = None;
        }
        self.proceed(pid, worker);
    }

    /// A step of the task begins: all partitions are to answer.
    fn begin_round(&mut self, pid: Pid, worker: &mut Worker) {
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
    fn ask_partitions(&mut self, pid: Pid, worker: &mut Worker) {
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
            Step::Push | Step::Stage | Step::Commit | Step::Finish if other => return self.redo(pid, worker),
            _ => {}
        }
        active.round.number = number;
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
    fn pause_round(&mut self, pid: Pid, worker: &mut Worker) {
        let pause = worker.backoff.pause();
        worker.round_next += 1;
        let number = worker.round_next;
        let Some(active) = &mut worker.active else { return };
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
            Step::Push | Step::Stage | Step::Commit if any(Status::Gap) || any(Status::NotStaged) => {
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
            Step::Pull => self.compute(pid, worker),
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

    fn next_batch(&mut self, pid: Pid, worker: &mut Worker) {
        let Some(active) = &mut worker.active else { return };
        if active.batch >= active.batches {
            return self.finish(pid, worker);
        }
        if self.scenario.pulls {
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
    fn redo(&mut self, pid: Pid, worker: &mut Worker) {
        self.branches.count(Branch::Redo);
        let Some(active) = &mut worker.active else { return };
        let Claim { task, lease } = active.leased.claim;
        active.step = Step::Fence;
        self.note("redo", [pid.into(), task.as_u64(), lease.n], || {
            format!("pid {pid}: {task} lease {lease}")
        });
        self.begin_round(pid, worker);
    }

    fn lost(&mut self, pid: Pid, worker: &mut Worker) {
        self.branches.count(Branch::TaskLost);
        let Some(active) = worker.active.take() else { return };
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
    /// Whether the batch under way is set aside.
    fn is_quarantined(&self) -> bool {
        self.leased.quarantined.contains(&self.batch)
    }

    /// Records of all batches of the task that are set aside.
    fn set_aside(&self, scenario: &Scenario) -> u64 {
        let records = |batch: &u64| scenario.records(&self.leased.shard, *batch);
        self.leased.quarantined.iter().map(records).map(|records| records.end - records.start).sum()
    }
}

fn is_round(worker: &Worker, number: u64) -> bool {
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
    let header = PushHeader { task, batch, lease, records: records.end - records.start };
    let what = match active.step {
        Step::Fence => Asked::Fence(task, lease),
        Step::Pull | Step::Compute => Asked::Pull,
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
        let part = (*id, place.incarnation, records.clone().filter(lives_here).collect());
        match requests.iter_mut().find(|(address, _)| *address == place.address) {
            Some((_, request)) => request.parts.push(part),
            None => requests.push((place.address.clone(), Request { from, what, parts: vec![part] })),
        }
    }
    requests
}
