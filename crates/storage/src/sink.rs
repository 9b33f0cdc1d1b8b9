//! A new file or object, of any length, that is there under its name only once it is finished.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};

use object_store::{MultipartUpload, ObjectStoreExt};

use crate::bucket::Place;
use crate::direct::Direct;
use crate::edge::{spawn, wait};
use crate::either;
use crate::is_url;

/// Bytes of a part of a large object. There may be 10,000 parts.
const PART: usize = 16 << 20;
/// Parts under way.
const AT_ONCE: usize = 4;

/// Begins a file. What is not finished is not there.
pub fn create(name: impl AsRef<Path>) -> io::Result<Sink> {
    either!(name, place => Ok(Sink(Inner::Object(Upload::new(place)))), path => {
        // With a leading dot: no pattern finds it.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.unfinished"));
        let file = Direct::new(File::create(&temporary)?);
        Ok(Sink(Inner::File { file, temporary, path: path.into(), finished: false }))
    })
}

/// A file that is being written.
#[derive(Debug)]
pub struct Sink(Inner);

#[derive(Debug)]
enum Inner {
    File { file: Direct, temporary: PathBuf, path: PathBuf, finished: bool },
    Object(Upload),
}

impl Sink {
    /// Makes the content durable and gives the file its name; see [`crate::sync_dir`] for how durable that is.
    pub fn finish(mut self) -> io::Result<()> {
        match &mut self.0 {
            Inner::Object(upload) => upload.finish(),
            Inner::File { file, temporary, path, finished } => {
                file.finish()?;
                fs::rename(temporary, path)?;
                *finished = true;
                Ok(())
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        match self {
            // Whatever ended the writing is what to tell of.
            Inner::File { temporary, finished: false, .. } => drop(fs::remove_file(temporary)),
            Inner::File { .. } => {}
            Inner::Object(upload) => upload.abandon(),
        }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Inner::File { file, .. } => file.write(bytes),
            Inner::Object(upload) => upload.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An object on its way: in one call where it is small, else in parts.
#[derive(Debug)]
struct Upload {
    place: Place,
    buffer: Vec<u8>,
    parts: Option<Box<dyn MultipartUpload>>,
    under_way: VecDeque<Receiver<io::Result<()>>>,
}

impl Upload {
    fn new(place: Place) -> Self {
        Upload { place, buffer: Vec::new(), parts: None, under_way: VecDeque::new() }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PART - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == PART {
            self.send_part()?;
        }
        Ok(taken)
    }

    fn send_part(&mut self) -> io::Result<()> {
        if self.parts.is_none() {
            let (place, refused) = (self.place.clone(), self.place.refused());
            self.parts =
                Some(wait(async move { place.store.put_multipart(&place.key).await.map_err(refused) })?);
        }
        let parts = self.parts.as_mut().expect("it was just begun");
        let (part, refused) = (parts.put_part(std::mem::take(&mut self.buffer).into()), self.place.refused());
        let (tell, told) = sync_channel(1);
        // Where nobody waits any more, another part has failed.
        spawn(async move { drop(tell.send(part.await.map_err(refused))) })?;
        self.under_way.push_back(told);
        self.settle(AT_ONCE)
    }

    /// Waits until at most so many parts are under way.
    fn settle(&mut self, left: usize) -> io::Result<()> {
        while self.under_way.len() > left {
            let oldest = self.under_way.pop_front().expect("there is one");
            oldest.recv().unwrap_or_else(|_| Err(io::Error::other("a part was not sent")))?;
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.parts.is_none() {
            return self.place.put(std::mem::take(&mut self.buffer));
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        self.settle(0)?;
        let mut parts = self.parts.take().expect("parts were sent");
        let refused = self.place.refused();
        wait(async move { parts.complete().await.map(drop).map_err(refused) })
    }

    /// Lets object storage forget the parts; what it does not forget costs room until the bucket's rules remove it.
    fn abandon(&mut self) {
        if let Some(mut parts) = self.parts.take() {
            let _ = spawn(async move { drop(parts.abort().await) });
        }
    }
}
