//! A partition from its files: verified first, then believed.

use std::io::{Cursor, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::{ModelShape, PartitionId};

use crate::checkpoint::read::{Batch, CheckpointFile, verify};
use crate::checkpoint::{Head, Layer, Sum, path_of};
use crate::error::{Error, Result};
use crate::marks::Marks;
use crate::model::Model;
use crate::partition::Partition;
use crate::table::{Bounds, Table, Words};

/// Opens a partition as a chain of files holds it, under a new incarnation. The chain begins with its oldest file.
///
/// # Errors
///
/// A file that is missing, truncated, damaged, of another model, optimizer, seed or partition, or not the next one of
/// the chain is told apart from the others by its error; nothing is guessed.
pub fn restore(model: &Arc<Model>, id: PartitionId, incarnation: u64, chain: &[Layer]) -> Result<Partition> {
    let mut restoring = Restoring::new(model, id, incarnation);
    for layer in chain {
        let path = path_of(&layer.dir, id);
        verify(&path, layer.sum)?;
        restoring.add(layer.checkpoint, CheckpointFile::open(&path)?)?;
    }
    restoring.finish()
}

/// [`restore`] from files in memory: for tests and simulations of disks.
///
/// # Errors
///
/// Those of [`restore`].
pub fn decode(
    model: &Arc<Model>,
    id: PartitionId,
    incarnation: u64,
    chain: &[(u64, &[u8], Sum)],
) -> Result<Partition> {
    let path = path_of(Path::new("memory"), id);
    let mut restoring = Restoring::new(model, id, incarnation);
    for (checkpoint, bytes, sum) in chain {
        let found = Sum::of(bytes);
        if found.bytes < sum.bytes {
            let (found, expected) = (found.bytes, sum.bytes);
            return Err(Error::Truncated { path: path.display().to_string(), found, expected });
        }
        if found != *sum {
            return Err(Error::damaged(&path, format!("it is {found:?}, {sum:?} was written")));
        }
        restoring.add(*checkpoint, CheckpointFile::over(&path, Cursor::new(bytes))?)?;
    }
    restoring.finish()
}

/// A partition that is being filled from files whose bytes are verified.
struct Restoring<'a> {
    model: &'a Arc<Model>,
    partition: Partition,
    last: Option<Last>,
}

/// The last file that was taken in.
struct Last {
    checkpoint: u64,
    path: PathBuf,
    head: Head,
    /// Values and slots of the tensors that live here.
    tensors: Vec<(Vec<f32>, Vec<f32>)>,
    /// By table: counts of ids without a row; behind those, by table, bits of rows.
    beside: Vec<Vec<u64>>,
}

impl<'a> Restoring<'a> {
    fn new(model: &'a Arc<Model>, id: PartitionId, incarnation: u64) -> Self {
        Restoring { model, partition: Partition::new(Arc::clone(model), id, incarnation), last: None }
    }

    /// Takes in the next file of the chain.
    fn add<R: Read + Seek>(&mut self, checkpoint: u64, mut file: CheckpointFile<'_, R>) -> Result<()> {
        let (path, id) = (file.path, self.partition.id());
        check_belongs(&file.head, self.model, id, path)?;
        if self.last.is_none() {
            let (tables, ..) = self.partition.restoring();
            tables.iter_mut().zip(&file.head.rows).for_each(|(table, rows)| table.make_room(*rows as usize));
        }
        check_follows(&file.head, checkpoint, self.last.take().map(|last| last.checkpoint), path)?;
        let mut tensors: Vec<(Vec<f32>, Vec<f32>)> = vec![Default::default(); self.partition.tensors().len()];
        let mut rows = vec![0; self.model.shape.tables.len()];
        let mut beside = vec![Vec::new(); 2 * rows.len()];
        let ours = self.model.tensors_of(id).unwrap_or_default();
        while let Some(batch) = file.next_batch()? {
            let Some(tensor) = batch.name.checked_sub(rows.len()) else {
                rows[batch.name] += batch.ids().len() as u64;
                let rows_of_all = file.head.partition_rows()[batch.name];
                fill_table(&mut self.partition, &batch, (file.head.base, rows_of_all), path)?;
                continue;
            };
            if let Some(place) = tensor.checked_sub(self.model.shape.tensors.len()) {
                beside[place].extend_from_slice(batch.ids());
                continue;
            }
            let Some(place) = ours.iter().position(|i| *i == tensor) else {
                let reason = format!("it holds tensor number {tensor} of another partition");
                return Err(Error::damaged(path, reason));
            };
            tensors[place].0.extend_from_slice(batch.weights());
            tensors[place].1.extend_from_slice(batch.slots());
        }
        let mut counts = rows.iter().zip(&file.head.rows).zip(self.partition.tables());
        if let Some(((found, said), table)) = counts.find(|((found, said), _)| found != said) {
            let name = &table.shape().name;
            return Err(Error::damaged(path, format!("{found} of {said} rows of {name:?}")));
        }
        self.last = Some(Last { checkpoint, path: path.into(), head: file.head, tensors, beside });
        Ok(())
    }

