//! Which processes there should be, and what is to be done about it. Pure: it starts nothing itself.
//!
//! A worker that dies is replaced by a new one with a new number; a server is started again under its
//! old number. The first replacement comes at once, the next ones with growing pauses, until a batch
//! is done; past a stated number of deaths in a row without one, the job is given up. Each server has a row
//! of deaths of its own, and the workers have one together: who waits does so for his own deaths only.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_wire::control::Role;

/// First pause before a replacement that is not the first in a row.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
/// Longest pause before a replacement.
const PAUSE_LONGEST: Duration = Duration::from_secs(30);

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Start this process.
    Start {
        /// Worker or server.
        role: Role,
        /// Its number.
        id: u32,
    },
    /// Ask this process to end; a worker drains.
    Stop {
        /// Worker or server.
        role: Role,
        /// Its number.
        id: u32,
        /// Its process.
        pid: u32,
    },
    /// Too many died in a row.
    GiveUp {
        /// Worker or server.
        role: Role,
    },
}

/// Where a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Ordered, not yet heard of.
    Starting,
    /// Has joined.
    Joined,
    /// Was asked to end.
    Draining,
    /// A server that waits to be started again.
    Waiting,
}

/// A process of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Where it is.
    pub state: State,
    /// Its process, once started.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// Who ended a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process itself.
    Own,
    /// Somebody who needed its place: its replacement may be more lucky, and waits for nothing.
    Outside,
}

/// Deaths in a row without a batch done.
#[derive(Debug, Clone, Copy, Default)]
struct Deaths {
    count: u32,
    /// No replacement before this.
    not_before: Duration,
}

impl Deaths {
    fn add(&mut self, now: Duration) {
        self.count += 1;
        self.not_before = match self.count {
            1 => now,
            n => now + PAUSE_FIRST.saturating_mul(1 << (n - 2).min(16)).min(PAUSE_LONGEST),
        };
    }
}

/// The processes of a job.
#[derive(Debug)]
pub struct Fleet {
    workers: BTreeMap<u32, Member>,
    servers: BTreeMap<u32, Member>,
    /// Servers that are to go, and not to be started again.
    dismissed: BTreeSet<u32>,
    workers_wanted: u32,
    /// No more workers than that, whatever is wanted.
    workers_allowed: Option<u32>,
    worker_next: u32,
    worker_deaths: Deaths,
    server_deaths: BTreeMap<u32, Deaths>,
    deaths_max: u32,
    /// Whether nothing is to be started any more.
    closing: bool,
}

impl Fleet {
    /// A fleet of which nothing runs yet.
    pub fn new(servers: u32, workers: u32, deaths_max: u32) -> Self {
        let waiting = Member { state: State::Waiting, pid: None, restarts: 0 };
        Fleet {
            workers: BTreeMap::new(),
            servers: (0..servers).map(|id| (id, waiting)).collect(),
            dismissed: BTreeSet::new(),
            workers_wanted: workers,
            workers_allowed: None,
            worker_next: 0,
            worker_deaths: Deaths::default(),
            server_deaths: BTreeMap::new(),
            deaths_max,
            closing: false,
        }
    }

    /// A process that an earlier master started still runs.
    pub fn adopt(&mut self, role: Role, id: u32, pid: u32) {
        let member = Member { state: State::Joined, pid: Some(pid), restarts: 0 };
        match role {
            Role::Worker => {
                self.workers.insert(id, member);
                self.worker_next = self.worker_next.max(id + 1);
            }
            Role::Server => drop(self.servers.insert(id, member)),
        }
    }

    /// Workers get numbers from `next` on.
    pub fn number_workers_from(&mut self, next: u32) {
        self.worker_next = self.worker_next.max(next);
    }

    /// What is to be done now. Call it after every change and on every tick.
    pub fn reconcile(&mut self, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        if self.closing {
            return orders;
        }
        if self.server_deaths.values().any(|deaths| deaths.count > self.deaths_max) {
            return vec![Order::GiveUp { role: Role::Server }];
        }
        if self.worker_deaths.count > self.deaths_max {
            return vec![Order::GiveUp { role: Role::Worker }];
        }
        for (&id, server) in self.servers.iter_mut().filter(|(_, s)| s.state == State::Waiting) {
            if self.server_deaths.get(&id).is_none_or(|deaths| now >= deaths.not_before) {
                server.state = State::Starting;
                orders.push(Order::Start { role: Role::Server, id });
            }
        }
        let workers = self.workers_target();
        while now >= self.worker_deaths.not_before && self.workers_kept() < workers {
            let id = self.worker_next;
            self.worker_next += 1;
            self.workers.insert(id, Member { state: State::Starting, pid: None, restarts: 0 });
            orders.push(Order::Start { role: Role::Worker, id });
        }
        let surplus = self.workers_kept().saturating_sub(workers) as usize;
        let kept = self.workers.iter_mut().rev().filter(|(_, w)| w.state != State::Draining);
        for (&id, worker) in kept.take(surplus) {
            worker.state = State::Draining;
            orders.extend(worker.pid.map(|pid| Order::Stop { role: Role::Worker, id, pid }));
        }
        orders
    }

