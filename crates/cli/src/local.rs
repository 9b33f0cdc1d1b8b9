//! The local fleet: workers and servers as child processes of the master, each with a log of its own; or members of
//! a person's own program in place of them.
//!
//! A child is waited for by a thread of its own, so that its exit is noticed at once. It is not tied to
//! the master's life: where the master dies, it goes on for `limits.orphan` and then ends itself, unless the
//! next master adopts it. An adopted process is nobody's child here, so its handle is watched instead; that
//! tells when it ends and not how.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use elasticdl_master::config::{Exit, Launcher, News, Process};
use elasticdl_spec::command::CommandSpec;
use elasticdl_wire::control::Role;
use rustix::process::{Signal, kill_process_group};
use tokio::sync::mpsc;

use crate::home::{JobDir, last_lines};
use crate::process::{self, Handle};
use crate::submit::append;

/// How many of a dead process's last lines are told.
const LINES: usize = 5;

/// Starts local processes.
pub struct Local {
    program: PathBuf,
    dir: JobDir,
    master: String,
    tls_dir: Option<PathBuf>,
    /// Where the job runs a program of its own.
    command: Option<CommandSpec>,
    exits: mpsc::UnboundedSender<News>,
    alive: Alive,
}

/// Handles of the processes that have not ended, by process id.
type Alive = Arc<Mutex<BTreeMap<u32, Arc<Handle>>>>;

impl Local {
    /// Starts `program` for the job in `dir`, whose master is at `master`; exits go to `exits`.
    pub fn new(program: PathBuf, dir: JobDir, master: String, exits: mpsc::UnboundedSender<News>) -> Self {
        Local { program, dir, master, tls_dir: None, command: None, exits, alive: Alive::default() }
    }

    /// With this directory for the job's certificate.
    pub fn tls(mut self, dir: Option<PathBuf>) -> Self {
        self.tls_dir = dir;
        self
    }

    /// With members of this program for workers.
    pub fn command(mut self, command: Option<CommandSpec>) -> Self {
        self.command = command;
        self
    }

    /// The process's name in logs and messages: ps-0, worker-3; of a member its own: chief-0.
    fn name(&self, role: Role, id: u32) -> String {
        match &self.command {
            Some(command) => command.member(id).to_string(),
            None => format!("{}-{id}", subcommand(role)),
        }
    }

    fn spawn(&self, role: Role, id: u32) -> io::Result<Child> {
        let log = append(&self.dir.log(&self.name(role, id)))?;
        let mut command = Command::new(&self.program);
        match self.command {
            Some(_) => command.args(["member", "run"]),
            None => command.arg(subcommand(role)),
        };
        command.args(["--master", &self.master]).arg("--token-file").arg(self.dir.token());
        if let Some(dir) = &self.tls_dir {
            command.arg("--tls-dir").arg(dir);
        }
        command.args(["--id", &id.to_string()]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
    }

    /// Signals a process. One that has ended meanwhile is told by its exit.
    fn send(&self, pid: u32, signal: Signal) {
        if let Some(handle) = alive(&self.alive).get(&pid) {
            let _ = handle.send(signal);
        }
    }

    /// Keeps a process's handle until `end` returns how it ended (code and signal), and tells its exit.
    fn watch<W>(&self, role: Role, id: u32, handle: Arc<Handle>, end: W) -> io::Result<()>
    where
        W: FnOnce() -> (Option<i32>, Option<i32>) + Send + 'static,
    {
        let pid = handle.pid();
        alive(&self.alive).insert(pid, handle);
        let (others, exits) = (self.alive.clone(), self.exits.clone());
        let name = self.name(role, id);
        let log = self.dir.log(&name);
        let wait = move || {
            let (code, signal) = end();
            alive(&others).remove(&pid);
            let last_lines = last_lines(&log, LINES).unwrap_or_default();
            // The master may have ended meanwhile; then nobody asks.
            let exit = Exit { role, id, pid, code, signal, last_lines, outside: None };
            let _ = exits.send(News::Exited(exit));
        };
        thread::Builder::new().name(format!("wait {name}")).spawn(wait)?;
        Ok(())
    }
}

fn alive(handles: &Alive) -> MutexGuard<'_, BTreeMap<u32, Arc<Handle>>> {
    handles.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Launcher for Local {
    fn start(&mut self, role: Role, id: u32) -> io::Result<Process> {
        let mut child = self.spawn(role, id)?;
        // Nobody waits for the child yet, so that its id is still its own.
        let process = Process { pid: child.id(), started: process::started(child.id())? };
        let handle = Arc::new(Handle::open(process.pid)?);
        self.watch(role, id, handle, move || {
            let status = child.wait().ok();
            (status.and_then(|s| s.code()), status.and_then(|s| s.signal()))
        })?;
        Ok(process)
    }

    fn adopt(&mut self, role: Role, id: u32, process: Process) -> bool {
        let Some(handle) = Handle::of(process).map(Arc::new) else { return false };
        let watched = handle.clone();
        let end = move || {
            if let Err(error) = watched.wait() {
                tracing::error!(%error, pid = watched.pid(), "cannot watch an adopted process");
            }
            (None, None)
        };
        match self.watch(role, id, handle, end) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, pid = process.pid, "cannot adopt a process");
                false
            }
        }
    }

    fn stop(&mut self, _role: Role, _id: u32, pid: u32) {
        self.send(pid, Signal::TERM);
    }

    fn kill(&mut self, _role: Role, _id: u32, pid: u32) {
        if self.command.is_some() && alive(&self.alive).contains_key(&pid) {
            // A member that is killed cannot end what its program has started.
            for group in process::children(pid) {
                let _ = kill_process_group(group, Signal::KILL);
            }
        }
        self.send(pid, Signal::KILL);
    }
}

