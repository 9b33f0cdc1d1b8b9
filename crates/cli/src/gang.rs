//! Leads a job that runs a person's own program, on this machine.

use std::fs;
use std::io;

use anyhow::Context;
use elasticdl_master::gang::Book;
use elasticdl_master::gang::run::Memory;
use elasticdl_spec::JobSpec;

use crate::fault::Fault;
use crate::home::{JobDir, write_json};

/// Remembers in a file of the job's directory. It outlives the master, and so do the processes that it tells of.
pub struct File(pub JobDir);

impl Memory for File {
    fn recall(&mut self) -> elasticdl_master::Result<Book> {
        book(&self.0).map(Option::unwrap_or_default)
    }

    fn remember(&mut self, book: &Book) -> elasticdl_master::Result<()> {
        let path = self.0.gang();
        write_json(&path, book)
            .map_err(|e| elasticdl_master::Error::io(format!("writing {}", path.display()), e))
    }
}

/// What the masters of a job remember; `None`: none has led it yet.
pub fn book(dir: &JobDir) -> elasticdl_master::Result<Option<Book>> {
    let path = dir.gang();
    let failed = |e| elasticdl_master::Error::io(format!("reading {}", path.display()), e);
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    serde_json::from_str(&text).map(Some).map_err(|e| failed(io::Error::other(e)))
}

/// Whether a job that runs a program of its own can go on.
pub fn check_resumable(dir: &JobDir, name: &str) -> anyhow::Result<()> {
    let book = book(dir).context("looking for what was begun")?;
    let Some(book) = book else {
        return Err(Fault::user(format!("job {name:?} has not begun: there is nothing to go on with"))
            .hint("start it with `elasticdl train`")
            .into());
    };
    if book.finished == Some(elasticdl_master::status::Phase::Done) {
        return Err(Fault::user(format!("job {name:?} is done"))
            .hint("`elasticdl train` with its file runs it again")
            .into());
    }
    Ok(())
}

/// What needs records and a model has nothing to say of a job that runs a program of its own.
pub fn refuse(job: &JobSpec, command: &str) -> anyhow::Result<()> {
    if job.command.is_none() {
        return Ok(());
    }
    let what =
        format!("job {:?} runs a program of its own: elasticdl {command} knows nothing of it", job.name);
    Err(Fault::user(what).hint("status, top, logs, stop and resume work with it").into())
}
