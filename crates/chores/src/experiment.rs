//! `cargo xtask experiment`: what the original project published of elastic jobs, measured with ours.
//!
//! Each experiment brings a cluster up, runs, ends it, and writes a table and a chart to `docs/experiments`. The
//! short forms are for the tests: smaller, faster, and nothing is written. Both fail where less comes out than is
//! promised.
#![expect(clippy::disallowed_methods, reason = "experiments run in real time")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};

use crate::cache;
use crate::kube::{Lent, MilliCpu};

mod chart;
mod convergence;
mod curves;
mod equivalence;
mod job;
mod kubelet;
mod lab;
mod load;
mod local;
mod online;
mod prometheus;
mod report;
mod sharing;
mod trace;
mod usage;
mod workers;

use chart::Chart;
use curves::Curves;
use lab::Lab;
use local::Local;
use report::Report;

/// How much more than others an experiment counts on this machine.
const PRIORITY: i32 = -10;

/// Experiments.
#[derive(Debug, Subcommand)]
pub enum Experiment {
    /// Two jobs share a cluster, as gangs and elastic.
    Sharing(Options),
    /// An online service grows and shrinks beside a job that takes what is left.
    Online(Options),
    /// The operator looks after hundreds of jobs, submitted several a second.
    Load(Common),
    /// AUC over steps with 4, 8 and 4 to 8 workers; needs no cluster.
    Convergence(Common),
    /// A job that finds out how many workers are of use, beside fixed sizes; needs no cluster.
    Workers(Common),
}

/// How large, and how.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Processors of the cluster.
    #[arg(long, value_enum, default_value = "24")]
    cpus: Cpus,
    #[command(flatten)]
    common: Common,
}

/// What all experiments can be told.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// A faster form for tests; writes nothing.
    #[arg(long)]
    short: bool,
    /// The program to try; by default the one beside this.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// The published sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Cpus {
    /// 24 CPU.
    #[value(name = "24")]
    Small,
    /// 320 CPU.
    #[value(name = "320")]
    Large,
}

/// What came of an experiment.
#[derive(Debug)]
pub struct Outcome {
    /// Names its files.
    name: String,
    report: Report,
    picture: Picture,
    /// What falls short.
    problems: Vec<String>,
}

/// What is drawn.
#[derive(Debug)]
pub enum Picture {
    /// Use over time.
    Areas(Chart),
    /// Figures over something.
    Curves(Curves),
}

impl Picture {
    fn svg(&self) -> String {
        match self {
            Picture::Areas(chart) => chart.svg(),
            Picture::Curves(curves) => curves.svg(),
        }
    }
}

/// Runs one.
pub fn run(experiment: &Experiment) -> Result<()> {
    // Whatever else this machine does is to say little in the outcome; everything started here inherits it. Without
    // the right to it things are as they are.
    let _ = rustix::process::nice(PRIORITY);
    let outcome = match experiment {
        Experiment::Sharing(Options { cpus, common }) => {
            let scale = sharing::Scale::of(*cpus, common.short);
            let cluster = Lent::simulated(scale.nodes, scale.cpus / u32::from(scale.nodes))?;
            on(cluster, common, async |lab, _| sharing::run(lab, &scale).await)
        }
        Experiment::Online(Options { cpus, common }) => {
            let scale = online::Scale::of(*cpus, common.short);
            let cluster = match scale.real {
                true => real_nodes(&common.program()?, &scale)?,
                false => Lent::simulated(scale.nodes, scale.cpus / u32::from(scale.nodes))?,
            };
            on(cluster, common, async |lab, _| online::run(lab, &scale).await)
        }
        Experiment::Load(common) => {
            let scale = load::Scale::of(common.short);
            let cluster = Lent::simulated(scale.nodes, scale.node_cpus)?;
            on(cluster, common, async |lab, cluster| load::run(lab, cluster, &scale).await)
        }
        Experiment::Convergence(common) => {
            let size = convergence::Size::of(common.short);
            convergence::run(&Local::new(common.program()?, size.rows)?, &size)
        }
        Experiment::Workers(common) => {
            let size = workers::Size::new();
            workers::run(&Local::new(common.program()?, size.rows)?, &size)
        }
    };
    publish(&outcome?, experiment)
}

