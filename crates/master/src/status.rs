//! What people and programs see of a job: the status, and the events on the way.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ledger::Quarantined;

/// Where a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Servers are starting or restoring.
    Starting,
    /// Training tasks are being worked on.
    Training,
    /// A person's own program runs.
    Running,
    /// All is trained; the last checkpoint is being written.
    Saving,
    /// The final evaluation runs on the saved model.
    Evaluating,
    /// Stopping: draining, then a checkpoint.
    Stopping,
    /// Over: everything trained.
    Done,
    /// Over: something went wrong that trying again cannot mend.
    Failed,
    /// Over: somebody stopped it; it can be resumed.
    Stopped,
}

impl Phase {
    /// Whether the job is over.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Done | Phase::Failed | Phase::Stopped)
    }
}

/// A job at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// Where it is.
    pub phase: Phase,
    /// Why it failed.
    pub error: Option<String>,
    /// Since this master started.
    pub seconds: f64,
    /// The epoch being trained, from 0.
    pub epoch: u32,
    /// Epochs in all.
    pub epochs: u32,
    /// Records trained, over all epochs and including those before a resume.
    pub records: u64,
    /// Records to be trained over all epochs; unknown while files are being indexed or are compressed.
    pub records_total: Option<u64>,
    /// Records a second over the last seconds.
    pub records_per_second: f64,
    /// Seconds until training is done at this rate.
    pub eta_seconds: Option<f64>,
    /// Mean training loss over the last seconds.
    pub loss: Option<f64>,
    /// Of the last evaluation.
    pub logloss: Option<f64>,
    /// Of the last evaluation.
    pub auc: Option<f64>,
    /// Malformed records set aside.
    pub bad_records: u64,
    /// Training tasks by state.
    pub tasks: TaskCounts,
    /// Workers wanted.
    pub workers_wanted: u32,
    /// Why so many, where the master itself finds out how many are of use.
    #[serde(default)]
    pub workers_why: Option<String>,
    /// How many the job could do with at this moment, if there were room.
    #[serde(default)]
    pub workers_useful: u32,
    /// No more than that are started, whatever is wanted: who shares out the room of a cluster says so.
    #[serde(default)]
    pub workers_allowed: Option<u32>,
    /// The workers there are.
    pub workers: Vec<Process>,
    /// The servers there are.
    pub servers: Vec<Process>,
    /// Servers wanted.
    #[serde(default)]
    pub servers_wanted: u32,
    /// Partitions on their way from one server to another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving: Option<MovingStatus>,
    /// How many partitions have a backup, where the job wants some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backups: Option<BackupsStatus>,
    /// The last committed checkpoint.
    pub checkpoint: Option<u64>,
    /// Which master leads the job.
    #[serde(default)]
    pub term: u64,
    /// Records of tasks that had to be applied again after a server's death.
    #[serde(default)]
    pub replayed: u64,
    /// Batches that failed again and again and are set aside.
    #[serde(default)]
    pub quarantined: Vec<Quarantined>,
    /// The ledger of this master.
    #[serde(default)]
    pub ledger: LedgerStatus,
    /// What runs in place of training; its members are the `workers`, and there are no records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramStatus>,
}

/// How many partitions have a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupsStatus {
    /// So many have one.
    pub there: u32,
    /// So many should.
    pub wanted: u32,
}

/// Partitions on their way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MovingStatus {
    /// The server that has them.
    pub from: u32,
    /// The one that will.
    pub to: u32,
    /// The partitions.
    pub partitions: Vec<u32>,
    /// For how long.
    pub seconds: f64,
}

/// A person's own program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramStatus {
    /// How often all members have begun together.
    pub rounds: u32,
    /// How often something was started again because it ended.
    pub restarts: u32,
    /// How often that may be.
    pub restarts_max: u32,
    /// How often in a row there was no room for all of them.
    pub tries: u32,
    /// Why the program does not run.
    pub waits: Option<String>,
}

/// What the ledger costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LedgerStatus {
    /// Entries that this master has written.
    pub entries: u64,
    /// The length of its file.
    pub bytes: u64,
    /// How long the master, and with it every lease, has waited for it.
    pub wait_seconds: f64,
    /// The same as a share of the time that this master has run.
    pub share: f64,
}

