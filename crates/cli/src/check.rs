//! What is looked at before anything starts: the data, and the places that will be written to.
//!
//! What can be known now is told now, all of it at once, with the place in the job file it comes from.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use elasticdl_data::files::real_path;
use elasticdl_data::{Compression, DataFile, HeadRecord, discover, head};
use elasticdl_master::status::ScaleRequest;
use elasticdl_ps::Optimizer;
use elasticdl_ps::table::{ROWS_MIN, memory_min};
use elasticdl_spec::job::DataSpec;
use elasticdl_spec::resolve::{Problem, Problems, nearest};
use elasticdl_spec::{JobSpec, Plan, amount};

use crate::fault::Fault;
use crate::home::{JobDir, Record};
use crate::model::{MANIFEST, WEIGHTS};
use crate::{data, print};

/// With less room than this a disk counts as full: a small model's checkpoint would not fit.
const FREE_BYTES_MIN: u64 = 64 << 20;

/// What is done about training data that is not there, where the job has `data.synth_rows`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// It is made.
    Make,
    /// It is an error: a job that goes on needs the data it began with.
    Refuse,
}

/// Whether a job that goes on can have so many workers and servers.
pub fn wanted(job: &JobSpec, wanted: ScaleRequest) -> anyhow::Result<()> {
    if wanted == ScaleRequest::default() {
        return Ok(());
    }
    if job.command.is_some() {
        let what = format!(
            "job {:?} runs a program of its own, and its file says how many members it has",
            job.name
        );
        return Err(Fault::user(what).hint("resume it without --workers and --servers").into());
    }
    match wanted.refusal(job) {
        Some(reason) => {
            let what = format!("job {:?} cannot go on with these numbers: {reason}", job.name);
            let hint = format!(
                "choose a number in that range; without any, job {:?} goes on with as many as before",
                job.name
            );
            Err(Fault::user(what).hint(hint).into())
        }
        None => Ok(()),
    }
}

/// Looks at everything that a job needs; the current directory is the job's.
pub fn check(dir: &JobDir, record: &Record, missing: Missing) -> Result<(), Problems> {
    let job = &record.job;
    if job.command.is_some() {
        return Ok(());
    }
    let unreachable = buckets(job);
    if !unreachable.is_empty() {
        return Err(Problems(unreachable));
    }
    let mut problems = places(dir, record);
    if problems.is_empty() && missing == Missing::Make {
        problems.extend(data::make_missing(&job.data, job.train.seed).err());
    }
    if !problems.is_empty() && job.data.synth_rows.is_some() {
        // Data that was not made because of these problems is no problem of its own.
        return Err(Problems(problems));
    }
    let train = files(&job.data, "spec.data.train", &job.data.train, &mut problems);
    let validate = match job.data.validate.as_slice() {
        [] => Vec::new(),
        patterns => files(&job.data, "spec.data.validate", patterns, &mut problems),
    };
    disjoint(&train, &validate, &mut problems);
    problems.extend(countable(job, &train));
    if problems.is_empty() { Ok(()) } else { Err(Problems(problems)) }
}

/// What is wrong with the buckets that a job names. Each is tried once: what is wrong with one is so wherever
/// the job names it.
fn buckets(job: &JobSpec) -> Vec<Problem> {
    let train = job.data.train.iter().map(|url| ("spec.data.train", url));
    let validate = job.data.validate.iter().map(|url| ("spec.data.validate", url));
    let dir = job.checkpoint.dir.iter().map(|url| ("spec.checkpoint.dir", url));
    let output = job.output.iter().map(|url| ("spec.output", url));
    let mut tried = BTreeSet::new();
    let mut problems = Vec::new();
    for (place, url) in train.chain(validate).chain(dir).chain(output) {
        if let Some(bucket) = elasticdl_storage::bucket_of(url)
            && tried.insert(bucket)
            && let Err(e) = elasticdl_storage::reach(url)
        {
            problems.push(problem(place, format!("cannot reach {url}: {}", chain(&e)), None));
        }
    }
    problems
}

