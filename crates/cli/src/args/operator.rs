//! What can be said about the operator.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Arguments of `operator`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:
  elasticdl operator crd | kubectl apply -f -        install it, with its rights and its deployment
  kubectl apply -f job.yaml                          the file that `elasticdl train` takes
  kubectl get elasticjobs                            phase, progress, workers, AUC
  kubectl scale elasticjob ctr --replicas 4          more or fewer workers
  kubectl patch elasticjob ctr --type merge -p '{\"spec\":{\"suspend\":true}}'

It calls masters at the addresses of their pods: run it where those can be reached.")]
pub struct Operator {
    /// What to print instead.
    #[command(subcommand)]
    pub files: Option<OperatorFiles>,
    /// The namespace whose jobs are looked after, or all of them.
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub namespace: String,
    /// Wait until no other operator leads, by a Lease.
    #[arg(long)]
    pub leader_elect: bool,
    /// Namespace of that Lease; by default the operator's own, or that of the context.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", hide_env_values = true)]
    pub lease_namespace: Option<String>,
    /// Tell there how long looks at jobs take and how often the API server is asked, for Prometheus.
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Context of kubectl that names the cluster; by default the current one, or the one this runs in.
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

/// Files for a cluster.
#[derive(Debug, Subcommand)]
pub enum OperatorFiles {
    /// Print what the operator needs on a cluster: the resource, rights, a deployment, priorities.
    Crd(Crd),
}

/// Arguments of `operator crd`.
#[derive(Debug, Args)]
pub struct Crd {
    /// Only the definition of the resource.
    #[arg(long, conflicts_with = "out")]
    pub crd_only: bool,
    /// Write the files there instead, with a kustomization.yaml.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
