//! The master's durable memory: what happened, as entries, and the [`Book`] that they add up to.
//!
//! The job records an entry *before* it acts on it, by the order of its effects. A master that is started
//! again reads the book and goes on. Pure; [`records`] turns entries into bytes, by [`log`], and `kept.rs` keeps
//! them: in a file (`file.rs`), or in objects (`objects.rs`) that `segments.rs` puts in order.

mod file;
mod kept;
pub mod log;
mod objects;
pub mod records;
mod segments;

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_spec::mix::{hash_text, mix2};
use elasticdl_spec::{LeaseId, Plan, Shard, TaskId, WorkerId};
use elasticdl_wire::control::Role;
use serde::{Deserialize, Serialize};

use crate::config::Process;
use crate::status::Phase;
use crate::tasks::{Done, Finished};

pub use kept::{Ledger, dir_of, read};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// A master has claimed this term.
    Begun {
        /// The term.
        term: u64,
        /// What of the job must never change under its ledger.
        terms_of_job: TermsOfJob,
    },
    /// A training shard was found. They are numbered in the order in which they are found.
    Shard {
        /// Its number.
        number: u32,
        /// What is remembered of it.
        note: ShardNote,
    },
    /// All training shards are found.
    Indexed,
    /// A task is given to a worker.
    Leased {
        /// The task.
        task: TaskId,
        /// The lease's number.
        lease: LeaseId,
        /// Who gets it.
        worker: WorkerId,
        /// Whether it waits for the disk: in the deterministic mode a lease that was forgotten could hide a step
        /// that some partitions have and others have not.
        lasting: bool,
    },
    /// A lease ended before its task was done.
    Freed {
        /// The task.
        task: TaskId,
        /// Whether the worker gave it back itself, between two batches. Else it may have been in the middle of
        /// a step.
        between_batches: bool,
    },
    /// Every batch of a task was acknowledged by every partition.
    Done {
        /// The task.
        task: TaskId,
        /// What it came to.
        finished: Finished,
    },
    /// Partitions begin another life, with what the last committed checkpoint holds. All tasks that it does
    /// not cover are open again.
    Reborn {
        /// The partitions with their new incarnations.
        partitions: Vec<(u32, u64)>,
        /// Where all of them went back to one step: no lease below this one counts any more.
        floor: Option<LeaseId>,
    },
    /// Which server each partition is to live at.
    Placed {
        /// By partition.
        servers: Vec<u32>,
    },
    /// Partitions are another server's from now on. It has copied them, and they are handed over to it as they are:
    /// whatever was applied stays applied.
    Moved {
        /// The partitions with their new incarnations.
        partitions: Vec<(u32, u64)>,
        /// The server that has them now.
        server: u32,
    },
    /// A server has a backup of a partition's present life, and lacks nothing of it.
    Backed {
        /// The partition.
        partition: u32,
        /// The server.
        server: u32,
    },
    /// Partitions have no backup any more.
    Alone {
        /// The partitions.
        partitions: Vec<u32>,
    },
    /// That server serves them.
    Arrived {
        /// The partitions.
        partitions: Vec<u32>,
    },
    /// A checkpoint of this number is begun. No other one, of whatever master, gets the number.
    Cut {
        /// The number.
        checkpoint: u64,
    },
    /// A checkpoint is complete.
    Committed {
        /// Its number.
        checkpoint: u64,
        /// The tasks that every one of its files has to the end.
        covered: Done,
    },
    /// A process was started.
    Started {
        /// Worker or server.
        role: MemberRole,
        /// Its number.
        id: u32,
        /// The process.
        process: Process,
    },
    /// A server serves its partitions.
    Serving {
        /// Its number.
        id: u32,
        /// Where.
        address: String,
    },
    /// A process is gone.
    Exited {
        /// Worker or server.
        role: MemberRole,
        /// Its number.
        id: u32,
    },
    /// So many workers are wanted.
    Scaled {
        /// How many.
        workers: u32,
        /// Whether that is the master's own choice, which it may change.
        #[serde(default)]
        automatic: bool,
    },
    /// So many servers are wanted.
    ServersScaled {
        /// How many.
        servers: u32,
    },
    /// A batch is set aside: it moves the marks and teaches nothing.
    Quarantined(Quarantined),
    /// The job is over.
    Finished {
        /// How it ended.
        phase: Phase,
    },
}

