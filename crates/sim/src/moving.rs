//! A partition's way from one virtual server to another, doing what `ps/src/moving.rs` does.

use std::time::Duration;

use elasticdl_ps::Partition;
use elasticdl_ps::checkpoint::Head;
use elasticdl_ps::partition::copy::Copied;
use elasticdl_spec::{LeaseId, PartitionId};
use elasticdl_wire::control::{
    Assignment, CopiedReply, CopiedRequest, Move, ReadyRequest, copied_reply::What,
};
use elasticdl_wire::ps::Status;

use crate::backing::Did;
use crate::branches::Branch;
use crate::net::{Pid, Question};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::server::Server;
use crate::world::{Action, World};

/// Rows asked for at once.
const ROWS: usize = 4;
/// With so many left a partition is as good as copied.
const FEW: usize = 1;
/// A connection on which nothing comes for so long is given up.
const PATIENCE: Duration = Duration::from_secs(3);
/// Before a partition that cannot be handed over now is asked for again.
const PAUSE: Duration = Duration::from_millis(5);

/// What one server says to another over their connection.
#[derive(Debug, Clone)]
pub enum Said {
    /// Some rows, please; from the start, or those that have changed.
    Copy(PartitionId, u64, bool),
    /// Some rows, and how many are left. `None`: this life of the partition is not here.
    Copied(Option<(Copied, usize)>),
    /// Serve them no more, and tell what is left.
    HandOver(Vec<(PartitionId, u64)>),
    /// Tell from now on what is done.
    Follow(PartitionId, u64),
    /// The number of the feed, and what is lacking still. `None`: this life of the partition is not here.
    Followed(Option<Box<(u64, Handed, Vec<Copied>)>>),
    /// The backup has done so much.
    Next(u64),
    /// This was done. `None`: it is followed no more.
    Did(Option<Vec<Did>>),
    /// What each has beside rows, or why none is handed over.
    Handed(Result<Vec<Handed>, Refusal>),
}

/// A partition without its rows.
#[derive(Debug, Clone)]
pub struct Handed {
    head: Head,
    tensors: Vec<f32>,
}

/// Why a partition is not handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A batch is staged.
    NotNow,
    /// It is not here.
    NotHere,
}

/// Partitions on their way to a server.
#[derive(Debug)]
pub struct Fetching {
    /// The master's command.
    pub command: u64,
    from: Pid,
    copies: Vec<Copy>,
    /// The one that is worked on.
    at: usize,
    taken: bool,
    /// Whether it is a backup only.
    backup: bool,
    /// Ties answers and deadlines to what was asked.
    number: u64,
}

impl Fetching {
    /// The partition that it is a backup of, with its life.
    pub(crate) fn backup(&self) -> Option<(u32, u64)> {
        self.copies.first().filter(|_| self.backup).map(|copy| (copy.id.0, copy.incarnation))
    }
}

#[derive(Debug)]
struct Copy {
    partition: Partition,
    id: PartitionId,
    incarnation: u64,
    begun: bool,
    handed: Option<Handed>,
}

impl World {
    /// The master wants partitions moved to this server.
    pub(crate) fn begin_fetching(&mut self, pid: Pid, server: &mut Server, command: u64, order: &Move) {
        let Some(from) = self.at_address(&order.from) else {
            return self.fetch_failed(pid, server, command);
        };
        let copy = |(a, incarnation): (&Assignment, &u64)| {
            let id = PartitionId(a.partition);
            let mut partition = Partition::new(self.scenario.model.clone(), id, a.incarnation);
            if let Some(floor) = a.floor {
                partition.refuse_leases_below(LeaseId { term: floor.term, n: floor.n });
            }
            Copy { partition, id, incarnation: *incarnation, begun: false, handed: None }
        };
        let copies = order.partitions.iter().zip(&order.incarnations).map(copy).collect();
        let backup = order.backup;
        server.fetching = Some(Fetching { command, from, copies, at: 0, taken: false, backup, number: 0 });
        self.fetch_next(pid, server);
    }

