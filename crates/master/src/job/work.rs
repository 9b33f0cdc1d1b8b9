//! Tasks on their way: leases asked for, reports taken in.

use std::collections::BTreeSet;
use std::time::Duration;

use elasticdl_spec::scores::Scores;
use elasticdl_spec::{LeaseId, Position, Purpose, TaskId, WorkerId};
use elasticdl_wire::control::{
    Done, Failed, LeaseNumber, LeaseReply, Leased, ReportRequest, Role, lease_reply, report_request,
};
use serde_json::json;

use super::members::refused;
use super::{Answer, Caller, Effect, Job, Need, Ticket, fields};
use crate::ledger::{Entry, Quarantined};
use crate::status::Phase;
use crate::tasks::Held;

/// How soon a worker asks again when there is nothing for it.
const WAIT_MS: u32 = 50;
/// How many evaluation tasks a worker has at once: all workers are to share a round.
const EVALUATIONS_MAX: usize = 2;
/// Failures of one batch before it is set aside.
const FAILURES_MAX: u32 = 3;
/// Over how long rates and losses are averaged.
const WINDOW: Duration = Duration::from_secs(5);

impl Job {
    pub(super) fn lease(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        held: &BTreeSet<LeaseId>,
        need: Need,
        effects: &mut Vec<Effect>,
    ) {
        if !self.fleet.knows(Role::Worker, caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        let worker = WorkerId(caller.id);
        let freed = self.tasks.keep_only(worker, held);
        self.record_freed(freed, effects);
        self.evaluation.keep_only(worker, held);
        let mut ended = held.clone();
        for lease in self.tasks.leases_of(worker).chain(self.evaluation.leases_of(worker)) {
            ended.remove(&lease);
        }
        let what = if self.phase.is_over() {
            lease_reply::What::Finished(true)
        } else {
            match self.next_task(now, worker, need, effects) {
                Some(leased) => lease_reply::What::Leased(leased),
                None => lease_reply::What::WaitMs(WAIT_MS),
            }
        };
        let ended = ended.into_iter().map(|lease| LeaseNumber { term: lease.term, n: lease.n }).collect();
        effects.push(Effect::Answer(ticket, Answer::Lease(LeaseReply { what: Some(what), ended })));
    }

    /// Evaluation goes first: its figures are wanted of this moment, and it is short.
    fn next_task(
        &mut self,
        now: Duration,
        worker: WorkerId,
        need: Need,
        effects: &mut Vec<Effect>,
    ) -> Option<Leased> {
        if !matches!(self.phase, Phase::Training | Phase::Evaluating) {
            return None;
        }
        let id = self.next_lease();
        let evaluates = self.evaluation.leases_of(worker).count() < EVALUATIONS_MAX;
        if evaluates && let Some(task) = self.evaluation.lease(now, id, worker) {
            let shard = serde_json::to_string(self.evaluation.shard(task)).expect("a shard is JSON");
            return Some(Leased {
                task: task.to_string(),
                term: id.term,
                lease: id.n,
                shard,
                ..Leased::default()
            });
        }
        if self.phase != Phase::Training || self.must_wait(now) {
            return None;
        }
        // Towards the end workers have ever less in hand, and so they end together. Where checkpoints wait for the
        // tasks under way, nobody has more than it works on.
        if need == Need::Ahead && (self.plan.job.is_staged() || !self.tasks.is_plentiful()) {
            return None;
        }
        let (task, again) = self.tasks.lease(now, id, worker)?;
        let lasting = self.plan.job.is_staged();
        effects.push(Effect::Record(Entry::Leased { task, lease: id, worker, lasting }));
        if !std::mem::replace(&mut self.has_leased, true) {
            effects.push(Effect::Emit("leasing", fields([("term", json!(self.term))])));
        }
        let shard = serde_json::to_string(self.tasks.shard(task)).expect("a shard is JSON");
        let quarantined = self.quarantined.iter().filter(|q| q.task == task).map(|q| q.batch).collect();
        let position = match self.plan.job.train.schedule.varies() {
            true => self.tasks.position(task, self.plan.job.train.batch as u64),
            false => Position::default(),
        };
        Some(Leased {
            task: task.to_string(),
            term: id.term,
            lease: id.n,
            shard,
            again,
            quarantined,
            first_step: position.first,
            steps: position.total,
        })
    }

    /// Whether no task may begin now. Where the learning rate goes by the place in the job, or the outcome must
    /// not depend on time, tasks begin when all are known, so that they come in one order. Where steps are staged a
    /// checkpoint is cut while none is under way and none was left in the middle of a step, so that all partitions
    /// are cut at one step.
    fn must_wait(&self, now: Duration) -> bool {
        let writing = self.checkpoints.writing().is_some();
        let due = self.checkpoints.is_due(now) && !self.tasks.interrupted_waits();
        let (deterministic, varies) =
            (self.plan.job.is_deterministic(), self.plan.job.train.schedule.varies());
        (self.plan.job.is_staged() && (writing || due))
            || ((deterministic || varies) && !self.tasks.is_indexed())
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
        let known = self.known.entry((Role::Worker as i32, caller.id)).or_default();
        known.heard = now;
        if held == Held::Yes && report.records > 0 {
            known.records += report.records;
            self.fleet.progress();
        }
        if held == Held::Yes && report.began {
            let facts = fields([("task", json!(task)), ("worker", json!(caller.id))]);
            effects.push(Effect::Emit("task_goes_on", facts));
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
        self.told += report.records;
        self.window.push_back((now, report.records, report.loss_sum));
        self.check_bad_records(now, report, effects);
        match &report.outcome {
            Some(report_request::Outcome::Done(done)) => self.task_done(now, task, id, done, effects),
            Some(report_request::Outcome::Returned(_)) => self.free(task, id, effects),
            Some(report_request::Outcome::Failed(failed)) => {
                self.failed(now, task, failed, effects);
                self.free(task, id, effects)
            }
            Some(report_request::Outcome::Progress(_)) | None => Held::Yes,
        }
    }

    /// Every batch was acknowledged. If that was by partitions that live no more, it says nothing.
    fn task_done(
        &mut self,
        now: Duration,
        task: TaskId,
        id: LeaseId,
        done: &Done,
        effects: &mut Vec<Effect>,
    ) -> Held {
        let of = |place: &super::Place, by: &u64| (place.since..=place.incarnation).contains(by);
        let by_all = done.incarnations.len() == self.places.len();
        if !by_all || !self.places.iter().zip(&done.incarnations).all(|(place, by)| of(place, by)) {
            self.free(task, id, effects);
            return Held::No;
        }
        let Some(finished) = self.tasks.finish(task, id, done.task_records, done.batches) else {
            return Held::No;
        };
        effects.push(Effect::Record(Entry::Done { task, finished }));
        self.replay_done(now, task, effects);
        Held::Yes
    }

    fn free(&mut self, task: TaskId, id: LeaseId, effects: &mut Vec<Effect>) -> Held {
        let held = self.tasks.give_back(task, id);
        if held == Held::Yes {
            effects.push(Effect::Record(Entry::Freed { task, between_batches: true }));
        }
        held
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
                ("steps", json!(self.evaluation.steps())),
                ("last", json!(last)),
            ]),
        ));
        if last {
            self.evaluated_last = true;
        }
    }

    /// A worker could not do a batch. Where that happens again and again, the batch is set aside.
    fn failed(&mut self, now: Duration, task: TaskId, failed: &Failed, effects: &mut Vec<Effect>) {
        let batch = failed.batch;
        let error = format!("task {task}, batch {batch}: {}", failed.error);
        if failed.fatal {
            return self.fail(now, error, effects);
        }
        let tries = self.failures.entry((task, batch)).or_default();
        *tries += 1;
        if *tries < FAILURES_MAX {
            return effects.push(Effect::Emit("warning", fields([("message", json!(error))])));
        }
        if task.purpose == Purpose::Evaluate {
            return self.fail(now, error, effects);
        }
        let quarantined = Quarantined { task, batch, error: failed.error.clone() };
        let facts = fields([("task", json!(task)), ("batch", json!(batch)), ("error", json!(failed.error))]);
        effects.push(Effect::Record(Entry::Quarantined(quarantined.clone())));
        effects.push(Effect::Emit("quarantined", facts));
        self.quarantined.push(quarantined);
    }

    /// Records of quarantined batches are bad too, but those end the job only when all else is trained.
    fn check_bad_records(&mut self, now: Duration, report: &ReportRequest, effects: &mut Vec<Effect>) {
        let (bad, max) = (self.tasks.bad_records(), self.plan.job.data.bad_records_max);
        let quarantined = self.quarantined.len() as u64 * self.plan.job.train.batch as u64;
        if bad <= max + quarantined {
            return;
        }
        let examples = report.bad_examples.join("\n  ");
        let error = format!(
            "{bad} malformed records, and data.bad_records_max is {max}; the last ones:\n  {examples}"
        );
        self.fail(now, error, effects);
    }

    /// What must be said of quarantined batches at the end, where the job does not allow for so many.
    pub(super) fn quarantine_verdict(&self) -> Option<String> {
        let (bad, max) = (self.tasks.bad_records(), self.plan.job.data.bad_records_max);
        let first = self.quarantined.first().filter(|_| bad > max)?;
        Some(format!(
            "everything else is trained, but {} batches were set aside ({bad} records in all, and \
             data.bad_records_max is {max}); the first is task {}, batch {}: {}",
            self.quarantined.len(),
            first.task,
            first.batch,
            first.error
        ))
    }

    /// Forgets what is too old for rates.
    pub(super) fn trim_window(&mut self, now: Duration) {
        while self.window.front().is_some_and(|(at, _, _)| now.saturating_sub(*at) > WINDOW) {
            self.window.pop_front();
        }
    }
}
