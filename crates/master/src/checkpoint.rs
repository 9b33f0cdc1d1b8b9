//! When a checkpoint is due, who has written its part, and when it may be committed. Pure; the manifest
//! is written by [`crate::store`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elasticdl_spec::{ModelShape, OptimizerSpec};
use serde::{Deserialize, Serialize};

use crate::tasks::{Done, FileMarks};

/// What a committed checkpoint says of itself. A directory without one is no checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format.
    pub format: u32,
    /// The job.
    pub job: String,
    /// The checkpoint's number.
    pub id: u64,
    /// The model it fits.
    pub shape: ModelShape,
    /// The optimizer whose state it holds.
    pub optimizer: OptimizerSpec,
    /// The seed of everything.
    pub seed: u64,
    /// Its files, by partition.
    pub partitions: BTreeMap<u32, PartitionFile>,
    /// Training tasks that every partition's file holds to their end.
    pub done: Done,
}

/// The version of the manifest that this code writes.
///
/// 2: every file holds all rows of its partition. 3: it may add to earlier ones.
pub const FORMAT: u32 = 3;
/// The oldest version that this code reads.
pub const FORMAT_OLDEST: u32 = 2;

/// One partition's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionFile {
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the whole file.
    pub crc32: u32,
    /// The partition's incarnation when it was cut.
    pub incarnation: u64,
    /// Its files in earlier checkpoints that this one adds to, the oldest first: of a row the last file that has it
    /// counts. None: this one holds all rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<EarlierFile>,
}

/// A partition's file in an earlier checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierFile {
    /// That checkpoint's number.
    pub checkpoint: u64,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the whole file.
    pub crc32: u32,
}

impl Manifest {
    /// How many files a partition is read from, for the one that has the most.
    pub fn chain_longest(&self) -> u32 {
        let longest = self.partitions.values().map(|file| file.earlier.len() as u32 + 1).max();
        longest.unwrap_or(0)
    }

    /// The files of a partition, the oldest first; none: there is no such partition.
    pub fn chain(&self, partition: u32) -> Vec<EarlierFile> {
        let Some(file) = self.partitions.get(&partition) else { return Vec::new() };
        let last = EarlierFile { checkpoint: self.id, bytes: file.bytes, crc32: file.crc32 };
        file.earlier.iter().copied().chain([last]).collect()
    }

    /// All files of earlier checkpoints that this one needs: checkpoint and partition.
    pub fn needs(&self) -> impl Iterator<Item = (u64, u32)> {
        let files = self.partitions.iter();
        files
            .flat_map(|(partition, file)| file.earlier.iter().map(|earlier| (earlier.checkpoint, *partition)))
    }
}

/// What the last call for a written part has led to.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// Others are still writing, or it was another checkpoint's.
    Waiting,
    /// All parts are durable: it may be committed.
    Complete(Written),
}

/// A checkpoint whose files are all durable.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// Its number.
    pub id: u64,
    /// Its files.
    pub files: BTreeMap<u32, PartitionFile>,
    /// The marks in them.
    pub marks: FileMarks,
}

/// Decides on checkpoints.
#[derive(Debug)]
pub struct Coordinator {
    every: Option<Duration>,
    last: Duration,
    /// How old the last one was at that time already.
    age: Duration,
    next: u64,
    writing: Option<Writing>,
}

#[derive(Debug)]
struct Writing {
    id: u64,
    /// When the one before was begun or over.
    last: Duration,
    servers: BTreeSet<u32>,
    files: BTreeMap<u32, PartitionFile>,
    marks: FileMarks,
    /// Whether all parts are durable and the manifest is being written.
    committing: bool,
}

impl Coordinator {
    /// A coordinator that gives out numbers from `next` on; the last checkpoint, or the job's begin, is as old
    /// as `age`.
    pub fn new(every: Option<Duration>, next: u64, age: Duration) -> Self {
        Coordinator { every, age, last: Duration::ZERO, next, writing: None }
    }

    /// Whether one is due by the clock.
    pub fn is_due(&self, now: Duration) -> bool {
        let since = now.saturating_sub(self.last).saturating_add(self.age);
        self.writing.is_none() && self.every.is_some_and(|every| since >= every)
    }

    /// The one being written.
    pub fn writing(&self) -> Option<u64> {
        self.writing.as_ref().map(|w| w.id)
    }

    /// Whether this server has still to write its part.
    pub fn awaits(&self, server: u32) -> bool {
        self.writing.as_ref().is_some_and(|w| w.servers.contains(&server))
    }

