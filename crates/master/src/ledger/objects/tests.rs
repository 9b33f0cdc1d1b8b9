//! Against a real server: `cargo xtask test` starts one.

use super::*;
use crate::ledger::{Entry, Ledger, TermsOfJob, dir_of, read as read_book};
use crate::store;
use elasticdl_spec::{LeaseId, TaskId, WorkerId};

/// A new place in the bucket for tests.
fn bucket() -> Option<PathBuf> {
    let Some(base) = std::env::var_os("ELASTICDL_TEST_S3") else {
        eprintln!(
            "skipped: ELASTICDL_TEST_S3 names no bucket; `cargo xtask test` starts a server and sets it"
        );
        return None;
    };
    let unique = tempfile::tempdir().unwrap();
    Some(Path::new(&base).join("master").join(unique.path().file_name().unwrap()))
}

fn begun(term: u64) -> Entry {
    Entry::Begun { term, terms_of_job: TermsOfJob::default() }
}

fn leased(term: u64, n: u64) -> Entry {
    let (task, lease) = (TaskId::train(0, n as u32), LeaseId { term, n });
    Entry::Leased { task, lease, worker: WorkerId(0), lasting: false }
}

fn open(dir: &Path) -> Ledger {
    Ledger::open(dir, store::claim_term(dir).unwrap()).unwrap()
}

fn segment_names(dir: &Path) -> Vec<String> {
    let mut names = elasticdl_storage::list(dir_of(dir)).unwrap();
    names.sort();
    names
}

#[test]
fn what_was_written_is_read_again_and_leases_are_gathered() {
    let Some(dir) = bucket() else { return };
    assert_eq!(read_book(&dir).unwrap(), None);
    let mut ledger = open(&dir);
    ledger.append(&[begun(1)]).unwrap();
    for n in 0..100 {
        ledger.append(&[leased(1, n)]).unwrap();
    }
    ledger.append(&[Entry::Cut { checkpoint: 1 }]).unwrap();
    let book = read_book(&dir).unwrap().unwrap();
    assert_eq!((book.term, book.leased.len(), book.cut), (1, 100, 1));
    let written = ["0000000001-0000000000.snapshot", "0000000001-0000000001.entries"];
    assert_eq!(segment_names(&dir)[..2], written);
    let segments = segment_names(&dir).len();
    assert!(segments < 20, "a hundred leases are a few segments, not {segments}");

    ledger.append(&[leased(1, 100)]).unwrap();
    drop(ledger);
    assert_eq!(open(&dir).book().leased.len(), 101, "what was gathered is written at the end");
}

#[test]
fn a_snapshot_takes_the_place_of_many_segments() {
    let Some(dir) = bucket() else { return };
    let mut ledger = open(&dir);
    for checkpoint in 1..=SEGMENTS_MAX + 2 {
        ledger.append(&[Entry::Cut { checkpoint }]).unwrap();
    }
    assert_eq!(read_book(&dir).unwrap().unwrap(), *ledger.book());
    drop(ledger);
    let names = segment_names(&dir);
    assert!(names.len() <= 3 && names[0].ends_with(".snapshot"), "older ones are swept: {names:?}");
}

#[test]
fn a_master_that_has_a_successor_is_told_so_by_its_next_write_that_must_last() {
    let Some(dir) = bucket() else { return };
    let mut old = open(&dir);
    old.append(&[begun(1), leased(1, 0)]).unwrap();
    let mut new = open(&dir);
    assert_eq!(new.book().leased.len(), 1);
    new.append(&[begun(2)]).unwrap();
    old.append(&[leased(1, 1)]).unwrap();
    let reborn = Entry::Reborn { partitions: vec![(0, 2)], floor: None };
    let error = old.append(std::slice::from_ref(&reborn)).unwrap_err();
    assert!(matches!(error, Error::Succeeded { term: 1 }), "{error}");
    assert!(old.append(&[leased(1, 2)]).is_err(), "and it writes nothing more");
    let book = read_book(&dir).unwrap().unwrap();
    assert_eq!((book.term, book.leased.len(), book.incarnation(0)), (2, 1, 1));
}

#[test]
fn a_segment_that_is_lost_or_damaged_is_named() {
    let Some(dir) = bucket() else { return };
    let mut ledger = open(&dir);
    ledger.append(&[begun(1)]).unwrap();
    ledger.append(&[Entry::Cut { checkpoint: 1 }]).unwrap();
    ledger.append(&[Entry::Cut { checkpoint: 2 }]).unwrap();
    drop(ledger);
    let name = "0000000001-0000000002.entries";
    let path = dir_of(&dir).join(name);
    let mut bytes = elasticdl_storage::read(&path).unwrap();
    elasticdl_storage::remove(&path).unwrap();
    let error = read_book(&dir).unwrap_err().to_string();
    assert!(error.ends_with(&format!("/ledger: segment {name} is missing")), "{error}");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    elasticdl_storage::replace(&path, &bytes).unwrap();
    let error = read_book(&dir).unwrap_err().to_string();
    assert!(error.contains(&format!("segment {name}: record 0 at byte 0 is damaged")), "{error}");
}

#[test]
fn of_masters_that_claim_a_term_at_once_each_gets_its_own() {
    let Some(dir) = bucket() else { return };
    let claim = || (0..4).map(|_| store::claim_term(&dir).unwrap()).collect::<Vec<_>>();
    let mut claimed: Vec<u64> = thread::scope(|scope| {
        let masters: Vec<_> = (0..8).map(|_| scope.spawn(claim)).collect();
        masters.into_iter().flat_map(|master| master.join().unwrap()).collect()
    });
    claimed.sort_unstable();
    assert_eq!(claimed, (1..=32).collect::<Vec<u64>>());
    assert_eq!(store::claimed_term(&dir).unwrap(), 32);
}
