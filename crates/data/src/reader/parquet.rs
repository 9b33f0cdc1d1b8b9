//! Columns become records of a batch: the hot path of Parquet.
//!
//! Only the columns that are used are read, from the row group on that holds the first record; pages
//! before it are passed over without being unpacked.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, PrimitiveArray, RecordBatch};
use arrow_schema::{DataType, Schema};
use bytes::Bytes;
use elasticdl_spec::Layout;
use elasticdl_storage::{self as storage, Source};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};

use super::plan::{Plan, Use, Wrong};
use super::value::{self, Value};
use crate::batch::Batch;
use crate::error::{BadRecord, Error, Place, Result};
use crate::lines::Style;

/// Rows decoded at once: their columns together fit the second-level cache.
const DECODED_ROWS: usize = 2048;

/// Rows turned from columns to records at once: their records fit the first-level cache.
const TURNED_ROWS: usize = 128;

/// The records of one shard of a Parquet file.
pub(crate) struct ParquetReader {
    path: String,
    plan: Plan,
    style: Style,
    /// For each column that is read, its place in the file.
    columns: Vec<usize>,
    batches: ParquetRecordBatchReader,
    /// Decoded, and how many of its rows were handed out.
    decoded: Option<(RecordBatch, usize)>,
    /// The next row of the file, counted from 0.
    row: u64,
    row_group_ends: Vec<u64>,
    wrong: Vec<(usize, usize, Wrong)>,
}

impl ParquetReader {
    /// Opens `file` at row `first`, for `records` rows or up to its end.
    pub fn open(file: Source, path: &str, layout: &Layout, first: u64, records: u64) -> Result<Self> {
        let file = Chunks::new(file, path)?;
        let footer = Footer::read(&file, path, layout)?;
        let Footer { metadata, plan, columns } = footer;
        let mut row_group_ends = Vec::new();
        let mut end = 0;
        for group in metadata.metadata().row_groups() {
            end = group.num_rows().cast_unsigned().saturating_add(end);
            row_group_ends.push(end);
        }
        let last = first.saturating_add(records).min(end);
        let group = |row: u64| row_group_ends.partition_point(|end| *end <= row);
        let (first_group, last_group) = (group(first), group(last.saturating_sub(1)));
        let groups = if first < last { first_group..last_group + 1 } else { 0..0 };
        let group_start = first_group.checked_sub(1).map_or(0, |before| row_group_ends[before]);
        let mask = ProjectionMask::roots(metadata.parquet_schema(), columns.iter().copied());
        let batches = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
            .with_row_groups(groups.collect())
            .with_projection(mask)
            .with_batch_size(DECODED_ROWS)
            .with_offset(first.saturating_sub(group_start) as usize)
            .with_limit(last.saturating_sub(first) as usize);
        let batches = guarded(path, Some(first_group), || batches.build())?;
        Ok(ParquetReader {
            path: path.to_string(),
            plan,
            style: Style::of(layout)?,
            columns,
            batches,
            decoded: None,
            row: first,
            row_group_ends,
            wrong: Vec::new(),
        })
    }

    /// Appends up to `records` records to `batch`, and those that cannot be used to `bad`.
    ///
    /// Returns how many rows were taken from the file; fewer than asked for only at its end.
    pub fn read(&mut self, records: usize, batch: &mut Batch, bad: &mut Vec<BadRecord>) -> Result<usize> {
        let mut at = batch.records;
        self.plan.extend(batch, records);
        let mut taken = 0;
        while taken < records {
            let Some((decoded, from)) = self.decoded()? else { break };
            let most = (decoded.num_rows() - from).min(records - taken).min(TURNED_ROWS);
            at = self.turn(&decoded, from..from + most, batch, at, bad);
            self.row += most as u64;
            taken += most;
            self.decoded = Some((decoded, from + most));
        }
        self.plan.truncate(batch, at);
        Ok(taken)
    }

