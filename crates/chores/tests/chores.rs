//! The chores as a person meets them. `cargo xtask` has this test built for the sake of the program.

use std::process::Command;

#[test]
fn the_help_names_every_chore() {
    let told = Command::new(env!("CARGO_BIN_EXE_chores")).arg("--help").output().expect("it runs");
    let help = String::from_utf8(told.stdout).expect("help is text");
    assert!(told.status.success() && help.contains("Usage: cargo xtask"), "{help}");
    for chore in ["test", "bucket", "bench", "kube", "experiment", "image"] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(chore)), "{chore}: {help}");
    }
}
