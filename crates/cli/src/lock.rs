//! Locks that end with their holder: a file, locked through the kernel, that says who holds it.
//!
//! A process that dies in any way gives its locks back; nothing stale can keep a job from starting.

#![expect(clippy::disallowed_methods, reason = "an edge: a lock is tried again for a moment")]

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Who holds a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The job.
    pub job: String,
    /// Its process.
    pub pid: u32,
}

/// A lock, held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Why a lock was not given.
#[derive(Debug)]
pub enum Refused {
    /// Somebody has it; who, where they have said so.
    Held(Option<Holder>),
    /// The file cannot be used.
    Io(io::Error),
}

/// How often a held lock is tried again, and the pause between: [`holder`] of another process holds it
/// for an instant, and that must not keep a master from starting.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);

impl Lock {
    /// Takes the lock at `path` for `job`.
    pub fn take(path: &Path, job: &str) -> Result<Lock, Refused> {
        let mut file = open(path).map_err(Refused::Io)?;
        for tried in 1.. {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if tried < TRIES => thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Err(Refused::Held(read(&mut file))),
                Err(TryLockError::Error(e)) => return Err(Refused::Io(e)),
            }
        }
        let holder = Holder { job: job.into(), pid: std::process::id() };
        let text = serde_json::to_string(&holder).expect("a name and a number are JSON");
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(Refused::Io)?;
        Ok(Lock { _file: file })
    }
}

/// Who holds the lock at `path`: `None` where nobody does, `Some(None)` where the holder has not yet said
/// who it is.
pub fn holder(path: &Path) -> Option<Option<Holder>> {
    let mut file = File::open(path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(read(&mut file)),
        _ => None,
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn read(file: &mut File) -> Option<Holder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_taker_learns_who_was_first_and_a_dropped_lock_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(holder(&path), None);
        let lock = Lock::take(&path, "ctr").unwrap();
        let me = Holder { job: "ctr".into(), pid: std::process::id() };
        assert_eq!(holder(&path), Some(Some(me.clone())));
        assert!(matches!(Lock::take(&path, "other"), Err(Refused::Held(Some(h))) if h == me));
        drop(lock);
        assert_eq!(holder(&path), None);
        drop(Lock::take(&path, "other").unwrap());
    }
}
