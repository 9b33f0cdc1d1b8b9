//! Backups of partitions at other virtual servers, doing what `ps/src/feed.rs` and `ps/src/backups.rs` do.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_ps::Partition;
use elasticdl_ps::closed::Closed;
use elasticdl_ps::feed::Log;
use elasticdl_spec::PartitionId;
use elasticdl_wire::control::{AloneRequest, Assignment, CopiedRequest, Promote, ReadyRequest};
use elasticdl_wire::ps::{self, Status};

use crate::branches::Branch;
use crate::moving::{Fetching, Said};
use crate::net::{Asked, Part, Pid, Question};
use crate::processes::Timer;
use crate::sabotage::Sabotage;
use crate::server::{Server, apply};
use crate::world::World;

/// A backup that gets nothing done for so long is lost.
const PATIENCE: Duration = Duration::from_secs(2);

/// What was done to a partition.
#[derive(Debug, Clone)]
pub enum Did {
    /// What a worker asked for.
    Asked(Asked, Part),
    /// Tasks were closed.
    Close(Rc<Closed>),
    /// What is gathered was applied.
    Settle,
}

/// What goes from a partition to its backup.
#[derive(Debug)]
pub struct Feed {
    partition: PartitionId,
    incarnation: u64,
    backup: Pid,
    log: Log<Did>,
    /// The number of a question that waits for something to be done.
    parked: Option<u64>,
}

/// An answer that waits for backups.
#[derive(Debug)]
pub struct Pending {
    /// Feeds, and what each must have done.
    due: Vec<(u64, u64)>,
    to: (Pid, u64),
    answers: Vec<ps::Answer>,
}

/// A backup.
#[derive(Debug)]
pub struct Backup {
    pub(crate) partition: Partition,
    from: Pid,
    feed: u64,
    done: u64,
}

impl Server {
    /// By partition, the life that it has a backup of.
    pub(crate) fn backs(&self) -> BTreeMap<u32, u64> {
        let there = self.backups.iter().map(|(id, backup)| (id.0, backup.partition.incarnation()));
        there.chain(self.fetching.as_ref().and_then(Fetching::backup)).collect()
    }

    /// Something was done to a partition: its backup is to do it, too. Tells which feed has it under which number.
    pub(crate) fn also(&mut self, id: PartitionId, incarnation: u64, did: Did) -> Option<(u64, u64)> {
        let number = *self.followed.get(&id)?;
        let feed = self.feeds.get_mut(&number).filter(|feed| feed.incarnation == incarnation)?;
        Some((number, feed.log.add(did)))
    }
}

impl World {
    /// A backup wants to follow a partition that it has copied, as far as that goes: here is what it lacks.
    pub(crate) fn follow(
        &mut self,
        pid: Pid,
        server: &mut Server,
        from: Pid,
        (id, incarnation): (PartitionId, u64),
    ) -> Said {
        let copy = server.copies.get(&(from, id)).copied().unwrap_or(0);
        let partition = server.partitions.get_mut(&id);
        let ours = partition.filter(|p| p.admit_copy(incarnation, copy) == Status::Ok && !p.is_handed_over());
        let current =
            server.followed.get(&id).and_then(|number| Some((*number, server.feeds.get_mut(number)?)));
        let current = current.filter(|(_, feed)| feed.incarnation == incarnation);
        let taken = current.as_ref().is_some_and(|(_, feed)| {
            self.processes[feed.backup as usize].id != self.processes[from as usize].id
        });
        let Some(partition) = ours.filter(|_| !taken) else { return Said::Followed(None) };
        if let Some((number, feed)) = current
            && feed.log.lose()
        {
            let backup = self.processes[feed.backup as usize].id;
            let asked = AloneRequest { partition: id.0, incarnation, backup, member: None };
            self.call(pid, Question::Alone(asked, number));
        }
        let mut rows = Vec::new();
        while partition.unsent() > 0 {
            rows.push(partition.copy_next(1000, 1000));
        }
        let handed = crate::moving::handed(partition, partition.head());
        partition.end_copy(copy);
        self.try_next += 1;
        let number = self.try_next;
        let feed = Feed { partition: id, incarnation, backup: from, log: Log::default(), parked: None };
        server.feeds.insert(number, feed);
        server.followed.insert(id, number);
        Said::Followed(Some(Box::new((number, handed, rows))))
    }

    /// A partition is copied, and nothing is lacking: from now on the backup does what is done.
    pub(crate) fn followed(
        &mut self,
        pid: Pid,
        server: &mut Server,
        from: Pid,
        (partition, feed): (Partition, u64),
        command: u64,
    ) {
        self.branches.count(Branch::BackedUp);
        let (id, incarnation) = (partition.id(), partition.incarnation());
        self.note("backed up", [pid.into(), id.0.into(), incarnation], || {
            format!("pid {pid}: {id} in life {incarnation} of pid {from}")
        });
        server.backups.insert(id, Backup { partition, from, feed, done: 0 });
        let backup = Some(Assignment { partition: id.0, incarnation, ..Assignment::default() });
        self.call(pid, Question::Copied(CopiedRequest { command, backup, ..CopiedRequest::default() }));
        self.say(pid, from, feed, Said::Next(0));
    }

