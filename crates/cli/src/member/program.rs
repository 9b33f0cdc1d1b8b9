//! A person's program while it runs: a process group, what it wrote last, and its end.

#![expect(clippy::disallowed_methods, reason = "an edge: it starts processes, waits and reads the clock")]

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_wire::control::ProgramEnd;
use rustix::fs::{Access, access};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use super::told;

/// How many of the last lines are told, and how much of each.
const LINES: usize = 12;
const LINE_BYTES_MAX: usize = 1024;
/// How long output may still come from what the program has left behind.
const OUTPUT_LIMIT: Duration = Duration::from_millis(500);
/// What is ours and not the program's.
const OWN_VARIABLES: [&str; 3] = ["ELASTICDL_TOKEN_FILE", "ELASTICDL_TLS_DIR", "ELASTICDL_PROCESS"];

/// A program that runs.
#[derive(Debug)]
pub struct Program {
    child: Child,
    group: Option<Pid>,
    tail: Arc<Mutex<Tail>>,
    copies: Vec<JoinHandle<()>>,
    /// When it is ended, where it was asked to end.
    deadline: Option<Instant>,
}

impl Program {
    /// Starts it; where it cannot be, in words.
    pub fn start(run: &[String], environment: &BTreeMap<String, String>) -> Result<Program, String> {
        let name = run.first().ok_or("there is no program to start")?;
        let path =
            environment.get("PATH").cloned().or_else(|| std::env::var("PATH").ok()).unwrap_or_default();
        find(name, &path)?;
        let own = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
        let mut command = Command::new(own);
        command.args(["member", "exec", "--parent", &std::process::id().to_string(), "--"]).args(run);
        for variable in OWN_VARIABLES {
            command.env_remove(variable);
        }
        command.envs(environment).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("cannot start {name}: {e}"))?;
        let group = child.id().and_then(|pid| Pid::from_raw(pid as i32));
        let tail = Arc::new(Mutex::new(Tail::default()));
        let mut copies = Vec::new();
        if let Some(out) = child.stdout.take() {
            copies.push(tokio::spawn(copy(out, std::io::stdout(), Arc::clone(&tail))));
        }
        if let Some(out) = child.stderr.take() {
            copies.push(tokio::spawn(copy(out, std::io::stderr(), Arc::clone(&tail))));
        }
        Ok(Program { child, group, tail, copies, deadline: None })
    }

    /// Asks it to end, and ends it after `grace`; asked again, the first time counts.
    pub fn ask_to_end(&mut self, grace: Duration) {
        if self.deadline.is_none() {
            self.deadline = Some(Instant::now() + grace);
            self.signal(Signal::TERM);
        }
    }

    /// Waits for its end. May be dropped and called again.
    pub async fn ended(&mut self) -> ProgramEnd {
        let deadline = self.deadline;
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        let status = tokio::select! {
            status = self.child.wait() => status,
            () = late => {
                self.signal(Signal::KILL);
                self.child.wait().await
            }
        };
        // What it has left behind would hold its port.
        self.signal(Signal::KILL);
        for mut copy in self.copies.drain(..) {
            if tokio::time::timeout(OUTPUT_LIMIT, &mut copy).await.is_err() {
                copy.abort();
            }
        }
        match status {
            Ok(status) => told(status, lock(&self.tail).lines()),
            Err(e) => ProgramEnd {
                last_lines: vec![format!("cannot learn how the program ended: {e}")],
                ..ProgramEnd::default()
            },
        }
    }

    /// Signals everything that belongs to it. What is gone already needs no signal.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, signal);
        }
    }
}

/// Finds a program as a shell would, so that one that is not there is told before anything is tried.
fn find(name: &str, path: &str) -> Result<PathBuf, String> {
    let can_run = |file: &Path| file.is_file() && access(file, Access::EXEC_OK).is_ok();
    if name.contains('/') {
        let file = PathBuf::from(name);
        let why = if file.exists() { "it is no program that may be run" } else { "there is no such file" };
        return if can_run(&file) { Ok(file) } else { Err(format!("cannot start {name}: {why}")) };
    }
    let found = std::env::split_paths(path).map(|dir| dir.join(name)).find(|file| can_run(file));
    found.ok_or_else(|| format!("cannot start {name}: there is no such program in PATH ({path})"))
}

/// Hands on what the program writes, and keeps the last of it.
async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl Write, tail: Arc<Mutex<Tail>>) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(n) => {
                // A log that cannot be written is no reason to hold the program up.
                let _ = to.write_all(&buffer[..n]).and_then(|()| to.flush());
                lock(&tail).push(&buffer[..n]);
            }
        }
    }
}

fn lock(tail: &Mutex<Tail>) -> MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last lines of a text.
#[derive(Debug, Default)]
struct Tail {
    whole: VecDeque<Vec<u8>>,
    begun: Vec<u8>,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        let mut parts = bytes.split(|byte| *byte == b'\n');
        let first = parts.next().unwrap_or_default();
        self.extend(first);
        for part in parts {
            let line = std::mem::take(&mut self.begun);
            if !line.is_empty() {
                self.whole.push_back(line);
            }
            if self.whole.len() > LINES {
                self.whole.pop_front();
            }
            self.extend(part);
        }
    }

    fn extend(&mut self, part: &[u8]) {
        let room = LINE_BYTES_MAX.saturating_sub(self.begun.len());
        self.begun.extend_from_slice(&part[..part.len().min(room)]);
    }

    fn lines(&self) -> Vec<String> {
        let begun = Some(&self.begun).filter(|line| !line.is_empty());
        let lines: Vec<&Vec<u8>> = self.whole.iter().chain(begun).collect();
        let text = |line: &&Vec<u8>| String::from_utf8_lossy(line).trim_end().to_string();
        lines[lines.len().saturating_sub(LINES)..].iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_however_they_come() {
        let mut tail = Tail::default();
        for n in 0..30 {
            tail.push(format!("line {n}\n\nli").as_bytes());
            tail.push(b"ne!\r\n");
        }
        tail.push(b"begun");
        let lines = tail.lines();
        assert_eq!((lines.len(), lines[10].as_str(), lines[11].as_str()), (LINES, "line!", "begun"));
        tail.push(&vec![b'x'; 5000]);
        assert_eq!(tail.lines()[11].len(), LINE_BYTES_MAX);
    }

    #[test]
    fn a_program_that_is_not_there_is_told_apart() {
        assert_eq!(find("sh", "/nowhere:/bin").unwrap(), PathBuf::from("/bin/sh"));
        let missing = find("no-such-program", "/bin").unwrap_err();
        assert_eq!(missing, "cannot start no-such-program: there is no such program in PATH (/bin)");
        assert_eq!(find("./none", "/bin").unwrap_err(), "cannot start ./none: there is no such file");
        assert_eq!(
            find("/etc/passwd", "/bin").unwrap_err(),
            "cannot start /etc/passwd: it is no program that may be run"
        );
    }
}
