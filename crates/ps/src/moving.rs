//! Fetching partitions from the server that has them, while it goes on serving them.
//!
//! Rows are copied, then those that changed meanwhile, until few are left. Then the master is asked: it writes down
//! that they are ours, and only then are they handed over. Whatever fails before that leaves them where
//! they are; whatever fails after it is like the death of a server, and the last checkpoint is gone back to.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for another server and keeps deadlines")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use elasticdl_spec::PartitionId;
use elasticdl_wire as wire;
use elasticdl_wire::connection::{Caller, Connection};
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::Frame;
use elasticdl_wire::ps::{self, kind};
use tracing::info;

use crate::checkpoint::Head;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pace::{Pace, of_the_clock};
use crate::partition::Partition;
use crate::partition::copy::Copied;
use crate::requests::copy::{Handed, Left, take_copied, take_handed, take_tensors};
use crate::requests::follow::{Followed, take_followed};

/// Rows asked for at once: a few milliseconds of the other server's time.
const ROWS: usize = 1 << 13;
/// With so many rows left a partition is as good as copied.
const FEW: u64 = 1 << 11;
/// So often is everything that changed copied again before it counts as copied all the same: rows change faster than
/// they travel.
const ROUNDS_MAX: u32 = 20;
/// How long an answer is waited for, and partitions that cannot be handed over at the moment are asked for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(2);
/// While somebody trains, copying all rows rests so many times as long as it takes: it is done in some seconds all the
/// same, and others have most of the processor, the memory and the network. What changes meanwhile is then copied without a rest:
/// the longer that takes, the more there is to copy again.
const REST: u32 = 3;
/// Whoever waited for long does not rest for long.
const WORK_MAX: Duration = Duration::from_millis(20);

/// What is to be fetched.
#[derive(Debug, Clone)]
pub struct Order {
    /// Where the partitions are.
    pub from: String,
    /// The partitions, with their incarnations there.
    pub partitions: Vec<(PartitionId, u64)>,
    /// What their incarnations will be here.
    pub next: Vec<u64>,
}

/// The master's word on partitions that are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// They are ours.
    Take,
    /// Ask again after this time.
    Wait(Duration),
    /// They stay where they are.
    Forget,
}

/// Fetches partitions. `None`: they stay where they are, because the master says so or `cancelled` is set.
///
/// # Errors
///
/// The other server cannot be reached or has them no more.
pub fn fetch(
    order: &Order,
    model: &Arc<Model>,
    caller: &Caller,
    cancelled: &AtomicBool,
    mut ask_master: impl FnMut() -> Result<Word>,
) -> Result<Option<Vec<Partition>>> {
    let begun = Instant::now();
    let mut peer = Peer::open(&order.from, caller, cancelled)?;
    let mut copies: Vec<Copy> = order
        .partitions
        .iter()
        .zip(&order.next)
        .map(|(part, next)| Copy::new(Partition::new(Arc::clone(model), part.0, *next), *part, "ps.copying"))
        .collect();
    loop {
        catch_up(&mut copies, &mut peer)?;
        if cancelled.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match ask_master()? {
            Word::Take => break,
            Word::Wait(pause) => std::thread::sleep(pause),
            Word::Forget => return Ok(None),
        }
    }
    point("ps.taking_over")?;
    // What has changed while the master wrote it down is copied while the other server still serves.
    catch_up(&mut copies, &mut peer)?;
    let handing = Instant::now();
    let heads = peer.have_handed_over(&order.partitions)?;
    point("ps.handed_over")?;
    let finished = copies.into_iter().zip(heads).map(|(copy, head)| copy.finish(&mut peer, head));
    let partitions = finished.collect::<Result<Vec<_>>>()?;
    info!(
        from = order.from,
        partitions = partitions.len(),
        seconds = begun.elapsed().as_secs_f64(),
        standstill_ms = handing.elapsed().as_millis() as u64,
        "partitions taken over"
    );
    Ok(Some(partitions))
}

fn point(name: &str) -> Result<()> {
    failpoint::pass(name).map_err(|e| Error::io("taking partitions over", e))
}

/// Copies until few rows of all of them are left, or as few as can be: while one is copied the others change.
pub(crate) fn catch_up(copies: &mut [Copy], peer: &mut Peer<'_>) -> Result<()> {
    let mut before = u64::MAX;
    for _ in 0..ROUNDS_MAX {
        let mut most = 0;
        for copy in copies.iter_mut() {
            most = most.max(copy.round(peer, FEW)?);
        }
        if most <= FEW || most >= before {
            break;
        }
        before = most;
    }
    Ok(())
}

/// A partition on its way here.
pub(crate) struct Copy {
    partition: Partition,
    /// What it is at the other server.
    part: (PartitionId, u64),
    begun: bool,
    /// The failpoint in the middle of it.
    point: &'static str,
    pace: Pace,
}

impl Copy {
    pub(crate) fn new(partition: Partition, part: (PartitionId, u64), point: &'static str) -> Self {
        Copy { partition, part, begun: false, point, pace: Pace::new(REST, WORK_MAX, of_the_clock) }
    }

    /// What was copied.
    pub(crate) fn into_partition(self) -> Partition {
        self.partition
    }

