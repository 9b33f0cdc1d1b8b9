//! A virtual master: the real job behind a virtual ledger, doing what `master/src/run.rs` does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::config::{Exit, Process};
use elasticdl_master::fleet::Order;
use elasticdl_master::job::{Answer, Effect, Event, Job, Start, Ticket};
use elasticdl_master::ledger::{Book, Entry};
use elasticdl_master::status::Phase;
use elasticdl_spec::{Purpose, TaskId};
use elasticdl_wire::control::{Role, beat_reply::What, report_request::Outcome};

use crate::branches::Branch;
use crate::net::{Pid, Question};
use crate::sabotage::Sabotage;
use crate::world::{Action, World};

/// Between the end of a job and that of its master.
const GOODBYE: Duration = Duration::from_millis(1500);
/// Where checkpoints are, as servers are told.
const DIR: &str = "ckpt";

/// A master of the virtual world.
pub struct Master {
    /// Its term.
    pub term: u64,
    /// Whether it runs.
    pub alive: bool,
    /// Stopped until then.
    pub paused_until: Duration,
    /// How the job ended, as far as this master knows.
    pub over: Option<Phase>,
    /// The job.
    pub job: Job,
    began: Duration,
    file: u64,
    /// What it has written.
    book: Book,
    tickets: BTreeMap<Ticket, (Pid, u64)>,
    ticket_next: Ticket,
    /// What comes before anything from outside.
    local: VecDeque<Event>,
    inbox: VecDeque<Event>,
    effects: VecDeque<Effect>,
    /// Entries that wait for the disk, and with them everything else.
    syncing: Option<Vec<Entry>>,
    /// Processes that were started or adopted and whose exit was not seen.
    watching: BTreeSet<Pid>,
    /// The checkpoint that servers were told to write.
    writing: Option<u64>,
}

/// What kind of event an effect follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Ask,
    Done(TaskId),
    Exit,
    Other,
}

impl Master {
    /// One that has yet to begin.
    fn new(term: u64, began: Duration, job: Job, file: u64, book: Book, watching: BTreeSet<Pid>) -> Self {
        Master {
            term,
            alive: true,
            paused_until: Duration::ZERO,
            over: None,
            job,
            began,
            file,
            book,
            tickets: BTreeMap::new(),
            ticket_next: 1,
            local: VecDeque::new(),
            inbox: VecDeque::from([Event::Begin]),
            effects: VecDeque::new(),
            syncing: None,
            watching,
            writing: None,
        }
    }
}

impl World {
    /// Whether this master could answer: it runs, be it stopped.
    pub(crate) fn is_up(&self, master: usize) -> bool {
        self.masters.get(master).is_some_and(|m| m.as_ref().is_some_and(|m| m.alive))
    }

    /// The master with the newest term, if it runs.
    pub(crate) fn leader(&self) -> Option<usize> {
        let newest = self.masters.len().checked_sub(1)?;
        self.is_up(newest).then_some(newest)
    }

    /// Where a process finds a master: mostly the newest, now and then the one it knows.
    pub(crate) fn route_for(&mut self, pid: Pid) -> usize {
        let known = self.processes[pid as usize].route;
        if !self.healed && self.is_up(known) && self.rng.below(4) == 0 {
            return known;
        }
        self.masters.len().saturating_sub(1)
    }

