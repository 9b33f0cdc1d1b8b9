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

/// Reads a file that holds entries alone and was written at once, so that no crash can have cut it.
///
/// # Errors
///
/// What is wrong with it.
pub fn read_entries(bytes: &[u8]) -> Result<Vec<Entry>, String> {
    let read = payloads(bytes)?;
    if read.end < bytes.len() || bytes.is_empty() {
        return Err(format!("record {} at byte {} is damaged", read.payloads.len(), read.end));
    }
    let entry = |(number, payload): (usize, &&[u8])| match record(number, payload)? {
        Record::Entry(entry) => Ok(entry),
        Record::Snapshot(_) => Err(format!("record {number} is out of place")),
    };
    read.payloads.iter().enumerate().map(entry).collect()
}

fn payloads(bytes: &[u8]) -> Result<log::Read<'_>, String> {
    log::read(bytes)
        .map_err(|damaged| format!("record {} at byte {} is damaged", damaged.record, damaged.offset))
}

fn record(number: usize, payload: &[u8]) -> Result<Record, String> {
    serde_json::from_slice(payload)
        .map_err(|e| format!("record {number} is none that this program knows: {e}"))
}

/// Reads a file.
///
/// # Errors
///
/// What is wrong with it: a damaged record, an unknown one, or none at all.
pub fn read(bytes: &[u8]) -> Result<Contents, String> {
    let read = payloads(bytes)?;
    let mut book: Option<Book> = None;
    for (number, payload) in read.payloads.iter().enumerate() {
        match (record(number, payload)?, &mut book) {
            (Record::Snapshot(snapshot), None) => book = Some(*snapshot),
            (Record::Entry(entry), Some(book)) => book.apply(&entry),
            _ => return Err(format!("record {number} is out of place")),
        }
    }
    let book = book.ok_or("it has no whole record")?;
    Ok(Contents { book, entries: read.payloads.len() - 1, end: read.end })
}
