//! The virtual world: whole jobs with hundreds of workers, crashes, cut connections, stopped processes, slow
//! and failing disks, in milliseconds and replayable by seed.
//!
//! What decides is real: the master's job with its ledger, the servers' partitions with their files, the
//! workers' sessions. What is virtual are the edges: clock, network, disks, processes. The map:
//!
//! - [`scenario`]: what a seed stands for. [`faults`]: what goes wrong, and how it stops.
//! - [`world`]: the loop. [`queue`]: what happens next. [`trace`]: what happened.
//! - [`net`], [`disk`], [`processes`]: what the edges touch.
//! - [`master`], [`server`], [`worker`]: the edges themselves, as in the crates of these names; `pipeline`: a
//!   worker's tasks; [`gate`]: who admits their batches; [`moving`], [`backing`]: partitions that servers copy.
//! - [`checkers`]: what must hold. [`sabotage`]: how they are made to fail.
//! - [`branches`]: what was met. [`run`]: many seeds, each twice.

pub mod backing;
pub mod branches;
pub mod checkers;
pub mod disk;
pub mod faults;
pub mod gate;
pub mod master;
pub mod moving;
pub mod net;
mod pipeline;
pub mod processes;
pub mod queue;
pub mod run;
pub mod sabotage;
pub mod scenario;
pub mod server;
pub mod trace;
pub mod worker;
pub mod world;
