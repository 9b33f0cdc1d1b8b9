//! Starting the cluster's processes so that they outlive this one, and asking whether they still run.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;

/// Enters the groups named before `--`, then becomes what is named after it.
const ENTER_GROUPS: &str = r#"
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 125; shift; done; shift; exec "$@""#;

/// Where the cluster's processes look for others, such as runc and iptables.
const PROGRAMS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process of the cluster. The start time tells it from a later one with the same number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Also the name of its log.
    pub name: String,
    /// The node it serves; `None` for the control plane.
    pub node: Option<String>,
    /// Its number.
    pub pid: u32,
    /// In the kernel's ticks since boot.
    pub started: u64,
}

impl Process {
    /// Starts `command`, which must become the program by exec and not by fork, in a session of its own.
    pub fn start(
        name: &str,
        node: Option<&str>,
        group: &Cgroup,
        log: &Path,
        command: &[OsString],
    ) -> Result<Process> {
        group.create()?;
        let groups = group.directories()?;
        let output = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let errors = output.try_clone().with_context(|| format!("share {}", log.display()))?;
        let child = Command::new("setsid")
            .args(["sh", "-c", ENTER_GROUPS, "sh"])
            .args(&groups)
            .arg("--")
            .args(command)
            // A proxy of this shell, say, is none of the cluster's.
            .env_clear()
            .env("PATH", PROGRAMS)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .current_dir("/")
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let pid = child.id();
        let started =
            start_time(pid).with_context(|| format!("{name} ended at once: see {}", log.display()))?;
        Ok(Process { name: name.to_owned(), node: node.map(str::to_owned), pid, started })
    }

    /// Whether it still runs. A process that nobody has buried yet counts as dead.
    pub fn runs(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }
}

/// When a process started; `None` where it is dead.
fn start_time(pid: u32) -> Option<u64> {
    alive_since(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The 22nd field. The 2nd, a name in brackets, may hold blanks and brackets of its own.
pub fn alive_since(stat: &str) -> Option<u64> {
    let mut after_name = stat.rsplit_once(')')?.1.split_whitespace();
    let state = after_name.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    after_name.nth(18)?.parse().ok()
}

/// A command line from strings and paths.
pub fn command_line<A: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = A>,
) -> Vec<OsString> {
    let mut line = vec![program.as_ref().to_owned()];
    line.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
    line
}

/// Runs a command to its end; what it had to say becomes the error where it fails.
pub fn succeed(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command to its end and returns what it wrote to standard output, where that is captured.
pub fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let first = command.get_args().next().unwrap_or_default().to_string_lossy().into_owned();
    let child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("start {program}"))?;
    let output = child.wait_with_output().with_context(|| format!("wait for {program}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(!errors.trim().is_empty(), "{program} {first} failed: {}", output.status);
    bail!("{program} {first} failed: {}", errors.trim())
}

/// The end of a log, for an error message.
pub fn log_tail(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of `/proc/PID/stat` with that name, state and start time.
    fn stat(name: &str, state: &str, started: u64) -> String {
        let between = (4..22).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        format!("7 ({name}) {state} {between} {started} 23 24")
    }

    #[test]
    fn start_time_is_found_after_a_name_with_blanks_and_brackets() {
        assert_eq!(alive_since(&stat("kubelet", "S", 4711)), Some(4711));
        assert_eq!(alive_since(&stat("a) R (b c", "R", 12)), Some(12));
    }

    #[test]
    fn a_zombie_is_dead() {
        assert_eq!(alive_since(&stat("etcd", "Z", 4711)), None);
    }

    #[test]
    fn this_process_runs_and_its_number_at_another_time_does_not() {
        let pid = std::process::id();
        let started = start_time(pid).unwrap();
        let mut process = Process { name: "this".into(), node: None, pid, started };
        assert!(process.runs());
        process.started += 1;
        assert!(!process.runs());
    }
}
