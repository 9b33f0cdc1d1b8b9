//! `jobs`, `status`, `top`, `scale`, `stop`: jobs that are there already.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock and waits for a job to end")]

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use comfy_table::{Table, presets};
use elasticdl_master::status::{ScaleRequest, Status, StopRequest, Wanted};
use serde_json::{Value, json};

use crate::args;
use crate::client::Client;
use crate::fault::{self, Exit, Fault};
use crate::home::{Home, JobDir};
use crate::lock::Holder;
use crate::view::{Block, Rates, View, phase_text, summary};
use crate::{follow, print};

/// A job in a list.
struct Row {
    name: String,
    phase: String,
    records: Option<u64>,
    auc: Option<f64>,
    age: f64,
    pid: Option<u32>,
}

/// `jobs`.
pub fn jobs(args: &args::Jobs) -> anyhow::Result<Exit> {
    let home = Home::find()?;
    let rows: Vec<Row> = home.names()?.iter().map(|name| row(&home.job(name), name)).collect();
    if args.json {
        let list: Vec<Value> = rows.iter().map(as_json).collect();
        print::line(&serde_json::to_string_pretty(&list).context("writing JSON")?)?;
        return Ok(Exit::Done);
    }
    if rows.is_empty() {
        print::note("no jobs yet; `elasticdl train examples/deepfm.yaml` starts one");
        return Ok(Exit::Done);
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["NAME", "PHASE", "RECORDS", "AUC", "AGE", "MASTER"]);
    let dash = || "-".to_string();
    for row in rows {
        table.add_row([
            row.name,
            row.phase,
            row.records.map_or_else(dash, print::count),
            row.auc.map_or_else(dash, |auc| format!("{auc:.4}")),
            print::seconds(row.age),
            row.pid.map_or_else(dash, |pid| pid.to_string()),
        ]);
    }
    print::line(&table.trim_fmt())?;
    Ok(Exit::Done)
}

fn row(dir: &JobDir, name: &str) -> Row {
    let created = dir.record().map_or(0, |record| record.created);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let age = now.saturating_sub(created) as f64;
    let mut row = Row { name: name.into(), phase: "lost".into(), records: None, auc: None, age, pid: None };
    if let Some(holder) = dir.holder() {
        row.pid = holder.map(|h| h.pid);
        row.phase = "starting".into();
        if let Ok(status) = Client::of(dir).and_then(|client| client.status()) {
            row.phase = phase_text(status.phase).into();
            (row.records, row.auc) = (Some(status.records).filter(|_| status.program.is_none()), status.auc);
        }
    } else if dir.is_between_masters() {
        row.phase = "restarting".into();
    } else if let Some(finished) = dir.ending() {
        let field = |name: &str| finished.fields.get(name);
        row.phase = field("outcome").and_then(Value::as_str).unwrap_or("lost").into();
        row.records = field("records").and_then(Value::as_u64);
        row.auc = field("auc").and_then(Value::as_f64);
    }
    row
}

fn as_json(row: &Row) -> Value {
    json!({
        "name": row.name, "phase": row.phase, "records": row.records, "auc": row.auc,
        "age_seconds": row.age, "pid": row.pid,
    })
}

