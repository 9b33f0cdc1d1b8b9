//! Drawn records become files: the same ones in both formats.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, Int32Builder, Int64Builder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;

use super::SynthFormat;
use super::world::{COUNTS, Drawn, FIELDS};
use crate::error::{Error, Result};

/// A file that is being made.
pub(crate) enum Writer {
    Tsv { file: File, lines: Vec<u8> },
    Parquet(Box<ParquetWriter>),
}

/// What is gathered before it is written.
const BUFFER_BYTES: usize = 1 << 20;

/// Rows turned into columns at once.
const BATCH_ROWS: usize = 8192;

/// A few shards: readers need not pass over much to get to theirs.
const GROUP_ROWS: usize = 262_144;

impl Writer {
    /// Starts the file at `path`.
    pub fn create(path: &Path, format: SynthFormat) -> Result<Writer> {
        let file = File::create(path).map_err(Error::io("make", path))?;
        Ok(match format {
            SynthFormat::Tsv => Writer::Tsv { file, lines: Vec::with_capacity(BUFFER_BYTES + 4096) },
            SynthFormat::Parquet => Writer::Parquet(Box::new(ParquetWriter::new(file, path)?)),
        })
    }

    /// Adds a record.
    pub fn add(&mut self, drawn: &Drawn, path: &Path) -> Result<()> {
        match self {
            Writer::Tsv { file, lines } => {
                push_line(lines, drawn);
                if lines.len() >= BUFFER_BYTES {
                    file.write_all(lines).map_err(Error::io("write", path))?;
                    lines.clear();
                }
                Ok(())
            }
            Writer::Parquet(writer) => writer.add(drawn, path),
        }
    }

    /// Ends the file; it is on disk, not merely on its way there.
    pub fn finish(self, path: &Path) -> Result<()> {
        let file = match self {
            Writer::Tsv { mut file, lines } => {
                file.write_all(&lines).map_err(Error::io("write", path))?;
                file
            }
            Writer::Parquet(writer) => writer.finish(path)?,
        };
        file.sync_all().map_err(Error::io("write", path))
    }
}

/// A record as Criteo writes it: the label, counts, ids as 8 hexadecimal digits, a tab between them.
fn push_line(lines: &mut Vec<u8>, drawn: &Drawn) {
    lines.push(b'0' + u8::from(drawn.label));
    for count in drawn.counts {
        lines.push(b'\t');
        if let Some(count) = count {
            push_decimal(lines, count);
        }
    }
    for id in drawn.ids {
        lines.push(b'\t');
        if let Some(id) = id {
            let digit = |nibble: u32| b"0123456789abcdef"[(id >> (nibble * 4)) as usize & 15];
            lines.extend_from_slice(&[7, 6, 5, 4, 3, 2, 1, 0].map(digit));
        }
    }
    lines.push(b'\n');
}

fn push_decimal(lines: &mut Vec<u8>, number: i32) {
    let mut digits = [0; 11];
    let mut at = digits.len();
    let mut rest = number.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if number < 0 {
        at -= 1;
        digits[at] = b'-';
    }
    lines.extend_from_slice(&digits[at..]);
}

/// A Parquet file with an integer label, float counts and integer ids.
pub(crate) struct ParquetWriter {
    writer: ArrowWriter<File>,
    schema: SchemaRef,
    rows: usize,
    labels: Int32Builder,
    counts: [Float32Builder; COUNTS],
    ids: [Int64Builder; FIELDS],
}

impl ParquetWriter {
    fn new(file: File, path: &Path) -> Result<Self> {
        let counts = (1..=COUNTS).map(|n| Field::new(format!("I{n}"), DataType::Float32, true));
        let ids = (1..=FIELDS).map(|n| Field::new(format!("C{n}"), DataType::Int64, true));
        let fields: Vec<Field> =
            [Field::new("label", DataType::Int32, false)].into_iter().chain(counts).chain(ids).collect();
        let schema = Arc::new(Schema::new(fields));
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_row_count(Some(GROUP_ROWS))
            .build();
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties)).map_err(failed(path))?;
        Ok(ParquetWriter {
            writer,
            schema,
            rows: 0,
            labels: Int32Builder::new(),
            counts: std::array::from_fn(|_| Float32Builder::new()),
            ids: std::array::from_fn(|_| Int64Builder::new()),
        })
    }

    fn add(&mut self, drawn: &Drawn, path: &Path) -> Result<()> {
        self.labels.append_value(i32::from(drawn.label));
        for (column, count) in self.counts.iter_mut().zip(drawn.counts) {
            column.append_option(count.map(|count| count as f32));
        }
        for (column, id) in self.ids.iter_mut().zip(drawn.ids) {
            column.append_option(id.map(i64::from));
        }
        self.rows += 1;
        if self.rows == BATCH_ROWS { self.flush(path) } else { Ok(()) }
    }

    fn flush(&mut self, path: &Path) -> Result<()> {
        self.rows = 0;
        let mut columns: Vec<ArrayRef> = vec![Arc::new(self.labels.finish())];
        columns.extend(self.counts.iter_mut().map(|column| Arc::new(column.finish()) as ArrayRef));
        columns.extend(self.ids.iter_mut().map(|column| Arc::new(column.finish()) as ArrayRef));
        let batch =
            RecordBatch::try_new(self.schema.clone(), columns).expect("the columns are those of the schema");
        self.writer.write(&batch).map_err(failed(path))
    }

    fn finish(mut self, path: &Path) -> Result<File> {
        self.flush(path)?;
        self.writer.into_inner().map_err(failed(path))
    }
}

fn failed(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Error {
    move |source| Error::Io {
        attempt: "write",
        path: path.to_path_buf(),
        source: std::io::Error::other(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_look_like_criteos() {
        let mut drawn = Drawn {
            label: true,
            logit: 0.0,
            counts: [None; COUNTS],
            ranks: [None; FIELDS],
            ids: [None; FIELDS],
        };
        drawn.counts[0] = Some(0);
        drawn.counts[1] = Some(-2);
        drawn.counts[12] = Some(i32::MIN);
        drawn.ids[0] = Some(0x05db_9164);
        drawn.ids[25] = Some(u32::MAX);
        let mut lines = Vec::new();
        push_line(&mut lines, &drawn);
        let expected =
            format!("1\t0\t-2{}-2147483648\t05db9164{}ffffffff\n", "\t".repeat(11), "\t".repeat(25));
        assert_eq!(String::from_utf8(lines).expect("ASCII"), expected);
    }
}
