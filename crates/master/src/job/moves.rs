//! Partitions on their way from one server to another, while training goes on: because the number of servers
//! changes, or because one has much more to do than the others.
//!
//! The server that is to have them copies them first, and nothing of that is remembered here: whatever dies, they stay
//! where they are. When it has them the ledger says that they are its own, under new incarnations, and only
//! then are they handed over. From there on the old server is of no use any more: should the new one not get
//! to serve them, they go back to the last checkpoint like those of a server that died.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_wire::control::{
    Assignment, BeatReply, CopiedReply, CopiedRequest, LeaseNumber, Move, Role, beat_reply, copied_reply,
};
use serde_json::{Value, json};

use super::members::refused;
use super::{Answer, Caller, Effect, Job, Ticket, fields};
use crate::balance::{Balance, Transfer};
use crate::fleet::State;
use crate::ledger::Entry;
use crate::status::{MovingStatus, Phase};

/// A server that has copied its partitions asks again so soon when they cannot be handed over now.
const WAIT_MS: u32 = 50;
/// A checkpoint that is due is not begun while a server that was told so may still ask.
const WAITED_FOR: Duration = Duration::from_secs(10);
/// Between the word that partitions are a server's own and the news that it serves them.
pub(super) const HANDING_MAX: Duration = Duration::from_secs(30);
/// After a move that failed.
const REST: Duration = Duration::from_secs(5);
/// Loads are believed when they were watched for so long since anything moved.
const WATCHED: Duration = Duration::from_secs(15);

/// What partitions are copied for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Errand {
    /// They are to live at the other server.
    Move,
    /// It is to have a backup.
    BackUp,
}

/// Partitions on their way.
#[derive(Debug)]
pub(super) struct Moving {
    command: u64,
    errand: Errand,
    transfer: Transfer,
    /// Their incarnations before.
    incarnations: Vec<u64>,
    since: Duration,
    told: bool,
    /// When the new server was told last to wait for a checkpoint.
    waits: Option<Duration>,
    /// Since when they are the new server's by the ledger.
    handing: Option<Duration>,
}

impl Moving {
    /// Whether a server makes a backup by this command.
    pub(super) fn is_backup(&self, command: u64, server: u32) -> bool {
        self.errand == Errand::BackUp && (self.command, self.transfer.to) == (command, server)
    }

    /// The partition that a server was told to back up some time ago.
    pub(super) fn overdue_backup(&self, now: Duration, server: u32) -> Option<u32> {
        let overdue = self.is_backup(self.command, server) && now.saturating_sub(self.since) > REST;
        overdue.then(|| self.transfer.partitions[0])
    }

    /// Whether a server makes a backup of this partition.
    pub(super) fn backs_up(&self, partition: u32, server: u32) -> bool {
        self.is_backup(self.command, server) && self.transfer.partitions.contains(&partition)
    }

    /// The partitions with their next incarnations.
    fn next(&self) -> impl Iterator<Item = (u32, u64)> {
        let next = self.incarnations.iter().map(|incarnation| incarnation + 1);
        self.transfer.partitions.iter().copied().zip(next)
    }
}

/// How much work each partition is, as its server counts it.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// By partition: its incarnation, what was counted when it was first heard of, and last.
    counted: BTreeMap<u32, (u64, u64, u64)>,
    since: Duration,
}

impl Loads {
    /// A server tells what its partitions have come to.
    fn heard(&mut self, gauges: &Value, incarnation: impl Fn(u32) -> u64) {
        let Some(loads) = gauges["loads"].as_object() else { return };
        for (partition, count) in loads {
            let (Ok(partition), Some(count)) = (partition.parse(), count.as_u64()) else { continue };
            let now = incarnation(partition);
            let known = self.counted.entry(partition).or_insert((now, count, count));
            if known.0 != now || count < known.2 {
                *known = (now, count, count);
            }
            known.2 = count;
        }
    }

    /// Begins to count anew.
    pub(super) fn forget(&mut self, now: Duration) {
        self.counted.clear();
        self.since = now;
    }

    /// By partition; `None` where that is not known well enough.
    fn weights(&self, now: Duration, partitions: usize) -> Option<Vec<f64>> {
        let watched = now.saturating_sub(self.since) >= WATCHED;
        let weight = |p: usize| self.counted.get(&(p as u32)).map(|(_, first, last)| (last - first) as f64);
        let weights: Option<Vec<f64>> = (0..partitions).map(weight).collect();
        weights.filter(|weights| watched && weights.iter().sum::<f64>() > 0.0)
    }
}

