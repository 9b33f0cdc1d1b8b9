//! Every setting of a job file, once. The file's decoder, `--set`, the environment, `config show`, the
//! nearest-key hints and the reference page all come from this table.

use crate::optimizer;

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Where it stands below `spec` in a job file, as `train.batch`; `name` stands in `metadata`.
    pub path: &'static str,
    /// What it takes.
    pub rule: Rule,
    /// What it is where nobody says anything.
    pub default: Fallback,
    /// What it does, in a sentence.
    pub help: &'static str,
}

/// What a setting is where nobody says anything.
#[derive(Debug, Clone, Copy)]
pub enum Fallback {
    /// Somebody must say it.
    Required,
    /// Somebody must say it, unless the job runs a program of its own (`command.run`).
    RequiredToTrain,
    /// It stays unset.
    Unset,
    /// This value, as it would be written in YAML.
    Value(&'static str),
}

/// What a setting takes.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// Any text.
    Text,
    /// Lower-case letters, digits and dashes, as Kubernetes wants names.
    Name,
    /// One of these.
    OneOf(&'static [&'static str]),
    /// true or false.
    Flag,
    /// A whole number in this range.
    Count {
        /// The least.
        min: u64,
        /// The greatest.
        max: u64,
    },
    /// A list of whole numbers of at least 1; may be empty.
    Counts,
    /// A finite number above 0.
    Positive,
    /// A number from 0 up to, but not including, 1.
    Fraction,
    /// A finite number of at least 0.
    NotNegative,
    /// A time such as `30s` or `5m`, longer than nothing.
    Duration,
    /// One character.
    Character,
    /// A text or a list of texts.
    Texts,
    /// An amount as Kubernetes writes it: 500m, 4Gi, 2.
    Amount,
    /// An amount of memory, in whole bytes.
    Memory,
    /// low, high, or the fraction that is high.
    Priority,
    /// A mapping of texts to texts.
    Pairs,
    /// A mapping of names to whole numbers of at least 1.
    Tally,
    /// A mapping, passed on as it is.
    Mapping,
    /// A list of mappings, passed on as they are.
    Mappings,
}

impl Rule {
    /// What would be right, for messages.
    pub fn expects(self) -> String {
        match self {
            Rule::Text => "a text".into(),
            Rule::Name => "a name: lower-case letters, digits and dashes, at most 50".into(),
            Rule::OneOf(names) => format!("one of {}", names.join(", ")),
            Rule::Flag => "true or false".into(),
            Rule::Count { min, max: u64::MAX } => format!("a whole number of at least {min}"),
            Rule::Count { min, max } => format!("a whole number from {min} to {max}"),
            Rule::Counts => "a list of whole numbers of at least 1, such as [400, 400]".into(),
            Rule::Positive => "a number above 0".into(),
            Rule::Fraction => "a number from 0 up to, but not including, 1".into(),
            Rule::NotNegative => "a number of at least 0".into(),
            Rule::Duration => "a time such as 30s or 5m".into(),
            Rule::Character => "one character, such as \",\" or \"\\t\"".into(),
            Rule::Texts => "a text or a list of texts".into(),
            Rule::Amount => "an amount above 0, such as 2, 500m or 4Gi".into(),
            Rule::Memory => "an amount of memory, such as 512Mi or 4Gi".into(),
            Rule::Priority => "low, high, or the fraction from 0 to 1 that is high".into(),
            Rule::Pairs => "a mapping of names to texts".into(),
            Rule::Tally => "a mapping of names to whole numbers, such as { chief: 1, worker: 3 }".into(),
            Rule::Mapping => "a mapping".into(),
            Rule::Mappings => "a list of mappings".into(),
        }
    }
}

const fn count(min: u64) -> Rule {
    Rule::Count { min, max: u64::MAX }
}

const fn setting(path: &'static str, rule: Rule, default: Fallback, help: &'static str) -> Setting {
    Setting { path, rule, default, help }
}

use Fallback::{Required, RequiredToTrain, Unset, Value};

