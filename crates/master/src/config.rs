//! What a master is started with.

use std::io;
use std::path::{Path, PathBuf};

use elasticdl_spec::Plan;
use elasticdl_wire::control::Role;
use elasticdl_wire::{Identity, Token};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::status::ScaleRequest;

/// Everything that the master of a training job needs.
pub struct Config {
    /// The job and its model.
    pub plan: Plan,
    /// What any master needs.
    pub outside: Outside,
    /// So many workers and servers, whatever the ledger says that was wanted before; it says so from then on. They must be
    /// possible ([`ScaleRequest::refusal`]).
    pub wanted: ScaleRequest,
    /// No more workers than that at first, where somebody shares out the room: `POST /v1/allow` changes it.
    pub workers_allowed: Option<u32>,
    /// What the data allows at best, where it carries a planted truth.
    pub best: Option<Best>,
    /// Exports a committed checkpoint; called once, at the end, where the job has an output.
    pub export: Option<Export>,
}

/// What a master needs from outside, whatever it leads.
pub struct Outside {
    /// The job's directory: events, and of a training job the index and by default the checkpoints.
    pub job_dir: PathBuf,
    /// The job's secret.
    pub token: Token,
    /// The job's certificate; without one everything is plain, and only this machine may call.
    pub identity: Option<Identity>,
    /// Where it is called; already bound, so that the address is known.
    pub listener: TcpListener,
    /// Whether a job that had stopped or failed is to go on: there must be something to go on from. A training job
    /// whose ledger is there goes on from it in any case; a new one begins with an empty checkpoint directory.
    pub resume: bool,
    /// Starts and stops processes.
    pub launcher: Box<dyn Launcher>,
    /// What becomes of processes that the launcher started.
    pub news: mpsc::UnboundedReceiver<News>,
    /// A value here asks the job to stop, as `POST /v1/stop` does: signals, a client that went away.
    pub stops: mpsc::UnboundedReceiver<crate::status::StopRequest>,
    /// Every event goes here too.
    pub told: Option<mpsc::UnboundedSender<crate::status::Event>>,
}

/// Exports the checkpoint in a directory; what it returns goes into the `exported` event.
pub type Export = Box<dyn FnOnce(&Path) -> Result<serde_json::Value, String> + Send>;

/// The best reachable figures on the validation data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Best {
    /// Log loss.
    pub logloss: f64,
    /// Area under the curve.
    pub auc: f64,
}

/// Starts and stops the processes of a job: local processes, or pods. Where the job runs a program of its own,
/// each member is a worker, and its number its rank.
pub trait Launcher: Send {
    /// Starts a worker or server. Its exit comes through [`Outside::news`].
    fn start(&mut self, role: Role, id: u32) -> io::Result<Process>;
    /// Takes over what an earlier master started, where that very process still runs: from now on its exit
    /// comes through [`Outside::news`], as fast as that of one started here. `false`: it is gone.
    fn adopt(&mut self, role: Role, id: u32, process: Process) -> bool;
    /// Asks it to end: SIGTERM, which drains.
    fn stop(&mut self, role: Role, id: u32, pid: u32);
    /// Ends it at once.
    fn kill(&mut self, role: Role, id: u32, pid: u32);
}

/// A process, told apart from a later one with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it was started, in the launcher's own measure.
    pub started: u64,
}

/// What becomes of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// It is gone.
    Exited(Exit),
    /// It does not run yet.
    Waits(Waits),
    /// It does not run yet, but has room by now.
    Placed(Placed),
}

/// A process that waited for room has found some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// What it is.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Its process id.
    pub pid: u32,
}

/// A process does not run yet: a pod for which there is no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waits {
    /// What it is.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Its process id.
    pub pid: u32,
    /// Why, in the words of who knows.
    pub why: String,
    /// Whether that may pass by itself.
    pub may_pass: bool,
}

/// A process is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// What it was.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Its process id.
    pub pid: u32,
    /// Its exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The last lines of its log, for messages.
    pub last_lines: Vec<String>,
    /// What ended it, where the program had no part in that: it was preempted, or its node is lost. Such an end
    /// is no reason to give the job up.
    pub outside: Option<String>,
}
