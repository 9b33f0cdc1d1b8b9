//! `cargo xtask bench ps`: the parameter server against its peers, in turn and in one run.
//!
//! This file says what is run. What is wanted is in [`figures`](super::figures), the measuring itself in the examples
//! `engine` (of the server), `dedup` and `apart` (of the worker), which take turns with their peers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Value, json};

use super::document::{self, median};
use super::figures::{self, Figure, Measured};
use super::machine::{Machine, Versions, load_average};
use super::setup::{peers_python, pin, pinned, release_build, succeed};
use super::systems::last_line;
use crate::daemon::Daemon;
use crate::{cache, packages};

const QUICK_PAIRS: u32 = 3;
/// The document has no medians of fewer.
const DOCUMENT_PAIRS: u32 = 9;
/// 2 GiB of rows of dim 16 with Adagrad's slots.
const MEMORY_ROWS: u32 = 1 << 24;
const LARGE_ROWS: u32 = 100_000_000;
/// Cores of worker and server.
const CORES: u32 = 2;

/// Options of `cargo xtask bench ps`.
#[derive(Debug, Args)]
pub struct PsBench {
    /// Print the result as one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// How often ours and a peer are measured in turn; figures are medians over the pairs. With fewer than 9
    /// docs/benchmarks.md is left alone
    #[arg(long, default_value_t = DOCUMENT_PAIRS, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// At most 3 pairs and small tables, to see that everything works; docs/benchmarks.md is left alone
    #[arg(long)]
    quick: bool,
}

impl PsBench {
    fn pairs(&self) -> u32 {
        if self.quick { self.pairs.min(QUICK_PAIRS) } else { self.pairs }
    }
}

/// Measures everything and prints the comparison.
pub fn ps(options: &PsBench) -> Result<()> {
    let bench = Bench::prepare()?;
    let load = load_average();
    let measured = bench.measure(options)?;
    let figures = figures::figures(&measured)?;
    let report =
        Report { options, machine: Machine::here(), versions: bench.versions(&measured), load, figures };
    if options.json {
        let summary = report.summary(&measured);
        println!("{}", serde_json::to_string_pretty(&summary).context("write the report as JSON")?);
    } else {
        println!("{}", figures::table(&report.figures));
        println!("{}", report.reached());
    }
    let too_little = match options {
        PsBench { quick: true, .. } => Some("small tables say nothing about large ones"),
        PsBench { pairs: ..DOCUMENT_PAIRS, .. } => Some("a few pairs are no measurement"),
        _ => None,
    };
    if let Some(reason) = too_little {
        eprintln!("{reason}; docs/benchmarks.md is left alone");
        return Ok(());
    }
    document::write_section(&bench.root, "cargo xtask bench ps", &report.section())
}

/// The programs that measure.
struct Bench {
    root: PathBuf,
    cache: PathBuf,
    engine: PathBuf,
    dedup: PathBuf,
    apart: PathBuf,
    python: PathBuf,
}

impl Bench {
    /// Builds and installs what is not there yet.
    fn prepare() -> Result<Bench> {
        let (root, cache) = (cache::workspace_root()?, cache::directory()?);
        let example = |package, name| {
            release_build(&root, &["--package", package, "--example", name], &format!("examples/{name}"))
        };
        let engine = example("elasticdl-ps", "engine")?;
        let (dedup, apart) = (example("elasticdl-worker", "dedup")?, example("elasticdl-worker", "apart")?);
        packages::ensure_installed(&["redis-server"], "the benchmark")?;
        let python = peers_python(&root, &cache)?;
        Ok(Bench { root, cache, engine, dedup, apart, python })
    }

