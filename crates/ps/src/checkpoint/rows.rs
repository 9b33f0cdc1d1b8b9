//! All files of a checkpoint read as one model, for export and evaluation: weights without slots.

use std::path::{Path, PathBuf};

use elasticdl_spec::{ModelShape, PartitionId, TableShape, TensorShape};

use crate::checkpoint::read::{CheckpointFile, read_head, verify};
use crate::checkpoint::{Head, Sum, path_of};
use crate::error::{Error, Result};

/// A checkpoint's directory with all its partitions.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    heads: Vec<Head>,
}

/// A part of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Piece<'a> {
    /// Some rows of a table. A table comes in many of these.
    Rows {
        /// The table.
        table: &'a TableShape,
        /// Ids of the rows.
        ids: &'a [u64],
        /// Their weights, one after the other.
        weights: &'a [f32],
    },
    /// A whole tensor.
    Tensor {
        /// The tensor.
        tensor: &'a TensorShape,
        /// Its values, row-major.
        values: &'a [f32],
    },
}

impl Reader {
    /// Opens the checkpoint in `dir` and checks that all its partitions are there and fit together.
    pub fn open(dir: &Path) -> Result<Self> {
        let first_path = path_of(dir, PartitionId(0));
        let first = read_head(&first_path)?;
        let mut heads = Vec::with_capacity(first.partitions as usize);
        for partition in (0..first.partitions).map(PartitionId) {
            let path = path_of(dir, partition);
            let head = read_head(&path)?;
            if head.partition != partition || head.partitions != first.partitions {
                let found = format!("it holds {} of {}", head.partition, head.partitions);
                return Err(Error::foreign(&path, "place", found));
            }
            if (&head.shape, head.seed) != (&first.shape, first.seed) {
                let found = format!("it does not fit {}", first_path.display());
                return Err(Error::foreign(&path, "model", found));
            }
            heads.push(head);
        }
        Ok(Reader { dir: dir.into(), heads })
    }

    /// Checks lengths and checksums, given for partition 0 and on.
    pub fn verify(&self, sums: &[Sum]) -> Result<()> {
        assert_eq!(sums.len(), self.heads.len(), "there is a sum for every partition");
        self.heads
            .iter()
            .zip(sums)
            .try_for_each(|(head, sum)| verify(&path_of(&self.dir, head.partition), *sum))
    }

    /// The model.
    pub fn shape(&self) -> &ModelShape {
        &self.heads[0].shape
    }

    /// What the files say about themselves, from partition 0 on.
    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    /// How many rows a table has over all partitions.
    pub fn rows(&self, table: usize) -> u64 {
        self.heads.iter().map(|head| head.rows[table]).sum()
    }

    /// Shows every row of every table and every tensor to `visit`, file by file, in memory for one record
    /// batch at a time. Every tensor comes once and whole.
    pub fn visit<E: From<Error>>(
        &self,
        mut visit: impl FnMut(Piece<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let shape = self.shape();
        let mut tensors = vec![Vec::new(); shape.tensors.len()];
        for head in &self.heads {
            let path = path_of(&self.dir, head.partition);
            let mut file = CheckpointFile::open(&path)?;
            while let Some(batch) = file.next_batch()? {
                match shape.tables.get(batch.name) {
                    Some(table) if batch.weights().len() == batch.ids().len() * table.width() => {
                        visit(Piece::Rows { table, ids: batch.ids(), weights: batch.weights() })?;
                    }
                    Some(table) => {
                        let reason = format!("rows of {:?} are not {} long", table.name, table.width());
                        return Err(Error::damaged(&path, reason).into());
                    }
                    None => tensors[batch.name - shape.tables.len()].extend_from_slice(batch.weights()),
                }
            }
        }
        for (tensor, values) in shape.tensors.iter().zip(&tensors) {
            if values.len() != tensor.len() {
                let reason = format!("{} of {} values of {:?}", values.len(), tensor.len(), tensor.name);
                return Err(Error::damaged(&self.dir, reason).into());
            }
            visit(Piece::Tensor { tensor, values })?;
        }
        Ok(())
    }
}