/// All settings, in the order of `config show`.
pub const SETTINGS: &[Setting] = &[
    setting("name", Rule::Name, Required, "Name of the job, unique among the jobs of this machine."),
    setting(
        "model.zoo",
        Rule::OneOf(&["lr", "wide-deep", "deepfm", "counting"]),
        RequiredToTrain,
        "Which model is trained; counting learns nothing and adds 1 to a row for each record.",
    ),
    setting(
        "model.embedding_dim",
        Rule::Count { min: 1, max: 1024 },
        Value("16"),
        "Length of an id's vector; lr and counting have none.",
    ),
    setting(
        "model.hidden",
        Rule::Counts,
        Value("[400, 400, 400]"),
        "Widths of the deep part's hidden layers; lr and counting have none.",
    ),
    setting(
        "data.train",
        Rule::Texts,
        RequiredToTrain,
        "Files to train on: paths, globs, or URLs such as s3://bucket/train-*.tsv.",
    ),
    setting("data.validate", Rule::Texts, Value("[]"), "Files to judge the model on; never trained on."),
    setting(
        "data.layout",
        Rule::OneOf(&["criteo", "adult", "custom"]),
        RequiredToTrain,
        "What the columns mean; custom: data.label, data.numeric, data.categorical say it.",
    ),
    setting(
        "data.format",
        Rule::OneOf(&["text", "parquet"]),
        Unset,
        "Format of the files; unset: by their names (.csv .tsv .txt .data .parquet; .gz and .zst for text).",
    ),
    setting(
        "data.columns",
        Rule::Texts,
        Value("[]"),
        "custom: names of the columns in order; empty: the header or the Parquet schema tells.",
    ),
    setting("data.label", Rule::Text, Unset, "custom: the column to predict."),
    setting(
        "data.positive",
        Rule::Texts,
        Value("[]"),
        "custom: values of the label that mean 1; empty: the label is 0 or 1.",
    ),
    setting("data.numeric", Rule::Texts, Value("[]"), "custom: columns used as numbers."),
    setting(
        "data.scale",
        Rule::OneOf(&["log", "none"]),
        Value("log"),
        "custom: what happens to numbers: sign(x)·ln(1+|x|), or nothing.",
    ),
    setting("data.categorical", Rule::Texts, Value("[]"), "custom: columns used as ids."),
    setting(
        "data.delimiter",
        Rule::Character,
        Unset,
        "Between the columns of text; unset: the layout's, for custom a comma (a tab in .tsv files).",
    ),
    setting(
        "data.header",
        Rule::Flag,
        Unset,
        "Whether the first line of text files names the columns; unset: the layout's, for custom whether data.columns is empty.",
    ),
    setting(
        "data.quotes",
        Rule::Flag,
        Unset,
        "Whether \" quotes values in text; unset: the layout's, for custom true.",
    ),
    setting(
        "data.missing",
        Rule::Texts,
        Unset,
        "Values that mean \"missing\", beside the empty one; unset: the layout's.",
    ),
    setting(
        "data.synth_rows",
        count(1000),
        Unset,
        "Where data.train matches nothing: make so many rows of synthetic data there first (layout criteo).",
    ),
    setting(
        "data.bad_records_max",
        count(0),
        Value("0"),
        "Malformed records that are set aside and counted before the job fails.",
    ),
    setting(
        "data.shuffle",
        Rule::Flag,
        Value("true"),
        "Seeded shuffle of tasks, and of records inside a task.",
    ),
    setting(
        "data.batches_per_task",
        Rule::Count { min: 1, max: 100_000 },
        Value("16"),
        "Batches in a shard; the unit of work that is leased.",
    ),
    setting(
        "train.epochs",
        Rule::Count { min: 1, max: 1_000_000 },
        Value("1"),
        "Passes over the training data.",
    ),
    setting("train.batch", Rule::Count { min: 1, max: 1 << 20 }, Value("4096"), "Records in a batch."),
    setting(
        "train.optimizer",
        Rule::OneOf(&optimizer::NAMES),
        Value("adagrad"),
        "How gradients change weights.",
    ),
    setting("train.learning_rate", Rule::Positive, Value("0.01"), "Step size."),
    setting(
        "train.momentum",
        Rule::Fraction,
        Value("0.9"),
        "momentum, nesterov: what is kept of the velocity.",
    ),
    setting(
        "train.initial_accumulator",
        Rule::NotNegative,
        Value("0.1"),
        "adagrad, adagrad-row, ftrl: what the sum of squares starts with.",
    ),
    setting("train.beta1", Rule::Fraction, Value("0.9"), "adam, amsgrad, adamw: decay of the first moment."),
    setting(
        "train.beta2",
        Rule::Fraction,
        Value("0.999"),
        "adam, amsgrad, adamw: decay of the second moment.",
    ),
    setting(
        "train.epsilon",
        Rule::Positive,
        Value("1e-8"),
        "adagrad, adagrad-row, adam, amsgrad, adamw, rmsprop: added to the root.",
    ),
    setting(
        "train.weight_decay",
        Rule::NotNegative,
        Value("0.01"),
        "adamw: with each step a weight loses this part of itself, times the learning rate.",
    ),
    setting("train.rho", Rule::Fraction, Value("0.99"), "rmsprop: decay of the mean of squares."),
    setting(
        "train.l1",
        Rule::NotNegative,
        Value("0"),
        "ftrl: weights stay zero until their gradients sum up to more than this.",
    ),
    setting("train.l2", Rule::NotNegative, Value("0"), "ftrl: pull of the weights towards zero."),
    setting("train.beta", Rule::NotNegative, Value("0"), "ftrl: added to the root."),
    setting(
        "train.schedule",
        Rule::OneOf(&["constant", "step", "cosine"]),
        Value("constant"),
        "How the learning rate goes, by a batch's place in the job: constant; step: times train.decay_factor after each train.decay_steps; cosine: down to train.learning_rate_end at the last batch.",
    ),
    setting(
        "train.warmup_steps",
        count(0),
        Value("0"),
        "Over so many batches of the job, of all workers together, the learning rate grows linearly to its full size.",
    ),
    setting(
        "train.decay_steps",
        count(1),
        Unset,
        "step: the learning rate falls after each so many batches of the job, of all workers together.",
    ),
    setting(
        "train.decay_factor",
        Rule::Fraction,
        Value("0.1"),
        "step: what the learning rate is multiplied by each time.",
    ),
    setting(
        "train.learning_rate_end",
        Rule::NotNegative,
        Value("0"),
        "cosine: the learning rate of the last batch of the job.",
    ),
    setting(
        "train.clip_value",
        Rule::Positive,
        Unset,
        "Each number of a batch's gradient is kept from minus this to this; unset: they are as they are.",
    ),
    setting(
        "train.clip_norm",
        Rule::Positive,
        Unset,
        "A batch's gradient, of rows and tensors together, is shortened to this norm where it is longer; after train.clip_value; unset: it is as it is.",
    ),
    setting("train.seed", count(0), Value("7"), "Of everything that is drawn: initial weights, shuffles."),
    setting(
        "train.consistency",
        Rule::OneOf(&["asynchronous", "synchronous", "hybrid"]),
        Value("asynchronous"),
        "How gradients of several workers come together. asynchronous: each is applied when it comes. synchronous: train.grads_to_wait batches are computed from the same weights and applied as one step, as the mean of their gradients. hybrid: rows as in asynchronous, dense tensors as in synchronous.",
    ),
    setting(
        "train.grads_to_wait",
        Rule::Count { min: 1, max: 65_536 },
        Value("1"),
        "synchronous, hybrid: batches that make a step.",
    ),
    setting(
        "train.staleness",
        count(0),
        Unset,
        "How many batches of others may be applied between the pull and the push of a batch: workers wait for each other so that there are never more. 0: one batch after the other, and an outcome that is the same to the bit whatever dies on the way (one worker). Unset: as fast as it goes.",
    ),
    setting(
        "train.staleness_modulation",
        Rule::Flag,
        Value("false"),
        "Divide the learning rate of a batch by its staleness: by how many batches a partition has applied since the batch was pulled from it, where that is more than one.",
    ),
    setting(
        "tables",
        Rule::Mapping,
        Value("{}"),
        "Settings of single tables by name, and of all by \"*\", as in { \"*\": { l2: 1e-6 } }, or --set 'tables.*.l2=1e-6'; what is said of one counts before what is said of all. l2: so much of each weight of a row is added to its gradient whenever the row is trained. wire: how rows and gradients travel between workers and servers, f32 as they are, bf16 or f16 rounded and half as long. memory_max: so much memory, as in 2Gi, may all rows of the table take on all servers together, with slots and indexes. admit_after: so many pushes name an id before it gets a row; 1 unless said. evict: whose row goes where memory_max is reached, use for one that was not trained lately, age for the one that was born first.",
    ),
    setting(
        "evaluate.every",
        Rule::Duration,
        Unset,
        "Judge the model so often while it trains, where something was trained since; unset: only at the end.",
    ),
    setting(
        "evaluate.steps",
        Rule::Count { min: 1, max: u64::MAX },
        Unset,
        "Judge the model whenever so many more batches are trained; unset: not by their number.",
    ),
    setting(
        "workers.count",
        Rule::Count { min: 1, max: 1024 },
        Unset,
        "So many workers, until `elasticdl scale` changes it; unset: as many as are of use where workers.max is given, else workers.min.",
    ),
    setting(
        "workers.max",
        Rule::Count { min: 1, max: 1024 },
        Value("16"),
        "Never more workers than that; given without workers.count, the master finds out how many are of use.",
    ),
    setting(
        "workers.threads",
        Rule::Count { min: 1, max: 256 },
        Value("1"),
        "Compute threads in each worker; a batch is cut into as many parts.",
    ),
    setting(
        "workers.pipeline",
        Rule::Count { min: 1, max: 64 },
        Value("4"),
        "Batches between their pull and their acknowledged push in a worker; 1: strictly one after the other.",
    ),
    setting(
        "workers.min",
        Rule::Count { min: 1, max: 1024 },
        Value("1"),
        "Never fewer workers than that by the master's own choice; on a cluster, room for so many is kept for the job.",
    ),
    setting("workers.cpu", Rule::Amount, Value("1"), "On a cluster: processors that each worker asks for."),
    setting("workers.memory", Rule::Amount, Value("2Gi"), "On a cluster: memory that each worker asks for."),
    setting("workers.gpu", count(0), Value("0"), "On a cluster: GPUs of each worker."),
    setting(
        "workers.cpu_limit",
        Rule::Amount,
        Unset,
        "On a cluster: processors that a worker may use; unset: what the node has to spare.",
    ),
    setting(
        "workers.memory_limit",
        Rule::Amount,
        Unset,
        "On a cluster: memory at which a worker is killed; unset: workers.memory.",
    ),
    setting(
        "workers.memory_max",
        Rule::Amount,
        Unset,
        "On a cluster: a worker killed for its memory gets half as much again, up to this; unset: four times workers.memory.",
    ),
    setting(
        "workers.priority",
        Rule::Priority,
        Value("low"),
        "On a cluster: low ones give way to online services; or the fraction of the workers that is high.",
    ),
    setting(
        "workers.pod",
        Rule::Mapping,
        Unset,
        "On a cluster: laid over the workers' pods, as a pod template.",
    ),
    setting("servers.count", Rule::Count { min: 1, max: 1024 }, Value("1"), "Parameter servers."),
    setting(
        "servers.partitions",
        Rule::Count { min: 1, max: 4096 },
        Value("8"),
        "Parts that tables and tensors are dealt in; fixed for the life of the job.",
    ),
    setting(
        "servers.replicas",
        Rule::Count { min: 1, max: 2 },
        Value("1"),
        "2: each partition has a backup at another server that lacks nothing, so that nothing is trained again when a server dies. Servers then hold and send twice as much.",
    ),
    setting("servers.cpu", Rule::Amount, Value("1"), "On a cluster: processors that each server asks for."),
    setting("servers.memory", Rule::Amount, Value("2Gi"), "On a cluster: memory that each server asks for."),
    setting("servers.cpu_limit", Rule::Amount, Unset, "On a cluster: processors that a server may use."),
    setting(
        "servers.memory_limit",
        Rule::Amount,
        Unset,
        "On a cluster: memory at which a server is killed; unset: servers.memory.",
    ),
    setting(
        "servers.memory_max",
        Rule::Amount,
        Unset,
        "On a cluster: a server killed for its memory gets half as much again, up to this; unset: four times servers.memory.",
    ),
    setting(
        "servers.pod",
        Rule::Mapping,
        Unset,
        "On a cluster: laid over the servers' pods, as a pod template.",
    ),
    setting("master.cpu", Rule::Amount, Value("200m"), "On a cluster: processors that the master asks for."),
    setting("master.memory", Rule::Amount, Value("512Mi"), "On a cluster: memory that the master asks for."),
    setting("master.cpu_limit", Rule::Amount, Unset, "On a cluster: processors that the master may use."),
    setting(
        "master.memory_limit",
        Rule::Amount,
        Unset,
        "On a cluster: memory at which the master is killed; unset: no limit.",
    ),
    setting(
        "master.pod",
        Rule::Mapping,
        Unset,
        "On a cluster: laid over the master's pod, as a pod template.",
    ),
    setting(
        "command.run",
        Rule::Texts,
        Unset,
        "A program of your own and its arguments, run in place of a model of ours: [python, train.py].",
    ),
    setting(
        "command.framework",
        Rule::OneOf(&["none", "tensorflow", "torch", "dmlc"]),
        Value("none"),
        "Which variables tell the program of the others: TF_CONFIG, torchrun's, DMLC_*, or only ELASTICDL_*.",
    ),
    setting(
        "command.roles",
        Rule::Tally,
        Value("{ worker: 1 }"),
        "How many of each; tensorflow: chief, worker, ps, evaluator; torch: worker; dmlc: scheduler, server, worker; none: any name.",
    ),
    setting(
        "command.port",
        Rule::Count { min: 1, max: 65535 },
        Value("29500"),
        "The port that each of them may listen on; on a single machine each gets a free one.",
    ),
    setting(
        "command.env",
        Rule::Pairs,
        Value("{}"),
        "Environment variables of the program, wherever it runs.",
    ),
    setting(
        "command.image",
        Rule::Text,
        Unset,
        "On a cluster: image that the program runs in; unset: kubernetes.image. The master always runs in the latter.",
    ),
    setting(
        "command.success",
        Rule::OneOf(&["chief", "workers", "all"]),
        Unset,
        "Who must end with exit code 0 for the job to be done; unset: the chief, else the workers, else all.",
    ),
    setting(
        "command.restart.policy",
        Rule::OneOf(&["never", "on-failure", "always"]),
        Value("on-failure"),
        "What is started again: nothing, what ended badly, or whatever ended before the job was done.",
    ),
    setting(
        "command.restart.max",
        Rule::Count { min: 0, max: 1000 },
        Value("3"),
        "How often before the job has failed; ends from outside (preempted, evicted, node lost) do not count.",
    ),
    setting(
        "command.restart.scope",
        Rule::OneOf(&["all", "one"]),
        Unset,
        "Who is started again: all together, or the one that ended; unset: one where there are tensorflow ps, else all.",
    ),
    setting(
        "command.wait",
        Rule::Duration,
        Value("60s"),
        "On a cluster: all start or none. Where there is no room for all of them for so long, those that have some give it back and all try again later.",
    ),
    setting(
        "checkpoint.dir",
        Rule::Text,
        Unset,
        "Where checkpoints and the ledger go: a directory, or a URL such as s3://bucket/ckpt; unset: the job's own directory.",
    ),
    setting(
        "checkpoint.every",
        Rule::Duration,
        Unset,
        "Write a checkpoint so often; unset: only on stop and at the end.",
    ),
    setting(
        "checkpoint.full_every",
        Rule::Count { min: 1, max: 1000 },
        Value("8"),
        "Every so many checkpoints one holds all rows; those between hold the rows that changed since the one before. 1: each holds all.",
    ),
    setting(
        "checkpoint.keep",
        Rule::Count { min: 1, max: 10_000 },
        Value("3"),
        "Committed checkpoints that are kept; files of older ones stay where a kept one adds to them.",
    ),
    setting(
        "output",
        Rule::Text,
        Unset,
        "Directory or URL to export the trained model to; unset: it stays in the checkpoint.",
    ),
    setting(
        "security.tls",
        Rule::Flag,
        Value("false"),
        "Encrypt everything between the job's processes, with certificates made at submit; needed where the job listens beyond this machine.",
    ),
    setting(
        "limits.lease",
        Rule::Duration,
        Value("60s"),
        "A worker that has no batch done for so long loses its task.",
    ),
    setting(
        "limits.orphan",
        Rule::Duration,
        Value("30s"),
        "A worker or server that hears of no master for so long ends itself.",
    ),
    setting(
        "limits.silence",
        Rule::Duration,
        Value("60s"),
        "A worker or server that the master has not heard of for so long is ended and started again.",
    ),
    setting(
        "limits.restarts",
        Rule::Count { min: 0, max: 1000 },
        Value("5"),
        "Deaths of a process in a row, without a batch done in between, before the job fails.",
    ),
    setting(
        "suspend",
        Rule::Flag,
        Value("false"),
        "On a cluster with the operator: true stops the job after a checkpoint, false goes on from there.",
    ),
    setting(
        "deadline",
        Rule::Duration,
        Unset,
        "On a cluster with the operator: a job that runs for so long, counted from its start or resumption, is stopped and has failed.",
    ),
    setting(
        "ttl",
        Rule::Duration,
        Unset,
        "On a cluster with the operator: a job that is over is removed after so long; unset: it stays.",
    ),
    setting(
        "weight",
        Rule::Count { min: 1, max: 1_000_000 },
        Value("1"),
        "On a cluster with the operator: the job's share of the room for workers, beside that of other jobs.",
    ),
    setting("kubernetes.namespace", Rule::Name, Unset, "Namespace of the job; unset: that of the context."),
    setting(
        "kubernetes.image",
        Rule::Text,
        Unset,
        "Image of the pods, made with `elasticdl image`; unset: that of this version.",
    ),
    setting(
        "kubernetes.image_pull_policy",
        Rule::OneOf(&["Always", "IfNotPresent", "Never"]),
        Value("IfNotPresent"),
        "When nodes fetch the image.",
    ),
    setting("kubernetes.image_pull_secrets", Rule::Texts, Value("[]"), "Secrets to fetch the image with."),
    setting(
        "kubernetes.service_account",
        Rule::Text,
        Unset,
        "Account of the master's pod, which may manage pods; unset: one is made for the job.",
    ),
    setting(
        "kubernetes.directory",
        Rule::Text,
        Unset,
        "Directory in the pods that the paths in this file start from; unset: where the first volume is mounted.",
    ),
    setting(
        "kubernetes.volumes",
        Rule::Mappings,
        Value("[]"),
        "Volumes as in a pod, each with a mountPath (and readOnly, subPath): persistentVolumeClaim, hostPath, nfs, configMap, secret. A job whose data, checkpoint.dir and output are URLs needs none.",
    ),
    setting("kubernetes.env", Rule::Pairs, Value("{}"), "Environment variables of every pod."),
    setting("kubernetes.labels", Rule::Pairs, Value("{}"), "Labels of every pod."),
    setting("kubernetes.annotations", Rule::Pairs, Value("{}"), "Annotations of every pod."),
    setting("kubernetes.node_selector", Rule::Pairs, Value("{}"), "Labels that a pod's node must have."),
    setting("kubernetes.tolerations", Rule::Mappings, Value("[]"), "Taints that the pods put up with."),
    setting("kubernetes.affinity", Rule::Mapping, Unset, "Where pods are better or must be, as in a pod."),
    setting(
        "kubernetes.grace",
        Rule::Duration,
        Value("30s"),
        "How long a pod that is to end may take to finish the batch in hand.",
    ),
];

/// The setting at `path`.
pub fn find(path: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|s| s.path == path)
}

impl Setting {
    /// Where it stands in the job file.
    pub fn file_path(&self) -> String {
        match self.path {
            "name" => "metadata.name".into(),
            path => format!("spec.{path}"),
        }
    }

    /// The environment variable that overrides the file.
    pub fn variable(&self) -> String {
        format!("ELASTICDL_{}", self.path.to_uppercase().replace('.', "_"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn paths_and_variables_are_unique_and_helps_are_sentences() {
        let paths: BTreeSet<_> = SETTINGS.iter().map(|s| s.path).collect();
        let variables: BTreeSet<_> = SETTINGS.iter().map(Setting::variable).collect();
        assert_eq!((paths.len(), variables.len()), (SETTINGS.len(), SETTINGS.len()));
        for s in SETTINGS {
            assert!(s.help.ends_with('.'), "{}: {}", s.path, s.help);
        }
    }
}