    fn measure(&self, options: &PsBench) -> Result<Measured> {
        let pairs = options.pairs();
        let usual_or = |usual, small| if options.quick { small } else { usual };
        let served = usual_or(1_000_000, 100_000);
        let rows = usual_or(MEMORY_ROWS, 500_000);
        // The time of a round hardly depends on how much there is to write or to move.
        let loads = usual_or(pairs, 1);
        let redis = redis()?;
        let narrow = self.engine(&format!("served {pairs} 16 {served} {}", redis.address))?;
        drop(redis);
        Ok(Measured {
            narrow,
            wide: self.engine(&format!("served {pairs} 128 {served}"))?,
            dedup: self.dedup(pairs)?,
            memory: self.engine(&format!("memory {pairs} {rows}"))?,
            large: self.engine(&format!("large {pairs} {}", usual_or(LARGE_ROWS, 2_000_000)))?,
            checkpoint: self.engine(&format!("checkpoint {pairs} {rows}"))?,
            loaded: self.engine(&format!("loaded {loads} {rows}"))?,
            moving: self.engine(&format!("moving {pairs} {rows} {loads}"))?,
            apart: self.apart(pairs, usual_or(5, 1), usual_or(64, 8))?,
        })
    }

    /// Runs the engine.
    fn engine(&self, arguments: &str) -> Result<Value> {
        eprintln!("measuring: engine {arguments}");
        let mut command = Command::new(&self.engine);
        // The cache is on a disk, which cannot be said of every directory for temporary files.
        command.args(arguments.split(' ')).env("TMPDIR", self.scratch()?);
        told(&mut command)
    }

    /// Worker and server in one process and in two, in turn: so long each time, on so many batches.
    fn apart(&self, pairs: u32, seconds: u32, batches: u32) -> Result<Value> {
        eprintln!("measuring: apart {pairs} {seconds} {batches}");
        let arguments = [pairs, seconds, batches].map(|number| number.to_string());
        told(pinned(&pin(CORES), &self.apart).args(arguments))
    }

    /// The worker and numpy in turn, on the same ids.
    fn dedup(&self, pairs: u32) -> Result<Value> {
        eprintln!("measuring: deduplication");
        let scratch = tempfile::tempdir().context("make a directory for ids")?;
        let file = scratch.path().join("ids");
        succeed(Command::new(&self.dedup).arg("make").arg(&file), "make ids")?;
        let peer = self.root.join("benches/peers/unique.py");
        let mut rates = Vec::new();
        for _ in 0..pairs {
            let ours = told(Command::new(&self.dedup).arg("measure").arg(&file))?;
            let numpy = told(Command::new(&self.python).arg(&peer).arg(&file))?;
            rates.push((ids_per_second(&ours, &numpy)?, ids_per_second(&numpy, &ours)?));
        }
        let of = |f: &dyn Fn(&(f64, f64)) -> f64| median(rates.iter().map(f).collect());
        Ok(json!({
            "pairs": pairs,
            "million_ids_per_second": { "ours": of(&|r| r.0), "numpy": of(&|r| r.1) },
            "ours_of_numpy": of(&|r| r.0 / r.1),
        }))
    }

    fn scratch(&self) -> Result<PathBuf> {
        let scratch = self.cache.join("bench");
        fs::create_dir_all(&scratch).with_context(|| format!("create {}", scratch.display()))?;
        Ok(scratch)
    }

    fn versions(&self, measured: &Measured) -> Versions {
        let mut versions = Versions::default();
        versions.add("elasticdl", env!("CARGO_PKG_VERSION"));
        versions.ask("rustc", Path::new("rustc"));
        if let Some(redis) = measured.narrow["redis_version"].as_str() {
            versions.add("redis", redis);
        }
        versions.ask_python(&self.python, &["numpy"]);
        versions
    }
}

