//! A partition at one moment between two pushes: what the lock is held for, and what is taken away later.

use crate::checkpoint::{FORMAT, FORMAT_UNBOUNDED, Head};
use crate::error::{Error, Result};
use crate::partition::Partition;
use crate::table::{Order, Rows, Table, Words};

/// Floats in one piece of a tensor.
const PIECE_FLOATS: usize = 1 << 20;

/// A partition that was cut: all but its rows, which [`Cut::take_rows`] brings piece by piece.
#[derive(Debug)]
pub struct Cut {
    pub(super) head: Head,
    /// Tensors, counts of strangers and bits, all whole, by their place among the names of tables, tensors, counts and
    /// bits; tensors in pieces.
    pub(super) tensors: Vec<(usize, Rows)>,
    /// The table whose rows come next.
    table: usize,
}

impl Cut {
    /// Cuts `partition`. It may go on as soon as its tensors, counts and bits are copied.
    pub fn begin(partition: &mut Partition, order: Order) -> Self {
        let (base, rows) = partition.begin_cut(order);
        let head = head(partition, order.checkpoint, base, rows);
        let shape = &head.shape;
        let ours = partition.model().tensors_of(partition.id()).expect("the partition exists");
        let mut tensors = Vec::new();
        for (index, tensor) in ours.iter().zip(partition.tensors()) {
            let (values, slots) = (tensor.values(), tensor.slots());
            for piece in 0..values.len().max(slots.len()).div_ceil(PIECE_FLOATS) {
                let part = |all: &[f32]| all.chunks(PIECE_FLOATS).nth(piece).unwrap_or(&[]).to_vec();
                let (ids, weights, slots) = (vec![piece as u64], part(values), part(slots));
                tensors.push((shape.tables.len() + index, Rows { ids, weights, slots, ..Rows::default() }));
            }
        }
        let (strangers, used) = (Table::strangers as fn(&Table) -> Words, Table::used as _);
        let beside = [strangers, used].into_iter().flat_map(|of| partition.tables().iter().map(of));
        for (words, place) in beside.zip(shape.tables.len() + shape.tensors.len()..) {
            tensors.push((place, Rows { ids: words.0, ..Rows::default() }));
        }
        tensors.retain(|(_, piece)| !piece.is_empty());
        Cut { head, tensors, table: 0 }
    }

    /// What the file says about itself.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Appends rows of one table to `out`, which is empty or holds rows of that table, and tells which table it is and
    /// whether it has more. `None`: all rows of all tables were taken.
    ///
    /// # Errors
    ///
    /// [`Error::CutLost`] where `partition` is not the one that was cut, or was cut again since.
    pub fn take_rows(&mut self, partition: &mut Partition, out: &mut Rows) -> Result<Option<(usize, bool)>> {
        let table = self.table;
        if table == self.head.rows.len() {
            return Ok(None);
        }
        let same = partition.incarnation() == self.head.incarnation;
        let taken = if same { partition.take_rows(self.head.checkpoint, table, out) } else { None };
        let more = taken.ok_or(Error::CutLost { partition: partition.id() })?;
        self.table += usize::from(!more);
        Ok(Some((table, more)))
    }
}

impl Head {
    /// What there is to say of a partition at this moment, outside of any checkpoint.
    pub fn of(partition: &Partition) -> Self {
        let tables = partition.tables();
        let head = head(partition, 0, None, tables.iter().map(|t| t.len() as u64).collect());
        let bounds = if head.bounds.is_empty() { &[] } else { tables };
        Head { bounds: bounds.iter().map(Table::whole_bounds).collect(), ..head }
    }
}

fn head(partition: &Partition, checkpoint: u64, base: Option<u64>, rows: Vec<u64>) -> Head {
    let (model, memory) = (partition.model(), partition.memory());
    let bounded = partition.tables().iter().any(|table| table.counts().is_some());
    Head {
        format: if bounded { FORMAT } else { FORMAT_UNBOUNDED },
        checkpoint,
        base,
        job: model.job.clone(),
        seed: model.seed,
        shape: model.shape.clone(),
        optimizer: model.optimizer,
        partition: partition.id(),
        partitions: model.partitions,
        incarnation: partition.incarnation(),
        version: memory.version,
        rows,
        rows_of_all: partition.tables().iter().map(|t| t.len() as u64).collect(),
        marks: memory.marks.open().clone(),
        closed: memory.marks.closed().clone(),
        audit: memory.audit.clone(),
        bounds: partition.tables().iter().filter(|_| bounded).map(Table::bounds).collect(),
    }
}
