//! Writing a snapshot so that a half-written one is never mistaken for a checkpoint.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, DictionaryArray, FixedSizeListArray, Float32Array, Int32Array, ListArray, RecordBatch,
    StringArray, UInt64Array,
};
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use crate::checkpoint::snapshot::{Chunk, Snapshot};
use crate::checkpoint::{COLUMNS, HEAD_KEY, Head, Sum, path_of};
use crate::error::{Error, Result};

/// Writes `snapshot` into `dir`, which exists, and tells what the file holds then.
///
/// On disk the file is written under a temporary name, synced and renamed; an object is whole or not there. Where
/// that fails nothing is left behind, and a file of that name from before stays as it was. Once all files of a
/// checkpoint are written, [`sync`] makes their names durable.
pub fn write(snapshot: Snapshot, dir: &Path) -> Result<Sum> {
    let path = path_of(dir, snapshot.head.partition);
    write_file(snapshot, &path)
        .map_err(|e| Error::io(format!("writing checkpoint file {}", path.display()), e))
}

/// Makes the names of the files in `dir` durable.
pub fn sync(dir: &Path) -> Result<()> {
    let synced = elasticdl_storage::sync_dir(dir);
    synced.map_err(|e| Error::io(format!("syncing checkpoint directory {}", dir.display()), e))
}

/// The file of `snapshot` in memory, with its sum: for tests and simulations of disks.
pub fn encode(snapshot: Snapshot) -> Result<(Vec<u8>, Sum)> {
    write_to(snapshot, Vec::new(), 0).map_err(|e| Error::io("encoding a partition", e))
}

fn write_file(snapshot: Snapshot, path: &Path) -> io::Result<Sum> {
    let (file, sum) = write_to(snapshot, elasticdl_storage::create(path)?, 1 << 20)?;
    file.finish()?;
    Ok(sum)
}

/// Writes a snapshot to `inner`, `buffer` bytes at a time.
fn write_to<W: Write>(snapshot: Snapshot, inner: W, buffer: usize) -> io::Result<(W, Sum)> {
    let Snapshot { head, names, chunks } = snapshot;
    let schema = schema(&head)?;
    let names: ArrayRef = Arc::new(StringArray::from(names));
    let file = Summing { inner, bytes: 0, crc: crc32fast::Hasher::new() };
    let buffered = BufWriter::with_capacity(buffer, file);
    let mut writer = FileWriter::try_new(buffered, &schema).map_err(to_io)?;
    // Chunk by chunk, so that the copy shrinks while it is written.
    for chunk in chunks {
        let batch = to_batch(chunk, &schema, &names).map_err(to_io)?;
        writer.write(&batch).map_err(to_io)?;
    }
    let mut buffered = writer.into_inner().map_err(to_io)?;
    buffered.flush()?;
    let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
    let sum = Sum { bytes: file.bytes, crc32: file.crc.finalize() };
    Ok((file.inner, sum))
}

/// The file's schema; see the module [`crate::checkpoint`].
fn schema(head: &Head) -> io::Result<SchemaRef> {
    let names = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let types = [names, DataType::UInt64, floats(), floats()];
    let fields: Vec<Field> =
        COLUMNS.iter().zip(types).map(|(name, of)| Field::new(*name, of, false)).collect();
    let head = serde_json::to_string(head)?;
    Ok(Arc::new(Schema::new_with_metadata(fields, [(HEAD_KEY, head)])))
}

fn floats() -> DataType {
    DataType::List(item())
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

fn to_batch(
    chunk: Chunk,
    schema: &SchemaRef,
    names: &ArrayRef,
) -> std::result::Result<RecordBatch, ArrowError> {
    let rows = chunk.ids.len();
    let keys = Int32Array::from_value(chunk.name as i32, rows);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(DictionaryArray::try_new(keys, Arc::clone(names))?),
        Arc::new(UInt64Array::from(chunk.ids)),
        lists(chunk.weights, rows)?,
        lists(chunk.slots, rows)?,
    ];
    RecordBatch::try_new(Arc::clone(schema), columns)
}

/// `rows` lists of one length, without a copy of the floats.
fn lists(floats: Vec<f32>, rows: usize) -> std::result::Result<ArrayRef, ArrowError> {
    assert_eq!(floats.len() % rows, 0, "the rows of a chunk are of one length");
    let size = (floats.len() / rows) as i32;
    let values: ArrayRef = Arc::new(Float32Array::from(floats));
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