    /// Starts a master, from what the disk says.
    pub(crate) fn start_master(&mut self) {
        if self.disk_fails(1.0) {
            self.branches.count(Branch::LedgerFailed);
            return self.plan_master();
        }
        // First the term, then the ledger: whoever finds its term still there after a write was read.
        let term = self.disk.claim_term();
        let opened = match self.disk.open_ledger(&mut self.rng) {
            Ok(opened) => opened,
            Err(reason) => return self.fail("ledger", reason),
        };
        if opened.cut > 0 {
            self.branches.count(Branch::LedgerTorn);
        }
        let mut book = opened.book;
        if book.finished.is_some() {
            self.branches.count(Branch::JobResumed);
        }
        let committed = match book.committed.map(|id| self.committed_manifest(id)).transpose() {
            Ok(committed) => committed,
            Err(reason) => return self.fail("checkpoints", reason),
        };
        if !book.arriving.is_empty() {
            self.branches.count(Branch::Arriving);
        }
        if self.disk.newest_complete() > book.committed {
            self.branches.count(Branch::ManifestUnknown);
        }
        let file = opened.number + 1;
        self.disk.begin_ledger(file, &book);
        let watching = self.adopt(&mut book);
        assert!(term > book.term, "terms are claimed before they are written down");
        if term > 1 {
            self.branches.count(Branch::MasterRestarted);
        }
        self.note("master", [term, watching.len() as u64, opened.cut as u64], || {
            let (lost, committed) = (opened.cut, book.committed);
            format!("term {term} begins: adopts {watching:?}, committed {committed:?}, {lost} bytes cut off")
        });
        let job = Job::new(Start {
            plan: self.scenario.plan.clone(),
            checkpoint_dir: DIR.into(),
            book: book.clone(),
            committed,
            checkpoint_next: self.disk.next_checkpoint(),
            checkpoint_age: Duration::ZERO,
            best: None,
            exports: false,
            workers_allowed: None,
            term,
        });
        let master = self.masters.len();
        let began = self.now;
        self.masters.push(Some(Box::new(Master::new(term, began, job, file, book, watching))));
        self.checkers.leases.begun(term);
        self.queue.plan(self.now + self.scenario.tick, Action::Tick { master });
        self.queue.plan(self.now + Duration::from_millis(1), Action::Found { master, number: 0 });
        self.run_master(master);
    }

    fn committed_manifest(&self, id: u64) -> Result<Manifest, String> {
        let dir = self
            .disk
            .checkpoint(id)
            .ok_or(format!("the ledger goes by checkpoint {id}, which is not there"))?;
        dir.manifest().map_err(|reason| format!("the ledger goes by checkpoint {id}: {reason}"))
    }

    /// Keeps what still runs in the book.
    fn adopt(&mut self, book: &mut Book) -> BTreeSet<Pid> {
        let before = book.processes.len();
        book.processes.retain(|_, running| self.processes[running.process.pid as usize].alive);
        (book.processes.len()..before).for_each(|_| self.branches.count(Branch::GoneWithoutMaster));
        book.processes.iter().for_each(|_| self.branches.count(Branch::Adopted));
        book.processes.values().map(|running| running.process.pid).collect()
    }

    /// The next shard is found in the files.
    pub(crate) fn shard_found(&mut self, master: usize, number: usize) {
        let (train, validate) = (&self.scenario.shards, &self.scenario.validation);
        let after_train = number.checked_sub(train.len() + 1);
        let event = match (train.get(number), after_train) {
            (Some(shard), _) => Event::ShardFound(Purpose::Train, shard.clone()),
            (None, None) => Event::AllFound(Purpose::Train),
            (None, Some(n)) => match validate.get(n) {
                Some(shard) => Event::ShardFound(Purpose::Evaluate, shard.clone()),
                None => Event::AllFound(Purpose::Evaluate),
            },
        };
        let last = matches!(event, Event::AllFound(Purpose::Evaluate));
        self.deliver(master, event);
        if !last {
            let soon = Duration::from_micros(100 + self.rng.below(3000));
            self.queue.plan(self.now + soon, Action::Found { master, number: number + 1 });
        }
    }

    /// Time passes for a master.
    pub(crate) fn master_tick(&mut self, master: usize) {
        self.queue.plan(self.now + self.scenario.tick, Action::Tick { master });
        self.deliver(master, Event::Tick);
    }

    /// A question has come.
    pub(crate) fn asked(&mut self, master: usize, pid: Pid, try_number: u64, question: Question) {
        let (caller, address) = (self.caller(pid), self.address_of(pid));
        let sabotaged = self.sabotage == Sabotage::IncarnationsOff;
        let now = self.now;
        let Some(m) = self.masters[master].as_deref_mut() else { return };
        let ticket = m.ticket_next;
        m.ticket_next += 1;
        m.tickets.insert(ticket, (pid, try_number));
        let mut event = question.into_event(ticket, caller, address);
        if sabotaged
            && let Event::Reported(_, _, report) = &mut event
            && let Some(Outcome::Done(done)) = &mut report.outcome
            && !done.incarnations.is_empty()
        {
            let mut effects = Vec::new();
            m.job.step(now - m.began, Event::TopologyAsked(0), &mut effects);
            let topology = effects.iter().find_map(|e| match e {
                Effect::Answer(_, Answer::Topology(topology)) => Some(topology),
                _ => None,
            });
            done.incarnations =
                topology.map(|t| t.places.iter().map(|p| p.incarnation).collect()).unwrap_or_default();
        }
        self.deliver(master, event);
    }

