//! `data synth` and `data head`, and the data that a job has made for itself.

use std::io::{self, IsTerminal, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use comfy_table::{Table, presets};
use elasticdl_data::discover;
use elasticdl_data::synth::{self, SynthFormat, SynthOptions, Truth};
use elasticdl_spec::Layout;
use elasticdl_spec::job::{DataSpec, Format};
use elasticdl_spec::resolve::{Problem, nearest};

use crate::args::{self, Head, Synth};
use crate::fault::{Exit, Fault};
use crate::{print, settings};

/// Files that a job's own training data is spread over.
const FILES: u32 = 4;
/// At most so many records are made to judge by: more would not make the figures surer.
const TEST_ROWS_MAX: u64 = 250_000;

/// `data synth`.
pub fn synth(args: &Synth) -> anyhow::Result<Exit> {
    let args::SynthLayout::Criteo = args.layout;
    let options = SynthOptions {
        rows: args.rows,
        test_rows: args.test_rows.unwrap_or_else(|| test_rows(args.rows)),
        files: args.files,
        seed: args.seed,
        out: args.out.clone(),
        format: match args.format {
            args::SynthFormat::Tsv => SynthFormat::Tsv,
            args::SynthFormat::Parquet => SynthFormat::Parquet,
        },
        threads: threads(),
    };
    let truth = make(&options)?;
    let text = if args.json { serde_json::to_string(&truth)? } else { truth_text(&truth, &args.out) };
    print::line(&text)?;
    Ok(Exit::Done)
}

fn test_rows(rows: u64) -> u64 {
    (rows / 10).clamp(1, TEST_ROWS_MAX)
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

fn make(options: &SynthOptions) -> elasticdl_data::Result<Truth> {
    let all = options.rows + options.test_rows;
    let mut progress = Progress::new(all);
    let truth = synth::criteo(options, &mut |done| progress.show(done));
    progress.end();
    truth
}

fn truth_text(truth: &Truth, out: &Path) -> String {
    let mut lines = vec![format!(
        "{}: {} records to train on, {} different ids, {:.1} % positive",
        out.display(),
        print::count(truth.train.rows),
        print::count(truth.distinct_ids),
        100.0 * truth.train.positive
    )];
    if let Some(test) = &truth.test {
        lines.push(format!(
            "{} records to judge by; no model can do better on them than",
            print::count(test.rows)
        ));
        lines.push(format!("  logloss  {:.5}", test.best_logloss));
        lines.push(format!("  AUC      {:.5}", test.best_auc));
    }
    lines.join("\n")
}

/// Makes a job's training data where it asks for that and there is none.
pub fn make_missing(data: &DataSpec, seed: u64) -> Result<(), Problem> {
    let (Some(rows), Err(elasticdl_data::Error::NoMatch { .. })) =
        (data.synth_rows, discover(&data.train, data.format))
    else {
        return Ok(());
    };
    let pattern = &data.train[0];
    let problem = |what: String, hint: &str| Problem {
        place: "spec.data.synth_rows".into(),
        what,
        hint: Some(hint.into()),
    };
    if elasticdl_storage::is_url(pattern) {
        let what = format!("{pattern} matches nothing, and synthetic data is made in directories only");
        return Err(problem(what, "make it with `elasticdl data synth`, and copy it there"));
    }
    let hint = "write data.train as a directory and train-*.tsv (or train-*.parquet)";
    let out = PathBuf::from(pattern).parent().map(Path::to_path_buf).unwrap_or_default();
    if out.to_string_lossy().contains(['*', '?', '[']) {
        return Err(problem(format!("{pattern} does not say in which directory data is to be made"), hint));
    }
    let parquet =
        data.format == Some(Format::Parquet) || (data.format.is_none() && pattern.ends_with(".parquet"));
    let format = if parquet { SynthFormat::Parquet } else { SynthFormat::Tsv };
    let test_rows = test_rows(rows);
    let shown = if out.as_os_str().is_empty() { ".".into() } else { out.display().to_string() };
    let (train, test) = (print::count(rows), print::count(test_rows));
    print::note(&format!("{pattern} matches nothing: making {train} + {test} synthetic records in {shown}"));
    let out = if out.as_os_str().is_empty() { PathBuf::from(".") } else { out };
    let options = SynthOptions { rows, test_rows, files: FILES, seed, out, format, threads: threads() };
    let truth = make(&options)
        .map_err(|e| problem(format!("making data in {shown}: {:#}", anyhow::Error::from(e)), hint))?;
    if let Err(error) = discover(&data.train, data.format) {
        return Err(problem(format!("data was made in {shown}, and yet {error}"), hint));
    }
    print::note(&truth_text(&truth, Path::new(&shown)));
    Ok(())
}

/// Tells how far long work is: in place on a terminal, else a line for every quarter.
struct Progress {
    all: u64,
    terminal: bool,
    said: u64,
}

impl Progress {
    fn new(all: u64) -> Self {
        Progress { all: all.max(1), terminal: io::stderr().is_terminal(), said: 0 }
    }

    fn show(&mut self, done: u64) {
        let percent = 100 * done.min(self.all) / self.all;
        let step = if self.terminal { 1 } else { 25 };
        if percent / step <= self.said / step {
            return;
        }
        self.said = percent;
        let text = format!("making data: {percent:3} %");
        if self.terminal {
            let _ = write!(io::stderr().lock(), "\r{text}");
        } else {
            print::note(&text);
        }
    }

    fn end(&self) {
        if self.terminal && self.said > 0 {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

/// `data head`.
pub fn head(args: &Head) -> anyhow::Result<Exit> {
    let layout = layout(&args.layout)?;
    let file = args.file.to_string_lossy().into_owned();
    let records =
        elasticdl_data::head(&[file], args.format.map(args::Format::to_spec), &layout, args.records)?;
    let good: Vec<_> = records.iter().filter(|record| record.bad.is_none()).collect();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Records stand side by side: a layout has many columns, and a person looks at few records.
    for at in 0..good.first().map_or(0, |record| record.values.len()) {
        let name = good[0].values[at].0.clone();
        table.add_row([name].into_iter().chain(good.iter().map(|record| record.values[at].1.clone())));
    }
    print::line(&table.trim_fmt())?;
    for bad in records.iter().filter_map(|record| record.bad.as_ref()) {
        print::note(&format!("warning: a record would be set aside: {bad}"));
    }
    Ok(Exit::Done)
}

/// A layout by its name, or of a job file.
fn layout(name: &str) -> anyhow::Result<Layout> {
    if let Some(layout) = Layout::known(name) {
        return Ok(layout);
    }
    let path = Path::new(name);
    if !path.exists() {
        let known = Layout::KNOWN.join(", ");
        let hint = nearest(name, Layout::KNOWN.into_iter());
        let hint = hint.unwrap_or_else(|| format!("known are {known}; a job file's path works too"));
        return Err(Fault::user(format!("{name:?} is no layout and no job file")).hint(hint).into());
    }
    Ok(settings::load_file(path, Vec::new())?.job.data.layout)
}
