//! Chores of the project: `cargo xtask test`, `cargo xtask bench` and `cargo xtask kube`.
#![expect(clippy::disallowed_methods, reason = "it tells how long its steps take")]

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

mod bench;
mod cache;
mod kube;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the project.")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Do every set-up and run every format check, lint and test.
    Test,
    /// Measure against peers.
    #[command(subcommand)]
    Bench(Bench),
    /// Run a real Kubernetes cluster on this machine, for tests.
    #[command(subcommand)]
    Kube(kube::Kube),
}

#[derive(Subcommand)]
enum Bench {
    /// Train DeepFM with ours, TensorFlow and PyTorch, interleaved, and write docs/benchmarks.md.
    Train(bench::TrainBench),
}

fn main() -> Result<()> {
    match Args::parse().chore {
        Chore::Test => test(),
        Chore::Bench(Bench::Train(options)) => bench::train(options),
        Chore::Kube(chore) => kube::run(chore),
    }
}

/// Everything CI does, cheapest first.
fn test() -> Result<()> {
    for component in ["rustfmt", "clippy"] {
        ensure_component(component)?;
    }
    step("format", &["fmt", "--all", "--check"])?;
    step("lint", &["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny", "warnings"])?;
    step("test", &["test", "--workspace", "--locked", "--no-fail-fast"])?;
    Ok(())
}

/// A component of the toolchain, installed where it is missing.
fn ensure_component(component: &str) -> Result<()> {
    let tool = if component == "rustfmt" { "fmt" } else { component };
    let there =
        Command::new(env!("CARGO")).args([tool, "--version"]).output().is_ok_and(|out| out.status.success());
    if there {
        return Ok(());
    }
    let status =
        Command::new("rustup").args(["component", "add", component]).status().with_context(|| {
            format!("{component} is missing, and rustup, which would install it, cannot be run")
        })?;
    if !status.success() {
        bail!("rustup could not install {component}");
    }
    Ok(())
}

/// Runs cargo and says how long it took.
fn step(name: &str, arguments: &[&str]) -> Result<()> {
    println!("== {name}: cargo {}", arguments.join(" "));
    let began = Instant::now();
    let status =
        Command::new(env!("CARGO")).args(arguments).status().with_context(|| format!("running {name}"))?;
    if !status.success() {
        bail!("{name} failed");
    }
    println!("== {name}: done in {:.0} s", began.elapsed().as_secs_f64());
    Ok(())
}
