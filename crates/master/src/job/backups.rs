//! Backups: where each partition has one, and what happens when its server dies.
//!
//! A server copies a partition and follows it from then on; the ledger knows of it from the moment in which it lacks
//! nothing. Its partition's server tells nobody of anything that the backup has not done too, and goes on without it only when the
//! ledger has forgotten it. So a backup that the ledger knows of has all that anybody was told of, and can take
//! the partition's place at any moment: the ledger gives it to its server under the next incarnation, like one that was
//! moved, and nothing is applied again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_wire::control::{
    AloneReply, AloneRequest, Assignment, BeatReply, CopiedRequest, Forget, LeaseNumber, Promote, beat_reply,
    copied_reply,
};
use serde_json::{Value, json};

use super::members::refused;
use super::moves::{Errand, HANDING_MAX, Moving};
use super::{Answer, Caller, Effect, Job, Ticket, fields};
use crate::balance::Transfer;
use crate::ledger::Entry;
use crate::status::{BackupsStatus, Phase};

/// What is under way about backups.
#[derive(Debug, Default)]
pub(super) struct Backups {
    /// Those that are to take the place of partitions, by their server.
    promotions: BTreeMap<u32, Promotion>,
    /// The partition and the server of one that could not be made last.
    failed: Option<(u32, u32)>,
    /// Those that are of no use, by their server.
    stale: BTreeMap<u32, Vec<Assignment>>,
}

impl Backups {
    /// Whether none is to take the place of a partition.
    pub(super) fn are_settled(&self) -> bool {
        self.promotions.is_empty()
    }
}

/// Backups that take the place of partitions.
#[derive(Debug)]
struct Promotion {
    command: u64,
    /// The server that died.
    from: u32,
    partitions: Vec<u32>,
    since: Duration,
    told: bool,
}

impl Job {
    fn wants_backups(&self) -> bool {
        self.plan.job.servers.replicas > 1
    }

    /// For the status.
    pub(super) fn backups_status(&self) -> Option<BackupsStatus> {
        let there = self.places.iter().filter(|place| place.backup.is_some()).count() as u32;
        self.wants_backups().then_some(BackupsStatus { there, wanted: self.places.len() as u32 })
    }

    /// Begins to make a backup where one is lacking. `false`: there is nothing to do, or nobody to do it.
    pub(super) fn back_up_next(
        &mut self,
        now: Duration,
        wanted: &BTreeSet<u32>,
        able: &BTreeSet<u32>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if !self.wants_backups() {
            return false;
        }
        // Those of servers that are to go are needed elsewhere.
        self.drop_backups(|_, server| !wanted.contains(&server), effects);
        let mut counts: BTreeMap<u32, usize> = wanted.intersection(able).map(|server| (*server, 0)).collect();
        for backup in self.places.iter().filter_map(|place| place.backup) {
            counts.entry(backup).and_modify(|count| *count += 1);
        }
        // What has failed last comes last, so that it holds up nothing else.
        let (first, failed) = self.backups.failed.map_or((0, None), |(p, server)| (p + 1, Some(server)));
        let all = self.places.len() as u32;
        let lacking = (0..all).map(|p| (p + first) % all).find_map(|partition| {
            let place = &self.places[partition as usize];
            let others =
                counts.iter().filter(|(server, _)| **server != place.server && place.backup.is_none());
            let (to, _) =
                others.min_by_key(|(server, count)| (Some(**server) == failed, **count, **server))?;
            Some((partition, place.server, *to))
        });
        let Some((partition, from, to)) = lacking else { return false };
        self.begin_errand(now, Errand::BackUp, Transfer { from, to, partitions: vec![partition] }, effects);
        true
    }

    /// A server has a backup that lacks nothing, or could not make one.
    pub(super) fn backed_up(
        &mut self,
        now: Duration,
        server: u32,
        copied: &CopiedRequest,
        backup: &Assignment,
        effects: &mut Vec<Effect>,
    ) -> copied_reply::What {
        let forget = copied_reply::What::Forget(true);
        let Some(place) = self.places.get_mut(backup.partition as usize) else { return forget };
        let (same_life, has) = (place.incarnation == backup.incarnation, place.backup == Some(server));
        if same_life && has && copied.error.is_empty() {
            return copied_reply::What::Take(true); // It asks again.
        }
        let known = |m: &&Moving| m.is_backup(copied.command, server);
        if self.moving.as_ref().filter(known).is_none() {
            return forget;
        }
        if !copied.error.is_empty() || !same_life {
            self.backups.failed = Some((backup.partition, server));
            let why = if same_life { &copied.error } else { "it has begun another life" };
            self.give_up_move(now, why, effects);
            return forget;
        }
        (self.moving, self.backups.failed) = (None, None);
        place.backup = Some(server);
        effects.push(Effect::Record(Entry::Backed { partition: backup.partition, server }));
        if self.places.iter().all(|place| place.backup.is_some()) {
            effects.push(Effect::Emit("backed_up", fields([("partitions", json!(self.places.len()))])));
        } else if self.phase == Phase::Training {
            self.balance(now, effects);
        }
        copied_reply::What::Take(true)
    }

