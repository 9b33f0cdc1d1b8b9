//! What a worker owes the master, as a state machine: when to ask for a task, what to report and when to
//! leave. Pure: time and answers come in, calls to make go out; `run.rs` makes them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use elasticdl_spec::{LeaseId, Purpose};

use crate::pipeline::Outcome;
use crate::task::{Claim, Leased};

/// Progress is reported at most this often.
const REPORT_EVERY: Duration = Duration::from_millis(200);
/// How many tasks a worker has at once whatever they take: the one whose batches are pushed, and the one
/// read ahead.
const TASKS_MIN: usize = 2;
/// For how long a worker has work in hand beyond that. A master that is away for less, because it is started
/// again or its machine stands still, costs nothing.
const AHEAD: Duration = Duration::from_secs(4);
/// And never more tasks than that: they are all named when another one is asked for.
const AHEAD_TASKS_MAX: u32 = 400;
/// A master that says "not now" is not asked again at once, whatever it says.
const ASK_PAUSE_MIN: Duration = Duration::from_millis(5);
const FAILURE_PAUSE_FIRST: Duration = Duration::from_millis(50);
const FAILURE_PAUSE_LONGEST: Duration = Duration::from_secs(2);

/// What happens to the session.
#[derive(Debug)]
pub enum Input {
    /// Time passes.
    Tick,
    /// The reader has nothing to read.
    Wanted,
    /// The master gave a task.
    Leased(Leased),
    /// The master has no task now; or none that is not needed yet.
    Wait(Duration),
    /// The master has no task any more.
    Finished,
    /// These of our leases have ended.
    LeasesEnded(BTreeSet<LeaseId>),
    /// A batch is done.
    Applied {
        /// Whose batch.
        claim: Claim,
        /// Its records.
        records: u64,
        /// The sum of their losses.
        loss_sum: f64,
    },
    /// The first rows of a task that was leased before have been pulled.
    Began(Claim),
    /// Records were set aside.
    Bad {
        /// Whose records.
        claim: Claim,
        /// All of the task's, as far as read.
        total: u64,
        /// The first of them.
        examples: Vec<String>,
    },
    /// A task ended in this worker.
    Ended(Claim, Outcome),
    /// The master answered the report under way; `held`: the lease is still ours.
    Reported {
        /// Whether the master believes the lease.
        held: bool,
    },
    /// The worker is to leave: finish what was pulled, give back the rest.
    Drain,
    /// All stages have ended.
    StagesEnded,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Ask the master for a task.
    Ask {
        /// After this time.
        pause: Duration,
        /// Whether it is not needed yet.
        ahead: bool,
    },
    /// Hand the reader a task.
    Start(Leased),
    /// Stop working on a task.
    Drop(Claim),
    /// Report; one at a time, for as long as it takes.
    Report(Report),
    /// Begin nothing new and end the stages; what was pulled is finished.
    EndStages,
    /// All is said: leave.
    Leave,
}

/// What the master is told of a task.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Which task.
    pub claim: Claim,
    /// Batches done since the last report.
    pub batches: u64,
    /// Their records.
    pub records: u64,
    /// The sum of their losses.
    pub loss_sum: f64,
    /// Records set aside in the whole task.
    pub bad_records: u64,
    /// The first of them.
    pub bad_examples: Vec<String>,
    /// Whether its first rows have been pulled; told once, of a task that was leased before.
    pub began: bool,
    /// How far the task is.
    pub state: State,
}

/// How far a task is.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Still at it.
    Progress,
    /// Given back: somebody else goes on from the marks.
    Returned,
    /// Done or failed; a lost task is not reported.
    Ended(Outcome),
}

/// A task the master believes to be ours.
#[derive(Debug, Default)]
struct Held {
    batches: u64,
    records: u64,
    loss_sum: f64,
    bad_records: u64,
    bad_examples: Vec<String>,
    /// Whether there is something the master has not heard.
    news: bool,
    /// When progress may be reported again.
    progress_at: Duration,
    began: Began,
    end: Option<State>,
}

/// How fast tasks are done.
#[derive(Debug, Default)]
struct Pace {
    last_end: Option<Duration>,
    /// Between the ends of two tasks, averaged over the last few.
    interval: Option<Duration>,
}

impl Pace {
    fn task_done(&mut self, now: Duration) {
        if let Some(last) = self.last_end.replace(now) {
            let interval = now.saturating_sub(last);
            self.interval = Some(self.interval.map_or(interval, |known| (known * 4 + interval) / 5));
        }
    }

    /// How many tasks that is in `time`.
    fn tasks_in(&self, time: Duration) -> u32 {
        let Some(interval) = self.interval else { return 0 };
        let tasks = time.as_nanos() / interval.as_nanos().max(1);
        u32::try_from(tasks).unwrap_or(u32::MAX)
    }
}

/// What the master knows of a task's first pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Began {
    #[default]
    No,
    Untold,
    Told,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// The master has no more tasks; those held are finished.
    Finishing,
    /// The stages end.
    Ending,
    /// They have ended; what is left is to report.
    Reporting,
    Left,
}

