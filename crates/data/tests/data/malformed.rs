//! What is wrong with a record is said with file, line, column and reason.

use elasticdl_data::head;
use elasticdl_spec::Layout;
use elasticdl_spec::layout::{Bucket, Scale};

use crate::made::{Made, plain, read, read_file};

fn messages(text: &str, layout: &Layout) -> Vec<String> {
    let (made, file) = Made::with("some.csv", text);
    let (_, bad) = read_file(&made, &file, layout).expect("the file can be read");
    bad.into_iter().map(|bad| made.message(bad)).collect()
}

#[test]
fn every_kind_of_damage_names_line_column_and_what_was_found() {
    let text = "1,2,a\n1,2\n1,2,a,b\n1,x2,a\n2,3,a\n,3,a\n1,1e39,a\n\n1,nan,a\n0,4,ok\n";
    assert_eq!(
        messages(text, &plain()),
        [
            "some.csv, line 2: 2 columns found, 3 expected",
            "some.csv, line 3: 4 columns found, 3 expected",
            "some.csv, line 4, column 2 (n): \"x2\" is no finite number",
            "some.csv, line 5, column 1 (label): the label is \"2\", neither 0 nor 1",
            "some.csv, line 6, column 1 (label): the label is missing",
            "some.csv, line 7, column 2 (n): \"1e39\" is too large a number",
            "some.csv, line 9, column 2 (n): \"nan\" is no finite number",
        ]
    );
}

#[test]
fn quotes_that_do_not_match_are_told() {
    let mut layout = plain();
    layout.text.quotes = true;
    layout.text.header = true;
    assert_eq!(
        messages("label,n,c\n0,1,\"a\nb\"\n1,2,\"a\"b\n1,3,\"\n", &layout),
        [
            "some.csv, line 4: the quotes of column 3 don't match",
            "some.csv, line 5: the quotes of column 3 don't match"
        ]
    );
}

#[test]
fn long_values_are_not_shown_in_full() {
    let told = messages(&format!("0,{},c\n", "x".repeat(5000)), &plain());
    assert!(told[0].len() < 200 && told[0].contains("xxx\"… is no finite number"), "{}", told[0]);
}

#[test]
fn lines_are_counted_from_the_start_of_the_file_in_every_shard() {
    let text: String =
        (0..30).map(|n| if n == 25 { "oops\n\n".into() } else { format!("\n0,{n},c\n") }).collect();
    let (made, file) = Made::with("some.csv", text);
    let shards = made.shards(&file, &plain(), 4).expect("the file can be cut");
    let (batch, bad) = read(&shards, &plain()).expect("the file can be read");
    assert_eq!(batch.records, 29);
    let told: Vec<String> = bad.into_iter().map(|bad| made.message(bad)).collect();
    assert_eq!(told, ["some.csv, line 51: 1 columns found, 3 expected"]);
}

#[test]
fn columns_that_are_not_used_may_hold_anything() {
    let mut layout = plain();
    layout.columns = ["junk", "label", "n", "c"].map(String::from).into();
    assert_eq!(messages("?!,0,1,a\n,1,2,b\n", &layout), [""; 0]);
}

#[test]
fn labels_may_be_words() {
    let mut layout = plain();
    layout.label.as_mut().expect("it has a label").positive = vec!["yes".into(), "1".into()];
    let (made, file) = Made::with("some.csv", "yes,0,a\nno,1,a\n1,2,a\n0,3,a\n,4,a\n");
    let (batch, bad) = read_file(&made, &file, &layout).expect("the file can be read");
    assert_eq!(batch.labels, [1.0, 0.0, 1.0, 0.0]);
    assert_eq!(made.message(&bad[0]), "some.csv, line 5, column 1 (label): the label is missing");
    let (made, file) = Made::with("some.csv", "1.0,0,a\n0.0,1,a\n");
    assert_eq!(read_file(&made, &file, &plain()).expect("it can be read").0.labels, [1.0, 0.0]);
}

#[test]
fn the_head_shows_what_the_system_sees() {
    let mut layout = plain();
    layout.text.header = true;
    layout.text.trim = true;
    layout.text.missing = vec!["?".into()];
    layout.numeric[0].scale = Scale::Standard { mean: 1.0, deviation: 2.0 };
    let made = Made::new();
    made.file("a.csv", "c,label,n\n x y , 1, 5\n?,0,?\n");
    made.file("b.csv", "c,label,n\nz,oops,1\nz,0,1\nz,1,3\n");
    let pattern = [made.path("*.csv").display().to_string()];
    let shown = head(&pattern, None, &layout, 4).expect("the files are fine");
    let values = |values: [&str; 3]| -> Vec<(String, String)> {
        ["label", "n", "c"].into_iter().zip(values).map(|(a, b)| (a.to_string(), b.to_string())).collect()
    };
    assert_eq!(shown[0].values, values(["1", "2", "x y"]));
    assert_eq!(shown[1].values, values(["0", "", ""]));
    assert_eq!(shown[2].values, []);
    let bad = shown[2].bad.clone().expect("it has no label");
    assert_eq!(made.message(bad), "b.csv, line 2, column 2 (label): the label is \"oops\", neither 0 nor 1");
    assert_eq!(shown[3].values, values(["0", "0", "z"]));
    assert_eq!(shown.len(), 4);
}

#[test]
fn steps_need_numbers() {
    let mut layout = plain();
    layout.categorical[0].bucket = Bucket::Width { width: 5.0 };
    let (made, file) = Made::with("some.csv", "0,0,0\n0,0,4.9\n0,0,5\n0,0,\n0,0,old\n0,0,-1\n");
    let (batch, bad) = read_file(&made, &file, &layout).expect("the file can be read");
    let ids = &batch.ids;
    assert_eq!(ids[0], ids[1]);
    assert!(ids[1] != ids[2] && ids[2] != ids[3] && ids[4] != ids[0]);
    assert_eq!(made.message(&bad[0]), "some.csv, line 5, column 3 (c): \"old\" is no finite number");
    layout.categorical[0].bucket = Bucket::Log { steps: 2.0 };
    let (batch, _) = read_file(&made, &file, &layout).expect("the file can be read");
    assert_eq!(batch.ids[1], batch.ids[2]);
    assert_ne!(batch.ids[0], batch.ids[1]);
}
