//! A ledger's file as records: first a snapshot of the book, then the entries since. Pure; the file on disk
//! and the simulator's read and write it here.

use serde::{Deserialize, Serialize};

use super::{Book, Entry, log};

/// The first record of a file, and each one after it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Record {
    Snapshot(Box<Book>),
    Entry(Entry),
}

/// What a file holds.
#[derive(Debug, PartialEq)]
pub struct Contents {
    /// What its records add up to.
    pub book: Book,
    /// How many entries that were.
    pub entries: usize,
    /// Where the last whole record ends; what follows was cut off.
    pub end: usize,
}

/// Appends the first record of a file.
pub fn append_snapshot(out: &mut Vec<u8>, book: &Book) {
    append(out, &Record::Snapshot(Box::new(book.clone())));
}

/// Appends an entry.
pub fn append_entry(out: &mut Vec<u8>, entry: &Entry) {
    append(out, &Record::Entry(entry.clone()));
}

fn append(out: &mut Vec<u8>, record: &Record) {
    log::append(out, &serde_json::to_vec(record).expect("a record is JSON"));
}

/// Reads a file.
///
/// # Errors
///
/// What is wrong with it: a damaged record, an unknown one, or none at all.
pub fn read(bytes: &[u8]) -> Result<Contents, String> {
    let read = log::read(bytes)
        .map_err(|damaged| format!("record {} at byte {} is damaged", damaged.record, damaged.offset))?;
    let mut book: Option<Book> = None;
    for (number, payload) in read.payloads.iter().enumerate() {
        let record: Record = serde_json::from_slice(payload)
            .map_err(|e| format!("record {number} is none that this program knows: {e}"))?;
        match (record, &mut book) {
            (Record::Snapshot(snapshot), None) => book = Some(*snapshot),
            (Record::Entry(entry), Some(book)) => book.apply(&entry),
            _ => return Err(format!("record {number} is out of place")),
        }
    }
    let book = book.ok_or("it has no whole record")?;
    Ok(Contents { book, entries: read.payloads.len() - 1, end: read.end })
}
