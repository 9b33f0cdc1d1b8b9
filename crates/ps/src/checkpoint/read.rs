//! Reading a partition's file back: verified first, then believed.

use std::io::{Cursor, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type, UInt64Type};
use arrow_array::{Array, ListArray, RecordBatch};
use arrow_ipc::reader::FileReader;
use arrow_schema::ArrowError;
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::{ModelShape, PartitionId};
use elasticdl_storage::Source;

use crate::checkpoint::{COLUMNS, FORMAT, HEAD_KEY, Head, Sum, path_of};
use crate::error::{Error, Result};
use crate::marks::Marks;
use crate::model::Model;
use crate::partition::Partition;

/// Opens a partition as the checkpoint in `dir` holds it, under a new incarnation.
///
/// # Errors
///
/// A file that is missing, truncated, damaged, or of another model, optimizer, seed or partition is told
/// apart from the others by its error; nothing is guessed.
pub fn restore(
    model: &Arc<Model>,
    dir: &Path,
    id: PartitionId,
    incarnation: u64,
    sum: Sum,
) -> Result<Partition> {
    let path = path_of(dir, id);
    verify(&path, sum)?;
    restored(model, CheckpointFile::open(&path)?, id, incarnation)
}

/// [`restore`] from a file in memory: for tests and simulations of disks.
///
/// # Errors
///
/// Those of [`restore`].
pub fn decode(
    model: &Arc<Model>,
    bytes: &[u8],
    id: PartitionId,
    incarnation: u64,
    sum: Sum,
) -> Result<Partition> {
    let path = path_of(Path::new("memory"), id);
    let found = Sum::of(bytes);
    if found.bytes < sum.bytes {
        let (found, expected) = (found.bytes, sum.bytes);
        return Err(Error::Truncated { path: path.display().to_string(), found, expected });
    }
    if found != sum {
        return Err(Error::damaged(&path, format!("it is {found:?}, {sum:?} was written")));
    }
    restored(model, CheckpointFile::over(&path, Cursor::new(bytes))?, id, incarnation)
}

/// What a file in memory holds, without a partition to put it in.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    /// What it says about itself.
    pub head: Head,
    /// By table: ids and weights, one after the other.
    pub tables: Vec<(Vec<u64>, Vec<f32>)>,
    /// By tensor of the whole model: its values; empty where it lives in another partition.
    pub tensors: Vec<Vec<f32>>,
}

/// Reads a file in memory whose sum is known to be right.
pub fn decode_contents(bytes: &[u8]) -> Result<Contents> {
    let mut file = CheckpointFile::over(Path::new("memory"), Cursor::new(bytes))?;
    let shape = &file.head.shape;
    let mut tables = vec![Default::default(); shape.tables.len()];
    let mut tensors = vec![Vec::new(); shape.tensors.len()];
    while let Some(batch) = file.next_batch()? {
        match tables.get_mut(batch.name) {
            None => tensors[batch.name - tables.len()].extend_from_slice(batch.weights()),
            Some((ids, weights)) => {
                let (ids, weights): (&mut Vec<u64>, &mut Vec<f32>) = (ids, weights);
                ids.extend_from_slice(batch.ids());
                weights.extend_from_slice(batch.weights());
            }
        }
    }
    Ok(Contents { head: file.head, tables, tensors })
}

/// Fills a partition from a file whose bytes are verified.
fn restored<R: Read + Seek>(
    model: &Arc<Model>,
    mut file: CheckpointFile<'_, R>,
    id: PartitionId,
    incarnation: u64,
) -> Result<Partition> {
    let path = file.path;
    check_belongs(&file.head, model, id, path)?;
    let mut partition = Partition::new(Arc::clone(model), id, incarnation);
    let mut tensors: Vec<(Vec<f32>, Vec<f32>)> = vec![Default::default(); partition.tensors().len()];
    let ours = model.tensors_of(id).unwrap_or_default();
    while let Some(batch) = file.next_batch()? {
        let Some(tensor) = batch.name.checked_sub(model.shape.tables.len()) else {
            fill_table(&mut partition, &batch, path)?;
            continue;
        };
        let Some(place) = ours.iter().position(|i| *i == tensor) else {
            return Err(Error::damaged(
                path,
                format!("it holds tensor number {tensor} of another partition"),
            ));
        };
        tensors[place].0.extend_from_slice(batch.weights());
        tensors[place].1.extend_from_slice(batch.slots());
    }
    let (tables, places, memory) = partition.restoring();
    for (table, rows) in tables.iter().zip(&file.head.rows) {
        if table.len() as u64 != *rows {
            let name = &table.shape().name;
            return Err(Error::damaged(path, format!("{} of {rows} rows of {name:?}", table.len())));
        }
    }
    for (place, (values, slots)) in places.iter_mut().zip(tensors) {
        if !place.restore(values, slots) {
            return Err(Error::damaged(path, format!("tensor {:?} is incomplete", place.shape().name)));
        }
    }
    let Head { marks, closed, audit, version, .. } = file.head;
    (memory.marks, memory.audit, memory.version) = (Marks::new(marks, closed), audit, version);
    Ok(partition)
}

