//! The command line: what can be said, and the help that explains it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use elasticdl_master::status::{ScaleRequest, Wanted};

mod data;
mod image;
mod operator;

pub use data::{Data, Format, Head, Synth, SynthFormat, SynthLayout};
pub use image::{Image, OWN_IMAGE, Zoo, ZooBuild, ZooInit, ZooPush};
pub use operator::{Crd, Operator, OperatorFiles};

/// Everything on one screen, grouped by what a person wants to do.
const OVERVIEW: &str = "\
{about}

Usage: elasticdl COMMAND …

Train
  train      Train the model of a job file, here and now
  resume     Go on with a job that was stopped, failed or lost its master

Watch and steer jobs
  jobs       List the jobs of this machine
  status     Show one job: progress, quality, workers, and what servers hold
  top        Watch a running job live
  logs       Show what a job's processes have written
  scale      Change the number of workers or servers of a running job
  stop       Stop a job after a checkpoint

Prove that nothing is lost
  audit      Check that every record counts exactly once
  chaos      Kill and pause a running job's processes, and see how it copes

Use a trained model
  export     Write a job's model as safetensors with a manifest
  evaluate   Judge an exported model on data: logloss and AUC
  predict    Write a probability for each record of some data

Data and settings
  data       Make synthetic data; look at data files
  config     Show every setting of a job file and where it came from

Container images
  image      Write an image archive with this program; no Docker needed
  zoo        Make a model zoo, an image of it, and push that to a registry

Clusters
  operator   Look after ElasticJobs on a cluster; print what to install there

Roles (started by the master; you rarely need them)
  master     Lead a job: shards, leases, checkpoints, status
  tether     Lead to a job on a cluster: its objects, its master's pod, its logs
  ps         Hold a part of the parameters
  worker     Train on leased records
  member     Run one process of a program of your own

Options:
{options}

First steps:
  elasticdl train examples/deepfm.yaml          makes its data, trains, ends with logloss and AUC
  elasticdl train job.yaml --workers 4          flags override the file
  elasticdl COMMAND --help                      all about one command

Jobs live in $ELASTICDL_HOME (default ~/.elasticdl). Every setting of a job file can also be given as
an environment variable (train.batch: ELASTICDL_TRAIN_BATCH) or with --set train.batch=1024.
ELASTICDL_LOG=debug makes the processes say more in their logs.

Exit codes: 0 done, 1 the input is wrong, 2 a bug in elasticdl, 3 the job failed.
";

/// Elastic training of click-through models: data in, a model and its quality out.
#[derive(Debug, Parser)]
#[command(name = "elasticdl", version, help_template = OVERVIEW, max_term_width = 100)]
#[command(disable_help_subcommand = true, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train the model of a job file, here and now.
    Train(Train),
    /// Go on with a job that was stopped, failed or lost its master.
    Resume(Resume),
    /// List the jobs of this machine.
    Jobs(Jobs),
    /// Show one job: progress, quality, workers, and what servers hold.
    Status(Status),
    /// Watch a running job live; Ctrl-C leaves, the job goes on.
    Top(Top),
    /// Show what a job's processes have written.
    Logs(Logs),
    /// Change the number of workers or servers of a running job.
    Scale(Scale),
    /// Stop a job after a checkpoint.
    Stop(Stop),
    /// Check that every record counts exactly once.
    Audit(Audit),
    /// Kill and pause a running job's processes, and see how it copes.
    Chaos(Chaos),
    /// Write a job's model as safetensors with a manifest.
    Export(Export),
    /// Judge an exported model on data: logloss and AUC.
    Evaluate(Evaluate),
    /// Write a probability for each record of some data.
    Predict(Predict),
    /// Make synthetic data; look at data files.
    #[command(subcommand)]
    Data(Data),
    /// Show every setting of a job file and where it came from.
    #[command(subcommand)]
    Config(Config),
    /// Write a container image archive with this program; no Docker needed.
    Image(Image),
    /// Make a model zoo, an image of it, and push that to a registry.
    #[command(subcommand)]
    Zoo(Zoo),
    /// Look after ElasticJobs on a cluster; print what to install there.
    Operator(Operator),
    /// Lead a job: shards, leases, checkpoints, status. Started by train and resume.
    Master(Master),
    /// Lead to a job on a cluster: its objects, its master's pod, its logs. Started by train and resume.
    Tether(Tether),
    /// Hold a part of the parameters. Started by the master.
    Ps(Member),
    /// Train on leased records. Started by the master.
    Worker(Member),
    /// Run one process of a person's own program. Started by the master.
    #[command(subcommand)]
    Member(Part),
}