    /// Asks the other server for what comes next.
    fn fetch_next(&mut self, pid: Pid, server: &mut Server) {
        let Some(fetching) = &mut server.fetching else { return };
        let waits = fetching.taken && fetching.copies.iter().any(|copy| copy.handed.is_none());
        let all: Vec<_> = fetching.copies.iter().map(|copy| (copy.id, copy.incarnation)).collect();
        let said = match fetching.copies.get_mut(fetching.at) {
            _ if waits => Said::HandOver(all),
            Some(copy) => {
                let from_start = !std::mem::replace(&mut copy.begun, true);
                Said::Copy(copy.id, copy.incarnation, from_start)
            }
            None if fetching.taken => return self.taken_over(pid, server),
            None if fetching.backup => Said::Follow(all[0].0, all[0].1),
            None => {
                fetching.at = 0;
                let command = fetching.command;
                return self.call(pid, Question::Copied(CopiedRequest { command, ..Default::default() }));
            }
        };
        fetching.number += 1;
        let (number, from) = (fetching.number, fetching.from);
        self.say(pid, from, number, said);
        self.set_timer(pid, PATIENCE, Timer::PeerLate(number));
    }

    /// Says something to another server: in order and once, or never.
    pub(crate) fn say(&mut self, from: Pid, to: Pid, number: u64, said: Said) {
        let net = self.scenario.net;
        if !self.healed && self.rng.uniform() < net.loss {
            return self.branches.count(Branch::MessageLost);
        }
        let delay = net.base + net.jitter.mul_f64(self.rng.uniform().powi(3));
        self.queue.plan(self.now + delay, Action::Peer { pid: to, from, number, said: Box::new(said) });
    }

    /// Another server says something.
    pub(crate) fn peer_said(&mut self, pid: Pid, server: &mut Server, from: Pid, number: u64, said: Said) {
        match said {
            Said::Copy(id, incarnation, from_start) => {
                let copies = &mut server.copies;
                let here = server.partitions.get_mut(&id).filter(|p| p.incarnation() == incarnation);
                let copied = here.and_then(|partition| {
                    if from_start {
                        copies.insert((from, id), partition.begin_copy());
                    }
                    let copy = copies.get(&(from, id)).copied().unwrap_or(0);
                    (partition.admit_copy(incarnation, copy) == Status::Ok).then_some(partition)
                });
                let copied = copied.map(|partition| (partition.copy_next(ROWS, 1000), partition.unsent()));
                self.say(pid, from, number, Said::Copied(copied));
            }
            Said::HandOver(parts) => {
                let handed = hand_over(server, from, &parts);
                self.say(pid, from, number, Said::Handed(handed));
            }
            Said::Follow(id, incarnation) => {
                let said = self.follow(pid, server, from, (id, incarnation));
                self.say(pid, from, number, said);
            }
            Said::Next(done) => self.next_asked(pid, server, number, done),
            Said::Did(did) => self.did(pid, server, number, did),
            answer => self.peer_answered(pid, server, number, answer),
        }
    }

    fn peer_answered(&mut self, pid: Pid, server: &mut Server, number: u64, answer: Said) {
        let Some(fetching) = server.fetching.as_mut().filter(|f| f.number == number) else { return };
        let (command, forgets) = (fetching.command, self.sabotage == Sabotage::LastRowsLost);
        if let Said::Followed(Some(lacking)) = answer {
            let (feed, handed, rows) = *lacking;
            let from = fetching.from;
            let mut partition = fetching.copies.remove(0).partition;
            server.fetching = None;
            rows.iter().for_each(|some| partition.put_rows(some).expect("rows are copied to their own"));
            partition.take_over(handed.head, &handed.tensors).expect("all rows were copied");
            return self.followed(pid, server, from, (partition, feed), command);
        }
        if fetching.at >= fetching.copies.len() {
            return self.fetch_failed(pid, server, command);
        }
        let copy = &mut fetching.copies[fetching.at];
        match answer {
            Said::Copied(Some((copied, left))) => {
                copy.partition.put_rows(&copied).expect("rows are copied to their own partition");
                let enough = if copy.handed.is_some() { left == 0 } else { left <= FEW };
                fetching.at += usize::from(enough);
                self.fetch_next(pid, server);
            }
            Said::Handed(Ok(handed)) => {
                for (copy, handed) in fetching.copies.iter_mut().zip(handed) {
                    copy.handed = Some(handed);
                }
                // Sabotage: what has changed since it was copied is forgotten.
                fetching.at = if forgets { fetching.copies.len() } else { 0 };
                self.fetch_next(pid, server);
            }
            Said::Handed(Err(Refusal::NotNow)) => {
                self.branches.count(Branch::HandedLater);
                self.set_timer(pid, PAUSE, Timer::PeerAgain(number));
            }
            _ => self.fetch_failed(pid, server, command),
        }
    }

