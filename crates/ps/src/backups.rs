//! Backups of partitions that other servers serve.
//!
//! A thread for each: it copies the partition while that is trained on, then follows it: whatever was done to it is
//! done here in the same order, and only then does the other server tell anybody of it. A backup is kept, whatever
//! becomes of the other server, until the master says what it is to be: the partition itself, or nothing.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for another server and keeps deadlines")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use elasticdl_spec::PartitionId;
use elasticdl_wire::connection::Caller;
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, kind};
use tracing::{info, warn};

use crate::closed::Closed;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::moving::{Copy, PATIENCE, PAUSE, Peer, catch_up};
use crate::partition::Partition;
use crate::partitions::{Gauges, Partitions};
use crate::requests::Requests;
use crate::requests::follow::Followed;

/// What is to be backed up.
#[derive(Debug, Clone)]
pub struct Order {
    /// Where the partition is.
    pub from: String,
    /// The partition, with its incarnation.
    pub part: (PartitionId, u64),
}

/// The backups that a server has.
#[derive(Debug, Default)]
pub struct Backups {
    held: Mutex<BTreeMap<PartitionId, Backup>>,
}

#[derive(Debug)]
struct Backup {
    incarnation: u64,
    /// Nothing but the backup.
    shadow: Arc<Partitions>,
    /// Whether it follows the partition, or is still being copied.
    follows: bool,
    cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Backups {
    /// Begins to back a partition up. `outcome` hears when all that was done is here too, or why that cannot be.
    pub fn start(
        self: &Arc<Self>,
        order: Order,
        model: &Arc<Model>,
        caller: &Caller,
        outcome: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        let (id, incarnation) = order.part;
        let (cancelled, shadow) =
            (Arc::new(AtomicBool::new(false)), Arc::new(Partitions::new(Arc::clone(model))));
        let work = Work {
            order,
            shadow: Arc::clone(&shadow),
            caller: caller.clone(),
            cancelled: Arc::clone(&cancelled),
            backups: Arc::clone(self),
        };
        let mut held = self.held();
        if let Some(before) = held.remove(&id) {
            before.cancelled.store(true, Ordering::Relaxed);
        }
        let thread = Builder::new().name(format!("ps-backup-{}", id.0)).spawn(move || work.run(outcome));
        let thread = Some(thread.map_err(|e| Error::io("starting to back a partition up", e))?);
        held.insert(id, Backup { incarnation, shadow, follows: false, cancelled, thread });
        Ok(())
    }

    /// The backup of this life of a partition, which follows it no more from now on. `None`: there is none.
    pub fn take(&self, part: (PartitionId, u64)) -> Option<Partition> {
        let mut backup = self.remove(part)?;
        if let Some(thread) = backup.thread.take()
            && thread.join().is_err()
        {
            return None;
        }
        backup.shadow.take(part.0).filter(|_| backup.follows)
    }

    /// A backup is none any more.
    pub fn forget(&self, part: (PartitionId, u64)) {
        drop(self.remove(part));
    }

    /// Adds what there is to tell of them.
    ///
    /// # Errors
    ///
    /// [`Error::Torn`] where a panic left one half-changed.
    pub fn add_to(&self, gauges: &mut Gauges) -> Result<()> {
        for (id, backup) in self.held().iter() {
            gauges.backs.insert(id.0, backup.incarnation);
            gauges.backup_bytes += backup.shadow.gauges()?.bytes;
        }
        Ok(())
    }

    fn remove(&self, (id, incarnation): (PartitionId, u64)) -> Option<Backup> {
        let mut held = self.held();
        held.get(&id).filter(|backup| backup.incarnation == incarnation)?;
        let backup = held.remove(&id)?;
        backup.cancelled.store(true, Ordering::Relaxed);
        Some(backup)
    }

    fn forget_one(&self, id: PartitionId, shadow: &Arc<Partitions>) {
        let mut held = self.held();
        if held.get(&id).is_some_and(|backup| Arc::ptr_eq(&backup.shadow, shadow)) {
            held.remove(&id);
        }
    }

    /// A backup has all that was done. `false`: it is not wanted any more.
    fn follows(&self, id: PartitionId, shadow: &Arc<Partitions>) -> bool {
        let mut held = self.held();
        let ours = held.get_mut(&id).filter(|backup| Arc::ptr_eq(&backup.shadow, shadow));
        ours.map(|backup| backup.follows = true).is_some()
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<PartitionId, Backup>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads end by themselves.
impl Drop for Backup {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// What the thread of a backup has.
struct Work {
    order: Order,
    shadow: Arc<Partitions>,
    caller: Caller,
    cancelled: Arc<AtomicBool>,
    backups: Arc<Backups>,
}

impl Work {
    fn run(self, outcome: impl FnOnce(Result<()>)) {
        let Work { order, shadow, caller, cancelled, backups } = self;
        let (id, begun) = (order.part.0, Instant::now());
        let mut peer = match copy(&order, &shadow, &caller, &cancelled) {
            Ok(peer) => peer,
            Err(error) => {
                backups.forget_one(id, &shadow);
                return outcome(Err(error));
            }
        };
        if !backups.follows(id, &shadow) {
            return;
        }
        let rows = shadow.gauges().map_or(0, |gauges| gauges.rows);
        info!(from = order.from, %id, rows, seconds = begun.elapsed().as_secs_f64(), "backed up");
        outcome(Ok(()));
        match keep_up(&mut peer, &shadow, &cancelled) {
            Ok(()) => info!(from = order.from, %id, "backed up no more"),
            Err(error) => {
                warn!(from = order.from, %id, error = %error.chain(), "a partition cannot be followed")
            }
        }
    }
}

/// Copies a partition until nothing is lacking; from then on the peer tells what is done.
fn copy<'c>(
    order: &Order,
    shadow: &Partitions,
    caller: &Caller,
    cancelled: &'c AtomicBool,
) -> Result<Peer<'c>> {
    let (id, incarnation) = order.part;
    let model = shadow.model();
    let mut peer = Peer::open(&order.from, caller, cancelled)?;
    let mut copy = Copy::new(Partition::new(Arc::clone(model), id, incarnation), order.part);
    let until = Instant::now() + PATIENCE;
    let (kept, rows) = loop {
        catch_up(std::slice::from_mut(&mut copy), &mut peer)?;
        match peer.follow(order.part, model)? {
            Followed::Yes(lacking) => break *lacking,
            Followed::NotNow if Instant::now() < until && !cancelled.load(Ordering::Relaxed) => {
                std::thread::sleep(PAUSE);
            }
            refusal => {
                let reason = match refusal {
                    Followed::NotNow => "rows change faster than they can be copied",
                    _ => "it is not there any more",
                };
                return Err(Error::Misfit { partition: id, reason: reason.into() });
            }
        }
    };
    let mut partition = copy.into_partition();
    rows.iter().try_for_each(|some| partition.put_rows(some))?;
    partition.take_over(kept.head, kept.tensors)?;
    shadow.open(partition);
    Ok(peer)
}

/// Does what is done to the partition, until the backup is none any more or the other server is gone.
fn keep_up(peer: &mut Peer<'_>, shadow: &Partitions, cancelled: &AtomicBool) -> Result<()> {
    let (mut requests, mut reply) = (Requests::new(shadow, Limits::default()), Frame::default());
    let mut done = 0;
    while !cancelled.load(Ordering::Relaxed) {
        let Some(frames) = peer.next(done)? else { break };
        for frame in &frames {
            also(shadow, &mut requests, frame, &mut reply)?;
            done += 1;
        }
        if !frames.is_empty() && failpoint::reached("ps.backup_done") {
            let broken = std::io::Error::other("a failpoint says so");
            return Err(Error::io("telling what the backup has done", broken));
        }
    }
    Ok(())
}

/// Does what was done.
fn also(shadow: &Partitions, requests: &mut Requests<'_>, frame: &Frame, reply: &mut Frame) -> Result<()> {
    let mut payload = frame.payload();
    match frame.kind() {
        kind::CLOSE => {
            ps::take_part(&mut payload)?;
            let covered: Closed = serde_json::from_slice(payload.take_bytes()?).map_err(Error::Covered)?;
            shadow.close(&covered);
            Ok(())
        }
        kind::SETTLE => {
            shadow.settle();
            Ok(())
        }
        _ => requests.answer(frame, reply),
    }
}
