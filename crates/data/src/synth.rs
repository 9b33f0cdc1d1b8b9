//! Data with a planted truth, so that learning can be judged absolutely.
//!
//! The same options give the same bytes. Files appear under their names only when they are complete,
//! and `truth.json` appears last: where it lies, the data is whole.

mod truth;
mod world;
mod write;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use self::truth::Score;
pub use self::truth::{SplitTruth, Truth};
use self::world::{FIELDS, Split, World};
use self::write::Writer;
use crate::error::{Error, Result};

/// What data is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthOptions {
    /// Records to train on.
    pub rows: u64,
    /// Records to judge by, from the same distribution; they go to one file, `test-000`.
    pub test_rows: u64,
    /// Files that the training records are spread over: `train-000`, `train-001`, ….
    pub files: u32,
    /// What the truth and all records follow from.
    pub seed: u64,
    /// The directory for it all; made where it is missing.
    pub out: PathBuf,
    /// How the records are written; they are the same in both formats.
    pub format: SynthFormat,
    /// Files that are made at the same time; it changes nothing in them.
    pub threads: usize,
}

/// How records are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthFormat {
    /// Criteo's own form: tab-separated, ids as 8 hexadecimal digits.
    Tsv,
    /// Parquet: an integer label, float counts, 64-bit integer ids.
    Parquet,
}

impl SynthFormat {
    /// The ending of file names.
    pub fn extension(self) -> &'static str {
        match self {
            SynthFormat::Tsv => "tsv",
            SynthFormat::Parquet => "parquet",
        }
    }
}

/// Rows between two reports of progress.
const PROGRESS_ROWS: u64 = 16_384;

/// Makes click logs in Criteo's layout. `progress` is told how many rows are done, of both splits.
pub fn criteo(options: &SynthOptions, progress: &mut dyn FnMut(u64)) -> Result<Truth> {
    let parts = parts(options)?;
    prepare(options, &parts)?;
    let world = World::new(options.seed);
    let made = make_all(&world, &parts, options, progress)?;
    let (mut train, mut test) = (Score::new(), Score::new());
    let mut seen = Seen::new();
    for (part, made) in parts.iter().zip(&made) {
        match part.split {
            Split::Train => {
                train.merge(&made.score);
                seen.merge(&made.seen);
            }
            Split::Test => test.merge(&made.score),
        }
    }
    let truth = Truth {
        layout: "criteo".to_string(),
        seed: options.seed,
        distinct_ids: seen.count(),
        train: train.truth().expect("there is at least one training row"),
        test: test.truth(),
    };
    for part in &parts {
        fs::rename(&part.unfinished, &part.path).map_err(Error::io("name", &part.path))?;
    }
    write_truth(&truth, &options.out)?;
    Ok(truth)
}

/// One file to be made.
#[derive(Debug)]
struct Part {
    split: Split,
    first: u64,
    rows: u64,
    path: PathBuf,
    /// Its name while it is being made; the leading dot hides it from patterns.
    unfinished: PathBuf,
}

fn parts(options: &SynthOptions) -> Result<Vec<Part>> {
    let files = u64::from(options.files);
    if options.rows == 0 || files == 0 || files > options.rows {
        let message =
            format!("cannot spread {} rows over {files} files; each needs at least one", options.rows);
        return Err(Error::Options(message));
    }
    let part = |split, name: String, first, end| {
        let path = options.out.join(format!("{name}.{}", options.format.extension()));
        let unfinished = options.out.join(format!(".{name}.{}.unfinished", options.format.extension()));
        Part { split, first, rows: end - first, path, unfinished }
    };
    let edge = |n: u64| (u128::from(options.rows) * u128::from(n) / u128::from(files)) as u64;
    let mut parts: Vec<Part> =
        (0..files).map(|n| part(Split::Train, format!("train-{n:03}"), edge(n), edge(n + 1))).collect();
    if options.test_rows > 0 {
        parts.push(part(Split::Test, "test-000".to_string(), 0, options.test_rows));
    }
    Ok(parts)
}

