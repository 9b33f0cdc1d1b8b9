//! What a gang's master remembers, so that the next one goes on. Pure.

use std::fmt;

use elasticdl_wire::control;
use serde::{Deserialize, Serialize};

use super::{Gang, Member, Stage};
use crate::config::Process;
use crate::status::Phase;

/// Everything that the next master must know.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Book {
    /// The newest master.
    pub term: u64,
    /// How often all members have begun together.
    pub rounds: u32,
    /// Whether a round is under way.
    pub running: bool,
    /// How often all were started again because one ended.
    pub restarts: u32,
    /// The members, by rank.
    pub members: Vec<Note>,
    /// How the job is about to end: everybody leaves.
    pub ending: Option<Phase>,
    /// How the job ended.
    pub finished: Option<Phase>,
    /// Why it failed.
    pub error: Option<String>,
}

/// What is remembered of a member.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Note {
    /// Its process, while it is there.
    pub process: Option<Process>,
    /// Where the others believe it to be.
    pub place: Option<String>,
    /// The start it is to make, or has made.
    pub start: Option<Start>,
    /// How that ended.
    pub ended: Option<End>,
    /// Whether it alone is to be started again.
    pub due: bool,
    /// How often its program was started.
    pub starts: u32,
    /// How often it alone was started again because it ended.
    pub restarts: u32,
}

/// Which start of a program. Later ones are greater, over masters too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Start {
    /// The master that began the round.
    pub term: u64,
    /// Which of its rounds.
    pub round: u32,
    /// Which start of this member in the round, from 0.
    pub attempt: u32,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Its exit code; `None` where a signal ended it, or nobody knows.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// What it wrote last.
    pub last_lines: Vec<String>,
    /// It could not be started at all.
    pub stillborn: bool,
}

impl End {
    /// One of which nothing is known.
    pub fn unknown() -> Self {
        End { code: None, signal: None, last_lines: Vec::new(), stillborn: false }
    }

    /// Whether it ended as it should.
    pub fn is_good(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exit code {code}"),
            (None, Some(signal)) => write!(f, "signal {signal}"),
            (None, None) => f.write_str("unknown cause"),
        }
    }
}

impl Book {
    /// The job had ended and is to run once more, with all its restarts before it.
    pub(super) fn begin_again(&mut self) {
        self.ending = None;
        self.finished = None;
        self.error = None;
        self.running = false;
        self.restarts = 0;
        for note in &mut self.members {
            *note = Note { starts: note.starts, process: note.process, ..Note::default() };
        }
    }
}

impl Note {
    /// The member as the next master knows it at first. A program that was started runs, until it is told that
    /// it does not.
    pub(super) fn member(&self) -> Member {
        Member {
            process: self.process,
            place: self.place.clone(),
            start: self.start,
            made: self.start.filter(|_| self.process.is_some()),
            runs: self.process.is_some() && self.start.is_some() && self.ended.is_none(),
            ended: self.ended.clone(),
            due: self.due,
            starts: self.starts,
            restarts: self.restarts,
            ..Member::default()
        }
    }

    fn of(member: &Member) -> Self {
        Note {
            process: member.process,
            place: member.place.clone(),
            start: member.start,
            // What it wrote last is in its log; this must stay small.
            ended: member.ended.clone().map(|end| End { last_lines: Vec::new(), ..end }),
            due: member.due,
            starts: member.starts,
            restarts: member.restarts,
        }
    }
}

impl Gang {
    /// What the next master must know.
    pub fn book(&self) -> Book {
        Book {
            term: self.term,
            rounds: self.rounds,
            running: self.stage == Stage::Running,
            restarts: self.restarts,
            members: self.members.iter().map(Note::of).collect(),
            ending: match self.stage {
                Stage::Ending { phase, .. } => Some(phase),
                _ => None,
            },
            finished: match self.stage {
                Stage::Over(phase) => Some(phase),
                _ => None,
            },
            error: self.error.clone(),
        }
    }
}

impl From<Start> for control::Start {
    fn from(start: Start) -> Self {
        control::Start { term: start.term, round: start.round, attempt: start.attempt }
    }
}

impl From<control::Start> for Start {
    fn from(start: control::Start) -> Self {
        Start { term: start.term, round: start.round, attempt: start.attempt }
    }
}

impl From<control::ProgramEnd> for End {
    fn from(end: control::ProgramEnd) -> Self {
        End { code: end.code, signal: end.signal, last_lines: end.last_lines, stillborn: end.stillborn }
    }
}
