//! What `up` made, written down as it is made, so that any later chore finds it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::Shape;
use super::places::{Places, write_file};
use super::process::Process;

/// A cluster, whole or half made.
#[derive(Debug, Serialize, Deserialize)]
pub struct State {
    /// How far `up` came.
    pub phase: Phase,
    /// What was asked for.
    pub shape: Shape,
    /// Where the programs lie.
    pub binaries: PathBuf,
    /// Which start of the machine this is of: nothing of it runs after the next one.
    pub boot: String,
    /// What was started; some of it may have died since.
    pub processes: Vec<Process>,
    /// Kernel settings before the first kubelet.
    pub tunables: BTreeMap<String, String>,
}

/// How far `up` came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// `up` is at work, or was ended in the middle of it.
    Starting,
    /// All of it was reached.
    Up,
}

impl State {
    /// What is written down; `None` where no cluster was begun since the last `down`.
    pub fn read(places: &Places) -> Result<Option<State>> {
        let path = places.state();
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("read {}", path.display()))?,
        };
        // What an older version wrote need not be understood: `down` finds everything without it.
        Ok(serde_json::from_str(&text).ok())
    }

    /// Writes it down at once: a crash leaves the old one or the new one.
    pub fn write(&self, places: &Places) -> Result<()> {
        let (path, partial) = (places.state(), places.state().with_extension("partial"));
        write_file(&partial, serde_json::to_vec_pretty(self).context("write down the state")?)?;
        fs::rename(&partial, &path).with_context(|| format!("rename {}", partial.display()))
    }

    /// Processes that should run and do not.
    pub fn dead(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|process| !process.runs())
    }

    /// Whether the control plane is whole.
    pub fn serves(&self) -> bool {
        self.phase == Phase::Up && self.dead().all(|process| process.node.is_some())
    }

    /// Whether the kubelet of a node runs.
    pub fn node_is_on(&self, node: &str) -> bool {
        self.processes.iter().any(|process| process.name == format!("kubelet-{node}") && process.runs())
    }
}

/// Which start of the machine this is.
pub fn boot() -> Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the machine's boot id")?;
    Ok(id.trim().to_owned())
}

/// Held while a chore changes the cluster of this machine: a second one is turned away.
///
/// It is one file for the whole machine, whichever cache a chore uses, and names the cache of the last `up`.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

const LOCK: &str = "/run/elasticdl-testcluster.lock";

impl Lock {
    /// Takes it, or says that another chore has it.
    pub fn take() -> Result<Lock> {
        ensure!(rustix::process::geteuid().is_root(), "only root may make and end namespaces and nodes");
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(LOCK);
        let file = file.with_context(|| format!("open {LOCK}"))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("another `cargo xtask kube` is at work on the cluster of this machine; wait for it");
        }
        Ok(Lock { file })
    }

    /// The home of the cluster that was begun last, where it is not that of `places`.
    pub fn other_owner(&mut self, places: &Places) -> Result<Option<String>> {
        let mut owner = String::new();
        self.file.rewind().and_then(|()| self.file.read_to_string(&mut owner)).context("read the lock")?;
        Ok(Some(owner).filter(|owner| !owner.is_empty() && Path::new(owner) != places.home()))
    }

    /// Says whose cluster begins now.
    pub fn claim(&mut self, places: &Places) -> Result<()> {
        let home = places.home().display().to_string();
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .and_then(|()| self.file.write_all(home.as_bytes()))
            .context("write the lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::quantity::{Bytes, MilliCpu};

    /// A process that does not run: no start time is that late.
    fn dead(name: &str, node: Option<&str>) -> Process {
        Process { name: name.into(), node: node.map(str::to_owned), pid: 1, started: u64::MAX }
    }

    fn state(processes: Vec<Process>) -> State {
        let shape = Shape {
            nodes: 1,
            node_cpu: Some(MilliCpu(500)),
            node_memory: None,
            simulated: 0,
            simulated_cpu: MilliCpu(1000),
            simulated_memory: Bytes(1 << 30),
        };
        let tunables = [("kernel/panic".to_owned(), "1".to_owned())].into();
        State { phase: Phase::Up, shape, binaries: "bin".into(), boot: "b".into(), processes, tunables }
    }

    #[test]
    fn what_is_written_down_is_read_again_and_what_nobody_understands_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        assert!(State::read(&places).unwrap().is_none());
        let written = state(vec![dead("etcd", None)]);
        written.write(&places).unwrap();
        let read = State::read(&places).unwrap().unwrap();
        assert_eq!(read.shape, written.shape);
        assert_eq!(read.processes, written.processes);
        assert_eq!(read.tunables, written.tunables);
        fs::write(places.state(), "{").unwrap();
        assert!(State::read(&places).unwrap().is_none());
    }

    #[test]
    fn a_cluster_serves_without_a_node_but_not_without_its_control_plane() {
        let lost_node = state(vec![dead("kubelet-n1", Some("n1"))]);
        assert!(lost_node.serves());
        assert!(!lost_node.node_is_on("n1"));
        assert!(!state(vec![dead("etcd", None)]).serves());
        assert!(!State { phase: Phase::Starting, ..state(Vec::new()) }.serves());
    }
}
