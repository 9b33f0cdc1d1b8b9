//! The same data in another format gives the same batch.

use std::io::Write;
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, DictionaryArray, Float32Array, Float64Array, Int8Array,
    Int16Array, Int32Array, Int64Array, LargeStringArray, NullArray, RecordBatch, StringArray,
    StringViewArray, TimestampMillisecondArray, UInt8Array, UInt16Array, UInt32Array, UInt64Array,
};
use elasticdl_data::{Batch, Error};
use elasticdl_spec::layout::{Bucket, CategoricalField, NumericField, Scale};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;

use crate::made::{Made, ids_of, plain, read, read_file};

/// A Parquet file with row groups of so many rows and pages of few.
pub fn parquet_bytes(batch: &RecordBatch, group_rows: usize) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(group_rows))
        .set_data_page_row_count_limit(16)
        .set_write_batch_size(8)
        .build();
    let mut bytes = Vec::new();
    let mut writer =
        ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).expect("a simple schema");
    writer.write(batch).expect("memory can be written");
    writer.close().expect("memory can be written");
    bytes
}

fn table(label: ArrayRef, n: ArrayRef, c: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([("label", label, true), ("n", n, true), ("c", c, true)])
        .expect("columns of one length")
}

fn parquet_batch(table: &RecordBatch, group_rows: usize) -> (Made, Batch) {
    let (made, file) = Made::with("some.parquet", parquet_bytes(table, group_rows));
    let (batch, bad) = read_file(&made, &file, &plain()).expect("it can be read");
    assert_eq!(bad, []);
    (made, batch)
}

#[derive(Debug, Clone)]
struct Row {
    label: bool,
    n: Option<i32>,
    float: Option<f32>,
    c: Option<i64>,
    text: Option<String>,
}

fn row() -> impl Strategy<Value = Row> {
    let c = prop_oneof![any::<i64>(), -5..5i64];
    let text = prop_oneof![Just("7".to_string()), Just("-0".to_string()), "[a-z0-9 é\"]{1,12}"];
    (
        any::<bool>(),
        any::<Option<i32>>(),
        prop::option::of(-1e6..1e6f32),
        prop::option::of(c),
        prop::option::of(text),
    )
        .prop_map(|(label, n, float, c, text)| Row { label, n, float, c, text })
}

fn text_of<T: ToString>(value: &Option<T>) -> String {
    value.as_ref().map(ToString::to_string).unwrap_or_default()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn csv_and_parquet_of_the_same_data_give_the_same_batch(
        rows in prop::collection::vec(row(), 1..150),
        group_rows in 1..70usize,
        records_per_shard in 1..50u64,
    ) {
        let mut layout = plain();
        layout.columns = ["label", "n", "f", "c", "t"].map(String::from).into();
        layout.text.quotes = true;
        layout.numeric = vec![
            NumericField { column: "n".into(), scale: Scale::Log },
            NumericField { column: "f".into(), scale: Scale::Standard { mean: 3.0, deviation: 7.0 } },
        ];
        let field = |column: &str, bucket| {
            CategoricalField { name: format!("{column}!"), column: column.into(), bucket }
        };
        layout.categorical = vec![
            field("c", Bucket::Value),
            field("t", Bucket::Value),
            field("n", Bucket::Width { width: 3.0 }),
            field("f", Bucket::Log { steps: 4.0 }),
        ];
        let made = Made::new();
        let quote = |text: &String| format!("\"{}\"", text.replace('"', "\"\""));
        let lines: Vec<String> = rows
            .iter()
            .map(|r| {
                let (n, float, c) = (text_of(&r.n), text_of(&r.float), text_of(&r.c));
                format!("{},{n},{float},{c},{}\n", u8::from(r.label), text_of(&r.text.as_ref().map(quote)))
            })
            .collect();
        let csv = made.file("some.csv", lines.concat());
        let columns: [(&str, ArrayRef); 5] = [
            ("label", Arc::new(rows.iter().map(|r| Some(r.label)).collect::<BooleanArray>())),
            ("n", Arc::new(rows.iter().map(|r| r.n).collect::<Int32Array>())),
            ("f", Arc::new(rows.iter().map(|r| r.float).collect::<Float32Array>())),
            ("c", Arc::new(rows.iter().map(|r| r.c).collect::<Int64Array>())),
            ("t", Arc::new(rows.iter().map(|r| r.text.clone()).collect::<StringArray>())),
        ];
        let table = RecordBatch::try_from_iter(columns).expect("columns of one length");
        let parquet = made.file("some.parquet", parquet_bytes(&table, group_rows));
        let shards = made.shards(&parquet, &layout, records_per_shard).expect("it can be cut");
        prop_assert_eq!(shards.len() as u64, (rows.len() as u64).div_ceil(records_per_shard));
        let from_parquet = read(&shards, &layout).expect("it can be read");
        prop_assert_eq!(&from_parquet.1, &vec![]);
        prop_assert_eq!(read_file(&made, &csv, &layout).expect("it can be read"), from_parquet);
    }
}

