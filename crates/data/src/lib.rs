//! Records: found in files, cut into shards, decoded into batches.
//!
//! This crate knows no protocol (files and objects come by name from `elasticdl-storage`), reads no clock and
//! decides nothing about who trains what. The map, in the order in which a record passes through it:
//!
//! - [`files`]: patterns become files, each with its format and a fingerprint.
//! - [`index`]: a file becomes shards; where a text file's shards start is found once and kept.
//! - [`batches`]: a shard becomes batches, the same ones for whoever reads it.
//! - [`reader`]: a shard's bytes become records: `reader/text.rs` and `reader/parquet.rs` are the hot
//!   paths, `reader/plan.rs` decides which column feeds which field.
//! - [`batch`]: the decoded form: labels, numbers, ids (`field.rs` says how a value becomes an id).
//! - [`mod@head`]: the first records, for a person to look at.
//! - [`synth`]: data with a planted truth, to judge learning by.
//! - [`error`]: what can go wrong with a file, and what can be wrong with a record.

pub mod batch;
pub mod batches;
pub mod error;
mod field;
pub mod files;
pub mod head;
pub mod index;
mod lines;
mod near;
mod number;
pub mod reader;
pub mod synth;

pub use batch::Batch;
pub use batches::{Batches, BatchesConfig};
pub use error::{BadRecord, Column, Error, Place, Result};
pub use files::{Compression, DataFile, discover};
pub use head::{HeadRecord, head};
pub use index::cut;
pub use reader::check;
