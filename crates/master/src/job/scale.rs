//! How many workers are wanted: as many as somebody asks for, or as many as are of use. Servers are as many as somebody
//! asks for; `moves.rs` deals partitions to them.

use std::time::Duration;

use elasticdl_spec::JobSpec;
use serde_json::json;

use super::{Answer, Effect, Job, Ticket, fields};
use crate::fleet::State;
use crate::ledger::{Book, Entry};
use crate::status::{Phase, ScaleRequest, Wanted};
use crate::useful::Useful;

/// Checkpoints that come more often than this are part of how fast the job is: between two of them there
/// would be no time to measure anything.
const CHECKPOINT_RARE: Duration = Duration::from_secs(5);

impl ScaleRequest {
    /// Why a job cannot have so many workers and servers; `None`: it can.
    pub fn refusal(&self, job: &JobSpec) -> Option<String> {
        let beyond = |what: &str, wanted: u32, min: u32, limit: &str, max: u32| {
            let possible = (min..=max).contains(&wanted);
            (!possible)
                .then(|| format!("{wanted} {what} are wanted; from {min} to {limit} = {max} are possible"))
        };
        let workers = match self.workers {
            Some(Wanted::Fixed(workers)) => beyond("workers", workers, 1, "workers.max", job.workers.max),
            Some(Wanted::Auto) | None => None,
        };
        // A backup is at another server.
        let least = job.servers.replicas;
        let servers = |n| beyond("servers", n, least, "servers.partitions", job.servers.partitions);
        workers.or_else(|| self.servers.and_then(servers))
    }

    /// What a ledger is to say before a master goes on from it, so that the job has so many from the start, and no
    /// later master forgets it.
    pub fn entries(&self, job: &JobSpec, book: &Book) -> Vec<Entry> {
        let workers = self.workers.map(|wanted| match wanted {
            Wanted::Fixed(workers) => Entry::Scaled { workers, automatic: false },
            // Which number is of use is found out from where the job was.
            Wanted::Auto => {
                let workers = book.workers_wanted.unwrap_or_else(|| job.workers_at_start());
                Entry::Scaled { workers, automatic: true }
            }
        });
        let servers = self.servers.map(|servers| Entry::ServersScaled { servers });
        workers.into_iter().chain(servers).collect()
    }
}

impl Job {
    /// Somebody asks for so many workers and servers: both are met, or none.
    pub(super) fn scale(
        &mut self,
        now: Duration,
        ticket: Ticket,
        wanted: ScaleRequest,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(reason) = self.refusal(wanted) {
            return effects.push(Effect::Answer(ticket, Answer::Refused(reason)));
        }
        if let Some(workers) = wanted.workers {
            self.scale_workers(now, workers, effects);
        }
        if let Some(servers) = wanted.servers {
            self.scale_servers(now, servers, effects);
        }
        effects.push(Effect::Answer(ticket, Answer::Noted));
    }

    /// Why that cannot be.
    fn refusal(&self, wanted: ScaleRequest) -> Option<String> {
        if self.phase.is_over() || self.phase == Phase::Stopping {
            return Some("the job is over or stopping".into());
        }
        wanted.refusal(&self.plan.job)
    }

    fn scale_workers(&mut self, now: Duration, wanted: Wanted, effects: &mut Vec<Effect>) {
        let (min, max) = (self.plan.job.kubernetes.workers_min, self.plan.job.workers.max);
        match wanted {
            Wanted::Fixed(workers) => {
                let reason = match self.useful.take() {
                    Some(_) => "somebody asked for so many, and no others are tried from now on",
                    None => "somebody asked for so many",
                };
                self.want(now, workers, reason.into(), effects);
            }
            Wanted::Auto => {
                let useful = match self.useful.take() {
                    // Who asks for it again knows that what was measured does not hold any more.
                    Some(mut useful) => {
                        useful.forget(now);
                        useful
                    }
                    None => Useful::new(min, max, self.fleet.workers_wanted()),
                };
                let workers = self.useful.insert(useful).target().workers;
                self.want(now, workers, "somebody asked for as many as are of use".into(), effects);
            }
        }
    }

    /// Who shares out the room says how many workers the job may have.
    pub(super) fn allow(
        &mut self,
        now: Duration,
        ticket: Ticket,
        workers: Option<u32>,
        effects: &mut Vec<Effect>,
    ) {
        if workers == Some(0) {
            let reason = "no worker at all is allowed; stop the job instead".to_string();
            return effects.push(Effect::Answer(ticket, Answer::Refused(reason)));
        }
        if workers != self.fleet.workers_allowed() {
            let facts = fields([("from", json!(self.fleet.workers_allowed())), ("to", json!(workers))]);
            self.fleet.allow(workers);
            self.reconcile(now, effects);
            effects.push(Effect::Emit("allowed", facts));
        }
        effects.push(Effect::Answer(ticket, Answer::Noted));
    }

    /// How many workers the job could do with at this moment, if there were room.
    pub(super) fn workers_useful(&self) -> u32 {
        self.useful.as_ref().map_or(self.fleet.workers_wanted(), Useful::most)
    }

    /// Sees what those who are there get done, and asks for another number of workers where that may pay.
    pub(super) fn measure(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let disturbed = self.is_disturbed();
        let Some(useful) = &mut self.useful else { return };
        if disturbed {
            useful.disturb(now);
        }
        let working = self.fleet.workers().values().filter(|worker| worker.state == State::Joined);
        let before = useful.target().reason;
        useful.observe(now, working.count() as u32, self.told);
        let target = useful.target();
        let settles = target.reason.is_settled() && target.reason != before;
        if target.workers != self.fleet.workers_wanted() || settles {
            self.want(now, target.workers, target.reason.to_string(), effects);
        }
    }

    /// Whether the speed at this moment says nothing about the number of workers: some of them evaluate, a
    /// server is away, or there are too few tasks for all of them. What is applied again, on the other hand,
    /// is computed like anything else.
    fn is_disturbed(&self) -> bool {
        self.evaluation.is_running()
            || !self.tasks.is_plentiful()
            || self.places.iter().any(|place| place.address.is_none())
    }

    /// A checkpoint is cut: for a moment servers have something else to do.
    pub(super) fn disturb_by_checkpoint(&mut self, now: Duration) {
        let rare = self.plan.job.checkpoint.every.is_none_or(|every| every >= CHECKPOINT_RARE);
        if let Some(useful) = self.useful.as_mut().filter(|_| rare) {
            useful.disturb(now);
        }
    }

    /// So many workers from now on.
    fn want(&mut self, now: Duration, workers: u32, reason: String, effects: &mut Vec<Effect>) {
        assert!(
            (1..=self.plan.job.workers.max).contains(&workers),
            "{workers} workers are beyond workers.max"
        );
        let automatic = self.useful.is_some();
        let settled = self.useful.as_ref().is_some_and(|useful| useful.target().reason.is_settled());
        let facts = fields([
            ("from", json!(self.fleet.workers_wanted())),
            ("to", json!(workers)),
            ("automatic", json!(automatic)),
            ("settled", json!(settled)),
            ("reason", json!(reason)),
        ]);
        effects.push(Effect::Record(Entry::Scaled { workers, automatic }));
        self.fleet.scale(workers);
        self.reconcile(now, effects);
        effects.push(Effect::Emit("scaled", facts));
    }
}
