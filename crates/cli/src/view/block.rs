//! A job as a block of lines that fits the screen. Pure: status in, text out.

use std::collections::BTreeMap;
use std::time::Duration;

use crossterm::style::{Attribute, Color, ContentStyle, Stylize};
use elasticdl_master::status::{BackupsStatus, MovingStatus, Phase, Process, ProgramStatus, Status};
use serde_json::Value;

use crate::print;
use crate::view::staleness;

/// Records a second of each worker, from one status to the next.
#[derive(Debug, Default)]
pub struct Rates {
    seen: BTreeMap<u32, (Duration, u64)>,
    rates: BTreeMap<u32, f64>,
}

/// Below this the clock's grain would show in the rate.
const SPAN_MIN: Duration = Duration::from_millis(900);

impl Rates {
    /// Takes a status into account.
    pub fn observe(&mut self, now: Duration, status: &Status) {
        let here = |id: &u32| status.workers.iter().any(|w| w.id == *id);
        self.seen.retain(|id, _| here(id));
        self.rates.retain(|id, _| here(id));
        for worker in &status.workers {
            let (since, records) = *self.seen.entry(worker.id).or_insert((now, worker.records));
            let span = now.saturating_sub(since);
            if span >= SPAN_MIN {
                let done = worker.records.saturating_sub(records);
                self.rates.insert(worker.id, done as f64 / span.as_secs_f64());
                self.seen.insert(worker.id, (now, worker.records));
            }
        }
    }

    fn of(&self, worker: u32) -> Option<f64> {
        self.rates.get(&worker).copied()
    }
}

/// How a block is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Columns of the screen.
    pub width: usize,
    /// Lines that may be used.
    pub height: usize,
    /// Whether to use colours.
    pub colour: bool,
}

/// A piece of a line with its looks.
type Span = (ContentStyle, String);

impl Block {
    /// The lines that show `status`; none is wider than the screen.
    pub fn lines(&self, status: &Status, rates: &Rates) -> Vec<String> {
        if let Some(program) = &status.program {
            return self.program(status, program);
        }
        let mut lines = vec![head(status), self.bar(status), vec![plain(figures(status))]];
        if let Some(error) = &status.error {
            lines.push(vec![(ContentStyle::new().with(Color::Red), error.replace('\n', " "))]);
        }
        lines.extend(set_aside(status));
        let staleness = staleness::histogram(&status.servers);
        let room = self.height.saturating_sub(lines.len() + 2 + usize::from(staleness.is_some()));
        let servers_shown = status.servers.len().min(room / 3 + room % 3);
        let workers_shown = status.workers.len().min(room.saturating_sub(servers_shown));
        lines.push(vec![dim(workers_head(status, workers_shown))]);
        lines.extend(status.workers.iter().take(workers_shown).map(|w| process("worker", w, rates.of(w.id))));
        lines.push(vec![dim(servers_head(status, servers_shown))]);
        lines.extend(status.servers.iter().take(servers_shown).map(|s| process("ps", s, None)));
        lines.extend(staleness.into_iter().chain(ledger(status)).map(|text| vec![dim(text)]));
        lines.truncate(self.height.max(1));
        lines.into_iter().map(|line| self.paint(line)).collect()
    }

    /// A person's own program: its members, and no records.
    fn program(&self, status: &Status, program: &ProgramStatus) -> Vec<String> {
        let mut lines = vec![head(status), vec![plain(program_line(program))]];
        for text in [&status.error, &program.waits].into_iter().flatten() {
            lines.push(vec![(ContentStyle::new().with(Color::Red), text.replace('\n', " "))]);
        }
        let shown = status.workers.len().min(self.height.saturating_sub(lines.len() + 1));
        let more = if shown < status.workers.len() { format!(", {shown} shown") } else { String::new() };
        lines.push(vec![dim(format!("members: {}{more}", status.workers.len()))]);
        lines.extend(status.workers.iter().take(shown).map(|member| process("member", member, None)));
        lines.truncate(self.height.max(1));
        lines.into_iter().map(|line| self.paint(line)).collect()
    }

    fn bar(&self, status: &Status) -> Vec<Span> {
        let records = print::count(status.records);
        let Some(total) = status.records_total.filter(|total| *total > 0) else {
            return vec![plain(format!("{records} records; how many there are is not known yet"))];
        };
        let fraction = (status.records as f64 / total as f64).clamp(0.0, 1.0);
        let text = format!(" {:5.1} %  {records} of {} records", fraction * 100.0, print::count(total));
        let cells = self.width.saturating_sub(text.chars().count()).clamp(10, 40);
        let full = (fraction * cells as f64).round() as usize;
        vec![
            (ContentStyle::new().with(Color::Green), "█".repeat(full)),
            dim("░".repeat(cells - full)),
            plain(text),
        ]
    }

