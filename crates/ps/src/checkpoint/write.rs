//! Writing a cut so that a half-written one is never mistaken for a checkpoint.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, DictionaryArray, FixedSizeListArray, Float32Array, Int32Array, ListArray, RecordBatch,
    StringArray, UInt32Array, UInt64Array,
};
use arrow_buffer::{ArrowNativeType, ScalarBuffer};
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use crate::checkpoint::{Cut, HEAD_KEY, Head, Sum, path_of};
use crate::error::{Error, Result};
use crate::partition::Partition;
use crate::table::{Order, Rows};

/// About so many floats, or rows, go into one record batch: what is encoded is still in the processor's cache when it
/// is summed and written.
const BATCH_FLOATS: usize = 1 << 18;
const BATCH_ROWS: usize = 1 << 14;
/// Small writes are put together up to so many bytes.
const BUFFER: usize = 1 << 16;

/// A file that is being written, piece by piece.
pub struct Encoder<W: Write> {
    writer: FileWriter<BufWriter<Summing<W>>>,
    schema: SchemaRef,
    names: ArrayRef,
    /// Rows by table that are still to come.
    left: Vec<u64>,
}

impl<W: Write> Encoder<W> {
    /// Begins the file of `cut` with its tensors; they are not needed there any more.
    pub fn new(cut: &mut Cut, inner: W) -> io::Result<Self> {
        let schema = schema(&cut.head)?;
        let shape = &cut.head.shape;
        let tables = shape.tables.iter().map(|t| t.name.as_str());
        let mut names: Vec<String> =
            tables.chain(shape.tensors.iter().map(|t| t.name.as_str())).map(String::from).collect();
        names.extend(cut.head.names_beside());
        let names: ArrayRef = Arc::new(StringArray::from(names));
        let file = Summing { inner, bytes: 0, crc: crc32fast::Hasher::new() };
        let buffered = BufWriter::with_capacity(BUFFER, file);
        let writer = FileWriter::try_new(buffered, &schema).map_err(to_io)?;
        let mut encoder = Encoder { writer, schema, names, left: cut.head.rows.clone() };
        for (name, mut piece) in std::mem::take(&mut cut.tensors) {
            encoder.put_batch(name, &mut piece)?;
        }
        Ok(encoder)
    }

    /// Writes rows of a table. They are gone then; the memory that they were in is used again for the next ones.
    pub fn put(&mut self, table: usize, rows: &mut Rows) -> io::Result<()> {
        let left = &mut self.left[table];
        *left = left.checked_sub(rows.len() as u64).expect("a cut has as many rows as it says");
        if rows.is_empty() { Ok(()) } else { self.put_batch(table, rows) }
    }

    /// Ends the file.
    pub fn finish(self) -> io::Result<(W, Sum)> {
        assert!(self.left.iter().all(|left| *left == 0), "a cut has as many rows as it says");
        let mut buffered = self.writer.into_inner().map_err(to_io)?;
        buffered.flush()?;
        let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
        let sum = Sum { bytes: file.bytes, crc32: file.crc.finalize() };
        Ok((file.inner, sum))
    }

    fn put_batch(&mut self, name: usize, rows: &mut Rows) -> io::Result<()> {
        let Rows { ids, numbers, weights, slots } = std::mem::take(rows);
        let (ids, numbers) = (ids.into(), numbers.into());
        let buffers = Buffers { ids, numbers, weights: weights.into(), slots: slots.into() };
        let batch = buffers.to_batch(name, &self.schema, &self.names).map_err(to_io)?;
        for first in (0..batch.num_rows()).step_by(BATCH_ROWS) {
            let part = batch.slice(first, BATCH_ROWS.min(batch.num_rows() - first));
            self.writer.write(&part).map_err(to_io)?;
        }
        drop(batch);
        *rows = buffers.emptied();
        Ok(())
    }
}

/// Rows in the form that Arrow shares.
struct Buffers {
    ids: ScalarBuffer<u64>,
    numbers: ScalarBuffer<u32>,
    weights: ScalarBuffer<f32>,
    slots: ScalarBuffer<f32>,
}

impl Buffers {
    /// The same as a record batch, without a copy.
    fn to_batch(
        &self,
        name: usize,
        schema: &SchemaRef,
        names: &ArrayRef,
    ) -> std::result::Result<RecordBatch, ArrowError> {
        let rows = self.ids.len();
        let keys = Int32Array::from_value(name as i32, rows);
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(DictionaryArray::try_new(keys, Arc::clone(names))?),
            Arc::new(UInt64Array::new(self.ids.clone(), None)),
            lists(&self.weights, rows)?,
            lists(&self.slots, rows)?,
        ];
        if schema.fields().len() > columns.len() {
            columns.push(match self.numbers.is_empty() {
                true => Arc::new(UInt32Array::new_null(rows)),
                false => Arc::new(UInt32Array::new(self.numbers.clone(), None)),
            });
        }
        RecordBatch::try_new(Arc::clone(schema), columns)
    }

    /// No rows, in the same memory, where nobody else has it any more.
    fn emptied(self) -> Rows {
        fn emptied<T: ArrowNativeType>(buffer: ScalarBuffer<T>) -> Vec<T> {
            let mut items = buffer.into_inner().into_vec().unwrap_or_default();
            items.clear();
            items
        }
        let (weights, slots) = (emptied(self.weights), emptied(self.slots));
        Rows { ids: emptied(self.ids), numbers: emptied(self.numbers), weights, slots }
    }
}