impl Entry {
    /// Whether what follows from this entry must wait until it is on disk. Of the other entries a loss
    /// costs work and no exactness: a lease that was forgotten is below the next master's, and a task that
    /// was forgotten to be done is found to be so at the marks.
    pub fn must_last(&self) -> bool {
        matches!(
            self,
            Entry::Begun { .. }
                | Entry::Leased { lasting: true, .. }
                | Entry::Reborn { .. }
                | Entry::Placed { .. }
                | Entry::Moved { .. }
                | Entry::Backed { .. }
                | Entry::Alone { .. }
                | Entry::Cut { .. }
                | Entry::Committed { .. }
                | Entry::Quarantined(_)
                | Entry::Finished { .. }
        )
    }
}

/// [`Role`] with names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberRole {
    /// A worker.
    Worker,
    /// A server.
    Server,
}

impl From<Role> for MemberRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Worker => MemberRole::Worker,
            Role::Server => MemberRole::Server,
        }
    }
}

impl From<MemberRole> for Role {
    fn from(role: MemberRole) -> Self {
        match role {
            MemberRole::Worker => Role::Worker,
            MemberRole::Server => Role::Server,
        }
    }
}

/// What makes the batches of a task, and the partitions, what they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermsOfJob {
    /// Records per batch.
    pub batch: u64,
    /// Passes over the data.
    pub epochs: u32,
    /// How many partitions there are.
    pub partitions: u32,
    /// The seed of everything.
    pub seed: u64,
    /// A number for the model's tables and tensors.
    pub model: u64,
}

impl TermsOfJob {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        let job = &plan.job;
        let shape = serde_json::to_string(&plan.shape).expect("a shape is JSON");
        TermsOfJob {
            batch: job.train.batch as u64,
            epochs: job.train.epochs,
            partitions: job.servers.partitions,
            seed: job.train.seed,
            model: hash_text(&shape),
        }
    }

    /// What differs between these and those of a later master, in words.
    pub fn difference(&self, later: &TermsOfJob) -> Option<String> {
        let pairs = [
            ("train.batch", self.batch, later.batch),
            ("servers.partitions", self.partitions.into(), later.partitions.into()),
            ("train.seed", self.seed, later.seed),
        ];
        let changed = pairs.iter().find(|(_, before, now)| before != now);
        if let Some((key, before, now)) = changed {
            return Some(format!("{key} was {before} when the job began, and is {now}"));
        }
        (self.model != later.model).then(|| "the model's tables or tensors are others".to_string())
    }
}

/// What the ledger remembers of a training shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardNote {
    /// Its records, where that is known without reading it.
    pub records: Option<u64>,
    /// A number for its place and its file's identity.
    pub fingerprint: u64,
}

impl ShardNote {
    /// That of a shard.
    pub fn of(shard: &Shard) -> Self {
        let place = mix2(hash_text(&shard.path), shard.first);
        let identity = mix2(shard.records.unwrap_or(u64::MAX), shard.fingerprint);
        ShardNote { records: shard.records, fingerprint: mix2(place, identity) }
    }
}

/// A batch that failed again and again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    /// Its task.
    pub task: TaskId,
    /// Which batch of it.
    pub batch: u64,
    /// What went wrong.
    pub error: String,
}

/// A process that was started and has not been seen to exit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Worker or server.
    pub role: MemberRole,
    /// Its number.
    pub id: u32,
    /// The process.
    pub process: Process,
    /// Where a server serves.
    pub address: Option<String>,
}

