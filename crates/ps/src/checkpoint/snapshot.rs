//! A copy of a partition, cut between two pushes: all that the lock is held for.

use crate::checkpoint::{FORMAT, Head};
use crate::partition::Partition;

/// Rows in one record batch of the file.
const BATCH_ROWS: usize = 1 << 16;
/// Floats in one piece of a tensor.
const PIECE_FLOATS: usize = 1 << 20;

/// A partition at one point between two pushes, compact and without an index.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) head: Head,
    /// Names in the order of [`Chunk::name`]: all tables, then all tensors of the model.
    pub(super) names: Vec<String>,
    pub(super) chunks: Vec<Chunk>,
}

/// Rows that go into the file together. All weights of a chunk are of one length, all slots too.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Which of the names.
    pub(super) name: usize,
    pub(super) ids: Vec<u64>,
    pub(super) weights: Vec<f32>,
    pub(super) slots: Vec<f32>,
}

impl Snapshot {
    /// Copies `partition`.
    pub fn take(partition: &Partition) -> Self {
        let mut chunks = Vec::new();
        for (name, table) in partition.tables().iter().enumerate() {
            let ids = table.ids();
            for (i, ids) in ids.chunks(BATCH_ROWS).enumerate() {
                let (mut weights, mut slots) = (Vec::new(), Vec::new());
                let first = i * BATCH_ROWS;
                table.copy_rows(first..first + ids.len(), &mut weights, &mut slots);
                chunks.push(Chunk { name, ids: ids.to_vec(), weights, slots });
            }
        }
        let shape = &partition.model().shape;
        let ours = partition.model().tensors_of(partition.id()).expect("the partition exists");
        for (index, tensor) in ours.iter().zip(partition.tensors()) {
            let name = shape.tables.len() + index;
            let (values, slots) = (tensor.values(), tensor.slots());
            let pieces = values.len().max(slots.len()).div_ceil(PIECE_FLOATS);
            for piece in 0..pieces {
                let part = |all: &[f32]| all.chunks(PIECE_FLOATS).nth(piece).unwrap_or(&[]).to_vec();
                chunks.push(Chunk {
                    name,
                    ids: vec![piece as u64],
                    weights: part(values),
                    slots: part(slots),
                });
            }
        }
        let tables = shape.tables.iter().map(|t| t.name.clone());
        let names = tables.chain(shape.tensors.iter().map(|t| t.name.clone())).collect();
        Snapshot { head: Head::of(partition), names, chunks }
    }

    /// What the file will say about itself.
    pub fn head(&self) -> &Head {
        &self.head
    }
}

impl Head {
    /// What there is to say of a partition at this moment.
    pub fn of(partition: &Partition) -> Self {
        let (model, memory) = (partition.model(), partition.memory());
        Head {
            format: FORMAT,
            job: model.job.clone(),
            seed: model.seed,
            shape: model.shape.clone(),
            optimizer: model.optimizer,
            partition: partition.id(),
            partitions: model.partitions,
            incarnation: partition.incarnation(),
            version: memory.version,
            rows: partition.tables().iter().map(|t| t.len() as u64).collect(),
            marks: memory.marks.open().clone(),
            closed: memory.marks.closed().clone(),
            audit: memory.audit.clone(),
        }
    }
}
