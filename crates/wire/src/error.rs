//! What can go wrong between processes.

use elasticdl_spec::Kind;

/// A failure of a call or a connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection broke or could not be made.
    #[error("{attempt}")]
    Io {
        /// What was attempted, and with whom.
        attempt: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The other side sent something that is no frame, or not the frame that was due.
    #[error("malformed frame: {0}")]
    Malformed(String),
    /// The other side refused us.
    #[error("refused: {0}")]
    Refused(String),
    /// The master answered a call with an error.
    #[error("call {call} to the master failed: {}", .status.message())]
    Call {
        /// The call.
        call: &'static str,
        /// The answer.
        status: Box<tonic::Status>,
    },
    /// The token file cannot be used.
    #[error("cannot use the token file {path}: {reason}")]
    Token {
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
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
            Error::Io { .. } => Kind::Retry,
            Error::Malformed(_) => Kind::Bug,
            Error::Refused(_) | Error::Token { .. } => Kind::User,
            Error::Call { status, .. } => match status.code() {
                tonic::Code::Unauthenticated
                | tonic::Code::PermissionDenied
                | tonic::Code::InvalidArgument
                | tonic::Code::FailedPrecondition => Kind::User,
                tonic::Code::Internal | tonic::Code::Unimplemented => Kind::Bug,
                _ => Kind::Retry,
            },
        }
    }
}
