//! From starting to done: what the job does next, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_spec::TaskId;
use elasticdl_wire::control::{CheckpointWrittenRequest, File, Role};
use serde_json::{Value, json};

use super::members::refused;
use super::view;
use super::{Answer, Caller, Effect, Job, Ticket, fields};
use crate::checkpoint::{FORMAT, Manifest, PartitionFile, Progress, Written};
use crate::fleet::State;
use crate::ledger::Entry;
use crate::status::{Phase, StopRequest};

/// How long a stop waits for workers to drain before they are ended.
const DRAIN: Duration = Duration::from_secs(15);
/// How often the progress is told.
const PROGRESS: Duration = Duration::from_secs(1);

impl Job {
    /// Time has passed.
    pub(super) fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let limit = self.plan.job.limits.lease;
        // Without a server nobody gets a batch done, and while this master stood still nobody could say so.
        let slept = now.saturating_sub(std::mem::replace(&mut self.ticked, now)) > limit / 2;
        if slept || self.places.iter().any(|place| place.address.is_none()) {
            self.tasks.renew_all(now);
        }
        for (task, worker) in self.tasks.expire(now, limit) {
            self.record_freed(vec![task], effects);
            let facts = fields([("task", json!(task)), ("worker", json!(worker.0))]);
            effects.push(Effect::Emit("lease_expired", facts));
        }
        self.evaluation.expire(now, limit, None);
        self.end_silent(now, effects);
        self.trim_window(now);
        self.answer_beats(now, effects);
        self.watch_move(now, effects);
        self.watch_promotions(now, effects);
        if self.phase == Phase::Training {
            self.balance(now, effects);
        }
        if self.phase == Phase::Training && now.saturating_sub(self.last_progress) >= PROGRESS {
            self.last_progress = now;
            effects.push(Effect::Emit("progress", view::progress(self, now)));
        }
    }

    /// Moves on as far as possible. Called after every event.
    pub(super) fn advance(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.phase.is_over() {
            return;
        }
        self.reconcile(now, effects);
        match self.phase {
            Phase::Starting if self.places.iter().all(|p| p.address.is_some()) => {
                self.phase = Phase::Training;
                if self.training.is_none() {
                    self.training = Some((now, None, self.tasks.records()));
                    self.evaluation.rest_from(now, self.tasks.records());
                }
                effects.push(Effect::Emit("training", fields([("records", json!(self.tasks.records()))])));
            }
            Phase::Training if self.tasks.is_complete() => {
                if let Some((_, end @ None, _)) = &mut self.training {
                    *end = Some(now);
                }
                self.evaluation.abandon();
                effects.push(Effect::Emit("progress", view::progress(self, now)));
                self.phase = Phase::Saving;
            }
            Phase::Training => {
                self.measure(now, effects);
                if self.evaluation.is_due(now, self.tasks.records()) {
                    self.evaluation.begin(self.tasks.records());
                }
                if self.checkpoints.is_due(now) && !self.hand_over_waits(now) {
                    self.begin_checkpoint(now, effects);
                }
            }
            // A server died, and with it what no checkpoint covers.
            Phase::Saving | Phase::Evaluating if !self.tasks.is_complete() => self.phase = Phase::Training,
            Phase::Saving if self.tasks.is_covered() && self.is_settled() => self.after_save(now, effects),
            Phase::Saving if self.checkpoints.writing().is_none() => self.begin_checkpoint(now, effects),
            Phase::Evaluating if self.evaluated_last => self.after_evaluation(now, effects),
            Phase::Stopping => self.advance_stop(now, effects),
            _ => {}
        }
    }

    /// Whether servers have applied all that they gather. They do so before they cut a checkpoint that is begun when
    /// all training is done; one that merely covers all tasks does not tell.
    fn is_settled(&self) -> bool {
        let committed = self.committed.as_ref().map(|manifest| manifest.id);
        !self.plan.job.is_hybrid() || (committed.is_some() && committed == self.last_cut)
    }

    /// The final checkpoint is committed: judge it, or go on.
    fn after_save(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.exporting {
            return;
        }
        if !self.evaluation.is_indexed() {
            return; // The last validation file is still being indexed.
        }
        if self.evaluation.has_data() && !self.evaluated_last {
            self.phase = Phase::Evaluating;
            self.evaluation.begin(self.tasks.records());
        } else {
            self.after_evaluation(now, effects);
        }
    }

    fn after_evaluation(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if let Some(error) = self.quarantine_verdict() {
            return self.fail(now, error, effects);
        }
        if !self.exports {
            return self.finish(now, Phase::Done, effects);
        }
        if !self.exporting {
            self.exporting = true;
            self.phase = Phase::Saving;
            let id = self.committed.as_ref().expect("a saved job has a checkpoint").id;
            effects.push(Effect::Export(id));
        }
    }

    pub(super) fn exported(
        &mut self,
        now: Duration,
        outcome: Result<Value, String>,
        effects: &mut Vec<Effect>,
    ) {
        match outcome {
            Ok(facts) => {
                effects.push(Effect::Emit("exported", fields([("output", facts)])));
                self.finish(now, Phase::Done, effects);
            }
            Err(error) => self.fail(now, format!("the export failed: {error}"), effects),
        }
    }

    fn begin_checkpoint(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let away = self.places.iter().any(|p| p.address.is_none());
        let between_steps = !self.plan.job.is_staged() || self.tasks.is_between_steps();
        if self.checkpoints.writing().is_some() || away || !between_steps || self.is_handing_over() {
            return;
        }
        let servers: BTreeSet<u32> = self.places.iter().map(|p| p.server).collect();
        let checkpoint = self.checkpoints.begin(now, servers);
        if self.phase == Phase::Saving {
            self.last_cut = Some(checkpoint);
        }
        // Written before a server hears of it: a master that has a successor does not get any further.
        effects.push(Effect::Record(Entry::Cut { checkpoint }));
        self.answer_beats(now, effects);
        self.disturb_by_checkpoint(now);
    }

    pub(super) fn written(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        written: CheckpointWrittenRequest,
        effects: &mut Vec<Effect>,
    ) {
        if !self.fleet.knows(Role::Server, caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        effects.push(Effect::Answer(ticket, Answer::Noted));
        if !written.error.is_empty() {
            let error = format!("ps-{}: {}", caller.id, written.error);
            return self.checkpoint_failed(now, written.checkpoint, error, effects);
        }
        let place = |f: &File| self.places.get(f.partition as usize);
        let (ours, others): (Vec<&File>, Vec<&File>) =
            written.files.iter().partition(|f| place(f).is_some_and(|place| place.server == caller.id));
        if ours.iter().any(|f| place(f).is_none_or(|place| place.incarnation != f.incarnation)) {
            return; // Cut in another life: that checkpoint was abandoned.
        }
        let files: Option<BTreeMap<u32, PartitionFile>> =
            ours.iter().map(|f| Some((f.partition, self.partition_file(f)?))).collect();
        let marks = ours.iter().map(|f| (f.partition, marks_of(f))).collect();
        if self.checkpoints.writing() != Some(written.checkpoint) {
            return; // Nobody waits for it any more.
        }
        let due = self.places.iter().filter(|place| place.server == caller.id).count();
        if !others.is_empty() || ours.len() != due {
            // A move that a dead master had begun has left others there. Their files have the names of those that
            // count, so that nothing of it can be believed; the next one is begun at once.
            self.checkpoints.abandon();
            return self.have_join_again(caller.id, effects);
        }
        let Some(files) = files else {
            let error = format!("ps-{}: its files add to another checkpoint than the last one", caller.id);
            return self.checkpoint_failed(now, written.checkpoint, error, effects);
        };
        let progress = self.checkpoints.written(caller.id, written.checkpoint, files, marks);
        if let Progress::Complete(done) = progress {
            effects.push(Effect::Commit(Box::new(self.manifest(done))));
        }
    }

    /// What the manifest says of a file. `None`: it adds to a checkpoint that nobody goes by.
    fn partition_file(&self, file: &File) -> Option<PartitionFile> {
        let &File { partition, incarnation, bytes, crc32, base, .. } = file;
        let earlier = match (base, &self.committed) {
            (0, _) => Vec::new(),
            (base, Some(committed)) if committed.id == base => committed.chain(partition),
            _ => return None,
        };
        Some(PartitionFile { bytes, crc32, incarnation, earlier })
    }

    fn manifest(&self, written: Written) -> Manifest {
        let job = &self.plan.job;
        Manifest {
            format: FORMAT,
            job: job.name.clone(),
            id: written.id,
            shape: self.plan.shape.clone(),
            optimizer: job.train.optimizer,
            seed: job.train.seed,
            partitions: written.files,
            done: self.tasks.covered_by(&written.marks),
        }
    }

    pub(super) fn commit_over(
        &mut self,
        now: Duration,
        id: u64,
        outcome: Result<Box<Manifest>, String>,
        effects: &mut Vec<Effect>,
    ) {
        match outcome {
            Ok(manifest) => {
                if !self.checkpoints.over(now, id) {
                    return; // Abandoned meanwhile; it is on disk, but nobody builds on it.
                }
                let bytes: u64 = manifest.partitions.values().map(|f| f.bytes).sum();
                let adding = manifest.partitions.values().filter(|f| !f.earlier.is_empty()).count();
                let facts = fields([
                    ("checkpoint", json!(id)),
                    ("bytes", json!(bytes)),
                    ("adding", json!(adding)),
                    ("records", json!(manifest.done.records)),
                ]);
                let covered = manifest.done.clone();
                effects.push(Effect::Record(Entry::Committed { checkpoint: id, covered: covered.clone() }));
                effects.push(Effect::Emit("checkpoint", facts));
                effects.push(Effect::Prune(id));
                self.tasks.commit(covered);
                self.committed = Some(*manifest);
                if self.phase == Phase::Stopping {
                    self.finish(now, Phase::Stopped, effects);
                }
            }
            Err(error) => self.checkpoint_failed(now, id, error, effects),
        }
    }

    /// While training goes on, a failed checkpoint is a warning: the last good one stays, and the next
    /// may work. At the end, or on a stop, there is no next one.
    fn checkpoint_failed(&mut self, now: Duration, id: u64, error: String, effects: &mut Vec<Effect>) {
        if !self.checkpoints.over(now, id) {
            return;
        }
        let error = format!("checkpoint {id} could not be written: {error}");
        if matches!(self.phase, Phase::Saving | Phase::Stopping) {
            return self.fail(now, error, effects);
        }
        effects.push(Effect::Emit("warning", fields([("message", json!(error))])));
    }

    pub(super) fn stop(&mut self, now: Duration, stop: StopRequest, effects: &mut Vec<Effect>) {
        if self.phase.is_over() {
            return;
        }
        // Before the first batch and after the last there is nothing that a checkpoint would save.
        if stop.now || matches!(self.phase, Phase::Starting | Phase::Evaluating) || self.tasks.is_covered() {
            return self.finish(now, Phase::Stopped, effects);
        }
        if self.phase != Phase::Stopping {
            self.phase = Phase::Stopping;
            self.stopping_since = now;
            self.evaluation.abandon();
            self.checkpoints.abandon();
            self.fleet.scale(0);
            effects.push(Effect::Emit("stopping", fields([])));
        }
    }

    /// Workers drain, then the servers write a checkpoint.
    fn advance_stop(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.fleet.workers().is_empty() {
            if self.plan.job.is_staged() && !self.tasks.is_between_steps() {
                // Some partitions may have a batch that others lack: the last checkpoint is the one to go back to.
                return self.finish(now, Phase::Stopped, effects);
            }
            if self.checkpoints.writing().is_none() {
                self.begin_checkpoint(now, effects);
            }
        } else if now.saturating_sub(self.stopping_since) > DRAIN {
            for (id, worker) in self.fleet.workers() {
                effects.extend(worker.pid.map(|pid| Effect::Kill(Role::Worker, *id, pid)));
            }
            self.stopping_since = now;
        }
    }

    /// The job cannot go on. The last good checkpoint stays as it is.
    pub(super) fn fail(&mut self, now: Duration, error: String, effects: &mut Vec<Effect>) {
        if self.phase.is_over() {
            return;
        }
        self.error = Some(error);
        self.finish(now, Phase::Failed, effects);
    }

    fn finish(&mut self, now: Duration, phase: Phase, effects: &mut Vec<Effect>) {
        assert!(phase.is_over() && !self.phase.is_over(), "a job ends once");
        if let Some((_, end @ None, _)) = &mut self.training {
            *end = Some(now);
        }
        self.phase = phase;
        self.fleet.close();
        self.send_home(effects);
        let members = [(Role::Worker, self.fleet.workers()), (Role::Server, self.fleet.servers())];
        for (role, fleet) in members {
            for (id, member) in fleet.iter().filter(|(_, m)| m.state != State::Waiting) {
                // Whoever is not in a beat just now would hear of the end only at its next one.
                let order = member.pid.map(|pid| crate::fleet::Order::Stop { role, id: *id, pid });
                effects.extend(order.map(Effect::Fleet));
            }
        }
        effects.push(Effect::Record(Entry::Finished { phase }));
        effects.push(Effect::Emit("finished", view::finished(self, now)));
        effects.push(Effect::Finish(phase));
    }
}

fn marks_of(file: &File) -> BTreeMap<TaskId, u64> {
    file.marks.iter().map(|mark| (TaskId::train(mark.epoch, mark.shard), mark.mark)).collect()
}
