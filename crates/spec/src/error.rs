//! The three kinds of error, the exit codes that follow from them, and how an error is told in one line.

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

/// The message of an error with those of all its sources, for a place that takes text only.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