    /// A process that a master watches is gone.
    pub(crate) fn exit_seen(&mut self, master: usize, exit: Exit) {
        let watched = self.masters[master].as_mut().is_some_and(|m| m.watching.remove(&exit.pid));
        if watched {
            self.deliver(master, Event::Exited(exit));
        }
    }

    /// Something happens to a master.
    pub(crate) fn deliver(&mut self, master: usize, event: Event) {
        if let Some(m) = self.masters[master].as_mut().filter(|m| m.alive) {
            m.inbox.push_back(event);
            // One that is stopped finds it when it goes on.
            if m.paused_until <= self.now {
                self.run_master(master);
            }
        }
    }

    /// The ledger is on disk as far as it was written.
    pub(crate) fn synced(&mut self, master: usize) {
        let Some(m) = self.masters[master].as_mut().filter(|m| m.alive) else { return };
        let Some(entries) = m.syncing.take() else { return };
        let (file, term) = (m.file, m.term);
        self.disk.sync_ledger(file);
        if term < self.disk.term() {
            self.branches.count(Branch::Succeeded);
            return self.kill_master(master);
        }
        entries.iter().for_each(|entry| self.check_entry(entry));
        self.run_master(master);
    }

    fn check_entry(&mut self, entry: &Entry) {
        if let Entry::Committed { checkpoint, covered } = entry {
            self.branches.count(Branch::Committed);
            if let Err(reason) =
                crate::checkers::checkpoints::check(&self.scenario, &self.disk, *checkpoint, covered)
            {
                self.fail("checkpoints", reason);
            }
        }
    }

    fn run_master(&mut self, master: usize) {
        let Some(mut m) = self.masters[master].take() else { return };
        while m.alive && m.syncing.is_none() {
            if let Some(effect) = m.effects.pop_front() {
                self.carry_out(master, &mut m, effect);
            } else if let Some(event) = m.local.pop_front().or_else(|| m.inbox.pop_front()) {
                self.step_master(&mut m, event);
            } else {
                break;
            }
        }
        let died = !m.alive;
        self.masters[master] = Some(m);
        if died {
            self.master_died(master);
        }
    }

    fn step_master(&mut self, m: &mut Master, event: Event) {
        let cause = match &event {
            Event::LeaseAsked(..) => Cause::Ask,
            Event::Exited(_) | Event::Begin => Cause::Exit,
            Event::Reported(_, _, report) => match (&report.outcome, report.task.parse()) {
                (Some(Outcome::Done(_)), Ok(task)) => Cause::Done(task),
                _ => Cause::Other,
            },
            _ => Cause::Other,
        };
        let mut effects = Vec::new();
        m.job.step(self.now - m.began, event, &mut effects);
        for effect in &effects {
            self.count_effect(m, cause, effect);
        }
        m.effects.extend(effects);
    }

    fn count_effect(&mut self, m: &mut Master, cause: Cause, effect: &Effect) {
        let branch = match (effect, cause) {
            (Effect::Record(Entry::Freed { .. }), Cause::Ask) => Branch::LeaseLostOnItsWay,
            (Effect::Record(Entry::Freed { .. }), Cause::Exit) => Branch::LeaseOfGone,
            (Effect::Record(Entry::Freed { task, .. }), Cause::Done(done)) if *task == done => {
                Branch::DoneRefused
            }
            (Effect::Record(Entry::Leased { .. }), _) => Branch::LeaseGiven,
            (Effect::Record(Entry::Done { .. }), _) => Branch::DoneTaken,
            (Effect::Answer(_, Answer::Report(false)), _) => Branch::ReportNotHeld,
            (Effect::Emit("lease_expired", _), _) => Branch::LeaseExpired,
            (Effect::Emit("silent", _), _) => Branch::Silent,
            (Effect::Emit("warning", facts), _)
                if facts["message"].as_str().is_some_and(|m| m.contains("lost on their way")) =>
            {
                Branch::MoveLost
            }
            (Effect::Emit("warning", facts), _)
                if facts["message"].as_str().is_some_and(|m| m.contains("was to serve its backups")) =>
            {
                Branch::PromotionLost
            }
            (Effect::Emit("scaled", facts), _) if facts["automatic"] == true => Branch::Measured,
            (Effect::Emit("quarantined", _), _) => Branch::Quarantined,
            (Effect::Emit("evaluated", _), _) => Branch::Evaluated,
            (Effect::Emit("warning", facts), _)
                if facts["message"].as_str().is_some_and(|m| m.contains("checkpoint")) =>
            {
                Branch::CheckpointFailed
            }
            (Effect::Emit("replay", facts), _) => {
                if facts["tasks"].as_u64() > Some(0) {
                    self.branches.count(Branch::Replayed);
                }
                if self.scenario.is_deterministic() {
                    self.branches.count(Branch::RolledBack);
                }
                if self.scenario.is_synchronous() {
                    self.branches.count(Branch::StepsBack);
                }
                if m.writing.take().is_some() {
                    self.branches.count(Branch::CheckpointAbandoned);
                }
                Branch::ServerReborn
            }
            _ => return,
        };
        self.branches.count(branch);
    }