    /// The values of the next row as text, which [`ParquetReader::read`] then decodes; columns that are
    /// not used are left empty.
    pub fn peek(&mut self) -> Result<Option<Vec<Vec<u8>>>> {
        let Some((decoded, at)) = self.decoded()? else { return Ok(None) };
        let mut values = vec![Vec::new(); self.plan.names.len()];
        for (array, column) in decoded.columns().iter().zip(&self.columns) {
            values[*column] = value_text(array, at);
        }
        self.decoded = Some((decoded, at));
        Ok(Some(values))
    }

    /// How the columns are used.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Takes out the decoded rows and how many of them are used up; there is at least one more.
    fn decoded(&mut self) -> Result<Option<(RecordBatch, usize)>> {
        loop {
            match self.decoded.take() {
                Some((decoded, used)) if used < decoded.num_rows() => return Ok(Some((decoded, used))),
                _ => {}
            }
            let row_group = Some(self.row_group_ends.partition_point(|end| *end <= self.row));
            let next = || self.batches.next().transpose().map_err(ParquetError::from);
            match guarded(&self.path, row_group, next)? {
                Some(decoded) => self.decoded = Some((decoded, 0)),
                None => return Ok(None),
            }
        }
    }

    /// Turns some rows from columns into records at `at`. Returns where the next record goes.
    fn turn(
        &mut self,
        decoded: &RecordBatch,
        rows: Range<usize>,
        batch: &mut Batch,
        at: usize,
        bad: &mut Vec<BadRecord>,
    ) -> usize {
        self.wrong.clear();
        for (array, column) in decoded.columns().iter().zip(&self.columns) {
            for what in &self.plan.uses[*column] {
                let mut target = Target { plan: &self.plan, style: self.style, what, batch, at };
                target.put(array, rows.clone(), &mut |row, wrong| self.wrong.push((row, *column, wrong)));
            }
        }
        if self.wrong.is_empty() {
            return at + rows.len();
        }
        self.set_aside(decoded, rows, batch, at, bad)
    }

    /// Takes the rows out again that hold a wrong value.
    #[cold]
    fn set_aside(
        &mut self,
        decoded: &RecordBatch,
        rows: Range<usize>,
        batch: &mut Batch,
        at: usize,
        bad: &mut Vec<BadRecord>,
    ) -> usize {
        // One message per record: its first wrong column.
        self.wrong.sort_by_key(|(row, column, _)| (*row, *column));
        self.wrong.dedup_by_key(|(row, ..)| *row);
        let mut wrong = self.wrong.iter().peekable();
        let mut kept = at;
        for row in 0..rows.len() {
            if let Some((_, column, why)) = wrong.next_if(|(bad, ..)| *bad == row) {
                let read = self.columns.iter().position(|c| c == column).expect("a wrong value was read");
                let text = value_text(decoded.column(read), rows.start + row);
                let place = Place::Row(self.row + row as u64 + 1);
                bad.push(self.plan.bad_value(place, *column, &text, *why));
            } else {
                batch.copy_record(at + row, kept, self.plan.numeric, self.plan.categorical);
                kept += 1;
            }
        }
        kept
    }
}

impl std::fmt::Debug for ParquetReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetReader")
            .field("path", &self.path)
            .field("row", &self.row)
            .finish_non_exhaustive()
    }
}

/// How many records a Parquet file holds, once the layout's columns were found in it.
pub(crate) fn records_in_footer(path: &str, layout: &Layout) -> Result<u64> {
    let file = storage::open(path).map_err(Error::io("open", path))?;
    let footer = Footer::read(&Chunks::new(file, path)?, path, layout)?;
    let groups = footer.metadata.metadata().row_groups().iter();
    Ok(groups.fold(0u64, |rows, group| rows.saturating_add(group.num_rows().cast_unsigned())))
}

/// A file as the Parquet library reads it: from many places, each with a view of its own.
struct Chunks {
    source: Source,
    bytes: u64,
}

impl Chunks {
    fn new(source: Source, path: &str) -> Result<Self> {
        let bytes = source.meta().map_err(Error::io("look at", path))?.bytes;
        Ok(Chunks { source, bytes })
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Source>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let mut source = self.source.try_clone()?;
        source.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(source))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let mut source = self.source.try_clone()?;
        source.seek(SeekFrom::Start(start))?;
        // A damaged footer may speak of any length: room is made for what is there.
        let mut bytes = Vec::with_capacity((length as u64).min(self.bytes) as usize);
        let read = source.take(length as u64).read_to_end(&mut bytes)?;
        if read < length {
            return Err(ParquetError::EOF(format!("{length} bytes expected at {start}, {read} found")));
        }
        Ok(bytes.into())
    }
}

