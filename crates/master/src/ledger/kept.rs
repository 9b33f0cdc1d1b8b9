//! The ledger of a running master: the book, and what keeps it. Where checkpoints are files it is a file
//! ([`super::file`]), where they are objects it is objects ([`super::objects`]).
#![expect(clippy::disallowed_methods, reason = "it measures how long the master waits for its ledger")]

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::file::Files;
use super::objects::Objects;
use super::{Book, Entry, file, objects, records};
use crate::error::{Error, Result};
use crate::store;

/// What was added since the last snapshot is replaced by one when it is longer than this, and than several
/// snapshots.
const BYTES_MAX: u64 = 4 << 20;
const SNAPSHOTS_PER_STRETCH: u64 = 8;

/// How long what follows from records may wait for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lasting {
    /// Losing them costs a look at the marks: they may be gathered for a moment.
    Gathered,
    /// Nothing waits for them, but they are under way at once.
    Soon,
    /// Nothing follows from them before they are durable.
    Now,
}

impl Lasting {
    /// What the most demanding of some entries needs.
    fn of(entries: &[Entry]) -> Lasting {
        let one = |entry: &Entry| match entry {
            entry if entry.must_last() => Lasting::Now,
            Entry::Shard { .. } | Entry::Leased { .. } | Entry::Freed { .. } | Entry::Done { .. } => {
                Lasting::Gathered
            }
            // A process that was started and forgotten would be nobody's.
            _ => Lasting::Soon,
        };
        entries.iter().map(one).max().unwrap_or(Lasting::Gathered)
    }
}

/// What keeps a ledger's records: a snapshot, and what was added since.
pub(super) trait Medium: std::fmt::Debug + Send {
    /// Begins anew with a snapshot, durably; what was kept before is then removed.
    fn begin(&mut self, snapshot: &[u8]) -> io::Result<()>;

    /// Adds records to the end.
    fn append(&mut self, records: &[u8], lasting: Lasting) -> io::Result<()>;

    /// Whether reading it would take long, whatever its length.
    fn is_scattered(&self) -> bool;
}

/// The ledger of a running master.
#[derive(Debug)]
pub struct Ledger {
    checkpoint_dir: PathBuf,
    dir: PathBuf,
    term: u64,
    book: Book,
    medium: Box<dyn Medium>,
    bytes: u64,
    snapshot_bytes: u64,
    /// Whether a write has failed: what is kept is then not known, and nothing more is written.
    broken: bool,
    /// Entries written by this master, and the time that it took.
    pub entries: u64,
    /// How long the master waited for it.
    pub waited: Duration,
}

/// The book in `checkpoint_dir`, if a master has ever begun there. Changes nothing.
///
/// # Errors
///
/// The ledger cannot be read, or is damaged.
pub fn read(checkpoint_dir: &Path) -> Result<Option<Book>> {
    let dir = dir_of(checkpoint_dir);
    if elasticdl_storage::is_url(&dir) { objects::read(&dir) } else { file::read(&dir) }
}

/// Where the ledger of a job is.
pub fn dir_of(checkpoint_dir: &Path) -> PathBuf {
    checkpoint_dir.join("ledger")
}

impl Ledger {
    /// Opens the ledger in `checkpoint_dir`, or begins one, for the master that has claimed `term` there.
    /// It begins with a snapshot of its own: nobody who still has the old one open can change it.
    ///
    /// # Errors
    ///
    /// It cannot be read or written, or is damaged.
    pub fn open(checkpoint_dir: &Path, term: u64) -> Result<Ledger> {
        let dir = dir_of(checkpoint_dir);
        let failed = |e| Error::io(format!("opening the ledger in {}", dir.display()), e);
        let book = read(checkpoint_dir)?.unwrap_or_default();
        let medium: Box<dyn Medium> = if elasticdl_storage::is_url(&dir) {
            Box::new(Objects::new(&dir, term).map_err(failed)?)
        } else {
            Box::new(Files::new(&dir, term).map_err(failed)?)
        };
        let mut ledger = Ledger {
            checkpoint_dir: checkpoint_dir.into(),
            dir: dir.clone(),
            term,
            book,
            medium,
            bytes: 0,
            snapshot_bytes: 0,
            broken: false,
            entries: 0,
            waited: Duration::ZERO,
        };
        ledger.begin().map_err(failed)?;
        Ok(ledger)
    }

    /// What all entries add up to.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// The length of the last snapshot and what was added since.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes entries, and waits until they are durable where one of them must last.
    ///
    /// # Errors
    ///
    /// They cannot be written, or another master leads by now. Nothing may follow from them then; the
    /// master must end.
    pub fn append(&mut self, entries: &[Entry]) -> Result<()> {
        if self.broken {
            return Err(self.failed(io::Error::other("an earlier write failed")));
        }
        let began = Instant::now();
        let lasting = Lasting::of(entries);
        let written = self.write(entries, lasting);
        // After the write: a master that claims a later term from here on will read it.
        let still_leads = match &written {
            Ok(()) if lasting == Lasting::Now => {
                store::claimed_term(&self.checkpoint_dir).map(|t| t == self.term)
            }
            _ => Ok(true),
        };
        self.waited += began.elapsed();
        self.broken = written.is_err() || !matches!(still_leads, Ok(true));
        written.map_err(|error| self.failed(error))?;
        if !still_leads? {
            return Err(Error::Succeeded { term: self.term });
        }
        self.entries += entries.len() as u64;
        Ok(())
    }

    fn write(&mut self, entries: &[Entry], lasting: Lasting) -> io::Result<()> {
        let mut bytes = Vec::new();
        for entry in entries {
            records::append_entry(&mut bytes, entry);
            self.book.apply(entry);
        }
        self.medium.append(&bytes, lasting)?;
        self.bytes += bytes.len() as u64;
        let long = self.bytes > BYTES_MAX && self.bytes > SNAPSHOTS_PER_STRETCH * self.snapshot_bytes;
        if long || self.medium.is_scattered() { self.begin() } else { Ok(()) }
    }

    fn begin(&mut self) -> io::Result<()> {
        let mut bytes = Vec::new();
        records::append_snapshot(&mut bytes, &self.book);
        self.medium.begin(&bytes)?;
        self.bytes = bytes.len() as u64;
        self.snapshot_bytes = self.bytes;
        Ok(())
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::io(format!("writing the ledger in {}", self.dir.display()), error)
    }
}

#[cfg(test)]
mod tests;
