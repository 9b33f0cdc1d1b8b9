//! The command line of `data`, and the names of formats.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// File formats by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Format {
    /// CSV, TSV and the like; .gz and .zst are unpacked.
    Text,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    /// The format as a job says it.
    pub fn to_spec(self) -> elasticdl_spec::job::Format {
        match self {
            Format::Text => elasticdl_spec::job::Format::Text,
            Format::Parquet => elasticdl_spec::job::Format::Parquet,
        }
    }
}

/// Data tools.
#[derive(Debug, Subcommand)]
pub enum Data {
    /// Make deterministic data with planted truth, and say how well it can be predicted at best.
    Synth(Synth),
    /// Show the first records of a file as the layout reads them.
    Head(Head),
}

/// Arguments of `data synth`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl data synth criteo --rows 1000000 --test-rows 100000 --out data/criteo")]
pub struct Synth {
    /// The layout: criteo.
    pub layout: SynthLayout,
    /// Records to train on.
    #[arg(long, value_name = "N")]
    pub rows: u64,
    /// Records to judge on; by default a tenth of --rows.
    #[arg(long, value_name = "N")]
    pub test_rows: Option<u64>,
    /// Files that the training records are spread over.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub files: u32,
    /// Of everything that is drawn: the same seed makes the same bytes.
    #[arg(long, value_name = "N", default_value_t = 7)]
    pub seed: u64,
    /// Format of the files.
    #[arg(long, default_value = "tsv")]
    pub format: SynthFormat,
    /// Directory to write to; made where it is missing.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The result as a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Layouts that can be synthesized.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SynthLayout {
    /// Label, I1–I13, C1–C26.
    Criteo,
}

/// Formats that can be synthesized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SynthFormat {
    /// Tab-separated text with string ids.
    Tsv,
    /// Apache Parquet with integer ids.
    Parquet,
}

/// Arguments of `data head`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl data head data/criteo/train-0.tsv --layout criteo -n 5")]
pub struct Head {
    /// The file.
    pub file: PathBuf,
    /// What its columns mean: criteo, adult, or a job file to take the layout from.
    #[arg(long)]
    pub layout: String,
    /// How many records.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 5)]
    pub records: usize,
    /// Format of the file; by default its name tells.
    #[arg(long)]
    pub format: Option<Format>,
}