    /// A backup has done so much, and asks for more.
    pub(crate) fn next_asked(&mut self, pid: Pid, server: &mut Server, number: u64, done: u64) {
        let Some(feed) = server.feeds.get_mut(&number) else { return };
        if !feed.log.done(done) {
            let backup = feed.backup;
            return self.say(pid, backup, number, Said::Did(None));
        }
        feed.parked = Some(number);
        self.answer_waiting(server);
        self.feed_backups(pid, server);
    }

    /// What was done goes to the backups that wait for it.
    pub(crate) fn feed_backups(&mut self, pid: Pid, server: &mut Server) {
        let mut said = Vec::new();
        for (number, feed) in &mut server.feeds {
            if feed.parked.is_some() && !feed.log.is_empty() {
                feed.parked = None;
                said.push((feed.backup, *number, feed.log.fetch(|_| true)));
            }
        }
        for (backup, number, did) in said {
            self.say(pid, backup, number, Said::Did(Some(did)));
        }
    }

    /// The backup hears what was done.
    pub(crate) fn did(&mut self, pid: Pid, server: &mut Server, number: u64, did: Option<Vec<Did>>) {
        let Some(backup) = server.backups.values_mut().find(|backup| backup.feed == number) else { return };
        let Some(did) = did else { return };
        for one in did {
            match one {
                Did::Asked(what, part) => apply(&mut backup.partition, &what, &part),
                Did::Close(covered) => backup.partition.close_all(&covered),
                Did::Settle => backup.partition.settle(),
            }
            backup.done += 1;
        }
        let (from, done) = (backup.from, backup.done);
        self.say(pid, from, number, Said::Next(done));
    }

    /// Answers wait until the backups have done it, too.
    pub(crate) fn reply_when_backed(
        &mut self,
        pid: Pid,
        server: &mut Server,
        due: Vec<(u64, u64)>,
        to: (Pid, u64),
        answers: Vec<ps::Answer>,
    ) {
        if self.sabotage == Sabotage::BackupsUnawaited {
            return self.send_reply(to, answers);
        }
        if due.is_empty() {
            self.send_reply(to, answers);
        } else {
            due.iter().for_each(|(feed, number)| {
                self.set_timer(pid, PATIENCE, Timer::BackupLate(*feed, *number));
            });
            server.pending.push(Pending { due, to, answers });
        }
        self.feed_backups(pid, server);
    }

    /// Sends the answers that wait no more. What waits for a feed that is gone is never answered.
    fn answer_waiting(&mut self, server: &mut Server) {
        let feeds = &server.feeds;
        let has = |(feed, number): &(u64, u64)| feeds.get(feed).is_some_and(|feed| feed.log.has(*number));
        let (ready, rest) =
            std::mem::take(&mut server.pending).into_iter().partition(|p| p.due.iter().all(has));
        server.pending = rest;
        let ready: Vec<Pending> = ready;
        ready.into_iter().for_each(|pending| self.send_reply(pending.to, pending.answers));
    }

    /// A backup has not done something in time.
    pub(crate) fn backup_late(&mut self, pid: Pid, server: &mut Server, number: u64, due: u64) {
        let Some(feed) = server.feeds.get_mut(&number).filter(|feed| !feed.log.has(due)) else { return };
        if feed.log.lose() {
            self.branches.count(Branch::BackupLost);
            let (partition, incarnation) = (feed.partition.0, feed.incarnation);
            let backup = self.processes[feed.backup as usize].id;
            let asked = AloneRequest { partition, incarnation, backup, member: None };
            self.call(pid, Question::Alone(asked, number));
        }
    }

    /// The master's word on a backup that was lost.
    pub(crate) fn alone_heard(&mut self, server: &mut Server, number: u64, alone: bool) {
        let Some(feed) = server.feeds.get_mut(&number) else { return };
        if alone {
            self.branches.count(Branch::Alone);
            feed.log.go_alone();
            server.followed.retain(|_, current| *current != number);
            self.answer_waiting(server);
            server.feeds.remove(&number);
        } else {
            // Whoever waits for it waits in vain.
            feed.log.end();
        }
    }

    /// Backups take the place of partitions.
    pub(crate) fn promoted(&mut self, pid: Pid, server: &mut Server, command: u64, order: &Promote) {
        let pairs = || order.partitions.iter().zip(&order.incarnations);
        let has = |(a, before): (&Assignment, &u64)| {
            let backup = server.backups.get(&PartitionId(a.partition));
            backup.is_some_and(|backup| backup.partition.incarnation() == *before)
        };
        if !pairs().all(has) {
            self.branches.count(Branch::PromotionFailed);
            let error = "a backup is not there".to_string();
            return self
                .call(pid, Question::Copied(CopiedRequest { command, error, ..CopiedRequest::default() }));
        }
        self.branches.count(Branch::Promoted);
        for (a, _) in pairs() {
            let id = PartitionId(a.partition);
            let mut partition = server.backups.remove(&id).expect("it was there").partition;
            partition.begin_life(a.incarnation);
            self.checkers.leases.opened(pid, &partition);
            self.note("promoted", [pid.into(), id.0.into(), a.incarnation], || {
                format!("pid {pid}: {id} in life {}", a.incarnation)
            });
            server.partitions.insert(id, partition);
        }
        let ready = ReadyRequest { partitions: server.held(), ..ReadyRequest::default() };
        self.call(pid, Question::Ready(ready));
    }
}