    fn carry_out(&mut self, master: usize, m: &mut Master, effect: Effect) {
        let term = m.term;
        match effect {
            Effect::Record(entry) => self.record(master, m, entry),
            Effect::Answer(ticket, answer) => {
                let Some((pid, try_number)) = m.tickets.remove(&ticket) else { return };
                self.note_answer(m, pid, &answer);
                self.send_answer(pid, try_number, answer);
            }
            Effect::Fleet(Order::Start { role, id }) => {
                let pid = self.spawn(role, id, master);
                m.watching.insert(pid);
                m.local.push_back(Event::Launched(role, id, Ok(Process { pid, started: pid.into() })));
            }
            Effect::Fleet(Order::Stop { pid, .. }) => {
                self.queue.plan(self.now + Duration::from_millis(1), Action::Terminate { pid });
            }
            Effect::Fleet(Order::GiveUp { .. }) => unreachable!("the job turns this into a failure"),
            Effect::Kill(role, id, pid) => {
                self.note("kill", [pid.into(), id.into(), term], || {
                    format!("term {term} kills pid {pid}: {role:?} {id}")
                });
                // Whoever cannot be reached cannot be killed either.
                let at = self.processes[pid as usize].cut_until.max(self.now);
                self.queue.plan(at, Action::Kill { pid });
            }
            Effect::Commit(manifest) => {
                let time = self.disk_time() * 2;
                self.queue.plan(self.now + time, Action::Manifest { master, manifest });
            }
            Effect::Prune(id) => {
                if self.disk.prune(id, self.scenario.plan.job.checkpoint.keep) > 0 {
                    self.branches.count(Branch::FileKept);
                }
            }
            Effect::Export(_) => unreachable!("nothing is exported"),
            Effect::Emit("progress", _) => {}
            Effect::Emit(event, facts) => {
                self.note("event", [term, facts.len() as u64, event.len() as u64], || {
                    let facts = serde_json::to_string(&facts).unwrap_or_default();
                    format!("term {term}: {event} {facts}")
                });
            }
            Effect::Finish(phase) => self.finished(master, m, phase),
        }
    }

    fn note_answer(&mut self, m: &mut Master, pid: Pid, answer: &Answer) {
        if m.term < self.disk.term() {
            self.branches.count(Branch::OldMasterAnswered);
        }
        match answer {
            Answer::Beat(reply) => {
                if let Some(What::WriteCheckpoint(order)) = &reply.what {
                    m.writing = Some(order.checkpoint);
                    self.disk.make_checkpoint(order.checkpoint);
                    let (id, term) = (order.checkpoint, m.term);
                    self.note("order", [pid.into(), id, term], || {
                        format!("term {term}: pid {pid} writes checkpoint {id}")
                    });
                }
            }
            Answer::Lease(reply) => {
                if let Some(elasticdl_wire::control::lease_reply::What::Leased(leased)) = &reply.what {
                    if leased.again {
                        self.branches.count(Branch::LeaseAgain);
                    }
                    self.note("lease", [pid.into(), leased.term, leased.lease], || {
                        format!(
                            "term {}: {} lease {}.{} to pid {pid}",
                            m.term, leased.task, leased.term, leased.lease
                        )
                    });
                }
            }
            _ => {}
        }
    }

