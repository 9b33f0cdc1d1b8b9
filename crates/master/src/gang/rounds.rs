//! All or nothing: how members are gathered, when a round begins, and when those that have room give it back.

use std::time::Duration;

use elasticdl_spec::command::Scope;
use elasticdl_spec::mix::{hash_text, mix2};
use serde_json::json;

use super::{Effect, Gang, Member, Stage, Start, fields};
use crate::status::Phase;

/// Where all have room and some do not come, they are waited for so much longer: images are being fetched.
const FETCH_TIMES: u32 = 10;
/// The first pause after which room is looked for again, as a part of `command.wait`; it doubles from there.
const REST_PART: u32 = 4;
/// The longest, as a multiple of it.
const REST_TIMES_MAX: u32 = 4;
/// How long the last of them may take to go after their programs had their time, before they are ended; and
/// again, before they are not waited for any more.
const FAREWELL: Duration = Duration::from_secs(3);

impl Gang {
    /// Moves on as far as possible. Called after every event.
    pub(super) fn advance(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        match self.stage {
            Stage::Resting { until } if now >= until => {
                self.gather(now, now);
                self.advance_gathering(now, effects);
            }
            Stage::Gathering { .. } => self.advance_gathering(now, effects),
            Stage::Running => self.advance_round(now, effects),
            Stage::Ending { phase, since, killed } => self.advance_end(now, phase, since, killed, effects),
            Stage::Resting { .. } | Stage::Over(_) => {}
        }
    }

    /// Everybody is to be there, and nobody's program is to run; the next round begins at `not_before` at the
    /// earliest.
    pub(super) fn gather(&mut self, now: Duration, not_before: Duration) {
        self.stage = Stage::Gathering { not_before, missing_since: now };
        self.members.iter_mut().for_each(|member| member.due = false);
        self.changed = true;
    }

    fn advance_gathering(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        for rank in 0..self.members.len() as u32 {
            self.launch_absent(now, rank, effects);
        }
        let missing = self.members.iter().filter(|member| !member.is_there()).count();
        let Stage::Gathering { not_before, missing_since } = &mut self.stage else { return };
        if missing > 0 {
            let waited = now.saturating_sub(*missing_since);
            let no_room =
                self.members.iter().find_map(|member| member.waits.clone().filter(|(_, pass)| *pass));
            let limit = if no_room.is_some() { self.command.wait } else { self.command.wait * FETCH_TIMES };
            if waited >= limit {
                self.give_back(now, missing, no_room.map(|(why, _)| why), effects);
            }
            return;
        }
        *missing_since = now;
        if now >= *not_before && self.members.iter().all(|member| !member.runs) {
            self.begin_round(effects);
        }
    }

    /// Starts the process of a member that has none.
    fn launch_absent(&mut self, now: Duration, rank: u32, effects: &mut Vec<Effect>) {
        let member = &mut self.members[rank as usize];
        if member.process.is_none() && !member.launching && now >= member.not_before {
            member.launching = true;
            member.leaving = false;
            effects.push(Effect::Launch(rank));
        }
    }

    fn begin_round(&mut self, effects: &mut Vec<Effect>) {
        self.round += 1;
        self.rounds += 1;
        self.tries = 0;
        self.no_room = None;
        let start = Start { term: self.term, round: self.round, attempt: 0 };
        for member in &mut self.members {
            member.place.clone_from(&member.address);
            member.start = Some(start);
            member.ended = None;
            member.starts += 1;
        }
        self.stage = Stage::Running;
        self.changed = true;
        self.announce(false, effects);
    }

    /// Tells that the program runs; `on`: it did so under the master before.
    fn announce(&mut self, on: bool, effects: &mut Vec<Effect>) {
        self.announced = true;
        let facts = fields([
            ("members", json!(self.members.len())),
            ("round", json!(self.rounds)),
            ("restarts", json!(self.restarts)),
            ("goes_on", json!(on)),
        ]);
        effects.push(Effect::Emit("running", facts));
    }

    /// There is no room for all: those that have some give it back, so that it is free for others.
    fn give_back(&mut self, now: Duration, missing: usize, why: Option<String>, effects: &mut Vec<Effect>) {
        self.tries += 1;
        let pause = self.rest();
        let why = why.unwrap_or_else(|| "they do not come".into());
        let facts = fields([
            ("missing", json!(missing)),
            ("members", json!(self.members.len())),
            ("why", json!(why)),
            ("tries", json!(self.tries)),
            ("pause_seconds", json!(pause.as_secs_f64())),
        ]);
        effects.push(Effect::Emit("given_back", facts));
        self.no_room = Some(why);
        for (rank, member) in (0..).zip(&mut self.members) {
            member.leaving = member.process.is_some() || member.launching;
            effects.extend(member.process.map(|process| Effect::Stop(rank, process.pid)));
        }
        self.stage = Stage::Resting { until: now + pause };
        self.changed = true;
    }

    /// How long nothing is tried. Two jobs that take each other's room must not do so in step, so that each has
    /// pauses of its own.
    fn rest(&self) -> Duration {
        let wait = self.command.wait;
        let doubled = (wait / REST_PART).saturating_mul(1 << (self.tries - 1).min(16));
        let part = mix2(hash_text(&self.job), self.tries.into()) % 512;
        doubled.min(wait * REST_TIMES_MAX).mul_f64(0.75 + part as f64 / 1024.0)
    }

    /// Within a round only single members are started again, and only where they are still found.
    fn advance_round(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let called = |member: &Member| member.address.is_some() || member.process.is_none();
        if !self.announced && self.members.iter().all(called) {
            self.announce(true, effects);
        }
        for rank in 0..self.members.len() as u32 {
            if !self.members[rank as usize].due {
                continue;
            }
            self.launch_absent(now, rank, effects);
            let member = &mut self.members[rank as usize];
            if !member.is_there() || member.runs || now < member.not_before {
                continue;
            }
            if member.address.as_deref().map(host) != member.place.as_deref().map(host) {
                // The others would look for it in the wrong place.
                return self.gather(now, now);
            }
            let start = member.start.as_mut().expect("a round has starts");
            start.attempt += 1;
            member.ended = None;
            member.due = false;
            member.starts += 1;
            self.changed = true;
        }
    }

    /// Everybody leaves; whoever does not in time is ended.
    fn advance_end(
        &mut self,
        now: Duration,
        phase: Phase,
        since: Duration,
        killed: bool,
        effects: &mut Vec<Effect>,
    ) {
        let left = self.members.iter().any(|member| member.process.is_some() || member.launching);
        let passed = now.saturating_sub(since);
        if !left || (killed && passed > self.grace + 2 * FAREWELL) {
            self.stage = Stage::Over(phase);
            return self.over(phase, effects);
        }
        if !killed && passed > self.grace + FAREWELL {
            self.kill_all(effects);
            self.stage = Stage::Ending { phase, since, killed: true };
        }
    }

    pub(super) fn kill_all(&self, effects: &mut Vec<Effect>) {
        for (rank, member) in (0..).zip(&self.members) {
            effects.extend(member.process.map(|process| Effect::Kill(rank, process.pid)));
        }
    }

    /// Whether one that ends is started again alone.
    pub(super) fn alone(&self) -> bool {
        self.command.restart.scope == Scope::One
    }
}

/// The machine of an address.
pub(super) fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}
