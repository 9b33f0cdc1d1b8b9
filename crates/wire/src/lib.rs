//! What the roles say to each other, and nothing of what they decide.
//!
//! - [`control`]: gRPC between every process and the master (generated; the only protobuf).
//! - [`frame`], [`ps`], [`floats`]: length-prefixed frames between workers and servers, and between servers, read in place.
//! - [`gate`]: frames to the one that admits batches where staleness is bounded.
//! - [`stream`]: what frames travel over, plain TCP or TLS.
//! - [`connection`]: a client's end of them.
//! - [`auth`]: the job's token, which every call carries.
//! - [`tls`]: the job's certificate, which every connection beyond this machine shows.
//! - [`client`]: the master's client with authentication and deadlines.
//! - [`retry`]: growing pauses.
//! - [`failpoint`]: where tests make a process die or fail on demand.

pub mod auth;
pub mod client;
pub mod connection;
pub mod error;
pub mod failpoint;
pub mod floats;
pub mod frame;
pub mod gate;
pub mod ps;
pub mod retry;
pub mod stream;
pub mod tls;

/// Messages and services of `proto/control.proto`.
#[allow(missing_docs, clippy::all, reason = "generated")]
pub mod control {
    tonic::include_proto!("elasticdl.control");
}

pub use auth::Token;
pub use error::{Error, Result};
pub use stream::Stream;
pub use tls::Identity;