    /// A server has lost a backup, and asks whether its partition may go on alone.
    pub(super) fn alone(
        &mut self,
        now: Duration,
        ticket: Ticket,
        caller: Caller,
        asked: &AloneRequest,
        effects: &mut Vec<Effect>,
    ) {
        if !self.fleet.knows(caller.role(), caller.id, caller.pid) {
            return effects.push(refused(ticket));
        }
        let place = self.places.get(asked.partition as usize);
        let theirs = place.is_some_and(|p| p.server == caller.id && p.incarnation == asked.incarnation);
        if theirs {
            let (partition, backup) = (asked.partition, asked.backup);
            // One that is being made must not be taken for a good one when it comes.
            if self.moving.take_if(|m| m.backs_up(partition, backup)).is_some() {
                self.backups.failed = Some((partition, backup));
                self.rest_after(now);
            }
            self.drop_backups(|p, server| (p, server) == (partition, backup), effects);
        }
        effects.push(Effect::Answer(ticket, Answer::Alone(AloneReply { alone: theirs })));
    }

    /// A server has nothing of what it had a backup of.
    pub(super) fn backups_gone(&mut self, server: u32, effects: &mut Vec<Effect>) {
        self.drop_backups(|_, at| at == server, effects);
    }

    /// Backups are none any more: which, by their partition and their server.
    fn drop_backups(&mut self, which: impl Fn(u32, u32) -> bool, effects: &mut Vec<Effect>) {
        let mut gone = Vec::new();
        for (partition, place) in (0..).zip(&mut self.places) {
            if place.backup.take_if(|server| which(partition, *server)).is_some() {
                gone.push(partition);
            }
        }
        if !gone.is_empty() {
            effects.push(Effect::Record(Entry::Alone { partitions: gone }));
        }
    }

    /// A server is gone: backups take the place of its partitions, as far as there are any.
    pub(super) fn promote(&mut self, now: Duration, server: u32, effects: &mut Vec<Effect>) {
        let ready = self.servers_ready();
        let mut by_backup: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (partition, place) in (0..).zip(&self.places) {
            if let Some(backup) =
                place.backup.filter(|backup| place.server == server && ready.contains(backup))
            {
                by_backup.entry(backup).or_default().push(partition);
            }
        }
        for (backup, partitions) in by_backup {
            // One at a time for each server; what comes on top of it waits for its own turn at the checkpoint.
            if self.backups.promotions.contains_key(&backup) {
                continue;
            }
            let mut next = Vec::new();
            for partition in &partitions {
                let place = &mut self.places[*partition as usize];
                (place.server, place.address, place.backup) = (backup, None, None);
                place.incarnation += 1;
                next.push((*partition, place.incarnation));
            }
            effects.push(Effect::Record(Entry::Moved { partitions: next, server: backup }));
            let command = self.next_command();
            let promotion = Promotion { command, from: server, partitions, since: now, told: false };
            self.backups.promotions.insert(backup, promotion);
            // No file of these lives comes.
            self.checkpoints.abandon();
            self.checkpoint_told.clear();
            self.loads.forget(now);
        }
        self.answer_beats(now, effects);
    }

    /// What a server is to do about its backups.
    pub(super) fn backup_order(&mut self, server: u32, again: bool) -> Option<BeatReply> {
        let floor = self.floor.map(|floor| LeaseNumber { term: floor.term, n: floor.n });
        if let Some(promotion) = self.backups.promotions.get_mut(&server) {
            if std::mem::replace(&mut promotion.told, true) && !again {
                return None;
            }
            let lives = promotion.partitions.iter().map(|p| self.places[*p as usize].incarnation);
            let partitions = promotion.partitions.iter().zip(lives.clone());
            let order = Promote {
                partitions: partitions
                    .map(|(&partition, incarnation)| Assignment {
                        partition,
                        incarnation,
                        floor,
                        ..Assignment::default()
                    })
                    .collect(),
                incarnations: lives.map(|incarnation| incarnation - 1).collect(),
            };
            return Some(BeatReply {
                command: promotion.command,
                what: Some(beat_reply::What::Promote(order)),
            });
        }
        let stale = self.backups.stale.remove(&server)?;
        let what = Some(beat_reply::What::Forget(Forget { partitions: stale }));
        Some(BeatReply { command: 0, what })
    }

