//! What the servers of these tests log: all into one place, where a peer's address tells lines apart.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, Once};

use crate::PATIENCE;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

/// From now on every line is kept.
pub fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let lines = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
        lines.with_writer(|| Lines).init();
    });
}

/// The line that says how this peer's connection has ended; waits for it.
pub fn end_of(peer: SocketAddr) -> String {
    let peer = format!("peer={peer}");
    let is_it = |line: &&String| line.contains(": connection ") && line.split(' ').any(|word| word == peer);
    let lines = LINES.lock().unwrap();
    let lines = CHANGED.wait_timeout_while(lines, PATIENCE, |lines| !lines.iter().any(|line| is_it(&line)));
    let line = lines.unwrap().0.iter().find(is_it).cloned();
    line.unwrap_or_else(|| panic!("nothing is said of the end of {peer}"))
}

/// A line comes in one piece.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LINES.lock().unwrap().push(String::from_utf8_lossy(line).trim_end().into());
        CHANGED.notify_all();
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
