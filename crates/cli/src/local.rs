//! The local fleet: workers and servers as child processes of the master, each with a log of its own.
//!
//! A child is waited for by a thread of its own, so that its exit is noticed at once. It is not tied to
//! the master's life: where the master dies, it goes on for `limits.orphan` and then ends itself.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use elasticdl_master::config::{Exit, Launcher};
use elasticdl_wire::control::Role;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::mpsc;

use crate::home::{JobDir, last_lines};
use crate::submit::append;

/// How many of a dead process's last lines are told.
const LINES: usize = 5;

/// Starts local processes.
pub struct Local {
    program: PathBuf,
    dir: JobDir,
    master: String,
    exits: mpsc::UnboundedSender<Exit>,
    alive: Alive,
}

/// Handles of the processes that have not ended, by process id. Unlike the id, a handle can never come to
/// mean another process.
type Alive = Arc<Mutex<BTreeMap<u32, OwnedFd>>>;

impl Local {
    /// Starts `program` for the job in `dir`, whose master is at `master`; exits go to `exits`.
    pub fn new(program: PathBuf, dir: JobDir, master: String, exits: mpsc::UnboundedSender<Exit>) -> Self {
        Local { program, dir, master, exits, alive: Alive::default() }
    }

    fn spawn(&self, role: Role, id: u32) -> io::Result<Child> {
        let log = append(&self.dir.log(&name(role, id)))?;
        let mut command = Command::new(&self.program);
        command
            .arg(subcommand(role))
            .args(["--master", &self.master])
            .arg("--token-file")
            .arg(self.dir.token());
        command.args(["--id", &id.to_string()]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
    }

    /// Signals a child. One that has ended meanwhile is told by its exit.
    fn send(&self, pid: u32, signal: Signal) {
        if let Some(handle) = self.alive.lock().unwrap_or_else(PoisonError::into_inner).get(&pid) {
            let _ = pidfd_send_signal(handle, signal);
        }
    }
}

impl Launcher for Local {
    fn start(&mut self, role: Role, id: u32) -> io::Result<u32> {
        let mut child = self.spawn(role, id)?;
        let pid = child.id();
        // Nobody waits for the child yet, so that its id is still its own.
        let handle = process(pid).ok_or(io::ErrorKind::NotFound)?;
        self.alive
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(pid, pidfd_open(handle, PidfdFlags::empty())?);
        let alive = self.alive.clone();
        let (exits, log) = (self.exits.clone(), self.dir.log(&name(role, id)));
        let wait = move || {
            let status = child.wait();
            alive.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
            let code = status.as_ref().ok().and_then(|s| s.code());
            let signal = status.as_ref().ok().and_then(|s| s.signal());
            let last_lines = last_lines(&log, LINES).unwrap_or_default();
            // The master may have ended meanwhile; then nobody asks.
            let _ = exits.send(Exit { role, id, pid, code, signal, last_lines });
        };
        thread::Builder::new().name(format!("wait {}", name(role, id))).spawn(wait)?;
        Ok(pid)
    }

    fn stop(&mut self, _role: Role, _id: u32, pid: u32) {
        self.send(pid, Signal::TERM);
    }

    fn kill(&mut self, _role: Role, _id: u32, pid: u32) {
        self.send(pid, Signal::KILL);
    }
}

/// The process's name in logs and messages: ps-0, worker-3.
fn name(role: Role, id: u32) -> String {
    format!("{}-{id}", subcommand(role))
}

fn subcommand(role: Role) -> &'static str {
    match role {
        Role::Worker => "worker",
        Role::Server => "ps",
    }
}

fn process(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}
