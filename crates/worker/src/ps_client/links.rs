//! All servers at once: a request is sent to each before the first answer is waited for, and what stays
//! unanswered is asked again, wherever its partition has gone, until it is answered.

use std::sync::Arc;
use std::time::Duration;

use elasticdl_spec::{Kind, PartitionId};
use elasticdl_wire::Error as WireError;
use elasticdl_wire::connection::{Caller, Connection};
use elasticdl_wire::frame::{Frame, Payload};
use elasticdl_wire::retry::Backoff;
use tracing::{debug, info, warn};

use super::directory::{Directory, Topology};
use crate::error::{Error, Result};
use crate::stop::{Level, Stop};
use crate::store::Generation;

const PAUSE_FIRST: Duration = Duration::from_millis(10);
const PAUSE_LONGEST: Duration = Duration::from_secs(1);
/// Malformed answers that are asked for again, over another connection, until all have answered. A server that gives
/// more of them speaks another protocol than this worker.
const MALFORMED_MAX: u32 = 3;

/// Partitions that have not answered yet.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    waiting: Vec<bool>,
    left: usize,
}

impl Pending {
    pub fn of(whom: Whom, partitions: usize) -> Self {
        let waiting: Vec<bool> = match whom {
            Whom::All => vec![true; partitions],
            Whom::Gate => (0..partitions).map(|p| p == GATE.0 as usize).collect(),
        };
        Pending { left: waiting.iter().filter(|due| **due).count(), waiting }
    }

    fn is_due(&self, partition: PartitionId) -> bool {
        self.waiting.get(partition.0 as usize).copied().unwrap_or(false)
    }

    /// The partition has answered for good.
    pub fn answered(&mut self, partition: PartitionId) {
        assert!(self.is_due(partition), "{partition} answered twice");
        self.waiting[partition.0 as usize] = false;
        self.left -= 1;
    }

    /// Refuses an answer of a partition that was not asked, or has answered before.
    pub fn check(&self, partition: PartitionId) -> elasticdl_wire::Result<()> {
        if self.is_due(partition) {
            return Ok(());
        }
        Err(WireError::Malformed(format!("{partition} answers and was not asked")))
    }
}

pub(super) type Fill<'a> = dyn FnMut(&mut Frame, u64, &[(PartitionId, u64)]) + 'a;
type Take<'a> = dyn FnMut(Payload<'_>, &mut Pending) -> elasticdl_wire::Result<()> + 'a;

/// The partition whose server has the gate.
pub(super) const GATE: PartitionId = PartitionId(0);

/// Who is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whom {
    /// Every partition.
    All,
    /// The gate.
    Gate,
}

/// A request to all partitions, or to the gate.
pub(super) struct Ask<'a> {
    pub whom: Whom,
    /// What is done, for errors.
    pub attempt: &'static str,
    /// The kind of frame that answers.
    pub answer: u32,
    /// Give up when the worker's stop reaches this level.
    pub until: Level,
    /// Give up when the topology is not of this generation.
    pub within: Option<Generation>,
    /// Fills the request for some partitions, each with its incarnation.
    pub fill: &'a mut Fill<'a>,
    /// Reads an answer and says which partitions need not be asked again.
    pub take: &'a mut Take<'a>,
}

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// All have answered; in lives of the request's generation, where it names one.
    Answered,
    /// A partition has another life than the request allows.
    OtherGeneration,
}

/// A server: its connection, and the partitions it serves.
#[derive(Debug)]
struct Link {
    address: String,
    parts: Vec<PartitionId>,
    connection: Option<Connection>,
    /// What is asked of it in this round.
    asked: Vec<(PartitionId, u64)>,
}

/// One thread's connections to all servers.
pub(super) struct Links {
    directory: Arc<Directory>,
    caller: Caller,
    stop: Stop,
    topology: Arc<Topology>,
    links: Vec<Link>,
    request: u64,
    backoff: Backoff,
    /// Malformed answers since all have answered.
    malformed: u32,
}