impl Job {
    /// So many servers from now on.
    pub(super) fn scale_servers(&mut self, now: Duration, servers: u32, effects: &mut Vec<Effect>) {
        let facts = fields([("from", json!(self.servers_wanted)), ("to", json!(servers))]);
        effects.push(Effect::Record(Entry::ServersScaled { servers }));
        self.servers_wanted = servers;
        (0..servers).for_each(|id| self.fleet.want_server(id));
        self.reconcile(now, effects);
        effects.push(Effect::Emit("servers_scaled", facts));
    }

    /// A server tells how much work its partitions are.
    pub(super) fn weigh(&mut self, gauges: &Value) {
        let places = &self.places;
        self.loads.heard(gauges, |p| places.get(p as usize).map_or(0, |place| place.incarnation));
    }

    /// Partitions that a server was given and does not get to serve are not waited for for ever.
    pub(super) fn watch_move(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let handing = self.moving.as_ref().and_then(|moving| moving.handing);
        if handing.is_some_and(|since| now.saturating_sub(since) > HANDING_MAX) {
            let lost = self.lost_on_the_way(now, "the server does not get to serve them", effects);
            self.reborn(now, &BTreeSet::new(), &lost, effects);
        }
    }

    /// Begins to move what should be elsewhere, and sends servers home that have nothing left.
    pub(super) fn balance(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let away = self.places.iter().any(|place| place.address.is_none());
        if self.moving.is_some() || away || now < self.moves_not_before {
            return;
        }
        let servers: BTreeSet<u32> = (0..self.servers_wanted).collect();
        self.dismiss_idle(&servers, effects);
        let places: Vec<u32> = self.places.iter().map(|place| place.server).collect();
        // From a change in the number of servers on until all are there and have their share it goes by the number of
        // partitions; then by loads.
        self.spreading |= places.iter().any(|server| !servers.contains(server))
            || servers.iter().any(|server| !places.contains(server));
        let able = self.servers_ready();
        let spreading = self.spreading;
        let weights = match spreading {
            true => vec![1.0; places.len()],
            false if self.back_up_next(now, &servers, &able, effects) => return,
            false => match self.loads.weights(now, places.len()) {
                Some(weights) => weights,
                None => return,
            },
        };
        // Where batches are admitted by the server of partition 0, what it has decided is known to nobody else.
        let pinned = self.plan.job.is_staged().then_some(0);
        let balance = Balance { places: &places, weights: &weights, servers: &servers, able: &able, pinned };
        match balance.next() {
            Some(transfer) => self.begin_errand(now, Errand::Move, transfer, effects),
            // What was found to be even is looked at again when loads were watched for a while.
            None if servers.is_subset(&able) => {
                self.spreading = false;
                self.loads.forget(now);
            }
            // Those that are not there yet are not waited for.
            None => drop(self.back_up_next(now, &servers, &able, effects)),
        }
    }

    /// Servers that serve what they have, be it nothing.
    pub(super) fn servers_ready(&self) -> BTreeSet<u32> {
        let server = |(role, id): &(i32, u32)| (*role == Role::Server as i32).then_some(*id);
        let joined = |id: &u32| self.fleet.servers().get(id).is_some_and(|s| s.state == State::Joined);
        let ready = self.known.iter().filter(|(_, known)| known.serves).filter_map(|(who, _)| server(who));
        ready.filter(|id| joined(id) && !self.rejoin.contains(id)).collect()
    }

    fn dismiss_idle(&mut self, wanted: &BTreeSet<u32>, effects: &mut Vec<Effect>) {
        let idle = |id: &u32| !wanted.contains(id) && self.places.iter().all(|place| place.server != *id);
        let idle: Vec<u32> = self.fleet.servers().keys().copied().filter(idle).collect();
        for id in idle {
            effects.extend(self.fleet.dismiss_server(id).map(Effect::Fleet));
        }
    }

    pub(super) fn begin_errand(
        &mut self,
        now: Duration,
        errand: Errand,
        transfer: Transfer,
        effects: &mut Vec<Effect>,
    ) {
        let Transfer { from, to, partitions } = &transfer;
        let facts = fields([("from", json!(from)), ("to", json!(to)), ("partitions", json!(partitions))]);
        let incarnations = partitions.iter().map(|p| self.places[*p as usize].incarnation).collect();
        let command = self.next_command();
        let (since, told, waits, handing) = (now, false, None, None);
        self.moving = Some(Moving { command, errand, transfer, incarnations, since, told, waits, handing });
        if errand == Errand::Move {
            effects.push(Effect::Emit("moving", facts));
        }
        self.answer_beats(now, effects);
    }

