//! `cargo xtask bench train`: ours against TensorFlow and PyTorch, interleaved in one run.
//!
//! This file says what is compared and in which order. [`setup`] makes what a run needs, [`systems`] runs
//! one system once, [`bound`] measures what the machine's arithmetic allows, [`report`] turns measurements
//! into the table, the JSON and docs/benchmarks.md. The peers' own programs are in `benches/peers/`.
//!
//! `cargo xtask bench ps`, the parameter server against its peers, is in [`mod@ps`] and [`figures`]. Both
//! tell of the [`machine`] and write into one [`document`].

mod bound;
mod document;
mod figures;
mod machine;
mod ps;
mod report;
mod setup;
mod systems;

use anyhow::{Context, Result, ensure};
use clap::Args;

pub use ps::{PsBench, ps};
use report::{CaseReport, Report, Sample};
use setup::Setup;
use systems::System;

/// Options of `cargo xtask bench train`.
#[derive(Debug, Args)]
pub struct TrainBench {
    /// Print the result as one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// How often everything is measured; figures are medians over the rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Records that every system trains on, once
    #[arg(long, default_value_t = 2_000_000, value_parser = clap::value_parser!(u64).range(50_000..))]
    rows: u64,
    /// One round on 400,000 records, to see that everything works; docs/benchmarks.md is left alone
    #[arg(long)]
    quick: bool,
    /// Cores for every system: compute threads, and the cores its processes may run on
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,
    /// Only these cases (a, b, c, memory, memory-small); docs/benchmarks.md is left alone
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Only these systems; docs/benchmarks.md is left alone
    #[arg(long, value_delimiter = ',', value_enum)]
    systems: Vec<System>,
    /// Make the data again even where it is cached
    #[arg(long)]
    fresh_data: bool,
}

/// Where a case's records come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Criteo text: tab-separated, string ids.
    Csv,
    /// Parquet with integer ids.
    Parquet,
    /// Arrays in the peer's memory; shows that the peers' programs are not weak. Ours has no such mode.
    Memory,
}

/// One line of the table.
#[derive(Debug)]
struct Case {
    key: &'static str,
    title: &'static str,
    source: Source,
    hidden: &'static [usize],
    dim: usize,
    /// What ours must reach: times the faster peer, and the share of the SGEMM bound.
    wanted_ratio: Option<f64>,
    wanted_bound_share: Option<f64>,
    /// Records/s that were measured for (TensorFlow, PyTorch) on an idle two-core machine before.
    reference: (Option<f64>, Option<f64>),
}

const CASES: [Case; 5] = [
    Case {
        key: "a",
        title: "CSV, string ids, MLP 400-400-400, dim 16",
        source: Source::Csv,
        hidden: &[400, 400, 400],
        dim: 16,
        wanted_ratio: Some(1.2),
        wanted_bound_share: Some(0.5),
        reference: (None, None),
    },
    Case {
        key: "b",
        title: "Parquet, integer ids, MLP 400-400-400, dim 16",
        source: Source::Parquet,
        hidden: &[400, 400, 400],
        dim: 16,
        wanted_ratio: Some(1.1),
        wanted_bound_share: Some(0.5),
        reference: (None, None),
    },
    Case {
        key: "c",
        title: "Parquet, integer ids, MLP 16-4, dim 8",
        source: Source::Parquet,
        hidden: &[16, 4],
        dim: 8,
        wanted_ratio: Some(3.0),
        wanted_bound_share: None,
        reference: (None, None),
    },
    Case {
        key: "memory",
        title: "integers in memory, MLP 400-400-400, dim 16",
        source: Source::Memory,
        hidden: &[400, 400, 400],
        dim: 16,
        wanted_ratio: None,
        wanted_bound_share: None,
        reference: (Some(33_000.0), Some(39_000.0)),
    },
    Case {
        key: "memory-small",
        title: "integers in memory, MLP 16-4, dim 8",
        source: Source::Memory,
        hidden: &[16, 4],
        dim: 8,
        wanted_ratio: None,
        wanted_bound_share: None,
        reference: (Some(90_000.0), None),
    },
];

