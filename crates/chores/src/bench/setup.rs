//! What a run of training needs: the release binary, the peers' virtual environment, the data. Made once, then cached.
//!
//! They lie in the [cache](crate::cache).

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};

use super::systems::System;
use super::{Source, TrainBench};
use crate::cache;

/// Raise it when the synthetic data changes, so that cached files are not used any more.
const DATA_VERSION: u32 = 1;

/// Everything that is ready before the first measurement.
#[derive(Debug)]
pub struct Setup {
    /// The workspace.
    pub root: PathBuf,
    /// `target/release/elasticdl`
    pub binary: PathBuf,
    /// The Python that has the peers' packages; `None` where no peer is run.
    pub python: Option<PathBuf>,
    /// Compute threads of every system.
    pub threads: u32,
    /// Put before every command: keeps a system to as many cores as it has threads.
    pub pin: Vec<OsString>,
    text_data: PathBuf,
    parquet_data: PathBuf,
}

impl Setup {
    /// Builds, installs and generates what is not there yet.
    pub fn prepare(options: &TrainBench, systems: &[System]) -> Result<Setup> {
        let root = cache::workspace_root()?;
        let cache = cache::directory()?;
        let binary = release_build(&root, &["--package", "elasticdl-cli"], "elasticdl")?;
        let peers = systems.iter().any(|&system| system != System::Ours);
        let python = if peers { Some(peers_python(&root, &cache)?) } else { None };
        let data = |format| synthetic_data(&binary, &cache, options, format);
        let (text_data, parquet_data) = (data("tsv")?, data("parquet")?);
        let pin = pin(options.threads);
        Ok(Setup { root, binary, python, threads: options.threads, pin, text_data, parquet_data })
    }

    /// The files of a case, as a glob.
    pub fn data(&self, source: Source) -> PathBuf {
        match source {
            Source::Csv => self.text_data.join("train-*.tsv"),
            Source::Parquet | Source::Memory => self.parquet_data.join("train-*.parquet"),
        }
    }

    /// A command that runs on no more cores than it has threads.
    pub fn pinned(&self, program: &Path) -> Command {
        pinned(&self.pin, program)
    }
}

/// Builds a program of the workspace for release and tells where it is.
pub fn release_build(root: &Path, target: &[&str], program: &str) -> Result<PathBuf> {
    let mut build = xtask::cargo();
    build.current_dir(root).args(["build", "--release"]).args(target);
    succeed(build.stdout(Stdio::null()), &format!("build {program}"))?;
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
    let program = target.join("release").join(program);
    ensure!(program.is_file(), "the build left no {}", program.display());
    Ok(program)
}

/// `benches/peers/setup.sh` installs what is missing and prints the interpreter's path as its last line.
pub fn peers_python(root: &Path, cache: &Path) -> Result<PathBuf> {
    eprintln!("installing the peers (TensorFlow, PyTorch), unless they are there");
    let output = Command::new("bash")
        .arg(root.join("benches/peers/setup.sh"))
        .arg(cache.join("peers"))
        .stderr(Stdio::inherit())
        .output()
        .context("run benches/peers/setup.sh")?;
    ensure!(output.status.success(), "benches/peers/setup.sh failed: {}", output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let path = printed.lines().last().context("benches/peers/setup.sh printed no path")?;
    Ok(PathBuf::from(path))
}

/// Generates into a neighbouring directory and renames it, so that a broken run leaves nothing half done.
fn synthetic_data(binary: &Path, cache: &Path, options: &TrainBench, format: &str) -> Result<PathBuf> {
    let done = cache.join(format!("bench/criteo-v{DATA_VERSION}-{}-{format}", options.rows));
    if options.fresh_data && done.exists() {
        fs::remove_dir_all(&done).with_context(|| format!("remove {}", done.display()))?;
    }
    if done.exists() {
        return Ok(done);
    }
    eprintln!("making {} records as {format} in {}", options.rows, done.display());
    let partial = done.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial).with_context(|| format!("remove {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let mut synth = Command::new(binary);
    synth.args(["data", "synth", "criteo", "--rows", &options.rows.to_string(), "--format", format, "--out"]);
    succeed(synth.arg(&partial).stdout(Stdio::null()), "make the data")?;
    fs::rename(&partial, &done).with_context(|| format!("rename {}", partial.display()))?;
    Ok(done)
}

/// What is put before a command to keep it to so many cores; nothing where the machine has no more.
pub fn pin(threads: u32) -> Vec<OsString> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if cores <= threads as usize {
        return Vec::new();
    }
    if Command::new("taskset").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("warning: no taskset here, so systems may use more than {threads} of {cores} cores");
        return Vec::new();
    }
    ["taskset".into(), "--cpu-list".into(), format!("0-{}", threads - 1).into()].into()
}

/// A command with that put before it.
pub fn pinned(pin: &[OsString], program: &Path) -> Command {
    match pin.split_first() {
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
        None => Command::new(program),
    }
}

pub fn succeed(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{what}: start {:?}", command.get_program()))?;
    ensure!(status.success(), "{what}: {:?} failed: {status}", command.get_program());
    Ok(())
}