/// What a task is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asking {
    /// The stages want it.
    Now,
    /// To have it in hand.
    Ahead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    Yes,
    No,
}

/// The session's state.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    /// Whether tasks are leased one after the other.
    one_at_a_time: bool,
    held: BTreeMap<Claim, Held>,
    /// In hand and not begun: what is to go first, and what may wait.
    urgent: VecDeque<Leased>,
    ahead: VecDeque<Leased>,
    pace: Pace,
    /// The master had no task that is not needed yet: not asked for one again before this.
    ahead_not_before: Duration,
    /// The stages have room for a task.
    wanted: bool,
    asking: Option<Asking>,
    /// The report under way, and whether it is the task's last.
    reporting: Option<(Claim, Last)>,
    failures: u32,
}

impl Default for Session {
    fn default() -> Self {
        Session {
            phase: Phase::Running,
            one_at_a_time: false,
            held: BTreeMap::new(),
            urgent: VecDeque::new(),
            ahead: VecDeque::new(),
            pace: Pace::default(),
            ahead_not_before: Duration::ZERO,
            wanted: false,
            asking: None,
            reporting: None,
            failures: 0,
        }
    }
}

impl Session {
    /// A session that has one task at a time: the next is asked for when the master has heard that this one
    /// is done.
    pub fn one_after_the_other() -> Self {
        Session { one_at_a_time: true, ..Session::default() }
    }

    /// The leases in hand, whatever the master believes.
    pub fn leases(&self) -> Vec<LeaseId> {
        self.held.keys().map(|claim| claim.lease).collect()
    }

    /// Takes an input at the time `now` and appends what follows from it.
    pub fn step(&mut self, now: Duration, input: Input, effects: &mut Vec<Effect>) {
        match input {
            Input::Tick => {}
            Input::Wanted => self.wanted = true,
            Input::Leased(leased) => self.leased(leased),
            Input::Wait(pause) => match self.asking.take() {
                Some(Asking::Ahead) => self.ahead_not_before = now + pause,
                _ => self.ask(now, pause.max(ASK_PAUSE_MIN), effects),
            },
            Input::LeasesEnded(leases) => self.leases_ended(&leases, effects),
            Input::Finished => {
                self.asking = None;
                if self.phase == Phase::Running {
                    self.phase = Phase::Finishing;
                    self.return_waiting();
                }
            }
            Input::Applied { claim, records, loss_sum } => self.applied(claim, records, loss_sum),
            Input::Began(claim) => {
                if let Some(held) = self.held.get_mut(&claim).filter(|held| held.began == Began::No) {
                    held.began = Began::Untold;
                }
            }
            Input::Bad { claim, total, examples } => {
                if let Some(held) = self.held.get_mut(&claim) {
                    held.bad_records = total;
                    held.bad_examples = examples;
                    held.news = true;
                }
            }
            Input::Ended(claim, outcome) => self.ended(now, claim, outcome),
            Input::Reported { held } => self.reported(held, effects),
            Input::Drain => {
                if matches!(self.phase, Phase::Running | Phase::Finishing) {
                    self.phase = Phase::Ending;
                    effects.push(Effect::EndStages);
                }
            }
            Input::StagesEnded => {
                self.phase = Phase::Reporting;
                self.return_waiting();
                for held in self.held.values_mut() {
                    held.end.get_or_insert(State::Returned);
                }
            }
        }
        self.proceed(now, effects);
    }

    /// How many tasks are being worked on.
    fn working(&self) -> usize {
        self.held.values().filter(|held| held.end.is_none()).count()
    }

    /// Whether one more task can be used, and how soon.
    fn lacks(&self, now: Duration) -> Option<Asking> {
        if self.one_at_a_time {
            return (self.wanted && self.held.is_empty()).then_some(Asking::Now);
        }
        let working = self.working();
        if self.wanted && working < TASKS_MIN {
            return Some(Asking::Now);
        }
        let ahead = self.pace.tasks_in(AHEAD).min(AHEAD_TASKS_MAX) as usize;
        let lacks = working > 0 && working < TASKS_MIN + ahead;
        (lacks && now >= self.ahead_not_before).then_some(Asking::Ahead)
    }

    fn proceed(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        self.start(effects);
        if self.asking.is_none() {
            self.ask(now, self.failure_pause(), effects);
        }
        if self.reporting.is_none() {
            self.report(now, effects);
        }
        let silent = self.held.is_empty() && self.reporting.is_none();
        if silent && self.phase == Phase::Finishing {
            self.phase = Phase::Ending;
            effects.push(Effect::EndStages);
        }
        // A task may be on its way to us, and only we can give it back.
        if silent && self.asking.is_none() && self.phase == Phase::Reporting {
            self.phase = Phase::Left;
            effects.push(Effect::Leave);
        }
    }

    fn ask(&mut self, now: Duration, pause: Duration, effects: &mut Vec<Effect>) {
        self.asking = self.lacks(now).filter(|_| self.phase == Phase::Running);
        if let Some(asking) = self.asking {
            effects.push(Effect::Ask { pause, ahead: asking == Asking::Ahead });
        }
    }

