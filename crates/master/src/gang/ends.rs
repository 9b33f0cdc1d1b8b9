//! What ends: a program, a member, the job. What is started again, and what that costs.

use std::time::Duration;

use elasticdl_spec::command::Policy;
use serde_json::json;

use super::{Effect, End, Gang, Stage, fields, view};
use crate::config::Exit;
use crate::status::{Phase, StopRequest};

/// The pause before the second start in a row, doubled from there, and the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_LONGEST: Duration = Duration::from_secs(30);

/// How a member went without having been asked to.
#[derive(Debug)]
pub(super) enum Gone {
    /// By itself, or because of its program.
    Own(End),
    /// Somebody needed its place; in words.
    Outside(String),
}

impl Gang {
    /// The program of a member has ended by itself.
    pub(super) fn ended(&mut self, now: Duration, rank: u32, end: End, effects: &mut Vec<Effect>) {
        let mut facts = fields([("member", json!(self.name(rank)))]);
        facts.extend(end.code.map(|code| ("code".to_string(), json!(code))));
        facts.extend(end.signal.map(|signal| ("signal".to_string(), json!(signal))));
        if !end.is_good() && !end.last_lines.is_empty() {
            facts.insert("last_lines".into(), json!(end.last_lines));
        }
        effects.push(Effect::Emit("member_ended", facts));
        let (good, policy) = (end.is_good(), self.command.restart.policy);
        self.members[rank as usize].ended = Some(end.clone());
        self.changed = true;
        if !good {
            return self.failed(now, rank, end, effects);
        }
        let deciding = (0..).zip(&self.members).filter(|(rank, _)| self.command.decides(*rank));
        if deciding.map(|(_, member)| member).all(|member| member.ended_well()) {
            return self.finish(now, Phase::Done, effects);
        }
        if policy == Policy::Always && !self.command.decides(rank) {
            self.failed(now, rank, end, effects);
        } else if self.alone() {
            // It will not be needed again: its room is free for others.
            self.members[rank as usize].leaving = true;
        }
    }

    /// The process of a member is gone.
    pub(super) fn exited(&mut self, now: Duration, exit: Exit, effects: &mut Vec<Effect>) {
        let rank = exit.id;
        let name = self.name(rank);
        let member = &mut self.members[rank as usize];
        if member.process.is_none_or(|process| process.pid != exit.pid) {
            return;
        }
        member.process = None;
        member.address = None;
        member.waits = None;
        member.runs = false;
        member.silenced = false;
        member.made = None;
        if let Some((ticket, _)) = member.turn.take() {
            effects.push(Effect::Answer(ticket, super::Wanted::Leave));
        }
        let over = matches!(self.stage, Stage::Ending { .. } | Stage::Over(_));
        let asked = std::mem::take(&mut member.leaving) || over;
        self.changed = true;
        let mut facts = fields([("member", json!(name)), ("pid", json!(exit.pid)), ("asked", json!(asked))]);
        facts.extend(exit.code.map(|code| ("code".to_string(), json!(code))));
        facts.extend(exit.signal.map(|signal| ("signal".to_string(), json!(signal))));
        facts.extend(exit.outside.iter().filter(|_| !asked).map(|why| ("why".to_string(), json!(why))));
        effects.push(Effect::Emit("member_exited", facts));
        if !asked {
            let end =
                End { code: exit.code, signal: exit.signal, last_lines: exit.last_lines, stillborn: false };
            self.gone(now, rank, exit.outside.map_or(Gone::Own(end), Gone::Outside), effects);
        }
    }

    /// A member went without having been asked to.
    pub(super) fn gone(&mut self, now: Duration, rank: u32, gone: Gone, effects: &mut Vec<Effect>) {
        let running = self.stage == Stage::Running;
        let member = &self.members[rank as usize];
        // One whose program had ended well has done its part; one that was to be started again will be.
        if running && (member.ended_well() || member.due) {
            return;
        }
        match gone {
            Gone::Own(end) => self.failed(now, rank, end, effects),
            // Its program had not begun: its place is taken by the next one.
            Gone::Outside(_) if !running => {}
            Gone::Outside(why) if self.command.restart.policy == Policy::Never => {
                let error = format!("{} was {why}, and command.restart.policy is never", self.name(rank));
                self.fail(now, error, effects);
            }
            Gone::Outside(_) if self.alone() => self.start_again(now, rank),
            Gone::Outside(_) => self.gather(now, now),
        }
    }

