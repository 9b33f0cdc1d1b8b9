//! Bytes by name: files of this machine, and objects in a bucket.
//!
//! A name is a path, or a URL such as `s3://bucket/dir/file`; the functions here are those of `std::fs` for
//! both. What differs: an object is whole or not there, so that nothing is renamed and no directory is made or
//! synced. Settings come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …).
//!
//! This crate knows nothing of jobs and decides nothing; it is the only one that knows `object_store`. All
//! calls block; a passing failure is tried again for a while, a lasting one says what to set.
//!
//! - [`Source`]: an open file or object: reads from any place; objects come in blocks, ahead of the reader.
//! - [`Sink`]: a new file or object, there only once it is finished.
//! - `bucket.rs`: calls to object storage; `disk.rs`: the same for files; `blocks.rs`: parts of objects that were
//!   read; `refusal.rs`: why a call failed, in words.

mod blocks;
mod bucket;
mod direct;
mod disk;
mod edge;
mod refusal;
mod sink;
mod source;

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bucket::Place;

pub use refusal::Refusal;
pub use sink::{Sink, create};
pub use source::{Meta, Source, open, open_again};

/// Whether a name is a URL; else it is a path.
pub fn is_url(name: impl AsRef<Path>) -> bool {
    name.as_ref().to_str().is_some_and(elasticdl_spec::job::is_url)
}

/// Where `name` is, seen from the directory `from`; a URL is the same from everywhere.
pub fn resolve(from: &Path, name: impl AsRef<Path>) -> PathBuf {
    let name = name.as_ref();
    if is_url(name) { name.into() } else { from.join(name) }
}

/// Does it for an object or for a file, whichever a name is of.
macro_rules! either {
    ($name:expr, $place:ident => $object:expr, $path:ident => $file:expr) => {{
        let $path: &Path = $name.as_ref();
        if is_url($path) {
            let $place = Place::of($path)?;
            $object
        } else {
            $file
        }
    }};
}
pub(crate) use either;

/// All of a file.
pub fn read(name: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    either!(name, place => place.read(), path => std::fs::read(path))
}

/// All of several files, in their order.
pub fn read_all(names: &[PathBuf]) -> io::Result<Vec<Vec<u8>>> {
    match names.first() {
        Some(first) if is_url(first) => bucket::read_all(names),
        _ => names.iter().map(read).collect(),
    }
}

/// Writes a file durably; whatever happens, the old one or the new one is there, never a part.
pub fn replace(name: impl AsRef<Path>, content: &[u8]) -> io::Result<()> {
    either!(name, place => place.put(content.to_vec()), path => disk::replace(path, content))
}

/// Writes a file that is not there yet; of several who try at once one succeeds.
///
/// # Errors
///
/// Of the kind [`io::ErrorKind::AlreadyExists`] where it is there.
pub fn create_new(name: impl AsRef<Path>, content: &[u8]) -> io::Result<()> {
    either!(name, place => place.put_new(content.to_vec()), path => disk::create_new(path, content))
}

/// Whether a file is there.
pub fn exists(name: impl AsRef<Path>) -> io::Result<bool> {
    either!(name, place => place.exists(), path => path.try_exists())
}

/// When a file was last written.
pub fn modified(name: impl AsRef<Path>) -> io::Result<SystemTime> {
    either!(name, place => place.modified(), path => std::fs::metadata(path)?.modified())
}

/// Names of what lies directly in a directory, in no certain order; none where it is not there.
pub fn list(dir: impl AsRef<Path>) -> io::Result<Vec<String>> {
    either!(dir, place => place.list(), path => disk::list(path))
}

/// Removes a file; it may be gone already.
pub fn remove(name: impl AsRef<Path>) -> io::Result<()> {
    either!(name, place => place.remove(), path => disk::gone(std::fs::remove_file(path)))
}

/// Removes several files; they may be gone already.
pub fn remove_each(names: &[PathBuf]) -> io::Result<()> {
    match names.first() {
        Some(first) if is_url(first) => bucket::remove_each(names),
        _ => names.iter().try_for_each(remove),
    }
}

/// Removes a directory with all that is in it; it may be gone already.
pub fn remove_all(dir: impl AsRef<Path>) -> io::Result<()> {
    either!(dir, place => place.remove_all(), path => disk::gone(std::fs::remove_dir_all(path)))
}

/// Makes a directory, and those above it. Objects need none.
pub fn make_dir(dir: impl AsRef<Path>) -> io::Result<()> {
    if is_url(&dir) { Ok(()) } else { std::fs::create_dir_all(dir) }
}

/// Makes the names of the files in a directory durable. Those of objects are.
pub fn sync_dir(dir: impl AsRef<Path>) -> io::Result<()> {
    if is_url(&dir) { Ok(()) } else { std::fs::File::open(dir)?.sync_all() }
}

/// Whether a bucket can be reached and looked into where a URL or pattern says, found out without much patience.
pub fn reach(name: impl AsRef<Path>) -> io::Result<()> {
    if is_url(&name) { bucket::reach(name.as_ref()) } else { Ok(()) }
}

/// The bucket of a URL; `None` where a name is a path.
pub fn bucket_of(name: impl AsRef<Path>) -> Option<String> {
    let text = name.as_ref().to_str().filter(|_| is_url(&name))?;
    let bucket_end = text.match_indices('/').nth(2).map_or(text.len(), |(at, _)| at);
    Some(text[..bucket_end].into())
}

/// The URLs of all objects that a URL with wildcards names, sorted.
///
/// # Errors
///
/// Object storage refuses, or the pattern cannot be understood.
pub fn matching(pattern: &str) -> io::Result<Vec<String>> {
    bucket::matching(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_told_from_a_path_and_stands_for_itself() {
        assert!(is_url("s3://bucket/x") && is_url("gs://b"));
        assert!(!is_url("data/x") && !is_url("/a://b") && !is_url("://x"));
        assert_eq!(resolve(Path::new("/home"), "x"), Path::new("/home/x"));
        assert_eq!(resolve(Path::new("/home"), "s3://b/x"), Path::new("s3://b/x"));
        assert_eq!(bucket_of("s3://b/x/y").as_deref(), Some("s3://b"));
        assert_eq!((bucket_of("s3://b").as_deref(), bucket_of("b/x")), (Some("s3://b"), None));
        assert_eq!(Path::new("s3://b/dir/").join("x").display().to_string(), "s3://b/dir/x");
    }

    #[test]
    fn of_files_the_same_holds_as_of_objects() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("a");
        assert!(!exists(&name).unwrap());
        create_new(&name, b"one").unwrap();
        assert_eq!(create_new(&name, b"two").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        replace(&name, b"three").unwrap();
        assert_eq!(read_all(std::slice::from_ref(&name)).unwrap(), [b"three"]);
        assert_eq!(list(dir.path()).unwrap(), ["a"]);
        remove(&name).unwrap();
        remove(&name).unwrap();
        assert!(list(dir.path().join("nowhere")).unwrap().is_empty());
    }

    #[test]
    fn an_unknown_kind_of_storage_is_named() {
        let error = read("ftp://host/x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(error.to_string(), "ftp:// is no object storage that this program knows; s3:// is");
    }
}