#[test]
fn numbers_of_every_type_are_read_the_same() {
    let columns: [ArrayRef; 11] = [
        Arc::new(Int8Array::from(vec![1, 0, 5])),
        Arc::new(Int16Array::from(vec![1, 0, 5])),
        Arc::new(Int32Array::from(vec![1, 0, 5])),
        Arc::new(Int64Array::from(vec![1, 0, 5])),
        Arc::new(UInt8Array::from(vec![1, 0, 5])),
        Arc::new(UInt16Array::from(vec![1, 0, 5])),
        Arc::new(UInt32Array::from(vec![1, 0, 5])),
        Arc::new(UInt64Array::from(vec![1, 0, 5])),
        Arc::new(Float32Array::from(vec![1.0, 0.0, 5.0])),
        Arc::new(Float64Array::from(vec![1.0, 0.0, 5.0])),
        Arc::new(StringArray::from(vec!["1", "0", "5"])),
    ];
    for column in columns {
        let label: ArrayRef = Arc::new(Int32Array::from(vec![1, 0, 1]));
        let (_made, batch) = parquet_batch(&table(label, column.clone(), column.clone()), 2);
        assert_eq!(batch.numeric, [1.0, 0.0, 5.0], "{}", column.data_type());
        assert_eq!(batch.ids, ids_of(&["1", "0", "5"]), "{}", column.data_type());
    }
}

#[test]
fn texts_of_every_type_are_read_the_same_and_nulls_are_missing() {
    let words = vec![Some("a"), None, Some("7"), Some("")];
    let columns: [ArrayRef; 5] = [
        Arc::new(StringArray::from(words.clone())),
        Arc::new(LargeStringArray::from(words.clone())),
        Arc::new(StringViewArray::from(words.clone())),
        Arc::new(BinaryArray::from_iter(words.iter().map(|word| word.map(str::as_bytes)))),
        Arc::new(words.iter().copied().collect::<DictionaryArray<Int32Type>>()),
    ];
    for column in columns {
        let label: ArrayRef = Arc::new(Int32Array::from(vec![1, 0, 1, 1]));
        let n: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.5), None, Some(f64::NAN), Some(-2.0)]));
        let (_made, batch) = parquet_batch(&table(label, n, column.clone()), 3);
        assert_eq!(batch.ids, ids_of(&["a", "", "7", ""]), "{}", column.data_type());
        assert_eq!(batch.numeric, [1.5, 0.0, 0.0, -2.0]);
    }
    let nothing: ArrayRef = Arc::new(NullArray::new(2));
    let label: ArrayRef = Arc::new(BooleanArray::from(vec![true, false]));
    let (_made, batch) = parquet_batch(&table(label, nothing.clone(), nothing), 3);
    assert_eq!((batch.ids, batch.labels), (ids_of(&["", ""]), vec![1.0, 0.0]));
}

#[test]
fn words_for_missing_count_in_typed_columns_too() {
    let mut layout = plain();
    layout.text.missing = vec!["-1".into()];
    let ints: ArrayRef = Arc::new(Int32Array::from(vec![0, -1, 3]));
    let label: ArrayRef = Arc::new(Int32Array::from(vec![1, 0, 1]));
    let (made, file) = Made::with("some.parquet", parquet_bytes(&table(label, ints.clone(), ints), 5));
    let (batch, _) = read_file(&made, &file, &layout).expect("it can be read");
    assert_eq!(batch.numeric, [0.0, 0.0, 3.0]);
    assert_eq!(batch.ids, ids_of(&["0", "", "3"]));
}

