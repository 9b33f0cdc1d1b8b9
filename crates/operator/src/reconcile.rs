//! What is to be done about a job that is a resource. Pure: what is seen in, actions and a status out.
//!
//! A decision is made from what is there, never from what was done before, so that it does not matter how often
//! it is made, or by which operator. What must be remembered is in the status.

use std::time::Duration;

use elasticdl_spec::JobSpec;
use elasticdl_spec::kubernetes::Care;
use elasticdl_spec::resolve::{Problem, Problems};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use crate::names;
use crate::negotiate::Grant;
use crate::pod::{Cause, End, Wait};
use crate::recorder::Story;
use crate::report::Report;
use crate::resource::{ElasticJob, JobStatus, Phase};
use crate::supervise::{Verdict, verdict};

/// Holds a resource back until its pods are gone.
pub const FINALIZER: &str = "elasticdl.org/pods";
/// Between two looks at a master that runs.
pub const LOOK: Duration = Duration::from_secs(5);
/// Between two looks at pods that are to go.
const LOOK_GOING: Duration = Duration::from_secs(2);
/// Between two looks at something that only a person can mend.
const LOOK_STUCK: Duration = Duration::from_secs(60);
/// How long a master may take to stop after a checkpoint; its pods are deleted after that.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// The pauses before the second start in a row of a master, doubled from there, and the longest.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(60);

/// What is seen of a job.
#[derive(Debug, Default)]
pub struct Seen {
    /// The pods of its masters.
    pub masters: Vec<Pod>,
    /// How many other pods it has; asked for only where [`needs_members`] says so.
    pub members: usize,
    /// What its master says.
    pub report: Option<Report>,
    /// Whether another job of its name is there, which no resource describes.
    pub taken: bool,
    /// How many workers it may have; `None`: nobody shares out the room.
    pub grant: Option<Grant>,
}

/// Something to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Put the finalizer on the resource.
    Hold,
    /// Take it off.
    Release,
    /// Delete the resource.
    Remove,
    /// Make the job's objects, or make them as the resource says now.
    Prepare,
    /// Make the job's objects and start a master.
    Start,
    /// Ask the master for so many workers.
    Scale(u32),
    /// Allow the master so many workers, whatever it wants; `None`: as many as it wants.
    Allow(Option<u32>),
    /// Ask the master to stop after a checkpoint.
    Stop,
    /// Delete the pods of the masters, so that they start no others.
    DeleteMasters,
    /// Delete all other pods.
    DeleteMembers,
}

/// What is to be done, and what is known.
#[derive(Debug)]
pub struct Decision {
    /// What to do.
    pub actions: Vec<Action>,
    /// The status as it is then.
    pub status: JobStatus,
    /// What is worth telling.
    pub stories: Vec<Story>,
    /// When to look again, where nothing happens before.
    pub again: Option<Duration>,
}

/// Whether the pods beside the master matter for the decision.
pub fn needs_members(job: &ElasticJob, now: Timestamp) -> bool {
    let status = job.status.clone().unwrap_or_default();
    let ends = |care: &Care| care.suspend || is_late(care, &status, now);
    job.metadata.deletion_timestamp.is_some()
        || status.stopping_since.is_some()
        || (!is_over(&status) && job.resolve().is_ok_and(|spec| ends(&spec.kubernetes.care)))
}

/// Whether a job runs, or is to as soon as there is room. One that is being stopped has its pods for as long as they
/// last, and asks for nothing.
pub fn wants_room(job: &ElasticJob, spec: &JobSpec) -> bool {
    let status = job.status.clone().unwrap_or_default();
    job.metadata.deletion_timestamp.is_none()
        && !is_over(&status)
        && status.stopping_since.is_none()
        && !spec.kubernetes.care.suspend
}

/// What is to be done about a job.
pub fn decide(job: &ElasticJob, seen: &Seen, now: Timestamp) -> Decision {
    let status = job.status.clone().unwrap_or_default();
    let decision = Decision { actions: Vec::new(), status, stories: Vec::new(), again: None };
    let mut deciding = Deciding { job, seen, now: Time(now), decision };
    deciding.decide();
    deciding.decision
}

struct Deciding<'a> {
    job: &'a ElasticJob,
    seen: &'a Seen,
    now: Time,
    decision: Decision,
}

