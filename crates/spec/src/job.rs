//! The typed job: what every role works from once the settings are resolved.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::command::CommandSpec;
use crate::kubernetes::KubernetesSpec;
use crate::layout::Layout;
use crate::optimizer::OptimizerSpec;
use crate::schedule::Schedule;
use crate::shape::ModelShape;
use crate::tables::TablesSpec;

/// Everything a person said about a job, complete and valid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// `metadata.name`: unique among the jobs of a machine.
    pub name: String,
    /// `command`: a person's own program. Where there is one, `model`, `data`, `train`, `evaluate`, `servers.count`,
    /// `checkpoint` and `output` mean nothing, and nobody may have said them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandSpec>,
    /// `model`
    pub model: ModelSpec,
    /// `data`
    pub data: DataSpec,
    /// `train`
    pub train: TrainSpec,
    /// `tables`
    #[serde(default)]
    pub tables: TablesSpec,
    /// `evaluate`
    pub evaluate: EvaluateSpec,
    /// `workers`
    pub workers: WorkersSpec,
    /// `servers`
    pub servers: ServersSpec,
    /// `checkpoint`
    pub checkpoint: CheckpointSpec,
    /// `output`: where the trained model is exported to; none is exported where it is absent.
    pub output: Option<String>,
    /// `security`; jobs of before say nothing of it.
    #[serde(default)]
    pub security: SecuritySpec,
    /// `limits`: times after which something is given up.
    pub limits: LimitsSpec,
    /// `kubernetes`, and what the roles ask of a cluster; without a meaning on a single machine.
    pub kubernetes: KubernetesSpec,
}

/// Whether a name of the job is a URL of object storage; else it is a path.
pub fn is_url(name: &str) -> bool {
    name.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+')
    })
}

impl JobSpec {
    /// Whether every outcome is the same to the bit, whatever dies on the way: each batch is computed from
    /// weights that hold all batches before it, and steps are staged on all partitions before any applies.
    pub fn is_deterministic(&self) -> bool {
        self.train.staleness == Some(0)
    }

    /// How many batches the weights that a batch is computed from may lack, where that is bounded and not 0.
    pub fn staleness_bound(&self) -> Option<u32> {
        self.train.staleness.filter(|most| *most > 0)
    }

    /// Whether several batches are computed from the same weights and applied together.
    pub fn is_synchronous(&self) -> bool {
        self.train.consistency == Consistency::Synchronous
    }

    /// Whether tensors' gradients are gathered, so that some may be left when the last batch is applied.
    pub fn is_hybrid(&self) -> bool {
        self.train.consistency == Consistency::Hybrid
    }

    /// Whether steps are staged on all partitions before any applies them, so that all partitions are at one step
    /// whenever they are cut or go back.
    pub fn is_staged(&self) -> bool {
        self.is_deterministic() || self.is_synchronous()
    }

    /// Whether a batch is pulled only when the servers' gate admits it.
    pub fn is_gated(&self) -> bool {
        self.staleness_bound().is_some() || self.train.consistency != Consistency::Asynchronous
    }

    /// Whether data, checkpoints (and with them the ledger) and output are all in object storage, so that no
    /// two processes of the job need a directory in common.
    pub fn is_in_object_storage(&self) -> bool {
        let data = self.data.train.iter().chain(&self.data.validate);
        let read_and_written = data.chain(&self.output).all(|name| is_url(name));
        read_and_written && self.checkpoint.dir.as_deref().is_some_and(is_url)
    }

    /// How many workers the job begins with. Two tell sooner than one whether more are of use, and most
    /// machines have room for them.
    pub fn workers_at_start(&self) -> u32 {
        const TRIED_FIRST: u32 = 2;
        self.workers
            .count
            .unwrap_or_else(|| TRIED_FIRST.max(self.kubernetes.workers_min).min(self.workers.max))
    }

    /// Batches between their pull and their acknowledged push in a worker.
    pub fn pipeline_depth(&self) -> usize {
        if self.is_deterministic() { 1 } else { self.workers.pipeline }
    }
}

/// The models that ship.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Zoo {
    /// Logistic regression.
    Lr,
    /// Wide & Deep.
    WideDeep,
    /// DeepFM.
    Deepfm,
    /// Learns nothing and counts records: shows that each of them counted exactly once.
    Counting,
}

impl Zoo {
    /// All of them, by the name used in job files.
    pub const ALL: [(&'static str, Zoo); 4] =
        [("lr", Zoo::Lr), ("wide-deep", Zoo::WideDeep), ("deepfm", Zoo::Deepfm), ("counting", Zoo::Counting)];
}

impl fmt::Display for Zoo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) = Zoo::ALL.iter().find(|(_, zoo)| zoo == self).expect("ALL lists every model");
        f.write_str(name)
    }
}

/// Which model, and its size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// `model.zoo`
    pub zoo: Zoo,
    /// `model.embedding_dim`
    pub embedding_dim: usize,
    /// `model.hidden`
    pub hidden: Vec<usize>,
}

