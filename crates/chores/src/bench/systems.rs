//! One system, one case, once: starts its processes and reads the result from the last line they print.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::setup::Setup;
use super::{BATCH, Case, Source};

/// Memory cases are steady from the first batch, so they need not go over all records.
const MEMORY_SECONDS: &str = "8";

/// Who trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum System {
    /// 1 master, 1 server, 1 worker, all as processes.
    Ours,
    /// `benches/peers/deepfm_tf.py`
    TensorFlow,
    /// `benches/peers/deepfm_torch.py`
    PyTorch,
}

impl System {
    /// All of them, in the table's order.
    pub const ALL: [System; 3] = [System::Ours, System::TensorFlow, System::PyTorch];

    /// As people write it.
    pub fn title(self) -> &'static str {
        match self {
            System::Ours => "ElasticDL",
            System::TensorFlow => "TensorFlow",
            System::PyTorch => "PyTorch",
        }
    }
}

/// What a system says about a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// Records trained on while the clock ran.
    pub records: u64,
    /// How long that took.
    pub seconds: f64,
    /// Training only: no start-up, no tracing, no final checkpoint.
    pub records_per_second: f64,
    /// Mean training loss of the last fifth for the peers; what the job reports for ours.
    pub logloss: Option<f64>,
}

impl Setup {
    /// Runs a system on a case.
    pub fn run(&self, system: System, case: &Case, round: u32) -> Result<Run> {
        let run = match system {
            System::Ours => self.run_ours(case, round)?,
            System::TensorFlow => self.run_peer("deepfm_tf.py", case)?,
            System::PyTorch => self.run_peer("deepfm_torch.py", case)?,
        };
        let rate = run.records_per_second;
        ensure!(rate.is_finite() && rate > 0.0, "{} reports a rate of {rate} records/s", system.title());
        Ok(run)
    }

    fn run_peer(&self, program: &str, case: &Case) -> Result<Run> {
        let python = self.python.as_ref().context("the peers' environment was not set up")?;
        let hidden: Vec<_> = case.hidden.iter().map(usize::to_string).collect();
        let mut command = self.pinned(python);
        command.arg(self.root.join("benches/peers").join(program));
        command.arg("--data").arg(self.data(case.source));
        command.args(["--hidden", &hidden.join(","), "--dim", &case.dim.to_string()]);
        command.args(["--batch", &BATCH.to_string(), "--threads", &self.threads.to_string()]);
        match case.source {
            Source::Csv => command.args(["--format", "csv"]),
            Source::Parquet => command.args(["--format", "parquet"]),
            Source::Memory => command.args(["--format", "memory", "--seconds", MEMORY_SECONDS]),
        };
        let line = last_line(&mut command)?;
        serde_json::from_str(&line).with_context(|| format!("read the result of {program} from {line:?}"))
    }

    fn run_ours(&self, case: &Case, round: u32) -> Result<Run> {
        let directory = tempfile::Builder::new().prefix("elasticdl-bench-").tempdir()?;
        let job = directory.path().join("job.yaml");
        let name = format!("bench-{}-{round}-{}", case.key, std::process::id());
        let text = serde_json::to_string_pretty(&self.job(case, &name)).context("write the job")?;
        fs::write(&job, text).with_context(|| format!("write {}", job.display()))?;
        let mut command = self.pinned(&self.binary);
        command.current_dir(directory.path()).env("ELASTICDL_HOME", directory.path().join("home"));
        command.arg("train").arg(&job).arg("--json");
        let line = last_line(&mut command)?;
        finished(&line).with_context(|| format!("read the result of ours from {line:?}"))
    }

    /// A job file; JSON is YAML.
    fn job(&self, case: &Case, name: &str) -> Value {
        serde_json::json!({
            "apiVersion": "elasticdl.org/v1",
            "kind": "ElasticJob",
            "metadata": { "name": name },
            "spec": {
                "model": { "zoo": "deepfm", "embedding_dim": case.dim, "hidden": case.hidden },
                "data": { "train": self.data(case.source), "layout": "criteo" },
                "train": {
                    "epochs": 1,
                    "batch": BATCH,
                    "optimizer": "adagrad",
                    "learning_rate": 0.01,
                    "initial_accumulator": 0.1,
                    "seed": 7,
                },
                "workers": { "count": 1, "threads": self.threads },
                "servers": { "count": 1 },
                "checkpoint": { "dir": "checkpoints" },
            },
        })
    }
}

/// Our last event: what counts is the training phase, which has its own rate.
fn finished(line: &str) -> Result<Run> {
    let event: Value = serde_json::from_str(line).context("the last line is no JSON")?;
    ensure!(event["event"] == "finished", "the last event is not \"finished\"");
    ensure!(event["outcome"] == "done", "the job ended as {}", event["outcome"]);
    let records = event["records"].as_u64().context("no records")?;
    let whole = event["records_per_second"].as_f64();
    let rate = event["train_records_per_second"].as_f64().or(whole).context("no records_per_second")?;
    Ok(Run {
        records,
        seconds: records as f64 / rate,
        records_per_second: rate,
        logloss: event["logloss"].as_f64(),
    })
}

/// Runs a command and tells the last line it prints; what it says on stderr is shown only when it fails.
pub fn last_line(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {:?}", command.get_program()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?} failed: {}\n{said}", command.get_program(), output.status);
    let printed = String::from_utf8(output.stdout).context("the output is no UTF-8")?;
    let line = printed.lines().rev().find(|line| !line.trim().is_empty());
    Ok(line.context("it printed nothing")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_rate_is_preferred_over_the_rate_of_the_whole_job() {
        let line = r#"{"event":"finished","outcome":"done","records":100,"seconds":10.0,
            "records_per_second":10.0,"train_records_per_second":20.0,"logloss":0.5}"#;
        let run = finished(line).unwrap();
        assert_eq!((run.records_per_second, run.seconds, run.logloss), (20.0, 5.0, Some(0.5)));
        let older = line.replace("train_records", "other");
        assert_eq!(finished(&older).unwrap().records_per_second, 10.0);
    }

    #[test]
    fn a_job_that_failed_gives_no_figure() {
        let line = r#"{"event":"finished","outcome":"failed","records":100,"records_per_second":10.0}"#;
        assert_eq!(finished(line).unwrap_err().to_string(), "the job ended as \"failed\"");
        assert!(finished(r#"{"event":"progress"}"#).is_err());
    }
}