impl Deciding<'_> {
    fn decide(&mut self) {
        let held = self.job.finalizers().iter().any(|name| name == FINALIZER);
        if self.job.metadata.deletion_timestamp.is_some() {
            return if held { self.leave() } else { self.again(LOOK_STUCK) };
        }
        if !held {
            self.act(Action::Hold);
        }
        let spec = match self.job.resolve() {
            Ok(spec) => spec,
            // A job that is over is not judged again; without a spec nobody knows how long it is to be kept.
            Err(_) if is_over(self.status()) => return,
            Err(problems) => return self.refuse("Invalid", lines(&problems)),
        };
        if is_over(self.status()) {
            return self.keep_for(spec.kubernetes.care.ttl);
        }
        if self.seen.taken {
            let name = self.job.name_any();
            let why = format!(
                "a job {name:?} runs in this namespace that no ElasticJob describes; stop it, or rename this one"
            );
            self.again(LOOK);
            return self.refuse("NameTaken", why);
        }
        self.decision.status.selector = Some(format!("{}={},{}=worker", names::JOB, spec.name, names::ROLE));
        let changed = self.status().observed_generation != self.job.generation();
        self.hold("Valid", true, "Checked", "");
        self.decision.status.observed_generation = self.job.generation();
        self.decision.status.error = None;
        if self.over(&spec) || self.winds_down(&spec) {
            return;
        }
        self.lead(&spec, changed);
    }

    /// The resource is being deleted: its pods go first, the masters before those that they would replace.
    fn leave(&mut self) {
        if self.seen.masters.is_empty() && self.seen.members == 0 {
            return self.act(Action::Release);
        }
        self.end_pods();
    }

    fn end_pods(&mut self) {
        if !self.seen.masters.is_empty() {
            self.act(Action::DeleteMasters);
        } else if self.seen.members > 0 {
            self.act(Action::DeleteMembers);
        }
        self.again(LOOK_GOING);
    }

    /// Nothing is started, and nothing that runs is touched.
    fn refuse(&mut self, reason: &str, why: String) {
        let known = self.status().condition("Valid");
        if known.is_none_or(|known| known.status == "True" || known.message != why) {
            self.tell(reason, &why, true);
        }
        self.hold("Valid", false, reason, &why);
        self.decision.status.error = Some(why);
        self.decision.status.observed_generation = self.job.generation();
        if self.status().start_time.is_none() {
            self.decision.status.phase = Some(Phase::Pending);
        }
        self.again(LOOK_STUCK);
    }

    /// A job that is over is kept for a while, or for ever.
    fn keep_for(&mut self, ttl: Option<Duration>) {
        let (Some(ttl), Some(over)) = (ttl, &self.status().completion_time) else { return };
        match ttl.checked_sub(elapsed(over.0, self.now.0)) {
            None | Some(Duration::ZERO) => self.act(Action::Remove),
            Some(rest) => self.again(rest),
        }
    }

    /// Whether a master has told how the job ended.
    fn over(&mut self, spec: &JobSpec) -> bool {
        let Verdict::Over(code, end) = verdict(&self.seen.masters) else { return false };
        let report = end.last_lines.first().and_then(|line| Report::from_line(line));
        let stops = self.status().stopping_since.is_some();
        let stopped = code == 0 && report.as_ref().map_or(stops, |report| report.phase == Phase::Stopped);
        if let Some(report) = &report {
            self.learn(report);
        }
        // One that stopped because it was to: the job is to go on some time.
        if stopped && (stops || spec.kubernetes.care.suspend) {
            return false;
        }
        self.decision.status.workers = Some(0);
        let error = report.and_then(|report| report.error).unwrap_or_else(|| end.error());
        match code {
            0 if stopped => self.finish(Phase::Stopped, "Stopped", "its master was told to stop"),
            0 => {
                self.decision.status.progress = Some("100 %".into());
                let quality =
                    self.status().auc.as_ref().map(|auc| format!(", AUC {auc}")).unwrap_or_default();
                let records = self.status().records.unwrap_or(0);
                let message = match spec.command {
                    Some(_) => "the program is done".into(),
                    None => format!("{records} records trained{quality}"),
                };
                self.finish(Phase::Done, "Done", &message);
            }
            1 => self.finish(Phase::Failed, "WrongInput", &error),
            _ => self.finish(Phase::Failed, "Failed", &error),
        }
        self.keep_for(spec.kubernetes.care.ttl);
        true
    }

    fn finish(&mut self, phase: Phase, reason: &str, message: &str) {
        let status = &mut self.decision.status;
        status.phase = Some(phase);
        status.completion_time = Some(self.now.clone());
        status.stopping_since = None;
        if phase == Phase::Failed {
            status.error = Some(message.into());
        }
        self.hold("Running", false, reason, "");
        self.hold("Complete", phase == Phase::Done, reason, message);
        self.hold("Failed", phase == Phase::Failed, reason, message);
        self.tell(reason, message, phase == Phase::Failed);
    }

    /// Whether the job is being stopped, or rests. What was begun is brought to its end before it may go on.
    fn winds_down(&mut self, spec: &JobSpec) -> bool {
        let care = &spec.kubernetes.care;
        let late = is_late(care, self.status(), self.now.0);
        if !care.suspend && !late && self.status().stopping_since.is_none() {
            return false;
        }
        let gone = self.seen.masters.is_empty() && self.seen.members == 0;
        if !gone {
            self.stop(if late { "it ran for spec.deadline" } else { "it is to be suspended" });
            return true;
        }
        self.decision.status.workers = Some(0);
        self.decision.status.stopping_since = None;
        if late {
            let limit = care.deadline.unwrap_or_default();
            self.finish(
                Phase::Failed,
                "DeadlineExceeded",
                &format!("it was not done within {} s", limit.as_secs()),
            );
            self.keep_for(care.ttl);
        } else if care.suspend {
            if !self.status().holds("Suspended") {
                self.tell(
                    "Suspended",
                    "nothing of the job runs; it goes on when spec.suspend is false",
                    false,
                );
            }
            self.decision.status.phase = Some(Phase::Suspended);
            self.decision.status.start_time = None;
            self.hold("Suspended", true, "Suspended", "spec.suspend is true");
            self.hold("Running", false, "Suspended", "");
        } else {
            return false;
        }
        true
    }

    /// The master stops after a checkpoint, and then the pods go.
    fn stop(&mut self, why: &str) {
        if self.status().stopping_since.is_none() {
            self.tell("Stopping", why, false);
            self.decision.status.stopping_since = Some(self.now.clone());
        }
        self.decision.status.phase = Some(Phase::Stopping);
        if let Some(report) = &self.seen.report {
            self.learn(report);
        }
        let since = self.status().stopping_since.as_ref().map_or(self.now.0, |since| since.0);
        let leads = matches!(verdict(&self.seen.masters), Verdict::Lead(None)) && self.seen.report.is_some();
        if leads && elapsed(since, self.now.0) < STOP_LIMIT {
            self.act(Action::Stop);
            return self.again(LOOK_GOING);
        }
        self.end_pods();
    }

    /// The job runs, or is to.
    fn lead(&mut self, spec: &JobSpec, changed: bool) {
        let verdict = verdict(&self.seen.masters);
        if !self.admit() && verdict == Verdict::Start {
            return;
        }
        if self.status().holds("Suspended") {
            self.hold("Suspended", false, "Resumed", "");
            self.tell("Resumed", "the job goes on from its ledger", false);
        }
        if self.status().start_time.is_none() {
            self.decision.status.start_time = Some(self.now.clone());
        }
        match verdict {
            Verdict::Start => {
                self.start();
                self.tell("Started", "a master is started", false);
            }
            Verdict::Lead(wait) => {
                if changed {
                    self.act(Action::Prepare);
                }
                self.led(spec, wait);
            }
            Verdict::Again(end) => self.revive(spec, &end),
            Verdict::Over(..) => unreachable!("the outcome was looked at before"),
        }
        self.look_before_deadline(spec);
    }

    /// Whether there is room for the job. One that has a master keeps it in any case.
    fn admit(&mut self) -> bool {
        let Some(grant) = &self.seen.grant else { return true };
        let (admitted, message) = (grant.workers > 0, grant.reason.to_string());
        self.decision.status.workers_granted = Some(grant.workers);
        let known = self.status().condition("Admitted");
        let news = known.is_none_or(|known| known.message != message || known.status == "True");
        self.hold("Admitted", admitted, grant.reason.word(), &message);
        if !admitted && self.seen.masters.is_empty() {
            if news {
                self.tell("Waiting", &message, false);
            }
            self.decision.status.phase = Some(Phase::Pending);
            self.hold("Running", false, "Waiting", &message);
            self.again(LOOK_STUCK);
        }
        admitted
    }

    fn start(&mut self) {
        self.act(Action::Start);
        self.decision.status.phase = Some(Phase::Starting);
        self.decision.status.workers = Some(0);
        self.hold("Running", false, "Starting", "");
        self.again(LOOK);
    }

    /// There is a master.
    fn led(&mut self, spec: &JobSpec, wait: Option<Wait>) {
        self.again(LOOK);
        let Some(report) = &self.seen.report else {
            let message = wait.map_or_else(|| "the master does not answer yet".to_string(), |wait| wait.why);
            if self
                .status()
                .phase
                .is_none_or(|phase| matches!(phase, Phase::Pending | Phase::Suspended | Phase::Stopping))
            {
                self.decision.status.phase = Some(Phase::Starting);
            }
            return self.hold("Running", false, "MasterWaits", &message);
        };
        self.learn(report);
        self.decision.status.phase = Some(report.phase);
        self.hold("Running", true, "MasterAnswers", "");
        // A program of its own that runs is as good as a record done.
        let first = self.status().restart_records.is_none_or(|before| report.records > before)
            || report.phase == Phase::Running;
        if self.status().restarts_in_row > 0 && first {
            self.decision.status.restarts_in_row = 0;
        }
        let allowed = self.seen.grant.as_ref().map(|grant| grant.workers.max(1));
        let ends = matches!(report.phase, Phase::Stopping | Phase::Saving);
        if allowed != report.workers_allowed && !ends && spec.command.is_none() {
            self.act(Action::Allow(allowed));
        }
        let wanted = spec.workers.count.map(|count| count.min(spec.workers.max));
        let other = wanted.filter(|wanted| *wanted != report.workers_wanted);
        if let Some(wanted) = other.filter(|_| report.phase == Phase::Training) {
            self.act(Action::Scale(wanted));
            self.tell("Scaled", &format!("{wanted} workers instead of {}", report.workers_wanted), false);
        }
    }

    /// The master died.
    fn revive(&mut self, spec: &JobSpec, end: &End) {
        let outside = end.cause.is_from_outside();
        let deaths = self.status().restarts_in_row + u32::from(!outside);
        let why = match (end.cause, end.code, end.signal) {
            (Cause::Own, Some(code), _) => format!("ended with code {code}"),
            (Cause::Own, _, Some(signal)) => format!("was ended by signal {signal}"),
            (cause, ..) => format!("was {cause}"),
        };
        if deaths > spec.limits.restarts {
            let lines = end.last_lines.join("\n");
            return self.finish(
                Phase::Failed,
                "MasterFailed",
                &format!("the master {why}, {deaths} times in a row: {lines}"),
            );
        }
        let last = self.status().restart_time.as_ref().map(|time| elapsed(time.0, self.now.0));
        if let Some(rest) =
            last.and_then(|elapsed| pause(deaths).checked_sub(elapsed)).filter(|rest| !rest.is_zero())
        {
            return self.again(rest);
        }
        self.tell("MasterRestarted", &format!("the master {why}; another one goes on from the ledger"), true);
        self.start();
        let status = &mut self.decision.status;
        status.restarts += 1;
        status.restarts_in_row = deaths;
        status.restart_records = Some(status.records.unwrap_or(0));
        status.restart_time = Some(self.now.clone());
    }

    fn look_before_deadline(&mut self, spec: &JobSpec) {
        let Some(limit) = spec.kubernetes.care.deadline.filter(|_| !is_over(self.status())) else { return };
        let began = self.status().start_time.as_ref().map_or(self.now.0, |time| time.0);
        self.again(limit.saturating_sub(elapsed(began, self.now.0)));
    }

    fn learn(&mut self, report: &Report) {
        let status = &mut self.decision.status;
        status.records = Some(report.records);
        status.epoch = report.epoch.or(status.epoch);
        status.workers = Some(report.workers);
        // Beyond these digits a change is of no interest to people, and each is a write.
        let places = |value: f64| format!("{value:.4}");
        status.auc = report.auc.map(places).or(status.auc.take());
        status.logloss = report.logloss.map(places).or(status.logloss.take());
        let total = report.records_total.filter(|total| *total > 0);
        let percent = total.map(|total| (report.records * 100 / total).min(100));
        status.progress = percent.map(|percent| format!("{percent} %")).or(status.progress.take());
    }

    fn status(&self) -> &JobStatus {
        &self.decision.status
    }

    fn act(&mut self, action: Action) {
        self.decision.actions.push(action);
    }

    fn again(&mut self, after: Duration) {
        let sooner = self.decision.again.map_or(after, |known| known.min(after));
        self.decision.again = Some(sooner);
    }

    fn hold(&mut self, type_: &str, holds: bool, reason: &str, message: &str) {
        self.decision.status.set(type_, holds, reason, message, &self.now);
    }

    fn tell(&mut self, reason: &str, note: &str, warning: bool) {
        self.decision.stories.push(Story { reason: reason.into(), note: note.into(), warning });
    }
}

/// Everything that is wrong, a line for each.
fn lines(problems: &Problems) -> String {
    let line = |problem: &Problem| {
        let hint = problem.hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
        format!("{}: {}{hint}", problem.place, problem.what)
    };
    problems.0.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn is_over(status: &JobStatus) -> bool {
    status.phase.is_some_and(Phase::is_over)
}

/// Whether the job has run for as long as it may.
fn is_late(care: &Care, status: &JobStatus, now: Timestamp) -> bool {
    let ran = status.start_time.as_ref().map(|start| elapsed(start.0, now));
    care.deadline.zip(ran).is_some_and(|(limit, ran)| ran >= limit)
}

fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// The pause before a start after so many deaths in a row: whatever killed the first may be over.
fn pause(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        n => PAUSE_FIRST.saturating_mul(1 << (n - 2).min(16)).min(PAUSE_LONGEST),
    }
}

#[cfg(test)]
mod tests;
