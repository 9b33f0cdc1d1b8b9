//! Processes: how they join, serve, give signs of life, and go.

use std::collections::BTreeSet;
use std::time::Duration;

use elasticdl_spec::WorkerId;
use elasticdl_wire::control::{
    self, Assignment, BeatReply, JoinReply, LeaseNumber, Place, ReadyRequest, Role, TopologyReply,
    WriteCheckpoint, beat_reply,
};
use serde_json::{Value, json};

use super::{Answer, Caller, Effect, Job, Known, Ticket, Waiting, fields};
use crate::checkpoint::EarlierFile;
use crate::config::{Exit, Process, Waits};
use crate::fleet::{Fault, Order, State};
use crate::ledger::Entry;
use crate::store;

/// How long a beat is held when there is nothing to say.
const BEAT_HELD: Duration = Duration::from_secs(1);

impl Job {
    pub(super) fn joined(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        address: String,
        effects: &mut Vec<Effect>,
    ) {
        if !self.fleet.joined(caller.role(), caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        let known = Known { address, heard: now, ..Known::default() };
        if caller.role() == Role::Server {
            // It knows nothing of a move any more, and of what was handed over nothing is left.
            let mut lost = self.move_struck(now, caller.id, "a server has joined again", effects);
            lost.extend(self.promotion_struck(caller.id, "it has joined again", effects));
            self.reborn(now, &BTreeSet::new(), &lost, effects);
            self.rejoin.remove(&caller.id);
        }
        self.known.insert((caller.role, caller.id), known);
        if caller.role() == Role::Worker {
            let facts = fields([("worker", json!(caller.id)), ("pid", json!(caller.pid))]);
            effects.push(Effect::Emit("worker_joined", facts));
        }
        let reply = JoinReply {
            plan: self.plan_json.clone(),
            partitions: self.assignments(caller),
            restore_from: match (&self.committed, caller.role()) {
                (Some(manifest), Role::Server) => store::checkpoint_path(&self.checkpoint_dir, manifest.id),
                _ => String::new(),
            },
            term: self.term,
        };
        effects.push(Effect::Answer(ticket, Answer::Join(Box::new(reply))));
    }

    /// What a server is to open.
    fn assignments(&self, caller: Caller) -> Vec<Assignment> {
        if caller.role() != Role::Server {
            return Vec::new();
        }
        let ours = self.places.iter().enumerate().filter(|(_, place)| place.server == caller.id);
        ours.map(|(partition, place)| {
            let partition = partition as u32;
            let floor = self.floor.map(|floor| LeaseNumber { term: floor.term, n: floor.n });
            let mut assignment =
                Assignment { partition, incarnation: place.incarnation, floor, ..Assignment::default() };
            self.restore_from_committed(&mut assignment);
            assignment
        })
        .collect()
    }

    /// Tells which files hold a partition.
    fn restore_from_committed(&self, assignment: &mut Assignment) {
        let Some(manifest) = &self.committed else { return };
        let mut chain = manifest.chain(assignment.partition);
        let Some(last) = chain.pop() else { return };
        (assignment.checkpoint, assignment.bytes, assignment.crc32) =
            (last.checkpoint, last.bytes, last.crc32);
        let earlier = |file: EarlierFile| control::EarlierFile {
            checkpoint: file.checkpoint,
            dir: store::checkpoint_path(&self.checkpoint_dir, file.checkpoint),
            bytes: file.bytes,
            crc32: file.crc32,
        };
        assignment.earlier = chain.into_iter().map(earlier).collect();
        assignment.is_basis = self.base().is_some();
    }

    /// The checkpoint that the next one may add to.
    pub(super) fn base(&self) -> Option<u64> {
        let committed = self.committed.as_ref()?;
        (committed.chain_longest() < self.plan.job.checkpoint.full_every).then_some(committed.id)
    }

    pub(super) fn ready(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        ready: ReadyRequest,
        effects: &mut Vec<Effect>,
    ) {
        // One that joined the master before this one has not told us where it serves. One that is to join again lacks
        // something: the next master would take it for one that serves all that is its.
        let address = self.known.get(&(caller.role, caller.id)).map(|known| known.address.clone());
        let ours =
            self.fleet.knows(caller.role(), caller.id, caller.pid) && !self.rejoin.contains(&caller.id);
        let Some(address) = address.filter(|_| ours) else { return effects.push(refused(ticket)) };
        effects.push(Effect::Answer(ticket, Answer::Noted));
        if !ready.error.is_empty() {
            if ready.user_error {
                self.fail(
                    now,
                    format!("ps-{} cannot open its partitions: {}", caller.id, ready.error),
                    effects,
                );
            }
            return; // It ends, and is started again.
        }
        effects.push(Effect::Record(Entry::Serving { id: caller.id, address: address.clone() }));
        let load_seconds = f64::from(ready.load_ms) / 1000.0;
        let facts = fields([("server", json!(caller.id)), ("load_seconds", json!(load_seconds))]);
        effects.push(Effect::Emit("server_ready", facts));
        if let Some(known) = self.known.get_mut(&(caller.role, caller.id)) {
            known.serves = true;
        }
        for opened in ready.partitions {
            self.arrived(caller.id, opened.partition, opened.incarnation);
            let place = self.places.get_mut(opened.partition as usize);
            // A server that opened before a roll-back holds rows that do not count any more.
            if let Some(place) = place
                && place.server == caller.id
                && place.incarnation == opened.incarnation
            {
                place.address = Some(address.clone());
            }
        }
        self.settle_move(now, effects);
        self.settle_promotions(now, effects);
    }

    pub(super) fn topology(&self) -> TopologyReply {
        let place = |(partition, place): (usize, &super::Place)| Place {
            partition: partition as u32,
            incarnation: place.incarnation,
            address: place.address.clone().unwrap_or_default(),
        };
        TopologyReply { places: self.places.iter().enumerate().map(place).collect() }
    }

    pub(super) fn beat(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        gauges: Value,
        effects: &mut Vec<Effect>,
    ) {
        if self.phase.is_over() || !self.fleet.knows(caller.role(), caller.id, caller.pid) {
            return effects.push(self.leave(ticket));
        }
        if caller.role() == Role::Server && !self.known.contains_key(&(caller.role, caller.id)) {
            // A server that an earlier master started, of which it is not known where it serves.
            return effects.push(refused(ticket));
        }
        if caller.role() == Role::Server && self.rejoin.contains(&caller.id) {
            return effects.push(refused(ticket));
        }
        if caller.role() == Role::Server {
            self.weigh(&gauges);
            self.look_at_backups(now, caller.id, &gauges, effects);
        }
        let known = self.known.entry((caller.role, caller.id)).or_default();
        known.gauges = gauges;
        known.heard = now;
        self.beats.insert(caller, Waiting { ticket, since: now });
        self.answer_beats(now, effects);
    }

    /// Answers beats that have waited long enough, and servers that are to write a checkpoint or to copy partitions.
    ///
    /// An order may be lost on its way, or find the server at an older one. So it is given again, under the
    /// same number, until the server has written its part.
    pub(super) fn answer_beats(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let writing = self.checkpoints.writing();
        let mut answered = Vec::new();
        let waiting: Vec<(Caller, Ticket, Duration)> =
            self.beats.iter().map(|(caller, waiting)| (*caller, waiting.ticket, waiting.since)).collect();
        for (caller, ticket, since) in waiting {
            let held_long = now.saturating_sub(since) >= BEAT_HELD;
            let serves = caller.role() == Role::Server;
            let due = writing.filter(|_| serves && self.checkpoints.awaits(caller.id));
            let told = self.checkpoint_told.get(&caller.id).filter(|(id, _)| Some(*id) == due);
            let order = match due {
                Some(id) if told.is_none() || held_long => Some(self.checkpoint_order(caller.id, id)),
                _ if serves => {
                    self.backup_order(caller.id, held_long).or_else(|| self.move_order(caller.id, held_long))
                }
                _ => None,
            };
            if let Some(reply) = order.or(held_long.then(BeatReply::default)) {
                answered.push((caller, ticket, reply));
            }
        }
        for (caller, ticket, reply) in answered {
            self.beats.remove(&caller);
            effects.push(Effect::Answer(ticket, Answer::Beat(reply)));
        }
    }

    fn checkpoint_order(&mut self, server: u32, id: u64) -> BeatReply {
        let next = self.command_next;
        let told = self.checkpoint_told.entry(server).or_insert((id, next));
        if told.0 != id {
            *told = (id, next);
        }
        let command = told.1;
        self.command_next = next.max(command + 1);
        let covered = serde_json::to_string(&self.tasks.covered().epochs).expect("ranges are JSON");
        let dir = store::checkpoint_path(&self.checkpoint_dir, id);
        let (base, is_basis) = (self.base().unwrap_or(0), self.plan.job.checkpoint.full_every > 1);
        let last = self.last_cut == Some(id);
        let order = WriteCheckpoint { checkpoint: id, dir, covered, base, is_basis, last };
        BeatReply { command, what: Some(beat_reply::What::WriteCheckpoint(order)) }
    }

    /// Tells everybody who waits to end.
    pub(super) fn send_home(&mut self, effects: &mut Vec<Effect>) {
        for (_, waiting) in std::mem::take(&mut self.beats) {
            let leave = self.leave(waiting.ticket);
            effects.push(leave);
        }
    }

    fn leave(&mut self, ticket: Ticket) -> Effect {
        let command = self.command_next;
        self.command_next += 1;
        let what = Some(beat_reply::What::Leave(true));
        Effect::Answer(ticket, Answer::Beat(BeatReply { command, what }))
    }

    pub(super) fn launched(
        &mut self,
        now: Duration,
        role: Role,
        id: u32,
        outcome: Result<Process, String>,
        effects: &mut Vec<Effect>,
    ) {
        match outcome {
            Ok(process) => {
                let pid = process.pid;
                effects.push(Effect::Record(Entry::Started { role: role.into(), id, process }));
                let event = if role == Role::Server { "server_started" } else { "worker_started" };
                let key = if role == Role::Server { "server" } else { "worker" };
                effects.push(Effect::Emit(event, fields([(key, json!(id)), ("pid", json!(pid))])));
                effects.extend(self.fleet.started(role, id, pid).map(Effect::Fleet));
            }
            Err(error) => self.fail(now, format!("cannot start a process: {error}"), effects),
        }
    }

    /// A process waits for room, or for something that will not come by itself.
    pub(super) fn waits(&mut self, waits: Waits, effects: &mut Vec<Effect>) {
        let Waits { role, id, pid, why, may_pass } = waits;
        if !self.fleet.is_starting(role, id, pid) {
            return;
        }
        let known = self.known.entry((role as i32, id)).or_default();
        if known.waits.as_ref() == Some(&why) {
            return;
        }
        let who = if role == Role::Server { "server" } else { "worker" };
        let facts = fields([(who, json!(id)), ("why", json!(why)), ("may_pass", json!(may_pass))]);
        effects.push(Effect::Emit("pending", facts));
        known.waits = Some(why);
    }

    pub(super) fn exited(&mut self, now: Duration, exit: Exit, effects: &mut Vec<Effect>) {
        let fault = if exit.outside.is_some() { Fault::Outside } else { Fault::Own };
        let Some(asked) = self.fleet.exited(now, exit.role, exit.id, exit.pid, fault) else { return };
        self.beats.retain(|caller, _| caller.role() != exit.role || caller.id != exit.id);
        self.known.remove(&(exit.role as i32, exit.id));
        if exit.role == Role::Server {
            self.rejoin.remove(&exit.id);
        }
        effects.push(Effect::Record(Entry::Exited { role: exit.role.into(), id: exit.id }));
        if self.phase.is_over() {
            return;
        }
        let (event, key) = match exit.role {
            Role::Worker => ("worker_exited", "worker"),
            Role::Server => ("server_exited", "server"),
        };
        let mut facts = fields([(key, json!(exit.id)), ("pid", json!(exit.pid)), ("asked", json!(asked))]);
        facts.extend(exit.code.map(|code| ("code".to_string(), json!(code))));
        facts.extend(exit.signal.map(|signal| ("signal".to_string(), json!(signal))));
        facts.extend(exit.outside.filter(|_| !asked).map(|why| ("why".to_string(), json!(why))));
        let freed = match exit.role {
            Role::Worker => self.tasks.worker_gone(WorkerId(exit.id)),
            Role::Server => Vec::new(),
        };
        if !freed.is_empty() {
            facts.insert("tasks".into(), json!(freed));
        }
        if !asked && !exit.last_lines.is_empty() {
            facts.insert("last_lines".into(), json!(exit.last_lines));
        }
        effects.push(Effect::Emit(event, facts));
        if !asked {
            self.last_words = exit.last_lines;
        }
        match exit.role {
            Role::Worker => {
                self.record_freed(freed, effects);
                self.evaluation.expire(now, Duration::MAX, Some(WorkerId(exit.id)));
            }
            // Those that were ended have begun their next life already, or have nothing left.
            Role::Server if asked => {
                let mut lost = self.move_struck(now, exit.id, "a server has ended", effects);
                lost.extend(self.promotion_struck(exit.id, "it has ended", effects));
                self.backups_gone(exit.id, effects);
                self.reborn(now, &BTreeSet::new(), &lost, effects);
            }
            Role::Server => self.server_gone(now, exit.id, effects),
        }
    }

    /// Ends what was not heard of for too long: it hangs, and somebody else can do its work.
    pub(super) fn end_silent(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let limit = self.plan.job.limits.silence;
        let members = [(Role::Worker, self.fleet.workers()), (Role::Server, self.fleet.servers())];
        for (role, fleet) in members {
            for (&id, member) in fleet.iter().filter(|(_, m)| m.state == State::Joined) {
                let heard = self.known.get(&(role as i32, id)).map_or(now, |known| known.heard);
                let Some(pid) = member.pid.filter(|_| now.saturating_sub(heard) > limit) else { continue };
                let who = if role == Role::Server { "server" } else { "worker" };
                effects.push(Effect::Emit("silent", fields([(who, json!(id)), ("pid", json!(pid))])));
                effects.push(Effect::Kill(role, id, pid));
                // Once is enough: its exit comes.
                if let Some(known) = self.known.get_mut(&(role as i32, id)) {
                    known.heard = now;
                }
            }
        }
    }

    /// Carries out what the fleet needs.
    pub(super) fn reconcile(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        for order in self.fleet.reconcile(now) {
            if let Order::GiveUp { role } = order {
                let who = if role == Role::Server { "servers" } else { "workers" };
                let mut error = format!(
                    "{who} died {} times in a row without a batch done in between",
                    self.plan.job.limits.restarts + 1
                );
                if !self.last_words.is_empty() {
                    error =
                        format!("{error}; the last one's log ends with:\n  {}", self.last_words.join("\n  "));
                }
                return self.fail(now, error, effects);
            }
            effects.push(Effect::Fleet(order));
        }
    }
}

pub(super) fn refused(ticket: Ticket) -> Effect {
    Effect::Answer(ticket, Answer::Refused("this process is not part of the job: join first".into()))
}