/// The model, and the places that will be written to.
fn places(dir: &JobDir, record: &Record) -> Vec<Problem> {
    let mut problems = Vec::new();
    match plan(&record.job) {
        Ok(plan) => {
            problems.extend(unknown_tables(&plan));
            problems.extend(small_tables(&plan));
        }
        Err(error) => problems.push(problem("spec.model", format!("{error:#}"), None)),
    }
    problems.extend(writable("spec.checkpoint.dir", &dir.checkpoints(record)).err());
    if let Some(output) = &record.job.output {
        let output = record.resolve(output);
        problems.extend(writable("spec.output", &output).err());
        problems.extend(foreign("spec.output", &output));
    }
    problems
}

/// The job and its model's shape, which only the model itself knows.
pub fn plan(job: &JobSpec) -> anyhow::Result<Plan> {
    let layout = &job.data.layout;
    let model = elasticdl_nn::build(&job.model, layout.numeric.len(), layout.categorical.len())?;
    Ok(Plan { job: job.clone(), shape: model.shape().clone() })
}

/// Tables that the job has settings for and the model does not have.
fn unknown_tables(plan: &Plan) -> Vec<Problem> {
    let known: Vec<&str> = plan.shape.tables.iter().map(|table| table.name.as_str()).collect();
    let unknown = plan.job.tables.names().filter(|name| !known.contains(name));
    let told = unknown.map(|name| {
        let what = format!("the model {} has no such table", plan.job.model.zoo);
        let hint = nearest(name, known.iter().copied());
        let hint =
            hint.unwrap_or_else(|| format!("its tables: {}; or \"*\" for all of them", known.join(", ")));
        problem(&format!("spec.tables.{name}"), what, Some(hint))
    });
    told.collect()
}

/// Tables that may take less memory than the fewest rows need which are of any use.
fn small_tables(plan: &Plan) -> Vec<Problem> {
    let (said, partitions) = (&plan.job.tables, plan.job.servers.partitions);
    let optimizer = Optimizer::new(plan.job.train.optimizer);
    let small = plan.shape.tables.iter().filter_map(|table| {
        let spec = said.of(&table.name);
        let least = memory_min(table.width(), &optimizer, &spec, partitions);
        spec.memory_max.filter(|most| *most < least)?;
        let place = format!("spec.tables.{}.memory_max", said.said_of(&table.name, "memory_max"));
        let what = format!(
            "table {:?} needs {} for {ROWS_MIN} rows in each of {partitions} partitions",
            table.name,
            print::bytes(least)
        );
        let hint = format!("say {} or more", amount::bytes(least.next_multiple_of(1 << 10)));
        Some(problem(&place, what, Some(hint)))
    });
    small.collect()
}

/// Where the learning rate goes by the place in the job, batches must be counted before the first is trained.
fn countable(job: &JobSpec, train: &[DataFile]) -> Option<Problem> {
    let compressed = train.iter().find(|file| file.compression != Compression::Plain);
    let file = compressed.filter(|_| job.train.schedule.varies())?;
    let what = format!(
        "{} is compressed, so that only reading it tells how many batches it has, and the learning rate goes by \
         the place in the job",
        file.path
    );
    let hint = "take plain text or Parquet, or leave out spec.train.schedule and spec.train.warmup_steps";
    Some(problem("spec.data.train", what, Some(hint.into())))
}

fn problem(place: &str, what: String, hint: Option<String>) -> Problem {
    Problem { place: place.into(), what, hint }
}

/// The files that patterns name, each looked into.
fn files(data: &DataSpec, place: &str, patterns: &[String], problems: &mut Vec<Problem>) -> Vec<DataFile> {
    let files = match discover(patterns, data.format) {
        Ok(files) => files,
        Err(error) => {
            let hint = match (&error, data.layout.name.as_str(), place) {
                (elasticdl_data::Error::NoMatch { .. }, "criteo", "spec.data.train") => {
                    Some("check the path, or set data.synth_rows to have synthetic data made there")
                }
                (elasticdl_data::Error::NoMatch { .. }, ..) => {
                    Some("check the path; it starts at the current directory")
                }
                (elasticdl_data::Error::File { .. }, ..) => Some("leave it out, or mend it"),
                _ => None,
            };
            problems.push(problem(place, chain(&error), hint.map(Into::into)));
            return Vec::new();
        }
    };
    for file in &files {
        if let Err(found) = first_record(file, data) {
            problems.push(problem(place, found.0, found.1));
        }
    }
    files
}

