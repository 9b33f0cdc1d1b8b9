//! Edge: the ledger on disk. One file at a time, beginning with a snapshot of the book; when it has grown
//! long, the next one is written whole, made durable, and takes its place by a rename.
#![expect(clippy::disallowed_methods, reason = "the edge measures how long it waits for the disk")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Book, Entry, records};
use crate::error::{Error, Result};
use crate::store;

/// A file longer than this, and than several snapshots, is replaced by one with a snapshot.
const FILE_MAX: u64 = 4 << 20;
const SNAPSHOTS_PER_FILE: u64 = 8;
/// Files are numbered from here on in each term, so that no two masters write one, and the newest file is
/// always that of the newest master.
const FILES_PER_TERM: u64 = 1_000_000;

/// The ledger of a running master.
#[derive(Debug)]
pub struct Ledger {
    checkpoint_dir: PathBuf,
    dir: PathBuf,
    term: u64,
    book: Book,
    file: File,
    number: u64,
    bytes: u64,
    snapshot_bytes: u64,
    /// Whether a write has failed: what is on disk is then not known, and nothing more is written.
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
    match newest(&dir)? {
        Some((_, path)) => Ok(Some(read_file(&path)?)),
        None => Ok(None),
    }
}

/// Where the ledger of a job is.
pub fn dir_of(checkpoint_dir: &Path) -> PathBuf {
    checkpoint_dir.join("ledger")
}

impl Ledger {
    /// Opens the ledger in `checkpoint_dir`, or begins one, for the master that has claimed `term` there.
    /// What a crash cut off at its end is removed.
    ///
    /// # Errors
    ///
    /// It cannot be read or written, or is damaged.
    pub fn open(checkpoint_dir: &Path, term: u64) -> Result<Ledger> {
        let dir = dir_of(checkpoint_dir);
        let failed = |e| Error::io(format!("opening the ledger in {}", dir.display()), e);
        fs::create_dir_all(&dir).map_err(failed)?;
        let (number, book) = match newest(&dir)? {
            Some((number, path)) => (number, read_file(&path)?),
            None => (0, Book::default()),
        };
        // A new file for every master: nobody who still has the old one open can change it.
        let number = (number + 1).max(term * FILES_PER_TERM);
        let (file, bytes) = begin_file(&dir, number, &book).map_err(failed)?;
        let mut ledger = Ledger {
            checkpoint_dir: checkpoint_dir.into(),
            dir,
            term,
            book,
            file,
            number,
            bytes,
            snapshot_bytes: bytes,
            broken: false,
            entries: 0,
            waited: Duration::ZERO,
        };
        ledger.sweep();
        Ok(ledger)
    }

    /// What all entries add up to.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// The length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes entries, and waits for the disk where one of them must last.
    ///
    /// # Errors
    ///
    /// The disk does not take them, or another master leads by now. Nothing may follow from them then; the
    /// master must end.
    pub fn append(&mut self, entries: &[Entry]) -> Result<()> {
        if self.broken {
            return Err(self.failed(io::Error::other("an earlier write failed")));
        }
        let began = Instant::now();
        let written = self.write(entries);
        self.waited += began.elapsed();
        if let Err(error) = written {
            self.broken = true;
            return Err(self.failed(error));
        }
        // After the write: a master that claims a later term from here on will read it.
        if entries.iter().any(Entry::must_last) && store::claimed_term(&self.checkpoint_dir)? != self.term {
            self.broken = true;
            return Err(Error::Succeeded { term: self.term });
        }
        self.entries += entries.len() as u64;
        Ok(())
    }

    fn write(&mut self, entries: &[Entry]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for entry in entries {
            records::append_entry(&mut bytes, entry);
            self.book.apply(entry);
        }
        self.file.write_all(&bytes)?;
        self.bytes += bytes.len() as u64;
        if entries.iter().any(Entry::must_last) {
            self.file.sync_data()?;
        }
        if self.bytes > FILE_MAX && self.bytes > SNAPSHOTS_PER_FILE * self.snapshot_bytes {
            (self.file, self.bytes) = begin_file(&self.dir, self.number + 1, &self.book)?;
            self.number += 1;
            self.snapshot_bytes = self.bytes;
            self.sweep();
        }
        Ok(())
    }

    /// Removes files that the present one has replaced. One that cannot be removed is in nobody's way.
    fn sweep(&mut self) {
        for (number, path) in files(&self.dir).unwrap_or_default() {
            if number < self.number
                && let Err(error) = fs::remove_file(&path)
            {
                tracing::warn!(%error, path = %path.display(), "cannot remove an old ledger file");
            }
        }
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::io(format!("writing the ledger in {}", self.dir.display()), error)
    }
}