impl Links {
    pub fn new(directory: Arc<Directory>, caller: Caller, stop: Stop) -> Self {
        let topology = directory.known();
        let backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, caller.who.word());
        let mut links =
            Links { directory, caller, stop, topology, links: vec![], request: 0, backoff, malformed: 0 };
        links.regroup();
        links
    }

    /// The generation to ask in now.
    pub fn generation(&mut self) -> Generation {
        self.adopt();
        self.topology.generation
    }

    /// By partition: which life of it was asked last.
    pub fn incarnations(&self) -> Arc<[u64]> {
        self.topology.places.iter().map(|place| place.incarnation).collect()
    }

    /// Asks until all who are asked have answered, for as long as it takes.
    pub fn ask(&mut self, mut ask: Ask<'_>) -> Result<Asked> {
        let mut pending = Pending::of(ask.whom, self.topology.places.len());
        loop {
            if self.stop.reached(ask.until) {
                return Err(Error::Stopped { attempt: ask.attempt });
            }
            self.adopt();
            if ask.within.is_some_and(|generation| generation != self.topology.generation) {
                return Ok(Asked::OtherGeneration);
            }
            if let Err(source) = self.round(&mut ask, &mut pending) {
                // Answers of other servers may still be on their way: no connection is in step any more.
                self.links.iter_mut().for_each(|link| link.connection = None);
                return Err(Error::Wire { attempt: ask.attempt, source });
            }
            if pending.left == 0 {
                if self.backoff.tries() > 3 {
                    info!(attempt = ask.attempt, tries = self.backoff.tries(), "servers answer again");
                }
                self.backoff.reset();
                self.malformed = 0;
                return Ok(Asked::Answered);
            }
            self.wait(&ask)?;
        }
    }

    /// A growing pause, then another look at who serves what.
    fn wait(&mut self, ask: &Ask<'_>) -> Result<()> {
        if self.backoff.tries() == 3 {
            warn!(attempt = ask.attempt, "servers are away, waiting for them");
        }
        if self.stop.pause(self.backoff.pause(), ask.until) {
            return Err(Error::Stopped { attempt: ask.attempt });
        }
        match self.directory.refresh() {
            Err(source) if source.kind() != Kind::Retry => {
                Err(Error::Wire { attempt: "asking for the topology", source })
            }
            Err(error) => {
                debug!(%error, "topology not heard");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Sends to every server what is still due, then reads every answer.
    fn round(&mut self, ask: &mut Ask<'_>, pending: &mut Pending) -> elasticdl_wire::Result<()> {
        self.request += 1;
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            link.asked.clear();
            let places = &self.topology.places;
            link.asked.extend(
                link.parts
                    .iter()
                    .filter(|p| pending.is_due(**p))
                    .map(|p| (*p, places[p.0 as usize].incarnation)),
            );
            if !link.asked.is_empty() {
                let sent = self.send(at, ask);
                self.settle(at, sent)?;
            }
        }
        for at in 0..self.links.len() {
            if !self.links[at].asked.is_empty() {
                let received = self.receive(at, ask, pending);
                self.settle(at, received)?;
            }
        }
        Ok(())
    }

    /// A failure that may pass closes the connection and leaves its partitions due; others are handed on.
    fn settle(&mut self, at: usize, outcome: elasticdl_wire::Result<()>) -> elasticdl_wire::Result<()> {
        let Err(error) = outcome else { return Ok(()) };
        let link = &mut self.links[at];
        link.asked.clear();
        link.connection = None;
        match &error {
            WireError::Malformed(_) if self.malformed < MALFORMED_MAX => {
                self.malformed += 1;
                warn!(server = link.address, %error, "an answer is malformed, asking again over another connection");
            }
            error if error.kind() == Kind::Retry => {
                debug!(server = link.address, error = %error.chain(), "server did not answer");
            }
            _ => return Err(error),
        }
        Ok(())
    }

    fn send(&mut self, at: usize, ask: &mut Ask<'_>) -> elasticdl_wire::Result<()> {
        let link = &mut self.links[at];
        let (directory, stop, until) = (&self.directory, &self.stop, ask.until);
        let mut wait = || keep_waiting(directory, stop, until, &link.address, &link.asked);
        let connection = match &mut link.connection {
            Some(connection) => connection,
            none => none.insert(Connection::open(&link.address, &self.caller, &mut wait)?),
        };
        (ask.fill)(&mut connection.out, self.request, &link.asked);
        connection.send(&mut wait)
    }

    fn receive(&mut self, at: usize, ask: &mut Ask<'_>, pending: &mut Pending) -> elasticdl_wire::Result<()> {
        let link = &mut self.links[at];
        let (directory, stop, until) = (&self.directory, &self.stop, ask.until);
        let mut wait = || keep_waiting(directory, stop, until, &link.address, &link.asked);
        let connection = link.connection.as_mut().expect("what was asked was asked over a connection");
        connection.receive(ask.answer, self.request, &mut wait)?;
        // Nothing of a malformed answer counts, also where it is malformed at its end.
        let before = pending.clone();
        (ask.take)(connection.answer.payload(), pending).inspect_err(|_| *pending = before)
    }

    /// Takes over what the directory knows by now.
    fn adopt(&mut self) {
        let known = self.directory.known();
        if !Arc::ptr_eq(&known, &self.topology) {
            self.topology = known;
            self.regroup();
        }
    }

    /// Deals the partitions to their servers; connections to those that stay are kept.
    fn regroup(&mut self) {
        let mut old = std::mem::take(&mut self.links);
        for (p, place) in self.topology.places.iter().enumerate() {
            if place.address.is_empty() {
                continue;
            }
            let partition = PartitionId(p as u32);
            if let Some(link) = self.links.iter_mut().find(|link| link.address == place.address) {
                link.parts.push(partition);
                continue;
            }
            let connection = old
                .iter_mut()
                .find(|link| link.address == place.address)
                .and_then(|link| link.connection.take());
            self.links.push(Link {
                address: place.address.clone(),
                parts: vec![partition],
                connection,
                asked: vec![],
            });
        }
    }
}

/// Whether to go on waiting for a server that lets us wait: not if the worker ends, nor if the master has
/// given what was asked to another server or life. A stopped process is told from a slow one only so.
fn keep_waiting(
    directory: &Directory,
    stop: &Stop,
    until: Level,
    address: &str,
    asked: &[(PartitionId, u64)],
) -> bool {
    if stop.reached(until) {
        return false;
    }
    // A master that is away changes no places.
    let Ok(topology) = directory.refresh() else { return true };
    asked.iter().all(|(partition, incarnation)| {
        let place = &topology.places[partition.0 as usize];
        place.incarnation == *incarnation && place.address == address
    })
}
