//! `config show`: every value and who said it.

use super::world::{World, said};

#[test]
fn every_setting_is_shown_with_its_source() {
    let world = World::new();
    let file = world.job("ctr", "train: { batch: 128 }");
    let mut command = world.command(&["config", "show", &file, "--workers", "3", "--set", "train.epochs=2"]);
    command.env("ELASTICDL_TRAIN_LEARNING_RATE", "0.5").env("ELASTICDL_TRAIN_BATCH", "256");
    insta::assert_snapshot!(said(&mut command).ok());
}

#[test]
fn settings_as_json_have_value_source_and_help() {
    let world = World::new();
    let file = world.job("ctr", "train: { batch: 128 }");
    let text = world.run(&["config", "show", &file, "--json"]).ok();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&all["train.batch"]["value"], &all["train.batch"]["source"]), (&128.into(), &"file".into()));
    assert_eq!(all["output"]["value"], serde_json::Value::Null);
    assert!(all["train.epochs"]["help"].as_str().unwrap().contains("Passes"));
}

#[test]
fn a_mistyped_variable_is_warned_of() {
    let world = World::new();
    let file = world.job("ctr", "");
    let mut command = world.command(&["config", "show", &file]);
    let warned = said(command.env("ELASTICDL_TRAIN_BACH", "5")).stderr;
    assert!(
        warned.contains("ELASTICDL_TRAIN_BACH is no setting; did you mean ELASTICDL_TRAIN_BATCH?"),
        "{warned}"
    );
}