/// Writes a file that holds the book so far, and opens it for more.
fn begin_file(dir: &Path, number: u64, book: &Book) -> io::Result<(File, u64)> {
    let mut bytes = Vec::new();
    records::append_snapshot(&mut bytes, book);
    let path = dir.join(format!("ledger-{number:06}.log"));
    let temporary = path.with_added_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, &path)?;
    File::open(dir)?.sync_all()?;
    let file = OpenOptions::new().append(true).open(&path)?;
    Ok((file, bytes.len() as u64))
}

/// The book that a file adds up to.
fn read_file(path: &Path) -> Result<Book> {
    let bytes = fs::read(path).map_err(|e| Error::io(format!("reading {}", path.display()), e))?;
    let contents =
        records::read(&bytes).map_err(|reason| Error::Ledger { path: path.display().to_string(), reason })?;
    if contents.end < bytes.len() {
        let cut = bytes.len() - contents.end;
        tracing::warn!(path = %path.display(), bytes = cut, "the ledger's end was cut off");
    }
    Ok(contents.book)
}

fn newest(dir: &Path) -> Result<Option<(u64, PathBuf)>> {
    files(dir)
        .map(|files| files.into_iter().next_back())
        .map_err(|e| Error::io(format!("listing {}", dir.display()), e))
}

/// Ledger files by number.
fn files(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let number = path.file_name()?.to_str()?.strip_prefix("ledger-")?.strip_suffix(".log")?;
            Some((number.parse().ok()?, path))
        })
        .collect();
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::TermsOfJob;
    use elasticdl_spec::{LeaseId, TaskId, WorkerId};

    fn leased(shard: u32) -> Entry {
        let (lease, worker) = (LeaseId { term: 1, n: shard.into() }, WorkerId(0));
        Entry::Leased { task: TaskId::train(0, shard), lease, worker, lasting: false }
    }

    fn begun(term: u64) -> Entry {
        Entry::Begun { term, terms_of_job: TermsOfJob::default() }
    }

    /// As a master does: its term first.
    fn open(dir: &Path) -> Result<Ledger> {
        Ledger::open(dir, store::claim_term(dir)?)
    }

    fn only_file(dir: &Path) -> PathBuf {
        let files = files(&dir_of(dir)).unwrap();
        assert_eq!(files.len(), 1, "older files are swept");
        files[0].1.clone()
    }

    #[test]
    fn what_was_written_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let mut ledger = open(dir.path()).unwrap();
        ledger.append(&[begun(1), leased(0)]).unwrap();
        ledger.append(&[leased(1)]).unwrap();
        let book = read(dir.path()).unwrap().unwrap();
        assert_eq!((book.term, book.leased.len()), (1, 2));
        let again = open(dir.path()).unwrap();
        assert_eq!(*again.book(), book);
        only_file(dir.path());
    }

    #[test]
    fn a_torn_end_is_cut_off_and_damage_in_the_middle_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = open(dir.path()).unwrap();
        ledger.append(&[begun(1)]).unwrap();
        ledger.append(&[leased(0), leased(1)]).unwrap();
        drop(ledger);
        let path = only_file(dir.path());
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert_eq!(read(dir.path()).unwrap().unwrap().leased.len(), 1);

        let mut damaged = whole.clone();
        let middle = whole.len() / 2;
        damaged[middle] ^= 1;
        fs::write(&path, &damaged).unwrap();
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("ledger-1000000.log") && error.contains("is damaged"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), damaged, "a damaged ledger is left as it is");
    }

    #[test]
    fn a_long_file_is_replaced_by_a_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = open(dir.path()).unwrap();
        ledger.append(&[begun(1)]).unwrap();
        let entries: Vec<Entry> = (0..1000)
            .flat_map(|_| [leased(7), Entry::Freed { task: TaskId::train(0, 7), between_batches: true }])
            .collect();
        let mut longest = 0;
        for _ in 0..40 {
            ledger.append(&entries).unwrap();
            longest = longest.max(ledger.bytes());
        }
        assert!(longest < FILE_MAX + (1 << 20), "{longest}");
        assert!(ledger.bytes() < longest, "it was replaced at least once");
        assert_eq!(read(dir.path()).unwrap().unwrap(), *ledger.book());
        only_file(dir.path());
    }

    #[test]
    fn a_master_that_has_a_successor_is_told_so_by_its_next_write_that_must_last() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = open(dir.path()).unwrap();
        old.append(&[begun(1), leased(0)]).unwrap();
        let mut new = open(dir.path()).unwrap();
        assert_eq!(new.book().leased.len(), 1);
        new.append(&[begun(2)]).unwrap();
        old.append(&[leased(1)]).unwrap();
        let reborn = Entry::Reborn { partitions: vec![(0, 2)], floor: None };
        let error = old.append(std::slice::from_ref(&reborn)).unwrap_err();
        assert!(matches!(error, Error::Succeeded { term: 1 }), "{error}");
        assert!(old.append(&[leased(2)]).is_err(), "and it writes nothing more");
        let book = read(dir.path()).unwrap().unwrap();
        assert_eq!((book.term, book.leased.len(), book.incarnation(0)), (2, 1, 1));
    }
}
