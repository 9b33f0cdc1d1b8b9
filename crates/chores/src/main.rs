//! Chores of the project: `cargo xtask test`, `bench`, `kube`, `experiment`, `bucket` and `image`.
#![expect(clippy::disallowed_methods, reason = "it tells how long its steps take")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use xtask::cargo;

mod bench;
mod bucket;
mod cache;
mod daemon;
mod experiment;
mod go;
mod image;
mod kube;
mod packages;
mod python;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Chores of the project.")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Do every set-up and run every format check, lint and test.
    Test {
        /// Only the tests that need a real cluster; the others must have been built.
        #[arg(long)]
        cluster: bool,
    },
    /// Run a command with an S3 server of its own, as the tests do: `cargo xtask bucket cargo test -p …`.
    Bucket {
        /// The command.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Measure against peers.
    #[command(subcommand)]
    Bench(Bench),
    /// Run a real Kubernetes cluster on this machine, for tests.
    #[command(subcommand)]
    Kube(kube::Kube),
    /// Repeat what was published of elastic jobs, on simulated nodes, and write docs/experiments.
    #[command(subcommand)]
    Experiment(experiment::Experiment),
    /// Build a static program and write a container image archive with it; no Docker needed.
    Image(image::Options),
}

#[derive(Subcommand)]
enum Bench {
    /// Train DeepFM with ours, TensorFlow and PyTorch, interleaved, and write docs/benchmarks.md.
    Train(bench::TrainBench),
    /// Measure the parameter server beside a gather, a hash map, Redis, raw TCP, numpy and a disk, and write
    /// docs/benchmarks.md.
    Ps(bench::PsBench),
}

fn main() -> Result<()> {
    match Args::parse().chore {
        Chore::Test { cluster: true } => on_a_cluster(),
        Chore::Test { cluster: false } => test(),
        Chore::Bucket { command } => with_a_bucket(&command),
        Chore::Bench(Bench::Train(options)) => bench::train(options),
        Chore::Bench(Bench::Ps(options)) => bench::ps(&options),
        Chore::Kube(chore) => kube::run(chore),
        Chore::Experiment(experiment) => experiment::run(&experiment),
        Chore::Image(options) => image::image(&options),
    }
}

/// Everything CI does, cheapest first.
fn test() -> Result<()> {
    for component in ["rustfmt", "clippy"] {
        ensure_component(component)?;
    }
    step("format", &["fmt", "--all", "--check"])?;
    step("lint", &["clippy", "--workspace", "--all-targets", "--locked", "--", "--deny", "warnings"])?;
    let bucket = bucket::Bucket::start(bucket::LOOPBACK)?;
    let python = python::if_it_can_be_had()?;
    let tests = ["test", "--workspace", "--locked", "--no-fail-fast"];
    println!("== test: cargo {}", tests.join(" "));
    timed("test", cargo().args(tests).envs(bucket.environment()).envs(python))?;
    on_a_cluster()
}

/// Runs a command beside an S3 server.
fn with_a_bucket(command: &[String]) -> Result<()> {
    let bucket = bucket::Bucket::start(bucket::LOOPBACK)?;
    let (program, arguments) = command.split_first().context("a command has a first word")?;
    let status = Command::new(program).args(arguments).envs(bucket.environment()).status();
    if !status.with_context(|| format!("running {program}"))?.success() {
        bail!("{program} failed");
    }
    Ok(())
}

/// The tests that need a real cluster: one of this machine, or the one that the environment names.
fn on_a_cluster() -> Result<()> {
    let tests = built_test("kube")?;
    if std::env::var_os("ELASTICDL_TEST_KUBECONFIG").is_some() {
        return run_test("test on the cluster of ELASTICDL_TEST_KUBECONFIG", &tests, &[]);
    }
    let scratch = tempfile::tempdir().context("making a directory for the image")?;
    let image = scratch.path().join("elasticdl.tar");
    // The tests before have built it, beside this very program.
    let program = std::env::current_exe().context("finding this program")?.with_file_name("elasticdl");
    let made = Command::new(&program).args(["image", "--out"]).arg(&image).status();
    if !made.with_context(|| format!("running {}", program.display()))?.success() {
        bail!("no image could be made");
    }
    let mut environment = kube::up_for_tests(&[image])?;
    let bucket = bucket::Bucket::start(kube::MACHINE_IP);
    let outcome = bucket.and_then(|bucket| {
        environment.extend(bucket.environment());
        run_test("test on a real cluster", &tests, &environment)
    });
    // What failed is worth more than what went wrong on the way down.
    outcome.and(kube::down_after_tests())?;
    experiment::short_forms(&program)
}

/// The program of an integration test. The whole workspace is built for it, as for all tests: asked for this one
/// alone cargo would choose other features of dependencies, and build them anew.
fn built_test(name: &str) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["test", "--workspace", "--locked", "--no-run", "--message-format", "json"]);
    let built = cargo.stderr(Stdio::inherit()).output().context("building the tests")?;
    if !built.status.success() {
        bail!("the tests could not be built");
    }
    let artifacts = built.stdout.split(|byte| *byte == b'\n');
    let artifacts = artifacts.filter_map(|line| serde_json::from_slice::<serde_json::Value>(line).ok());
    let found = artifacts.into_iter().find_map(|artifact| {
        let wanted = artifact["target"]["name"] == name && artifact["target"]["kind"][0] == "test";
        artifact["executable"].as_str().filter(|_| wanted).map(PathBuf::from)
    });
    found.with_context(|| format!("cargo built no test called {name}"))
}

/// Runs the tests of a program one after the other: they make room scarce for each other on purpose.
fn run_test(name: &str, program: &Path, environment: &[(&str, String)]) -> Result<()> {
    println!("== {name}: {}", program.display());
    let mut command = Command::new(program);
    command.args(["--test-threads", "1"]).envs(environment.iter().map(|(name, value)| (*name, value)));
    timed(name, &mut command)
}

/// A component of the toolchain, installed where it is missing.
fn ensure_component(component: &str) -> Result<()> {
    let tool = if component == "rustfmt" { "fmt" } else { component };
    let there = cargo().args([tool, "--version"]).output().is_ok_and(|out| out.status.success());
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
    timed(name, cargo().args(arguments))
}

fn timed(name: &str, command: &mut Command) -> Result<()> {
    let began = Instant::now();
    if !command.status().with_context(|| format!("running {name}"))?.success() {
        bail!("{name} failed");
    }
    println!("== {name}: done in {:.0} s", began.elapsed().as_secs_f64());
    Ok(())
}
