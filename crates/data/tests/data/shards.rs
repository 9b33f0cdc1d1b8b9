//! Files are cut into shards that hold every record exactly once.

use std::fs;

use elasticdl_data::{Error, check, cut};
use elasticdl_spec::{Kind, Layout};
use proptest::prelude::*;

use crate::made::{Made, plain, read};

/// How a file is written; the records are the same.
#[derive(Debug, Clone)]
struct Writing {
    crlf: bool,
    last_newline: bool,
    header: bool,
    quotes: bool,
    byte_order_mark: bool,
    /// Blank lines before record n, for each n.
    blanks: Vec<u8>,
    /// How long the text of record n is.
    lengths: Vec<u16>,
}

fn writing() -> impl Strategy<Value = Writing> {
    (1..200usize).prop_flat_map(|records| {
        (
            (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
            prop::collection::vec(prop::sample::select(vec![0u8, 0, 0, 0, 1, 2]), records),
            prop::collection::vec(prop_oneof![9 => 0..20u16, 1 => 0..3000u16], records),
        )
            .prop_map(|((crlf, last_newline, header, quotes, byte_order_mark), blanks, lengths)| {
                Writing { crlf, last_newline, header, quotes, byte_order_mark, blanks, lengths }
            })
    })
}

impl Writing {
    fn layout(&self) -> Layout {
        let mut layout = plain();
        layout.text.header = self.header;
        layout.text.quotes = self.quotes;
        layout
    }

    fn text(&self) -> Vec<u8> {
        let end = if self.crlf { "\r\n" } else { "\n" };
        let mut text = String::new();
        if self.byte_order_mark {
            text.push('\u{feff}');
        }
        if self.header {
            text.push_str("label,n,c");
            text.push_str(end);
        }
        for (n, (blanks, length)) in self.blanks.iter().zip(&self.lengths).enumerate() {
            text.push_str(&end.repeat(usize::from(*blanks)));
            let filler = "x".repeat((*length).into());
            match self.quotes && n % 3 == 0 {
                true => text.push_str(&format!("{},{n},\"a\"\"{end}{filler},b\"{end}", n % 2)),
                false => text.push_str(&format!("{},{n},{filler}{end}", n % 2)),
            }
        }
        if !self.last_newline {
            text.truncate(text.len() - end.len());
        }
        text.into_bytes()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn shards_cover_each_record_exactly_once(writing in writing(), records_per_shard in 1..60u64) {
        let (made, file) = Made::with("some.csv", writing.text());
        let layout = writing.layout();
        let shards = made.shards(&file, &layout, records_per_shard).expect("the file is fine");
        let records = writing.blanks.len() as u64;
        let mut next = 0;
        for shard in &shards {
            prop_assert_eq!(shard.first, next);
            prop_assert_eq!(shard.records, Some(records_per_shard.min(records - next)));
            next += records_per_shard.min(records - next);
        }
        prop_assert_eq!(next, records);

        let (batch, bad) = read(&shards, &layout).expect("the shards can be read");
        prop_assert_eq!(bad, vec![]);
        prop_assert_eq!(&batch.numeric, &(0..records).map(|n| n as f32).collect::<Vec<_>>());
        prop_assert_eq!(&batch.labels, &(0..records).map(|n| (n % 2) as f32).collect::<Vec<_>>());

        // The kept index says the same.
        prop_assert_eq!(made.shards(&file, &layout, records_per_shard).expect("the index is fine"), shards);
    }
}

fn lines(records: usize) -> String {
    (0..records).map(|n| format!("{},{n},x{n}\n", n % 2)).collect()
}

#[test]
fn a_kept_index_is_read_without_the_data_file() {
    let (made, file) = Made::with("some.csv", lines(100));
    let shards = made.shards(&file, &plain(), 7).expect("the file is fine");
    fs::remove_file(&file.path).expect("a file can be removed");
    let mut again = Vec::new();
    let records = cut(&file, &plain(), 7, &made.path("index"), &mut |shard| again.push(shard));
    assert_eq!(records.expect("the index is there"), 100);
    assert_eq!(again, shards);
}

#[test]
fn shards_are_handed_out_while_the_rest_is_still_unread() {
    // The end of the file is so long a line that it cannot be indexed; what is before it was told already.
    let (made, file) = Made::with("some.csv", lines(20_000) + &"x".repeat(3 << 20));
    let mut shards = 0;
    let error =
        cut(&file, &plain(), 100, &made.path("index"), &mut |_| shards += 1).expect_err("no end of line");
    assert_eq!(shards, 199);
    assert!(made.message(error).starts_with("the record at line 20001 of some.csv is longer than"));
}

#[test]
fn damaged_and_outdated_indexes_are_made_anew() {
    let (made, file) = Made::with("some.csv", lines(50));
    let shards = made.shards(&file, &plain(), 7).expect("the file is fine");
    let index =
        fs::read_dir(made.path("index")).expect("it was made").next().expect("one file").expect("listed");
    let whole = fs::read(index.path()).expect("it can be read");
    for damage in [vec![], whole[..whole.len() - 8].to_vec(), whole[..20].to_vec(), {
        let mut flipped = whole.clone();
        flipped[30] ^= 1;
        flipped
    }] {
        fs::write(index.path(), damage).expect("it can be written");
        assert_eq!(made.shards(&file, &plain(), 7).expect("it is made anew"), shards);
        assert_eq!(fs::read(index.path()).expect("it can be read"), whole);
    }
    let file = made.file("some.csv", lines(60));
    assert_eq!(made.shards(&file, &plain(), 7).expect("it is made anew").len(), 9);
    assert_eq!(fs::read_dir(made.path("index")).expect("it was made").count(), 1);
}

#[test]
fn an_index_that_cannot_be_kept_does_not_matter() {
    let (made, file) = Made::with("some.csv", lines(5));
    made.file("index.csv", "in the way");
    let mut shards = 0;
    let records = cut(&file, &plain(), 2, &made.path("index.csv"), &mut |_| shards += 1);
    assert_eq!((records.expect("the file is fine"), shards), (5, 3));
}

#[test]
fn a_file_that_changed_is_refused_by_name() {
    let (made, file) = Made::with("some.csv", lines(5));
    let shards = made.shards(&file, &plain(), 2).expect("the file is fine");
    fs::write(&file.path, lines(4)).expect("a file can be written");
    let error = read(&shards[..1], &plain()).expect_err("it changed");
    assert!(matches!(error, Error::Changed { .. }), "{error:?}");
    assert_eq!(error.kind(), Kind::User);
    let message = made.message(error);
    assert_eq!(message, "some.csv changed since it was cut into shards; restore it, or start a new job");
    let stale = cut(&file, &plain(), 3, &made.path("index"), &mut |_| {}).expect_err("it changed");
    assert!(matches!(stale, Error::Changed { .. }), "{stale:?}");
}

#[test]
fn a_file_without_records_is_refused() {
    let mut layout = plain();
    for (header, text, message) in [
        (false, "\n\r\n\n", "cannot use some.csv as data: it holds no records"),
        (true, "label,n,c\n\n", "cannot use some.csv as data: it holds no records"),
        (true, "\n", "cannot use some.csv as data: it has nothing but blank lines, not even a header"),
    ] {
        layout.text.header = header;
        let (made, file) = Made::with("some.csv", text);
        let error = made.shards(&file, &layout, 10).expect_err("there is nothing in it");
        assert_eq!(made.message(error), message);
    }
}

#[test]
fn a_missing_column_is_found_before_anything_is_read() {
    let (made, file) = Made::with("some.csv", "labels,n,c\n1,2,3\n");
    let mut layout = plain();
    layout.text.header = true;
    let expected =
        "some.csv has no column \"label\" (did you mean \"labels\"?); its columns are labels, n, c";
    assert_eq!(made.message(check(&file, &layout).expect_err("no label")), expected);
    assert_eq!(made.message(made.shards(&file, &layout, 10).expect_err("no label")), expected);
    layout.text.header = false;
    layout.columns.clear();
    let message = made.message(check(&file, &layout).expect_err("no names"));
    assert!(message.contains("has no header and the layout names no columns"), "{message}");
}

#[test]
fn delimiters_that_cannot_work_are_refused() {
    let (made, file) = Made::with("some.csv", lines(5));
    for delimiter in ['\n', '"', 'é', '→'] {
        let mut layout = plain();
        layout.text.delimiter = delimiter;
        let message = made.message(made.shards(&file, &layout, 10).expect_err("no delimiter"));
        assert!(message.contains("cannot stand between columns"), "{message}");
    }
    assert!(made.shards(&file, &plain(), 0).is_err());
}
