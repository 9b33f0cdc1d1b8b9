//! The binary as people use it: real processes, a home of their own, data that is made on the spot.
//!
//! - [`help`], [`settings`], [`bad_input`]: what is said before anything starts.
//! - [`jobs`], [`models`]: whole jobs, steered while they run, and what is made of them.
//! - [`chaos`]: any process killed while it trains, and proof that every record counted once.
//! - [`backups`]: servers that die where each partition has a backup.
//! - [`bounds`]: tables that may take so much memory and no more.
//! - [`command`]: programs of one's own.
//! - [`failpoints`]: the same at certain points, which are shown to have been hit.
//! - [`moves`]: partitions that change their server, and what dies meanwhile.
//! - [`restoring`]: jobs that were stopped and go on with other numbers of servers and workers.
//! - [`pyarrow`]: checkpoints read by others.
//! - [`objects`]: the same with everything in object storage.
//! - [`tls`]: the same encrypted, and strangers at the ports.
//! - [`images`]: container images, unpacked and run, and pushed to a [`registry`].
//! - [`faults`]: processes killed while they train, damaged files, wrong tokens.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests may panic, and these wait for other processes with a deadline"
)]

mod backups;
mod bad_input;
mod bounds;
mod chaos;
mod command;
mod consistency;
mod failpoints;
mod faults;
mod help;
mod images;
mod jobs;
mod models;
mod moves;
mod objects;
mod pyarrow;
mod registry;
mod restoring;
mod settings;
mod tls;
mod world;