    /// Cuts a line to the width and puts the colours in.
    fn paint(&self, line: Vec<Span>) -> String {
        let mut left = self.width;
        let mut text = String::new();
        for (style, span) in line {
            let piece: String = span.chars().take(left).collect();
            left -= piece.chars().count();
            if self.colour && !piece.is_empty() {
                text.push_str(&style.apply(piece).to_string());
            } else {
                text.push_str(&piece);
            }
        }
        text.trim_end().to_string()
    }
}

fn plain(text: String) -> Span {
    (ContentStyle::new(), text)
}

fn dim(text: String) -> Span {
    (ContentStyle::new().attribute(Attribute::Dim), text)
}

fn head(status: &Status) -> Vec<Span> {
    let colour = match status.phase {
        Phase::Failed => Color::Red,
        Phase::Stopping | Phase::Stopped => Color::Yellow,
        _ => Color::Green,
    };
    let mut rest = String::new();
    if status.epochs > 1 {
        let epoch = (status.epoch + 1).min(status.epochs);
        rest.push_str(&format!("  epoch {epoch} of {}", status.epochs));
    }
    rest.push_str(&format!("  {}", print::seconds(status.seconds)));
    vec![
        (ContentStyle::new().attribute(Attribute::Bold), format!("{}  ", status.job)),
        (ContentStyle::new().with(colour), phase_text(status.phase).into()),
        plain(rest),
    ]
}

/// What the master's memory costs.
fn ledger(status: &Status) -> Option<String> {
    let ledger = &status.ledger;
    let share = ledger.share * 100.0;
    let entries = print::count(ledger.entries);
    (ledger.entries > 0).then(|| {
        format!("ledger: term {}, {entries} entries, {share:.2} % of the time waited for it", status.term)
    })
}

/// A phase as it is written in JSON.
pub fn phase_text(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Training => "training",
        Phase::Running => "running",
        Phase::Saving => "saving",
        Phase::Evaluating => "evaluating",
        Phase::Stopping => "stopping",
        Phase::Done => "done",
        Phase::Failed => "failed",
        Phase::Stopped => "stopped",
    }
}

/// Speed and quality in one line.
pub fn figures(status: &Status) -> String {
    let mut parts = vec![format!("{} records/s", print::count(status.records_per_second.max(0.0) as u64))];
    if let Some(eta) = status.eta_seconds {
        parts.push(format!("eta {}", print::seconds(eta)));
    }
    for (name, value) in [("loss", status.loss), ("logloss", status.logloss), ("auc", status.auc)] {
        parts.extend(value.map(|v| format!("{name} {v:.4}")));
    }
    parts.extend(status.checkpoint.map(|id| format!("checkpoint {id}")));
    if status.replayed > 0 {
        parts.push(format!("{} replayed", print::count(status.replayed)));
    }
    if status.bad_records > 0 {
        parts.push(format!("{} bad records set aside", print::count(status.bad_records)));
    }
    parts.join("  ")
}

/// How often a person's own program began.
pub fn program_line(program: &ProgramStatus) -> String {
    let mut parts = vec![match program.rounds {
        0 => "not begun yet".to_string(),
        n => format!("round {n}"),
    }];
    parts.push(format!("{} of {} restarts used", program.restarts, program.restarts_max));
    if program.tries > 0 {
        parts.push(format!("tried {} times to find room for all", program.tries));
    }
    parts.join("  ")
}

/// Batches that were set aside, and why the last one was.
fn set_aside(status: &Status) -> Option<Vec<Span>> {
    let last = status.quarantined.last()?;
    let count = status.quarantined.len();
    let many = if count == 1 { "1 batch is" } else { &format!("{count} batches are") };
    let error = last.error.replace('\n', " ");
    let text = format!("{many} set aside, the last: batch {} of task {}: {error}", last.batch, last.task);
    Some(vec![(ContentStyle::new().with(Color::Red), text)])
}

fn workers_head(status: &Status, shown: usize) -> String {
    let there = status.workers.len();
    let mut text = format!("workers: {there}");
    if there != status.workers_wanted as usize {
        text.push_str(&format!(" of {} wanted", status.workers_wanted));
    }
    if let Some(allowed) = status.workers_allowed.filter(|allowed| *allowed < status.workers_wanted) {
        text.push_str(&format!(", room for {allowed}"));
    }
    if shown < there {
        text.push_str(&format!(", {shown} shown"));
    }
    if let Some(why) = &status.workers_why {
        text.push_str(&format!(" (auto: {why})"));
    }
    text
}

