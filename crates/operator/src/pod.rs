//! What a pod's status means. Pure.

use std::fmt;

use k8s_openapi::api::core::v1::{ContainerStateWaiting, ContainerStatus, Pod};

use crate::names;

/// The most lines of a dead pod's log that are told.
const LINES: usize = 12;

/// Where a pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not running yet; with the reason, where there is one.
    Waits(Option<Wait>),
    /// Running.
    Runs,
    /// Told to end; expected to be gone at this time (Unix seconds).
    Leaves(i64),
    /// Ended.
    Ended(End),
}

/// Why a pod does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// Whether time alone may change that: room may appear. An image that cannot be fetched does not.
    pub may_pass: bool,
    /// In the words of who knows: the scheduler, the node.
    pub why: String,
}

/// How a pod ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Exit code; `None`: nobody knows, or a signal.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// What ended it.
    pub cause: Cause,
    /// The last lines of its log, or what the cluster said.
    pub last_lines: Vec<String>,
    /// How often pods like it were killed for their memory, this one included; whoever keeps count of them fills
    /// it in.
    pub memory_deaths: u32,
}

impl End {
    /// One of which no more is known than its cause.
    pub fn by(cause: Cause) -> Self {
        End { code: None, signal: None, cause, last_lines: Vec::new(), memory_deaths: 0 }
    }

    /// What a program of ours found wrong: it stands at the end, below what it noted on the way.
    pub fn error(&self) -> String {
        let from = self.last_lines.iter().rposition(|line| line.starts_with("error: ")).unwrap_or(0);
        self.last_lines[from..].join("\n").trim_start_matches("error: ").to_string()
    }
}

/// What ends a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It ended by itself, well or not.
    Own,
    /// It took more memory than it may.
    Memory,
    /// Something more important needed the room.
    Preempted,
    /// Its node needed the room, or was drained.
    Evicted,
    /// Its node went away.
    NodeLost,
    /// Somebody deleted it.
    Deleted,
}

impl Cause {
    /// Whether the program had no part in it: it is no reason to give a job up.
    pub fn is_from_outside(self) -> bool {
        matches!(self, Cause::Preempted | Cause::Evicted | Cause::NodeLost | Cause::Deleted)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Own => "ended",
            Cause::Memory => "killed for its memory",
            Cause::Preempted => "preempted",
            Cause::Evicted => "evicted",
            Cause::NodeLost => "lost with its node",
            Cause::Deleted => "deleted",
        })
    }
}

/// Where a pod is.
pub fn state(pod: &Pod) -> State {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("Pending");
    if matches!(phase, "Succeeded" | "Failed") || terminated(pod).is_some() {
        return State::Ended(end(pod));
    }
    if let Some(gone) = &pod.metadata.deletion_timestamp {
        return State::Leaves(gone.0.as_second());
    }
    match phase {
        "Running" => State::Runs,
        _ => State::Waits(wait(pod)),
    }
}

/// How a pod ended, as far as its last status tells; one that is gone was ended by somebody.
pub fn end(pod: &Pod) -> End {
    let terminated = terminated(pod);
    let reason = terminated.and_then(|t| t.reason.as_deref());
    let code = terminated.map(|t| t.exit_code);
    // The kubelet tells signals as 128 and the signal.
    let signal = terminated.and_then(|t| t.signal).filter(|s| *s > 0);
    let signal = signal.or_else(|| code.filter(|c| (129..160).contains(c)).map(|c| c - 128));
    let cause = match (disruption(pod), reason) {
        (_, Some("OOMKilled")) => Cause::Memory,
        // Its node came back and does not know what became of it.
        (None, Some("ContainerStatusUnknown" | "Unknown")) => Cause::NodeLost,
        (Some(cause), _) => cause,
        _ if pod.metadata.deletion_timestamp.is_some() || terminated.is_none() => Cause::Deleted,
        _ => Cause::Own,
    };
    let message = terminated.and_then(|t| t.message.as_deref());
    let said = message.or_else(|| pod.status.as_ref().and_then(|s| s.message.as_deref()));
    let lines: Vec<&str> = said.unwrap_or_default().lines().filter(|line| !line.trim().is_empty()).collect();
    let last_lines = lines[lines.len().saturating_sub(LINES)..].iter().map(|line| line.to_string()).collect();
    End { code: code.filter(|_| signal.is_none()), signal, last_lines, ..End::by(cause) }
}

