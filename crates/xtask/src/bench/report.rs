//! Measurements in; the table, the JSON and the section of docs/benchmarks.md out.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};

use super::setup::Setup;
use super::systems::{Run, System};
use super::{BATCH, Case, TrainBench};

const BEGIN: &str = "<!-- cargo xtask bench train: begin -->";
const END: &str = "<!-- cargo xtask bench train: end -->";

/// Everything that was measured, and on what.
#[derive(Debug)]
pub struct Report {
    machine: Machine,
    versions: Vec<(String, String)>,
    rows: u64,
    rounds: u32,
    threads: u32,
    /// Load average of the last minute before the first measurement.
    pub load_at_start: f64,
    /// Of all threads together, one per round.
    pub sgemm_gflops: Vec<f64>,
    /// In the order of the table.
    pub cases: Vec<CaseReport>,
}

#[derive(Debug, Serialize)]
struct Machine {
    processor: String,
    cores: usize,
    memory_gib: u64,
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
        let versions: serde_json::Map<String, Value> =
            self.versions.iter().map(|(name, version)| (name.clone(), version.clone().into())).collect();
        json!({
            "machine": self.machine,
            "versions": versions,
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
        markdown_table(&rows)
    }

    /// Replaces the section between the markers, or adds it at the end.
    pub fn write_section(&self, path: &Path) -> Result<()> {
        let old = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "# Benchmarks\n".to_owned(),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        let new = replace_section(&old, &self.section())
            .with_context(|| format!("find the section in {}", path.display()))?;
        let directory = path.parent().context("the file is in a directory")?;
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        fs::write(path, new).with_context(|| format!("write {}", path.display()))
    }

    fn section(&self) -> String {
        let gflops = median(self.sgemm_gflops.clone()).unwrap_or_default();
        let versions: Vec<_> =
            self.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
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
             Machine: {processor}, {cores} cores, {memory} GiB; load at the start {load:.2}.\n\
             Versions: {versions}.\n",
            threads = self.threads,
            rows = thousands(self.rows as f64),
            rounds = self.rounds,
            table = self.table(),
            processor = self.machine.processor,
            cores = self.machine.cores,
            memory = self.machine.memory_gib,
            load = self.load_at_start,
            versions = versions.join(", "),
        )
    }
}

impl Machine {
    fn here() -> Machine {
        let field = |path: &str, name: &str| {
            let text = fs::read_to_string(path).ok()?;
            let line = text.lines().find(|line| line.starts_with(name))?.to_owned();
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let memory_kib: u64 =
            memory.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or_default();
        Machine {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".to_owned()),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_kib.div_ceil(1 << 20),
        }
    }
}

fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

/// What was compared; a program that cannot be asked is left out.
fn versions(setup: &Setup) -> Vec<(String, String)> {
    let ask = |command: &mut Command| {
        let output = command.output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    let mut found = Vec::new();
    let mut word = |name: &str, text: Option<String>| {
        if let Some(version) = text.as_deref().and_then(|text| text.split_whitespace().nth(1)) {
            found.push((name.to_owned(), version.to_owned()));
        }
    };
    word("elasticdl", ask(Command::new(&setup.binary).arg("--version")));
    word("rustc", ask(Command::new("rustc").arg("--version")));
    let Some(python) = &setup.python else { return found };
    word("python", ask(Command::new(python).arg("--version")));
    let program = "from importlib.metadata import version as v\n\
                   for p in ('tensorflow-cpu', 'torch', 'pyarrow', 'numpy'): print(p, v(p))";
    let listed = ask(Command::new(python).args(["-c", program])).unwrap_or_default();
    let pairs = listed.lines().filter_map(|line| line.split_once(' '));
    found.extend(pairs.map(|(name, version)| (name.to_owned(), version.to_owned())));
    found
}

/// `None` for nothing; the mean of the middle two for an even count.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

fn by_system(figure: impl Fn(System) -> Option<f64>) -> Value {
    let name = |system: System| system.title().to_lowercase();
    System::ALL
        .iter()
        .map(|&system| (name(system), json!(figure(system))))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn dash() -> String {
    "–".to_owned()
}

/// `1234567` as `1,234,567`.
fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.round());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The first row is the header; the first two columns are texts, the rest figures.
fn markdown_table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            let (before, after) = if column < 2 { ("", padding.as_str()) } else { (padding.as_str(), "") };
            let _ = write!(text, "| {before}{cell}{after} ");
        }
        text.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let dashes = "-".repeat(width - usize::from(column >= 2));
                let _ = write!(text, "| {dashes}{} ", if column < 2 { "" } else { ":" });
            }
            text.push_str("|\n");
        }
    }
    text
}

/// The text with the section between the markers replaced; the markers are added where there are none.
fn replace_section(old: &str, section: &str) -> Result<String> {
    let marked = format!("{BEGIN}\n{section}{END}\n");
    match (old.find(BEGIN), old.find(END)) {
        (None, None) => Ok(format!("{}\n\n{marked}", old.trim_end())),
        (Some(begin), Some(end)) if begin < end => {
            let after = old[end + END.len()..].trim_start_matches('\n');
            let gap = if after.is_empty() { "" } else { "\n" };
            Ok(format!("{}{marked}{gap}{after}", &old[..begin]))
        }
        _ => bail!("its markers {BEGIN} and {END} do not match; remove them"),
    }
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

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn section_is_replaced_in_place_and_the_rest_is_kept() {
        let first = replace_section("# Benchmarks\n", "one\n").unwrap();
        assert_eq!(first, format!("# Benchmarks\n\n{BEGIN}\none\n{END}\n"));
        let more = format!("{first}\n## Other\n");
        let second = replace_section(&more, "two\n").unwrap();
        assert_eq!(second, more.replace("one", "two"));
        assert!(replace_section(&format!("{END}\n{BEGIN}\n"), "x").is_err());
    }

    #[test]
    fn table_is_aligned_markdown() {
        let rows =
            [["case", "what", "rate"], ["a", "CSV", "1,200"]].map(|row| row.map(str::to_owned).to_vec());
        let expected = "| case | what |  rate |\n| ---- | ---- | ----: |\n| a    | CSV  | 1,200 |\n";
        assert_eq!(markdown_table(&rows), expected);
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!([0.0, 999.4, 1000.0, 1_234_567.0].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }
}
