//! What a job is: its specification, its ids, its shape, and where its rows live.
//!
//! This crate does no IO, reads no clock and knows no protocol. A type moves here only when
//! three crates need it. The map:
//!
//! - [`settings`]: every setting of a job file, once: path, default, rule, help.
//! - [`resolve`]: default < file < environment < flag, with every problem found in one go.
//! - [`job`]: [`JobSpec`], the typed result. [`command`]: a job that runs a program of its own.
//! - [`optimizer`], [`schedule`], [`tables`]: how weights are trained, how fast, and what differs by table.
//! - [`layout`]: what the columns of the data mean; the layouts known by name.
//! - [`shape`]: tables and tensors of a model, as the servers see them.
//! - [`placement`]: which partition holds a row, which server holds a partition.
//! - [`scores`]: how good predictions are, mergeable.
//! - [`kubernetes`], [`amount`]: what a job asks of a cluster.
//! - [`ids`], [`mix`], [`error`]: the small things everybody needs.

pub mod amount;
pub mod command;
pub mod error;
pub mod ids;
pub mod job;
pub mod kubernetes;
pub mod layout;
pub mod mix;
pub mod optimizer;
pub mod placement;
pub mod resolve;
pub mod schedule;
pub mod scores;
pub mod settings;
pub mod shape;
pub mod tables;

pub use error::Kind;
pub use ids::{LeaseId, PartitionId, Purpose, ServerId, Shard, TaskId, WorkerId};
pub use job::{Consistency, JobSpec, ModelSpec, Plan, Zoo};
pub use layout::Layout;
pub use optimizer::OptimizerSpec;
pub use schedule::{Position, Schedule};
pub use shape::{Initializer, ModelShape, TableShape, TensorShape};
pub use tables::{Evict, Precision, TableSpec, TablesSpec};
