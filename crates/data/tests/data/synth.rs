//! Data with a planted truth: deterministic, the same in both formats, whole or not there.

use std::fs;

use elasticdl_data::synth::{SynthFormat, SynthOptions, Truth, criteo};
use elasticdl_data::{Batch, discover};
use elasticdl_spec::Layout;

use crate::made::{Made, read_file};

fn options(made: &Made, name: &str, format: SynthFormat) -> SynthOptions {
    SynthOptions {
        rows: 5_000,
        test_rows: 1_000,
        files: 3,
        seed: 5,
        out: made.path(name),
        format,
        threads: 2,
    }
}

fn read_split(made: &Made, options: &SynthOptions, split: &str) -> Batch {
    let pattern = options.out.join(format!("{split}-*.{}", options.format.extension()));
    let layout = Layout::known("criteo").expect("known by name");
    let mut whole = Batch::default();
    for file in discover(&[pattern.display().to_string()], None).expect("it was made") {
        let (batch, bad) = read_file(made, &file, &layout).expect("it can be read");
        assert_eq!(bad, []);
        whole.records += batch.records;
        whole.labels.extend(batch.labels);
        whole.numeric.extend(batch.numeric);
        whole.ids.extend(batch.ids);
    }
    whole
}

#[test]
fn both_formats_hold_the_same_records() {
    let made = Made::new();
    let (tsv, parquet) =
        (options(&made, "tsv", SynthFormat::Tsv), options(&made, "pq", SynthFormat::Parquet));
    let truth = criteo(&tsv, &mut |_| {}).expect("it can be made");
    assert_eq!(truth, criteo(&parquet, &mut |_| {}).expect("it can be made"));
    assert_eq!((truth.train.rows, truth.test.as_ref().expect("asked for").rows), (5_000, 1_000));
    for split in ["train", "test"] {
        let (a, b) = (read_split(&made, &tsv, split), read_split(&made, &parquet, split));
        assert_eq!((&a.labels, &a.numeric), (&b.labels, &b.numeric));
        // The ids are 8 hexadecimal digits in one and integers in the other: other numbers, the same pattern.
        let same = |ids: &[u64], field: usize, i: usize, j: usize| ids[i * 26 + field] == ids[j * 26 + field];
        for n in 0..a.records * 26 - 26 {
            let (record, field) = (n / 26, n % 26);
            assert_eq!(same(&a.ids, field, record, record + 1), same(&b.ids, field, record, record + 1));
        }
    }
}

#[test]
fn the_same_options_give_the_same_bytes_whatever_the_threads() {
    let made = Made::new();
    let (a, mut b) = (options(&made, "a", SynthFormat::Tsv), options(&made, "b", SynthFormat::Tsv));
    b.threads = 1;
    let mut done = Vec::new();
    criteo(&a, &mut |rows| done.push(rows)).expect("it can be made");
    criteo(&b, &mut |_| {}).expect("it can be made");
    assert_eq!(done.last(), Some(&6_000));
    let mut names: Vec<String> = fs::read_dir(&a.out)
        .expect("it was made")
        .map(|entry| entry.expect("listed").file_name().into_string().expect("ASCII"))
        .collect();
    names.sort();
    assert_eq!(names, ["test-000.tsv", "train-000.tsv", "train-001.tsv", "train-002.tsv", "truth.json"]);
    for name in names {
        assert_eq!(
            fs::read(a.out.join(&name)).expect("read"),
            fs::read(b.out.join(&name)).expect("read"),
            "{name}"
        );
    }
}

#[test]
fn how_many_files_there_are_does_not_change_the_records() {
    let made = Made::new();
    let (three, mut one) = (options(&made, "a", SynthFormat::Tsv), options(&made, "b", SynthFormat::Tsv));
    one.files = 1;
    assert_eq!(
        criteo(&three, &mut |_| {}).expect("made").distinct_ids,
        criteo(&one, &mut |_| {}).expect("made").distinct_ids
    );
    assert_eq!(read_split(&made, &three, "train"), read_split(&made, &one, "train"));
    one.seed = 6;
    criteo(&one, &mut |_| {}).expect("it is made over the old");
    assert_ne!(read_split(&made, &three, "train"), read_split(&made, &one, "train"));
}

#[test]
fn the_truth_lies_beside_the_data() {
    let made = Made::new();
    let options = options(&made, "a", SynthFormat::Tsv);
    let truth = criteo(&options, &mut |_| {}).expect("it can be made");
    let pattern = |name: &str| [options.out.join(name).display().to_string()];
    assert_eq!(Truth::beside(&pattern("train-*.tsv")), Some(truth));
    assert_eq!(Truth::beside(&pattern("nothing*")), None);
    made.file("x.csv", "x");
    assert_eq!(Truth::beside(&[made.path("x.csv").display().to_string()]), None);
}

#[test]
fn leftovers_of_other_data_are_not_mixed_with_the_new() {
    let made = Made::new();
    let mut options = options(&made, "a", SynthFormat::Tsv);
    criteo(&options, &mut |_| {}).expect("it can be made");
    options.files = 2;
    let message = made.message(criteo(&options, &mut |_| {}).expect_err("train-002.tsv is in the way"));
    assert!(
        message.starts_with("cannot use a/train-002.tsv as data: it is left from other data"),
        "{message}"
    );
    options.files = 0;
    assert!(criteo(&options, &mut |_| {}).is_err());
}

#[test]
fn a_directory_that_cannot_be_written_is_told() {
    let made = Made::new();
    made.file("taken.csv", "x");
    let options = SynthOptions { out: made.path("taken.csv"), ..options(&made, "a", SynthFormat::Tsv) };
    let message = made.message(criteo(&options, &mut |_| {}).expect_err("a file is there"));
    assert_eq!(message, "cannot make directory taken.csv");
}
