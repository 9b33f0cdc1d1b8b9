//! What can go wrong between processes.

use std::net::SocketAddr;

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
    /// The connection broke, ended or stood still in the middle of a frame.
    #[error("a frame broke off: {arrived}")]
    Truncated {
        /// How much had come, and of what.
        arrived: String,
        /// Why no more came.
        source: std::io::Error,
    },
    /// The other side sent something that is no frame, or not the frame that was due.
    #[error("malformed frame: {0}")]
    Malformed(String),
    /// The other side refused us.
    #[error("refused: {0}")]
    Refused(String),
    /// The master answered a call with an error.
    #[error("call {call} to the master failed: {}", told(.status))]
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
    /// The job's certificate cannot be used, or not be made.
    #[error("cannot use {what}: {reason}")]
    Identity {
        /// The file or directory, or what else it is.
        what: String,
        /// Why not.
        reason: String,
    },
    /// The peer is not of this job: it speaks no TLS, or shows no certificate of the job.
    #[error("TLS handshake failed: {}", blame(source))]
    Handshake {
        /// What TLS says.
        source: rustls::Error,
    },
    /// A role was to listen where others than this machine can call it, without a certificate.
    #[error("not listening at {address}: listening beyond this machine needs TLS")]
    Exposed {
        /// Where it was to listen.
        address: SocketAddr,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An IO error with what was attempted.
    pub fn io(attempt: impl Into<String>, source: std::io::Error) -> Self {
        Error::Io { attempt: attempt.into(), source }
    }

    /// A handshake's error: the peer's fault where TLS says so, else the connection's.
    pub fn shaking(error: std::io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(source) => Error::Handshake { source: source.clone() },
            None => Error::io("shaking hands over TLS", error),
        }
    }

    /// The message with those of all its sources, for a log.
    pub fn chain(&self) -> String {
        elasticdl_spec::error::chain(self)
    }

    /// What the failure means.
    pub fn kind(&self) -> Kind {
        match self {
            // A stranger at the address of a peer is gone once the topology says where the peer went.
            Error::Io { .. } | Error::Truncated { .. } | Error::Handshake { .. } => Kind::Retry,
            Error::Malformed(_) => Kind::Bug,
            Error::Refused(_) | Error::Token { .. } | Error::Identity { .. } | Error::Exposed { .. } => {
                Kind::User
            }
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

/// Who is to blame, in the words of this program.
fn blame(error: &rustls::Error) -> &'static str {
    match error {
        rustls::Error::InvalidMessage(_) => "the peer does not speak TLS",
        rustls::Error::NoCertificatesPresented => "the peer shows no certificate",
        rustls::Error::InvalidCertificate(_) => "the peer's certificate is not of this job",
        rustls::Error::AlertReceived(_) => "the peer does not take this job's certificate",
        _ => "it cannot be agreed on",
    }
}

/// What a call was answered with; where there was no answer, the deepest reason for that.
fn told(status: &tonic::Status) -> String {
    let mut deepest = std::error::Error::source(status);
    while let Some(next) = deepest.and_then(|error| error.source()) {
        deepest = Some(next);
    }
    let message = status.message();
    match deepest.map(|reason| reason.to_string()) {
        Some(reason) if !message.ends_with(&reason) => format!("{message}: {reason}"),
        _ => message.into(),
    }
}