/// How many training tasks are in which state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskCounts {
    /// Waiting; of the epochs begun so far.
    pub todo: u64,
    /// With a worker.
    pub leased: u64,
    /// Done, in this epoch and before.
    pub done: u64,
}

/// A worker or a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub id: u32,
    /// Its name, where that is another than its role and number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// pending (there is no room for it), starting, working, idle, serving, draining or waiting (for a restart);
    /// ready, running or ended where it is a member of a person's own program.
    pub state: String,
    /// Why it is pending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Its process.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
    /// The task it holds.
    pub task: Option<String>,
    /// Records it has done.
    pub records: u64,
    /// What it says of itself: stage times, rows, bytes.
    pub gauges: Value,
}

/// Something that happened, in the order it happened. Serialized as one flat JSON object with `event`,
/// `seq` (which goes on when the master is started again), `seconds` (since this master started) and
/// `unix_ms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// What: started, indexed, training, leasing, progress, evaluated, checkpoint, scaled, allowed,
    /// worker_started, worker_joined, worker_exited, server_started, server_ready, server_exited, servers_scaled,
    /// backed_up, promoted, moving, moved, pending, silent, replay, replayed, task_goes_on, lease_expired,
    /// quarantined, warning, stopping, exported, finished. Of a person's own program: started, member_started,
    /// member_joined, member_exited, member_ended, pending, given_back, running, restarting, silent, stopping,
    /// finished.
    pub event: String,
    /// Its number, from 1, without holes.
    pub seq: u64,
    /// When, since this master started.
    pub seconds: f64,
    /// When, by the clock: milliseconds since 1970.
    #[serde(default)]
    pub unix_ms: u64,
    /// What belongs to it.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, Value>,
}

/// Body of `POST /v1/scale`, and what a job that is resumed is to have from then on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScaleRequest {
    /// Workers wanted: a number, or "auto".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<Wanted>,
    /// Servers wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub servers: Option<u32>,
}

impl From<Wanted> for ScaleRequest {
    fn from(workers: Wanted) -> Self {
        ScaleRequest { workers: Some(workers), servers: None }
    }
}

/// Body of `POST /v1/allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowRequest {
    /// No more workers than that, whatever is wanted; `null`: as many as are wanted.
    pub workers: Option<u32>,
}

/// How many workers somebody wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Wanted {
    /// So many, whatever they add.
    Fixed(u32),
    /// As many as are of use: the master finds out.
    Auto,
}

/// The word for [`Wanted::Auto`].
const AUTO: &str = "auto";

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            AUTO => Ok(Wanted::Auto),
            _ => text.parse().map(Wanted::Fixed).map_err(|_| format!("a whole number or {AUTO} is wanted")),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::Fixed(workers) => write!(f, "{workers}"),
            Wanted::Auto => f.write_str(AUTO),
        }
    }
}

impl TryFrom<Value> for Wanted {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match value {
            Value::String(text) => text.parse(),
            other => other.to_string().parse(),
        }
    }
}

impl From<Wanted> for Value {
    fn from(wanted: Wanted) -> Self {
        match wanted {
            Wanted::Fixed(workers) => workers.into(),
            Wanted::Auto => AUTO.into(),
        }
    }
}

/// Body of `POST /v1/stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopRequest {
    /// Whether to leave at once, without draining and without a checkpoint.
    pub now: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_wanted_by_number_or_automatically() {
        for (text, wanted) in [("8", Wanted::Fixed(8)), ("auto", Wanted::Auto)] {
            assert_eq!(text.parse(), Ok(wanted));
            assert_eq!(wanted.to_string(), text);
        }
        for (json, workers) in
            [(r#"{"workers":8}"#, Wanted::Fixed(8)), (r#"{"workers":"auto"}"#, Wanted::Auto)]
        {
            let wanted = ScaleRequest::from(workers);
            assert_eq!(serde_json::from_str::<ScaleRequest>(json).unwrap(), wanted);
            assert_eq!(serde_json::to_string(&wanted).unwrap(), json);
        }
        for wrong in ["-1", "many", "1.5", ""] {
            assert_eq!(wrong.parse::<Wanted>(), Err("a whole number or auto is wanted".into()), "{wrong}");
        }
        let servers: ScaleRequest = serde_json::from_str(r#"{"servers":3}"#).unwrap();
        assert_eq!(servers, ScaleRequest { workers: None, servers: Some(3) });
    }
}
