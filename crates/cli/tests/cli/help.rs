//! Help texts, and what a wrong command line is told.

use super::world::World;

#[test]
fn every_command_explains_itself() {
    let world = World::new();
    let commands: [&[&str]; 31] = [
        &[],
        &["train"],
        &["resume"],
        &["jobs"],
        &["status"],
        &["top"],
        &["logs"],
        &["scale"],
        &["stop"],
        &["audit"],
        &["chaos"],
        &["export"],
        &["evaluate"],
        &["predict"],
        &["data"],
        &["data", "synth"],
        &["data", "head"],
        &["config"],
        &["config", "show"],
        &["image"],
        &["zoo"],
        &["zoo", "init"],
        &["zoo", "build"],
        &["zoo", "push"],
        &["operator"],
        &["operator", "crd"],
        &["master"],
        &["ps"],
        &["worker"],
        &["member"],
        &["member", "run"],
    ];
    for command in commands {
        let mut args = command.to_vec();
        args.push("--help");
        let name = if command.is_empty() { "elasticdl".to_string() } else { command.join("_") };
        insta::assert_snapshot!(format!("help_{name}"), world.run(&args).ok());
    }
}

#[test]
fn a_wrong_command_line_is_the_users_fault_and_says_what_would_be_right() {
    let world = World::new();
    let unknown = world.run(&["trian", "x.yaml"]).failed(1);
    assert!(unknown.contains("'train'"), "{unknown}");
    let set = world.run(&["train", "x.yaml", "--set", "train.batch"]).failed(1);
    assert!(set.contains("write it as PATH=VALUE"), "{set}");
    assert!(world.run(&["--version"]).ok().starts_with("elasticdl "));
}
