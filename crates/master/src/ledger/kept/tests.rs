//! A ledger in files. What differs for objects is tested where they are.

use std::fs;

use super::*;
use crate::ledger::TermsOfJob;
use crate::ledger::file::files;
use elasticdl_spec::{LeaseId, TaskId, WorkerId};

fn leased(shard: u32) -> Entry {
    let (lease, worker) = (LeaseId { term: 1, n: shard.into() }, WorkerId(0));
    Entry::Leased { task: TaskId::train(0, shard), lease, worker, lasting: false }
}

fn begun(term: u64) -> Entry {
    Entry::Begun { term, terms_of_job: TermsOfJob::default() }
}

/// As a master does: its term first.
fn open(dir: &Path) -> Result<Ledger> {
    Ledger::open(dir, store::claim_term(dir)?)
}

fn only_file(dir: &Path) -> PathBuf {
    let files = files(&dir_of(dir)).unwrap();
    assert_eq!(files.len(), 1, "older files are swept");
    files[0].1.clone()
}

#[test]
fn what_was_written_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(read(dir.path()).unwrap(), None);
    let mut ledger = open(dir.path()).unwrap();
    ledger.append(&[begun(1), leased(0)]).unwrap();
    ledger.append(&[leased(1)]).unwrap();
    let book = read(dir.path()).unwrap().unwrap();
    assert_eq!((book.term, book.leased.len()), (1, 2));
    let again = open(dir.path()).unwrap();
    assert_eq!(*again.book(), book);
    only_file(dir.path());
}

#[test]
fn a_torn_end_is_cut_off_and_damage_in_the_middle_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut ledger = open(dir.path()).unwrap();
    ledger.append(&[begun(1)]).unwrap();
    ledger.append(&[leased(0), leased(1)]).unwrap();
    drop(ledger);
    let path = only_file(dir.path());
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    assert_eq!(read(dir.path()).unwrap().unwrap().leased.len(), 1);

    let mut damaged = whole.clone();
    let middle = whole.len() / 2;
    damaged[middle] ^= 1;
    fs::write(&path, &damaged).unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("ledger-1000000.log") && error.contains("is damaged"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), damaged, "a damaged ledger is left as it is");
}

#[test]
fn a_long_file_is_replaced_by_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut ledger = open(dir.path()).unwrap();
    ledger.append(&[begun(1)]).unwrap();
    let entries: Vec<Entry> = (0..1000)
        .flat_map(|_| [leased(7), Entry::Freed { task: TaskId::train(0, 7), between_batches: true }])
        .collect();
    let mut longest = 0;
    for _ in 0..40 {
        ledger.append(&entries).unwrap();
        longest = longest.max(ledger.bytes());
    }
    assert!(longest < BYTES_MAX + (1 << 20), "{longest}");
    assert!(ledger.bytes() < longest, "it was replaced at least once");
    assert_eq!(read(dir.path()).unwrap().unwrap(), *ledger.book());
    only_file(dir.path());
}

#[test]
fn a_master_that_has_a_successor_is_told_so_by_its_next_write_that_must_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = open(dir.path()).unwrap();
    old.append(&[begun(1), leased(0)]).unwrap();
    let mut new = open(dir.path()).unwrap();
    assert_eq!(new.book().leased.len(), 1);
    new.append(&[begun(2)]).unwrap();
    old.append(&[leased(1)]).unwrap();
    let reborn = Entry::Reborn { partitions: vec![(0, 2)], floor: None };
    let error = old.append(std::slice::from_ref(&reborn)).unwrap_err();
    assert!(matches!(error, Error::Succeeded { term: 1 }), "{error}");
    assert!(old.append(&[leased(2)]).is_err(), "and it writes nothing more");
    let book = read(dir.path()).unwrap().unwrap();
    assert_eq!((book.term, book.leased.len(), book.incarnation(0)), (2, 1, 1));
}