/// Checks a file's length and checksum.
pub fn verify(path: &Path, sum: Sum) -> Result<()> {
    let failed = |e| Error::io(format!("reading checkpoint file {}", path.display()), e);
    let mut file = elasticdl_storage::open(path).map_err(failed)?;
    let found = file.meta().map_err(failed)?.bytes;
    if found < sum.bytes {
        return Err(Error::Truncated { path: path.display().to_string(), found, expected: sum.bytes });
    }
    if found > sum.bytes {
        return Err(Error::damaged(path, format!("{found} bytes where {} were written", sum.bytes)));
    }
    let mut crc = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            break;
        }
        crc.update(&buffer[..read]);
    }
    let crc = crc.finalize();
    if crc != sum.crc32 {
        return Err(Error::damaged(path, format!("its CRC-32 is {crc:08x}, {:08x} was written", sum.crc32)));
    }
    Ok(())
}

/// What a file says about itself, without its rows.
pub fn read_head(path: &Path) -> Result<Head> {
    Ok(CheckpointFile::open(path)?.head)
}

/// A file being read, batch by batch.
pub(super) struct CheckpointFile<'a, R = Source> {
    path: &'a Path,
    pub(super) head: Head,
    reader: FileReader<R>,
}

/// Rows of one table, or a piece of one tensor.
pub(super) struct Batch {
    /// Which table, or (counted on from there) which tensor of the shape.
    pub(super) name: usize,
    batch: RecordBatch,
}

impl<'a> CheckpointFile<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self> {
        let file = elasticdl_storage::open(path)
            .map_err(|e| Error::io(format!("opening checkpoint file {}", path.display()), e))?;
        CheckpointFile::over(path, file)
    }
}

impl<'a, R: Read + Seek> CheckpointFile<'a, R> {
    /// A file whose bytes come from `source`; the path is for messages.
    fn over(path: &'a Path, source: R) -> Result<Self> {
        let reader = FileReader::try_new(source, None).map_err(|e| arrow_error(path, e))?;
        let schema = reader.schema();
        if schema.fields().iter().map(|f| f.name().as_str()).ne(COLUMNS) {
            return Err(Error::foreign(path, "format", format!("it has other columns than {COLUMNS:?}")));
        }
        let Some(head) = schema.metadata().get(HEAD_KEY) else {
            return Err(Error::foreign(path, "format", format!("its schema has no metadata {HEAD_KEY:?}")));
        };
        let head = parse_head(path, head)?;
        Ok(CheckpointFile { path, head, reader })
    }

    pub(super) fn next_batch(&mut self) -> Result<Option<Batch>> {
        loop {
            let Some(batch) = self.reader.next() else { return Ok(None) };
            let batch = batch.map_err(|e| arrow_error(self.path, e))?;
            if batch.num_rows() == 0 {
                continue;
            }
            let names = batch.column(0).as_dictionary::<Int32Type>().keys();
            let name = usize::try_from(names.value(0)).unwrap_or(usize::MAX);
            let known = self.head.shape.tables.len() + self.head.shape.tensors.len();
            if name >= known || names.values().iter().any(|n| *n != names.value(0)) {
                return Err(Error::damaged(self.path, "a record batch mixes tables or has none"));
            }
            return Ok(Some(Batch { name, batch }));
        }
    }
}

impl Batch {
    pub(super) fn ids(&self) -> &[u64] {
        self.batch.column(1).as_primitive::<UInt64Type>().values()
    }

    /// The weights of all rows, one after the other.
    pub(super) fn weights(&self) -> &[f32] {
        floats(self.batch.column(2).as_list())
    }

    /// The slots of all rows, one after the other.
    pub(super) fn slots(&self) -> &[f32] {
        floats(self.batch.column(3).as_list())
    }
}

fn floats(lists: &ListArray) -> &[f32] {
    let offsets = lists.value_offsets();
    let values = lists.values().as_primitive::<Float32Type>().values();
    &values[offsets[0] as usize..offsets[lists.len()] as usize]
}

fn fill_table(partition: &mut Partition, batch: &Batch, path: &Path) -> Result<()> {
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
    for (i, row) in ids.iter().enumerate() {
        let placed = partition_of_row(*row, partitions) == id;
        if !placed || !table.restore(*row, &weights[i * width..][..width], &slots[i * per_row..][..per_row]) {
            return Err(Error::damaged(path, format!("row {row} is there twice or lives elsewhere")));
        }
    }
    Ok(())
}

fn parse_head(path: &Path, text: &str) -> Result<Head> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    let broken = |e| Error::damaged(path, format!("its metadata cannot be read: {e}"));
    let Format { format } = serde_json::from_str(text).map_err(broken)?;
    if format != FORMAT {
        return Err(Error::foreign(path, "format", format!("version {format}, and {FORMAT} is known here")));
    }
    serde_json::from_str(text).map_err(broken)
}

fn arrow_error(path: &Path, error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, e) if e.kind() != std::io::ErrorKind::UnexpectedEof => {
            Error::io(format!("reading checkpoint file {}", path.display()), e)
        }
        other => Error::damaged(path, other.to_string()),
    }
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
