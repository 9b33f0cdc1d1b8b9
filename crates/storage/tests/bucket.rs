//! Objects of a real server: `cargo xtask test` starts one.
#![expect(clippy::unwrap_used, reason = "tests may panic")]

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;

use elasticdl_storage as storage;

const BLOCK: usize = 512 << 10;
const PART: usize = 16 << 20;

/// A new place in the bucket for tests.
fn bucket() -> Option<PathBuf> {
    let Some(base) = std::env::var_os("ELASTICDL_TEST_S3") else {
        eprintln!(
            "skipped: ELASTICDL_TEST_S3 names no bucket; `cargo xtask test` starts a server and sets it"
        );
        return None;
    };
    let unique = tempfile::tempdir().unwrap();
    Some(Path::new(&base).join("storage").join(unique.path().file_name().unwrap()))
}

/// Bytes of which no two stretches are alike.
fn content(length: usize) -> Vec<u8> {
    (0..length.div_ceil(4) as u32)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .take(length)
        .collect()
}

#[test]
fn any_range_of_an_object_is_read_wherever_blocks_end() {
    let Some(dir) = bucket() else { return };
    let bytes = content(5 * BLOCK + 17);
    storage::replace(dir.join("long"), &bytes).unwrap();
    let mut whole = Vec::new();
    storage::open(dir.join("long")).unwrap().read_to_end(&mut whole).unwrap();
    assert!(whole == bytes, "read from start to end, ahead of the reader");
    let mut source = storage::open(dir.join("long")).unwrap();
    assert_eq!(source.meta().unwrap().bytes, bytes.len() as u64);
    for (at, length) in
        [(0, 10), (BLOCK - 5, 10), (3 * BLOCK, BLOCK + 1), (bytes.len() - 3, 3), (7, 2 * BLOCK)]
    {
        let mut part = vec![0; length];
        source.seek(SeekFrom::Start(at as u64)).unwrap();
        source.read_exact(&mut part).unwrap();
        assert!(part == bytes[at..at + length], "{length} bytes at {at}");
    }
    assert_eq!(source.seek(SeekFrom::End(0)).unwrap(), bytes.len() as u64);
    assert_eq!(source.read(&mut [0; 8]).unwrap(), 0, "nothing behind the end");
}

#[test]
fn an_object_that_is_replaced_has_another_fingerprint_and_is_not_read_as_the_old_one() {
    let Some(dir) = bucket() else { return };
    let name = dir.join("changing");
    storage::replace(&name, &content(4 * BLOCK)).unwrap();
    let mut old = storage::open(&name).unwrap();
    let mut first = [0; 4];
    old.read_exact(&mut first).unwrap();
    let mut other = content(4 * BLOCK);
    other.reverse();
    storage::replace(&name, &other).unwrap();
    let new = storage::open(&name).unwrap();
    assert_ne!(old.meta().unwrap().fingerprint, new.meta().unwrap().fingerprint);
    let changed = |mut source: storage::Source| {
        source.seek(SeekFrom::Start(2 * BLOCK as u64)).unwrap();
        let error = source.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("changed while it was read"), "{error}");
    };
    let known = old.meta().unwrap().fingerprint;
    changed(old);
    // Whoever asks for the new one gets it; the old one is not to be had any more.
    let mut again = storage::open_again(&name, new.meta().unwrap().fingerprint).unwrap();
    again.read_exact(&mut first).unwrap();
    assert_eq!(first[..], other[..4]);
    assert_ne!(storage::open_again(&name, known).unwrap().meta().unwrap().fingerprint, known);
}

#[test]
fn a_large_object_is_sent_in_parts_and_is_there_once_it_is_finished() {
    let Some(dir) = bucket() else { return };
    for length in [0, 1000, 2 * PART, 2 * PART + 1] {
        let name = dir.join(format!("large-{length}"));
        let mut sink = storage::create(&name).unwrap();
        sink.write_all(&content(length)).unwrap();
        assert!(!storage::exists(&name).unwrap());
        sink.finish().unwrap();
        assert!(storage::read(&name).unwrap() == content(length), "{length} bytes");
    }
    let mut abandoned = storage::create(dir.join("abandoned")).unwrap();
    abandoned.write_all(&content(PART + 1)).unwrap();
    drop(abandoned);
    assert!(!storage::exists(dir.join("abandoned")).unwrap());
}

#[test]
fn of_many_who_create_an_object_one_succeeds() {
    let Some(dir) = bucket() else { return };
    let name = dir.join("one");
    let try_it = |who: u8| storage::create_new(&name, &[who]).map(|()| who);
    let outcomes: Vec<io::Result<u8>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|who| scope.spawn(move || try_it(who))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let winners: Vec<u8> = outcomes.iter().flatten().copied().collect();
    assert_eq!(storage::read(&name).unwrap(), winners, "there is one, and the object is its");
    let losers = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
    assert!(
        losers.clone().all(|e| e.kind() == io::ErrorKind::AlreadyExists),
        "{:?}",
        losers.collect::<Vec<_>>()
    );
}

#[test]
fn directories_are_listed_matched_and_removed() {
    let Some(dir) = bucket() else { return };
    for name in ["data/b.tsv", "data/a.tsv", "data/.c.tsv", "data/sub/d.tsv", "data-more/e.tsv", "top"] {
        storage::replace(dir.join(name), name.as_bytes()).unwrap();
    }
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(storage::list(&dir).unwrap()), ["data", "data-more", "top"]);
    assert_eq!(sorted(storage::list(dir.join("data")).unwrap()), [".c.tsv", "a.tsv", "b.tsv", "sub"]);
    assert!(storage::list(dir.join("nowhere")).unwrap().is_empty());
    let shown = dir.display();
    let matching = |pattern: &str| {
        let found = storage::matching(&format!("{shown}/{pattern}")).unwrap();
        found.iter().map(|url| url[shown.to_string().len() + 1..].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(matching("data/*.tsv"), ["data/a.tsv", "data/b.tsv"]);
    assert_eq!(matching("*/[de].tsv"), ["data-more/e.tsv"]);
    assert_eq!(matching("**/d.tsv"), ["data/sub/d.tsv"]);
    storage::remove_all(dir.join("data")).unwrap();
    storage::remove_all(dir.join("data")).unwrap();
    assert_eq!(sorted(storage::list(&dir).unwrap()), ["data-more", "top"]);
    storage::remove_each(&[dir.join("top"), dir.join("gone")]).unwrap();
    assert!(!storage::exists(dir.join("top")).unwrap());
    let all = storage::read_all(&[dir.join("data-more/e.tsv"), dir.join("top")]).unwrap_err();
    assert_eq!(all.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_bucket_that_is_not_there_is_no_empty_one() {
    let Some(_) = bucket() else { return };
    let error = storage::list("s3://no-such-bucket-anywhere/x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotADirectory, "{error}");
    assert!(
        error.to_string().starts_with("there is no bucket \"no-such-bucket-anywhere\"; make it"),
        "{error}"
    );
}
