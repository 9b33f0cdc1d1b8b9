//! The training loop: leases tasks, reads, pulls, computes, pushes, reports.
//!
//! A worker owns nothing that counts. What was applied is known by the servers' marks, what is to be done
//! by the master's ledger, so a worker may die at any moment. The map, in the order of a batch's way:
//!
//! - [`run`](mod@run): the edge to the master and the system: joins, leases, reports, drains on SIGTERM.
//! - [`session`]: when to ask, report and leave; pure.
//! - [`task`]: a leased task, as all stages see it.
//! - [`pipeline`]: the stages: read, pull, compute, push.
//! - [`source`]: where batches come from.
//! - [`dedup`]: a batch's ids become unique ids by partition; pure and hot.
//! - [`store`]: what the stages ask of the servers; [`ps_client`]: the servers over TCP.
//! - `master`: the calls to the master, tried until they are answered; [`silence`]: how long it was not heard.
//! - [`gauges`], [`stop`], [`error`]: what it costs, how it ends, what can go wrong.

pub mod dedup;
pub mod error;
pub mod gauges;
mod master;
pub mod pipeline;
pub mod ps_client;
pub mod run;
pub mod session;
pub mod silence;
pub mod source;
pub mod stop;
pub mod store;
pub mod task;

#[cfg(test)]
mod tests;

pub use error::{Error, Result};
pub use run::{Config, run};
