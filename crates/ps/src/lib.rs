//! The parameter server: rows and tensors, how gradients change them, and how they outlive a process.
//!
//! One push's way: [`server`] (a frame comes in) → [`requests`] (what does it ask for?) → [`partitions`]
//! (whose lock?) → [`partition`] (has its turn come?) → [`table`], [`tensor`] → [`optimizer`]. The map:
//!
//! - [`model`]: what a server knows of a job.
//! - [`table`]: rows of one table, found by id; weights and slots side by side.
//! - [`tensor`]: a dense tensor with its slots.
//! - [`optimizer`]: one formula per file.
//! - [`marks`], [`closed`]: which batches are applied; the rules of exactly-once.
//! - [`audit`]: the same counted where rows change, so that marks need not be believed.
//! - [`partition`]: all of this as one deterministic state machine.
//! - [`gate`]: who may begin a batch, where staleness is bounded or several batches make a step; [`gatekeeper`]: the
//!   threads that wait for it.
//! - [`checkpoint`]: a partition's files.
//! - [`partitions`], [`requests`]: many partitions behind locks; frames to answers.
//! - [`feed`], [`backups`]: what goes from a partition to its backup at another server, and what such a server has.
//! - [`server`], [`mod@run`], [`moving`]: the edges, a socket for workers, a client of the master and one of other
//!   servers. Only these, feed and backups, the gatekeeper, those that write a checkpoint's files (`partitions/checkpoint.rs`) and
//!   `pace.rs`, by which they give way, read clocks, wait or start threads.

pub mod audit;
pub mod backups;
pub mod checkpoint;
pub mod closed;
pub mod error;
pub mod feed;
pub mod gate;
pub mod gatekeeper;
pub mod marks;
pub mod model;
pub mod moving;
pub mod optimizer;
mod pace;
pub mod partition;
pub mod partitions;
pub mod requests;
pub mod run;
pub mod server;
pub mod staleness;
pub mod table;
pub mod tensor;

#[cfg(test)]
mod test_model;

pub use error::{Error, Result};
pub use model::Model;
pub use optimizer::Optimizer;
pub use partition::Partition;
pub use partitions::Partitions;
pub use run::{Config, run};
pub use server::Server;
pub use table::Table;
