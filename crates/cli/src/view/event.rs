//! Events as sentences. Pure.

use elasticdl_master::status::Event;
use serde_json::Value;

use crate::print;

/// The sentence for an event; `None` for those that the regular view shows anyway.
pub fn text(event: &Event) -> Option<String> {
    let field = |name: &str| event.fields.get(name).filter(|v| !v.is_null());
    let text = |name: &str| field(name).map_or_else(|| "?".into(), value_text);
    let count = |name: &str| field(name).and_then(Value::as_u64).map_or_else(|| "?".into(), print::count);
    let number = |name: &str| field(name).and_then(Value::as_u64);
    Some(match event.event.as_str() {
        "started" if number("term") > Some(1) => {
            format!("the master leads again, with {} processes taken over", count("adopted"))
        }
        "progress" | "finished" | "started" | "server_started" | "worker_started" | "server_ready"
        | "leasing" | "task_goes_on" | "member_started" => return None,
        "member_joined" => format!("{} is there ({})", text("member"), text("address")),
        "member_exited" => exited(event),
        "member_ended" | "given_back" | "running" | "restarting" => program(event),
        "stopping" if field("members").is_some() => "stopping: the program is asked to end".into(),
        "worker_joined" => format!("worker-{} joined (pid {})", text("worker"), text("pid")),
        "worker_exited" | "server_exited" => exited(event),
        "indexed" => match field("records_total").and_then(Value::as_u64) {
            Some(total) => format!("indexed: {} records in {} shards", print::count(total), count("shards")),
            None => format!("indexed: {} shards", count("shards")),
        },
        "training" if field("records").and_then(Value::as_u64).unwrap_or(0) > 0 => {
            format!("training goes on after {} records", count("records"))
        }
        "training" => "training".into(),
        "evaluated" => format!(
            "judged on {} records after training on {}: logloss {}, auc {}",
            count("records"),
            count("trained"),
            text("logloss"),
            text("auc")
        ),
        "checkpoint" => {
            let bytes = field("bytes").and_then(Value::as_u64).map_or_else(|| "?".into(), print::bytes);
            format!("checkpoint {} written: {bytes}, {} records", text("checkpoint"), count("records"))
        }
        "replay" if number("tasks") == Some(0) => return None,
        "replay" => {
            let servers = field("servers").and_then(Value::as_array).into_iter().flatten();
            let names: Vec<String> = servers.map(|id| format!("ps-{id}")).collect();
            let who = if names.is_empty() { "a move has".into() } else { names.join(", ") };
            let (records, tasks) = (count("records"), count("tasks"));
            format!(
                "{who} lost what no checkpoint covers: {records} records of {tasks} tasks are applied again"
            )
        }
        "replayed" => format!("all {} tasks are applied again", count("tasks")),
        "pending" => format!("{} waits: {}", member(event), text("why")),
        "silent" => format!("{} is silent: it is ended and replaced", member(event)),
        "quarantined" => {
            format!("batch {} of task {} is set aside: {}", text("batch"), text("task"), text("error"))
        }
        "scaled" => scaled(event),
        "servers_scaled" => {
            format!(
                "{} wanted, {} before",
                print::counted(number("to").unwrap_or(0), "server"),
                count("from")
            )
        }
        "moving" => format!("{} on the way from ps-{} to ps-{}", partitions(event), text("from"), text("to")),
        "moved" => format!("ps-{} serves {} of ps-{} now", text("to"), partitions(event), text("from")),
        "backed_up" => format!("all {} partitions are backed up", count("partitions")),
        "promoted" => format!(
            "ps-{} serves its backups of {} in place of ps-{}",
            text("to"),
            partitions(event),
            text("from")
        ),
        "allowed" => match number("to") {
            Some(workers) => format!("there is room for {workers} workers"),
            None => "the number of workers is not limited any more".into(),
        },
        "lease_expired" => {
            format!("worker-{} lost task {}: no batch for too long", text("worker"), text("task"))
        }
        "stopping" => "stopping: workers finish their batches, then a checkpoint".into(),
        "exported" => format!("model exported: {}", text("output")),
        "warning" => format!("warning: {}", text("message")),
        _ => unknown(event),
    })
}