    /// The partition as the last file has left it.
    fn finish(mut self) -> Result<Partition> {
        let nothing =
            || Error::damaged(&path_of(Path::new(""), self.partition.id()), "it is in no checkpoint");
        let Last { path, mut head, tensors, mut beside, .. } = self.last.take().ok_or_else(nothing)?;
        let (tables, places, memory) = self.partition.restoring();
        for (table, rows) in tables.iter().zip(head.partition_rows()) {
            if table.len() as u64 != *rows {
                let (name, found) = (&table.shape().name, table.len());
                return Err(Error::damaged(
                    &path,
                    format!("with what it adds to, {found} of {rows} rows of {name:?}"),
                ));
            }
        }
        if !head.bounds.is_empty() {
            tables.iter_mut().for_each(Table::differs_from_files);
        }
        head.bounds.resize_with(tables.len(), Bounds::default);
        let used = beside.split_off(tables.len()).into_iter().map(Words);
        let beside = beside.into_iter().map(Words).zip(used);
        for ((table, bounds), (strangers, used)) in tables.iter_mut().zip(head.bounds).zip(beside) {
            if !table.restore_bound(&Bounds { strangers, used, ..bounds }) {
                let reason = format!("rows of {:?}, or their bits, are missing", table.shape().name);
                return Err(Error::damaged(&path, reason));
            }
        }
        for (place, (values, slots)) in places.iter_mut().zip(tensors) {
            if !place.restore(values, slots) {
                return Err(Error::damaged(&path, format!("tensor {:?} is incomplete", place.shape().name)));
            }
        }
        let Head { marks, closed, audit, version, .. } = head;
        (memory.marks, memory.audit, memory.version) = (Marks::new(marks, closed), audit, version);
        Ok(self.partition)
    }
}

/// Whether a file is the one of a chain that comes after `before`.
pub(super) fn check_follows(head: &Head, checkpoint: u64, before: Option<u64>, path: &Path) -> Result<()> {
    if head.format > 1 && head.checkpoint != checkpoint {
        let found = format!("it was written for {}, {checkpoint} is due", head.checkpoint);
        return Err(Error::foreign(path, "checkpoint", found));
    }
    if head.base != before {
        let name = |base: Option<u64>| base.map_or("nothing".into(), |base| format!("checkpoint {base}"));
        let found = format!("it adds to {}, where {} comes before it", name(head.base), name(before));
        return Err(Error::foreign(path, "chain", found));
    }
    Ok(())
}