    pub(super) fn next_command(&mut self) -> u64 {
        self.command_next += 1;
        self.command_next - 1
    }

    /// Nothing else is copied for a while.
    pub(super) fn rest_after(&mut self, now: Duration) {
        self.moves_not_before = now + REST;
    }

    /// What a server is to do about a move, where it has not heard of it, or perhaps not.
    pub(super) fn move_order(&mut self, server: u32, again: bool) -> Option<BeatReply> {
        let floor = self.floor.map(|floor| LeaseNumber { term: floor.term, n: floor.n });
        let moving = self.moving.as_mut().filter(|m| m.transfer.to == server && m.handing.is_none())?;
        if std::mem::replace(&mut moving.told, true) && !again {
            return None;
        }
        let assignment =
            |(partition, incarnation)| Assignment { partition, incarnation, floor, ..Assignment::default() };
        let from = self.known.get(&(Role::Server as i32, moving.transfer.from));
        let backup = moving.errand == Errand::BackUp;
        let now = moving.transfer.partitions.iter().copied().zip(moving.incarnations.iter().copied());
        let order = Move {
            from: from.map(|known| known.address.clone()).unwrap_or_default(),
            partitions: match backup {
                true => now.map(assignment).collect(),
                false => moving.next().map(assignment).collect(),
            },
            incarnations: moving.incarnations.clone(),
            backup,
        };
        Some(BeatReply { command: moving.command, what: Some(beat_reply::What::Move(order)) })
    }

    /// A server has copied what it is to have, or could not.
    pub(super) fn copied(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        copied: &CopiedRequest,
        effects: &mut Vec<Effect>,
    ) {
        if !self.fleet.knows(caller.role(), caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        let what = match &copied.backup {
            Some(backup) => self.backed_up(now, caller.id, copied, backup, effects),
            None => self.word_on(now, caller.id, copied, effects),
        };
        effects.push(Effect::Answer(ticket, Answer::Copied(CopiedReply { what: Some(what) })));
    }

    fn word_on(
        &mut self,
        now: Duration,
        server: u32,
        copied: &CopiedRequest,
        effects: &mut Vec<Effect>,
    ) -> copied_reply::What {
        let forget = copied_reply::What::Forget(true);
        self.promotion_failed(now, server, copied, effects);
        let known = |m: &&mut Moving| {
            m.errand == Errand::Move && m.command == copied.command && m.transfer.to == server
        };
        let Some(moving) = self.moving.as_mut().filter(known) else { return forget };
        if !copied.error.is_empty() {
            match moving.handing {
                Some(_) => {
                    let lost = self.lost_on_the_way(now, &copied.error, effects);
                    self.reborn(now, &BTreeSet::new(), &lost, effects);
                }
                None => self.give_up_move(now, &copied.error, effects),
            }
            return forget;
        }
        if moving.handing.is_some() {
            return copied_reply::What::Take(true);
        }
        if self.phase != Phase::Training {
            self.give_up_move(now, "training is over", effects);
            return forget;
        }
        // A checkpoint holds every partition in one life.
        if self.checkpoints.writing().is_some() {
            moving.waits = Some(now);
            return copied_reply::What::WaitMs(WAIT_MS);
        }
        moving.handing = Some(now);
        let (partitions, server): (Vec<_>, u32) = (moving.next().collect(), moving.transfer.to);
        // A backup of what is served there no more is of no use.
        partitions.iter().for_each(|(p, _)| self.places[*p as usize].backup = None);
        effects.push(Effect::Record(Entry::Moved { partitions, server }));
        copied_reply::What::Take(true)
    }

    /// Whether a server waits for a checkpoint's end to take partitions over. It comes before the next checkpoint: where
    /// one follows another, they would else never move.
    pub(super) fn hand_over_waits(&self, now: Duration) -> bool {
        let waits = self.moving.as_ref().and_then(|moving| moving.waits);
        waits.is_some_and(|since| now.saturating_sub(since) < WAITED_FOR)
    }

    /// Whether partitions are the new server's by the ledger and not yet served by it.
    pub(super) fn is_handing_over(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.handing.is_some()) || !self.backups.are_settled()
    }

