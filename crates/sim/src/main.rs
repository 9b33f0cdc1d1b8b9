//! `elasticdl-sim`: runs virtual jobs by seed. Exit code 3: a checker failed, or a branch was never met.
#![expect(clippy::disallowed_methods, reason = "an edge: it tells how long it took")]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use elasticdl_sim::run::{Summary, keep_panics_quiet, run_many, run_once};
use elasticdl_sim::sabotage::Sabotage;
use elasticdl_sim::scenario::Kind;
use elasticdl_sim::trace::{Lines, Trace};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Failure of a checker.
const FAILED: u8 = 3;
/// Lines of a trace that are shown of a failure.
const LAST_LINES: usize = 60;
/// With fewer seeds than this a branch may be missed by chance.
const SEEDS_FOR_ALL_BRANCHES: u64 = 200;
/// The same for staged steps: half-committed ones come about seven times in a thousand worlds.
const STAGED_SEEDS_FOR_ALL_BRANCHES: u64 = 1000;

/// Runs virtual jobs, each from a seed and each twice, and checks that every record counts exactly once.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// How many seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Runs this seed alone and prints its trace.
    #[arg(long)]
    seed: Option<u64>,
    /// Prints all of the first failure's trace, not its last part.
    #[arg(long)]
    trace: bool,
    /// Draws worlds with staged steps.
    #[arg(long)]
    staged: bool,
    /// Draws worlds with a bound on staleness.
    #[arg(long, conflicts_with = "staged")]
    bounded: bool,
    /// Draws worlds whose steps have several batches.
    #[arg(long, conflicts_with_all = ["staged", "bounded"])]
    synchronous: bool,
    /// Draws worlds whose tensors' gradients are gathered.
    #[arg(long, conflicts_with_all = ["staged", "bounded", "synchronous"])]
    hybrid: bool,
    /// Threads; as many as there are cores by default.
    #[arg(long)]
    threads: Option<usize>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    keep_panics_quiet();
    let kind = match (args.staged, args.bounded) {
        (true, _) => Kind::Staged,
        (_, true) => Kind::Bounded,
        _ if args.synchronous => Kind::Synchronous,
        _ if args.hybrid => Kind::Hybrid,
        _ => Kind::Usual,
    };
    if let Some(seed) = args.seed {
        return run_one(seed, kind, usize::MAX);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let began = Instant::now();
    let summary = run_many(args.first, args.seeds, kind, args.threads.unwrap_or(cores));
    report(&summary, began.elapsed().as_secs_f64());
    if let Some(failure) = summary.failures.first() {
        run_one(failure.seed, kind, if args.trace { usize::MAX } else { LAST_LINES });
        return ExitCode::from(FAILED);
    }
    let never = summary.branches.never(kind);
    let enough = if args.staged { STAGED_SEEDS_FOR_ALL_BRANCHES } else { SEEDS_FOR_ALL_BRANCHES };
    if summary.seeds >= enough && !never.is_empty() {
        eprintln!("error: never met: {}", never.join("; "));
        return ExitCode::from(FAILED);
    }
    ExitCode::SUCCESS
}

fn report(summary: &Summary, seconds: f64) {
    print!("{}", summary.branches.table());
    println!(
        "{} seeds, each twice, in {seconds:.1} s: {:.1} million events, {:.1} virtual hours; {} failed",
        summary.seeds,
        summary.steps as f64 / 1e6,
        summary.lasted.as_secs_f64() / 3600.0,
        summary.failures.len()
    );
    for failure in &summary.failures {
        for violation in &failure.violations {
            println!(
                "seed {}: {} at {:?}: {}",
                failure.seed, violation.checker, violation.at, violation.what
            );
        }
    }
}

/// Runs a seed with its trace, of which the last `lines` are shown.
fn run_one(seed: u64, kind: Kind, lines: usize) -> ExitCode {
    let text = Lines::default();
    let outcome = run_once(seed, kind, Sabotage::None, Trace::with_text(&text));
    let text = text.borrow();
    let skipped = text.len().saturating_sub(lines);
    println!("seed {seed}, the last {} of {} lines:", text.len() - skipped, text.len());
    text[skipped..].iter().for_each(|line| println!("{line}"));
    for violation in &outcome.violations {
        println!("seed {seed}: {} at {:?}: {}", violation.checker, violation.at, violation.what);
    }
    if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}
