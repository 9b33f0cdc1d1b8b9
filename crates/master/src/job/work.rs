//! Tasks on their way: leases asked for, reports taken in.

use std::time::Duration;

use elasticdl_spec::scores::Scores;
use elasticdl_spec::{LeaseId, Purpose, TaskId, WorkerId};
use elasticdl_wire::control::{Failed, LeaseReply, Leased, ReportRequest, Role, lease_reply, report_request};
use serde_json::json;

use super::members::refused;
use super::{Answer, Caller, Effect, Job, Ticket, fields};
use crate::status::Phase;
use crate::tasks::Held;

/// How soon a worker asks again when there is nothing for it.
const WAIT_MS: u32 = 50;
/// Failures of one batch that another try may mend, before the job is given up.
const FAILURES_MAX: u32 = 3;
/// Over how long rates and losses are averaged.
const WINDOW: Duration = Duration::from_secs(5);

impl Job {
    pub(super) fn lease(&mut self, now: Duration, ticket: Ticket, caller: Caller, effects: &mut Vec<Effect>) {
        if !self.fleet.knows(Role::Worker, caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        let what = if self.phase.is_over() {
            lease_reply::What::Finished(true)
        } else {
            match self.next_task(now, WorkerId(caller.id)) {
                Some(leased) => lease_reply::What::Leased(leased),
                None => lease_reply::What::WaitMs(WAIT_MS),
            }
        };
        effects.push(Effect::Answer(ticket, Answer::Lease(LeaseReply { what: Some(what) })));
    }

    /// Evaluation goes first: its figures are wanted of this moment, and it is short.
    fn next_task(&mut self, now: Duration, worker: WorkerId) -> Option<Leased> {
        if !matches!(self.phase, Phase::Training | Phase::Evaluating) {
            return None;
        }
        let id = self.next_lease();
        let evaluating = self.evaluation.lease(now, id, worker);
        let task = match evaluating {
            Some(task) => task,
            None if self.phase == Phase::Training => self.tasks.lease(now, id, worker)?,
            None => return None,
        };
        let shard = match task.purpose {
            Purpose::Train => self.tasks.shard(task),
            Purpose::Evaluate => self.evaluation.shard(task),
        };
        let shard = serde_json::to_string(shard).expect("a shard is JSON");
        Some(Leased { task: task.to_string(), term: id.term, lease: id.n, shard })
    }

    pub(super) fn report(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        report: ReportRequest,
        effects: &mut Vec<Effect>,
    ) {
        let Ok(task) = report.task.parse::<TaskId>() else {
            return effects
                .push(Effect::Answer(ticket, Answer::Refused(format!("no task {:?}", report.task))));
        };
        let id = LeaseId { term: report.term, n: report.lease };
        let held = match task.purpose {
            Purpose::Train => self.train_report(now, task, id, &report, effects),
            Purpose::Evaluate => self.evaluate_report(now, task, id, &report, effects),
        };
        if held == Held::Yes && report.records > 0 {
            let known = self.known.entry((Role::Worker as i32, caller.id)).or_default();
            known.records += report.records;
            self.fleet.progress();
        }
        effects.push(Effect::Answer(ticket, Answer::Report(held == Held::Yes)));
    }

    fn train_report(
        &mut self,
        now: Duration,
        task: TaskId,
        id: LeaseId,
        report: &ReportRequest,
        effects: &mut Vec<Effect>,
    ) -> Held {
        if self.tasks.progress(now, task, id, report.records, report.bad_records) == Held::No {
            return Held::No;
        }
        self.window.push_back((now, report.records, report.loss_sum));
        self.check_bad_records(now, report, effects);
        match &report.outcome {
            Some(report_request::Outcome::Done(done)) => self.tasks.finish(task, id, done.task_records),
            Some(report_request::Outcome::Returned(_)) => self.tasks.give_back(task, id),
            Some(report_request::Outcome::Failed(failed)) => {
                self.failed(now, task, failed, effects);
                self.tasks.give_back(task, id)
            }
            Some(report_request::Outcome::Progress(_)) | None => Held::Yes,
        }
    }

    fn evaluate_report(
        &mut self,
        now: Duration,
        task: TaskId,
        id: LeaseId,
        report: &ReportRequest,
        effects: &mut Vec<Effect>,
    ) -> Held {
        let held = self.evaluation.progress(now, task, id);
        if held == Held::No {
            return held;
        }
        match &report.outcome {
            Some(report_request::Outcome::Done(done)) => match serde_json::from_str::<Scores>(&done.scores) {
                Ok(scores) => {
                    let (held, merged) = self.evaluation.finish(now, task, id, &scores);
                    if let Some(scores) = merged {
                        self.evaluated(&scores, effects);
                    }
                    held
                }
                Err(error) => {
                    self.fail(now, format!("{task}: the scores cannot be read: {error}"), effects);
                    held
                }
            },
            Some(report_request::Outcome::Returned(_)) => self.evaluation.give_back(task, id),
            Some(report_request::Outcome::Failed(failed)) => {
                self.failed(now, task, failed, effects);
                self.evaluation.give_back(task, id)
            }
            Some(report_request::Outcome::Progress(_)) | None => held,
        }
    }

    /// A round is complete.
    fn evaluated(&mut self, scores: &Scores, effects: &mut Vec<Effect>) {
        let logloss = scores.logloss();
        self.last_scores = logloss.map(|logloss| (logloss, scores.auc()));
        let last = self.phase == Phase::Evaluating;
        effects.push(Effect::Emit(
            "evaluated",
            fields([
                ("logloss", json!(logloss)),
                ("auc", json!(scores.auc())),
                ("calibration", json!(scores.calibration())),
                ("records", json!(scores.records())),
                ("trained", json!(self.tasks.records())),
                ("last", json!(last)),
            ]),
        ));
        if last {
            self.evaluated_last = true;
        }
    }

    /// A worker could not do a batch.
    fn failed(&mut self, now: Duration, task: TaskId, failed: &Failed, effects: &mut Vec<Effect>) {
        let tries = self.failures.entry((task.to_string(), failed.batch)).or_default();
        *tries += 1;
        let error = format!("task {task}, batch {}: {}", failed.batch, failed.error);
        if failed.user_error || *tries >= FAILURES_MAX {
            return self.fail(now, error, effects);
        }
        effects.push(Effect::Emit("warning", fields([("message", json!(error))])));
    }

    fn check_bad_records(&mut self, now: Duration, report: &ReportRequest, effects: &mut Vec<Effect>) {
        let (bad, max) = (self.tasks.bad_records(), self.plan.job.data.bad_records_max);
        if bad <= max {
            return;
        }
        let examples = report.bad_examples.join("\n  ");
        let error = format!(
            "{bad} malformed records, and data.bad_records_max is {max}; the last ones:\n  {examples}"
        );
        self.fail(now, error, effects);
    }

    /// Forgets what is too old for rates.
    pub(super) fn trim_window(&mut self, now: Duration) {
        while self.window.front().is_some_and(|(at, _, _)| now.saturating_sub(*at) > WINDOW) {
            self.window.pop_front();
        }
    }
}
