//! What a master says of its job: while it runs, over HTTP; at its end, in its pod's last message.
//!
//! The operator does not know how masters are called; whoever does implements [`Masters`].

use serde::{Deserialize, Serialize};

use crate::manifest::Secrets;
use crate::resource::Phase;

/// What a master says of its job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Where the job is.
    pub phase: Phase,
    /// Records trained.
    pub records: u64,
    /// Records to be trained, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records_total: Option<u64>,
    /// The epoch being trained, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
    /// Workers that run.
    #[serde(default)]
    pub workers: u32,
    /// Workers wanted.
    #[serde(default)]
    pub workers_wanted: u32,
    /// How many it could do with, if there were room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_useful: Option<u32>,
    /// No more than that are started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_allowed: Option<u32>,
    /// Of the last evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
    /// Of the last evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logloss: Option<f64>,
    /// Why the job failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The longest error that goes with a report: a pod's last message holds 4096 bytes.
const ERROR_MAX: usize = 1500;

impl Report {
    /// A line for the last message of a pod.
    pub fn to_line(&self) -> String {
        let mut report = self.clone();
        report.error = report.error.map(|error| error.chars().take(ERROR_MAX).collect());
        serde_json::to_string(&report).expect("a report is JSON")
    }

    /// The report in the last message of a pod, where that is one.
    pub fn from_line(line: &str) -> Option<Report> {
        serde_json::from_str(line).ok()
    }
}

/// Calls to masters. They block, for some seconds at most.
pub trait Masters: Send + Sync + 'static {
    /// What the master at `address` says of its job.
    ///
    /// # Errors
    ///
    /// It does not answer, or refuses; in words.
    fn report(&self, address: &str, secrets: &Secrets) -> Result<Report, String>;

    /// Asks it for so many workers.
    ///
    /// # Errors
    ///
    /// It does not answer, or refuses; in words.
    fn scale(&self, address: &str, secrets: &Secrets, workers: u32) -> Result<(), String>;

    /// Allows it so many workers, whatever it wants; `None`: as many as it wants.
    ///
    /// # Errors
    ///
    /// It does not answer, or refuses; in words.
    fn allow(&self, address: &str, secrets: &Secrets, workers: Option<u32>) -> Result<(), String>;

    /// Asks it to stop after a checkpoint.
    ///
    /// # Errors
    ///
    /// It does not answer, or refuses; in words.
    fn stop(&self, address: &str, secrets: &Secrets) -> Result<(), String>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_last_message_of_a_pod() {
        let report = Report {
            phase: Phase::Failed,
            records: 12,
            records_total: None,
            epoch: Some(1),
            workers: 0,
            workers_wanted: 0,
            workers_useful: None,
            workers_allowed: None,
            auc: Some(0.75),
            logloss: None,
            error: Some("ü".repeat(5000)),
        };
        let line = report.to_line();
        assert!(line.len() < 4096, "{}", line.len());
        let read = Report::from_line(&line).unwrap();
        assert_eq!((read.phase, read.records, read.auc), (Phase::Failed, 12, Some(0.75)));
        assert_eq!(Report::from_line("error: no such file"), None);
    }
}