/// Numeric and categorical fields of the Criteo layout.
const DENSE_FIELDS: usize = 13;
const SPARSE_FIELDS: usize = 26;
const BATCH: usize = 4096;
const QUICK_ROWS: u64 = 400_000;

impl Case {
    /// Multiply-adds of the MLP count twice, in the forward pass and in both halves of the backward pass.
    fn flops_per_record(&self) -> f64 {
        let mut width = DENSE_FIELDS + SPARSE_FIELDS * self.dim;
        let mut weights = 0;
        for &units in self.hidden.iter().chain(&[1]) {
            weights += width * units;
            width = units;
        }
        3.0 * 2.0 * weights as f64
    }

    fn runs(&self, system: System) -> bool {
        self.source != Source::Memory || system != System::Ours
    }
}

/// Measures everything and prints the comparison.
pub fn train(mut options: TrainBench) -> Result<()> {
    if options.quick {
        options.rounds = 1;
        options.rows = options.rows.min(QUICK_ROWS);
    }
    let cases = chosen_cases(&options.cases)?;
    let systems = if options.systems.is_empty() { System::ALL.to_vec() } else { options.systems.clone() };
    let setup = Setup::prepare(&options, &systems)?;
    let mut report = Report::new(&setup, &options, cases.iter().map(|case| CaseReport::new(case)).collect());
    for round in 0..options.rounds {
        measure_round(round, &cases, &systems, &setup, &mut report)?;
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report.summary()).context("write the report as JSON")?);
    } else {
        println!("{}", report.table());
    }
    let complete = !options.quick && cases.len() == CASES.len() && systems.len() == System::ALL.len();
    if complete {
        document::write_section(&setup.root, "cargo xtask bench train", &report.section())?;
    }
    Ok(())
}

fn chosen_cases(keys: &[String]) -> Result<Vec<&'static Case>> {
    for key in keys {
        let known: Vec<_> = CASES.iter().map(|case| case.key).collect();
        ensure!(known.contains(&key.as_str()), "no case {key:?}; there are {}", known.join(", "));
    }
    Ok(CASES.iter().filter(|case| keys.is_empty() || keys.iter().any(|key| key == case.key)).collect())
}

/// One round: the bound, then every case with every system.
///
/// The systems of a case run right after each other, so that a ratio compares neighbours in time, and their
/// order turns from round to round, so that nobody always runs first.
fn measure_round(
    round: u32,
    cases: &[&'static Case],
    systems: &[System],
    setup: &Setup,
    report: &mut Report,
) -> Result<()> {
    let gflops = bound::sgemm_gflops(setup.threads);
    eprintln!("round {}: SGEMM {gflops:.0} GFLOP/s on {} threads", round + 1, setup.threads);
    report.sgemm_gflops.push(gflops);
    for (index, case) in cases.iter().enumerate() {
        for turn in 0..systems.len() {
            let system = systems[(turn + round as usize) % systems.len()];
            if !case.runs(system) {
                continue;
            }
            let run = setup.run(system, case, round).with_context(|| {
                format!("round {} of case {} with {}", round + 1, case.key, system.title())
            })?;
            eprintln!(
                "round {}: case {} {}: {:.0} records/s",
                round + 1,
                case.key,
                system.title(),
                run.records_per_second
            );
            report.cases[index].samples.push(Sample { round, system, run });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_count_the_weights_of_the_mlp_in_three_passes() {
        let weights = 429 * 400 + 400 * 400 + 400 * 400 + 400;
        assert_eq!(CASES[0].flops_per_record(), f64::from(6 * weights));
        assert_eq!(CASES[2].flops_per_record(), f64::from(6 * (221 * 16 + 16 * 4 + 4)));
    }

    #[test]
    fn unknown_case_is_refused_with_the_known_ones() {
        let error = chosen_cases(&["d".to_owned()]).unwrap_err().to_string();
        assert_eq!(error, "no case \"d\"; there are a, b, c, memory, memory-small");
        assert_eq!(chosen_cases(&[]).unwrap().len(), CASES.len());
    }
}
