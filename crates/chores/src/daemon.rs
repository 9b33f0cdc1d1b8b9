//! A server of somebody else's, on this machine for as long as it is needed.
#![expect(clippy::disallowed_methods, reason = "it waits for the server to listen")]

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long it may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running server; it ends when this is dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Where it listens.
    pub address: String,
}

impl Daemon {
    /// Starts what `command` makes of a free port of this host, and waits until it listens there.
    pub fn start(host: &str, command: impl FnOnce(u16) -> Command) -> Result<Daemon> {
        // Free a moment ago; nobody else on this machine hurries to take it.
        let port = TcpListener::bind((host, 0)).and_then(|l| l.local_addr()).context("find a port")?.port();
        let mut command = command(port);
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.with_context(|| format!("start {program}"))?;
        let mut daemon = Daemon { child, address: format!("{host}:{port}") };
        let began = Instant::now();
        while TcpStream::connect(&daemon.address).is_err() {
            if let Some(status) = daemon.child.try_wait().with_context(|| format!("look after {program}"))? {
                bail!("{program} ended before it listened: {status}");
            }
            if began.elapsed() > PATIENCE {
                bail!("{program} does not listen at {}", daemon.address);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_at_once_is_not_waited_for() {
        let error = Daemon::start("127.0.0.1", |_| Command::new("false")).unwrap_err().to_string();
        assert_eq!(error, "false ended before it listened: exit status: 1");
    }
}
