//! What can go wrong with a master before and beside its job.

use elasticdl_spec::Kind;

/// A failure of the master itself; a failure of the job is an outcome, not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something on disk could not be read or written.
    #[error("{attempt}")]
    Io {
        /// What was attempted, on what.
        attempt: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A checkpoint cannot be used.
    #[error("cannot use the checkpoint {path}: {reason}")]
    Checkpoint {
        /// Its directory.
        path: String,
        /// Why not.
        reason: String,
    },
    /// The ledger cannot be used.
    #[error("cannot go on from the ledger {path}: {reason}")]
    Ledger {
        /// Its file or directory.
        path: String,
        /// Why not.
        reason: String,
    },
    /// Another master leads the job by now.
    #[error("term {term} is over: a later master leads the job, and this one ends")]
    Succeeded {
        /// The term of this master.
        term: u64,
    },
    /// There is nothing to resume from.
    #[error("there is no ledger in {0} to resume from")]
    NothingToResume(String),
    /// The master must not listen where it was to.
    #[error(transparent)]
    Wire(#[from] elasticdl_wire::Error),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] elasticdl_data::Error),
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
            Error::Io { .. }
            | Error::Checkpoint { .. }
            | Error::Ledger { .. }
            | Error::Succeeded { .. }
            | Error::NothingToResume(_) => Kind::User,
            Error::Wire(e) => e.kind(),
            Error::Data(e) => e.kind(),
        }
    }
}
