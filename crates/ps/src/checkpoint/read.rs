//! Reading files, batch by batch.

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Seek};
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ListArray, RecordBatch};
use arrow_ipc::reader::FileReader;
use arrow_schema::ArrowError;
use elasticdl_storage::Source;

use crate::checkpoint::{COLUMNS, FORMAT, FORMAT_UNBOUNDED, HEAD_KEY, Head, Sum};
use crate::error::{Error, Result};

/// What a chain of files in memory holds, without a partition to put it in.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    /// What the last file says about itself.
    pub head: Head,
    /// By table: ids and weights, one after the other.
    pub tables: Vec<(Vec<u64>, Vec<f32>)>,
    /// By tensor of the whole model: its values; empty where it lives in another partition.
    pub tensors: Vec<Vec<f32>>,
}

/// Reads files in memory whose sums are known to be right, the oldest first.
pub fn decode_contents(chain: &[&[u8]]) -> Result<Contents> {
    let path = Path::new("memory");
    let mut told: Option<(Head, Vec<Vec<f32>>)> = None;
    let mut tables: Vec<BTreeMap<u64, (u64, Vec<f32>)>> = Vec::new();
    for bytes in chain {
        let mut file = CheckpointFile::over(path, Cursor::new(bytes))?;
        let shape = &file.head.shape;
        tables.resize_with(shape.tables.len(), BTreeMap::new);
        let mut tensors = vec![Vec::new(); shape.tensors.len()];
        while let Some(batch) = file.next_batch()? {
            match tables.get_mut(batch.name) {
                None => {
                    // Counts and bits come after the last tensor.
                    let tensor = tensors.get_mut(batch.name - tables.len());
                    tensor.into_iter().for_each(|tensor| tensor.extend_from_slice(batch.weights()));
                }
                Some(rows) => {
                    let each = batch.weights().chunks_exact(batch.weights().len() / batch.ids().len());
                    let each = batch.ids().iter().copied().zip(each.map(<[f32]>::to_vec));
                    rows.extend(batch.keys().zip(each));
                }
            }
        }
        told = Some((file.head, tensors));
    }
    let (head, tensors) = told.ok_or_else(|| Error::damaged(path, "the chain has no file"))?;
    let rows = |rows: BTreeMap<u64, (u64, Vec<f32>)>| {
        let rows: BTreeMap<u64, Vec<f32>> = rows.into_values().collect();
        (rows.keys().copied().collect(), rows.into_values().flatten().collect())
    };
    Ok(Contents { head, tables: tables.into_iter().map(rows).collect(), tensors })
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
    pub(super) path: &'a Path,
    pub(super) head: Head,
    reader: FileReader<R>,
}

/// Rows of one table, a piece of one tensor, or counts or bits of one table.
pub(super) struct Batch {
    /// Which table, or (counted on from there) which tensor of the shape, or whose counts, or whose bits.
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
    pub(super) fn over(path: &'a Path, source: R) -> Result<Self> {
        let reader = FileReader::try_new(source, None).map_err(|e| arrow_error(path, e))?;
        let schema = reader.schema();
        let names = || schema.fields().iter().map(|f| f.name().as_str());
        let foreign =
            |columns| Error::foreign(path, "format", format!("it has other columns than {columns:?}"));
        if !COLUMNS.starts_with(&names().collect::<Vec<_>>()) {
            return Err(foreign(&COLUMNS[..4]));
        }
        let Some(head) = schema.metadata().get(HEAD_KEY) else {
            return Err(Error::foreign(path, "format", format!("its schema has no metadata {HEAD_KEY:?}")));
        };
        let head = parse_head(path, head)?;
        if names().ne(head.columns().iter().copied()) {
            return Err(foreign(head.columns()));
        }
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
            let (tables, tensors) = (self.head.shape.tables.len(), self.head.shape.tensors.len());
            let known = tables + tensors + self.head.names_beside().count();
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

    /// The numbers of the rows, if those count.
    pub(super) fn numbers(&self) -> Option<&[u32]> {
        let numbers = self.batch.columns().get(4)?.as_primitive::<UInt32Type>();
        (numbers.null_count() == 0).then(|| &numbers.values()[..])
    }

    /// What rows of one table are told apart by, in all files of a chain: their numbers or their ids.
    pub(super) fn keys(&self) -> impl Iterator<Item = u64> {
        let numbers = self.numbers();
        self.ids().iter().enumerate().map(move |(i, id)| numbers.map_or(*id, |numbers| numbers[i].into()))
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

fn parse_head(path: &Path, text: &str) -> Result<Head> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    let broken = |e| Error::damaged(path, format!("its metadata cannot be read: {e}"));
    let Format { format } = serde_json::from_str(text).map_err(broken)?;
    if !(1..=FORMAT).contains(&format) {
        let known = format!("version {format}, and 1 to {FORMAT} are known here");
        return Err(Error::foreign(path, "format", known));
    }
    let head: Head = serde_json::from_str(text).map_err(broken)?;
    let tables = head.shape.tables.len();
    let bounds = if format > FORMAT_UNBOUNDED { tables } else { 0 };
    if head.bounds.len() != bounds {
        return Err(Error::damaged(path, "it does not say what bounds its tables have"));
    }
    if head.rows.len() != tables || head.partition_rows().len() != tables {
        return Err(Error::damaged(path, "it does not say how many rows each table has"));
    }
    Ok(head)
}

fn arrow_error(path: &Path, error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, e) if e.kind() != std::io::ErrorKind::UnexpectedEof => {
            Error::io(format!("reading checkpoint file {}", path.display()), e)
        }
        other => Error::damaged(path, other.to_string()),
    }
}