/// Reads a file's first record: a wrong layout shows there.
fn first_record(file: &DataFile, data: &DataSpec) -> Result<(), (String, Option<String>)> {
    let first = head(std::slice::from_ref(&file.path), data.format, &data.layout, 1);
    let first = first.map_err(|error| (chain(&error), None))?;
    match first.first() {
        None => Err((format!("{} holds no records", file.path), Some("leave it out, or fill it".into()))),
        Some(HeadRecord { bad: Some(bad), .. }) if data.bad_records_max == 0 => {
            let layout = &data.layout.name;
            let hint =
                format!("is data.layout: {layout} right for this file? `elasticdl data head` shows it");
            Err((bad.to_string(), Some(hint)))
        }
        Some(_) => Ok(()),
    }
}

/// A model that is judged on what it was trained on looks better than it is.
fn disjoint(train: &[DataFile], validate: &[DataFile], problems: &mut Vec<Problem>) {
    let real = |file: &DataFile| real_path(Path::new(&file.path)).ok();
    let trained: BTreeSet<PathBuf> = train.iter().filter_map(real).collect();
    for file in validate.iter().filter(|file| real(file).is_some_and(|path| trained.contains(&path))) {
        let what = format!("{} is also in spec.data.train", file.path);
        let hint = "judge the model on records that it was not trained on".to_string();
        problems.push(problem("spec.data.validate", what, Some(hint)));
    }
}

/// Whether a directory can be made and written to, and has room.
fn writable(place: &str, dir: &Path) -> Result<(), Problem> {
    let shown = dir.display();
    if elasticdl_storage::is_url(dir) {
        return writable_objects(dir)
            .map_err(|e| problem(place, format!("cannot write to {shown}: {}", chain(&e)), None));
    }
    let hint = || Some("name a directory that you can write to".to_string());
    probe(dir).map_err(|e| match e.kind() {
        io::ErrorKind::StorageFull => {
            problem(place, format!("{shown}: the disk is full"), Some("free some space".into()))
        }
        _ => problem(place, format!("cannot write to {shown}: {e}"), hint()),
    })?;
    let room = rustix::fs::statvfs(dir).map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    match room {
        Ok(free) if free < FREE_BYTES_MIN => {
            let what = format!("{shown}: only {} are free on this disk", print::bytes(free));
            Err(problem(place, what, Some("free some space, or name a directory on another disk".into())))
        }
        _ => Ok(()),
    }
}

/// Writes an object and removes it: that alone tells whether the key may do both.
fn writable_objects(dir: &Path) -> io::Result<()> {
    let probe = dir.join(format!(".probe-{}", std::process::id()));
    elasticdl_storage::replace(&probe, b"probe")?;
    elasticdl_storage::remove(&probe)
}

/// Writes a file and removes it: permissions alone don't tell whether a disk is full or mounted read-only.
fn probe(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let path = dir.join(format!(".probe-{}", std::process::id()));
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(&[0; 4096])?;
        file.sync_all()
    });
    let removed = fs::remove_file(&path);
    written.and(removed)
}

/// An output directory with other things in it is probably a mistake.
pub fn foreign(place: &str, output: &Path) -> Option<Problem> {
    let ours = [MANIFEST, WEIGHTS];
    let names = elasticdl_storage::list(output).ok()?;
    let stranger = names.iter().find(|name| !name.starts_with('.') && !ours.contains(&name.as_str()))?;
    let what = format!("{} holds other things than a model: {stranger}", output.display());
    Some(problem(place, what, Some("name an empty or a new directory".into())))
}

/// An error with its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