    /// A server tells what it has backups of: those that nobody knows of are of no use, and one that it was told to make
    /// and does not is not waited for.
    pub(super) fn look_at_backups(
        &mut self,
        now: Duration,
        server: u32,
        gauges: &Value,
        effects: &mut Vec<Effect>,
    ) {
        let Some(backs) = gauges["backs"].as_object() else { return };
        let makes = |partition: u32| backs.contains_key(&partition.to_string());
        if let Some(partition) = self.moving.as_ref().and_then(|m| m.overdue_backup(now, server))
            && !makes(partition)
        {
            self.backups.failed = Some((partition, server));
            self.give_up_move(now, "the server does not make it", effects);
        }
        let told =
            backs.iter().filter_map(|(partition, life)| Some((partition.parse().ok()?, life.as_u64()?)));
        let is_promoted = self.backups.promotions.contains_key(&server);
        let stale = told.filter(|(partition, life)| {
            let place = self.places.get(*partition as usize);
            let known = place.is_some_and(|p| p.backup == Some(server) && p.incarnation == *life);
            let comes = self.moving.as_ref().is_some_and(|m| m.backs_up(*partition, server));
            !known && !comes && !is_promoted
        });
        let assignment =
            |(partition, incarnation)| Assignment { partition, incarnation, ..Assignment::default() };
        let stale: Vec<Assignment> = stale.map(assignment).collect();
        if stale.is_empty() {
            self.backups.stale.remove(&server);
        } else {
            self.backups.stale.insert(server, stale);
        }
    }

    /// Do backups serve that were to take the place of partitions?
    pub(super) fn settle_promotions(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let places = &self.places;
        let serves = |p: &Promotion| p.partitions.iter().all(|p| places[*p as usize].address.is_some());
        let settled: Vec<(u32, Promotion)> =
            self.backups.promotions.extract_if(.., |_, p| serves(p)).collect();
        for (to, Promotion { from, partitions, since, .. }) in settled {
            let facts = fields([
                ("from", json!(from)),
                ("to", json!(to)),
                ("partitions", json!(partitions)),
                ("away_seconds", json!(now.saturating_sub(since).as_secs_f64())),
            ]);
            effects.push(Effect::Record(Entry::Arrived { partitions }));
            effects.push(Effect::Emit("promoted", facts));
        }
    }

    /// Backups that do not get to serve are not waited for for ever.
    pub(super) fn watch_promotions(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let late = self.backups.promotions.iter().filter(|(_, p)| now.saturating_sub(p.since) > HANDING_MAX);
        for server in late.map(|(server, _)| *server).collect::<Vec<_>>() {
            let lost = self.promotion_struck(server, "it does not get to serve them", effects);
            self.reborn(now, &BTreeSet::new(), &lost, effects);
        }
    }

    /// A server that was to serve its backups does not have them. Returns what is lost.
    #[must_use]
    pub(super) fn promotion_struck(
        &mut self,
        server: u32,
        why: &str,
        effects: &mut Vec<Effect>,
    ) -> BTreeSet<u32> {
        let Some(promotion) = self.backups.promotions.remove(&server) else { return BTreeSet::new() };
        let message =
            format!("ps-{server} was to serve its backups of ps-{}'s partitions: {why}", promotion.from);
        effects.push(Effect::Emit("warning", fields([("message", json!(message))])));
        self.have_join_again(server, effects);
        promotion.partitions.into_iter().collect()
    }

    /// A server cannot do what it was told to do about its backups.
    pub(super) fn promotion_failed(
        &mut self,
        now: Duration,
        server: u32,
        copied: &CopiedRequest,
        effects: &mut Vec<Effect>,
    ) {
        if self.backups.promotions.get(&server).is_some_and(|promotion| promotion.command == copied.command) {
            let lost = self.promotion_struck(server, &copied.error, effects);
            self.reborn(now, &BTreeSet::new(), &lost, effects);
        }
    }
}