fn servers_head(status: &Status, shown: usize) -> String {
    let there = status.servers.len();
    let mut text = format!("servers: {there}");
    if there != status.servers_wanted as usize {
        text.push_str(&format!(" of {} wanted", status.servers_wanted));
    }
    if shown < there {
        text.push_str(&format!(", {shown} shown"));
    }
    if let Some(MovingStatus { from, to, partitions, .. }) = &status.moving {
        let what = print::counted(partitions.len() as u64, "partition");
        text.push_str(&format!(", {what} on the way from ps-{from} to ps-{to}"));
    }
    if let Some(BackupsStatus { there, wanted }) = status.backups {
        text.push_str(&format!(", {there} of {} backed up", print::counted(wanted.into(), "partition")));
    }
    text
}

fn process(role: &str, process: &Process, rate: Option<f64>) -> Vec<Span> {
    let colour = match process.state.as_str() {
        "working" | "serving" | "idle" | "running" | "ended" => Color::Green,
        "draining" | "starting" | "ready" => Color::Yellow,
        _ => Color::Red,
    };
    let name = process.name.clone().unwrap_or_else(|| format!("{role}-{}", process.id));
    let name = format!("  {name:<11}");
    let mut rest = String::new();
    if let Some(rate) = rate {
        rest.push_str(&format!("  {:>9}/s", print::count(rate as u64)));
    }
    if let Some(task) = &process.task {
        rest.push_str(&format!("  {task}"));
    }
    rest.extend(held(&process.gauges).map(|held| format!("  {held}")));
    if process.restarts > 0 {
        let times = if process.restarts == 1 { "once".into() } else { format!("{} times", process.restarts) };
        rest.push_str(&format!("  started again {times}"));
    }
    vec![plain(name), (ContentStyle::new().with(colour), format!("{:<8}", process.state)), plain(rest)]
}

/// What a server says of its tables, and of how stale the gradients are that it applies.
fn held(gauges: &Value) -> Option<String> {
    let number = |key: &str| gauges[key].as_u64().filter(|number| *number > 0);
    let rows = number("rows")?;
    let partitions = gauges["loads"].as_object().map_or(0, |loads| loads.len());
    let places = match partitions {
        0 => String::new(),
        some => format!("{}, ", print::counted(some as u64, "partition")),
    };
    let mut text = format!("{places}{} rows in {}", print::count(rows), print::bytes(number("bytes")?));
    text.extend(bounded(&gauges["bounded"]));
    if let (Some(bytes), Some(places)) = (number("table_bytes"), number("places")) {
        let (each, full) = (bytes / rows, 100 * rows / places);
        text.push_str(&format!(", {each} bytes a row, index {full} % full"));
    }
    text.extend(staleness::middle_and_most(gauges).map(|staleness| format!(", {staleness}")));
    Some(text)
}

