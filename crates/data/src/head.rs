//! The first records of data, as the system sees them, for a person to look at.

use elasticdl_spec::Layout;
use elasticdl_spec::Shard;
use elasticdl_spec::job::Format;

use crate::batch::Batch;
use crate::error::{BadRecord, Result};
use crate::files::{DataFile, discover};
use crate::reader::ShardReader;

/// One record for a person to look at.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadRecord {
    /// The file it is in.
    pub path: String,
    /// What is used of it, by name: the label, numbers after scaling, ids as the values they are made
    /// from. A missing value is empty. Nothing for a record that would be set aside.
    pub values: Vec<(String, String)>,
    /// Why it would be set aside, if it would.
    pub bad: Option<BadRecord>,
}

/// The first `records` records of the files that `patterns` name.
pub fn head(
    patterns: &[String],
    format: Option<Format>,
    layout: &Layout,
    records: usize,
) -> Result<Vec<HeadRecord>> {
    let mut head = Vec::new();
    for file in discover(patterns, format)? {
        if head.len() < records {
            head_of_file(&file, layout, records, &mut head)?;
        }
    }
    Ok(head)
}

fn head_of_file(file: &DataFile, layout: &Layout, records: usize, head: &mut Vec<HeadRecord>) -> Result<()> {
    let whole =
        Shard { path: file.path.clone(), first: 0, records: None, offset: 0, fingerprint: file.fingerprint };
    let mut reader = ShardReader::open(&whole, layout, Some(file.format), 0)?;
    while head.len() < records {
        let Some(raw) = reader.peek()? else { break };
        let (mut batch, mut bad) = (Batch::default(), Vec::new());
        reader.read(1, &mut batch, &mut bad)?;
        let values =
            if batch.records == 1 { values(layout, reader.column_names(), &raw, &batch) } else { vec![] };
        head.push(HeadRecord { path: file.path.clone(), values, bad: bad.pop() });
    }
    Ok(())
}

fn values(layout: &Layout, names: &[String], raw: &[Vec<u8>], batch: &Batch) -> Vec<(String, String)> {
    let text = |column: &str| {
        let at = names.iter().position(|name| name == column);
        let raw = at.and_then(|at| raw.get(at)).map(|value| String::from_utf8_lossy(value).into_owned());
        raw.filter(|text| !layout.text.missing.contains(text)).unwrap_or_default()
    };
    let label = layout.label.iter().map(|label| (label.column.clone(), batch.labels[0].to_string()));
    let numbers = layout.numeric.iter().zip(&batch.numeric).map(|(field, number)| {
        // A missing number is 0 for a model; a person wants to know which it was.
        let shown = if text(&field.column).is_empty() { String::new() } else { number.to_string() };
        (field.column.clone(), shown)
    });
    let ids = layout.categorical.iter().map(|field| (field.name.clone(), text(&field.column)));
    label.chain(numbers).chain(ids).collect()
}
