//! Processes of this machine, held by a handle that can never come to mean another process.
//!
//! A process id is given again once its process is gone; a pidfd is not. So whatever is to be signalled or
//! watched is opened first and looked at afterwards: what is then found to be alive behind the handle is
//! what was looked at.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use elasticdl_master::config::Process;
use elasticdl_spec::mix::{hash_text, mix2};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The start time among the fields that follow the command's name in `/proc/PID/stat`; there it is the 22nd
/// of all fields, and the name is the second.
const START_FIELD: usize = 22 - 3;

/// A process, whether it still runs or not.
#[derive(Debug)]
pub struct Handle {
    pid: u32,
    fd: OwnedFd,
}

impl Handle {
    /// The process that has this id now.
    pub fn open(pid: u32) -> io::Result<Handle> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        Ok(Handle { pid, fd: pidfd_open(raw, PidfdFlags::empty())? })
    }

    /// This very process, where it still runs.
    pub fn of(process: Process) -> Option<Handle> {
        let handle = Handle::open(process.pid).ok()?;
        let same = started(process.pid).is_ok_and(|started| started == process.started);
        // Asked last: a process that has ended meanwhile may have left its id to the one that was looked at.
        (same && handle.is_alive()).then_some(handle)
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(self.poll(Some(&at_once)), Ok(0))
    }

    /// Waits until it has ended.
    pub fn wait(&self) -> io::Result<()> {
        self.poll(None).map(|_| ())
    }

    /// Signals it. One that has ended gets nothing, and neither does whoever has its id by then.
    pub fn send(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.fd, signal)?)
    }

    /// How many of one handle say that their process has ended.
    fn poll(&self, limit: Option<&Timespec>) -> io::Result<usize> {
        loop {
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], limit) {
                Err(rustix::io::Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }
}

/// A number for when the process with this id was started; no two processes with one id share it, not even
/// across a restart of the machine.
pub fn started(pid: u32) -> io::Result<u64> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = start_ticks(&stat).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has no start time"))
    })?;
    Ok(mix2(hash_text(boot.trim()), ticks))
}

/// The start time in the text of `/proc/PID/stat`. The command's name may hold spaces and parentheses.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(START_FIELD)?.parse().ok()
}

/// The children of a process, as far as its first thread has started them.
pub fn children(pid: u32) -> Vec<Pid> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// The command line of a process.
pub fn command_line(pid: u32) -> io::Result<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut words: Vec<String> = words.collect();
    // Each word ends with a zero, the last one too.
    words.pop();
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    /// A process that ends when its stdin is closed.
    fn cat() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        for name in ["cat", "a b", "(sd-pam)", "x) R 1 2 (y"] {
            assert_eq!(start_ticks(&format!("77 ({name}) {rest}")), Some(4711), "{name}");
        }
        assert_eq!(start_ticks("77 (cat) S 1 2"), None);
    }

    #[test]
    fn a_process_is_known_by_its_id_and_start_time_while_it_runs() {
        let mut child = cat();
        let process = Process { pid: child.id(), started: started(child.id()).unwrap() };
        let handle = Handle::of(process).unwrap();
        assert!(handle.is_alive());
        assert!(Handle::of(Process { started: process.started ^ 1, ..process }).is_none(), "another one's");
        handle.send(Signal::KILL).unwrap();
        handle.wait().unwrap();
        assert!(!handle.is_alive());
        assert!(Handle::of(process).is_none(), "dead, though nobody has asked for its exit code");
        child.wait().unwrap();
        assert!(Handle::of(process).is_none(), "gone");
        assert!(handle.send(Signal::KILL).is_err());
    }

    #[test]
    fn a_command_line_comes_in_words() {
        let mut cat =
            Command::new("cat").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        cat.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        // Once it has answered it has surely become what it was started as.
        cat.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(command_line(cat.id()).unwrap(), ["cat", "-"]);
        drop(cat.stdin.take());
        cat.wait().unwrap();
    }
}
