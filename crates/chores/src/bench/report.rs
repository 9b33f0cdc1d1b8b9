//! Measurements of training in; the table, the JSON and the section of docs/benchmarks.md out.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::document::{dash, markdown_table, median, thousands};
use super::machine::{Machine, Versions, load_average};
use super::setup::Setup;
use super::systems::{Run, System};
use super::{BATCH, Case, TrainBench};

/// Everything that was measured, and on what.
#[derive(Debug)]
pub struct Report {
    machine: Machine,
    versions: Versions,
    rows: u64,
    rounds: u32,
    threads: u32,
    /// Load average of the last minute before the first measurement.
    load_at_start: f64,
    /// Of all threads together, one per round.
    pub sgemm_gflops: Vec<f64>,
    /// In the order of the table.
    pub cases: Vec<CaseReport>,
}

/// The measurements of one case.
#[derive(Debug)]
pub struct CaseReport {
    case: &'static Case,
    /// In the order they were taken.
    pub samples: Vec<Sample>,
}

/// One run of one system.
#[derive(Debug, Serialize)]
pub struct Sample {
    /// From 0.
    pub round: u32,
    /// Who.
    pub system: System,
    /// What it said.
    #[serde(flatten)]
    pub run: Run,
}

impl CaseReport {
    /// Nothing measured yet.
    pub fn new(case: &'static Case) -> CaseReport {
        CaseReport { case, samples: Vec::new() }
    }

    /// Median records/s of a system.
    fn rate(&self, system: System) -> Option<f64> {
        let of_system = self.samples.iter().filter(|sample| sample.system == system);
        median(of_system.map(|sample| sample.run.records_per_second).collect())
    }

    /// Median over the rounds of ours divided by the peer's.
    fn ratio(&self, peer: System) -> Option<f64> {
        let rate = |round, system| {
            let found = self.samples.iter().find(|s| s.round == round && s.system == system)?;
            Some(found.run.records_per_second)
        };
        let rounds = self.samples.iter().filter(|s| s.system == System::Ours).map(|s| s.round);
        median(rounds.filter_map(|r| Some(rate(r, System::Ours)? / rate(r, peer)?)).collect())
    }

    /// The reference figure of a peer, where there is one.
    fn reference(&self, peer: System) -> Option<f64> {
        match peer {
            System::Ours => None,
            System::TensorFlow => self.case.reference.0,
            System::PyTorch => self.case.reference.1,
        }
    }

    fn summary(&self, gflops: Option<f64>) -> Value {
        let bound = gflops.map(|gflops| gflops * 1e9 / self.case.flops_per_record());
        let share = |system| Some(self.rate(system)? / bound?);
        json!({
            "case": self.case.key,
            "title": self.case.title,
            "hidden": self.case.hidden,
            "dim": self.case.dim,
            "flops_per_record": self.case.flops_per_record(),
            "sgemm_bound_records_per_second": bound,
            "records_per_second": by_system(|system| self.rate(system)),
            "bound_share": by_system(share),
            "ratio_to_tensorflow": self.ratio(System::TensorFlow),
            "ratio_to_pytorch": self.ratio(System::PyTorch),
            "wanted_ratio": self.case.wanted_ratio,
            "wanted_bound_share": self.case.wanted_bound_share,
            "reference_records_per_second": by_system(|system| self.reference(system)),
            "samples": self.samples,
        })
    }

    fn row(&self, gflops: Option<f64>) -> Vec<String> {
        let bound = gflops.map(|gflops| gflops * 1e9 / self.case.flops_per_record());
        let share = self.rate(System::Ours).zip(bound).map(|(rate, bound)| rate / bound);
        let rate = |system| match (self.rate(system), self.reference(system)) {
            (Some(rate), Some(reference)) => format!("{} (of {})", thousands(rate), thousands(reference)),
            (rate, _) => rate.map_or_else(dash, thousands),
        };
        let ratio = |peer| self.ratio(peer).map_or_else(dash, |ratio| format!("{ratio:.2}×"));
        let wanted = match (self.case.wanted_ratio, self.case.wanted_bound_share) {
            (Some(ratio), Some(share)) => format!("≥ {ratio:.1}×, ≥ {share:.1} of bound"),
            (Some(ratio), None) => format!("≥ {ratio:.1}×"),
            _ => dash(),
        };
        vec![
            self.case.key.to_owned(),
            self.case.title.to_owned(),
            rate(System::Ours),
            rate(System::TensorFlow),
            rate(System::PyTorch),
            ratio(System::TensorFlow),
            ratio(System::PyTorch),
            bound.map_or_else(dash, thousands),
            share.map_or_else(dash, |share| format!("{share:.2}")),
            wanted,
        ]
    }
}