    /// Copies as many rows as were left when it began, and tells how many are left now.
    fn round(&mut self, peer: &mut Peer<'_>, few: u64) -> Result<u64> {
        let mut copied = Copied::default();
        let first = !std::mem::replace(&mut self.begun, true);
        peer.ask_copy(self.part, first)?;
        let mut due = None;
        loop {
            let Left { rows: left, version } = peer.take_copied(self.part.0, &mut copied)?;
            let came = copied.ids.len() as u64;
            let due = due.get_or_insert(left + came);
            *due = due.saturating_sub(came);
            let ends = left <= few || *due == 0;
            if first {
                self.pace.saw(version);
                self.pace.rest();
            }
            if !ends {
                // The next ones are on their way while these are put in place.
                peer.ask_copy(self.part, false)?;
            }
            self.partition.put_rows(&copied)?;
            if ends {
                return Ok(left);
            }
            if first {
                // Some rows are here, and others are not.
                point(self.point)?;
            }
        }
    }

    /// Copies what is left of a partition that was handed over.
    fn finish(mut self, peer: &mut Peer<'_>, head: Head) -> Result<Partition> {
        while self.round(peer, 0)? > 0 {}
        let tensors = peer.take_tensors(&self.partition)?;
        self.partition.take_over(head, &tensors)?;
        Ok(self.partition)
    }
}

/// The connection to the server that has the partitions.
pub(crate) struct Peer<'a> {
    connection: Connection,
    request: u64,
    cancelled: &'a AtomicBool,
}

impl<'a> Peer<'a> {
    pub(crate) fn open(address: &str, caller: &Caller, cancelled: &'a AtomicBool) -> Result<Self> {
        let connection = Connection::open(address, caller, &mut waits(cancelled))?;
        Ok(Peer { connection, request: 0, cancelled })
    }

    fn ask_copy(&mut self, part: (PartitionId, u64), from_start: bool) -> Result<()> {
        self.request += 1;
        ps::copy(&mut self.connection.out, self.request, part, from_start, ROWS);
        self.send()
    }

    fn take_copied(&mut self, id: PartitionId, into: &mut Copied) -> Result<Left> {
        self.receive(kind::COPIED)?;
        take_copied(self.connection.answer.payload(), into)?.ok_or_else(|| gone(id))
    }

    /// Has partitions handed over, as soon as they can be.
    fn have_handed_over(&mut self, parts: &[(PartitionId, u64)]) -> Result<Vec<Head>> {
        let until = Instant::now() + PATIENCE;
        loop {
            self.request += 1;
            ps::hand_over(&mut self.connection.out, self.request, parts);
            self.send()?;
            self.receive(kind::HANDED)?;
            match take_handed(self.connection.answer.payload(), parts)? {
                Handed::Yes(heads) => return Ok(heads),
                Handed::NotNow if Instant::now() < until => std::thread::sleep(PAUSE),
                refusal => {
                    let reason = match refusal {
                        Handed::NotNow => "a batch has been staged there for too long",
                        _ => "one of them is not there any more",
                    };
                    return Err(Error::Misfit { partition: parts[0].0, reason: reason.into() });
                }
            }
        }
    }

    /// Asks for all that is lacking of a partition that is copied, and to be told from then on what is done.
    pub(crate) fn follow(&mut self, part: (PartitionId, u64)) -> Result<Followed> {
        self.request += 1;
        ps::follow(&mut self.connection.out, self.request, part);
        self.send()?;
        self.receive(kind::FOLLOWED)?;
        Ok(take_followed(self.connection.answer.payload(), part.0)?)
    }

    /// The tensors of a partition that is this one now, or is followed by it.
    pub(crate) fn take_tensors(&mut self, here: &Partition) -> Result<Vec<f32>> {
        let due = here.tensor_floats_due();
        let mut floats = Vec::with_capacity(due);
        while floats.len() < due {
            self.request += 1;
            ps::tensors(&mut self.connection.out, self.request, here.id(), floats.len());
            self.send()?;
            self.receive(kind::FLOATS)?;
            floats.extend_from_slice(take_tensors(self.connection.answer.payload(), due - floats.len())?);
        }
        Ok(floats)
    }

    /// Asks what was done to a partition that is followed, after so much of it. `None`: it is followed no more.
    pub(crate) fn next(&mut self, done: u64) -> Result<Option<Vec<Frame>>> {
        self.request += 1;
        ps::next(&mut self.connection.out, self.request, done);
        self.send()?;
        self.receive(kind::DID)?;
        Ok(ps::take_did(self.connection.answer.payload())?)
    }

    fn send(&mut self) -> Result<()> {
        Ok(self.connection.send(&mut waits(self.cancelled))?)
    }

    fn receive(&mut self, kind: u32) -> wire::Result<()> {
        self.connection.receive(kind, self.request, &mut waits(self.cancelled))
    }
}

/// Whether to go on waiting for the other server, whose machine may be gone without a word.
fn waits(cancelled: &AtomicBool) -> impl FnMut() -> bool {
    let until = Instant::now() + PATIENCE;
    move || !cancelled.load(Ordering::Relaxed) && Instant::now() < until
}

fn gone(partition: PartitionId) -> Error {
    Error::Misfit { partition, reason: "it is not at the server that it was to be copied from".into() }
}
