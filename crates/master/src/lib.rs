//! The master: one per job. It cuts data into shards, leases tasks, decides the fleet, commits
//! checkpoints, runs evaluations and tells how it goes.
//!
//! The cores decide and do no IO: [`tasks`], [`fleet`], [`evaluation`], [`checkpoint`], [`ledger`], [`useful`] and,
//! above them, [`job`], whose `step(now, event, effects)` is the only entrance. The edges carry out and decide
//! nothing: [`run`] (the loop), `server` (gRPC), `pages` (HTTP), `teller` (events), `listen` (TLS), [`shards`]
//! (indexing), [`store`] (manifests).
//!
//! [`gang`] leads a job that runs a person's own program: a smaller core beside [`job`], with edges of its own.

pub mod balance;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod evaluation;
pub mod fleet;
pub mod gang;
pub mod job;
pub mod ledger;
mod listen;
mod pages;
mod pruner;
pub mod run;
mod server;
pub mod shards;
pub mod status;
pub mod store;
pub mod tasks;
mod teller;
pub mod useful;

pub use config::Config;
pub use error::{Error, Result};
pub use run::{Outcome, run};
