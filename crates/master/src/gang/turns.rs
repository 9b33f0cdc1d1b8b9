//! Members call: what they say is taken in, and what they are to do is told.

use std::time::Duration;

use serde_json::json;

use super::{Effect, Event, Gang, Member, Program, Stage, Ticket, Turn, Wanted, fields, variables};
use crate::config::{Placed, Process, Waits};

/// How long a call is held when there is nothing to do.
const HELD: Duration = Duration::from_secs(1);

impl Gang {
    pub(super) fn turn(&mut self, now: Duration, ticket: Ticket, turn: Turn, effects: &mut Vec<Effect>) {
        let rank = turn.rank;
        let known = self.members.get_mut(rank as usize);
        let ours = |member: &&mut Member| member.process.is_some_and(|process| process.pid == turn.pid);
        let ours = known.filter(|member| ours(member) && !member.silenced);
        let Some(member) = ours else { return effects.push(Effect::Answer(ticket, Wanted::Leave)) };
        // One that the master before had started is no newcomer.
        let joined = member.address.is_none() && member.made.is_none();
        member.heard = now;
        member.waits = None;
        member.address = Some(turn.address);
        member.made = turn.start;
        member.runs = turn.start.is_some() && turn.end.is_none();
        let before = member.turn.replace((ticket, now));
        let told = turn.start.is_some() && turn.start == member.start && member.ended.is_none();
        // Whoever waited for the answer to an earlier call of this member has gone.
        if let Some((before, _)) = before {
            effects.push(Effect::Answer(before, self.wanted(rank)));
        }
        if joined {
            let facts = fields([
                ("member", json!(self.name(rank))),
                ("pid", json!(turn.pid)),
                ("address", json!(self.members[rank as usize].address)),
            ]);
            effects.push(Effect::Emit("member_joined", facts));
        }
        if let Some(end) = turn.end.filter(|_| told && self.stage == Stage::Running) {
            self.ended(now, rank, end, effects);
        }
    }

    pub(super) fn launched(
        &mut self,
        now: Duration,
        rank: u32,
        outcome: Result<Process, String>,
        effects: &mut Vec<Effect>,
    ) {
        let name = self.name(rank);
        let member = &mut self.members[rank as usize];
        member.launching = false;
        match outcome {
            Ok(process) => {
                member.process = Some(process);
                member.heard = now;
                if member.leaving {
                    effects.push(Effect::Stop(rank, process.pid));
                }
                let facts = fields([("member", json!(name)), ("pid", json!(process.pid))]);
                effects.push(Effect::Emit("member_started", facts));
                self.changed = true;
            }
            Err(error) => self.fail(now, format!("cannot start {name}: {error}"), effects),
        }
    }

    /// A member waits for room, or for something that will not come by itself.
    pub(super) fn waits(&mut self, waits: Waits, effects: &mut Vec<Effect>) {
        let name = self.command.member(waits.id).to_string();
        let member = &mut self.members[waits.id as usize];
        let ours = member.process.is_some_and(|process| process.pid == waits.pid);
        if !ours || member.address.is_some() || member.leaving {
            return;
        }
        let wait = Some((waits.why, waits.may_pass));
        if member.waits == wait {
            return;
        }
        member.waits = wait;
        let (why, may_pass) = member.waits.as_ref().expect("just set");
        let facts = fields([("member", json!(name)), ("why", json!(why)), ("may_pass", json!(may_pass))]);
        effects.push(Effect::Emit("pending", facts));
    }

    /// A member has room by now.
    pub(super) fn placed(&mut self, placed: Placed) {
        let member = &mut self.members[placed.id as usize];
        if member.process.is_some_and(|process| process.pid == placed.pid) {
            member.waits = None;
        }
    }

    /// Answers those who are to do something else than they do, and those who have waited long enough.
    pub(super) fn answer(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        for rank in 0..self.members.len() as u32 {
            let member = &self.members[rank as usize];
            let Some((ticket, since)) = member.turn else { continue };
            let wanted = self.wanted(rank);
            let differs = match &wanted {
                Wanted::Nothing => member.runs,
                Wanted::Program(program) => member.made != Some(program.start),
                Wanted::Leave => true,
            };
            if differs || now.saturating_sub(since) >= HELD {
                let member = &mut self.members[rank as usize];
                member.turn = None;
                // It does so before it calls again, and nothing else may begin meanwhile.
                member.runs |= differs && matches!(wanted, Wanted::Program(_));
                effects.push(Effect::Answer(ticket, wanted));
            }
        }
    }

    fn wanted(&self, rank: u32) -> Wanted {
        let member = &self.members[rank as usize];
        match self.stage {
            _ if member.leaving => Wanted::Leave,
            Stage::Ending { .. } | Stage::Over(_) => Wanted::Leave,
            Stage::Resting { .. } | Stage::Gathering { .. } => Wanted::Nothing,
            Stage::Running => match member.start {
                // One that came back waits for its own start; the last one's end was told.
                Some(_) if member.due => Wanted::Nothing,
                Some(start) => Wanted::Program(Box::new(Program {
                    start,
                    run: self.command.run.clone(),
                    environment: variables::of(
                        &self.job,
                        &self.command,
                        rank,
                        &self.places(),
                        member.starts.saturating_sub(1),
                    ),
                })),
                None => Wanted::Nothing,
            },
        }
    }

    /// Where everybody is in this round.
    fn places(&self) -> Vec<&str> {
        self.members.iter().map(|member| member.place.as_deref().expect("a round has all places")).collect()
    }

    /// Ends what was not heard of for too long: it hangs, or its node is away.
    pub(super) fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let limit = self.limits.silence;
        let slept = now.saturating_sub(std::mem::replace(&mut self.ticked, now)) > limit / 2;
        if matches!(self.stage, Stage::Ending { .. } | Stage::Over(_)) {
            return; // Who ends its program says nothing meanwhile.
        }
        for rank in 0..self.members.len() as u32 {
            let name = self.name(rank);
            let member = &mut self.members[rank as usize];
            let has_called = member.address.is_some() || member.made.is_some();
            let Some(process) = member.process.filter(|_| has_called) else { continue };
            // While this master stood still nobody could be heard.
            if slept {
                member.heard = now;
            } else if now.saturating_sub(member.heard) > limit {
                let facts = fields([("member", json!(name)), ("pid", json!(process.pid))]);
                effects.push(Effect::Emit("silent", facts));
                effects.push(Effect::Kill(rank, process.pid));
                // Its exit comes; where it does not, it is ended again after as long.
                member.heard = now;
                member.silenced = true;
            }
        }
    }
}

impl Event {
    /// Whether it is about a member that there is; news of others is none.
    pub fn is_sound(&self, size: u32) -> bool {
        match self {
            Event::Exited(exit) => exit.id < size,
            Event::Waits(waits) => waits.id < size,
            Event::Placed(placed) => placed.id < size,
            Event::Launched(rank, _) => *rank < size,
            Event::Begin | Event::Turn(..) | Event::Stop(_) | Event::Tick => true,
        }
    }
}