    /// A process was started. One that was to be stopped meanwhile is stopped now.
    pub fn started(&mut self, role: Role, id: u32, pid: u32) -> Option<Order> {
        let member = self.member_mut(role, id)?;
        member.pid = Some(pid);
        (member.state == State::Draining).then_some(Order::Stop { role, id, pid })
    }

    /// A process has joined. `false`: it is not one of ours (any more).
    pub fn joined(&mut self, role: Role, id: u32, pid: u32) -> bool {
        let Some(member) = self.member_mut(role, id) else { return false };
        // A quick child joins before its start has been noted; a stranger has another pid. A server that is
        // being ended is to open nothing any more: its partitions are the next one's.
        let ending = role == Role::Server && member.state == State::Draining;
        if member.pid.is_some_and(|known| known != pid) || member.state == State::Waiting || ending {
            return false;
        }
        member.pid = Some(pid);
        if member.state == State::Starting {
            member.state = State::Joined;
        }
        true
    }

    /// Whether this process is part of the fleet. A worker that drains still is; a server that is being
    /// ended is not.
    pub fn knows(&self, role: Role, id: u32, pid: u32) -> bool {
        let ending = |m: &Member| role == Role::Server && m.state == State::Draining;
        self.member(role, id).is_some_and(|m| m.pid == Some(pid) && !ending(m))
    }

    /// Whether this very process was ordered and has not joined.
    pub fn is_starting(&self, role: Role, id: u32, pid: u32) -> bool {
        self.member(role, id)
            .is_some_and(|m| m.state == State::Starting && m.pid.is_none_or(|known| known == pid))
    }

    /// A process is gone. Returns whether that was asked for; `None` where it was none of ours.
    pub fn exited(&mut self, now: Duration, role: Role, id: u32, pid: u32, fault: Fault) -> Option<bool> {
        let member = *self.member(role, id).filter(|m| m.pid.is_none_or(|known| known == pid))?;
        let asked = member.state == State::Draining || self.closing;
        match role {
            Role::Worker => {
                self.workers.remove(&id);
            }
            Role::Server if self.dismissed.remove(&id) => {
                self.servers.remove(&id);
                self.server_deaths.remove(&id);
            }
            Role::Server => {
                let next = Member { state: State::Waiting, pid: None, restarts: member.restarts + 1 };
                self.servers.insert(id, next);
            }
        }
        if !asked && fault == Fault::Own {
            let deaths = match role {
                Role::Worker => &mut self.worker_deaths,
                Role::Server => self.server_deaths.entry(id).or_default(),
            };
            deaths.add(now);
        }
        Some(asked)
    }

    /// A batch was done: whatever died before is not a row of deaths.
    pub fn progress(&mut self) {
        self.worker_deaths.count = 0;
        self.server_deaths.clear();
    }

    /// So many workers are wanted from now on.
    pub fn scale(&mut self, workers: u32) {
        self.workers_wanted = workers;
    }

    /// There is to be a server of this number.
    pub fn want_server(&mut self, id: u32) {
        let waiting = Member { state: State::Waiting, pid: None, restarts: 0 };
        self.servers.entry(id).or_insert(waiting);
        // One that is on its way out is followed by another.
        self.dismissed.remove(&id);
    }

    /// There is to be no server of this number any more.
    pub fn dismiss_server(&mut self, id: u32) -> Option<Order> {
        let server = self.servers.get_mut(&id)?;
        match server.state {
            State::Waiting => {
                self.servers.remove(&id);
                None
            }
            State::Draining => None,
            State::Starting | State::Joined => {
                self.dismissed.insert(id);
                server.state = State::Draining;
                server.pid.map(|pid| Order::Stop { role: Role::Server, id, pid })
            }
        }
    }

    /// No more workers than that from now on, whatever is wanted.
    pub fn allow(&mut self, workers: Option<u32>) {
        self.workers_allowed = workers;
    }

    /// A worker leaves by itself at the end of its work: its exit is no death.
    pub fn leaving(&mut self, role: Role, id: u32) {
        if let Some(member) = self.member_mut(role, id) {
            member.state = State::Draining;
        }
    }

    /// Nothing is started any more, and every exit is expected.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Workers wanted.
    pub fn workers_wanted(&self) -> u32 {
        self.workers_wanted
    }

    /// Workers allowed, where somebody shares out the room.
    pub fn workers_allowed(&self) -> Option<u32> {
        self.workers_allowed
    }

