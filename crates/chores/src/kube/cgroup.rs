//! Control groups: who belongs to the cluster, and to which node.
//!
//! Every process enters its group before it becomes what it is to be, and children inherit it. So the groups
//! know what `up` started even where `up` itself was killed before it could write that down.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::process::alive_since;
use super::wait;

/// All of the cluster.
const CLUSTER: &str = "elasticdl-kube";
/// What an experiment runs beside it.
const LAB: &str = "elasticdl-lab";
const MOUNTS: &str = "/sys/fs/cgroup";

/// A group of that path in every hierarchy of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    path: String,
}

impl Cgroup {
    /// Everything that belongs to the cluster.
    pub fn cluster() -> Cgroup {
        Cgroup { path: CLUSTER.to_owned() }
    }

    /// What an experiment runs outside of the cluster's own processes.
    pub fn lab() -> Cgroup {
        Cgroup { path: LAB.to_owned() }
    }

    /// What serves the cluster as a whole.
    pub fn control() -> Cgroup {
        Cgroup::cluster().child("control")
    }

    /// Everything on a node, pods included.
    pub fn node(name: &str) -> Cgroup {
        Cgroup::cluster().child(name)
    }

    /// A group inside this one.
    pub fn child(&self, name: &str) -> Cgroup {
        Cgroup { path: format!("{}/{name}", self.path) }
    }

    /// As a kubelet wants to be told its root.
    pub fn absolute(&self) -> String {
        format!("/{}", self.path)
    }

    /// Makes it in every hierarchy.
    pub fn create(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let mut directory = hierarchy.clone();
            for part in self.path.split('/') {
                let above = directory.clone();
                directory.push(part);
                fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
                // A new cpuset is empty, and nothing may enter it before it has processors and memory.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    if let Ok(value) = fs::read_to_string(above.join(file)) {
                        fs::write(directory.join(file), value.trim())
                            .with_context(|| format!("fill {} of {}", file, directory.display()))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// How much it counts beside others when processors are scarce: 1024 is a process, whatever is in the group.
    pub fn weigh(&self, shares: u32) -> Result<()> {
        for directory in self.directories()? {
            let file = directory.join("cpu.shares");
            if file.exists() {
                fs::write(&file, shares.to_string()).with_context(|| format!("write {}", file.display()))?;
            }
        }
        Ok(())
    }

    /// Makes it where processors are shared out, and this process and what it starts from now on belong to it.
    pub fn enter(&self, shares: u32) -> Result<()> {
        for hierarchy in shared_out()? {
            let directory = hierarchy.join(&self.path);
            fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
            join(&directory)?;
        }
        self.weigh(shares)
    }

    /// This process belongs to no group again.
    pub fn leave(&self) -> Result<()> {
        shared_out()?.iter().try_for_each(|hierarchy| join(hierarchy))?;
        self.remove()
    }

    /// The group's directory in every hierarchy.
    pub fn directories(&self) -> Result<Vec<PathBuf>> {
        Ok(hierarchies()?.into_iter().map(|hierarchy| hierarchy.join(&self.path)).collect())
    }

    /// Kills everything in the group and below it, and waits until it is gone.
    pub fn kill(&self) -> Result<()> {
        wait::until(&format!("the end of all in {}", self.path), Duration::from_secs(20), || {
            let members = self.members()?;
            for &member in &members {
                self.kill_member(member);
            }
            Ok(members.is_empty().then_some(()))
        })
    }

    /// Removes it with all that is below it; well where there is none.
    pub fn remove(&self) -> Result<()> {
        // The kernel lets go of the last process a moment after it died.
        wait::until(&format!("{} to become free", self.path), Duration::from_secs(10), || {
            Ok(self.directories()?.iter().all(|directory| removed(directory)).then_some(()))
        })
    }

    /// Whether it is anywhere.
    pub fn exists(&self) -> Result<bool> {
        Ok(self.directories()?.iter().any(|directory| directory.exists()))
    }

    /// Every process in the group and below it. One that has ended is none, even where nobody takes notice of its end.
    pub fn members(&self) -> Result<Vec<Pid>> {
        let mut members = Vec::new();
        for directory in self.directories()? {
            collect_members(&directory, &mut members);
        }
        members.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
        members.dedup();
        members.retain(|pid| {
            fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| alive_since(&stat).is_some())
        });
        Ok(members)
    }

    /// The handle is taken first and membership asked again, so that no stranger that just got the same
    /// number is hit. A process that is gone by now is what was wanted.
    fn kill_member(&self, pid: Pid) {
        let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        if lists(&groups, &self.path) {
            let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
        }
    }
}

/// The hierarchies that share out processors.
fn shared_out() -> Result<Vec<PathBuf>> {
    Ok(hierarchies()?.into_iter().filter(|hierarchy| hierarchy.join("cpu.shares").exists()).collect())
}

fn join(directory: &Path) -> Result<()> {
    let file = directory.join("cgroup.procs");
    fs::write(&file, std::process::id().to_string()).with_context(|| format!("write {}", file.display()))
}

/// Whether `/proc/PID/cgroup` names the group or one below it in any hierarchy.
fn lists(groups: &str, path: &str) -> bool {
    groups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2)?.strip_prefix('/'))
        .any(|group| group.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// Where the machine's hierarchies are mounted.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/mounts").context("list mounts")?;
    let found = mounted(&mounts);
    ensure!(
        found.contains(&Path::new(MOUNTS).join("pids")),
        "this needs the hierarchies of cgroup v1 below {MOUNTS}, and there is none for pids"
    );
    Ok(found)
}

fn mounted(mounts: &str) -> Vec<PathBuf> {
    let fields = |line: &str| -> Option<PathBuf> {
        let mut fields = line.split(' ').skip(1);
        let (at, kind) = (fields.next()?, fields.next()?);
        (at.starts_with(MOUNTS) && matches!(kind, "cgroup" | "cgroup2")).then(|| PathBuf::from(at))
    };
    mounts.lines().filter_map(fields).collect()
}

/// What cannot be read has just gone.
fn collect_members(directory: &Path, members: &mut Vec<Pid>) {
    let listed = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    members.extend(listed.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
    for below in directories_in(directory) {
        collect_members(&below, members);
    }
}

fn removed(directory: &Path) -> bool {
    for below in directories_in(directory) {
        removed(&below);
    }
    fs::remove_dir(directory).is_ok() || !directory.exists()
}

fn directories_in(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_a_similar_name_is_not_ours() {
        assert!(lists("8:pids:/elasticdl-kube/n1\n0::/\n", "elasticdl-kube/n1"));
        assert!(lists("8:pids:/elasticdl-kube/n1/kubepods/pod7\n", "elasticdl-kube/n1"));
        assert!(!lists("8:pids:/elasticdl-kube/n10\n", "elasticdl-kube/n1"));
        assert!(!lists("8:pids:/\n4:memory:/other/elasticdl-kube/n1\n", "elasticdl-kube/n1"));
    }

    #[test]
    fn hierarchies_are_found_among_mounts() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
                      /dev/vda / ext4 rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            mounted(mounts),
            [PathBuf::from("/sys/fs/cgroup/pids"), PathBuf::from("/sys/fs/cgroup/unified")]
        );
    }
}
