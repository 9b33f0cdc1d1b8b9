//! The three kinds of error, and the exit codes that follow from them.

use serde::{Deserialize, Serialize};

/// What a failure means for whoever sees it: the only input to retries, gRPC codes and exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The other side may come back: try again.
    Retry,
    /// The person's input is wrong: say what and where, do not try again.
    User,
    /// We are wrong.
    Bug,
}

impl Kind {
    /// The process exit code for an error of this kind outside a running job.
    pub fn exit_code(self) -> u8 {
        match self {
            Kind::User => 1,
            Kind::Bug => 2,
            Kind::Retry => 3,
        }
    }
}