/// What a member of a person's own program does.
#[derive(Debug, Subcommand)]
pub enum Part {
    /// Join the master, run the program when all members are there, and tell how it ends.
    Run(Member),
    /// Become the program; it ends with the process that asked for it.
    Exec(Exec),
    /// Copy this program into a directory, for a container with another image.
    Install(Install),
}

/// Arguments of `member exec`.
#[derive(Debug, Args)]
pub struct Exec {
    /// The process that asked for it.
    #[arg(long, value_name = "PID")]
    pub parent: u32,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub program: Vec<String>,
}

/// Arguments of `member install`.
#[derive(Debug, Args)]
pub struct Install {
    /// The directory.
    pub dir: PathBuf,
}

/// Settings from a job file, and flags that override them.
#[derive(Debug, Args)]
pub struct JobFile {
    /// The job file (YAML).
    #[arg(value_name = "JOB.yaml")]
    pub file: PathBuf,
    /// Override a setting; may be repeated. `elasticdl config show` lists them all.
    #[arg(long, value_name = "PATH=VALUE", value_parser = path_and_value)]
    pub set: Vec<(String, String)>,
    /// Name of the job (metadata.name).
    #[arg(long)]
    pub name: Option<String>,
    /// So many workers (workers.count); with workers.max alone, as many as are of use.
    #[arg(long, value_name = "N")]
    pub workers: Option<String>,
    /// Parameter servers (servers.count).
    #[arg(long, value_name = "N")]
    pub servers: Option<String>,
    /// Passes over the training data (train.epochs).
    #[arg(long, value_name = "N")]
    pub epochs: Option<String>,
    /// Records in a batch (train.batch).
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub batch: Option<String>,
    /// Step size (train.learning_rate).
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub learning_rate: Option<String>,
    /// Directory to export the model to (output).
    #[arg(long, value_name = "DIR")]
    pub output: Option<String>,
}

fn path_and_value(text: &str) -> Result<(String, String), String> {
    let (path, value) = text.split_once('=').ok_or("write it as PATH=VALUE, for example train.batch=1024")?;
    Ok((path.trim().into(), value.trim().into()))
}

impl JobFile {
    /// The overrides as `path=value` pairs; the short flags after `--set`, so that they win.
    pub fn overrides(&self) -> Vec<(String, String)> {
        let short = [
            ("name", &self.name),
            ("workers.count", &self.workers),
            ("servers.count", &self.servers),
            ("train.epochs", &self.epochs),
            ("train.batch", &self.batch),
            ("train.learning_rate", &self.learning_rate),
            ("output", &self.output),
        ];
        let given = short.into_iter().filter_map(|(path, value)| Some((path.to_string(), value.clone()?)));
        self.set.iter().cloned().chain(given).collect()
    }
}

/// Arguments of `train`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl train examples/deepfm.yaml
  elasticdl train job.yaml --workers 4 --set train.learning_rate=0.02
  elasticdl train job.yaml --json | tail -1          the result, for programs
  elasticdl train job.yaml --detach && elasticdl top ctr

