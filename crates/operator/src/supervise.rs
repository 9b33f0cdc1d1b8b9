//! What is to be done about a job's master. Pure: pods in, a verdict out.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::pod::{self, Cause, End, State, Wait};

/// Exit codes of a master that has told the job's outcome, or what is wrong with its input.
const TOLD: [i32; 3] = [0, 1, 3];

/// Masters that died are kept, so that people can look at them; the newest of them.
const KEPT: usize = 3;
/// A pod that should be gone since so many seconds is taken for lost.
const OVERDUE: i64 = 30;

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// There is none: start one.
    Start,
    /// One runs, or will; with why it does not yet.
    Lead(Option<Wait>),
    /// The last one died: start another.
    Again(End),
    /// The job is over, with this exit code.
    Over(i32, End),
}

/// What is to be done about these pods of a master, in whatever order.
pub fn verdict(masters: &[Pod]) -> Verdict {
    let mut masters: Vec<&Pod> = masters.iter().collect();
    masters.sort_by_key(|pod| (pod.creation_timestamp().map(|time| time.0), pod.name_any()));
    let states: Vec<State> = masters.iter().map(|pod| pod::state(pod)).collect();
    // Whichever of them told the outcome: a later one would only find that out.
    for state in &states {
        if let State::Ended(end) = state
            && let Some(code) = end.code.filter(|code| TOLD.contains(code) && end.cause == Cause::Own)
        {
            return Verdict::Over(code, end.clone());
        }
    }
    match states.into_iter().next_back() {
        None => Verdict::Start,
        Some(State::Waits(wait)) => Verdict::Lead(wait),
        Some(State::Runs) => Verdict::Lead(None),
        Some(State::Leaves(_)) => Verdict::Again(End::by(Cause::Deleted)),
        Some(State::Ended(end)) => Verdict::Again(end),
    }
}

/// The names of masters that died so long ago that nobody looks at them any more.
pub fn long_dead(masters: &[Pod]) -> Vec<String> {
    let mut dead: Vec<&Pod> =
        masters.iter().filter(|pod| matches!(pod::state(pod), State::Ended(_))).collect();
    dead.sort_by_key(|pod| (pod.creation_timestamp().map(|time| time.0), pod.name_any()));
    dead[..dead.len().saturating_sub(KEPT)].iter().map(|pod| pod.name_any()).collect()
}

/// Whether a pod that was told to end should be gone by now (Unix seconds): its node does not answer.
pub fn is_overdue(pod: &Pod, now: i64) -> bool {
    pod.metadata.deletion_timestamp.as_ref().is_some_and(|gone| now - gone.0.as_second() > OVERDUE)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(second: u32, phase: &str, terminated: Option<Value>) -> Pod {
        let container = |t| json!([{ "name": "elasticdl", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": { "terminated": t } }]);
        let created = format!("2026-01-01T00:00:{second:02}Z");
        let mut status = json!({ "phase": phase });
        if let Some(terminated) = terminated {
            status["containerStatuses"] = container(terminated);
        }
        let metadata = json!({ "name": format!("j-master-{second}"), "creationTimestamp": created });
        serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
    }

    fn ended(second: u32, code: i32) -> Pod {
        pod(
            second,
            if code == 0 { "Succeeded" } else { "Failed" },
            Some(json!({ "exitCode": code, "reason": "Error" })),
        )
    }

    #[test]
    fn the_newest_master_counts_unless_one_told_the_outcome() {
        assert_eq!(verdict(&[]), Verdict::Start);
        assert_eq!(verdict(&[ended(1, 137), pod(2, "Running", None)]), Verdict::Lead(None));
        assert!(matches!(
            verdict(&[pod(1, "Running", None), ended(2, 137)]),
            Verdict::Again(End { signal: Some(9), .. })
        ));
        assert!(matches!(verdict(&[ended(1, 101)]), Verdict::Again(_)), "it panicked");
        for code in TOLD {
            assert!(
                matches!(verdict(&[ended(1, code), pod(2, "Running", None)]), Verdict::Over(c, _) if c == code)
            );
        }
    }

    #[test]
    fn a_master_that_is_being_deleted_is_succeeded_at_once() {
        let mut leaving = pod(1, "Running", None);
        leaving.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:01:00Z")).unwrap();
        assert!(matches!(verdict(&[leaving.clone()]), Verdict::Again(_)));
        assert_eq!(verdict(&[leaving, pod(2, "Pending", None)]), Verdict::Lead(None));
    }

    #[test]
    fn one_that_was_deleted_and_ended_well_told_nothing() {
        let mut deleted = ended(1, 0);
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:01:00Z")).unwrap();
        assert!(matches!(verdict(&[deleted]), Verdict::Again(_)));
    }

    #[test]
    fn the_newest_dead_masters_are_kept() {
        let masters: Vec<Pod> =
            (1..=5).rev().map(|n| ended(n, 137)).chain([pod(6, "Running", None)]).collect();
        assert_eq!(long_dead(&masters), ["j-master-1", "j-master-2"]);
        assert_eq!(long_dead(&masters[..3]), [""; 0]);
    }

    #[test]
    fn a_pod_is_overdue_some_time_after_it_should_be_gone() {
        let mut leaving = pod(1, "Running", None);
        assert!(!is_overdue(&leaving, i64::MAX));
        leaving.metadata.deletion_timestamp = serde_json::from_value(json!("1970-01-01T00:01:00Z")).unwrap();
        assert!(!is_overdue(&leaving, 90) && is_overdue(&leaving, 91));
    }
}