/// What all entries add up to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Book {
    /// The newest term claimed; 0: no master has begun.
    pub term: u64,
    /// What must not change.
    pub terms_of_job: TermsOfJob,
    /// Training shards by number.
    pub shards: BTreeMap<u32, ShardNote>,
    /// Whether all of them are known.
    pub indexed: bool,
    /// Tasks that the committed checkpoint covers.
    pub covered: Done,
    /// Tasks that are done beyond it.
    pub recent: BTreeMap<TaskId, Finished>,
    /// Tasks that are leased.
    pub leased: BTreeMap<TaskId, (LeaseId, WorkerId)>,
    /// Tasks whose lease ended in the middle of a step, perhaps, and that are not done since.
    pub interrupted: BTreeSet<TaskId>,
    /// The last committed checkpoint.
    pub committed: Option<u64>,
    /// The number of the last checkpoint that was begun.
    #[serde(default)]
    pub cut: u64,
    /// Incarnations by partition; those that are not here are in their first.
    pub incarnations: BTreeMap<u32, u64>,
    /// By partition, where it has moved since: the incarnation in which its present rows were restored or born. What
    /// later ones have acknowledged holds, too.
    #[serde(default)]
    pub since: BTreeMap<u32, u64>,
    /// Which server each partition lives at; those that are not here, where their number puts them.
    #[serde(default)]
    pub servers: BTreeMap<u32, u32>,
    /// Partitions that were given to a server which has not been heard to serve them.
    #[serde(default)]
    pub arriving: BTreeSet<u32>,
    /// By partition: the server with a backup of it.
    #[serde(default)]
    pub backups: BTreeMap<u32, u32>,
    /// No lease below this one counts.
    pub floor: Option<LeaseId>,
    /// What was started and has not been seen to exit, by name: "worker-3", "ps-0".
    pub processes: BTreeMap<String, Running>,
    /// The number that the next worker gets.
    pub worker_next: u32,
    /// How many workers are wanted, where that was changed.
    pub workers_wanted: Option<u32>,
    /// Whether that was the master's own choice.
    #[serde(default)]
    pub workers_automatic: bool,
    /// How many servers are wanted, where that was changed.
    #[serde(default)]
    pub servers_wanted: Option<u32>,
    /// Batches that are set aside.
    pub quarantined: Vec<Quarantined>,
    /// Records of tasks that were done and had to be opened again.
    pub replayed: u64,
    /// The same by epoch and by the partitions that had lost them.
    pub replayed_in: BTreeMap<u32, BTreeMap<u32, u64>>,
    /// How the job ended.
    pub finished: Option<Phase>,
}

