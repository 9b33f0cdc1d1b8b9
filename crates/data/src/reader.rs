//! A shard becomes decoded records, in file order.
//!
//! Reading starts at the shard's first record and touches nothing before it (but for a text file's
//! header). A file that is not what it was when the shard was cut is an error.

mod parquet;
mod plan;
mod text;
mod value;

use std::path::Path;

use elasticdl_spec::job::Format;
use elasticdl_spec::{Layout, Shard};
use elasticdl_storage as storage;

use crate::batch::Batch;
use crate::error::{BadRecord, Error, Result};
use crate::files::{DataFile, format_of};
use crate::lines::{Lines, Style};

use self::parquet::ParquetReader;
pub(crate) use self::parquet::records_in_footer;
pub(crate) use self::plan::Plan;
use self::text::TextReader;
pub(crate) use self::text::header_plan;

/// Finds the layout's columns in a file without reading its records.
///
/// For a person who is about to start a job: a missing column is found here, not by a worker later.
/// Text without a header has only the layout's word for its columns, so nothing can be missing there.
pub fn check(file: &DataFile, layout: &Layout) -> Result<()> {
    let path = &file.path;
    if file.format == Format::Parquet {
        return records_in_footer(path, layout).map(drop);
    }
    let style = Style::of(layout)?;
    if !style.header {
        return Plan::without_header(path, layout).map(drop);
    }
    let input = storage::open(path).map_err(Error::io("open", path))?;
    let mut lines = Lines::open(input, path, file.compression, style, 0)?;
    header_plan(&mut lines, path, layout).map(drop)
}

/// Records that room is made for at once.
const PART_RECORDS: usize = 4096;

/// The records of one shard that were not read yet.
#[derive(Debug)]
pub(crate) struct ShardReader {
    source: Source,
    path: String,
    /// `None`: up to the end of the file.
    remaining: Option<u64>,
}

#[derive(Debug)]
enum Source {
    Text(Box<TextReader>),
    Parquet(Box<ParquetReader>),
}

impl ShardReader {
    /// Opens the shard behind its first `skip` records.
    pub fn open(shard: &Shard, layout: &Layout, format: Option<Format>, skip: u64) -> Result<Self> {
        let path = &shard.path;
        let (format, compression) = format_of(Path::new(path), format)?;
        let file = storage::open_again(path, shard.fingerprint).map_err(Error::io("open", path))?;
        let there = file.meta().map_err(Error::io("look at", path))?;
        if there.fingerprint != shard.fingerprint {
            return Err(Error::Changed { path: path.clone() });
        }
        let skip = shard.records.map_or(skip, |records| skip.min(records));
        let remaining = shard.records.map(|records| records - skip);
        let source = match format {
            Format::Text => {
                let mut reader = TextReader::open(file, shard, compression, layout)?;
                if reader.skip(skip)? < skip && remaining.is_some() {
                    return Err(Error::Changed { path: path.clone() });
                }
                Source::Text(Box::new(reader))
            }
            Format::Parquet => {
                let records = remaining.unwrap_or(u64::MAX);
                Source::Parquet(Box::new(ParquetReader::open(
                    file,
                    path,
                    layout,
                    shard.first + skip,
                    records,
                )?))
            }
        };
        Ok(ShardReader { source, path: path.clone(), remaining })
    }

    /// Appends up to `records` records to `batch`, and those that cannot be used to `bad`.
    ///
    /// Returns how many records were taken, good or bad: fewer than asked for only at the end.
    pub fn read(&mut self, records: usize, batch: &mut Batch, bad: &mut Vec<BadRecord>) -> Result<usize> {
        let wanted = self.remaining.map_or(records, |left| left.min(records as u64) as usize);
        let mut taken = 0;
        while taken < wanted {
            // Room is made as records come: a small file must not cost a large block's memory.
            let part = (wanted - taken).min(PART_RECORDS);
            let read = match &mut self.source {
                Source::Text(reader) => reader.read(part, batch, bad)?,
                Source::Parquet(reader) => reader.read(part, batch, bad)?,
            };
            taken += read;
            if read < part {
                break;
            }
        }
        if let Some(left) = &mut self.remaining {
            // The fingerprint was right when the file was opened, so it was cut short since.
            if taken < wanted {
                return Err(Error::Changed { path: self.path.clone() });
            }
            *left -= taken as u64;
        }
        Ok(taken)
    }

    /// The values of the next record as they stand in the file, by column; [`ShardReader::read`] decodes it.
    pub fn peek(&mut self) -> Result<Option<Vec<Vec<u8>>>> {
        match &mut self.source {
            Source::Text(reader) => reader.peek(),
            Source::Parquet(reader) => reader.peek(),
        }
    }

    /// Names of the file's columns, in file order.
    pub fn column_names(&self) -> &[String] {
        match &self.source {
            Source::Text(reader) => &reader.plan().names,
            Source::Parquet(reader) => &reader.plan().names,
        }
    }
}