/// The short forms, one after the other, with a program that was built: for the tests.
pub fn short_forms(program: &Path) -> Result<()> {
    let common = Common { short: true, program: Some(program.into()) };
    let options = Options { cpus: Cpus::Small, common: common.clone() };
    for experiment in [
        Experiment::Sharing(options.clone()),
        Experiment::Online(options),
        Experiment::Load(common.clone()),
        Experiment::Convergence(common),
    ] {
        println!("== {} --short", experiment.command());
        run(&experiment)?;
    }
    Ok(())
}

impl Experiment {
    /// What all of them can be told.
    fn common(&self) -> &Common {
        match self {
            Experiment::Sharing(options) | Experiment::Online(options) => &options.common,
            Experiment::Load(common) | Experiment::Convergence(common) | Experiment::Workers(common) => {
                common
            }
        }
    }

    /// The command that a person types.
    fn command(&self) -> String {
        let (name, cpus) = match self {
            Experiment::Sharing(options) => ("sharing", Some(options.cpus)),
            Experiment::Online(options) => ("online", Some(options.cpus)),
            Experiment::Load(_) => ("load", None),
            Experiment::Convergence(_) => ("convergence", None),
            Experiment::Workers(_) => ("workers", None),
        };
        let cpus = cpus.and_then(|cpus| cpus.to_possible_value());
        let cpus = cpus.map_or_else(String::new, |cpus| format!(" --cpus {}", cpus.get_name()));
        format!("cargo xtask experiment {name}{cpus}")
    }
}

/// A cluster of real nodes on which a tenth of a processor stands for one.
fn real_nodes(program: &Path, scale: &online::Scale) -> Result<Lent> {
    let scratch = tempfile::tempdir().context("make a directory for the image")?;
    let image = scratch.path().join("elasticdl.tar");
    let made = Command::new(program).args(["image", "--out"]).arg(&image).stdout(Stdio::null()).status();
    ensure!(made.with_context(|| format!("run {}", program.display()))?.success(), "no image could be made");
    let nodes = u8::try_from(scale.nodes).context("count the nodes")?;
    Lent::real(nodes, MilliCpu(u64::from(scale.cpus) * 100 / u64::from(nodes)), &[image])
}

impl Common {
    /// The program to try.
    fn program(&self) -> Result<PathBuf> {
        let program = match &self.program {
            Some(program) => program.canonicalize().with_context(|| format!("find {}", program.display()))?,
            None => std::env::current_exe().context("find this program")?.with_file_name("elasticdl"),
        };
        ensure!(
            program.exists(),
            "there is no {}\nhint: `cargo build --workspace --bin elasticdl` makes it, --program names another one",
            program.display()
        );
        Ok(program)
    }
}

/// Runs an experiment in a lab on a cluster, which ends with it.
fn on(
    cluster: Lent,
    options: &Common,
    run: impl AsyncFnOnce(&mut Lab, &Lent) -> Result<Outcome>,
) -> Result<Outcome> {
    let program = options.program()?;
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().context("start a runtime")?;
    let began = Instant::now();
    let outcome = runtime.block_on(async {
        let experiment = async {
            let mut lab = Lab::set_up(&cluster, &program).await?;
            run(&mut lab, &cluster).await
        };
        tokio::select! {
            outcome = experiment => outcome,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    });
    // Whatever still runs of it ends now, and its processes with it.
    drop(runtime);
    eprintln!("the experiment took {:.0} s", began.elapsed().as_secs_f64());
    let down = cluster.down();
    let mut outcome = outcome?;
    // What was found is worth more than what went wrong on the way down, and is told first.
    outcome.problems.extend(down.err().map(|error| format!("{error:#}")));
    Ok(outcome)
}

/// Shows the table, writes it down where it is no short form, and fails where something falls short.
fn publish(outcome: &Outcome, experiment: &Experiment) -> Result<()> {
    println!("{}", outcome.report.markdown());
    if !experiment.common().short {
        let directory = cache::workspace_root()?.join("docs/experiments");
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let command = experiment.command();
        let chart = format!("{}.svg", outcome.name);
        for (file, content) in [
            (chart.clone(), outcome.picture.svg()),
            (format!("{}.md", outcome.name), outcome.report.page(&command, &chart)),
        ] {
            let path = directory.join(file);
            fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        }
    }
    ensure!(outcome.problems.is_empty(), "it falls short:\n{}", outcome.problems.join("\n"));
    Ok(())
}