impl Report {
    /// An empty report of these cases on this machine.
    pub fn new(setup: &Setup, options: &TrainBench, cases: Vec<CaseReport>) -> Report {
        Report {
            machine: Machine::here(),
            versions: versions(setup),
            rows: options.rows,
            rounds: options.rounds,
            threads: options.threads,
            load_at_start: load_average(),
            sgemm_gflops: Vec::new(),
            cases,
        }
    }

    /// For programs: the medians and every sample.
    pub fn summary(&self) -> Value {
        let gflops = median(self.sgemm_gflops.clone());
        json!({
            "machine": self.machine,
            "versions": self.versions,
            "rows": self.rows,
            "rounds": self.rounds,
            "threads": self.threads,
            "batch": BATCH,
            "load_at_start": self.load_at_start,
            "sgemm_gflops": gflops,
            "cases": self.cases.iter().map(|case| case.summary(gflops)).collect::<Vec<_>>(),
        })
    }

    /// For people, and valid Markdown.
    pub fn table(&self) -> String {
        let gflops = median(self.sgemm_gflops.clone());
        let header = [
            "case",
            "DeepFM on",
            "ElasticDL",
            "TensorFlow",
            "PyTorch",
            "vs TF",
            "vs torch",
            "SGEMM bound",
            "of bound",
            "wanted",
        ];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(self.cases.iter().map(|case| case.row(gflops)));
        markdown_table(&rows, 2)
    }

    /// For docs/benchmarks.md.
    pub fn section(&self) -> String {
        let gflops = median(self.sgemm_gflops.clone()).unwrap_or_default();
        format!(
            "## Training: ElasticDL against TensorFlow and PyTorch\n\n\
             Written by `cargo xtask bench train`. Records/s of a DeepFM with 13 dense and 26 sparse fields,\n\
             Adagrad, batch {BATCH}; every system has {threads} cores. ElasticDL is 1 master, 1 server and\n\
             1 worker as processes; the peers are single processes (`benches/peers/`). Each trains once on the\n\
             same {rows} synthetic records. Medians of {rounds} interleaved rounds; a ratio is the median of the\n\
             rounds' ratios. Start-up, tracing and the peers' first two batches are not counted; reading and\n\
             parsing are. In the memory rows the peers work on arrays prepared before the clock starts, which\n\
             shows that their programs are not weak (in brackets: what was measured for them elsewhere on an\n\
             idle two-core machine).\n\n\
             The SGEMM bound is what {gflops:.0} GFLOP/s (the `gemm` crate, one thread per core, measured in\n\
             the same run) would allow if a record cost nothing but the MLP's forward and backward products.\n\n\
             {table}\n\
             Machine: {machine}; load at the start {load:.2}.\n\
             Versions: {versions}.\n",
            threads = self.threads,
            rows = thousands(self.rows as f64),
            rounds = self.rounds,
            table = self.table(),
            machine = self.machine,
            load = self.load_at_start,
            versions = self.versions,
        )
    }
}

/// What was compared.
fn versions(setup: &Setup) -> Versions {
    let mut versions = Versions::default();
    versions.ask("elasticdl", &setup.binary);
    versions.ask("rustc", Path::new("rustc"));
    if let Some(python) = &setup.python {
        versions.ask_python(python, &["tensorflow-cpu", "torch", "pyarrow", "numpy"]);
    }
    versions
}

fn by_system(figure: impl Fn(System) -> Option<f64>) -> Value {
    let name = |system: System| system.title().to_lowercase();
    System::ALL
        .iter()
        .map(|&system| (name(system), json!(figure(system))))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::CASES;

    fn sample(round: u32, system: System, rate: f64) -> Sample {
        let run = Run { records: 1, seconds: 1.0, records_per_second: rate, logloss: None };
        Sample { round, system, run }
    }

    #[test]
    fn ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() {
        let mut case = CaseReport::new(&CASES[0]);
        for (round, ours, peer) in [(0, 100.0, 50.0), (1, 90.0, 90.0), (2, 30.0, 10.0)] {
            case.samples.push(sample(round, System::Ours, ours));
            case.samples.push(sample(round, System::PyTorch, peer));
        }
        assert_eq!(case.ratio(System::PyTorch), Some(2.0));
        assert_eq!(case.rate(System::Ours), Some(90.0));
        assert_eq!((case.rate(System::TensorFlow), case.ratio(System::TensorFlow)), (None, None));
    }
}
