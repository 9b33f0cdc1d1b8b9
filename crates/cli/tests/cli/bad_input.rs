//! Bad input that can be known before anything starts: a clear error, exit code 1, nothing lost.

use std::fs;
use std::net::TcpListener;

use super::world::World;

/// A record of the Criteo layout.
fn record(label: &str, number: &str) -> String {
    format!("{label}\t{number}{}{}", "\t1".repeat(12), "\tab".repeat(26))
}

/// A world with two small files of good records.
fn world() -> World {
    let world = World::new();
    let lines: String = (0..50).map(|i| record(&(i % 2).to_string(), &i.to_string()) + "\n").collect();
    world.write("data/train-0.tsv", &lines);
    world.write("data/test-0.tsv", &lines);
    world
}

/// What `train` says to a job; nothing of it may have been started.
fn refusal(world: &World, file: &str, args: &[&str]) -> String {
    let args = [&["train", file][..], args].concat();
    let text = world.run(&args).failed(1);
    assert!(!world.job_dir("ctr").join("job.json").exists(), "nothing is submitted");
    world.neutral(&text)
}

#[test]
fn a_missing_job_file_and_one_that_is_no_job() {
    let world = world();
    insta::assert_snapshot!("job_file_missing", refusal(&world, "nope.yaml", &[]));
    world.write("list.yaml", "- a\n");
    insta::assert_snapshot!("job_file_no_mapping", refusal(&world, "list.yaml", &[]));
}

#[test]
fn every_wrong_setting_is_told_at_once() {
    let world = world();
    let text = "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: { name: ctr }\nspec:\n  \
                model: { zoo: deepfn }\n  data: { train: data/train-*.tsv, layout: criteo, bach: 3 }\n  \
                train: { batch: 0, learning_rate: -0.1, optimizer: adamm }\n  servers: { count: 9, partitions: 8 }\n";
    world.write("ctr.yaml", text);
    insta::assert_snapshot!(refusal(&world, "ctr.yaml", &["--epochs", "none"]));
}

#[test]
fn missing_and_empty_data_files() {
    let world = world();
    let file = world.job("ctr", "");
    fs::remove_file(world.path("data/test-0.tsv")).unwrap();
    insta::assert_snapshot!("data_missing", refusal(&world, &file, &[]));
    world.write("data/test-0.tsv", "");
    insta::assert_snapshot!("data_empty", refusal(&world, &file, &[]));
    world.write("data/test-0.tsv", "\n\n");
    insta::assert_snapshot!("data_blank", refusal(&world, &file, &[]));
}

#[test]
fn a_layout_that_does_not_fit_is_found_in_the_first_record() {
    let world = world();
    let file = world.job("ctr", "");
    world.write("data/train-0.tsv", "1\t2\t3\n");
    insta::assert_snapshot!("columns_wrong", refusal(&world, &file, &[]));
    world.write("data/train-0.tsv", &record("1", "many"));
    insta::assert_snapshot!("number_wrong", refusal(&world, &file, &[]));
    world.write("data/train-0.tsv", &record("yes", "1"));
    insta::assert_snapshot!("label_wrong", refusal(&world, &file, &[]));
}

#[test]
fn a_column_that_the_file_does_not_have() {
    let world = World::new();
    world.write("people.csv", "age,town,clicked\n30,Bonn,1\n");
    let data =
        "data: { train: people.csv, layout: custom, label: click, numeric: [age], categorical: [city] }";
    let head = "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: { name: ctr }\n";
    world.write("ctr.yaml", &format!("{head}spec:\n  model: {{ zoo: lr }}\n  {data}\n"));
    insta::assert_snapshot!(refusal(&world, "ctr.yaml", &[]));
}

#[test]
fn data_to_judge_by_that_is_trained_on() {
    let world = world();
    let file = world.job("ctr", "");
    insta::assert_snapshot!(refusal(&world, &file, &["--set", "data.validate=data/train-0.tsv"]));
}

#[test]
fn places_that_cannot_be_written_to_are_found_before_training() {
    let world = world();
    let file = world.job("ctr", "");
    world.write("taken", "a file");
    insta::assert_snapshot!("output_below_a_file", refusal(&world, &file, &["--output", "taken/model"]));
    insta::assert_snapshot!("output_unwritable", refusal(&world, &file, &["--output", "/proc/model"]));
    world.write("photos/cat.jpg", "miau");
    insta::assert_snapshot!("output_foreign", refusal(&world, &file, &["--output", "photos"]));
    let set = ["--set", "checkpoint.dir=/proc/checkpoints"];
    insta::assert_snapshot!("checkpoints_unwritable", refusal(&world, &file, &set));
}

#[test]
fn a_full_disk_is_found_before_training() {
    // A file system without room that exists everywhere: a device node accepts no directory, so a
    // small tmpfs would be needed; only a privileged user can mount one.
    let world = world();
    let mount = world.path("full");
    fs::create_dir_all(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k", "none"])
        .arg(&mount)
        .stderr(std::process::Stdio::null())
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user cannot mount a small file system");
        return;
    }
    let file = world.job("ctr", "");
    let small = refusal(&world, &file, &["--output", "full/model"]);
    fs::write(mount.join("filler"), vec![0; 128 << 10]).unwrap_err();
    let full = refusal(&world, &file, &["--output", "full/model"]);
    let unmounted = std::process::Command::new("umount").arg(&mount).status().unwrap();
    assert!(unmounted.success());
    assert!(small.contains("are free on this disk"), "{small}");
    assert!(full.contains("the disk is full") || full.contains("No space left"), "{full}");
}

#[test]
fn a_port_in_use_is_told() {
    let world = world();
    let file = world.job("ctr", "");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = world.run(&["train", &file, "--listen", &address]).failed(1);
    assert!(
        text.contains(&format!("the master cannot listen at {address}: Address already in use")),
        "{text}"
    );
    assert!(text.contains("hint: another process listens there"), "{text}");
}

#[test]
fn unknown_jobs_models_and_processes() {
    let world = world();
    insta::assert_snapshot!("job_unknown", world.neutral(&world.run(&["status", "nope"]).failed(1)));
    let args = ["predict", "--model", "nowhere", "--data", "data/test-0.tsv"];
    insta::assert_snapshot!("model_missing", world.neutral(&world.run(&args).failed(1)));
    let worker = world.run(&["worker", "--master", "127.0.0.1:1", "--token-file", "nope", "--id", "0"]);
    insta::assert_snapshot!("token_file_missing", world.neutral(&worker.failed(1)));
}

#[test]
fn a_table_that_the_model_does_not_have() {
    let world = world();
    let file = world.job("ctr", "tables: { embeding: { l2: 1e-6 } }");
    let told = refusal(&world, &file, &[]);
    assert!(told.contains("spec.tables.embeding: the model"), "{told}");
    assert!(told.contains("hint: did you mean embedding?"), "{told}");
}

/// Goal: what a schedule needs to know is asked for before anything starts.
#[test]
fn a_schedule_over_compressed_text() {
    let world = world();
    let file = world.job("ctr", "");
    fs::rename(world.path("data/train-0.tsv"), world.path("data/plain.tsv")).unwrap();
    let plain = fs::read(world.path("data/plain.tsv")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, &plain).unwrap();
    fs::write(world.path("data/train-0.tsv.gz"), packed.finish().unwrap()).unwrap();
    let set = ["--set", "data.train=data/train-*.tsv.gz", "--set", "train.warmup_steps=5"];
    let told = refusal(&world, &file, &set);
    assert!(told.contains("train-0.tsv.gz is compressed"), "{told}");
}