    /// Writes entries that follow each other, and waits for the disk where one of them must last.
    fn record(&mut self, master: usize, m: &mut Master, entry: Entry) {
        let mut entries = vec![entry];
        while let Some(Effect::Record(_)) = m.effects.front() {
            if let Some(Effect::Record(entry)) = m.effects.pop_front() {
                entries.push(entry);
            }
        }
        let believed = m.term == self.disk.term();
        for entry in &entries {
            if believed && let Entry::Leased { task, lease, .. } = entry {
                self.checkers.leases.given(self.now, *task, *lease, &m.book);
            }
            m.book.apply(entry);
        }
        self.disk.append(m.file, &entries);
        let share = if entries.iter().any(Entry::must_last) { 0.3 } else { 0.01 };
        if std::mem::take(&mut self.ledger_fails) || self.disk_fails(share) {
            self.branches.count(Branch::LedgerFailed);
            self.note("ledger fails", [m.term, 0, 0], || format!("term {} ends", m.term));
            m.alive = false;
            return;
        }
        if entries.iter().any(Entry::must_last) {
            m.syncing = Some(entries);
            let time = self.disk_time();
            self.queue.plan(self.now + time, Action::Synced { master });
        }
    }

    /// A manifest is written, or cannot be.
    pub(crate) fn manifest_written(&mut self, master: usize, manifest: Box<Manifest>) {
        if !self.is_up(master) {
            return;
        }
        let id = manifest.id;
        let written = !self.disk_fails(1.0) && self.disk.put_manifest(&manifest);
        self.note("manifest", [id, written.into(), 0], || format!("checkpoint {id}: {written}"));
        if let Some(m) = self.masters[master].as_mut() {
            m.writing = None;
        }
        let outcome = if written {
            Ok(manifest)
        } else {
            self.branches.count(Branch::ManifestFailed);
            Err("the disk takes nothing now".to_string())
        };
        self.deliver(master, Event::Committed(id, outcome));
    }

    /// The job is over, as this master sees it.
    fn finished(&mut self, master: usize, m: &mut Master, phase: Phase) {
        m.over = Some(phase);
        self.note("finish", [m.term, 0, 0], || format!("term {}: {phase:?}", m.term));
        let believed = m.term == self.disk.term();
        if believed && phase == Phase::Done {
            return self.job_done();
        }
        if believed && phase == Phase::Failed && self.now > self.scenario.heal + Duration::from_secs(15) {
            let error = m.job.status(self.now - m.began).error.unwrap_or_default();
            self.fail("liveness", format!("the job failed though nothing is wrong any more: {error}"));
        }
        self.queue.plan(self.now + GOODBYE, Action::MasterEnds { master });
    }

    /// A master whose job is over ends, and with it what it watches.
    pub(crate) fn master_ends(&mut self, master: usize) {
        let Some(m) = self.masters[master].as_mut().filter(|m| m.alive) else { return };
        m.alive = false;
        for pid in std::mem::take(&mut m.watching) {
            self.end(pid, None);
        }
        self.master_died(master);
    }

    /// A master is killed.
    pub(crate) fn kill_master(&mut self, master: usize) {
        if let Some(m) = self.masters[master].as_mut().filter(|m| m.alive) {
            m.alive = false;
            self.master_died(master);
        }
    }

    /// What a master's death leaves behind.
    fn master_died(&mut self, master: usize) {
        let Some(m) = self.masters[master].as_ref() else { return };
        let (term, file) = (m.term, m.file);
        let mut lost = 0;
        if !self.healed && self.rng.uniform() < self.scenario.disk.loses {
            lost = self.disk.tear(file, &mut self.rng);
        }
        if lost > 0 {
            self.branches.count(Branch::LedgerLost);
        }
        self.disk.settle(file);
        self.note("master dies", [term, lost as u64, 0], || {
            format!("term {term}, {lost} bytes of its ledger lost")
        });
        self.reset_connections(master);
        if master + 1 == self.masters.len() && !self.over {
            self.plan_master();
        }
    }

    /// Another master will be started.
    pub(crate) fn plan_master(&mut self) {
        if !std::mem::replace(&mut self.starting, true) {
            let pause = Duration::from_millis(20 + self.rng.below(1500));
            self.queue.plan(self.now + pause, Action::StartMaster);
        }
    }

    /// The number of a role's processes that run.
    pub(crate) fn running(&self, role: Role) -> Vec<Pid> {
        let all = self.processes.iter().enumerate();
        all.filter(|(_, p)| p.alive && p.role == role).map(|(pid, _)| pid as Pid).collect()
    }
}
