//! The gate of jobs that bound staleness or make steps of several batches: it is asked before a batch is pulled, and
//! told when it has landed.
//!
//! The gate may be another one than the one that gave a permit, because its server died. Permits of the old one
//! mean nothing to the new one, and nobody minds: what is too stale the partitions refuse.

use elasticdl_wire::failpoint;
use elasticdl_wire::gate::{self, Batch, Decision};
use elasticdl_wire::ps::{self, Status, kind};

use super::links::{Ask, Asked, GATE, Whom};
use super::{Asking, PsClient, away};
use crate::error::{Error, Result};
use crate::stop::Level;
use crate::store::{Gated, Generation, Permit, Push, Pushed};

/// What is asked of the gate, and until when.
pub(super) struct Question {
    pub attempt: &'static str,
    pub ask: gate::Ask,
    pub until: Level,
    pub within: Option<Generation>,
    /// Up to which version all is known to be committed.
    pub committed: u64,
}

impl PsClient {
    /// Gives a permit back.
    pub(super) fn give_permit_back(&mut self, permit: Permit, became: Option<Pushed>) -> Result<()> {
        let ask = match became {
            Some(Pushed::Applied) => gate::Ask::Landed(permit.number),
            Some(Pushed::Redo | Pushed::Lost) | None => gate::Ask::Dropped(permit.number),
        };
        let attempt = "giving a permit back";
        self.ask_gate(Question { attempt, ask, until: Level::Stopped, within: None, committed: 0 })
            .map(|_| ())
    }

    /// Stages a batch on every partition and tells the gate.
    pub(super) fn stage_for_step(&mut self, push: &Push<'_>, permit: Permit) -> Result<Pushed> {
        let (codec, header) = (std::sync::Arc::clone(&self.codec), push.header);
        let within = push.generation;
        let asking = Asking { attempt: "staging", answer: kind::PUSHED, until: Level::Stopped, within };
        let fill = &mut |frame: &mut _, request, parts: &[_]| {
            ps::begin_stage(frame, request, header, parts.len());
            codec.put_gradients(frame, parts, push);
        };
        let Some(answers) = self.answers(asking, fill)? else { return Ok(Pushed::Redo) };
        if answers.iter().any(|answer| answer.status == Status::Fenced) {
            return Ok(Pushed::Lost);
        }
        // A batch that somebody has applied already is in no step that is still to come.
        if answers.iter().any(|answer| answer.status != Status::Ok) {
            return Ok(Pushed::Redo);
        }
        if failpoint::reached("worker.staged") {
            return Ok(Pushed::Redo);
        }
        let batch = Batch { task: header.task, batch: header.batch, lease: header.lease };
        let ask = gate::Ask::Staged(permit.number, batch);
        let attempt = "telling the gate of a staged batch";
        let question =
            Question { attempt, ask, until: Level::Stopped, within: Some(within), committed: u64::MAX };
        Ok(match self.ask_gate(question)? {
            Gated::Said(said) if said.status == Status::Ok => Pushed::Applied,
            Gated::Said(_) | Gated::OtherGeneration => Pushed::Redo,
        })
    }

    /// Has every partition apply a step.
    pub(super) fn apply_step(&mut self, step: &Decision, within: Generation, until: Level) -> Result<Pushed> {
        let asking = Asking { attempt: "committing a step", answer: kind::PUSHED, until, within };
        let fill = &mut |frame: &mut _, request, parts: &[_]| gate::step(frame, request, step, parts);
        let Some(answers) = self.answers(asking, fill)? else { return Ok(Pushed::Redo) };
        let wrong = answers.iter().find(|a| !matches!(a.status, Status::Ok | Status::Duplicate));
        match (wrong, step.batches.first()) {
            (Some(answer), Some(batch)) => {
                let (task, batch, partition) = (batch.task, batch.batch, answer.partition);
                Err(Error::HalfCommitted { task, batch, partition })
            }
            _ => Ok(Pushed::Applied),
        }
    }

    pub(super) fn ask_gate(&mut self, question: Question) -> Result<Gated> {
        let Question { attempt, ask, until, within, committed } = question;
        let mut heard = None;
        let asked = self.links.ask(Ask {
            whom: Whom::Gate,
            attempt,
            answer: kind::GATED,
            until,
            within,
            fill: &mut |frame, request, parts| gate::ask(frame, request, parts[0].1, ask, committed),
            take: &mut |payload, pending| {
                let said = gate::take_said(payload)?;
                pending.check(GATE)?;
                if !away(said.status) {
                    pending.answered(GATE);
                    heard = Some(said);
                }
                Ok(())
            },
        })?;
        Ok(match asked {
            Asked::OtherGeneration => Gated::OtherGeneration,
            Asked::Answered => Gated::Said(heard.expect("whoever was asked has answered")),
        })
    }
}
