//! What is to be done about a job's master. Pure: pods in, a verdict out.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::pod::{self, Cause, End, State, Wait};

/// Exit codes of a master that has told the job's outcome, or what is wrong with its input.
const TOLD: [i32; 3] = [0, 1, 3];

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
        Some(State::Leaves(_)) => {
            let end = End { code: None, signal: None, cause: Cause::Deleted, last_lines: Vec::new() };
            Verdict::Again(end)
        }
        Some(State::Ended(end)) => Verdict::Again(end),
    }
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
}