    /// A server serves a partition that was on its way to it.
    pub(super) fn arrived(&mut self, server: u32, partition: u32, incarnation: u64) {
        let Some(moving) = self.moving.as_ref().filter(|m| m.handing.is_some() && m.transfer.to == server)
        else {
            return;
        };
        if moving.next().any(|next| next == (partition, incarnation)) {
            let place = &mut self.places[partition as usize];
            (place.server, place.incarnation) = (server, incarnation);
        }
    }

    /// Have all that were on their way arrived?
    pub(super) fn settle_move(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let all = |m: &mut Moving| m.next().all(|(p, next)| self.places[p as usize].incarnation == next);
        let Some(moving) = self.moving.take_if(|m| m.handing.is_some() && all(m)) else { return };
        let Transfer { from, to, partitions } = moving.transfer;
        let (seconds, handing) =
            (now.saturating_sub(moving.since), now.saturating_sub(moving.handing.unwrap_or(now)));
        let facts = fields([
            ("from", json!(from)),
            ("to", json!(to)),
            ("partitions", json!(partitions)),
            ("move_seconds", json!(seconds.as_secs_f64())),
            ("handing_seconds", json!(handing.as_secs_f64())),
        ]);
        effects.push(Effect::Record(Entry::Arrived { partitions }));
        effects.push(Effect::Emit("moved", facts));
        self.loads.forget(now);
    }

    /// A server is gone: what was on its way from or to it stays where it is, or is lost. Returns what is lost.
    pub(super) fn move_struck(
        &mut self,
        now: Duration,
        server: u32,
        why: &str,
        effects: &mut Vec<Effect>,
    ) -> BTreeSet<u32> {
        let struck = |m: &&Moving| m.transfer.from == server || m.transfer.to == server;
        match self.moving.as_ref().filter(struck).map(|m| m.handing.is_some()) {
            None => return BTreeSet::new(),
            Some(false) => self.give_up_move(now, why, effects),
            Some(true) => return self.lost_on_the_way(now, why, effects),
        }
        BTreeSet::new()
    }

    /// The partitions stay where they are.
    pub(super) fn give_up_move(&mut self, now: Duration, why: &str, effects: &mut Vec<Effect>) {
        if let Some(moving) = self.moving.take() {
            let Transfer { from, to, .. } = moving.transfer;
            let what = if moving.errand == Errand::Move { "moved" } else { "backed up" };
            let message = format!("partitions could not be {what} from ps-{from} to ps-{to}: {why}");
            effects.push(Effect::Emit("warning", fields([("message", json!(message))])));
            self.rest_after(now);
        }
    }

    /// The partitions are the new server's, and it does not have them. Returns them: they are to be reborn.
    #[must_use]
    pub(super) fn lost_on_the_way(
        &mut self,
        now: Duration,
        why: &str,
        effects: &mut Vec<Effect>,
    ) -> BTreeSet<u32> {
        let Some(moving) = self.moving.take() else { return BTreeSet::new() };
        let Transfer { from, to, .. } = moving.transfer;
        let message = format!("partitions were lost on their way from ps-{from} to ps-{to}: {why}");
        effects.push(Effect::Emit("warning", fields([("message", json!(message))])));
        self.moves_not_before = now + REST;
        for (partition, incarnation) in moving.next() {
            let place = &mut self.places[partition as usize];
            (place.server, place.incarnation, place.address) = (to, incarnation, None);
        }
        // The old one may have some of them still.
        self.have_join_again(from, effects);
        self.have_join_again(to, effects);
        moving.transfer.partitions.into_iter().collect()
    }

    /// What a server is to hold has changed: at its next beat it hears so.
    pub(super) fn have_join_again(&mut self, server: u32, effects: &mut Vec<Effect>) {
        if !self.known.contains_key(&(Role::Server as i32, server)) {
            return;
        }
        self.rejoin.insert(server);
        let of = |caller: &Caller| caller.role() == Role::Server && caller.id == server;
        for (_, waiting) in self.beats.extract_if(.., |caller, _| of(caller)) {
            effects.push(refused(waiting.ticket));
        }
    }

    /// For the status.
    pub(super) fn moving_status(&self, now: Duration) -> Option<MovingStatus> {
        let moving = self.moving.as_ref().filter(|moving| moving.errand == Errand::Move)?;
        let Transfer { from, to, partitions } = moving.transfer.clone();
        Some(MovingStatus { from, to, partitions, seconds: now.saturating_sub(moving.since).as_secs_f64() })
    }
}