impl Book {
    /// Takes an entry in.
    pub fn apply(&mut self, entry: &Entry) {
        match entry {
            Entry::Begun { term, terms_of_job } => {
                self.term = *term;
                self.terms_of_job = terms_of_job.clone();
                self.finished = None;
            }
            Entry::Shard { number, note } => drop(self.shards.insert(*number, *note)),
            Entry::Indexed => self.indexed = true,
            Entry::Leased { task, lease, worker, .. } => drop(self.leased.insert(*task, (*lease, *worker))),
            Entry::Freed { task, between_batches } => {
                self.leased.remove(task);
                if !between_batches {
                    self.interrupted.insert(*task);
                }
            }
            Entry::Done { task, finished } => {
                self.leased.remove(task);
                self.interrupted.remove(task);
                self.recent.insert(*task, *finished);
                // A compressed file tells how many records it has when it has been read.
                if let Some(note) = self.shards.get_mut(&task.shard) {
                    note.records.get_or_insert(finished.records + finished.bad_records);
                }
            }
            Entry::Reborn { partitions, floor } => self.reborn(partitions, *floor),
            Entry::Placed { servers } => self.servers = (0..).zip(servers.iter().copied()).collect(),
            Entry::Moved { partitions, server } => self.moved(partitions, *server),
            Entry::Backed { partition, server } => drop(self.backups.insert(*partition, *server)),
            Entry::Alone { partitions } => self.backups.retain(|p, _| !partitions.contains(p)),
            Entry::Arrived { partitions } => self.arriving.retain(|p| !partitions.contains(p)),
            Entry::Cut { checkpoint } => self.cut = self.cut.max(*checkpoint),
            Entry::Committed { checkpoint, covered } => {
                self.committed = Some(*checkpoint);
                self.covered = covered.clone();
                self.recent.retain(|task, _| !covered.contains(*task));
            }
            Entry::Started { role, id, process } => {
                if *role == MemberRole::Worker {
                    self.worker_next = self.worker_next.max(id + 1);
                } else {
                    // It begins with nothing.
                    self.backups.retain(|_, server| server != id);
                }
                let running = Running { role: *role, id: *id, process: *process, address: None };
                self.processes.insert(process_name(*role, *id), running);
            }
            Entry::Serving { id, address } => {
                if let Some(server) = self.processes.get_mut(&process_name(MemberRole::Server, *id)) {
                    server.address = Some(address.clone());
                }
            }
            Entry::Exited { role, id } => drop(self.processes.remove(&process_name(*role, *id))),
            Entry::Scaled { workers, automatic } => {
                self.workers_wanted = Some(*workers);
                self.workers_automatic = *automatic;
            }
            Entry::ServersScaled { servers } => self.servers_wanted = Some(*servers),
            Entry::Quarantined(batch) => self.quarantined.push(batch.clone()),
            Entry::Finished { phase } => {
                self.finished = Some(*phase);
                self.processes.clear();
            }
        }
    }

    fn reborn(&mut self, partitions: &[(u32, u64)], floor: Option<LeaseId>) {
        self.incarnations.extend(partitions.iter().copied());
        for (partition, _) in partitions {
            self.since.remove(partition);
            self.arriving.remove(partition);
            self.backups.remove(partition);
            // Its server, if it still runs, does not have this life of it yet.
            let server = self.servers.get(partition).map(|id| process_name(MemberRole::Server, *id));
            if let Some(server) = server.and_then(|name| self.processes.get_mut(&name)) {
                server.address = None;
            }
        }
        if let Some(floor) = floor {
            self.floor = Some(floor);
            self.leased.clear();
            self.interrupted.clear();
            // No server has the next lives yet, whether it was ended in time or not.
            self.processes.values_mut().for_each(|running| running.address = None);
        }
        let again = std::mem::take(&mut self.recent);
        for (task, finished) in &again {
            let replayed = self.replayed_in.entry(task.epoch).or_default();
            for (partition, _) in partitions {
                *replayed.entry(*partition).or_default() += finished.records;
            }
        }
        self.replayed += again.values().map(|finished| finished.records).sum::<u64>();
    }

    fn moved(&mut self, partitions: &[(u32, u64)], server: u32) {
        for (partition, incarnation) in partitions {
            let since = self.since(*partition);
            self.since.insert(*partition, since);
            self.incarnations.insert(*partition, *incarnation);
            self.servers.insert(*partition, server);
            self.arriving.insert(*partition);
            self.backups.remove(partition);
        }
    }

    /// Whether a master has ever begun.
    pub fn is_empty(&self) -> bool {
        self.term == 0
    }

    /// A partition's incarnation.
    pub fn incarnation(&self, partition: u32) -> u64 {
        self.incarnations.get(&partition).copied().unwrap_or(1)
    }

    /// The incarnation of a partition from which on nothing was lost.
    pub fn since(&self, partition: u32) -> u64 {
        self.since.get(&partition).copied().unwrap_or(self.incarnation(partition))
    }
}