    /// A member or its program ended badly: it is started again, or the job has failed.
    fn failed(&mut self, now: Duration, rank: u32, end: End, effects: &mut Vec<Effect>) {
        let restart = self.command.restart;
        let alone = self.alone() && self.stage == Stage::Running;
        let used = if alone { self.members[rank as usize].restarts } else { self.restarts };
        if end.stillborn || restart.policy == Policy::Never || used >= restart.max {
            return self.fail(now, self.last_words(rank, &end, used), effects);
        }
        let pause = pause(used + 1);
        let facts = fields([
            ("member", json!(self.name(rank))),
            ("how", json!(end.to_string())),
            ("scope", json!(if alone { "one" } else { "all" })),
            ("restart", json!(used + 1)),
            ("max", json!(restart.max)),
            ("pause_seconds", json!(pause.as_secs_f64())),
        ]);
        effects.push(Effect::Emit("restarting", facts));
        if alone {
            self.members[rank as usize].restarts += 1;
            self.start_again(now + pause, rank);
        } else {
            self.restarts += 1;
            self.members[rank as usize].not_before = now + pause;
            self.gather(now, now + pause);
        }
    }

    /// A member alone is started again, at the earliest at `not_before`.
    fn start_again(&mut self, not_before: Duration, rank: u32) {
        let member = &mut self.members[rank as usize];
        member.due = true;
        member.leaving = false;
        member.not_before = not_before;
        self.changed = true;
    }

    /// Why the job fails.
    fn last_words(&self, rank: u32, end: &End, used: u32) -> String {
        let name = self.name(rank);
        let mut text = match end.stillborn {
            true => format!("the program of {name} could not be started"),
            false => format!("{name} ended with {end}"),
        };
        if used > 0 {
            let times = if used == 1 { "once".into() } else { format!("{used} times") };
            text.push_str(&format!(" after it was started again {times} (command.restart.max)"));
        }
        if !end.last_lines.is_empty() {
            text.push_str(&format!("; its log ends with:\n  {}", end.last_lines.join("\n  ")));
        }
        text
    }

    pub(super) fn stop(&mut self, now: Duration, stop: StopRequest, effects: &mut Vec<Effect>) {
        match self.stage {
            Stage::Over(_) => {}
            Stage::Ending { phase, since, .. } if stop.now => {
                self.kill_all(effects);
                self.stage = Stage::Ending { phase, since, killed: true };
            }
            Stage::Ending { .. } => {}
            _ => {
                effects.push(Effect::Emit("stopping", fields([("members", json!(self.members.len()))])));
                self.finish(now, Phase::Stopped, effects);
                if stop.now {
                    self.kill_all(effects);
                    self.stage = Stage::Ending { phase: Phase::Stopped, since: now, killed: true };
                }
            }
        }
    }

    /// The job cannot go on.
    pub(super) fn fail(&mut self, now: Duration, error: String, effects: &mut Vec<Effect>) {
        if matches!(self.stage, Stage::Ending { .. } | Stage::Over(_)) {
            return;
        }
        self.error = Some(error);
        self.finish(now, Phase::Failed, effects);
    }

    /// The outcome is known: everybody is told to leave. Whoever has not called yet cannot be told, and is stopped.
    fn finish(&mut self, now: Duration, phase: Phase, effects: &mut Vec<Effect>) {
        assert!(phase.is_over(), "a job ends in a phase that is one");
        self.stage = Stage::Ending { phase, since: now, killed: false };
        self.changed = true;
        for (rank, member) in (0..).zip(&mut self.members) {
            member.due = false;
            let silent = member.process.filter(|_| member.address.is_none() && !member.leaving);
            effects.extend(silent.map(|process| Effect::Stop(rank, process.pid)));
            member.leaving |= silent.is_some() || member.launching;
        }
    }

    /// Nobody is left.
    pub(super) fn over(&mut self, phase: Phase, effects: &mut Vec<Effect>) {
        self.changed = true;
        effects.push(Effect::Emit("finished", view::finished(self, phase)));
        effects.push(Effect::Finish(phase));
    }
}

/// The pause before the `n`-th restart: whatever was in the way of the first may be over.
fn pause(n: u32) -> Duration {
    match n {
        0 | 1 => Duration::ZERO,
        n => PAUSE_FIRST.saturating_mul(1 << (n - 2).min(16)).min(PAUSE_LONGEST),
    }
}