/// How long a master that is being started, or started again, is waited for.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Asks the master of a job, and waits out the moment in which a new one starts. `None`: the job has none.
pub fn ask<T>(dir: &JobDir, question: impl Fn(&Client) -> anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    let began = Instant::now();
    loop {
        if !dir.is_running() {
            return Ok(None);
        }
        match Client::of(dir).and_then(|client| question(&client)) {
            Ok(answer) => return Ok(Some(answer)),
            Err(error) if fault::exit(&error) != Exit::Job || began.elapsed() > PATIENCE => {
                return Err(error);
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// The job has no master.
pub fn not_running(name: &str) -> Fault {
    let hint =
        format!("`elasticdl status {name}` tells how it ended, `elasticdl resume {name}` goes on with it");
    Fault::user(format!("job {name:?} is not running")).hint(hint)
}

/// `status`.
pub fn status(args: &args::Status) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    if let Some(status) = ask(&dir, Client::status)? {
        let text = if args.json { serde_json::to_string_pretty(&status)? } else { drawn(&status) };
        print::line(&text)?;
        return Ok(Exit::Done);
    }
    let finished = dir.ending();
    let text = match (&finished, args.json) {
        (Some(event), false) => summary(&args.job, event),
        (None, false) => format!("{}  lost: its master died and told nobody", args.job),
        (event, true) => {
            let outcome = event.as_ref().and_then(|e| e.fields.get("outcome")).and_then(Value::as_str);
            let over = json!({ "job": args.job, "phase": outcome.unwrap_or("lost"), "finished": event });
            serde_json::to_string_pretty(&over)?
        }
    };
    print::line(&text)?;
    if finished.is_none() {
        print::note(&format!("hint: `elasticdl resume {}` goes on with it", args.job));
    }
    Ok(Exit::Done)
}

fn drawn(status: &Status) -> String {
    // Nothing is cut off: a terminal wraps lines that are too long, and a program wants all of them.
    let block = Block { width: usize::MAX, height: usize::MAX / 2, colour: false };
    block.lines(status, &Rates::default()).join("\n")
}

/// `top`.
pub async fn top(args: &args::Top) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    ask(&dir, Client::status)?.ok_or_else(|| not_running(&args.job))?;
    let client = Client::of(&dir)?;
    follow::watch(dir, client, View::fitting(false)).await
}

/// `scale`.
pub fn scale(args: &args::Scale) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    let scaled = ask(&dir, |client| {
        let before = client.status()?;
        client.scale(ScaleRequest { workers: args.workers, servers: args.servers })?;
        Ok(before)
    })?;
    let before = scaled.ok_or_else(|| not_running(&args.job))?;
    let workers = args.workers.map(|wanted| match wanted {
        Wanted::Fixed(workers) => format!("{workers} workers wanted, {} before", before.workers_wanted),
        Wanted::Auto => "as many workers wanted as are of use; `elasticdl top` shows how many that is".into(),
    });
    let servers = args.servers.map(|servers| {
        let wanted = print::counted(servers.into(), "server");
        format!("{wanted} wanted, {} before; `elasticdl top` shows partitions move", before.servers_wanted)
    });
    for wanted in workers.into_iter().chain(servers) {
        print::note(&format!("{}: {wanted}", args.job));
    }
    Ok(Exit::Done)
}

/// `stop`: asks, and waits until it is over.
pub fn stop(args: &args::Stop) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    loop {
        let asked = ask(&dir, |client| {
            let leader = dir.holder();
            client.stop(StopRequest { now: args.now })?;
            Ok(leader)
        });
        let asked = asked.map_err(|e| {
            let pid = dir.master().map_or("its process".into(), |at| format!("process {}", at.pid));
            e.context(format!("stopping {:?}; as a last resort, end {pid} with kill", args.job))
        })?;
        wait_for_end(&dir, asked.ok_or_else(|| not_running(&args.job))?, args.now);
        // One that died instead is started again by its client, and knows nothing of the wish.
        if !dir.is_between_masters() {
            break;
        }
    }
    let outcome = dir.ending().and_then(|e| Some(e.fields.get("outcome")?.as_str()?.to_string()));
    let outcome = outcome.unwrap_or_else(|| "gone".into());
    print::note(&format!("{}: {outcome}", args.job));
    if outcome == "stopped" {
        let program = dir.record().is_ok_and(|record| record.job.command.is_some());
        let how = if program { "runs it again" } else { "goes on from where it stopped" };
        print::note(&format!("hint: `elasticdl resume {}` {how}", args.job));
    }
    Ok(Exit::Done)
}

/// Waits until somebody else leads the job, or nobody.
fn wait_for_end(dir: &JobDir, leader: Option<Option<Holder>>, now: bool) {
    let began = Instant::now();
    let mut told = false;
    let program = dir.record().is_ok_and(|record| record.job.command.is_some());
    // Somebody else may lead it a moment later: a resume that waited for just this.
    while leader.is_some() && dir.holder() == leader {
        if !told && began.elapsed() > Duration::from_secs(1) && !now {
            print::note(if program {
                "waiting for the program to end …"
            } else {
                "waiting for the checkpoint …"
            });
            told = true;
        }
        thread::sleep(PAUSE);
    }
}