/// What a server says of its tables that have a bound.
fn bounded(tables: &Value) -> Option<String> {
    let tables = tables.as_object()?.values();
    let sum = |key: &str| tables.clone().filter_map(|table| table[key].as_u64()).sum::<u64>();
    let mut text = format!(", {} rows refused", print::count(sum("refused")));
    let limited = || tables.clone().filter(|table| table["limit"].as_u64() > Some(0));
    if let limit @ 1.. = sum("limit") {
        let bytes: u64 = limited().filter_map(|table| table["bytes"].as_u64()).sum();
        text.push_str(&format!(", {} evicted", print::count(sum("evicted"))));
        text.push_str(&format!(", {} % of memory_max", 100 * bytes / limit));
    }
    Some(text)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use elasticdl_master::ledger::Quarantined;
    use elasticdl_master::status::{LedgerStatus, TaskCounts};
    use elasticdl_spec::TaskId;

    /// A worker or server in some state.
    pub fn member(id: u32, state: &str, records: u64) -> Process {
        Process {
            id,
            name: None,
            state: state.into(),
            waits: None,
            pid: Some(100 + id),
            restarts: 0,
            task: None,
            records,
            gauges: Value::Null,
        }
    }

    /// A job in the middle of its work.
    pub fn training() -> Status {
        Status {
            job: "ctr".into(),
            phase: Phase::Training,
            error: None,
            seconds: 12.3,
            epoch: 0,
            epochs: 2,
            records: 1_234_567,
            records_total: Some(2_000_000),
            records_per_second: 123_456.7,
            eta_seconds: Some(6.2),
            loss: Some(0.45123),
            logloss: None,
            auc: Some(0.79121),
            bad_records: 0,
            tasks: TaskCounts::default(),
            workers_wanted: 3,
            workers_why: None,
            workers_useful: 3,
            workers_allowed: None,
            workers: vec![
                Process { task: Some("train/0/17".into()), ..member(0, "working", 61_000) },
                Process { restarts: 1, ..member(2, "starting", 0) },
            ],
            servers: vec![member(0, "serving", 0), member(1, "serving", 0)],
            servers_wanted: 2,
            moving: None,
            backups: None,
            checkpoint: Some(3),
            term: 1,
            replayed: 0,
            quarantined: Vec::new(),
            ledger: LedgerStatus::default(),
            program: None,
        }
    }

    fn drawn(width: usize, height: usize, colour: bool) -> String {
        let status = training();
        let mut rates = Rates::default();
        let mut before = status.clone();
        before.workers[0].records = 1_000;
        rates.observe(Duration::from_secs(1), &before);
        rates.observe(Duration::from_secs(2), &status);
        Block { width, height, colour }.lines(&status, &rates).join("\n")
    }

    #[test]
    fn a_block_shows_progress_quality_workers_and_servers() {
        insta::assert_snapshot!(drawn(100, 24, false));
    }

    #[test]
    fn how_stale_gradients_are_is_shown_as_a_histogram_of_all_servers() {
        let mut status = training();
        for (server, classes) in status.servers.iter_mut().zip([[700, 250, 40, 0], [920, 50, 39, 1]]) {
            server.gauges = serde_json::json!({ "rows": 1_000, "bytes": 80_000, "staleness": classes });
        }
        let lines = Block { width: 100, height: 24, colour: false }.lines(&status, &Rates::default());
        insta::assert_snapshot!(lines[6..].join("\n"));
    }

    #[test]
    fn what_the_ledger_costs_is_shown() {
        let mut status = training();
        status.term = 2;
        status.ledger = LedgerStatus { entries: 1234, bytes: 9, wait_seconds: 0.5, share: 0.0021 };
        assert_eq!(
            ledger(&status).unwrap(),
            "ledger: term 2, 1,234 entries, 0.21 % of the time waited for it"
        );
    }

    #[test]
    fn why_there_are_so_many_workers_is_shown_where_the_master_finds_it_out() {
        let mut status = training();
        assert_eq!(workers_head(&status, 2), "workers: 2 of 3 wanted");
        status.workers_why = Some("tries whether that is better than 2".into());
        assert_eq!(
            workers_head(&status, 2),
            "workers: 2 of 3 wanted (auto: tries whether that is better than 2)"
        );
    }

    #[test]
    fn what_was_set_aside_and_replayed_is_shown() {
        let error = "the loss is NaN\nat record 7".to_string();
        let batch = Quarantined { task: TaskId::train(0, 17), batch: 2, error };
        let mut status = training();
        status.replayed = 12_288;
        status.quarantined = vec![batch];
        let lines = Block { width: 120, height: 24, colour: false }.lines(&status, &Rates::default());
        assert!(lines[2].ends_with("12,288 replayed"), "{lines:?}");
        let line = "1 batch is set aside, the last: batch 2 of task train/0/17: the loss is NaN at record 7";
        assert_eq!(lines[3], line);
    }

    #[test]
    fn a_narrow_and_low_terminal_is_never_overrun() {
        for (width, height) in [(1, 1), (20, 5), (40, 8), (80, 3)] {
            let text = drawn(width, height, false);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            assert!(text.lines().count() <= height, "{height}: {text}");
        }
    }

    #[test]
    fn colours_are_there_only_when_asked_for() {
        assert!(!drawn(100, 24, false).contains('\x1b'));
        assert!(drawn(100, 24, true).contains('\x1b'));
    }

    #[test]
    fn a_server_tells_what_it_holds_and_how_stale_gradients_are() {
        let gauges = serde_json::json!({
            "rows": 1_000_000, "bytes": 157_286_400, "table_bytes": 152_000_000, "places": 1_500_000,
            "staleness": [10, 20, 60, 9, 1],
        });
        let text =
            "1,000,000 rows in 150.0 MiB, 152 bytes a row, index 66 % full, staleness 2-3, at most 8-15";
        assert_eq!(held(&gauges).unwrap(), text);
        let mut bounded = gauges.clone();
        bounded["bounded"] = serde_json::json!({
            "users": { "rows": 600_000, "bytes": 90 << 20, "limit": 100 << 20, "refused": 12_000, "evicted": 3_400 },
            "items": { "rows": 400_000, "bytes": 60 << 20, "limit": 0, "refused": 5, "evicted": 0 },
        });
        let text = "150.0 MiB, 12,005 rows refused, 3,400 evicted, 90 % of memory_max, 152 bytes a row";
        assert!(held(&bounded).unwrap().contains(text), "{:?}", held(&bounded));
        bounded["bounded"]["users"]["limit"] = 0.into();
        assert!(
            held(&bounded).unwrap().contains("MiB, 12,005 rows refused, 152 bytes"),
            "{:?}",
            held(&bounded)
        );
        assert_eq!(held(&Value::Null), None);
    }
}