/// What the end of a Parquet file says.
struct Footer {
    metadata: ArrowReaderMetadata,
    plan: Plan,
    columns: Vec<usize>,
}

impl Footer {
    fn read(file: &Chunks, path: &str, layout: &Layout) -> Result<Self> {
        // Without the Arrow schema some writers leave behind, a column has its plain type:
        // dictionaries and views are then a matter of encoding, and one kind of text remains.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = ArrowReaderMetadata::load(file, options).map_err(|source| Error::Parquet {
            path: path.into(),
            row_group: None,
            source,
        })?;
        let schema: &Schema = metadata.schema();
        let names = schema.fields().iter().map(|field| field.name().clone()).collect();
        let plan = Plan::new(path, names, layout)?;
        let mut columns = Vec::new();
        for (column, uses) in plan.uses.iter().enumerate() {
            if uses.is_empty() {
                continue;
            }
            let found = schema.field(column).data_type();
            if !is_readable(found) {
                let column = plan.names[column].clone();
                return Err(Error::ColumnType { path: path.into(), column, found: found.to_string() });
            }
            columns.push(column);
        }
        check_rows(&metadata, &columns, path)?;
        Ok(Footer { metadata, plan, columns })
    }
}

/// Makes sure that the columns which are read have as many values as the footer says there are rows.
///
/// A damaged footer may speak of any number of rows, and shards would be cut for all of them.
fn check_rows(metadata: &ArrowReaderMetadata, columns: &[usize], path: &str) -> Result<()> {
    let schema = metadata.parquet_schema();
    for (n, group) in metadata.metadata().row_groups().iter().enumerate() {
        let of_column = |column: &usize| {
            let leaf = (0..schema.num_columns()).find(|leaf| schema.get_column_root_idx(*leaf) == *column)?;
            group.columns().get(leaf).map(|chunk| chunk.num_values())
        };
        if group.num_rows() < 0 || columns.iter().any(|column| of_column(column) != Some(group.num_rows())) {
            let source =
                ParquetError::General("the footer contradicts itself about the number of rows".into());
            return Err(Error::Parquet { path: path.into(), row_group: Some(n), source });
        }
    }
    Ok(())
}

/// Calls the Parquet library, which panics at some kinds of damage: to us that is a damaged file as any other.
fn guarded<T>(
    path: &str,
    row_group: Option<usize>,
    call: impl FnOnce() -> std::result::Result<T, ParquetError>,
) -> Result<T> {
    // What a panic leaves behind is not used again: the error ends the reading of the shard.
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Err(ParquetError::General(format!("it is damaged ({text})")))
    });
    result.map_err(|source| Error::Parquet { path: path.to_string(), row_group, source })
}

fn is_readable(kind: &DataType) -> bool {
    kind.is_integer()
        || matches!(kind, DataType::Float32 | DataType::Float64 | DataType::Boolean)
        || matches!(kind, DataType::Utf8 | DataType::Binary | DataType::Null)
}

/// Where one column's values go.
struct Target<'a> {
    plan: &'a Plan,
    style: Style,
    what: &'a Use,
    batch: &'a mut Batch,
    at: usize,
}

