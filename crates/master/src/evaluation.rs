//! Evaluation rounds: every validation shard scored once, the scores merged. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_spec::job::EvaluateSpec;
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{LeaseId, Shard, TaskId, WorkerId};

use crate::tasks::{Held, Lease};

/// The evaluations of a job, one round at a time.
#[derive(Debug)]
pub struct Evaluation {
    shards: Vec<Shard>,
    indexed: bool,
    due: EvaluateSpec,
    /// When the last round ended, or training began.
    rested: Duration,
    /// Records that were trained when the last round began, or training did.
    trained: u64,
    /// So many of them are a batch.
    batch: u64,
    round: u32,
    running: Option<Round>,
}

/// A round under way.
#[derive(Debug, Default)]
struct Round {
    todo: BTreeSet<u32>,
    leased: BTreeMap<u32, Lease>,
    scores: Scores,
}

impl Evaluation {
    /// No round yet; while training, with batches of so many records, one whenever that is due.
    pub fn new(due: EvaluateSpec, batch: usize) -> Self {
        Evaluation {
            shards: Vec::new(),
            indexed: false,
            due,
            rested: Duration::ZERO,
            trained: 0,
            batch: batch.max(1) as u64,
            round: 0,
            running: None,
        }
    }

    /// A validation shard was found.
    pub fn add_shard(&mut self, shard: Shard) {
        self.shards.push(shard);
    }

    /// All validation shards are known.
    pub fn all_found(&mut self) {
        self.indexed = true;
    }

    /// Whether all validation shards are known, so that a round may begin.
    pub fn is_indexed(&self) -> bool {
        self.indexed
    }

    /// Whether there is anything to evaluate on.
    pub fn has_data(&self) -> bool {
        !self.shards.is_empty()
    }

    /// The shard of a task.
    pub fn shard(&self, task: TaskId) -> &Shard {
        &self.shards[task.shard as usize]
    }

    /// Training begins now, with so many records trained before: the first interval is counted from here.
    pub fn rest_from(&mut self, now: Duration, trained: u64) {
        (self.rested, self.trained) = (now, trained);
    }

    /// Whether a round is due while so many records are trained. Those by the number of batches begin at multiples, as
    /// far as that can be told, so that two runs can be compared. Those by time wait until something is trained: rounds go
    /// before training, and would else starve it where its workers ask for tasks seldom.
    pub fn is_due(&self, now: Duration, trained: u64) -> bool {
        let rested = now.saturating_sub(self.rested);
        let by_time = self.due.every.is_some_and(|every| rested >= every) && trained != self.trained;
        let steps = trained / self.batch;
        let by_steps = self.due.steps.is_some_and(|each| steps / each > self.steps() / each);
        self.indexed && self.has_data() && self.running.is_none() && (by_time || by_steps)
    }

    /// Whether a round is under way.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Begins a round with so many records trained; one under way is forgotten.
    pub fn begin(&mut self, trained: u64) {
        self.trained = trained;
        assert!(self.indexed && self.has_data(), "a round needs its shards");
        self.round += 1;
        let todo = (0..self.shards.len() as u32).collect();
        self.running = Some(Round { todo, ..Round::default() });
    }

    /// Batches that were trained when the last round began.
    pub fn steps(&self) -> u64 {
        self.trained / self.batch
    }

    /// Forgets the round under way.
    pub fn abandon(&mut self) {
        self.running = None;
    }

    /// Gives the next task of the round to a worker.
    pub fn lease(&mut self, now: Duration, id: LeaseId, worker: WorkerId) -> Option<TaskId> {
        let round = self.running.as_mut()?;
        let shard = round.todo.pop_first()?;
        round.leased.insert(shard, Lease { id, worker, renewed: now });
        Some(TaskId::evaluate(self.round, shard))
    }

