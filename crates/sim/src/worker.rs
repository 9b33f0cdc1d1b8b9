//! A virtual worker: the real session, doing what `worker/src/run.rs` does. Its tasks are in `pipeline`.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elasticdl_master::job::{Answer, Need};
use elasticdl_spec::{LeaseId, PartitionId};
use elasticdl_wire::control::{TopologyReply, beat_reply};
use elasticdl_wire::retry::Backoff;
use elasticdl_worker::pipeline::Outcome;
use elasticdl_worker::ps_client::{Directory, Place, Places};
use elasticdl_worker::run::{request, understand};
use elasticdl_worker::session::{Effect, Input, Session};
use elasticdl_worker::store::Generation;
use elasticdl_worker::task::Leased;

use crate::branches::Branch;
use crate::gate::Staged;
use crate::net::{Pid, Question};
use crate::pipeline::{Active, ROUND_DEADLINE, Step, is_round};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::scenario::Scenario;
use crate::world::World;

/// How often a worker looks at its clock.
const TICK: Duration = Duration::from_millis(250);
/// The least time between two signs of life.
const BEAT_PAUSE: Duration = Duration::from_millis(100);
/// How long batches in flight may take to land when the worker is to leave, and reports after that.
const DRAIN_MAX: Duration = Duration::from_secs(10);
const FAREWELL_MAX: Duration = Duration::from_secs(3);

/// A worker's own state.
pub struct Worker {
    began: Duration,
    session: Session,
    pub(crate) directory: Directory,
    heard: Arc<Heard>,
    /// Tasks given and not begun.
    pub(crate) queue: VecDeque<Leased>,
    pub(crate) active: Option<Active>,
    /// Whether the session knows that another task is wanted.
    wanted: bool,
    joined: bool,
    /// The leases in hand when it decided to ask.
    in_hand: BTreeSet<LeaseId>,
    /// And how soon it needs another one.
    need: Need,
    pub(crate) round_next: u64,
    /// Which of its connections to the gate is open.
    pub(crate) connection: u64,
    /// Batches that are staged and not committed.
    pub(crate) staged: Vec<Staged>,
    /// Up to which version all steps are committed, in which lives.
    pub(crate) committed: (Generation, u64),
    /// Permits that the gate has not heard the end of, and whether their batches have landed.
    pub(crate) owed: Vec<(u64, bool)>,
    pub(crate) backoff: Backoff,
    /// Whether stages are to end, and have ended.
    pub(crate) ending: bool,
    ended: bool,
    leave_by: Option<Duration>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("session", &self.session).field("active", &self.active).finish()
    }
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
            in_hand: BTreeSet::new(),
            need: Need::Now,
            round_next: 0,
            connection: 0,
            staged: Vec::new(),
            committed: (Generation::default(), 0),
            owed: Vec::new(),
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
                    self.call(pid, Question::Beat(Default::default()));
                    self.set_timer(pid, TICK, Timer::Tick);
                    self.session(pid, worker, Input::Wanted);
                }
            }
            Answer::Lease(reply) => {
                let (ended, input) = understand(reply).expect("the master answers in its own words");
                if !ended.is_empty() {
                    self.branches.count(Branch::LeasesEnded);
                    self.session(pid, worker, Input::LeasesEnded(ended));
                }
                self.session(pid, worker, input);
            }
            Answer::Report(held) => self.session(pid, worker, Input::Reported { held }),
            Answer::Copied(_) | Answer::Alone(_) => {}
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
            Timer::PeerLate(_) | Timer::PeerAgain(_) | Timer::BackupLate(..) => {}
            Timer::Tick => self.worker_tick(pid, worker),
            Timer::Ask if worker.ending => self.session(pid, worker, Input::Wait(Duration::ZERO)),
            Timer::Ask => self.call(pid, Question::Lease(worker.in_hand.clone(), worker.need)),
            Timer::Beat => self.call(pid, Question::Beat(Default::default())),
            Timer::Computed(round) => {
                let computing = |a: &&mut Active| a.step == Step::Compute && a.round.number == round;
                if let Some(active) = worker.active.as_mut().filter(computing) {
                    let (claim, batch) = (active.leased.claim, active.batch);
                    if self.scenario.poisoned.contains(&(claim.task, batch)) && !active.is_quarantined() {
                        let permit = active.permit.take();
                        worker.active = None;
                        self.give_back(pid, worker, permit, false);
                        let outcome = Outcome::Failed { error: "it is poisoned".into(), batch, fatal: false };
                        return self.session(pid, worker, Input::Ended(claim, outcome));
                    }
                    let lies = self.sabotage == Sabotage::StepsOff && self.rng.below(8) == 0;
                    active.step = match self.scenario.plan.job.is_staged() {
                        true if lies => Step::Tell,
                        true => Step::Stage,
                        false => Step::Push,
                    };
                    self.begin_round(pid, worker);
                }
            }
            Timer::RoundLate(number) => {
                if is_round(worker, number) {
                    self.pause_round(pid, worker);
                }
            }
            Timer::AskGate(number) => {
                if is_round(worker, number) {
                    self.ask_the_gate(pid, worker);
                    self.set_timer(pid, ROUND_DEADLINE, Timer::RoundLate(number));
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
        self.tell_owed(pid, worker);
        if worker.leave_by.is_some_and(|by| self.now > by) {
            if worker.ended {
                return self.end(pid, Some(0));
            }
            self.drop_active(pid, worker);
            worker.leave_by = Some(self.now + FAREWELL_MAX);
            self.end_stages(pid, worker);
        }
        self.session(pid, worker, Input::Tick);
    }

    /// Has the session take an input in, and does what it decides.
    pub(crate) fn session(&mut self, pid: Pid, worker: &mut Worker, input: Input) {
        let mut effects = Vec::new();
        worker.session.step(self.now - worker.began, input, &mut effects);
        for effect in effects {
            match effect {
                Effect::Ask { pause, ahead } => {
                    worker.in_hand = worker.session.leases().into_iter().collect();
                    worker.need = if ahead { Need::Ahead } else { Need::Now };
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
    pub(crate) fn proceed(&mut self, pid: Pid, worker: &mut Worker) {
        if !self.processes[pid as usize].alive {
            return;
        }
        if worker.ending {
            let in_flight = worker.active.as_ref().is_some_and(|active| active.step.lands());
            if !in_flight {
                self.drop_active(pid, worker);
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

    /// Nothing will become of the task under way.
    fn drop_active(&mut self, pid: Pid, worker: &mut Worker) {
        let permit = worker.active.take().and_then(|active| active.permit);
        self.give_back(pid, worker, permit, false);
    }

    fn end_stages(&mut self, pid: Pid, worker: &mut Worker) {
        worker.ending = true;
        if !std::mem::replace(&mut worker.ended, true) {
            self.session(pid, worker, Input::StagesEnded);
        }
    }
}
