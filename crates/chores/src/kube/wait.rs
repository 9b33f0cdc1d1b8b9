//! Waiting for what another process does, with a deadline, and telling how long it took.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often to look. What is waited for takes a second or so, and looking is cheap.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks until there is a value, and fails after `limit`.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = look()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        thread::sleep(PAUSE);
    }
}

/// Tells on standard error what was reached, with the seconds since the chore began.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    began: Instant,
}

impl Progress {
    /// Begins now.
    pub fn begin() -> Progress {
        Progress { began: Instant::now() }
    }

    /// `[  3.2 s] etcd answers`
    pub fn say(&self, reached: &str) {
        eprintln!("[{:>6.1} s] {reached}", self.began.elapsed().as_secs_f64());
    }
}