impl Target<'_> {
    /// Puts the values of some rows in their place, and names those that are wrong.
    fn put(&mut self, array: &ArrayRef, rows: Range<usize>, wrong: &mut impl FnMut(usize, Wrong)) {
        match array.data_type() {
            DataType::Int8 => self.put_integers::<Int8Type>(array, rows, wrong),
            DataType::Int16 => self.put_integers::<Int16Type>(array, rows, wrong),
            DataType::Int32 => self.put_integers::<Int32Type>(array, rows, wrong),
            DataType::Int64 => self.put_integers::<Int64Type>(array, rows, wrong),
            DataType::UInt8 => self.put_integers::<UInt8Type>(array, rows, wrong),
            DataType::UInt16 => self.put_integers::<UInt16Type>(array, rows, wrong),
            DataType::UInt32 => self.put_integers::<UInt32Type>(array, rows, wrong),
            DataType::UInt64 => self.put_primitive::<UInt64Type, u64>(array, rows, wrong),
            DataType::Float32 => self.put_primitive::<Float32Type, f32>(array, rows, wrong),
            DataType::Float64 => self.put_primitive::<Float64Type, f64>(array, rows, wrong),
            DataType::Boolean => {
                let array = array.as_boolean();
                let value = |row| array.is_valid(rows.start + row).then(|| array.value(rows.start + row));
                value::put(self.plan, self.what, rows.len(), value, self.batch, self.at, wrong);
            }
            DataType::Utf8 => {
                let array = array.as_string::<i32>();
                self.put_texts(rows.map(|row| (array.is_valid(row), array.value(row).as_bytes())), wrong);
            }
            DataType::Binary => {
                let array = array.as_binary::<i32>();
                self.put_texts(rows.map(|row| (array.is_valid(row), array.value(row))), wrong);
            }
            // What is left is a column that holds nothing but nulls: the footer was checked.
            _ => value::put(self.plan, self.what, rows.len(), |_| None::<i64>, self.batch, self.at, wrong),
        }
    }

    fn put_integers<T>(&mut self, array: &ArrayRef, rows: Range<usize>, wrong: &mut impl FnMut(usize, Wrong))
    where
        T: ArrowPrimitiveType,
        i64: From<T::Native>,
    {
        self.put_primitive::<T, i64>(array, rows, wrong);
    }

    fn put_primitive<T, V>(
        &mut self,
        array: &ArrayRef,
        rows: Range<usize>,
        wrong: &mut impl FnMut(usize, Wrong),
    ) where
        T: ArrowPrimitiveType,
        V: Value + From<T::Native>,
    {
        let array: &PrimitiveArray<T> = array.as_primitive();
        let values = &array.values()[rows.clone()];
        match array.nulls().filter(|nulls| nulls.null_count() > 0) {
            None => {
                let value = |row| Some(V::from(values[row]));
                value::put(self.plan, self.what, values.len(), value, self.batch, self.at, wrong);
            }
            Some(nulls) => {
                let value = |row| nulls.is_valid(rows.start + row).then(|| V::from(values[row]));
                value::put(self.plan, self.what, values.len(), value, self.batch, self.at, wrong);
            }
        }
    }

    /// Text is used as it would be in a text file: trimmed, and missing where the layout says so.
    fn put_texts<'v>(
        &mut self,
        values: impl Iterator<Item = (bool, &'v [u8])>,
        wrong: &mut impl FnMut(usize, Wrong),
    ) {
        for (row, (valid, text)) in values.enumerate() {
            let text = if valid { self.style.trimmed(text) } else { b"" };
            let mut record = self.plan.row(self.batch, self.at + row);
            if let Err(why) = self.plan.put_text(self.what, text, &mut record) {
                wrong(row, why);
            }
        }
    }
}

/// A value as a text file would hold it.
fn value_text(array: &ArrayRef, at: usize) -> Vec<u8> {
    if array.is_null(at) {
        return Vec::new();
    }
    macro_rules! text {
        ($($kind:ident => $type:ty),*) => {
            match array.data_type() {
                $(DataType::$kind => array.as_primitive::<$type>().value(at).to_string().into_bytes(),)*
                DataType::Boolean => array.as_boolean().value(at).to_string().into_bytes(),
                DataType::Utf8 => array.as_string::<i32>().value(at).as_bytes().to_vec(),
                DataType::Binary => array.as_binary::<i32>().value(at).to_vec(),
                _ => Vec::new(),
            }
        };
    }
    text!(
        Int8 => Int8Type, Int16 => Int16Type, Int32 => Int32Type, Int64 => Int64Type, UInt8 => UInt8Type,
        UInt16 => UInt16Type, UInt32 => UInt32Type, UInt64 => UInt64Type, Float32 => Float32Type,
        Float64 => Float64Type
    )
}
