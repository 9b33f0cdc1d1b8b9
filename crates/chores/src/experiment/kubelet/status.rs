//! What a kubelet tells of a pod. Pure.

use std::process::ExitStatus;

use std::os::unix::process::ExitStatusExt;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// As much of a log as a pod's status tells.
const LOG_LINES: usize = 80;
const LOG_BYTES: usize = 2048;

/// A patch of its status: it runs, and is ready.
pub fn running(pod: &Pod, address: &str, now: Timestamp) -> Value {
    let now = now.to_string();
    let condition = |type_: &&str| json!({ "type": type_, "status": "True", "lastTransitionTime": now });
    let conditions = ["PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"];
    json!({ "status": {
        "phase": "Running",
        "startTime": now,
        "podIP": address,
        "podIPs": [{ "ip": address }],
        "conditions": conditions.iter().map(condition).collect::<Vec<_>>(),
        "containerStatuses": [container(pod, true, json!({ "running": { "startedAt": now } }))],
    }})
}

/// A patch of its status: it has ended.
pub fn ended(pod: &Pod, end: &End, started: Timestamp, now: Timestamp) -> Value {
    let (started, now) = (started.to_string(), now.to_string());
    let (phase, reason) = if end.code == 0 { ("Succeeded", "Completed") } else { ("Failed", "Error") };
    let condition = |type_: &&str| json!({ "type": type_, "status": "False", "reason": format!("Pod{reason}"), "lastTransitionTime": now });
    let terminated = json!({ "terminated": {
        "exitCode": end.code, "reason": reason, "message": end.message, "startedAt": started, "finishedAt": now,
    }});
    let conditions: Vec<Value> = ["ContainersReady", "Ready"].iter().map(condition).collect();
    json!({ "status": {
        "phase": phase,
        "conditions": conditions,
        "containerStatuses": [container(pod, false, terminated)],
    }})
}

fn container(pod: &Pod, runs: bool, state: Value) -> Value {
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    json!({
        "name": first.map(|container| &container.name),
        "image": first.and_then(|container| container.image.as_ref()),
        "imageID": "",
        "ready": runs,
        "started": runs,
        "restartCount": 0,
        "state": state,
    })
}

/// How a process ended.
#[derive(Debug, PartialEq, Eq)]
pub struct End {
    /// Its exit code; 128 and the signal where one ended it.
    pub code: i32,
    /// Its last message.
    pub message: String,
}

impl End {
    /// From what the process left: what it wrote as its last message, or else, where it failed, the end of its log.
    pub fn of(status: ExitStatus, last_message: &str, log: &str) -> End {
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
        let message = if last_message.is_empty() && code != 0 { tail(log) } else { last_message };
        End { code, message: message.to_owned() }
    }
}

/// The last lines of a log, as many as a pod's status takes.
fn tail(log: &str) -> &str {
    let log = log.trim_end();
    let lines = log.rmatch_indices('\n').nth(LOG_LINES - 1).map_or(0, |(at, _)| at + 1);
    let mut bytes = log.len().saturating_sub(LOG_BYTES);
    while !log.is_char_boundary(bytes) {
        bytes += 1;
    }
    &log[lines.max(bytes)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(json!({ "spec": { "containers": [{ "name": "elasticdl", "image": "i:1" }] } }))
            .unwrap()
    }

    #[test]
    fn the_operator_reads_what_is_told_of_an_end() {
        use elasticdl_operator::pod::{Cause, State, state};

        let end = End { code: 143, message: "told to end".into() };
        let now = Timestamp::UNIX_EPOCH;
        let mut told = serde_json::to_value(pod()).unwrap();
        told["status"] = ended(&pod(), &end, now, now)["status"].clone();
        let State::Ended(read) = state(&serde_json::from_value(told).unwrap()) else { panic!("it ended") };
        assert_eq!((read.code, read.signal, read.cause), (None, Some(15), Cause::Own));
        assert_eq!(read.last_lines, ["told to end"]);

        let mut told = serde_json::to_value(pod()).unwrap();
        told["status"] = running(&pod(), "127.1.0.1", now)["status"].clone();
        assert_eq!(state(&serde_json::from_value(told).unwrap()), State::Runs);
    }

    #[test]
    fn a_log_speaks_only_for_a_process_that_failed_without_a_word() {
        let (well, failed) = (ExitStatus::from_raw(0), ExitStatus::from_raw(2 << 8));
        assert_eq!(End::of(well, "", "error: x\n"), End { code: 0, message: String::new() });
        assert_eq!(End::of(failed, "", "a\nerror: x\n"), End { code: 2, message: "a\nerror: x".into() });
        assert_eq!(End::of(failed, "said", "a\n"), End { code: 2, message: "said".into() });
        assert_eq!(End::of(ExitStatus::from_raw(9), "", "").code, 137);
    }

    #[test]
    fn a_long_log_is_cut_at_whole_characters() {
        let many: String = (0..200).map(|n| format!("{n}\n")).collect();
        assert_eq!(tail(&many).lines().next(), Some("120"));
        let wide = "ü".repeat(3000) + "!";
        assert_eq!(tail(&wide).len(), 2047);
    }
}
