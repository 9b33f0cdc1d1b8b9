//! Whatever the bytes are, the crate answers with records or with a message.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use elasticdl_data::head;
use elasticdl_spec::Layout;
use proptest::prelude::*;

use crate::formats::parquet_bytes;
use crate::made::{Made, plain, read};

/// Reads it in every way there is; what comes out is not the point.
fn survives(made: &Made, name: &str, bytes: &[u8], layout: &Layout) {
    let file = made.file(name, bytes);
    if let Ok((batch, _)) = made.shards(&file, layout, 3).and_then(|shards| read(&shards, layout)) {
        assert_eq!((batch.labels.len(), batch.ids.len()), (batch.records, batch.records));
    }
    let _ = head(&[file.path], None, layout, 3);
}

fn texty() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        5 => prop::sample::select(vec!["0", "1", "-", ".", "e9", "x", "é", " ", "\t"]).prop_map(|s| s.as_bytes().to_vec()),
        4 => Just(b",".to_vec()),
        2 => Just(b"\n".to_vec()),
        1 => Just(b"\r\n".to_vec()),
        2 => Just(b"\"".to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..4),
    ];
    prop::collection::vec(piece, 1..200).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn text_of_any_kind_is_survived(bytes in texty(), quotes: bool, trim: bool, header: bool) {
        prop_assume!(!bytes.is_empty());
        let mut layout = plain();
        layout.text.quotes = quotes;
        layout.text.trim = trim;
        layout.text.header = header;
        layout.columns = if header { vec![] } else { layout.columns };
        survives(&Made::new(), "x.csv", &bytes, &layout);
    }

    #[test]
    fn packed_bytes_of_any_kind_are_survived(bytes in prop::collection::vec(any::<u8>(), 1..300), zstd: bool) {
        let mut bytes = bytes;
        let magic: &[u8] = if zstd { b"\x28\xb5\x2f\xfd" } else { b"\x1f\x8b\x08" };
        bytes.splice(..0, magic.iter().copied());
        survives(&Made::new(), if zstd { "x.csv.zst" } else { "x.csv.gz" }, &bytes, &plain());
    }

    #[test]
    fn damaged_parquet_is_survived(at in 0.0..1.0f64, length in 1..9usize, with: u8, cut_off: bool) {
        let mut bytes = some_parquet();
        let at = (at * bytes.len() as f64) as usize;
        let end = (at + length).min(bytes.len());
        bytes[at..end].fill(with);
        if cut_off {
            bytes.truncate(at.max(1));
        }
        survives(&Made::new(), "x.parquet", &bytes, &plain());
    }
}

fn some_parquet() -> Vec<u8> {
    let column = |values: Vec<i64>| Arc::new(Int64Array::from(values)) as ArrayRef;
    let table = RecordBatch::try_from_iter([
        ("label", column((0..100).map(|n| n % 2).collect())),
        ("n", column((0..100).collect())),
        ("c", column((0..100).map(|n| n * n).collect())),
    ]);
    parquet_bytes(&table.expect("columns of one length"), 30)
}

/// Found by the property above: a page that says it has a dictionary, in a column that has none.
#[test]
fn a_panic_of_the_parquet_library_is_an_error() {
    let whole = some_parquet();
    let made = Made::new();
    let mut messages = Vec::new();
    for at in whole.len() * 69 / 100..whole.len() * 72 / 100 {
        let mut bytes = whole.clone();
        bytes[at..at + 3].fill(105);
        let file = made.file("x.parquet", &bytes);
        let read = made.shards(&file, &plain(), 3).and_then(|shards| read(&shards, &plain()));
        messages.extend(read.err().and_then(|error| Some(std::error::Error::source(&error)?.to_string())));
    }
    assert!(messages.iter().any(|message| message.contains("it is damaged (")), "{messages:?}");
}

/// Found by the property above: shards were cut for as many rows as a damaged footer spoke of.
#[test]
fn a_footer_that_contradicts_itself_is_an_error() {
    let whole = some_parquet();
    let made = Made::new();
    let footer = u32::from_le_bytes(whole[whole.len() - 8..][..4].try_into().expect("4 bytes")) as usize + 8;
    let mut contradictions = 0;
    for at in whole.len() - footer..whole.len() - 8 {
        let mut bytes = whole.clone();
        bytes[at] = 0x7e;
        let file = made.file("x.parquet", &bytes);
        let error = made.shards(&file, &plain(), 3).err();
        let cause = error.as_ref().and_then(std::error::Error::source).map(ToString::to_string);
        contradictions += usize::from(cause.is_some_and(|cause| cause.contains("contradicts itself")));
    }
    // 4 row groups, each with the rows of the group and those of three columns.
    assert!((4..=40).contains(&contradictions), "{contradictions}");
}
