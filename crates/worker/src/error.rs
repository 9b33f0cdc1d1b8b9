//! What ends a worker. What ends only a task is no error of this crate: it is told to the master.

use std::time::Duration;

use elasticdl_spec::{Kind, PartitionId, TaskId};

/// Why a worker, or one of its stages, cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The worker was asked to stop while it waited for somebody. Not a fault.
    #[error("stopped while {attempt}")]
    Stopped {
        /// What was left unfinished.
        attempt: &'static str,
    },
    /// No master has answered for so long that nobody can want this worker any more.
    #[error("no master at {master} has answered for {silence:?}")]
    Orphaned {
        /// Where the master was.
        master: String,
        /// How long it was silent.
        silence: Duration,
    },
    /// The second SIGTERM.
    #[error("ended at once by a second SIGTERM")]
    Killed,
    /// The master, a server or the connection to one failed in a way that waiting does not mend.
    #[error("worker could not go on {attempt}")]
    Wire {
        /// What was attempted.
        attempt: &'static str,
        /// Why it failed.
        source: elasticdl_wire::Error,
    },
    /// What the master said cannot be understood, or does not fit this binary.
    #[error("the master's {what} cannot be used: {reason}")]
    Plan {
        /// Which part of what it said.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// A staged step was committed in one partition and is nowhere to be found in another.
    #[error(
        "{task} batch {batch} is committed in other partitions, and {partition} has nothing staged to commit: \
         its rows are not what they would be without a crash"
    )]
    HalfCommitted {
        /// The task.
        task: TaskId,
        /// The batch in it.
        batch: u64,
        /// Where it is missing.
        partition: PartitionId,
    },
    /// The model cannot be built.
    #[error("cannot build the job's model")]
    Model(#[source] elasticdl_nn::Error),
    /// The system refused a thread, a runtime or a signal handler.
    #[error("the system refused {what}")]
    System {
        /// What was asked of it.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A stage's thread panicked; its message is in the log above.
    #[error("the worker's {stage} thread panicked")]
    Panicked {
        /// Which stage.
        stage: &'static str,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What the failure means for whoever sees it.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Stopped { .. } | Error::Orphaned { .. } | Error::Killed | Error::System { .. } => {
                Kind::Retry
            }
            Error::Wire { source, .. } => source.kind(),
            Error::Model(source) => source.kind(),
            Error::Plan { .. } | Error::HalfCommitted { .. } | Error::Panicked { .. } => Kind::Bug,
        }
    }
}
