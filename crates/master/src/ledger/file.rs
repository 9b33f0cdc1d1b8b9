//! Edge: the ledger on disk. One file at a time, beginning with a snapshot of the book; when it has grown
//! long, the next one is written whole, made durable, and takes its place by a rename.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::kept::{Lasting, Medium};
use super::{Book, records};
use crate::error::{Error, Result};

/// Files are numbered from here on in each term, so that no two masters write one, and the newest file is
/// always that of the newest master.
const FILES_PER_TERM: u64 = 1_000_000;

/// A ledger in a directory.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    /// The number of the next file.
    next: u64,
    file: Option<File>,
}

/// The book in the directory `dir`; `None` where no master has ever begun.
pub(super) fn read(dir: &Path) -> Result<Option<Book>> {
    match newest(dir).map_err(|e| Error::io(format!("listing {}", dir.display()), e))? {
        Some((_, path)) => Ok(Some(read_file(&path)?)),
        None => Ok(None),
    }
}

impl Files {
    /// Keeps the ledger of the master with this term in `dir`.
    pub fn new(dir: &Path, term: u64) -> io::Result<Files> {
        fs::create_dir_all(dir)?;
        let after = newest(dir)?.map_or(0, |(number, _)| number + 1);
        Ok(Files { dir: dir.into(), next: after.max(term * FILES_PER_TERM), file: None })
    }

    /// Removes files that the present one has replaced. One that cannot be removed is in nobody's way.
    fn sweep(&self) {
        for (number, path) in files(&self.dir).unwrap_or_default() {
            if number + 1 < self.next
                && let Err(error) = fs::remove_file(&path)
            {
                tracing::warn!(%error, path = %path.display(), "cannot remove an old ledger file");
            }
        }
    }
}

impl Medium for Files {
    fn begin(&mut self, snapshot: &[u8]) -> io::Result<()> {
        let path = self.dir.join(format!("ledger-{:06}.log", self.next));
        elasticdl_storage::replace(&path, snapshot)?;
        self.file = Some(OpenOptions::new().append(true).open(&path)?);
        self.next += 1;
        self.sweep();
        Ok(())
    }

    fn append(&mut self, records: &[u8], lasting: Lasting) -> io::Result<()> {
        let file = self.file.as_mut().expect("a ledger begins with a snapshot");
        file.write_all(records)?;
        if lasting == Lasting::Now { file.sync_data() } else { Ok(()) }
    }

    fn is_scattered(&self) -> bool {
        false
    }
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

fn newest(dir: &Path) -> io::Result<Option<(u64, PathBuf)>> {
    Ok(files(dir)?.into_iter().next_back())
}

/// Ledger files by number.
pub(super) fn files(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
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
