//! `cargo xtask`: builds the chores as tests are built, and runs them.
//!
//! Cargo chooses the features of dependencies for what it is asked to build. Asked for the chores alone it would build
//! most of the tree with other features than the tests need, and then once more for those. So it is asked for a test of
//! the whole workspace that needs the chores' program.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use xtask::cargo;

fn main() -> ExitCode {
    match run() {
        Ok(failed) => failed,
        Err(error) => {
            eprintln!("error: the chores cannot be run: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> io::Result<ExitCode> {
    let program = std::env::current_exe()?.with_file_name("chores");
    if !build(&program)? {
        return Ok(ExitCode::FAILURE);
    }
    Err(Command::new(program).args(std::env::args_os().skip(1)).exec())
}

/// Silent where there is little to do.
fn build(program: &Path) -> io::Result<bool> {
    let mut build = cargo();
    build.args(["test", "--workspace", "--locked", "--no-run", "--test", "chores"]);
    if program.exists() {
        build.arg("--quiet");
    }
    let built = build.status().map_err(|e| io::Error::other(format!("running cargo: {e}")))?;
    Ok(built.success())
}