/// Where the records are and what they look like.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// `data.train`: paths or globs.
    pub train: Vec<String>,
    /// `data.validate`: paths or globs; empty for none.
    pub validate: Vec<String>,
    /// What the columns mean.
    pub layout: Layout,
    /// `data.format`; `None`: by file name.
    pub format: Option<Format>,
    /// `data.synth_rows`: where `data.train` matches nothing, this many rows are made there first.
    pub synth_rows: Option<u64>,
    /// `data.bad_records_max`: malformed records that may be set aside before the job fails.
    pub bad_records_max: u64,
    /// `data.shuffle`: seeded shuffle of tasks and of records inside a task.
    pub shuffle: bool,
    /// `data.batches_per_task`: how many batches a shard holds.
    pub batches_per_task: u32,
}

/// File formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Delimited text, whatever the delimiter; gzip and zstd are known by file name.
    Text,
    /// Apache Parquet.
    Parquet,
}

/// How training goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    /// `train.epochs`
    pub epochs: u32,
    /// `train.batch`: records per batch.
    pub batch: usize,
    /// Optimizer of rows and tensors.
    pub optimizer: OptimizerSpec,
    /// How the learning rate goes; jobs of before say nothing of it.
    #[serde(default)]
    pub schedule: Schedule,
    /// How large gradients may be.
    #[serde(default)]
    pub clip: ClipSpec,
    /// `train.seed`
    pub seed: u64,
    /// `train.staleness`: how many batches the weights that a batch is computed from may lack; `None`: as
    /// many as workers and their pipelines have under way.
    pub staleness: Option<u32>,
    /// `train.consistency`; jobs of before say nothing of it.
    #[serde(default)]
    pub consistency: Consistency,
    /// `train.grads_to_wait`: batches that make a step, where `consistency` has steps.
    #[serde(default = "one")]
    pub grads_to_wait: u32,
    /// `train.staleness_modulation`
    #[serde(default)]
    pub staleness_modulation: bool,
}

fn one() -> u32 {
    1
}

/// How gradients of several workers come together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Consistency {
    /// Each is applied when it comes.
    #[default]
    Asynchronous,
    /// Those of a step are applied together, as their mean.
    Synchronous,
    /// Those of rows when they come, those of tensors together, as their mean.
    Hybrid,
}

impl Consistency {
    /// All of them, by the name used in job files.
    pub const ALL: [(&'static str, Consistency); 3] = [
        ("asynchronous", Consistency::Asynchronous),
        ("synchronous", Consistency::Synchronous),
        ("hybrid", Consistency::Hybrid),
    ];
}

/// How large a batch's gradient may be when it leaves a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ClipSpec {
    /// `train.clip_value`: each number of it at most this far from 0.
    pub value: Option<f32>,
    /// `train.clip_norm`: all of it, of rows and of tensors, at most this long; after `value`.
    pub norm: Option<f32>,
}

/// When the model is judged on the validation data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluateSpec {
    /// `evaluate.every`: an evaluation each so often while training; `None`: only at the end.
    pub every: Option<Duration>,
    /// `evaluate.steps`: an evaluation whenever so many more batches are trained.
    #[serde(default)]
    pub steps: Option<u64>,
}

/// The workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkersSpec {
    /// `workers.count`: how many are wanted at the start; `None`: as many as are of use, from `workers.min` to
    /// `workers.max`.
    pub count: Option<u32>,
    /// `workers.max`: never more than that.
    pub max: u32,
    /// `workers.threads`: compute threads in each; a batch is cut into as many parts.
    pub threads: usize,
    /// `workers.pipeline`: batches in flight between reading and pushing.
    pub pipeline: usize,
}

/// The parameter servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServersSpec {
    /// `servers.count`
    pub count: u32,
    /// `servers.partitions`: fixed for the life of the job.
    pub partitions: u32,
    /// `servers.replicas`: 2 where each partition has a backup.
    #[serde(default = "one")]
    pub replicas: u32,
}

/// Checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// `checkpoint.dir`; `None`: in the job's own directory.
    pub dir: Option<String>,
    /// `checkpoint.every`; `None`: only at the end and on stop.
    pub every: Option<Duration>,
    /// `checkpoint.full_every`: each so manieth one holds all rows, at least 1.
    #[serde(default = "always_full")]
    pub full_every: u32,
    /// `checkpoint.keep`: committed checkpoints kept, at least 1.
    pub keep: u32,
}

/// A job from before there was a choice has whole checkpoints.
fn always_full() -> u32 {
    1
}

/// Who may listen in.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SecuritySpec {
    /// `security.tls`: whether the job's processes show each other certificates and encrypt what they say.
    pub tls: bool,
}

/// Times after which something is given up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitsSpec {
    /// `limits.lease`: a worker without a batch done for so long loses its task.
    pub lease: Duration,
    /// `limits.orphan`: a worker or server that hears of no master for so long ends itself.
    pub orphan: Duration,
    /// `limits.silence`: a process that the master has not heard of for so long is ended and started again.
    pub silence: Duration,
    /// `limits.restarts`: deaths in a row without progress before the job fails.
    pub restarts: u32,
}

/// What the master hands to every process that joins: the job, and the model as the servers see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The job.
    pub job: JobSpec,
    /// Its model's tables and tensors.
    pub shape: ModelShape,
}
