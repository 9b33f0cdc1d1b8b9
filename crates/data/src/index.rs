//! A file becomes shards.
//!
//! Parquet says in its footer how many records there are. A text file is scanned once for where its
//! shards start; the result is kept, so that the next start of the job doesn't wait for it. It holds
//! nothing that could not be found again: a damaged or outdated index is made anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use elasticdl_spec::job::Format;
use elasticdl_spec::mix::mix2;
use elasticdl_spec::{Layout, Shard};
use tracing::{debug, warn};

use crate::error::{Error, Result};
use crate::field::hash_bytes;
use crate::files::{Compression, DataFile};
use crate::lines::{Lines, Style};
use crate::reader::{Plan, header_plan, records_in_footer};

/// Cuts a file into shards of `records_per_shard` records and hands each to `found` as soon as it is known.
///
/// Returns how many records the file has, 0 where only reading to the end can tell (compressed
/// text, which is one shard). A plain text file is scanned once; where its shards start is kept in
/// `index_dir`, and the next call for the unchanged file doesn't touch the file at all.
pub fn cut(
    file: &DataFile,
    layout: &Layout,
    records_per_shard: u64,
    index_dir: &Path,
    found: &mut dyn FnMut(Shard),
) -> Result<u64> {
    if records_per_shard == 0 {
        return Err(Error::Options("a shard needs at least one record".into()));
    }
    let shard = |first, records, offset| Shard {
        path: file.path.clone(),
        first,
        records,
        offset,
        fingerprint: file.fingerprint,
    };
    if file.format == Format::Parquet {
        let records = records_in_footer(&file.path, layout)?;
        for first in (0..records).step_by(records_per_shard.try_into().unwrap_or(usize::MAX)) {
            found(shard(first, Some(records_per_shard.min(records - first)), 0));
        }
        return some_records(file, records);
    }
    let style = Style::of(layout)?;
    if file.compression != Compression::Plain {
        found(shard(0, None, 0));
        return Ok(0);
    }
    let kept = Kept::new(file, style, records_per_shard, index_dir);
    if let Some(index) = kept.read(records_per_shard) {
        for (n, offset) in index.offsets.iter().enumerate() {
            let first = n as u64 * records_per_shard;
            found(shard(first, Some(records_per_shard.min(index.records - first)), *offset));
        }
        return Ok(index.records);
    }
    let index = scan(file, layout, style, records_per_shard, &mut |first, records, offset| {
        found(shard(first, Some(records), offset))
    })?;
    // An index that cannot be kept costs the next start some time, and nothing else.
    if let Err(error) = kept.write(&index) {
        warn!(file = %file.path, index = %kept.path.display(), %error, "index of data file not kept");
    }
    some_records(file, index.records)
}

/// Where the shards of a text file start.
#[derive(Debug, PartialEq, Eq)]
struct Index {
    records: u64,
    offsets: Vec<u64>,
}

/// Looks at every record of a file, and tells each shard (first record, records, offset) when it is complete.
fn scan(
    file: &DataFile,
    layout: &Layout,
    style: Style,
    records_per_shard: u64,
    found: &mut dyn FnMut(u64, u64, u64),
) -> Result<Index> {
    let path = &file.path;
    let input = elasticdl_storage::open(path).map_err(Error::io("open", path))?;
    let there = input.meta().map_err(Error::io("look at", path))?;
    if there.fingerprint != file.fingerprint {
        return Err(Error::Changed { path: path.clone() });
    }
    let mut lines = Lines::open(input, path, Compression::Plain, style, 0)?;
    if style.header {
        header_plan(&mut lines, path, layout)?;
    } else {
        Plan::without_header(path, layout)?;
    }
    let mut index = Index { records: 0, offsets: Vec::new() };
    while let Some(line) = lines.next()? {
        if index.records.is_multiple_of(records_per_shard) {
            if let Some(offset) = index.offsets.last() {
                found(index.records - records_per_shard, records_per_shard, *offset);
            }
            index.offsets.push(line.offset);
        }
        index.records += 1;
    }
    if let Some(offset) = index.offsets.last() {
        let first = (index.offsets.len() as u64 - 1) * records_per_shard;
        found(first, index.records - first, *offset);
    }
    debug!(file = %path, records = index.records, shards = index.offsets.len(), "indexed data file");
    Ok(index)
}

fn some_records(file: &DataFile, records: u64) -> Result<u64> {
    if records == 0 {
        return Err(Error::File { path: (&file.path).into(), reason: "it holds no records" });
    }
    Ok(records)
}

/// An index on disk: words of 8 bytes, little-endian.
///
/// Magic, fingerprint of the data file, records, the shards' offsets, and a checksum of all that.
struct Kept {
    path: PathBuf,
    fingerprint: u64,
}

/// The last byte is the version of the format.
const MAGIC: u64 = u64::from_be_bytes(*b"edl-idx\x01");

impl Kept {
    /// The index of this file for this way of cutting it. One name for all versions of the file: an
    /// outdated index is overwritten, not left behind.
    fn new(file: &DataFile, style: Style, records_per_shard: u64, index_dir: &Path) -> Self {
        let Style { delimiter, header, quotes, trim } = style;
        let style = u32::from_le_bytes([delimiter, u8::from(header), u8::from(quotes), u8::from(trim)]);
        let way = mix2(u64::from(style), records_per_shard);
        let name = format!("{:016x}.index", mix2(hash_bytes(0, file.path.as_bytes()), way));
        Kept { path: index_dir.join(name), fingerprint: file.fingerprint }
    }

    /// The index, unless it is not there, outdated, or damaged.
    fn read(&self, records_per_shard: u64) -> Option<Index> {
        let bytes = fs::read(&self.path).ok()?;
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let [MAGIC, fingerprint, records, offsets @ .., checksum] = &words[..] else { return None };
        let whole = rest.is_empty()
            && *checksum == hash_bytes(MAGIC, &bytes[..bytes.len() - 8])
            && offsets.len() as u64 == records.div_ceil(records_per_shard)
            && *records > 0;
        (whole && *fingerprint == self.fingerprint)
            .then(|| Index { records: *records, offsets: offsets.to_vec() })
    }

    /// Replaces the index as a whole: a reader sees the old one or the new one.
    fn write(&self, index: &Index) -> Result<()> {
        let mut bytes = Vec::with_capacity((index.offsets.len() + 4) * 8);
        for word in [MAGIC, self.fingerprint, index.records].iter().chain(&index.offsets) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let checksum = hash_bytes(MAGIC, &bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        let directory = self.path.parent().expect("an index has a name in a directory");
        fs::create_dir_all(directory).map_err(Error::io("make directory", directory))?;
        let mut file =
            tempfile::NamedTempFile::new_in(directory).map_err(Error::io("write to", directory))?;
        file.write_all(&bytes).map_err(Error::io("write", &self.path))?;
        file.persist(&self.path).map_err(|error| Error::io("write", &self.path)(error.error))?;
        Ok(())
    }
}
