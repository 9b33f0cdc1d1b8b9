//! Edge: the ledger in object storage, a segment for every stretch of entries; see [`super::segments`].
//!
//! A thread writes the segments, one after the other. What comes while it writes goes into the next one together;
//! leases and what is done are gathered for a moment, so that a busy job pays for few calls and waits for none.
//! Only where an entry must last does the master wait, for that segment and so for all before it.
#![expect(clippy::disallowed_methods, reason = "an edge: a thread that gathers entries for a moment")]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Book;
use super::kept::{Lasting, Medium};
use super::segments::{self, Kind, Segment};
use crate::error::{Error, Result};

/// How long entries that need not last are gathered.
const GATHER: Duration = Duration::from_secs(1);
/// A snapshot takes the place of more segments than this: reading them takes a master that begins some seconds.
const SEGMENTS_MAX: u64 = 256;
/// How often a ledger is looked at again whose segments are swept while it is read.
const TRIES: u32 = 5;

/// The book in the directory `dir`; `None` where no master has ever begun.
pub(super) fn read(dir: &Path) -> Result<Option<Book>> {
    let shown = || dir.display().to_string();
    for tried in 1.. {
        let names = elasticdl_storage::list(dir).map_err(|e| Error::io(format!("listing {}", shown()), e))?;
        let wrong = |reason| Error::Ledger { path: shown(), reason };
        let chain = segments::chain(&names).map_err(wrong)?;
        if chain.is_empty() {
            return Ok(None);
        }
        let paths: Vec<PathBuf> = chain.iter().map(|segment| dir.join(segment.name())).collect();
        match elasticdl_storage::read_all(&paths) {
            Ok(contents) => return segments::book(&chain, &contents).map(Some).map_err(wrong),
            // Listed and gone: a newer snapshot has taken its place since.
            Err(e) if e.kind() == io::ErrorKind::NotFound && tried < TRIES => {}
            Err(e) => return Err(Error::io(format!("reading {}", shown()), e)),
        }
    }
    unreachable!("the last try returns")
}

/// A ledger in object storage.
#[derive(Debug)]
pub(super) struct Objects {
    orders: Option<Sender<Order>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread tells of itself.
#[derive(Debug, Default)]
struct Shared {
    /// Segments since the last snapshot.
    segments: AtomicU64,
    /// Why a write failed; nothing is written after that.
    failed: Mutex<Option<(io::ErrorKind, String)>>,
}

#[derive(Debug)]
struct Order {
    bytes: Vec<u8>,
    kind: Kind,
    lasting: Lasting,
    /// Told when it is durable.
    done: Option<SyncSender<()>>,
}

impl Objects {
    /// Keeps the ledger of the master with this term in `dir`.
    pub fn new(dir: &Path, term: u64) -> io::Result<Objects> {
        let (orders, inbox) = channel();
        let shared = Arc::new(Shared::default());
        let mut writer = Writer { dir: dir.into(), term, next: 0, shared: Arc::clone(&shared) };
        let work = move || writer.run(&inbox);
        let thread = thread::Builder::new().name("ledger".into()).spawn(work)?;
        Ok(Objects { orders: Some(orders), shared, thread: Some(thread) })
    }

    fn order(&self, bytes: &[u8], kind: Kind, lasting: Lasting) -> io::Result<()> {
        self.shared.check()?;
        let (done, told) = sync_channel(1);
        let waits = lasting == Lasting::Now;
        let order = Order { bytes: bytes.into(), kind, lasting, done: waits.then_some(done) };
        let orders = self.orders.as_ref().expect("it is open as long as it lives");
        if orders.send(order).is_ok() && (!waits || told.recv().is_ok()) {
            return Ok(());
        }
        self.shared.check()?;
        Err(io::Error::other("the thread that writes it is gone"))
    }
}

impl Shared {
    fn check(&self) -> io::Result<()> {
        match &*self.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
            None => Ok(()),
        }
    }
}

impl Medium for Objects {
    fn begin(&mut self, snapshot: &[u8]) -> io::Result<()> {
        self.order(snapshot, Kind::Snapshot, Lasting::Now)
    }

    fn append(&mut self, records: &[u8], lasting: Lasting) -> io::Result<()> {
        self.order(records, Kind::Entries, lasting)
    }

    fn is_scattered(&self) -> bool {
        self.shared.segments.load(Ordering::Relaxed) > SEGMENTS_MAX
    }
}

impl Drop for Objects {
    /// What was gathered is written: a master that ends in order leaves nothing behind.
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was told to whoever waited for it.
            let _ = thread.join();
        }
    }
}

/// What goes into the next segment.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    snapshot: bool,
    done: Vec<SyncSender<()>>,
}

impl Batch {
    /// Takes an order in. A snapshot holds what was gathered before it.
    fn take(&mut self, order: Order) {
        if order.kind == Kind::Snapshot {
            self.bytes.clear();
            self.snapshot = true;
        }
        self.bytes.extend(order.bytes);
        self.done.extend(order.done);
    }
}

/// The thread that writes.
struct Writer {
    dir: PathBuf,
    term: u64,
    next: u64,
    shared: Arc<Shared>,
}

impl Writer {
    fn run(&mut self, orders: &Receiver<Order>) {
        while let Ok(first) = orders.recv() {
            let batch = gather(first, orders);
            if let Err(error) = self.write(batch) {
                let mut failed = self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
                *failed = Some((error.kind(), elasticdl_spec::error::chain(&error)));
                return;
            }
        }
    }

    fn write(&mut self, batch: Batch) -> io::Result<()> {
        let kind = if batch.snapshot { Kind::Snapshot } else { Kind::Entries };
        let segment = Segment { term: self.term, number: self.next, kind };
        elasticdl_storage::replace(self.dir.join(segment.name()), &batch.bytes)?;
        self.next += 1;
        // Whoever waited may have been stopped.
        for done in batch.done {
            let _ = done.send(());
        }
        if batch.snapshot {
            self.shared.segments.store(0, Ordering::Relaxed);
            self.sweep(segment);
        } else {
            self.shared.segments.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Removes what a snapshot has replaced. What cannot be removed is in nobody's way.
    fn sweep(&self, snapshot: Segment) {
        let names = elasticdl_storage::list(&self.dir).unwrap_or_default();
        let older = names.iter().filter_map(|name| Segment::of(name)).filter(|segment| *segment < snapshot);
        let older: Vec<PathBuf> = older.map(|segment| self.dir.join(segment.name())).collect();
        if let Err(error) = elasticdl_storage::remove_each(&older) {
            tracing::warn!(%error, "cannot remove old parts of the ledger");
        }
    }
}

/// What goes into one segment: all that is there now and, where nothing in it is pressing, all that comes within
/// a moment. A snapshot is a segment of its own.
fn gather(first: Order, orders: &Receiver<Order>) -> Batch {
    let until = Instant::now() + GATHER;
    let mut batch = Batch::default();
    let mut pressing = first.lasting > Lasting::Gathered;
    batch.take(first);
    while !batch.snapshot {
        let left = if pressing { Duration::ZERO } else { until.saturating_duration_since(Instant::now()) };
        match orders.recv_timeout(left) {
            Ok(order) => {
                pressing |= order.lasting > Lasting::Gathered;
                batch.take(order);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    batch
}

#[cfg(test)]
mod tests;
