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
//! | `number` | uint32 or null | the row's number, in a table with a bound in bytes; see below |
//!
//! Rows come in no certain order. A tensor comes in pieces numbered from 0: all `weights` in this order are its values,
//! row-major, all `slots` its slots. What the slots mean is in `optimizer/`. The schema's metadata has one key,
//! `elasticdl`, with a JSON document, [`Head`]: what the file belongs to, which batches are in it
//! (marks, closed tasks), and the audit's counts.
//!
//! A file is *whole*, or *adds to* that of an earlier checkpoint ([`Head::base`]): it then holds the rows that were born
//! or changed since. Such files make a chain that begins with a whole one ([`Layer`]). Of a row the last file of the chain
//! that has it counts. Tensors, and all that the head says, are those of the last file, which has them all.
//!
//! A row of a table with a bound in bytes may make room for another one, which takes its number. Rows of such a table are
//! known by their numbers: of a *number* the last file of the chain that has it counts, and the id there was in an
//! earlier one is gone. Which of them were trained since the clock's hand came by says who goes next: a bit for each,
//! by its number, beside the rows under the name `used of NAME`, as words in the column `id` (`table/clock.rs`). Where a
//! table asks how often an id was named before it gets a row, the counts are there too under the name `counts of NAME`
//! (`table/sketch.rs`). Bits and counts are whole in every file, like tensors: they change in rows that do not. A job
//! without such tables has none of this: its files are of format 2, without the last column.
//!
//! All of a file is of one moment between two pushes. At that moment ([`Cut::begin`]) the head and the tensors are
//! copied, and every row that belongs into the file gets a bit; then rows are taken away, some thousand at a time. A push
//! that comes before has the row copied first (`table/changes.rs`). So the partition's lock is held once for as long as
//! it takes to copy its tensors, counts and bits, and never for long because of rows; and beside those little more memory
//! is taken than that of one batch of rows.
//!
//! A file exists under its name only when it is whole and on disk; what counts is the length and the
//! CRC-32 that the writer told the master. Which checkpoints are committed is the master's business.

mod cut;
mod read;
mod restore;
mod rows;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticdl_spec::{ModelShape, OptimizerSpec, PartitionId, TaskId};
use serde::{Deserialize, Serialize};

use crate::audit::Audit;
use crate::closed::Closed;
use crate::marks::Open;

use crate::table::Bounds;
pub use crate::table::{Order, Rows};
pub use cut::Cut;
pub use read::{Contents, decode_contents, read_head, verify};
pub use restore::{decode, restore};
pub use rows::{Piece, Reader};
pub use write::{Encoder, encode, sync, write, write_now};

/// The version of the format that is written. Older ones stay readable; newer ones are refused.
///
/// 1: every file is whole. 2: a file may add to another one. 3: tables may have bounds. 4: with the bits of which rows
/// were trained lately.
pub const FORMAT: u32 = 4;
/// What is written for a job none of whose tables has a bound.
const FORMAT_UNBOUNDED: u32 = 2;
/// The last one without bits.
const FORMAT_WITHOUT_BITS: u32 = 3;
/// The key of the schema's metadata that holds the [`Head`].
const HEAD_KEY: &str = "elasticdl";
const COLUMNS: [&str; 5] = ["table", "id", "weights", "slots", "number"];

/// What a checkpoint file says about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// [`FORMAT`] when it was written.
    pub format: u32,
    /// The checkpoint's number; 0 in files of format 1.
    #[serde(default)]
    pub checkpoint: u64,
    /// The checkpoint whose file this one adds to; `None`: it is whole.
    #[serde(default)]
    pub base: Option<u64>,
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
    /// Rows of the partition by table, in the order of the shape: those of a file that is whole. Empty in files of
    /// format 1, which are.
    #[serde(default)]
    pub rows_of_all: Vec<u64>,
    /// Open tasks with their marks and leases.
    pub marks: BTreeMap<TaskId, Open>,
    /// Tasks of which nothing can change any more.
    pub closed: Closed,
    /// What was applied, counted where rows changed.
    pub audit: Audit,
    /// What there is to tell of the bounds of tables, in the order of the shape; empty where no table has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bounds: Vec<Bounds>,
}

impl Head {
    /// The columns of its file.
    fn columns(&self) -> &'static [&'static str] {
        if self.format <= FORMAT_UNBOUNDED { &COLUMNS[..4] } else { &COLUMNS }
    }

    /// Names of what is beside rows and tensors, by what it is and then by table: counts and bits.
    fn names_beside(&self) -> impl Iterator<Item = String> {
        let beside: &[&str] = match self.format {
            ..=FORMAT_UNBOUNDED => &[],
            FORMAT_WITHOUT_BITS => &["counts"],
            _ => &["counts", "used"],
        };
        let tables = &self.shape.tables;
        beside.iter().flat_map(|what| tables.iter().map(move |table| format!("{what} of {}", table.name)))
    }

    /// How many rows the partition has of each table, those that this file adds to included.
    pub fn partition_rows(&self) -> &[u64] {
        if self.format == 1 { &self.rows } else { &self.rows_of_all }
    }
}

/// One file of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The checkpoint that it was written for.
    pub checkpoint: u64,
    /// That checkpoint's directory.
    pub dir: PathBuf,
    /// What the file is.
    pub sum: Sum,
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
