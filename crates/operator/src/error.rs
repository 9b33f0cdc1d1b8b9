//! What can go wrong with a cluster.

use elasticdl_spec::Kind;

/// What can go wrong with a cluster.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no way to the cluster.
    #[error("finding the cluster")]
    Config(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The API server refused, or did not answer.
    #[error("{attempt}")]
    Api {
        /// What was attempted.
        attempt: String,
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
    /// What the job says makes no pod.
    #[error("{what} of the job is no {kind} that Kubernetes knows")]
    Manifest {
        /// Which setting.
        what: String,
        /// What it should be.
        kind: &'static str,
        /// Why not.
        #[source]
        source: serde_json::Error,
    },
    /// Something did not happen in time.
    #[error("{what} within {seconds} s{why}")]
    Late {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: u64,
        /// What is known of the reason.
        why: String,
    },
    /// This machine.
    #[error("{attempt}")]
    Io {
        /// What was attempted.
        attempt: String,
        /// What happened.
        #[source]
        source: std::io::Error,
    },
}

/// With our [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A refusal of the API server, with what was attempted.
    pub fn api(attempt: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
        move |source| Error::Api { attempt: attempt.into(), source: Box::new(source) }
    }

    /// Whose fault it is.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Config(_) | Error::Manifest { .. } => Kind::User,
            Error::Api { source, .. } => match &**source {
                kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429 => {
                    Kind::User
                }
                _ => Kind::Retry,
            },
            Error::Late { .. } | Error::Io { .. } => Kind::Retry,
        }
    }

    /// The error and what caused it, in a line.
    pub fn chain(&self) -> String {
        elasticdl_spec::error::chain(self)
    }
}
