//! The job as people and programs see it.

use std::time::Duration;

use elasticdl_spec::WorkerId;
use elasticdl_wire::control::Role;
use serde_json::{Map, Value, json};

use super::{Job, fields};
use crate::fleet::{Member, State};
use crate::status::{LedgerStatus, Phase, Process, Status};

/// Rates over a shorter time than this say nothing.
const RATE_OVER_MIN: f64 = 0.5;

/// The whole status.
pub fn status(job: &Job, now: Duration) -> Status {
    let (rate, loss) = rate_and_loss(job, now);
    let left = job.tasks.records_total().map(|total| total.saturating_sub(job.tasks.records()));
    Status {
        job: job.plan.job.name.clone(),
        phase: job.phase,
        error: job.error.clone(),
        seconds: now.as_secs_f64(),
        epoch: job.tasks.epoch(),
        epochs: job.plan.job.train.epochs,
        records: job.tasks.records(),
        records_total: job.tasks.records_total(),
        records_per_second: rate,
        eta_seconds: left.filter(|_| rate > 0.0).map(|left| left as f64 / rate),
        loss,
        logloss: job.last_scores.map(|(logloss, _)| logloss),
        auc: job.last_scores.and_then(|(_, auc)| auc),
        bad_records: job.tasks.bad_records(),
        tasks: job.tasks.counts(),
        workers_wanted: job.fleet.workers_wanted(),
        workers_useful: job.workers_useful(),
        workers_allowed: job.fleet.workers_allowed(),
        workers_why: job.useful.as_ref().map(|useful| useful.target().reason.to_string()),
        workers: processes(job, Role::Worker),
        servers: processes(job, Role::Server),
        servers_wanted: job.servers_wanted,
        moving: job.moving_status(now),
        backups: job.backups_status(),
        checkpoint: job.committed.as_ref().map(|m| m.id),
        term: job.term,
        replayed: job.replayed,
        quarantined: job.quarantined.clone(),
        ledger: LedgerStatus::default(),
        program: None,
    }
}

/// Fields of the `progress` event.
pub fn progress(job: &Job, now: Duration) -> Map<String, Value> {
    let s = status(job, now);
    fields([
        ("phase", json!(s.phase)),
        ("epoch", json!(s.epoch)),
        ("records", json!(s.records)),
        ("records_total", json!(s.records_total)),
        ("records_per_second", json!(s.records_per_second.round())),
        ("eta_seconds", json!(s.eta_seconds.map(f64::round))),
        ("loss", json!(s.loss)),
        ("logloss", json!(s.logloss)),
        ("auc", json!(s.auc)),
        ("workers", json!(s.workers.iter().filter(|w| w.state == "working").count())),
    ])
}

/// Fields of the last event.
pub fn finished(job: &Job, now: Duration) -> Map<String, Value> {
    let outcome = match job.phase {
        Phase::Done => "done",
        Phase::Failed => "failed",
        Phase::Stopped => "stopped",
        other => unreachable!("a job that finishes is over, not {other:?}"),
    };
    let (train_seconds, train_rate) = training_rate(job, now);
    let mut facts = fields([
        ("outcome", json!(outcome)),
        ("job", json!(job.plan.job.name)),
        ("logloss", json!(job.last_scores.map(|s| s.0))),
        ("auc", json!(job.last_scores.and_then(|s| s.1))),
        ("records", json!(job.tasks.records())),
        ("bad_records", json!(job.tasks.bad_records())),
        ("replayed", json!(job.replayed)),
        ("records_per_second", json!(train_rate)),
        ("train_seconds", json!(train_seconds)),
        ("epochs", json!(job.plan.job.train.epochs)),
        ("checkpoint", json!(job.committed.as_ref().map(|m| m.id))),
        ("output", json!(job.plan.job.output)),
    ]);
    if let Some(best) = job.best {
        facts.insert("best_logloss".into(), json!(best.logloss));
        facts.insert("best_auc".into(), json!(best.auc));
    }
    if let Some(error) = &job.error {
        facts.insert("error".into(), json!(error));
    }
    facts
}

/// Seconds of training in this run, and records a second over them.
fn training_rate(job: &Job, now: Duration) -> (f64, f64) {
    let Some((began, ended, before)) = job.training else { return (0.0, 0.0) };
    let seconds = ended.unwrap_or(now).saturating_sub(began).as_secs_f64();
    let records = job.tasks.records().saturating_sub(before) as f64;
    (seconds, if seconds > 0.0 { records / seconds } else { 0.0 })
}

/// Records a second and mean loss over the last seconds.
fn rate_and_loss(job: &Job, now: Duration) -> (f64, Option<f64>) {
    let records: u64 = job.window.iter().map(|(_, records, _)| records).sum();
    let loss: f64 = job.window.iter().map(|(_, _, loss)| loss).sum();
    let Some((first, _, _)) = job.window.front() else { return (0.0, None) };
    let since = job
        .training
        .map_or(*first, |(began, _, _)| began.max(first.saturating_sub(Duration::from_millis(200))));
    let seconds = now.saturating_sub(since).as_secs_f64().max(RATE_OVER_MIN);
    (records as f64 / seconds, (records > 0).then(|| loss / records as f64))
}

fn processes(job: &Job, role: Role) -> Vec<Process> {
    let members = match role {
        Role::Worker => job.fleet.workers(),
        Role::Server => job.fleet.servers(),
    };
    members.iter().map(|(id, member)| process(job, role, *id, member)).collect()
}

fn process(job: &Job, role: Role, id: u32, member: &Member) -> Process {
    let known = job.known.get(&(role as i32, id));
    let task = job.tasks.held_by(WorkerId(id)).next().filter(|_| role == Role::Worker);
    let serving = || job.places.iter().any(|p| p.server == id && p.address.is_some());
    let state = match (member.state, role) {
        (State::Waiting, _) => "waiting",
        (State::Starting, _) if known.is_some_and(|k| k.waits.is_some()) => "pending",
        (State::Starting, _) => "starting",
        (State::Draining, _) => "draining",
        (State::Joined, Role::Server) if serving() => "serving",
        (State::Joined, Role::Server) if known.is_some_and(|k| k.serves) => "idle",
        (State::Joined, Role::Server) => "restoring",
        (State::Joined, Role::Worker) if task.is_some() => "working",
        (State::Joined, Role::Worker) => "idle",
    };
    Process {
        id,
        name: None,
        state: state.into(),
        pid: member.pid,
        restarts: member.restarts,
        task: task.map(|t| t.to_string()),
        waits: known.and_then(|k| k.waits.clone()),
        records: known.map_or(0, |k| k.records),
        gauges: known.map_or(Value::Null, |k| k.gauges.clone()),
    }
}