    /// Workers that there are to be: as many as are wanted and allowed.
    pub fn workers_target(&self) -> u32 {
        self.workers_wanted.min(self.workers_allowed.unwrap_or(u32::MAX))
    }

    /// The workers there are.
    pub fn workers(&self) -> &BTreeMap<u32, Member> {
        &self.workers
    }

    /// The servers.
    pub fn servers(&self) -> &BTreeMap<u32, Member> {
        &self.servers
    }

    fn workers_kept(&self) -> u32 {
        self.workers.values().filter(|w| w.state != State::Draining).count() as u32
    }

    fn member(&self, role: Role, id: u32) -> Option<&Member> {
        match role {
            Role::Worker => self.workers.get(&id),
            Role::Server => self.servers.get(&id),
        }
    }

    fn member_mut(&mut self, role: Role, id: u32) -> Option<&mut Member> {
        match role {
            Role::Worker => self.workers.get_mut(&id),
            Role::Server => self.servers.get_mut(&id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_workers_than_allowed_whatever_is_wanted() {
        let mut fleet = running();
        fleet.allow(Some(1));
        assert_eq!(fleet.reconcile(at(2)), [Order::Stop { role: Role::Worker, id: 1, pid: 21 }]);
        fleet.scale(4);
        assert_eq!((fleet.reconcile(at(3)), fleet.workers_target()), (vec![], 1));
        assert_eq!(fleet.exited(at(4), Role::Worker, 1, 21, Fault::Own), Some(true));
        fleet.allow(None);
        let three = [2, 3, 4].map(|id| start(Role::Worker, id));
        assert_eq!((fleet.reconcile(at(5)), fleet.workers_target()), (three.to_vec(), 4));
    }

    #[test]
    fn a_server_that_is_dismissed_is_not_started_again() {
        let mut fleet = running();
        fleet.want_server(1);
        assert_eq!(fleet.reconcile(at(2)), [start(Role::Server, 1)]);
        assert_eq!(fleet.started(Role::Server, 1, 31), None);
        assert!(fleet.joined(Role::Server, 1, 31) && fleet.knows(Role::Server, 1, 31));
        assert_eq!(fleet.dismiss_server(1), Some(Order::Stop { role: Role::Server, id: 1, pid: 31 }));
        assert_eq!(fleet.dismiss_server(1), None, "once is enough");
        assert!(!fleet.knows(Role::Server, 1, 31));
        assert_eq!(fleet.exited(at(3), Role::Server, 1, 31, Fault::Own), Some(true));
        assert_eq!((fleet.reconcile(at(4)), fleet.servers().len()), (vec![], 1));
        fleet.want_server(1);
        assert_eq!(fleet.dismiss_server(1), None);
        assert_eq!(fleet.reconcile(at(5)), [], "it was never started");
        fleet.want_server(1);
        fleet.reconcile(at(6));
        fleet.started(Role::Server, 1, 32);
        assert!(fleet.joined(Role::Server, 1, 32) && fleet.dismiss_server(1).is_some());
        fleet.want_server(1);
        assert_eq!(fleet.exited(at(7), Role::Server, 1, 32, Fault::Own), Some(true));
        assert_eq!(fleet.reconcile(at(8)), [start(Role::Server, 1)], "somebody wants it again");
    }

    fn start(role: Role, id: u32) -> Order {
        Order::Start { role, id }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A fleet of one server and two workers that all run.
    fn running() -> Fleet {
        let mut fleet = Fleet::new(1, 2, 3);
        let orders = fleet.reconcile(at(0));
        assert_eq!(orders, [start(Role::Server, 0), start(Role::Worker, 0), start(Role::Worker, 1)]);
        for (role, id, pid) in [(Role::Server, 0, 10), (Role::Worker, 0, 20), (Role::Worker, 1, 21)] {
            assert_eq!(fleet.started(role, id, pid), None);
            assert!(fleet.joined(role, id, pid));
        }
        assert_eq!(fleet.reconcile(at(1)), []);
        fleet
    }

    #[test]
    fn a_dead_worker_is_replaced_at_once_under_a_new_number() {
        let mut fleet = running();
        assert_eq!(fleet.exited(at(5), Role::Worker, 0, 20, Fault::Own), Some(false));
        assert_eq!(fleet.reconcile(at(5)), [start(Role::Worker, 2)]);
    }

    #[test]
    fn a_dead_server_is_started_again_under_its_number() {
        let mut fleet = running();
        assert_eq!(fleet.exited(at(5), Role::Server, 0, 10, Fault::Own), Some(false));
        assert_eq!(fleet.reconcile(at(5)), [start(Role::Server, 0)]);
        assert_eq!(fleet.servers()[&0].restarts, 1);
    }

    #[test]
    fn deaths_in_a_row_are_paused_and_then_given_up_but_progress_forgives() {
        let mut fleet = running();
        fleet.exited(at(0), Role::Worker, 0, 20, Fault::Own);
        assert_eq!(fleet.reconcile(at(0)), [start(Role::Worker, 2)]);
        fleet.started(Role::Worker, 2, 22);
        fleet.exited(at(10), Role::Worker, 2, 22, Fault::Own);
        assert_eq!(fleet.reconcile(at(10)), [], "the second in a row waits");
        assert_eq!(fleet.reconcile(at(510)), [start(Role::Worker, 3)]);
        fleet.progress();
        for n in 0..3u64 {
            let id = 3 + n as u32;
            fleet.started(Role::Worker, id, 100 + id);
            fleet.exited(at(1000 + n * 60_000), Role::Worker, id, 100 + id, Fault::Own);
            assert_eq!(fleet.reconcile(at(50_000 + n * 60_000)), [start(Role::Worker, id + 1)]);
        }
        fleet.started(Role::Worker, 6, 106);
        fleet.exited(at(300_000), Role::Worker, 6, 106, Fault::Own);
        assert_eq!(fleet.reconcile(at(400_000)), [Order::GiveUp { role: Role::Worker }]);
    }

    #[test]
    fn what_was_preempted_comes_back_at_once_however_often() {
        let mut fleet = running();
        for (n, id) in [0, 2, 3, 4, 5, 6, 7].into_iter().enumerate() {
            if n > 0 {
                fleet.started(Role::Worker, id, 20 + id);
            }
            assert_eq!(fleet.exited(at(n as u64), Role::Worker, id, 20 + id, Fault::Outside), Some(false));
            assert_eq!(fleet.reconcile(at(n as u64)), [start(Role::Worker, n as u32 + 2)]);
        }
    }

    #[test]
    fn a_server_does_not_wait_for_the_deaths_of_others() {
        let mut fleet = running();
        fleet.exited(at(0), Role::Worker, 0, 20, Fault::Own);
        fleet.exited(at(0), Role::Worker, 1, 21, Fault::Own);
        assert_eq!(fleet.reconcile(at(0)), [], "both workers: the second death is one in a row");
        fleet.exited(at(1), Role::Server, 0, 10, Fault::Own);
        assert_eq!(fleet.reconcile(at(1)), [start(Role::Server, 0)]);
        fleet.started(Role::Server, 0, 11);
        fleet.exited(at(2), Role::Server, 0, 11, Fault::Own);
        assert_eq!(fleet.reconcile(at(3)), [], "it waits for its own");
    }

    #[test]
    fn scaling_down_drains_the_newest_and_their_exit_is_no_death() {
        let mut fleet = running();
        fleet.scale(1);
        assert_eq!(fleet.reconcile(at(1)), [Order::Stop { role: Role::Worker, id: 1, pid: 21 }]);
        assert_eq!(fleet.reconcile(at(2)), []);
        assert_eq!(fleet.exited(at(3), Role::Worker, 1, 21, Fault::Own), Some(true));
        assert_eq!(fleet.reconcile(at(4)), []);
        fleet.scale(3);
        assert_eq!(fleet.reconcile(at(5)), [start(Role::Worker, 2), start(Role::Worker, 3)]);
    }

    #[test]
    fn a_worker_scaled_away_before_it_ran_is_stopped_when_it_does() {
        let mut fleet = Fleet::new(1, 2, 3);
        fleet.reconcile(at(0));
        fleet.scale(1);
        assert_eq!(fleet.reconcile(at(1)), [], "no process to stop yet");
        let stop = Order::Stop { role: Role::Worker, id: 1, pid: 7 };
        assert_eq!(fleet.started(Role::Worker, 1, 7), Some(stop));
    }

    #[test]
    fn a_server_that_is_being_ended_opens_nothing_any_more() {
        let mut fleet = running();
        fleet.leaving(Role::Server, 0);
        assert!(!fleet.joined(Role::Server, 0, 10) && !fleet.knows(Role::Server, 0, 10));
        assert_eq!(fleet.exited(at(1), Role::Server, 0, 10, Fault::Own), Some(true));
        fleet.leaving(Role::Worker, 0);
        assert!(fleet.knows(Role::Worker, 0, 20), "a worker that drains has things to say");
    }

    #[test]
    fn strangers_are_not_let_in() {
        let mut fleet = running();
        assert!(!fleet.joined(Role::Worker, 0, 999), "another process with a known number");
        assert!(!fleet.joined(Role::Worker, 77, 20), "an unknown number");
        assert!(fleet.joined(Role::Worker, 0, 20), "joining twice is fine");
        assert_eq!(fleet.exited(at(0), Role::Worker, 0, 999, Fault::Own), None);
    }
}