/// How our container ended; or one that was to prepare it, and failed.
fn terminated(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::ContainerStateTerminated> {
    let main = container(pod).and_then(|status| status.state.as_ref()?.terminated.as_ref());
    main.or_else(|| {
        let mut ended = init_containers(pod).filter_map(|status| status.state.as_ref()?.terminated.as_ref());
        ended.find(|ended| ended.exit_code != 0)
    })
}

fn init_containers(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status.iter().flat_map(|status| status.init_container_statuses.iter().flatten())
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == names::CONTAINER)
}

/// What the cluster says about why it ended the pod.
fn disruption(pod: &Pod) -> Option<Cause> {
    let status = pod.status.as_ref()?;
    let conditions = status.conditions.iter().flatten();
    let target = conditions.into_iter().find(|c| c.type_ == "DisruptionTarget" && c.status == "True");
    match target.and_then(|c| c.reason.as_deref()).or(status.reason.as_deref())? {
        "PreemptionByScheduler" | "Preempting" => Some(Cause::Preempted),
        "DeletionByTaintManager" | "DeletionByPodGC" | "NodeLost" | "NodeShutdown" | "Shutdown" => {
            Some(Cause::NodeLost)
        }
        "EvictionByEvictionAPI" | "TerminationByKubelet" | "Evicted" => Some(Cause::Evicted),
        _ => None,
    }
}