/// A Redis of its own, which keeps nothing.
fn redis() -> Result<Daemon> {
    const HOST: &str = "127.0.0.1";
    Daemon::start(HOST, |port| {
        let mut command = Command::new("redis-server");
        command.args(["--bind", HOST, "--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
        command
    })
}

/// The JSON that a program prints as its last line.
fn told(command: &mut Command) -> Result<Value> {
    let line = last_line(command)?;
    serde_json::from_str(&line)
        .with_context(|| format!("read the result of {:?} from {line:?}", command.get_program()))
}

/// A rate of deduplication, where both have found the same.
fn ids_per_second(told: &Value, other: &Value) -> Result<f64> {
    ensure!(told["unique"] == other["unique"], "{told} and {other} are not of the same ids");
    told["million_ids_per_second"].as_f64().with_context(|| format!("find a rate in {told}"))
}

/// All that is told.
struct Report<'a> {
    options: &'a PsBench,
    machine: Machine,
    versions: Versions,
    /// Load average of the last minute before the first measurement.
    load: f64,
    figures: Vec<Figure>,
}

impl Report<'_> {
    /// How many of the figures that something is wanted of are as good as wanted.
    fn reached(&self) -> String {
        let verdicts: Vec<bool> = self.figures.iter().filter_map(Figure::reached).collect();
        let reached = verdicts.iter().filter(|reached| **reached).count();
        format!("{reached} of {} reached.", verdicts.len())
    }

    fn summary(&self, measured: &Measured) -> Value {
        json!({
            "machine": self.machine,
            "versions": self.versions,
            "pairs": self.options.pairs(),
            "quick": self.options.quick,
            "load_at_start": self.load,
            "figures": self.figures.iter().map(Figure::summary).collect::<Vec<_>>(),
            "measured": {
                "memory": measured.memory, "large": measured.large, "narrow": measured.narrow,
                "wide": measured.wide, "checkpoint": measured.checkpoint, "loaded": measured.loaded,
                "moving": measured.moving, "apart": measured.apart, "dedup": measured.dedup,
            },
        })
    }

    fn section(&self) -> String {
        format!(
            "## The parameter server against its peers\n\n\
             Written by `cargo xtask bench ps`. Ours and each peer are measured in turn, {pairs} times; a figure is the\n\
             median, and a ratio the median of the ratios of neighbours. Ids are uniform, a batch has 40,000, and a table lies in\n\
             8 partitions. The ids of a batch come in the order of their hashes, about as workers send them, or where it\n\
             says so in no order. In one process, and for deduplication, time is that of one thread on a core; over\n\
             loopback and for checkpoints it is the clock's, with server and client as two threads. What is pulled,\n\
             pushed or gathered was so once before the clock starts, and memory for new rows is at hand: the host of a\n\
             virtual machine takes back what is free for some seconds.\n\n\
             The gather copies rows of a dense array by their number, 64 at a time, which it asks for ahead. The one\n\
             without pauses asks for another row with each that it copies, 96 ahead: the fastest that was found. Redis\n\
             has 64 bytes for each id and is asked with pipelined MGETs over one connection. Raw TCP sends the bytes of\n\
             the rows from one thread to another and asks for nothing; a push brings as many bytes of gradients, which are\n\
             applied before it is answered. numpy finds the unique ids with `return_inverse` and does not route them. The\n\
             checkpoint's peer writes as many bytes to one file on the same disk and syncs it.\n\n\
             While training: two threads of the servers' own process pull and push batches of uniform rows, partition\n\
             by partition, as fast as they can, without sockets. That is more than workers ask for, so what is done\n\
             beside it has no core to itself. They are left alone for 5 seconds before and after each checkpoint and\n\
             each move. What training loses is how many rows a second they do less meanwhile than alone. The longest\n\
             pull is the longest that the pull of one batch from all partitions took meanwhile, with all that it waited\n\
             for, less the longest of both stretches alone: the most of all rounds. More memory is how much more the\n\
             process had resident at its highest than before, with the rows: the most of all rounds as well. Checkpoints\n\
             are of all rows, not of what has changed. After all moves the audit of every partition is held against what\n\
             was pushed.\n\n\
             Moving partitions: 2 servers hold 2 GiB in 8 partitions, and a third takes over 2 of them, one from each,\n\
             one after the other. Raw TCP sends as many bytes as those have from one thread to another. The servers\n\
             are three in one process, each with its own socket, and without a master: what one writes down before\n\
             partitions are handed over is not in these figures.\n\n\
             Worker and server as processes: a DeepFM with 13 dense and 26 sparse fields, Adagrad, batch 4096, on\n\
             made-up records that are in memory before the clock starts. The worker has its own stages and 2 compute\n\
             threads. With one process the stages call the partitions; with two they ask a server over loopback.\n\
             Either way all threads share the same 2 cores.\n\n\
             {table}\n\
             {reached}\n\n\
             Machine: {machine}; load at the start {load:.2}.\n\
             Versions: {versions}.\n",
            pairs = self.options.pairs(),
            table = figures::table(&self.figures),
            reached = self.reached(),
            machine = self.machine,
            load = self.load,
            versions = self.versions,
        )
    }
}