Everything is checked before anything starts: the file, the data, the directories. Ctrl-C stops
after a checkpoint, and `elasticdl resume NAME` goes on from there; a second Ctrl-C stops at once.

Any process of the job may die. The master replaces workers and servers, and this command starts a
master that dies again, up to limits.restarts times in a row without a record done in between. With
--detach nobody does that: `elasticdl resume NAME` brings the master back.")]
pub struct Train {
    /// The job.
    #[command(flatten)]
    pub job: JobFile,
    /// How to follow it.
    #[command(flatten)]
    pub follow: Follow,
    /// Remove the checkpoints and the ledger of an earlier run from checkpoint.dir.
    #[arg(long)]
    pub fresh: bool,
    /// Where the job runs.
    #[arg(long, value_enum, default_value = "local")]
    pub on: Place,
    /// Context of kubectl that names the cluster; by default the current one.
    #[arg(long, value_name = "NAME", requires = "on")]
    pub context: Option<String>,
}

/// Where a job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Place {
    /// As processes of this machine.
    Local,
    /// As pods of the cluster that kubectl points at.
    Kubernetes,
}

/// How a job is followed.
#[derive(Debug, Args)]
pub struct Follow {
    /// Events on stdout, one JSON object per line; the last is {"event":"finished",…}.
    #[arg(long)]
    pub json: bool,
    /// Start the job and leave it running; `top`, `status` and `stop` find it by name.
    #[arg(long)]
    pub detach: bool,
    /// Where the master listens; by default a free port of 127.0.0.1.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<SocketAddr>,
}

/// Arguments of `resume`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl resume ctr
  elasticdl resume ctr --servers 4 --workers 8

The job goes on from its ledger: what the last checkpoint covers is not trained again, all else is,
each record once. A checkpoint restores onto any number of servers; numbers that are asked for here
stay. Where only the master is gone (kill -9, a detached job), its workers and servers go on for
limits.orphan; a master that is back by then takes them over as they are.")]
pub struct Resume {
    /// The job's name.
    pub job: String,
    /// How many workers and servers.
    #[command(flatten)]
    pub wanted: Counts,
    /// How to follow it.
    #[command(flatten)]
    pub follow: Follow,
}

/// How many workers and servers a job that goes on is to have.
#[derive(Debug, Clone, Copy, Args)]
pub struct Counts {
    /// How many workers are wanted from now on, at most workers.max of the job; or auto.
    #[arg(long, value_name = "N|auto")]
    pub workers: Option<Wanted>,
    /// How many parameter servers are wanted from now on, at most servers.partitions of the job.
    #[arg(long, value_name = "N")]
    pub servers: Option<u32>,
}

impl Counts {
    /// The same, as masters understand it.
    pub fn request(&self) -> ScaleRequest {
        ScaleRequest { workers: self.workers, servers: self.servers }
    }
}

/// Arguments of `jobs`.
#[derive(Debug, Args)]
pub struct Jobs {
    /// As a JSON array.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// As a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// The job's name.
    pub job: String,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl logs ctr                    the last lines of every process
  elasticdl logs ctr worker-0 -n 100
  elasticdl logs ctr master --follow")]
pub struct Logs {
    /// The job's name.
    pub job: String,
    /// One process: master, ps-0, worker-3; all of them by default.
    pub process: Option<String>,
    /// Go on with new lines until the job is over.
    #[arg(long, short)]
    pub follow: bool,
    /// How many of the last lines of each process.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    pub lines: usize,
}

/// Arguments of `scale`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl scale ctr --workers 8
  elasticdl scale ctr --workers auto    as many as are of use: the master measures it
  elasticdl scale ctr --servers 3

Workers that are new work within a second or two; those that are too many finish their batch and leave.
Between servers partitions move, rows and all, while training goes on; those that are too many leave when
they have none left.")]
#[command(group = clap::ArgGroup::new("wanted").args(["workers", "servers"]).required(true).multiple(true))]
pub struct Scale {
    /// The job's name.
    pub job: String,
    /// How many workers are wanted, at most workers.max of the job; or auto.
    #[arg(long, value_name = "N|auto")]
    pub workers: Option<Wanted>,
    /// How many parameter servers are wanted, at most servers.partitions of the job.
    #[arg(long, value_name = "N")]
    pub servers: Option<u32>,
}

/// Arguments of `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// The job's name.
    pub job: String,
    /// At once, without a checkpoint: what was trained since the last one is lost.
    #[arg(long)]
    pub now: bool,
}