impl<W: Write> std::fmt::Debug for Encoder<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").field("left", &self.left).finish_non_exhaustive()
    }
}

/// Writes the file of `cut` into `dir`, which exists, and tells what the file holds then. The partition is asked for
/// its rows through `with`, a short while at a time; it goes on in between.
///
/// On disk the file is written under a temporary name, synced and renamed; an object is whole or not there. Where
/// that fails nothing is left behind, and a file of that name from before stays as it was. Once all files of a
/// checkpoint are written, [`sync`] makes their names durable.
pub fn write(
    mut cut: Cut,
    dir: &Path,
    with: impl FnMut(&mut dyn FnMut(&mut Partition)) -> Result<()>,
) -> Result<Sum> {
    let path = path_of(dir, cut.head.partition);
    let failed = |e| Error::io(format!("writing checkpoint file {}", path.display()), e);
    let file = elasticdl_storage::create(&path).map_err(failed)?;
    let (file, sum) = write_to(&mut cut, file, with, failed)?;
    file.finish().map_err(failed)?;
    Ok(sum)
}

/// Makes the names of the files in `dir` durable.
pub fn sync(dir: &Path) -> Result<()> {
    let synced = elasticdl_storage::sync_dir(dir);
    synced.map_err(|e| Error::io(format!("syncing checkpoint directory {}", dir.display()), e))
}

/// The file of `partition` in memory, with its sum, cut and written at once: for tests and simulations of disks.
pub fn encode(partition: &mut Partition, order: Order) -> Result<(Vec<u8>, Sum)> {
    let mut cut = Cut::begin(partition, order);
    let failed = |e| Error::io("encoding a partition", e);
    let encoded = write_to(&mut cut, Vec::new(), at_once(partition), failed);
    partition.end_cut(order.checkpoint);
    encoded
}

/// The file of `partition` in `dir`, cut and written at once: for tests.
pub fn write_now(partition: &mut Partition, order: Order, dir: &Path) -> Result<Sum> {
    let cut = Cut::begin(partition, order);
    let written = write(cut, dir, at_once(partition));
    match written.is_ok() {
        true => partition.end_cut(order.checkpoint),
        false => partition.abandon_cut(order.checkpoint),
    }
    written
}

fn at_once(partition: &mut Partition) -> impl FnMut(&mut dyn FnMut(&mut Partition)) -> Result<()> {
    |work| {
        work(partition);
        Ok(())
    }
}

/// Writes a cut to `inner`.
fn write_to<W: Write>(
    cut: &mut Cut,
    inner: W,
    mut with: impl FnMut(&mut dyn FnMut(&mut Partition)) -> Result<()>,
    failed: impl Fn(io::Error) -> Error,
) -> Result<(W, Sum)> {
    let mut encoder = Encoder::new(cut, inner).map_err(&failed)?;
    let mut rows = Rows::default();
    loop {
        let (mut taken, before) = (Ok(None), rows.len());
        with(&mut |partition| taken = cut.take_rows(partition, &mut rows))?;
        let Some((table, more)) = taken? else { break };
        let floats = rows.weights.len() + rows.slots.len();
        if !more || floats >= BATCH_FLOATS || rows.len() >= BATCH_ROWS || rows.len() == before {
            encoder.put(table, &mut rows).map_err(&failed)?;
        }
    }
    encoder.finish().map_err(&failed)
}

/// The file's schema; see the module [`crate::checkpoint`].
fn schema(head: &Head) -> io::Result<SchemaRef> {
    let names = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let types = [names, DataType::UInt64, floats(), floats(), DataType::UInt32];
    let field = |(name, of): (&&str, DataType)| {
        let nullable = of == DataType::UInt32;
        Field::new(*name, of, nullable)
    };
    let fields: Vec<Field> = head.columns().iter().zip(types).map(field).collect();
    let head = serde_json::to_string(head)?;
    Ok(Arc::new(Schema::new_with_metadata(fields, [(HEAD_KEY, head)])))
}

fn floats() -> DataType {
    DataType::List(item())
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

/// `rows` lists of one length, without a copy of the floats.
fn lists(floats: &ScalarBuffer<f32>, rows: usize) -> std::result::Result<ArrayRef, ArrowError> {
    assert_eq!(floats.len() % rows, 0, "the rows of a batch are of one length");
    let size = (floats.len() / rows) as i32;
    let values: ArrayRef = Arc::new(Float32Array::new(floats.clone(), None));
    let fixed = FixedSizeListArray::try_new_with_length(item(), size, values, None, rows)?;
    let lists = ListArray::from(fixed);
    assert_eq!(lists.len(), rows, "there is a list per row");
    Ok(Arc::new(lists))
}

fn to_io(error: ArrowError) -> io::Error {
    match error {
        ArrowError::IoError(_, e) => e,
        other => io::Error::other(other),
    }
}

/// Counts and sums what goes by.
struct Summing<W> {
    inner: W,
    bytes: u64,
    crc: crc32fast::Hasher,
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
