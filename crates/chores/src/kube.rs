//! `cargo xtask kube`: a real Kubernetes cluster on this one machine, for tests.
//!
//! A control plane, real nodes that run real containers, and simulated nodes that only say they do. Only one
//! cluster runs on a machine; `down` ends what `up` started and nothing else. `docs/testcluster.md` tells
//! how it is put together and where it differs from a cluster in production.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

mod binaries;
mod cgroup;
mod check;
mod cluster;
mod control;
mod image;
mod kubectl;
mod kwok;
mod network;
mod nginx;
mod node;
mod pki;
mod places;
mod process;
mod quantity;
mod state;
mod status;
mod tunables;
mod wait;

use cgroup::Cgroup;
use cluster::Cluster;
pub use network::MACHINE_IP;
pub use nginx::NGINX;
use places::Places;
pub use process::succeed;
use quantity::Bytes;
pub use quantity::MilliCpu;

/// What can be done with the test cluster.
#[derive(Debug, Subcommand)]
pub enum Kube {
    /// Start a cluster, and print the line that points a shell at it.
    Up(Up),
    /// End the cluster and whatever is left of a broken one.
    Down(Down),
    /// Tell what runs.
    Status(Status),
    /// Power a real node off or on, or cut it off while it goes on.
    #[command(subcommand)]
    Node(Power),
    /// Give every real node an image from an OCI archive.
    Load(Load),
    /// Try what tests rely on, step by step, on a cluster of 2 real and 5 simulated nodes.
    Check,
}

/// A cluster that is wanted.
#[derive(Debug, Args)]
pub struct Up {
    #[command(flatten)]
    shape: Shape,
    /// An OCI archive that every real node gets; may be given more than once.
    #[arg(long = "image", value_name = "FILE.tar")]
    images: Vec<PathBuf>,
}

/// How many nodes of which size.
#[derive(Debug, Clone, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct Shape {
    /// Nodes that run containers.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=50))]
    nodes: u8,
    /// Processor that a real node offers, such as 1500m; the machine's where nothing is said.
    #[arg(long)]
    node_cpu: Option<MilliCpu>,
    /// Memory that a real node offers, such as 2Gi; the machine's where nothing is said.
    #[arg(long)]
    node_memory: Option<Bytes>,
    /// Nodes on which pods only seem to run.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=2000))]
    simulated: u16,
    /// Processor of a simulated node.
    #[arg(long, default_value = "32")]
    simulated_cpu: MilliCpu,
    /// Memory of a simulated node.
    #[arg(long, default_value = "128Gi")]
    simulated_memory: Bytes,
}

/// How much goes.
#[derive(Debug, Args)]
pub struct Down {
    /// Also remove logs, images, what lies in the shared directory, and binaries of other versions.
    #[arg(long)]
    purge: bool,
}

/// How to tell.
#[derive(Debug, Args)]
pub struct Status {
    /// As JSON, for programs.
    #[arg(long)]
    json: bool,
}

/// What happens to a node's power or cable.
#[derive(Debug, Subcommand)]
pub enum Power {
    /// Cut its cable and kill everything on it, at once.
    Off {
        /// n1, or just 1
        node: String,
    },
    /// Start it again with what its disk holds.
    On {
        /// n1, or just 1
        node: String,
    },
    /// Cut its cable; everything on it goes on.
    Cut {
        /// n1, or just 1
        node: String,
    },
    /// Put the cable back, and wait until it is ready.
    Mend {
        /// n1, or just 1
        node: String,
    },
}

/// What is to be loaded.
#[derive(Debug, Args)]
pub struct Load {
    /// OCI archives
    #[arg(required = true, value_name = "FILE.tar")]
    images: Vec<PathBuf>,
}

/// Does one chore.
pub fn run(chore: Kube) -> Result<()> {
    match chore {
        Kube::Up(wanted) => {
            let cluster = Cluster::up(wanted.shape, &wanted.images)?;
            println!("{}", cluster.exports());
            Ok(())
        }
        Kube::Down(how) if how.purge => Cluster::purge(),
        Kube::Down(_) => Cluster::down(),
        Kube::Status(how) => status::print(how.json),
        Kube::Node(Power::Off { node }) => Cluster::running()?.power_off(&node),
        Kube::Node(Power::On { node }) => Cluster::running()?.power_on(&node),
        Kube::Node(Power::Cut { node }) => Cluster::running()?.cut(&node),
        Kube::Node(Power::Mend { node }) => Cluster::running()?.mend(&node),
        Kube::Load(wanted) => Cluster::running()?.load(&wanted.images),
        Kube::Check => check::check(),
    }
}

/// What a cluster counts in an experiment, where 1024 is a process: all of its own are one group, and the operator and
/// other processes of the experiment are another one that counts as much.
const SHARES: u32 = 20 * 1024;

/// A cluster for an experiment.
#[derive(Debug)]
pub struct Lent(Cluster);

impl Lent {
    /// One of simulated nodes with so many processors each.
    pub fn simulated(nodes: u16, cpus: u32) -> Result<Lent> {
        let shape = Shape {
            nodes: 0,
            node_cpu: None,
            node_memory: None,
            simulated: nodes,
            simulated_cpu: MilliCpu(u64::from(cpus) * 1000),
            simulated_memory: "128Gi".parse()?,
        };
        Lent::up(shape, &[])
    }

    /// One of real nodes with so much processor each, with nginx and these images.
    pub fn real(nodes: u8, cpu: MilliCpu, images: &[PathBuf]) -> Result<Lent> {
        let shape = Shape {
            nodes,
            node_cpu: Some(cpu),
            node_memory: Some("8Gi".parse()?),
            simulated: 0,
            simulated_cpu: MilliCpu(1000),
            simulated_memory: "1Gi".parse()?,
        };
        let nginx = nginx::archive(&Places::find()?)?;
        Lent::up(shape, &[images, &[nginx]].concat())
    }

    /// Whatever else this machine does is to say little in the outcome.
    fn up(shape: Shape, images: &[PathBuf]) -> Result<Lent> {
        let cluster = Cluster::up(shape, images)?;
        Cgroup::cluster().weigh(SHARES)?;
        Cgroup::lab().enter(SHARES)?;
        Ok(Lent(cluster))
    }

    /// A kubeconfig of the administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.0.places.admin_config()
    }

    /// At the same path on this machine and on all real nodes.
    pub fn shared(&self) -> PathBuf {
        self.0.places.shared()
    }

    /// Its processes, by name and number.
    pub fn processes(&self) -> Vec<(String, u32)> {
        self.0.state.processes.iter().map(|process| (process.name.clone(), process.pid)).collect()
    }

    /// Ends it. Whatever else the experiment started has ended before.
    pub fn down(self) -> Result<()> {
        let left = Cgroup::lab().leave();
        self.0.into_down()?;
        left
    }
}

/// A cluster of two small nodes with these images, for the project's own tests.
pub fn up_for_tests(images: &[PathBuf]) -> Result<Vec<(&'static str, String)>> {
    let shape = Shape {
        nodes: 2,
        node_cpu: Some("1500m".parse()?),
        node_memory: Some("4Gi".parse()?),
        simulated: 0,
        simulated_cpu: "32".parse()?,
        simulated_memory: "128Gi".parse()?,
    };
    Cluster::up(shape, images)?.test_environment()
}

/// Ends the cluster of the tests.
pub fn down_after_tests() -> Result<()> {
    Cluster::down()
}