/// Arguments of `audit`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl audit ctr
  elasticdl audit ctr --json | jq .exact

For every epoch and partition: the records that the data holds, less those set aside, beside those
that were applied. The servers count a batch where they change rows, and each checkpoint holds these
counts with a digest of which batches they were. So this does not take anybody's word for what is
done. Of a job that is not over it looks at the newest checkpoint.

  set aside  malformed, or of a batch that failed again and again
  replayed   applied again after a server died with them; they count once

Exit codes: 0 exact, 3 not exact, 1 there is no checkpoint to look at yet.")]
pub struct Audit {
    /// The job's name.
    pub job: String,
    /// The job's directory, where it is none of this machine's.
    #[arg(long, value_name = "DIR", hide = true)]
    pub job_dir: Option<PathBuf>,
    /// As one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A kind of process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// One of the workers.
    Worker,
    /// One of the parameter servers.
    Server,
    /// The master.
    Master,
}

/// Arguments of `chaos`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl chaos ctr --kill worker,server,master --every 5s --for 60s
  elasticdl chaos ctr --pause worker --pause-for 30s --seed 7
  elasticdl chaos ctr --kill server --json > hits.json; elasticdl audit ctr

Killed is SIGKILL, paused is SIGSTOP and later SIGCONT. Only processes of this job are hit. It ends
with the job, after --for, or with Ctrl-C, and lets everything that it paused go on. Then a table
tells for each hit, in seconds:

  detect     until the master knew
  regroup    from there until a replacement was there; of a master, until the next one listens
  load       until it could work: a server has its rows, a master gives leases
  replay     until what a server had lost was applied again; and how many records that was

Exit codes: 0 the job goes on or is done, 3 it failed, 1 it is not running.")]
pub struct Chaos {
    /// The job's name.
    pub job: String,
    /// What is killed, one of it each time; several with commas.
    #[arg(long, value_name = "ROLES", value_enum, value_delimiter = ',', required_unless_present = "pause")]
    pub kill: Vec<Target>,
    /// What is paused, likewise.
    #[arg(long, value_name = "ROLES", value_enum, value_delimiter = ',')]
    pub pause: Vec<Target>,
    /// From one hit to the next.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "3s")]
    pub every: Duration,
    /// Draws who is hit, and in which order.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// End after so long; by default with the job.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub limit: Option<Duration>,
    /// How long a pause is; by default limits.lease of the job and a second.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub pause_for: Option<Duration>,
    /// The table as one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|e| format!("{e}; write it as 3s, 500ms or 1m"))
}

/// Arguments of `export`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl export ctr --out model/

