//! Jobs of this machine alone, for experiments that need no cluster.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Where jobs run.
#[derive(Debug)]
pub struct Local {
    /// The program under test.
    pub program: PathBuf,
    /// For job files, data and what jobs keep; goes when the experiment is over.
    pub directory: tempfile::TempDir,
    /// Synthetic records that all jobs train on.
    pub rows: u64,
}

impl Local {
    /// A place of its own.
    pub fn new(program: PathBuf, rows: u64) -> Result<Local> {
        let directory = tempfile::tempdir().context("make a directory for the jobs")?;
        Ok(Local { program, directory, rows })
    }

    /// Trains a small DeepFM, with what `spec` says beside that, and hands on every event.
    pub fn train(
        &self,
        name: &str,
        mut spec: Value,
        mut each: impl FnMut(&Value) -> Result<()>,
    ) -> Result<()> {
        spec["model"] = json!({ "zoo": "deepfm", "embedding_dim": 8, "hidden": [64, 32] });
        spec["data"] = json!({
            "train": self.directory.path().join("data/train-*.tsv"),
            "validate": self.directory.path().join("data/test-*.tsv"),
            "layout": "criteo", "synth_rows": self.rows,
        });
        let job = json!({ "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name }, "spec": spec });
        let file = self.directory.path().join(format!("{name}.json"));
        std::fs::write(&file, job.to_string()).context("write a job file")?;
        let mut command = self.command(&["train", &file.display().to_string(), "--json"]);
        let mut child = command.stdout(Stdio::piped()).spawn().context("start a job")?;
        let events = child.stdout.take().context("follow a job")?;
        for line in BufReader::new(events).lines() {
            let line = line.context("follow a job")?;
            each(&serde_json::from_str(&line).with_context(|| format!("read the event {line}"))?)?;
        }
        ensure!(child.wait().context("wait for a job")?.success(), "the job {name} failed");
        Ok(())
    }

    /// Asks a running job for so many workers.
    pub fn scale(&self, name: &str, workers: u32) -> Result<()> {
        let scaled = self.command(&["scale", name, "--workers", &workers.to_string()]).output();
        let scaled = scaled.context("scale a job")?;
        ensure!(scaled.status.success(), "scale {name}: {}", String::from_utf8_lossy(&scaled.stderr));
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        let home = self.directory.path().join("home");
        command.args(arguments).env("ELASTICDL_HOME", home).current_dir(self.directory.path());
        command
    }
}
