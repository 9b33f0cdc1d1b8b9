//! A file whose bytes go past the page cache as soon as they are many. To copy them there takes about as much of a
//! processor as all else that makes a checkpoint, takes memory from others, and nobody reads them soon.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Bytes that are written at once.
const PIECE: usize = 4 << 20;
/// What disks and file systems want memory and places in a file to be multiples of, at most.
const ALIGNED: usize = 4096;

/// A file that is written from its beginning to its end.
#[derive(Debug)]
pub(crate) struct Direct {
    file: File,
    room: Vec<u8>,
    /// Where in `room` the piece begins that is being filled, and how much of it is.
    start: usize,
    filled: usize,
    /// Bytes in the file.
    written: u64,
    /// Whether they went past the page cache; `None`: there were none yet.
    past_cache: Option<bool>,
}

impl Direct {
    pub(crate) fn new(file: File) -> Self {
        let room = vec![0; PIECE + ALIGNED];
        let start = room.as_ptr().align_offset(ALIGNED);
        Direct { file, room, start, filled: 0, written: 0, past_cache: None }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE - self.filled);
        self.room[self.start + self.filled..][..taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        if self.filled == PIECE {
            self.write_piece()?;
        }
        Ok(taken)
    }

    /// Writes what is left and makes all of it durable.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        // What is left has any length.
        if self.past_cache == Some(true) {
            pass_cache(&self.file, false)?;
        }
        self.put()?;
        self.file.sync_all()
    }

    fn write_piece(&mut self) -> io::Result<()> {
        let past = *self.past_cache.get_or_insert_with(|| pass_cache(&self.file, true).is_ok());
        match self.put() {
            // Some file systems say so only now.
            Err(error) if past && error.kind() == io::ErrorKind::InvalidInput => {
                pass_cache(&self.file, false)?;
                self.past_cache = Some(false);
                self.put()
            }
            outcome => outcome,
        }
    }

    /// Writes what is filled to its place, however much of it was written before.
    fn put(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.room[self.start..][..self.filled], self.written)?;
        self.written += self.filled as u64;
        self.filled = 0;
        Ok(())
    }
}

fn pass_cache(file: &File, pass: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, pass);
    Ok(fcntl_setfl(file, flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: files of any length have their bytes, those of several pieces too, wherever temporary files lie.
    #[test]
    fn what_is_written_in_odd_parts_is_what_is_read() {
        for length in [0, 1, ALIGNED, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 12_345] {
            for dir in [std::env::temp_dir(), "/dev/shm".into(), ".".into()] {
                let Ok(named) = tempfile::NamedTempFile::new_in(&dir) else { continue };
                let bytes: Vec<u8> = (0..length).map(|i| (i * 31 / 7) as u8).collect();
                let mut direct = Direct::new(named.reopen().unwrap());
                let mut left = &bytes[..];
                while !left.is_empty() {
                    let taken = direct.write(&left[..left.len().min(70_001)]).unwrap();
                    left = &left[taken..];
                }
                direct.finish().unwrap();
                assert!(std::fs::read(named.path()).unwrap() == bytes, "{length} bytes in {}", dir.display());
            }
        }
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut direct = Direct::new(File::options().write(true).open("/dev/full").unwrap());
        let outcome = (|| {
            for _ in 0..3 {
                let mut left = PIECE;
                while left > 0 {
                    left -= direct.write(&vec![7; left])?;
                }
            }
            direct.finish()
        })();
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