    /// Begins one that these servers write. What it covers is known from the marks in its files.
    pub fn begin(&mut self, now: Duration, servers: BTreeSet<u32>) -> u64 {
        assert!(self.writing.is_none(), "one checkpoint at a time");
        let id = self.next;
        self.next += 1;
        let last = std::mem::replace(&mut self.last, now);
        self.writing = Some(Writing {
            id,
            last,
            servers,
            files: BTreeMap::new(),
            marks: FileMarks::new(),
            committing: false,
        });
        id
    }

    /// A server has written its partitions' files, with these marks in them.
    pub fn written(
        &mut self,
        server: u32,
        id: u64,
        files: BTreeMap<u32, PartitionFile>,
        marks: FileMarks,
    ) -> Progress {
        let Some(writing) = self.writing.as_mut().filter(|w| w.id == id && !w.committing) else {
            return Progress::Waiting;
        };
        if writing.servers.remove(&server) {
            writing.files.extend(files);
            writing.marks.extend(marks);
        }
        if !writing.servers.is_empty() {
            return Progress::Waiting;
        }
        writing.committing = true;
        let (files, marks) = (writing.files.clone(), writing.marks.clone());
        Progress::Complete(Written { id, files, marks })
    }

    /// The manifest is durable, or the checkpoint failed or lost a server: it is over either way.
    /// Returns whether it was the one being written.
    pub fn over(&mut self, now: Duration, id: u64) -> bool {
        let ours = self.writing() == Some(id);
        if ours {
            self.writing = None;
            // One each so often from begin to begin; where writing takes long, with a rest in between.
            let rest = self.every.unwrap_or_default() / 2;
            self.last = self.last.max(now.saturating_sub(rest));
            self.age = Duration::ZERO;
        }
        ours
    }

    /// Forgets the one being written: a partition changed under it. The next one is as due as it was.
    pub fn abandon(&mut self) -> Option<u64> {
        let writing = self.writing.take()?;
        self.last = writing.last;
        Some(writing.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: PartitionFile = PartitionFile { bytes: 1, crc32: 2, incarnation: 1, earlier: Vec::new() };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn part(partition: u32) -> BTreeMap<u32, PartitionFile> {
        [(partition, FILE)].into()
    }

    #[test]
    fn it_is_complete_only_when_every_server_has_written() {
        let mut c = Coordinator::new(Some(at(60)), 4, at(0));
        assert!(!c.is_due(at(59)) && c.is_due(at(60)));
        let id = c.begin(at(60), [0, 1].into());
        assert_eq!(id, 4);
        assert_eq!(c.written(0, id, part(0), FileMarks::new()), Progress::Waiting);
        assert_eq!(
            c.written(0, id, part(0), FileMarks::new()),
            Progress::Waiting,
            "a repeated report is no second server"
        );
        assert_eq!(
            c.written(1, id + 1, part(1), FileMarks::new()),
            Progress::Waiting,
            "another checkpoint's report"
        );
        let Progress::Complete(written) = c.written(1, id, part(1), FileMarks::new()) else {
            panic!("all have written")
        };
        assert_eq!(written.files.len(), 2);
        assert!(!c.is_due(at(500)), "it is being committed");
        assert!(c.over(at(70), id));
        assert!(!c.is_due(at(119)) && c.is_due(at(120)), "from begin to begin");
        let id = c.begin(at(120), [0].into());
        c.written(0, id, part(0), FileMarks::new());
        assert!(c.over(at(200), id));
        assert!(!c.is_due(at(229)) && c.is_due(at(230)), "a slow one is followed by a rest");
    }

    #[test]
    fn a_new_master_does_not_put_off_what_is_due() {
        let c = Coordinator::new(Some(at(60)), 1, at(50));
        assert!(!c.is_due(at(9)) && c.is_due(at(10)));
        assert!(Coordinator::new(Some(at(60)), 1, Duration::MAX).is_due(at(0)));
    }

    #[test]
    fn reports_for_an_abandoned_one_are_not_believed() {
        let mut c = Coordinator::new(None, 1, at(0));
        let id = c.begin(at(0), [0].into());
        assert_eq!(c.abandon(), Some(id));
        assert_eq!(c.abandon(), None);
        assert_eq!(c.written(0, id, part(0), FileMarks::new()), Progress::Waiting);
        assert!(!c.over(at(1), id));
        assert_eq!(c.begin(at(2), [0].into()), id + 1, "numbers are not reused");
    }
}
