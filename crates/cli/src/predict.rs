//! `predict`: a line per record, in the order of the input.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::args::Predict;
use crate::fault::Exit;
use crate::infer::{Bad, Job};
use crate::print;

/// `predict`.
pub fn predict(args: &Predict) -> anyhow::Result<Exit> {
    let mut job = Job::open(&args.input, if args.input.skip_bad { Bad::Mark } else { Bad::Fail })?;
    if args.no_label {
        job = job.without_label();
    }
    let (bad, records) = match &args.out {
        None => match write(&job, &mut io::stdout().lock()) {
            // The reader has seen enough.
            Err(error) if is_broken_pipe(&error) => return Ok(Exit::Done),
            other => other?,
        },
        Some(path) => write_file(&job, path)?,
    };
    if bad > 0 {
        let (bad, records) = (print::count(bad), print::count(records));
        print::note(&format!("warning: {bad} of {records} records could not be read; their lines are nan"));
    }
    Ok(Exit::Done)
}

/// Writes to a file that has its name only once it is complete.
fn write_file(job: &Job, path: &Path) -> anyhow::Result<(u64, u64)> {
    // A pipe or a device is written to as it is; a name beside it would be another thing.
    let special = fs::metadata(path).is_ok_and(|there| !there.is_file());
    let partial = if special { path.to_path_buf() } else { partial(path) };
    let file = if special { File::options().write(true).open(path) } else { File::create(&partial) };
    let mut out = file.with_context(|| format!("creating {}", partial.display()))?;
    let written = write(job, &mut out);
    if written.is_err() && !special {
        let _ = fs::remove_file(&partial);
    }
    let written = written.with_context(|| format!("writing {}", path.display()))?;
    if !special {
        fs::rename(&partial, path).with_context(|| format!("renaming {}", partial.display()))?;
    }
    Ok(written)
}

fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// Writes a line per record; returns how many could not be read, and how many there are.
fn write(job: &Job, out: &mut dyn Write) -> anyhow::Result<(u64, u64)> {
    let mut out = BufWriter::with_capacity(1 << 18, out);
    let (mut bad, mut records) = (0, 0);
    job.run(&mut |scored| {
        bad += scored.bad;
        records += scored.probabilities.len() as u64;
        for probability in scored.probabilities {
            if probability.is_nan() {
                out.write_all(b"nan\n")?;
            } else {
                writeln!(out, "{probability}")?;
            }
        }
        Ok(())
    })?;
    out.flush()?;
    Ok((bad, records))
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind =
        |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<io::Error>().map(io::Error::kind);
    error.chain().any(|cause| kind(cause) == Some(io::ErrorKind::BrokenPipe))
}
