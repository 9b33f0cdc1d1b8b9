//! A gang as people and programs see it.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Gang, Member, Stage, fields};
use crate::status::{LedgerStatus, Phase, Process, ProgramStatus, Status, TaskCounts};

/// The whole status. What only training has stays empty.
pub fn status(gang: &Gang, now: Duration) -> Status {
    Status {
        servers_wanted: 0,
        moving: None,
        backups: None,
        job: gang.job.clone(),
        phase: gang.phase(),
        error: gang.error.clone(),
        seconds: now.as_secs_f64(),
        epoch: 0,
        epochs: 0,
        records: 0,
        records_total: None,
        records_per_second: 0.0,
        eta_seconds: None,
        loss: None,
        logloss: None,
        auc: None,
        bad_records: 0,
        tasks: TaskCounts::default(),
        workers_wanted: gang.members.len() as u32,
        workers_useful: gang.members.len() as u32,
        workers_allowed: None,
        workers_why: None,
        workers: (0..).zip(&gang.members).map(|(rank, member)| process(gang, rank, member)).collect(),
        servers: Vec::new(),
        checkpoint: None,
        term: gang.term,
        replayed: 0,
        quarantined: Vec::new(),
        ledger: LedgerStatus::default(),
        program: Some(ProgramStatus {
            rounds: gang.rounds,
            restarts: restarts(gang),
            restarts_max: gang.command.restart.max,
            tries: gang.tries,
            waits: waits(gang),
        }),
    }
}

/// Fields of the `finished` event.
pub fn finished(gang: &Gang, phase: Phase) -> Map<String, Value> {
    fields([
        ("job", json!(gang.job)),
        ("outcome", json!(phase)),
        ("error", json!(gang.error)),
        ("members", json!(gang.members.len())),
        ("rounds", json!(gang.rounds)),
        ("restarts", json!(restarts(gang))),
    ])
}

/// How often something was started again because it ended.
fn restarts(gang: &Gang) -> u32 {
    gang.restarts + gang.members.iter().map(|member| member.restarts).sum::<u32>()
}

/// Why the program does not run.
fn waits(gang: &Gang) -> Option<String> {
    let missing = gang.members.iter().filter(|member| !member.is_there()).count();
    let size = gang.members.len();
    let waits = || gang.members.iter().find_map(|member| member.waits.as_ref());
    match gang.stage {
        Stage::Gathering { .. } if missing > 0 => Some(match waits() {
            Some((why, _)) => format!("{missing} of {size} are missing: {why}"),
            None => format!("{missing} of {size} are missing"),
        }),
        Stage::Gathering { .. } => Some("the next round begins when all programs have ended".into()),
        Stage::Resting { .. } => {
            let why = gang.no_room.as_deref().unwrap_or("no room");
            Some(format!("there is no room for all {size}, and none is held until the next try: {why}"))
        }
        Stage::Running | Stage::Ending { .. } | Stage::Over(_) => None,
    }
}

fn process(gang: &Gang, rank: u32, member: &Member) -> Process {
    let state = match gang.stage {
        _ if member.leaving => "draining",
        _ if member.waits.is_some() => "pending",
        Stage::Running if member.ended_well() => "ended",
        _ if member.process.is_none() => "waiting",
        _ if member.runs => "running",
        _ if member.address.is_none() => "starting",
        _ => "ready",
    };
    Process {
        id: rank,
        name: Some(gang.name(rank)),
        state: state.into(),
        waits: member.waits.as_ref().map(|(why, _)| why.clone()),
        pid: member.process.map(|process| process.pid),
        restarts: member.starts.saturating_sub(1),
        task: None,
        records: 0,
        gauges: Value::Null,
    }
}