/// With the time in front.
pub fn stamped(event: &Event, text: &str) -> String {
    format!("{:>7}  {text}", print::seconds(event.seconds))
}

/// Partitions that an event is about, by number.
fn partitions(event: &Event) -> String {
    let numbers = event.fields.get("partitions").and_then(Value::as_array).into_iter().flatten();
    let numbers: Vec<String> = numbers.map(Value::to_string).collect();
    let what = if numbers.len() == 1 { "partition" } else { "partitions" };
    format!("{what} {}", numbers.join(", "))
}

/// The process that an event is about.
fn member(event: &Event) -> String {
    let field = |name: &str| event.fields.get(name).filter(|v| !v.is_null());
    if let Some(name) = field("member").and_then(Value::as_str) {
        return name.into();
    }
    match (field("worker"), field("server")) {
        (Some(id), _) => format!("worker-{id}"),
        (None, Some(id)) => format!("ps-{id}"),
        (None, None) => "a process".into(),
    }
}

/// What becomes of a person's own program.
fn program(event: &Event) -> String {
    let field = |name: &str| event.fields.get(name).filter(|v| !v.is_null());
    let text = |name: &str| field(name).map_or_else(|| "?".into(), value_text);
    let pause = match field("pause_seconds").and_then(Value::as_f64).unwrap_or(0.0) {
        0.0 => "at once".to_string(),
        seconds => format!("in {}", print::seconds(seconds)),
    };
    let mut said = match event.event.as_str() {
        "running" if text("goes_on") == "true" => "the program runs on".into(),
        "running" if text("round") == "1" => format!("all {} are there: the program runs", text("members")),
        "running" => {
            format!("all {} are there: the program runs again (round {})", text("members"), text("round"))
        }
        "given_back" => {
            return format!(
                "there is no room for {} of {}: all give theirs back and try again {pause}: {}",
                text("missing"),
                text("members"),
                text("why")
            );
        }
        "restarting" => {
            let who = if text("scope") == "all" { "all are" } else { "it is" };
            let (restart, max) = (text("restart"), text("max"));
            format!(
                "{} ended ({}): {who} started again {pause}, {restart} of {max} times",
                text("member"),
                text("how")
            )
        }
        _ => match field("signal") {
            Some(signal) => format!("the program of {} was ended by signal {signal}", text("member")),
            None => format!("the program of {} ended with exit code {}", text("member"), text("code")),
        },
    };
    for line in field("last_lines").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    {
        said.push_str(&format!("\n         | {line}"));
    }
    said
}

/// Another number of workers, and why.
fn scaled(event: &Event) -> String {
    let number = |name: &str| event.fields.get(name).and_then(Value::as_u64).unwrap_or(0);
    let (from, to) = (number("from"), number("to"));
    let who = if to == 1 { "1 worker is wanted".into() } else { format!("{to} workers are wanted") };
    let before = if from == to { " as before".into() } else { format!(", {from} before") };
    let why = event.fields.get("reason").and_then(Value::as_str).map(|reason| format!(": {reason}"));
    format!("{who}{before}{}", why.unwrap_or_default())
}

/// A process is gone: by request, or by what, with its last words.
fn exited(event: &Event) -> String {
    let field = |name: &str| event.fields.get(name).filter(|v| !v.is_null());
    let name = member(event);
    if field("asked").and_then(Value::as_bool).unwrap_or(false) {
        return format!("{name} left");
    }
    if let Some(why) = field("why").and_then(Value::as_str) {
        return format!("{name} was {why}; a replacement is started");
    }
    let how = match (field("code"), field("signal")) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        // It was started by an earlier master, which alone could have learnt it.
        (None, None) => "unknown cause".into(),
    };
    let mut text = format!("{name} died ({how}); a replacement is started");
    for line in field("last_lines").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
    {
        text.push_str(&format!("\n         | {line}"));
    }
    text
}

/// An event that this version has no sentence for.
fn unknown(event: &Event) -> String {
    let words = event.event.replace('_', " ");
    let fields = event.fields.iter().map(|(key, value)| format!("{key} {}", value_text(value)));
    let fields: Vec<String> = fields.collect();
    if fields.is_empty() { words } else { format!("{words}: {}", fields.join(", ")) }
}

fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) if n.is_f64() => format!("{:.4}", n.as_f64().unwrap_or(f64::NAN)),
        Value::Object(fields) => {
            let parts: Vec<String> =
                fields.iter().map(|(key, value)| format!("{key} {}", value_text(value))).collect();
            parts.join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_read_as_sentences() {
        let events = json!([
            { "event": "progress", "records": 5 },
            { "event": "indexed", "shards": 12, "records_total": 2_000_000 },
            { "event": "worker_joined", "worker": 1, "pid": 77 },
            { "event": "worker_exited", "worker": 1, "pid": 77, "asked": false, "signal": 9, "last_lines": ["bye"] },
            { "event": "worker_exited", "worker": 2, "pid": 78, "asked": true, "code": 0 },
            { "event": "worker_exited", "worker": 3, "pid": 79, "asked": false, "code": 0, "why": "preempted" },
            { "event": "pending", "worker": 4, "why": "0/2 nodes are available: 2 Insufficient cpu." },
            { "event": "evaluated", "logloss": 0.45678, "auc": null, "records": 1000, "trained": 5000, "last": false },
            { "event": "checkpoint", "checkpoint": 3, "bytes": 5_000_000, "records": 123_456 },
            { "event": "started", "term": 1, "adopted": 0 },
            { "event": "started", "term": 2, "adopted": 4 },
            { "event": "replay", "servers": [1], "tasks": 3, "records": 12_288 },
            { "event": "replayed", "tasks": 3, "replay_seconds": 0.4 },
            { "event": "quarantined", "task": "train/0/3", "batch": 2, "error": "the loss is NaN" },
            { "event": "scaled", "from": 2, "to": 4, "automatic": true, "reason": "tries whether that is better than 2" },
            { "event": "scaled", "from": 2, "to": 1 },
            { "event": "scaled", "from": 4, "to": 4, "reason": "somebody asked for so many, and no others are tried from now on" },
            { "event": "servers_scaled", "from": 2, "to": 1 },
            { "event": "moving", "from": 1, "to": 0, "partitions": [1, 3] },
            { "event": "moved", "from": 1, "to": 0, "partitions": [3], "move_seconds": 0.5, "handing_seconds": 0.01 },
            { "event": "backed_up", "partitions": 8 },
            { "event": "promoted", "from": 1, "to": 0, "partitions": [3], "away_seconds": 0.2 },
            { "event": "replay", "servers": [], "tasks": 3, "records": 12_288 },
            { "event": "allowed", "from": null, "to": 3 },
            { "event": "allowed", "from": 3, "to": null },
            { "event": "member_joined", "member": "chief-0", "pid": 7, "address": "10.0.0.1:29500" },
            { "event": "running", "members": 4, "round": 1, "restarts": 0 },
            { "event": "member_ended", "member": "worker-1", "code": 7, "last_lines": ["Traceback", "bye"] },
            { "event": "restarting", "member": "worker-1", "how": "exit code 7", "scope": "all", "restart": 1, "max": 3, "pause_seconds": 0.0 },
            { "event": "running", "members": 4, "round": 2, "restarts": 1 },
            { "event": "running", "members": 4, "round": 2, "restarts": 1, "goes_on": true },
            { "event": "member_exited", "member": "worker-1", "pid": 9, "asked": false, "why": "preempted" },
            { "event": "pending", "member": "worker-1", "why": "0/2 nodes are available: 2 Insufficient cpu." },
            { "event": "given_back", "missing": 2, "members": 4, "why": "no room", "tries": 1, "pause_seconds": 15.5 },
            { "event": "stopping", "members": 4 },
            { "event": "exported", "output": { "path": "model/x", "rows": 1000 } },
            { "event": "brand_new", "what": 1.5 },
        ]);
        let lines: Vec<String> = events
            .as_array()
            .unwrap()
            .iter()
            .map(|fields| {
                let mut event = fields.clone();
                event["seq"] = json!(1);
                event["seconds"] = json!(12.345);
                event["unix_ms"] = json!(1_700_000_000_000_u64);
                let event: Event = serde_json::from_value(event).unwrap();
                text(&event).map_or_else(|| "(nothing)".into(), |text| stamped(&event, &text))
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"));
    }
}
