//! What can go wrong when a model is built. Running one has no errors: bad numbers show as NaN.

use elasticdl_spec::{Kind, Zoo};

/// A model that cannot be built.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// A size that must be at least 1 is 0.
    #[error("building model {zoo} needs {what} to be at least 1")]
    Zero {
        /// The model.
        zoo: Zoo,
        /// The setting.
        what: String,
    },
}

impl Error {
    /// What the failure means for whoever sees it.
    pub fn kind(&self) -> Kind {
        Kind::User
    }
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