/// Makes the directory ready. Data of another run that would stay beside the new one is not mixed with it.
fn prepare(options: &SynthOptions, parts: &[Part]) -> Result<()> {
    let out = &options.out;
    fs::create_dir_all(out).map_err(Error::io("make directory", out))?;
    for entry in fs::read_dir(out).map_err(Error::io("list", out))? {
        let path = entry.map_err(Error::io("list", out))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let ours = (name.starts_with("train-") || name.starts_with("test-"))
            && path.extension().is_some_and(|extension| extension == options.format.extension());
        if ours && parts.iter().all(|part| part.path != path) {
            return Err(Error::File {
                path,
                reason: "it is left from other data and would be mixed with the new; \
                         remove it, or choose another directory",
            });
        }
    }
    let truth = out.join(truth::FILE);
    match fs::remove_file(&truth) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("replace", &truth)(error))
        }
        _ => Ok(()),
    }
}

/// What came out of making one file.
struct Made {
    score: Score,
    seen: Seen,
}

/// Makes all files, several at a time.
fn make_all(
    world: &World,
    parts: &[Part],
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Made>> {
    let next = AtomicUsize::new(0);
    let (rows, reports) = mpsc::channel();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads.clamp(1, parts.len()))
            .map(|_| {
                let (rows, next) = (rows.clone(), &next);
                scope.spawn(move || {
                    let mut made = Vec::new();
                    while let Some((at, part)) = take(next, parts) {
                        made.push((at, make(world, part, options.format, &rows)?));
                    }
                    Ok(made)
                })
            })
            .collect();
        drop(rows);
        let mut done = 0;
        for rows in reports {
            done += rows;
            progress(done);
        }
        let mut made = Vec::new();
        for thread in threads {
            made.extend(thread.join().expect("making data does not panic")?);
        }
        made.sort_by_key(|(at, _)| *at);
        Ok(made.into_iter().map(|(_, made)| made).collect())
    })
}

fn take<'a>(next: &AtomicUsize, parts: &'a [Part]) -> Option<(usize, &'a Part)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    parts.get(at).map(|part| (at, part))
}

fn make(world: &World, part: &Part, format: SynthFormat, done: &mpsc::Sender<u64>) -> Result<Made> {
    let path = &part.unfinished;
    let mut made = Made { score: Score::new(), seen: Seen::new() };
    let mut writer = Writer::create(path, format)?;
    let mut unreported = 0;
    for row in part.first..part.first + part.rows {
        let drawn = world.draw(part.split, row);
        made.score.add(drawn.logit, drawn.label);
        made.seen.add(&drawn.ranks);
        writer.add(&drawn, path)?;
        unreported += 1;
        if unreported == PROGRESS_ROWS || row + 1 == part.first + part.rows {
            // Nobody listening is no reason to stop.
            let _ = done.send(std::mem::take(&mut unreported));
        }
    }
    writer.finish(path)?;
    Ok(made)
}

fn write_truth(truth: &Truth, out: &Path) -> Result<()> {
    let path = out.join(truth::FILE);
    let unfinished = out.join(format!(".{}.unfinished", truth::FILE));
    let mut text = serde_json::to_string_pretty(truth).expect("a truth is plain data");
    text.push('\n');
    fs::write(&unfinished, text).map_err(Error::io("write", &unfinished))?;
    fs::rename(&unfinished, &path).map_err(Error::io("name", &path))
}

/// Which ids occurred: one bit each.
struct Seen(Vec<Vec<u64>>);

impl Seen {
    fn new() -> Self {
        Seen(World::SIZES.iter().map(|size| vec![0; *size as usize / 64 + 1]).collect())
    }

    #[inline]
    fn add(&mut self, ranks: &[Option<u32>; FIELDS]) {
        for (field, rank) in self.0.iter_mut().zip(ranks) {
            if let Some(rank) = rank {
                field[*rank as usize / 64] |= 1 << (rank % 64);
            }
        }
    }

    fn merge(&mut self, other: &Seen) {
        for (mine, theirs) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            *mine |= theirs;
        }
    }

    fn count(&self) -> u64 {
        self.0.iter().flatten().map(|word| u64::from(word.count_ones())).sum()
    }
}
