//! Going on after a death: a master's, of which the ledger tells, or a server's, whose partitions go back to
//! the last committed checkpoint while their marks tell what is to be applied again.

use std::collections::BTreeSet;
use std::time::Duration;

use elasticdl_spec::{LeaseId, Shard, TaskId};
use elasticdl_wire::control::Role;
use serde_json::json;

use super::{Effect, Job, Known, Replay, fields};
use crate::fleet::State;
use crate::ledger::{Book, Entry, ShardNote, TermsOfJob};

impl Job {
    /// Takes over the processes that still run.
    pub(super) fn adopt(&mut self, book: &Book) {
        // One that is to go and died meanwhile is started again: what it holds is moved when it serves.
        self.places.iter().for_each(|place| self.fleet.want_server(place.server));
        self.fleet.number_workers_from(book.worker_next);
        for running in book.processes.values() {
            let role = Role::from(running.role);
            self.fleet.adopt(role, running.id, running.process.pid);
            if role == Role::Worker {
                self.known.insert((role as i32, running.id), Known::default());
            } else if let Some(address) = &running.address {
                let known = Known { address: address.clone(), serves: true, ..Known::default() };
                self.known.insert((role as i32, running.id), known);
                let ours = self.places.iter_mut().filter(|place| place.server == running.id);
                ours.for_each(|place| place.address = Some(address.clone()));
            }
        }
    }

    /// The first step: the term is written down, and what the processes that are gone held is given up.
    pub(super) fn begin(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let terms_of_job = TermsOfJob::of(&self.plan);
        effects.push(Effect::Record(Entry::Begun { term: self.term, terms_of_job }));
        let workers: Vec<u32> = self.fleet.workers().keys().copied().collect();
        let freed = self.tasks.keep_workers(&workers);
        self.record_freed(freed, effects);
        let gone: Vec<u32> = self
            .fleet
            .servers()
            .iter()
            .filter(|(_, server)| server.state == State::Waiting)
            .map(|(id, _)| *id)
            .collect();
        let adopted = workers.len() + self.fleet.servers().len() - gone.len();
        let facts = fields([("term", json!(self.term)), ("adopted", json!(adopted))]);
        effects.push(Effect::Emit("started", facts));
        let servers: Vec<u32> = self.places.iter().map(|place| place.server).collect();
        effects.push(Effect::Record(Entry::Placed { servers }));
        if self.goes_on {
            let arriving = std::mem::take(&mut self.arriving);
            if !arriving.is_empty() {
                // One of them has had them, and may have them still.
                let servers: Vec<u32> = self.fleet.servers().keys().copied().collect();
                servers.into_iter().for_each(|server| self.have_join_again(server, effects));
            }
            for server in &gone {
                self.backups_gone(*server, effects);
                self.promote(now, *server, effects);
            }
            self.reborn(now, &gone.into_iter().collect(), &arriving, effects);
        }
    }

    /// A training shard was found: is it the one that the ledger remembers under this number?
    pub(super) fn shard_found(&mut self, now: Duration, shard: Shard, effects: &mut Vec<Effect>) {
        let number = self.tasks.shards().len() as u32;
        let note = ShardNote::of(&shard);
        match self.shard_notes.get(&number) {
            Some(known) if known.fingerprint != note.fingerprint => return self.other_files(now, effects),
            Some(_) => {}
            None if self.was_indexed => return self.other_files(now, effects),
            None => effects.push(Effect::Record(Entry::Shard { number, note })),
        }
        self.tasks.add_shard(shard);
    }

    /// All shards are known: are they as many as before?
    pub(super) fn all_found(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.shard_notes.len() > self.tasks.shards().len() {
            return self.other_files(now, effects);
        }
        self.tasks.all_found();
        effects.push(Effect::Record(Entry::Indexed));
        let facts = fields([
            ("shards", json!(self.tasks.shards().len())),
            ("records_total", json!(self.tasks.records_total())),
        ]);
        effects.push(Effect::Emit("indexed", facts));
    }

    fn other_files(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let error = "the training files are not those that the job began with: their number, size, time or shards \
                     differ, so that records would be lost or counted twice; put the old files back, or train anew \
                     under another name";
        self.fail(now, error.into(), effects);
    }