/// Puts rows in place. A whole file has each row once; one that adds to another has later states of its rows.
fn fill_table(
    partition: &mut Partition,
    batch: &Batch,
    (base, rows_of_all): (Option<u64>, u64),
    path: &Path,
) -> Result<()> {
    let (id, partitions) = (partition.id(), partition.model().partitions);
    let (ids, weights, slots) = (batch.ids(), batch.weights(), batch.slots());
    let (tables, ..) = partition.restoring();
    let table = &mut tables[batch.name];
    let (width, per_row) = (table.shape().width(), table.slots());
    if weights.len() != ids.len() * width || slots.len() != ids.len() * per_row {
        let name = &table.shape().name;
        return Err(Error::damaged(
            path,
            format!("rows of {name:?} are not {width} + {per_row} floats long"),
        ));
    }
    let numbers = batch.numbers().filter(|_| table.is_numbered());
    if numbers.is_none() && batch.numbers().is_some() && base.is_some() {
        let name = &table.shape().name;
        let found =
            format!("table {name:?} has a bound in the file and none in this job, and the file is not whole");
        return Err(Error::foreign(path, "tables", found));
    }
    for (i, row) in ids.iter().enumerate() {
        let placed = partition_of_row(*row, partitions) == id;
        if let Some(number) = numbers.map(|numbers| numbers[i]) {
            if u64::from(number) >= rows_of_all {
                return Err(Error::damaged(path, format!("row {row} has number {number} of {rows_of_all}")));
            }
            table.place(number, *row);
        }
        let fresh = table.restore(*row, &weights[i * width..][..width], &slots[i * per_row..][..per_row]);
        if !placed || !(fresh || base.is_some() || numbers.is_some()) {
            return Err(Error::damaged(path, format!("row {row} is there twice or lives elsewhere")));
        }
    }
    Ok(())
}

/// Whether a whole file is the one that is due here.
fn check_belongs(head: &Head, model: &Model, id: PartitionId, path: &Path) -> Result<()> {
    if let Some(difference) = difference(&head.shape, &model.shape) {
        return Err(Error::foreign(path, "model", difference));
    }
    let (theirs, ours) = (head.optimizer.name(), model.optimizer.name());
    if theirs != ours {
        return Err(Error::foreign(path, "optimizer", format!("{theirs} in the file, {ours} in this job")));
    }
    if (head.partition, head.partitions) != (id, model.partitions) {
        return Err(Error::foreign(
            path,
            "place",
            format!(
                "{} of {} in the file, {id} of {} here",
                head.partition, head.partitions, model.partitions
            ),
        ));
    }
    if head.seed != model.seed {
        // Rows that were never met would be born otherwise than in the run that wrote the file.
        return Err(Error::foreign(path, "seed", format!("{} in the file, {} here", head.seed, model.seed)));
    }
    Ok(())
}

/// The first difference between two models, in words.
fn difference(theirs: &ModelShape, ours: &ModelShape) -> Option<String> {
    let tables = |m: &ModelShape| m.tables.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    let tensors = |m: &ModelShape| m.tensors.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    let names = [("table", tables(theirs), tables(ours)), ("tensor", tensors(theirs), tensors(ours))];
    for (what, theirs, ours) in names {
        if let Some(name) = theirs.iter().find(|n| !ours.contains(n)) {
            return Some(format!("{what} {name:?} is in the file and not in this job's model"));
        }
        if let Some(name) = ours.iter().find(|n| !theirs.contains(n)) {
            return Some(format!("{what} {name:?} is in this job's model and not in the file"));
        }
        if theirs != ours {
            return Some(format!("its {what}s are in another order"));
        }
    }
    let width = |(a, b): (&elasticdl_spec::TableShape, &elasticdl_spec::TableShape)| {
        let (name, there, here) = (&a.name, a.width(), b.width());
        if there != here {
            return Some(format!("rows of table {name:?} have {there} weights in the file and {here} here"));
        }
        (a != b).then(|| format!("rows of table {name:?} are born otherwise"))
    };
    let dims = |(a, b): (&elasticdl_spec::TensorShape, &elasticdl_spec::TensorShape)| {
        if a.shape != b.shape {
            return Some(format!("tensor {:?} is {:?} in the file and {:?} here", a.name, a.shape, b.shape));
        }
        (a != b).then(|| format!("tensor {:?} is born otherwise", a.name))
    };
    let tables = theirs.tables.iter().zip(&ours.tables).find_map(width);
    tables.or_else(|| theirs.tensors.iter().zip(&ours.tensors).find_map(dims))
}