    /// The leases that a worker holds.
    pub fn leases_of(&self, worker: WorkerId) -> impl Iterator<Item = LeaseId> + '_ {
        let leased = self.running.iter().flat_map(|round| round.leased.values());
        leased.filter(move |lease| lease.worker == worker).map(|lease| lease.id)
    }

    /// A worker asks for a task and has these leases in hand: any other of its leases it never got.
    pub fn keep_only(&mut self, worker: WorkerId, held: &BTreeSet<LeaseId>) {
        let Some(round) = &mut self.running else { return };
        let lost = |lease: &Lease| lease.worker == worker && !held.contains(&lease.id);
        let shards: Vec<u32> = round.leased.iter().filter(|(_, l)| lost(l)).map(|(s, _)| *s).collect();
        for shard in shards {
            round.leased.remove(&shard);
            round.todo.insert(shard);
        }
    }

    /// A worker is at it.
    pub fn progress(&mut self, now: Duration, task: TaskId, id: LeaseId) -> Held {
        match self.held(task, id) {
            Some(lease) => {
                lease.renewed = now;
                Held::Yes
            }
            None => Held::No,
        }
    }

    /// A task is scored. Returns the round's scores where it was the last.
    pub fn finish(
        &mut self,
        now: Duration,
        task: TaskId,
        id: LeaseId,
        scores: &Scores,
    ) -> (Held, Option<Scores>) {
        if self.held(task, id).is_none() {
            return (Held::No, None);
        }
        let round = self.running.as_mut().expect("a held task belongs to a round");
        round.leased.remove(&task.shard);
        round.scores.merge(scores);
        if !round.todo.is_empty() || !round.leased.is_empty() {
            return (Held::Yes, None);
        }
        self.rested = now;
        (Held::Yes, self.running.take().map(|round| round.scores))
    }

    /// A task is given back.
    pub fn give_back(&mut self, task: TaskId, id: LeaseId) -> Held {
        if self.held(task, id).is_none() {
            return Held::No;
        }
        let round = self.running.as_mut().expect("a held task belongs to a round");
        round.leased.remove(&task.shard);
        round.todo.insert(task.shard);
        Held::Yes
    }

    /// Ends the leases of a worker that is gone, and of those without progress for `limit`.
    pub fn expire(&mut self, now: Duration, limit: Duration, gone: Option<WorkerId>) {
        let Some(round) = self.running.as_mut() else { return };
        let ends = |l: &Lease| Some(l.worker) == gone || now.saturating_sub(l.renewed) > limit;
        let ended: Vec<u32> = round.leased.iter().filter(|(_, l)| ends(l)).map(|(s, _)| *s).collect();
        for shard in ended {
            round.leased.remove(&shard);
            round.todo.insert(shard);
        }
    }

    fn held(&mut self, task: TaskId, id: LeaseId) -> Option<&mut Lease> {
        if task.epoch != self.round {
            return None;
        }
        self.running.as_mut()?.leased.get_mut(&task.shard).filter(|lease| lease.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease_id(n: u64) -> LeaseId {
        LeaseId { term: 1, n }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn evaluation() -> Evaluation {
        let mut evaluation = Evaluation::new(EvaluateSpec { every: Some(at(10)), steps: None }, 2);
        for n in 0..2 {
            let path = format!("v{n}");
            evaluation.add_shard(Shard { path, first: 0, records: Some(1), offset: 0, fingerprint: 0 });
        }
        evaluation.all_found();
        evaluation
    }

    fn scores(probability: f32, label: f32) -> Scores {
        let mut scores = Scores::default();
        scores.add(probability, label);
        scores
    }

    #[test]
    fn a_round_ends_when_its_last_task_is_scored_even_after_a_death() {
        let mut e = evaluation();
        assert!(!e.is_due(at(9), 1) && e.is_due(at(10), 1));
        e.begin(1);
        assert!(!e.is_due(at(99), 2), "one round at a time");
        let first = e.lease(at(10), lease_id(1), WorkerId(0)).unwrap();
        let second = e.lease(at(10), lease_id(2), WorkerId(1)).unwrap();
        assert_eq!(e.lease(at(10), lease_id(3), WorkerId(2)), None);
        e.expire(at(11), at(60), Some(WorkerId(0)));
        assert_eq!(e.finish(at(12), first, lease_id(1), &scores(0.9, 1.0)), (Held::No, None));
        assert_eq!(e.finish(at(12), second, lease_id(2), &scores(0.1, 0.0)), (Held::Yes, None));
        assert_eq!(e.lease(at(12), lease_id(4), WorkerId(1)), Some(first));
        let (held, merged) = e.finish(at(13), first, lease_id(4), &scores(0.8, 1.0));
        assert_eq!(held, Held::Yes);
        let merged = merged.unwrap();
        assert_eq!((merged.records(), merged.auc()), (2, Some(1.0)));
        assert!(!e.is_due(at(22), 2) && e.is_due(at(23), 2));
        assert!(!e.is_due(at(23), 1), "nothing was trained since");
    }

    #[test]
    fn rounds_by_the_number_of_batches_begin_at_multiples() {
        let mut e = evaluation();
        e.due = EvaluateSpec { every: None, steps: Some(100) };
        e.rest_from(at(0), 300);
        assert!(!e.is_due(at(9999), 399) && e.is_due(at(0), 400));
        e.begin(406);
        e.abandon();
        assert_eq!(e.steps(), 203);
        assert!(!e.is_due(at(9999), 599) && e.is_due(at(0), 600), "not 606");
    }

    #[test]
    fn a_report_of_an_abandoned_round_is_not_counted() {
        let mut e = evaluation();
        e.begin(0);
        let task = e.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
        e.begin(0);
        assert_eq!(e.finish(at(1), task, lease_id(1), &scores(0.5, 1.0)).0, Held::No);
        assert_eq!(e.progress(at(1), task, lease_id(1)), Held::No);
    }
}