    /// A server is gone: its partitions will be restored by the next one of its number.
    pub(super) fn server_gone(&mut self, now: Duration, server: u32, effects: &mut Vec<Effect>) {
        let mut lost = self.move_struck(now, server, "a server died", effects);
        lost.extend(self.promotion_struck(server, "it died", effects));
        self.backups_gone(server, effects);
        self.promote(now, server, effects);
        self.reborn(now, &BTreeSet::from([server]), &lost, effects);
    }

    /// These partitions, and all of these servers, begin another life. Where steps are staged
    /// all partitions do, so that every one of them is back at the same step.
    pub(super) fn reborn(
        &mut self,
        now: Duration,
        servers: &BTreeSet<u32>,
        partitions: &BTreeSet<u32>,
        effects: &mut Vec<Effect>,
    ) {
        let all = self.plan.job.is_staged();
        let none_dies =
            partitions.is_empty() && !self.places.iter().any(|place| servers.contains(&place.server));
        if servers.is_empty() && partitions.is_empty() || none_dies && !all {
            return;
        }
        if all && self.is_handing_over() {
            // They are among all.
            drop(self.lost_on_the_way(now, "all partitions go back to the last checkpoint", effects));
        } else if all {
            self.moving = None;
        }
        self.loads.forget(now);
        let dies = |partition: usize, place: &super::Place| {
            all || servers.contains(&place.server) || partitions.contains(&(partition as u32))
        };
        let mut reborn = Vec::new();
        for (partition, place) in self.places.iter_mut().enumerate() {
            if dies(partition, place) {
                place.incarnation += 1;
                place.since = place.incarnation;
                (place.address, place.backup) = (None, None);
                reborn.push((partition as u32, place.incarnation));
            }
        }
        self.checkpoints.abandon();
        self.checkpoint_told.clear();
        if all {
            self.evaluation.abandon();
            self.end_servers(effects);
            // Whoever still works on a task would do it before its turn.
            self.floor = Some(LeaseId { term: self.term, n: self.lease_next });
        }
        // Written before anything is restored or leased again: no life of a partition comes twice.
        let floor = self.floor.filter(|_| all);
        effects.push(Effect::Record(Entry::Reborn { partitions: reborn, floor }));
        let again = if all { self.tasks.roll_back() } else { self.tasks.reopen() };
        let records = again.values().map(|finished| finished.records).sum::<u64>();
        self.replayed += records;
        let facts = fields([
            ("servers", json!(servers)),
            ("checkpoint", json!(self.committed.as_ref().map(|m| m.id))),
            ("tasks", json!(again.len())),
            ("records", json!(records)),
        ]);
        effects.push(Effect::Emit("replay", facts));
        let before = self.replay.take();
        let since = before.as_ref().map_or(now, |replay| replay.since);
        let mut tasks: BTreeSet<TaskId> = again.into_keys().collect();
        tasks.extend(before.into_iter().flat_map(|replay| replay.tasks));
        if !tasks.is_empty() {
            self.replay = Some(Replay { since, count: tasks.len(), tasks });
        }
    }

    /// Ends all servers: each begins its next life with the others.
    fn end_servers(&mut self, effects: &mut Vec<Effect>) {
        let running: Vec<(u32, u32)> = self
            .fleet
            .servers()
            .iter()
            .filter(|(_, server)| matches!(server.state, State::Starting | State::Joined))
            .filter_map(|(id, server)| Some((*id, server.pid?)))
            .collect();
        for (id, pid) in running {
            self.fleet.leaving(Role::Server, id);
            effects.push(Effect::Kill(Role::Server, id, pid));
        }
    }

    /// A task is done: is it the last one that had to be applied again?
    pub(super) fn replay_done(&mut self, now: Duration, task: TaskId, effects: &mut Vec<Effect>) {
        let Some(replay) = &mut self.replay else { return };
        replay.tasks.remove(&task);
        if replay.tasks.is_empty() {
            let seconds = now.saturating_sub(replay.since).as_secs_f64();
            let facts = fields([("tasks", json!(replay.count)), ("replay_seconds", json!(seconds))]);
            effects.push(Effect::Emit("replayed", facts));
            self.replay = None;
        }
    }

    /// Leases that ended early, and not by their holders' own will.
    pub(super) fn record_freed(&mut self, tasks: Vec<TaskId>, effects: &mut Vec<Effect>) {
        let freed = |task| Effect::Record(Entry::Freed { task, between_batches: false });
        effects.extend(tasks.into_iter().map(freed));
    }
}