Takes the last committed checkpoint, of a running job too. model.safetensors holds the dense tensors by
name, and each embedding table as NAME.ids and NAME.rows; manifest.json says what they are.")]
pub struct Export {
    /// The job's name.
    pub job: String,
    /// Directory to write to; made where it is missing.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Arguments of `evaluate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl evaluate --model model/ --data 'data/test-*.tsv'")]
pub struct Evaluate {
    /// The model and the data.
    #[command(flatten)]
    pub input: ModelAndData,
    /// As a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `predict`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl predict --model model/ --data day-24.tsv --out scores.txt

One line per record, in the order of the files as given and of the records in them: how likely its
label is 1.")]
pub struct Predict {
    /// The model and the data.
    #[command(flatten)]
    pub input: ModelAndData,
    /// The files come without the label's column, as new records do.
    #[arg(long)]
    pub no_label: bool,
    /// File to write to; stdout by default.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// An exported model and records for it.
#[derive(Debug, Args)]
pub struct ModelAndData {
    /// Directory of an exported model.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Files or globs, in the layout that the model was trained with.
    #[arg(long, required = true, num_args = 1.., value_name = "FILES")]
    pub data: Vec<String>,
    /// Format of the files; by default their names tell.
    #[arg(long)]
    pub format: Option<Format>,
    /// Pass over malformed records (predict: their line is nan) instead of failing.
    #[arg(long)]
    pub skip_bad: bool,
    /// Compute threads; by default one per core.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Settings.
#[derive(Debug, Subcommand)]
pub enum Config {
    /// Every setting of a job file, its value, and who said it: default < file < environment < flag.
    Show(Show),
}

/// Arguments of `config show`.
#[derive(Debug, Args)]
pub struct Show {
    /// The job.
    #[command(flatten)]
    pub job: JobFile,
    /// As a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `master`.
#[derive(Debug, Args)]
pub struct Master {
    /// The job's directory, as `train` writes it: job.json and token.
    #[arg(long, value_name = "DIR")]
    pub job_dir: PathBuf,
    /// Go on from the ledger in the checkpoint directory; there must be one.
    #[arg(long)]
    pub resume: bool,
    /// How many workers and servers, whatever the ledger says.
    #[command(flatten)]
    pub wanted: Counts,
    /// Where to listen.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Directory with ca.pem, cert.pem and key.pem: speak TLS, to processes of the job alone.
    #[arg(long, value_name = "DIR", env = "ELASTICDL_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Stop the job, after a checkpoint, when stdin is closed: whoever started it is gone.
    #[arg(long)]
    pub attached: bool,
    /// Where workers and servers are started; on kubernetes this is a pod, with the job's secret mounted.
    #[arg(long, value_enum, default_value = "local")]
    pub on: Place,
    /// On kubernetes: remove the checkpoints of an earlier run from checkpoint.dir.
    #[arg(long)]
    pub fresh: bool,
    /// On kubernetes: no more workers than that at first; the operator says so, and may change it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub workers_allowed: Option<u32>,
}

/// Arguments of `tether`.
#[derive(Debug, Args)]
pub struct Tether {
    /// The job's directory, as `train` writes it.
    #[arg(long, value_name = "DIR")]
    pub job_dir: PathBuf,
    /// Whether the job is there already.
    #[arg(long)]
    pub resume: bool,
    /// End when stdin is closed; the job goes on.
    #[arg(long)]
    pub attached: bool,
}

/// Arguments of `ps`, `worker` and `member run`.
#[derive(Debug, Args)]
pub struct Member {
    /// The master's address.
    #[arg(long, value_name = "HOST:PORT")]
    pub master: String,
    /// File with the job's token, readable by its owner and group alone.
    #[arg(long, value_name = "FILE", env = "ELASTICDL_TOKEN_FILE")]
    pub token_file: PathBuf,
    /// Directory with ca.pem, cert.pem and key.pem: speak TLS, to processes of the job alone.
    #[arg(long, value_name = "DIR", env = "ELASTICDL_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Number of this process in the job.
    #[arg(long, value_name = "N")]
    pub id: u32,
    /// Tells it apart from others of its number; by default the id of the process.
    #[arg(long, value_name = "N", env = "ELASTICDL_PROCESS", hide_env_values = true)]
    pub process: Option<u32>,
    /// Where a ps, or the program of a member, listens; by default a free port of 127.0.0.1.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_overview_names_every_command_as_its_own_help_does() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands() {
            let line = format!("\n  {:<10} ", command.get_name());
            assert!(OVERVIEW.contains(&line), "{} is missing in the overview", command.get_name());
        }
    }
}
