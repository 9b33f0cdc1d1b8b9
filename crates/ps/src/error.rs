//! What can go wrong on a server.

use std::path::Path;
use std::time::Duration;

use elasticdl_spec::{Kind, PartitionId, TaskId};

/// A failure of a server, one of its partitions, or a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or a socket failed.
    #[error("{attempt}")]
    Io {
        /// What was attempted, and on what.
        attempt: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A checkpoint file is shorter than what was committed.
    #[error("checkpoint file {path} is truncated: {found} of {expected} bytes are there")]
    Truncated {
        /// The file.
        path: String,
        /// Its length.
        found: u64,
        /// The length that was committed.
        expected: u64,
    },
    /// A checkpoint file is not what was written.
    #[error("checkpoint file {path} is damaged: {reason}")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint file is whole, and belongs elsewhere.
    #[error("checkpoint file {path} is of another {of}: {difference}")]
    Foreign {
        /// The file.
        path: String,
        /// What it is of another of: model, optimizer, format, place, job seed.
        of: &'static str,
        /// What differs, with both values.
        difference: String,
    },
    /// A gradient holds an infinity or no number at all; nothing of the push was applied.
    #[error("push of {task} batch {batch} to {partition}: the gradient of {of} is not finite")]
    NotFinite {
        /// The task.
        task: TaskId,
        /// The batch in it.
        batch: u64,
        /// Who refused it.
        partition: PartitionId,
        /// The table or tensor.
        of: String,
    },
    /// A request does not fit the model or the partition; nothing of it was applied.
    #[error("request to {partition} does not fit: {reason}")]
    Misfit {
        /// Who refused it.
        partition: PartitionId,
        /// What does not fit.
        reason: String,
    },
    /// A frame or a call failed.
    #[error(transparent)]
    Wire(#[from] elasticdl_wire::Error),
    /// The master's plan cannot be read.
    #[error("reading the plan that the master sent")]
    Plan(#[from] serde_json::Error),
    /// The master's list of covered tasks cannot be read, so that nothing was written.
    #[error("reading which tasks the last checkpoint covers")]
    Covered(#[source] serde_json::Error),
    /// No master for longer than the job allows.
    #[error("heard of no master at {master} for {after:?}, so this server ends itself")]
    Orphaned {
        /// Where the master was.
        master: String,
        /// How long the server waited.
        after: Duration,
    },
    /// Another job's master answers where ours was.
    #[error("the master at {master} has another job than the one this server joined")]
    OtherJob {
        /// Where it is.
        master: String,
    },
    /// A thread panicked while it changed a partition, so that it cannot be trusted any more.
    #[error("{partition} was left half-changed by a panic; the server must be started again")]
    Torn {
        /// The partition.
        partition: PartitionId,
    },
    /// A partition's backup is lost, and the master does not say that it may go on without.
    #[error("{partition} has lost its backup, and the master has not let it go on alone")]
    NoLeave {
        /// The partition.
        partition: PartitionId,
    },
    /// A partition is not here any more, or in another life, while its checkpoint is being written.
    #[error("{partition} was let go of, or has begun another life, while its checkpoint was written")]
    CutLost {
        /// The partition.
        partition: PartitionId,
    },
    /// A partition is not here any more, or in another life, while its rows are copied into an answer.
    #[error("{partition} was let go of, or has begun another life, in the middle of an answer")]
    Left {
        /// The partition.
        partition: PartitionId,
    },
    /// A thread of the server panicked.
    #[error("{0} panicked")]
    Panicked(&'static str),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An IO error with what was attempted.
    pub fn io(attempt: impl Into<String>, source: std::io::Error) -> Self {
        Error::Io { attempt: attempt.into(), source }
    }

    /// What the failure means.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Io { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound
                | std::io::ErrorKind::NotADirectory
                | std::io::ErrorKind::PermissionDenied
                | std::io::ErrorKind::AddrInUse
                | std::io::ErrorKind::AddrNotAvailable => Kind::User,
                _ => Kind::Retry,
            },
            Error::Truncated { .. }
            | Error::Damaged { .. }
            | Error::Foreign { .. }
            | Error::NotFinite { .. }
            | Error::OtherJob { .. } => Kind::User,
            Error::Misfit { .. }
            | Error::Plan(_)
            | Error::Covered(_)
            | Error::Torn { .. }
            | Error::Panicked(_) => Kind::Bug,
            Error::Wire(e) => e.kind(),
            Error::Orphaned { .. } | Error::CutLost { .. } | Error::Left { .. } | Error::NoLeave { .. } => {
                Kind::Retry
            }
        }
    }

    /// The message with those of all its sources, for a place that takes text only.
    pub fn chain(&self) -> String {
        elasticdl_spec::error::chain(self)
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Error::Damaged { path: path.display().to_string(), reason: reason.into() }
    }

    pub(crate) fn foreign(path: &Path, of: &'static str, difference: impl Into<String>) -> Self {
        Error::Foreign { path: path.display().to_string(), of, difference: difference.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_tells_the_whole_story() {
        let full = std::io::Error::other("no space left");
        let error = Error::io("writing ckpt/partition-001.arrow", full);
        assert_eq!(error.chain(), "writing ckpt/partition-001.arrow: no space left");
        assert_eq!(error.kind(), Kind::Retry);
    }
}
