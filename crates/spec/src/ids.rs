//! Ids that do not mix.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "-{}"), self.0)
            }
        }
    };
}

id!(
    /// A worker of the job; a replacement gets a new number.
    WorkerId,
    "worker"
);
id!(
    /// A parameter server of the job; a restarted one keeps its number.
    ServerId,
    "ps"
);
id!(
    /// A part of all tables and tensors; there are many more of them than servers.
    PartitionId,
    "partition"
);

/// What a task's records are read for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Gradients are computed and pushed.
    Train,
    /// Losses and scores are computed; nothing is changed.
    Evaluate,
}

/// A task: a shard with a purpose in an epoch. Stable across masters and restarts.
///
/// For evaluation, `epoch` numbers the evaluation round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TaskId {
    /// What the records are read for.
    pub purpose: Purpose,
    /// Which pass over the data, from 0.
    pub epoch: u32,
    /// Index of the shard in the job's list of shards of this purpose, from 0.
    pub shard: u32,
}

impl TaskId {
    /// A training task.
    pub fn train(epoch: u32, shard: u32) -> Self {
        TaskId { purpose: Purpose::Train, epoch, shard }
    }

    /// An evaluation task of round `round`.
    pub fn evaluate(round: u32, shard: u32) -> Self {
        TaskId { purpose: Purpose::Evaluate, epoch: round, shard }
    }

    /// One number for frames and seeds: purpose in the highest bit, epoch, shard.
    pub fn as_u64(self) -> u64 {
        let purpose = match self.purpose {
            Purpose::Train => 0,
            Purpose::Evaluate => 1,
        };
        assert!(self.epoch < 1 << 31, "an epoch fits 31 bits");
        (purpose << 63) | (u64::from(self.epoch) << 32) | u64::from(self.shard)
    }

    /// The inverse of [`TaskId::as_u64`].
    pub fn from_u64(n: u64) -> Self {
        let purpose = if n >> 63 == 0 { Purpose::Train } else { Purpose::Evaluate };
        TaskId { purpose, epoch: ((n >> 32) & 0x7fff_ffff) as u32, shard: n as u32 }
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let purpose = match self.purpose {
            Purpose::Train => "train",
            Purpose::Evaluate => "evaluate",
        };
        write!(f, "{purpose}/{}/{}", self.epoch, self.shard)
    }
}

impl FromStr for TaskId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no task id; one looks like train/0/17");
        let mut parts = text.split('/');
        let purpose = match parts.next() {
            Some("train") => Purpose::Train,
            Some("evaluate") => Purpose::Evaluate,
            _ => return Err(wrong()),
        };
        let mut number = || parts.next().and_then(|p| p.parse::<u32>().ok()).ok_or_else(wrong);
        let (epoch, shard) = (number()?, number()?);
        if parts.next().is_some() || epoch >= 1 << 31 {
            return Err(wrong());
        }
        Ok(TaskId { purpose, epoch, shard })
    }
}

impl From<TaskId> for String {
    fn from(task: TaskId) -> String {
        task.to_string()
    }
}

impl TryFrom<String> for TaskId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// A lease's number. It only grows: first by the master's term, then within it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId {
    /// The term of the master that gave it.
    pub term: u64,
    /// Its number within the term.
    pub n: u64,
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.n)
    }
}

/// A range of records of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The file.
    pub path: String,
    /// The first record, counted from 0.
    pub first: u64,
    /// How many records; `None` where only reading to the end can tell (compressed text).
    pub records: Option<u64>,
    /// Where the first record's line starts in a plain text file; 0 for other formats.
    pub offset: u64,
    /// Size and modification time of the file when the shard was cut, so that a changed file is noticed.
    pub fingerprint: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_ids_survive_both_encodings() {
        for task in [TaskId::train(0, 0), TaskId::train(3, u32::MAX), TaskId::evaluate((1 << 31) - 1, 7)] {
            assert_eq!(TaskId::from_u64(task.as_u64()), task);
            assert_eq!(task.to_string().parse(), Ok(task));
        }
        assert_eq!(TaskId::evaluate(2, 5).to_string(), "evaluate/2/5");
    }

    #[test]
    fn malformed_task_ids_are_refused() {
        for text in ["", "train", "train/1", "train/1/2/3", "nap/1/2", "train/-1/2", "train/2147483648/0"] {
            assert!(text.parse::<TaskId>().is_err(), "{text}");
        }
    }

    #[test]
    fn leases_grow_by_term_first() {
        assert!(LeaseId { term: 1, n: 900 } < LeaseId { term: 2, n: 1 });
    }
}