#[test]
fn bad_rows_are_named_and_the_others_close_ranks() {
    let label: ArrayRef =
        Arc::new(Int32Array::from((0..300).map(|n| Some(i32::from(n == 7) * 5)).collect::<Vec<_>>()));
    let n: ArrayRef = Arc::new(Float64Array::from(
        (0..300).map(|n| if n == 200 { 1e300 } else { f64::from(n) }).collect::<Vec<_>>(),
    ));
    let c: ArrayRef = Arc::new(Int64Array::from((0..300).collect::<Vec<_>>()));
    let (made, file) = Made::with("some.parquet", parquet_bytes(&table(label, n, c), 90));
    let shards = made.shards(&file, &plain(), 64).expect("it can be cut");
    let (batch, bad) = read(&shards, &plain()).expect("it can be read");
    let told: Vec<String> = bad.into_iter().map(|bad| made.message(bad)).collect();
    assert_eq!(told[0], "some.parquet, row 8, column 1 (label): the label is \"5\", neither 0 nor 1");
    assert!(told[1].starts_with("some.parquet, row 201, column 2 (n): \"1000000"), "{}", told[1]);
    assert!(told[1].ends_with("… is too large a number"), "{}", told[1]);
    let expected: Vec<f32> = (0..300).filter(|n| *n != 7 && *n != 200).map(|n| n as f32).collect();
    assert_eq!((batch.numeric, told.len()), (expected, 2));
}

#[test]
fn columns_that_are_missing_or_no_fields_are_errors() {
    let made = Made::new();
    let one: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    let time: ArrayRef = Arc::new(TimestampMillisecondArray::from(vec![1]));
    let of = |columns: Vec<(&str, ArrayRef)>| {
        let table = RecordBatch::try_from_iter(columns).expect("columns of one length");
        let file = made.file("some.parquet", parquet_bytes(&table, 5));
        made.message(made.shards(&file, &plain(), 5).expect_err("something is wrong"))
    };
    assert_eq!(
        of(vec![("Label", one.clone()), ("n", one.clone())]),
        "some.parquet has no column \"label\" (did you mean \"Label\"?); its columns are Label, n"
    );
    assert_eq!(
        of(vec![("label", one.clone()), ("n", time), ("c", one)]),
        "column \"n\" of some.parquet is of type Timestamp(ms); only integers, floats, booleans and text can be read"
    );
}

#[test]
fn what_is_no_parquet_is_told_with_its_cause() {
    let (made, file) = Made::with("some.parquet", "label,n,c\n1,2,3\n");
    let error = made.shards(&file, &plain(), 5).expect_err("this is text");
    assert!(matches!(error, Error::Parquet { row_group: None, .. }), "{error:?}");
    assert_eq!(made.message(&error), "cannot read some.parquet");
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn damage_in_a_parquet_file_names_the_row_group() {
    let column: ArrayRef = Arc::new(Int64Array::from((0..100).map(|n| n % 2).collect::<Vec<_>>()));
    let mut bytes = parquet_bytes(&table(column.clone(), column.clone(), column), 50);
    let half = bytes.len() / 3;
    bytes[4..half].fill(0xff);
    let (made, file) = Made::with("some.parquet", bytes);
    let shards = made.shards(&file, &plain(), 100).expect("the footer is fine");
    let error = read(&shards, &plain()).expect_err("the pages are not");
    assert_eq!(made.message(error), "cannot read some.parquet, row group 0");
}

#[test]
fn packed_text_is_one_shard_and_reads_the_same() {
    let text: String =
        "label,n,c\n".to_string() + &(0..5000).map(|n| format!("{},{n},x{n}\n", n % 2)).collect::<String>();
    let mut layout = plain();
    layout.text.header = true;
    let made = Made::new();
    let plain_file = made.file("some.csv", &text);
    let expected = read_file(&made, &plain_file, &layout).expect("it can be read");
    // Two members in one file, as `cat a.gz b.gz` makes them.
    let mut gzip = Vec::new();
    for part in [&text[..20_000], &text[20_000..]] {
        let mut encoder = flate2::write::GzEncoder::new(&mut gzip, flate2::Compression::fast());
        encoder.write_all(part.as_bytes()).expect("memory can be written");
        encoder.finish().expect("memory can be written");
    }
    let zstd = zstd::encode_all(text.as_bytes(), 1).expect("memory can be written");
    for (name, bytes) in [("some.csv.gz", gzip), ("some.csv.zst", zstd)] {
        let file = made.file(name, &bytes);
        let shards = made.shards(&file, &layout, 10).expect("it can be cut");
        assert_eq!((shards.len(), shards[0].records, shards[0].first), (1, None, 0));
        assert_eq!(read(&shards, &layout).expect("it can be read"), expected);
        let cut_short = made.file(name, &bytes[..bytes.len() / 2]);
        let shards = made.shards(&cut_short, &layout, 10).expect("it can be cut");
        let error = read(&shards, &layout).expect_err("it ends in the middle");
        assert_eq!(error.kind(), elasticdl_spec::Kind::User);
        assert_eq!(made.message(error), format!("cannot unpack {name}"));
    }
}