    fn leased(&mut self, leased: Leased) {
        let claim = leased.claim;
        self.asking = None;
        let mut held = Held::default();
        if self.phase != Phase::Running {
            // It crossed the decision to leave, and was never begun.
            held.end = Some(State::Returned);
        } else if leased.again || claim.task.purpose == Purpose::Evaluate {
            // Somebody waits for its figures, or was cut off in the middle of it.
            self.urgent.push_back(leased);
        } else {
            self.ahead.push_back(leased);
        }
        self.held.insert(claim, held);
    }

    /// Hands the stages a task where they have room for it.
    fn start(&mut self, effects: &mut Vec<Effect>) {
        if !self.wanted || self.phase != Phase::Running {
            return;
        }
        if let Some(leased) = self.urgent.pop_front().or_else(|| self.ahead.pop_front()) {
            self.wanted = false;
            effects.push(Effect::Start(leased));
        }
    }

    /// Gives back what was not begun.
    fn return_waiting(&mut self) {
        for leased in self.urgent.drain(..).chain(self.ahead.drain(..)) {
            let held = self.held.get_mut(&leased.claim).expect("what waits is held");
            held.end.get_or_insert(State::Returned);
        }
    }

    /// Lets go of tasks that are somebody else's by now.
    fn leases_ended(&mut self, leases: &BTreeSet<LeaseId>, effects: &mut Vec<Effect>) {
        let ended = |claim: &Claim| leases.contains(&claim.lease);
        let begun = |claim: &Claim, waiting: [&VecDeque<Leased>; 2]| {
            !waiting.into_iter().flatten().any(|leased| leased.claim == *claim)
        };
        // What has ended here too, the master learns from the report.
        let claims = self.held.iter().filter(|(claim, held)| ended(claim) && held.end.is_none());
        let claims: Vec<Claim> = claims.map(|(claim, _)| *claim).collect();
        for claim in claims {
            self.held.remove(&claim);
            if begun(&claim, [&self.urgent, &self.ahead]) {
                effects.push(Effect::Drop(claim));
            }
        }
        self.urgent.retain(|leased| !ended(&leased.claim));
        self.ahead.retain(|leased| !ended(&leased.claim));
    }

    fn applied(&mut self, claim: Claim, records: u64, loss_sum: f64) {
        self.failures = 0;
        if let Some(held) = self.held.get_mut(&claim) {
            held.batches += 1;
            held.records += records;
            held.loss_sum += loss_sum;
            held.news = true;
        }
    }

    fn ended(&mut self, now: Duration, claim: Claim, outcome: Outcome) {
        let Some(held) = self.held.get_mut(&claim) else { return };
        // Two stages may each find a reason to end a task; the first one counts.
        if held.end.is_some() {
            return;
        }
        match outcome {
            // Another worker has the task under a newer lease: there is nobody to tell.
            Outcome::Lost => drop(self.held.remove(&claim)),
            Outcome::Done { .. } => {
                held.end = Some(State::Ended(outcome));
                self.pace.task_done(now);
            }
            Outcome::Failed { .. } => {
                held.end = Some(State::Ended(outcome));
                self.failures += 1;
            }
        }
    }

    fn reported(&mut self, believed: bool, effects: &mut Vec<Effect>) {
        let (claim, last) = self.reporting.take().expect("an answer follows a report");
        if last == Last::Yes {
            self.held.remove(&claim);
        } else if !believed && self.held.remove(&claim).is_some() {
            // A late report is normal: the lease ran out and another worker has the task.
            effects.push(Effect::Drop(claim));
        }
    }

    /// Reports an end or a beginning at once, progress now and then.
    fn report(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let ended = |held: &Held| held.end.is_some();
        let due = |held: &Held| held.began == Began::Untold || (held.news && now >= held.progress_at);
        let next = self.held.iter().find(|(_, held)| ended(held));
        let next = next.or_else(|| self.held.iter().find(|(_, held)| due(held)));
        let Some(&claim) = next.map(|(claim, _)| claim) else { return };
        let held = self.held.get_mut(&claim).expect("found above");
        let (state, last) = match &held.end {
            Some(end) => (end.clone(), Last::Yes),
            None => (State::Progress, Last::No),
        };
        let began = held.began == Began::Untold;
        if began {
            held.began = Began::Told;
        }
        held.news = false;
        held.progress_at = now + REPORT_EVERY;
        self.reporting = Some((claim, last));
        effects.push(Effect::Report(Report {
            claim,
            batches: std::mem::take(&mut held.batches),
            records: std::mem::take(&mut held.records),
            loss_sum: std::mem::take(&mut held.loss_sum),
            bad_records: held.bad_records,
            bad_examples: held.bad_examples.clone(),
            began,
            state,
        }));
    }

    /// A task that fails may come straight back: a worker does not fail it as fast as it can.
    fn failure_pause(&self) -> Duration {
        match self.failures {
            0 => Duration::ZERO,
            n => FAILURE_PAUSE_FIRST.saturating_mul(1 << (n - 1).min(10)).min(FAILURE_PAUSE_LONGEST),
        }
    }
}

#[cfg(test)]
mod tests;
