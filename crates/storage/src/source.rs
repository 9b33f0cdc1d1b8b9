//! An open file or object, read from any place.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use elasticdl_spec::mix::{hash_text, mix2};

use crate::blocks::{BLOCK, Blocks};
use crate::bucket::Place;
use crate::either;
use crate::is_url;

/// What is known of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Its length.
    pub bytes: u64,
    /// One number that changes when the file does: of length and modification time, of an object its length and
    /// ETag.
    pub fingerprint: u64,
}

/// An open file or object.
#[derive(Debug)]
pub enum Source {
    /// A file of this machine.
    File(File),
    /// An object in a bucket.
    Object(Box<Object>),
}

/// An object that is read block by block, ahead of the reader where it goes from one to the next.
#[derive(Debug, Clone)]
pub struct Object {
    blocks: Blocks,
    meta: Meta,
    position: u64,
    current: Option<(u64, Bytes)>,
    /// Whether it is known to be read from one block to the next.
    in_order: bool,
}

/// Opens a file that was looked at before. An object whose fingerprint this process remembers is not asked for again:
/// of every block that comes it is known whether it is of that version.
pub fn open_again(name: impl AsRef<Path>, fingerprint: u64) -> io::Result<Source> {
    let text = name.as_ref().to_str().unwrap_or_default();
    let known = SEEN.lock().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
    match known.filter(|object| object.meta.fingerprint == fingerprint) {
        Some(object) => Ok(Source::Object(Box::new(object))),
        None => open(name),
    }
}

/// Objects that were opened, by URL.
static SEEN: Mutex<BTreeMap<String, Object>> = Mutex::new(BTreeMap::new());
/// How many are remembered: more files than most jobs have.
const SEEN_MAX: usize = 100_000;

/// Opens a file to read it.
pub fn open(name: impl AsRef<Path>) -> io::Result<Source> {
    either!(
        name,
        place => Object::open(place).map(|object| Source::Object(Box::new(object))),
        path => File::open(path).map(Source::File)
    )
}

impl Source {
    /// What is known of it.
    pub fn meta(&self) -> io::Result<Meta> {
        match self {
            Source::Object(object) => Ok(object.meta),
            Source::File(file) => {
                let found = file.metadata()?;
                let written = mix2(found.mtime() as u64, found.mtime_nsec() as u64);
                Ok(Meta { bytes: found.len(), fingerprint: mix2(found.len(), written) })
            }
        }
    }

    /// Says that it is read from the present place on without a jump: blocks are fetched ahead from the first on.
    pub fn read_in_order(&mut self) {
        if let Source::Object(object) = self {
            object.in_order = true;
        }
    }

    /// Another view of the same file. That of a file shares its position.
    pub fn try_clone(&self) -> io::Result<Source> {
        match self {
            Source::File(file) => file.try_clone().map(Source::File),
            Source::Object(object) => Ok(Source::Object(object.clone())),
        }
    }
}

impl Object {
    fn open(place: Place) -> io::Result<Object> {
        let found = place.look()?;
        let written = || format!("{:?}", found.last_modified);
        let version = hash_text(&found.e_tag.clone().unwrap_or_else(written));
        let meta = Meta { bytes: found.size, fingerprint: mix2(found.size, version) };
        let url = place.url.clone();
        let blocks = Blocks::new(place, found.size, found.e_tag);
        let object = Object { blocks, meta, position: 0, current: None, in_order: false };
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= SEEN_MAX {
            seen.clear();
        }
        seen.insert(url, object.clone());
        Ok(object)
    }

    /// The rest of the block at the present place; nothing at the end.
    fn rest(&mut self) -> io::Result<Bytes> {
        if self.position >= self.meta.bytes {
            return Ok(Bytes::new());
        }
        let number = self.position / BLOCK;
        if self.current.as_ref().is_none_or(|(n, _)| *n != number) {
            let before = self.current.take().map(|(n, _)| n);
            let ahead = self.in_order || before.is_some_and(|before| before + 1 == number);
            self.current = Some((number, self.blocks.get(number, ahead)?));
        }
        let (_, block) = self.current.as_ref().expect("it was just fetched");
        Ok(block.slice((self.position - number * BLOCK) as usize..))
    }
}

impl Read for Object {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = self.rest()?;
        let read = rest.len().min(into.len());
        into[..read].copy_from_slice(&rest[..read]);
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for Object {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, by) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::End(by) => (self.meta.bytes, by),
            SeekFrom::Current(by) => (self.position, by),
        };
        let before =
            || io::Error::new(io::ErrorKind::InvalidInput, "seeking to before the start of an object");
        self.position = base.checked_add_signed(by).ok_or_else(before)?;
        Ok(self.position)
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Source::File(file) => file.read(into),
            Source::Object(object) => object.read(into),
        }
    }
}

impl Seek for Source {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Source::File(file) => file.seek(to),
            Source::Object(object) => object.seek(to),
        }
    }
}
