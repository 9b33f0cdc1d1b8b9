//! Checkpoints: one file per partition, written while the partition goes on training.
//!
//! A file is an Arrow IPC file (`pyarrow.ipc.open_file` reads it) with these columns:
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `table` | `dictionary<int32, utf8>` | name of the table, or of the dense tensor |
//! | `id` | uint64 | the row's id; for a tensor, the number of the piece |
//! | `weights` | `list<float>` | the row's weights; a piece of the tensor's values |
//! | `slots` | `list<float>` | the optimizer's slots of the row; a piece of the tensor's slots |
//!
//! A tensor comes in pieces numbered from 0: all `weights` in this order are its values, row-major, all
//! `slots` its slots. What the slots mean is in `optimizer/`. The schema's metadata has one key,
//! `elasticdl`, with a JSON document, [`Head`]: what the file belongs to, which batches are in it
//! (marks, closed tasks), and the audit's counts.
//!
//! A file exists under its name only when it is whole and on disk; what counts is the length and the
//! CRC-32 that the writer told the master. Which checkpoints are committed is the master's business.

mod read;
mod rows;
mod snapshot;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticdl_spec::{ModelShape, OptimizerSpec, PartitionId, TaskId};
use serde::{Deserialize, Serialize};

use crate::audit::Audit;
use crate::closed::Closed;
use crate::marks::Open;

pub use read::{Contents, decode, decode_contents, read_head, restore, verify};
pub use rows::{Piece, Reader};
pub use snapshot::Snapshot;
pub use write::{encode, sync, write};

/// The version of the format that is written. Older ones stay readable; newer ones are refused.
pub const FORMAT: u32 = 1;
/// The key of the schema's metadata that holds the [`Head`].
const HEAD_KEY: &str = "elasticdl";
const COLUMNS: [&str; 4] = ["table", "id", "weights", "slots"];

/// What a checkpoint file says about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// [`FORMAT`] when it was written.
    pub format: u32,
    /// The job's name.
    pub job: String,
    /// The job's seed.
    pub seed: u64,
    /// The whole model, not only this part.
    pub shape: ModelShape,
    /// How it was trained.
    pub optimizer: OptimizerSpec,
    /// Which partition this is.
    pub partition: PartitionId,
    /// Of how many.
    pub partitions: u32,
    /// Which life of the partition was cut.
    pub incarnation: u64,
    /// How many pushes it had applied.
    pub version: u64,
    /// Rows in this file by table, in the order of the shape.
    pub rows: Vec<u64>,
    /// Open tasks with their marks and leases.
    pub marks: BTreeMap<TaskId, Open>,
    /// Tasks of which nothing can change any more.
    pub closed: Closed,
    /// What was applied, counted where rows changed.
    pub audit: Audit,
}

/// Length and checksum of a file: what tells it from a damaged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of all of it.
    pub crc32: u32,
}

impl Sum {
    /// That of a file in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Sum { bytes: bytes.len() as u64, crc32: crc32fast::hash(bytes) }
    }
}

/// The file of a partition in a checkpoint's directory.
pub fn path_of(dir: &Path, partition: PartitionId) -> PathBuf {
    dir.join(format!("partition-{:03}.arrow", partition.0))
}

#[cfg(test)]
mod tests;
