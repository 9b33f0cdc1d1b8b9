//! All files of a checkpoint read as one model, for export and evaluation: weights without slots.

use std::path::Path;

use elasticdl_spec::{ModelShape, PartitionId, TableShape, TensorShape};

use crate::checkpoint::read::{Batch, CheckpointFile, read_head, verify};
use crate::checkpoint::restore::check_follows;
use crate::checkpoint::{Head, Layer, path_of};
use crate::error::{Error, Result};
use crate::table::Ids;

/// A checkpoint with all its partitions.
#[derive(Debug)]
pub struct Reader {
    /// By partition: its files, the oldest first.
    chains: Vec<Vec<Layer>>,
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
    /// Opens a checkpoint whose partitions are in these chains of files, from partition 0 on, and checks that all are
    /// there and fit together.
    pub fn open(chains: Vec<Vec<Layer>>) -> Result<Self> {
        let mut heads: Vec<Head> = Vec::with_capacity(chains.len());
        for (chain, partition) in chains.iter().zip((0..).map(PartitionId)) {
            let mut before = None;
            for layer in chain {
                let path = path_of(&layer.dir, partition);
                let head = read_head(&path)?;
                check_follows(&head, layer.checkpoint, before, &path)?;
                if (head.partition, head.partitions as usize) != (partition, chains.len()) {
                    let (of, due) = (head.partitions, chains.len());
                    let found =
                        format!("it holds {} of {of}, where {partition} of {due} is due", head.partition);
                    return Err(Error::foreign(&path, "place", found));
                }
                if heads.first().is_some_and(|first| (&head.shape, head.seed) != (&first.shape, first.seed)) {
                    return Err(Error::foreign(&path, "model", "it does not fit the other files"));
                }
                before = Some(layer.checkpoint);
                heads.truncate(partition.0 as usize);
                heads.push(head);
            }
        }
        let whole = !chains.is_empty() && heads.len() == chains.len();
        let none = || Error::damaged(Path::new("checkpoint"), "a partition has no file");
        whole.then_some(Reader { chains, heads }).ok_or_else(none)
    }

    /// Checks lengths and checksums.
    pub fn verify(&self) -> Result<()> {
        let layers = self.chains.iter().zip((0..).map(PartitionId));
        let mut layers =
            layers.flat_map(|(chain, partition)| chain.iter().map(move |layer| (layer, partition)));
        layers.try_for_each(|(layer, partition)| verify(&path_of(&layer.dir, partition), layer.sum))
    }

    /// The model.
    pub fn shape(&self) -> &ModelShape {
        &self.heads[0].shape
    }

    /// What the last file of each partition says about itself, from partition 0 on.
    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    /// How many rows a table has over all partitions.
    pub fn rows(&self, table: usize) -> u64 {
        self.heads.iter().map(|head| head.partition_rows()[table]).sum()
    }

    /// Shows every row of every table and every tensor to `visit`, file by file, in memory for one record
    /// batch at a time. Every tensor comes once and whole.
    pub fn visit<E: From<Error>>(
        &self,
        mut visit: impl FnMut(Piece<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let shape = self.shape();
        let mut tensors = vec![Vec::new(); shape.tensors.len()];
        for (chain, partition) in self.chains.iter().zip((0..).map(PartitionId)) {
            let mut newer: Vec<Ids> = Vec::new();
            for (age, layer) in chain.iter().rev().enumerate() {
                let path = path_of(&layer.dir, partition);
                let mut file = CheckpointFile::open(&path)?;
                let is_oldest = age + 1 == chain.len();
                if age == 0 {
                    // A chain of one file has nothing that is newer.
                    let partitions = file.head.partitions;
                    let room =
                        |rows: &u64| Ids::with_room(if is_oldest { 0 } else { *rows as usize }, partitions);
                    newer = file.head.rows.iter().map(room).collect();
                }
                while let Some(batch) = file.next_batch()? {
                    match shape.tables.get(batch.name) {
                        Some(table) if batch.weights().len() == batch.ids().len() * table.width() => {
                            let newer = &mut newer[batch.name];
                            visit_rows(table, &batch, (age > 0).then_some(&*newer), &mut visit)?;
                            if !is_oldest {
                                batch.keys().for_each(|key| newer.insert(key));
                            }
                        }
                        Some(table) => {
                            let reason = format!("rows of {:?} are not {} long", table.name, table.width());
                            return Err(Error::damaged(&path, reason).into());
                        }
                        // Each file has all tensors, and the newest file comes first.
                        None if age > 0 => {}
                        // Counts and bits come after the last tensor.
                        None => {
                            let tensor = tensors.get_mut(batch.name - shape.tables.len());
                            tensor.into_iter().for_each(|tensor| tensor.extend_from_slice(batch.weights()));
                        }
                    }
                }
            }
        }
        for (tensor, values) in shape.tensors.iter().zip(&tensors) {
            if values.len() != tensor.len() {
                let reason = format!("{} of {} values of {:?}", values.len(), tensor.len(), tensor.name);
                return Err(Error::damaged(Path::new("checkpoint"), reason).into());
            }
            visit(Piece::Tensor { tensor, values })?;
        }
        Ok(())
    }
}

/// Shows the rows of a batch that no newer file has.
fn visit_rows<E>(
    table: &TableShape,
    batch: &Batch,
    newer: Option<&Ids>,
    visit: &mut impl FnMut(Piece<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let (ids, weights) = (batch.ids(), batch.weights());
    let Some(newer) = newer else { return visit(Piece::Rows { table, ids, weights }) };
    let rows = batch.keys().zip(ids.iter().copied().zip(weights.chunks_exact(table.width())));
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (_, (id, row)) in rows.filter(|(key, _)| !newer.contains(*key)) {
        ids.push(id);
        weights.extend_from_slice(row);
    }
    if ids.is_empty() { Ok(()) } else { visit(Piece::Rows { table, ids: &ids, weights: &weights }) }
}