pub(crate) fn process_name(role: MemberRole, id: u32) -> String {
    match role {
        MemberRole::Worker => format!("worker-{id}"),
        MemberRole::Server => format!("ps-{id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(records: u64) -> Finished {
        Finished { records, bad_records: 0, batches: records.div_ceil(4) }
    }

    #[test]
    fn what_a_checkpoint_does_not_cover_is_open_again_when_a_partition_is_reborn() {
        let mut book = Book::default();
        for shard in 0..3 {
            book.apply(&Entry::Done { task: TaskId::train(0, shard), finished: done(10) });
        }
        let mut covered = Done::default();
        covered.add(TaskId::train(0, 1), done(10));
        book.apply(&Entry::Committed { checkpoint: 4, covered });
        assert_eq!(book.recent.keys().map(|t| t.shard).collect::<Vec<_>>(), [0, 2]);
        book.apply(&Entry::Reborn { partitions: vec![(2, 5)], floor: None });
        assert_eq!((book.recent.len(), book.replayed), (0, 20));
        assert_eq!(book.replayed_in, [(0, [(2, 20)].into())].into());
        assert_eq!((book.incarnation(2), book.incarnation(0)), (5, 1));
        assert_eq!((book.committed, book.covered.records), (Some(4), 10));
    }

    /// Goal: maps with numbers for keys survive too, which an enum with its tag inside would not read.
    #[test]
    fn every_entry_is_read_as_it_was_written() {
        let (task, lease) = (TaskId::train(1, 2), LeaseId { term: 3, n: 4 });
        let process = Process { pid: 5, started: 6 };
        let mut covered = Done::default();
        covered.add(task, done(10));
        let entries = [
            Entry::Begun { term: 3, terms_of_job: TermsOfJob::default() },
            Entry::Shard { number: 1, note: ShardNote { records: None, fingerprint: 9 } },
            Entry::Indexed,
            Entry::Leased { task, lease, worker: WorkerId(7), lasting: true },
            Entry::Freed { task, between_batches: true },
            Entry::Done { task, finished: done(10) },
            Entry::Reborn { partitions: vec![(0, 2)], floor: None },
            Entry::Placed { servers: vec![0, 1] },
            Entry::Moved { partitions: vec![(0, 3)], server: 1 },
            Entry::Arrived { partitions: vec![0] },
            Entry::ServersScaled { servers: 3 },
            Entry::Cut { checkpoint: 8 },
            Entry::Committed { checkpoint: 8, covered },
            Entry::Started { role: MemberRole::Server, id: 1, process },
            Entry::Serving { id: 1, address: "host:1".into() },
            Entry::Exited { role: MemberRole::Worker, id: 1 },
            Entry::Scaled { workers: 9, automatic: true },
            Entry::Quarantined(Quarantined { task, batch: 1, error: "bad".into() }),
            Entry::Finished { phase: Phase::Done },
        ];
        let mut book = Book::default();
        for entry in entries {
            let bytes = serde_json::to_vec(&entry).unwrap();
            assert_eq!(serde_json::from_slice::<Entry>(&bytes).unwrap(), entry);
            book.apply(&entry);
        }
        let bytes = serde_json::to_vec(&book).unwrap();
        assert_eq!(serde_json::from_slice::<Book>(&bytes).unwrap(), book);
    }

    #[test]
    fn a_partition_that_moved_is_what_it_was_until_it_is_restored() {
        let mut book = Book::default();
        book.apply(&Entry::Reborn { partitions: vec![(0, 4)], floor: None });
        book.apply(&Entry::Placed { servers: vec![0, 0] });
        for incarnation in [5, 6] {
            book.apply(&Entry::Moved { partitions: vec![(0, incarnation)], server: 2 });
        }
        assert_eq!((book.incarnation(0), book.since(0), book.servers[&0]), (6, 4, 2));
        assert_eq!(book.arriving, [0].into());
        book.apply(&Entry::Arrived { partitions: vec![0] });
        assert!(book.arriving.is_empty());
        let process = Process { pid: 5, started: 6 };
        book.apply(&Entry::Started { role: MemberRole::Server, id: 1, process });
        book.apply(&Entry::Serving { id: 1, address: "host:1".into() });
        book.apply(&Entry::Moved { partitions: vec![(0, 7), (1, 2)], server: 1 });
        assert!(book.processes["ps-1"].address.is_some());
        book.apply(&Entry::Reborn { partitions: vec![(0, 8)], floor: None });
        assert_eq!((book.since(0), book.since(1), &book.arriving), (8, 1, &[1].into()));
        assert_eq!(book.servers, [(0, 1), (1, 1)].into());
        assert_eq!(book.processes["ps-1"].address, None, "it has to join before it has the next life");
    }

    #[test]
    fn a_number_of_workers_that_was_written_down_before_it_could_be_automatic_is_a_persons() {
        let entry: Entry = serde_json::from_str(r#"{"scaled":{"workers":3}}"#).unwrap();
        assert_eq!(entry, Entry::Scaled { workers: 3, automatic: false });
    }

    #[test]
    fn the_records_of_a_compressed_shard_are_known_once_it_was_read() {
        let mut book = Book::default();
        let note = ShardNote { records: None, fingerprint: 9 };
        book.apply(&Entry::Shard { number: 2, note });
        let finished = Finished { records: 7, bad_records: 2, batches: 3 };
        book.apply(&Entry::Done { task: TaskId::train(0, 2), finished });
        assert_eq!(book.shards[&2], ShardNote { records: Some(9), ..note });
    }

    #[test]
    fn a_lease_is_known_until_its_task_is_free_or_done() {
        let mut book = Book::default();
        let lease = LeaseId { term: 1, n: 7 };
        for shard in 0..3 {
            let task = TaskId::train(0, shard);
            book.apply(&Entry::Leased { task, lease, worker: WorkerId(3), lasting: false });
        }
        book.apply(&Entry::Freed { task: TaskId::train(0, 0), between_batches: false });
        book.apply(&Entry::Done { task: TaskId::train(0, 1), finished: done(1) });
        assert_eq!(book.leased, [(TaskId::train(0, 2), (lease, WorkerId(3)))].into());
        assert_eq!(book.interrupted, [TaskId::train(0, 0)].into());
    }

    #[test]
    fn when_all_partitions_go_back_nobody_holds_a_task_or_serves_any_more() {
        let (task, lease, process) =
            (TaskId::train(0, 0), LeaseId { term: 1, n: 7 }, Process { pid: 5, started: 6 });
        let mut book = Book::default();
        book.apply(&Entry::Started { role: MemberRole::Server, id: 0, process });
        book.apply(&Entry::Serving { id: 0, address: "host:1".into() });
        book.apply(&Entry::Leased { task, lease, worker: WorkerId(3), lasting: true });
        book.apply(&Entry::Reborn { partitions: vec![(0, 2)], floor: Some(LeaseId { term: 1, n: 8 }) });
        assert!(book.leased.is_empty() && book.interrupted.is_empty());
        assert_eq!(book.processes["ps-0"].address, None);
    }

    #[test]
    fn worker_numbers_are_not_used_again() {
        let mut book = Book::default();
        let process = Process { pid: 5, started: 6 };
        book.apply(&Entry::Started { role: MemberRole::Worker, id: 4, process });
        book.apply(&Entry::Exited { role: MemberRole::Worker, id: 4 });
        assert_eq!((book.worker_next, book.processes.len()), (5, 0));
    }

    #[test]
    fn a_change_that_would_make_other_batches_is_named() {
        let before = TermsOfJob { batch: 64, ..TermsOfJob::default() };
        let now = TermsOfJob { batch: 128, ..TermsOfJob::default() };
        assert_eq!(before.difference(&now).unwrap(), "train.batch was 64 when the job began, and is 128");
        assert_eq!(before.difference(&before.clone()), None);
    }
}