fn subcommand(role: Role) -> &'static str {
    match role {
        Role::Worker => "worker",
        Role::Server => "ps",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const DEADLINE: Duration = Duration::from_secs(30);

    /// A launcher for a job in a directory of its own, and where its exits come out.
    fn local(root: &tempfile::TempDir) -> (Local, mpsc::UnboundedReceiver<News>) {
        let dir = JobDir::at(root.path()).unwrap();
        std::fs::create_dir_all(dir.logs()).unwrap();
        std::fs::write(dir.log("worker-3"), "last words\n").unwrap();
        let (sender, exits) = mpsc::unbounded_channel();
        (Local::new("/bin/false".into(), dir, "127.0.0.1:1".into(), sender), exits)
    }

    /// A process as an earlier master may have left it.
    fn left_behind() -> (Child, Process) {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let process = Process { pid: child.id(), started: process::started(child.id()).unwrap() };
        (child, process)
    }

    async fn next(exits: &mut mpsc::UnboundedReceiver<News>) -> Exit {
        let news = tokio::time::timeout(DEADLINE, exits.recv()).await.expect("an exit is told at once");
        let Some(News::Exited(exit)) = news else { panic!("{news:?}") };
        exit
    }

    #[tokio::test]
    async fn the_exit_of_an_adopted_process_is_told_and_it_can_be_ended() {
        let root = tempfile::tempdir().unwrap();
        let (mut local, mut exits) = local(&root);
        let (mut child, process) = left_behind();
        assert!(local.adopt(Role::Worker, 3, process));
        local.kill(Role::Worker, 3, process.pid);
        let told = next(&mut exits).await;
        let expected = Exit {
            role: Role::Worker,
            id: 3,
            pid: process.pid,
            code: None,
            signal: None,
            last_lines: vec!["last words".into()],
            outside: None,
        };
        assert_eq!(told, expected);
        child.wait().unwrap();
        assert!(alive(&local.alive).is_empty());
    }

    #[tokio::test]
    async fn only_the_very_process_is_adopted() {
        let root = tempfile::tempdir().unwrap();
        let (mut local, _exits) = local(&root);
        let (mut child, process) = left_behind();
        assert!(!local.adopt(Role::Worker, 3, Process { started: process.started ^ 1, ..process }));
        child.kill().unwrap();
        Handle::open(process.pid).unwrap().wait().unwrap();
        assert!(!local.adopt(Role::Worker, 3, process), "dead and not yet waited for");
        child.wait().unwrap();
        assert!(!local.adopt(Role::Worker, 3, process), "gone");
        assert!(alive(&local.alive).is_empty());
    }

    #[tokio::test]
    async fn a_child_is_told_with_its_exit_code() {
        let root = tempfile::tempdir().unwrap();
        let (mut local, mut exits) = local(&root);
        let process = local.start(Role::Server, 0).unwrap();
        let exit = next(&mut exits).await;
        assert_eq!((exit.pid, exit.code, exit.signal), (process.pid, Some(1), None));
    }
}