fn wait(pod: &Pod) -> Option<Wait> {
    let status = pod.status.as_ref()?;
    let containers: Vec<&ContainerStatus> = init_containers(pod).chain(container(pod)).collect();
    let mut waiting = containers.iter().filter_map(|c| c.state.as_ref()?.waiting.as_ref()).peekable();
    if waiting.peek().is_some() {
        let reason = |w: &ContainerStateWaiting| w.reason.clone().unwrap_or_default();
        let usual = |reason: &str| matches!(reason, "" | "ContainerCreating" | "PodInitializing");
        let stuck = waiting.find(|waiting| !usual(&reason(waiting)))?;
        let (reason, message) = (reason(stuck), stuck.message.clone());
        let why = format!("{reason}: {}", message.as_ref().unwrap_or(&reason));
        return Some(Wait { may_pass: false, why });
    }
    let conditions = status.conditions.iter().flatten();
    let scheduled = conditions.into_iter().find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    let why = scheduled.message.clone().or_else(|| scheduled.reason.clone())?;
    Some(Wait { may_pass: true, why })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "j-worker-1" }, "status": status })).unwrap()
    }

    fn leaving(status: Value) -> Pod {
        let metadata = json!({ "name": "j-worker-1", "deletionTimestamp": "2026-01-01T00:00:30Z" });
        serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
    }

    fn terminated(reason: &str, code: i32, message: &str) -> Value {
        let state = json!({ "terminated": { "exitCode": code, "reason": reason, "message": message } });
        json!([{ "name": "elasticdl", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state }])
    }

    fn waiting(reason: &str, message: &str) -> Value {
        let state = json!({ "waiting": { "reason": reason, "message": message } });
        json!([{ "name": "elasticdl", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state }])
    }

    #[test]
    fn a_pod_that_no_node_has_room_for_waits_in_the_schedulers_words() {
        let why = "0/2 nodes are available: 2 Insufficient cpu.";
        let conditions =
            json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why }]);
        let state = state(&pod(json!({ "phase": "Pending", "conditions": conditions })));
        assert_eq!(state, State::Waits(Some(Wait { may_pass: true, why: why.into() })));
    }

    #[test]
    fn an_image_that_cannot_be_fetched_does_not_pass() {
        let statuses = waiting("ErrImagePull", "no such image");
        let state = state(&pod(json!({ "phase": "Pending", "containerStatuses": statuses })));
        let expected = Wait { may_pass: false, why: "ErrImagePull: no such image".into() };
        assert_eq!(state, State::Waits(Some(expected)));
    }

    #[test]
    fn a_container_that_prepares_the_pod_may_be_stuck_or_fail() {
        let main = waiting("PodInitializing", "");
        let init = |state: Value| json!([{ "name": "install", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state }]);
        let stuck = init(json!({ "waiting": { "reason": "ErrImagePull", "message": "no such image" } }));
        let status = json!({ "phase": "Pending", "containerStatuses": main, "initContainerStatuses": stuck });
        let expected = Wait { may_pass: false, why: "ErrImagePull: no such image".into() };
        assert_eq!(state(&pod(status)), State::Waits(Some(expected)));
        let failed =
            init(json!({ "terminated": { "exitCode": 1, "reason": "Error", "message": "disk full" } }));
        let status = json!({ "phase": "Failed", "containerStatuses": main, "initContainerStatuses": failed });
        let State::Ended(end) = state(&pod(status)) else { panic!() };
        assert_eq!((end.code, end.cause, end.last_lines.len()), (Some(1), Cause::Own, 1));
        let over = init(json!({ "terminated": { "exitCode": 0, "reason": "Completed" } }));
        let status = json!({ "phase": "Running", "initContainerStatuses": over });
        assert_eq!(state(&pod(status)), State::Runs);
    }

    #[test]
    fn a_container_that_is_being_made_has_nothing_to_say() {
        let statuses = waiting("ContainerCreating", "");
        assert_eq!(
            state(&pod(json!({ "phase": "Pending", "containerStatuses": statuses }))),
            State::Waits(None)
        );
        assert_eq!(state(&pod(json!({}))), State::Waits(None));
    }

    #[test]
    fn the_ways_to_end_are_told_apart() {
        let ended = |status: Value| match state(&pod(status)) {
            State::Ended(end) => end,
            other => panic!("{other:?}"),
        };
        let own = ended(
            json!({ "phase": "Failed", "containerStatuses": terminated("Error", 1, "a\nb\n\nerror: c\n") }),
        );
        assert_eq!((own.code, own.signal, own.cause), (Some(1), None, Cause::Own));
        assert_eq!(own.last_lines, ["a", "b", "error: c"]);
        assert_eq!((own.error(), End::by(Cause::Own).error()), ("c".into(), String::new()));
        let killed = ended(json!({ "phase": "Failed", "containerStatuses": terminated("Error", 137, "") }));
        assert_eq!((killed.code, killed.signal, killed.cause), (None, Some(9), Cause::Own));
        let memory =
            ended(json!({ "phase": "Failed", "containerStatuses": terminated("OOMKilled", 137, "") }));
        assert_eq!(memory.cause, Cause::Memory);
        let lost = ended(json!({ "phase": "Failed", "containerStatuses": terminated("Unknown", 255, "") }));
        assert_eq!(lost.cause, Cause::NodeLost);
        let evicted =
            ended(json!({ "phase": "Failed", "reason": "Evicted", "message": "the node was low on memory" }));
        assert_eq!((evicted.cause, evicted.last_lines.len()), (Cause::Evicted, 1));
    }

    #[test]
    fn a_preempted_pod_that_drained_well_was_preempted_all_the_same() {
        let target =
            json!([{ "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler" }]);
        let running = json!({ "phase": "Running", "conditions": target });
        assert_eq!(state(&leaving(running)), State::Leaves(1767225630));
        let over = json!({ "phase": "Running", "conditions": target, "containerStatuses": terminated("Completed", 0, "") });
        let State::Ended(end) = state(&leaving(over)) else { panic!() };
        assert_eq!((end.code, end.cause), (Some(0), Cause::Preempted));
    }

    #[test]
    fn a_pod_that_vanishes_was_deleted() {
        assert_eq!(end(&leaving(json!({ "phase": "Running" }))).cause, Cause::Deleted);
        assert_eq!(end(&pod(json!({ "phase": "Running" }))).cause, Cause::Deleted);
        assert!(Cause::Deleted.is_from_outside() && !Cause::Memory.is_from_outside());
    }
}