    /// A pause is over.
    pub(crate) fn peer_again(&mut self, pid: Pid, server: &mut Server, number: u64) {
        if server.fetching.as_ref().is_some_and(|f| f.number == number) {
            self.fetch_next(pid, server);
        }
    }

    /// The other server has not answered in time.
    pub(crate) fn peer_late(&mut self, pid: Pid, server: &mut Server, number: u64) {
        if let Some(command) = server.fetching.as_ref().filter(|f| f.number == number).map(|f| f.command) {
            self.fetch_failed(pid, server, command);
        }
    }

    fn fetch_failed(&mut self, pid: Pid, server: &mut Server, command: u64) {
        server.fetching = None;
        self.branches.count(Branch::MoveFailed);
        let error = "the other server does not answer".to_string();
        self.call(pid, Question::Copied(CopiedRequest { command, error, ..Default::default() }));
    }

    /// The master says what is to become of what was copied.
    pub(crate) fn copied_heard(
        &mut self,
        pid: Pid,
        server: &mut Server,
        asked: &CopiedRequest,
        reply: CopiedReply,
    ) {
        if let Some(backup) = &asked.backup {
            if !matches!(reply.what, Some(What::Take(true))) {
                let stale = |b: &&mut crate::backing::Backup| b.partition.incarnation() == backup.incarnation;
                let id = PartitionId(backup.partition);
                if server.backups.get_mut(&id).filter(stale).is_some() {
                    server.backups.remove(&id);
                }
            }
            return;
        }
        let known = server.fetching.as_mut().filter(|f| f.command == asked.command && asked.error.is_empty());
        let Some(fetching) = known else { return };
        fetching.number += 1;
        let number = fetching.number;
        match reply.what {
            Some(What::Take(true)) => {
                fetching.taken = true;
                self.fetch_next(pid, server);
            }
            Some(What::WaitMs(ms)) => {
                self.branches.count(Branch::MoveWaits);
                self.set_timer(pid, Duration::from_millis(ms.into()), Timer::PeerAgain(number));
            }
            _ => server.fetching = None,
        }
    }

    fn taken_over(&mut self, pid: Pid, server: &mut Server) {
        let Some(fetching) = server.fetching.take() else { return };
        self.branches.count(Branch::Moved);
        for mut copy in fetching.copies {
            let Handed { mut head, tensors } = copy.handed.expect("all were handed over");
            if self.sabotage == Sabotage::LastRowsLost {
                head.rows = copy.partition.tables().iter().map(|table| table.len() as u64).collect();
            }
            if self.sabotage == Sabotage::RefusedForgotten {
                head.bounds.iter_mut().for_each(|bounds| bounds.counts.refused = 0);
            }
            copy.partition.take_over(head, &tensors).expect("all rows were copied");
            self.checkers.leases.opened(pid, &copy.partition);
            let (id, incarnation) = (copy.id, copy.partition.incarnation());
            self.note("taken over", [pid.into(), id.0.into(), incarnation], || {
                format!("pid {pid}: {id} in life {incarnation}")
            });
            server.partitions.insert(id, copy.partition);
        }
        let ready = ReadyRequest { partitions: server.held(), ..ReadyRequest::default() };
        self.call(pid, Question::Ready(ready));
    }
}

/// What a partition has beside its rows.
pub(crate) fn handed(partition: &Partition, head: Head) -> Handed {
    Handed { head, tensors: partition.tensor_floats() }
}

/// All of these, or none.
fn hand_over(server: &mut Server, from: Pid, parts: &[(PartitionId, u64)]) -> Result<Vec<Handed>, Refusal> {
    let mut handed = Vec::new();
    for (id, incarnation) in parts {
        let copy = server.copies.get(&(from, *id)).copied().unwrap_or(0);
        let partition = server.partitions.get_mut(id);
        let partition = partition.filter(|p| p.admit_copy(*incarnation, copy) == Status::Ok);
        let refusal = if partition.is_some() { Refusal::NotNow } else { Refusal::NotHere };
        match partition.and_then(|partition| Some((partition.hand_over()?, partition))) {
            Some((head, partition)) => {
                handed.push(self::handed(partition, head));
            }
            None => {
                for (id, _) in &parts[..handed.len()] {
                    server.partitions.get_mut(id).expect("it was handed over").keep();
                }
                return Err(refusal);
            }
        }
    }
    Ok(handed)
}
