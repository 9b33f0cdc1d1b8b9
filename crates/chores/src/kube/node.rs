//! A real node: containerd, kubelet and kube-proxy in network, mount and host name namespaces of their own.
//!
//! Its disk is a directory, its memory and processors are those of the machine, less what is set aside. It
//! sees the machine's files, with directories of its own where the kubelet and containerd keep theirs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::Shape;
use super::cgroup::Cgroup;
use super::cluster::Cluster;
use super::control::proxy_arguments;
use super::image::PAUSE;
use super::network::{self, namespace_path, node_ip, node_namespace, node_pods};
use super::places::{make_directory, remove_directory, write_file};
use super::process::{command_line, succeed};
use super::quantity::{Bytes, MilliCpu};

/// Directories that a node has for itself: on its disk, and where programs look for them.
const MOUNTS: [(&str, &str); 8] = [
    ("kubelet", "/var/lib/kubelet"),
    ("containerd", "/var/lib/containerd"),
    ("run", "/run/containerd"),
    ("pods", "/var/log/pods"),
    ("containers", "/var/log/containers"),
    ("cni", "/etc/cni/net.d"),
    ("addresses", "/var/lib/cni"),
    ("namespaces", "/run/netns"),
];

/// What a machine loses when its power goes.
const VOLATILE: [&str; 2] = ["run", "namespaces"];

const SOCKET: &str = "/run/containerd/containerd.sock";

/// Takes a host name, mounts what is named in pairs before `--`, then becomes what is named after it. Mounts
/// that the kubelet makes must reach its containers, hence the sharing inside this namespace.
const ENTER_NODE: &str = r#"
set -e; mount --make-rshared /; hostname "$1"; shift
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@""#;

/// A kubelet evicts pods when the machine has less than this; it offers that much less, too.
const EVICTION: Bytes = Bytes(100 << 20);

const LIMIT: Duration = Duration::from_secs(60);

/// The name of a node.
pub fn name(index: u8) -> String {
    format!("n{index}")
}

/// The number of the node that a person means by `n2` or `2`.
pub fn index(text: &str, nodes: u8) -> Result<u8> {
    match text.strip_prefix('n').unwrap_or(text).parse() {
        Ok(index) if (1..=nodes).contains(&index) => Ok(index),
        _ => bail!("there is no real node {text:?}; there are {nodes}, called n1, n2 and so on"),
    }
}

/// Makes a node's network and disk.
pub fn make(cluster: &Cluster, index: u8) -> Result<()> {
    network::make_node(index, cluster.state.shape.nodes)?;
    let disk = cluster.places.node(&name(index));
    for (directory, mounted) in MOUNTS {
        make_directory(&disk.join(directory))?;
        make_directory(Path::new(mounted))?;
    }
    write_file(&disk.join("cni/10-testcluster.conflist"), pod_network(index).to_string())?;
    write_file(&disk.join("etc/containerd.toml"), containerd_config())?;
    // An empty one: the machine's own servers of names mean nothing here.
    write_file(&disk.join("etc/resolv.conf"), "")?;
    let config = kubelet_config(cluster, index)?;
    write_file(&disk.join("etc/kubelet.json"), format!("{config:#}\n"))
}

/// Starts containerd and waits until it answers.
pub fn start_runtime(cluster: &mut Cluster, index: u8) -> Result<()> {
    let name = name(index);
    let disk = cluster.places.node(&name);
    let group = Cgroup::node(&name).child("system");
    let net = format!("--net={}", namespace_path(&node_namespace(index)));
    let mut command = command_line(
        "nsenter",
        [&net, "unshare", "--mount", "--uts", "--propagation=private", "sh", "-c", ENTER_NODE, "sh", &name],
    );
    for (directory, mounted) in MOUNTS {
        command.extend([disk.join(directory).into(), mounted.into()]);
    }
    command.extend(command_line("--", ["containerd", "--config"]));
    command.push(disk.join("etc/containerd.toml").into());
    cluster.launch(&format!("containerd-{name}"), Some(&name), &group, &command)?;
    cluster.until(&format!("containerd of {name} to answer"), LIMIT, || {
        let mut version = ctr(cluster, index)?;
        version.args(["--connect-timeout=1s", "version"]).stdout(Stdio::null()).stderr(Stdio::null());
        let answers = version.status().context("ask containerd")?.success();
        Ok(answers.then_some(()))
    })
}

/// Gives a node an image.
pub fn import(cluster: &Cluster, index: u8, archive: &Path) -> Result<()> {
    let mut import = ctr(cluster, index)?;
    import.args(["--namespace=k8s.io", "images", "import"]).arg(archive).stdout(Stdio::null());
    succeed(&mut import).with_context(|| format!("import {} into {}", archive.display(), name(index)))
}

/// Starts the kubelet and kube-proxy.
pub fn start_kubelet(cluster: &mut Cluster, index: u8) -> Result<()> {
    let (name, ip) = (name(index), node_ip(index));
    let (pki, disk) = (cluster.places.pki(), cluster.places.node(&name));
    let kubelet = [
        format!("--config={}", disk.join("etc/kubelet.json").display()),
        format!("--kubeconfig={}", pki.join(format!("{name}.kubeconfig")).display()),
        format!("--hostname-override={name}"),
        format!("--node-ip={ip}"),
    ];
    launch(cluster, index, "kubelet", kubelet)?;
    let config = pki.join("proxy.kubeconfig").display().to_string();
    launch(cluster, index, "kube-proxy", proxy_arguments(&config, &name, &ip))
}

/// Cuts the cable first, so that nothing that dies can still tell.
pub fn power_off(cluster: &mut Cluster, index: u8) -> Result<()> {
    let name = name(index);
    network::cut(index)?;
    let group = Cgroup::node(&name);
    group.kill()?;
    group.remove()?;
    cluster.forget(&name)
}

/// Starts a node with what its disk holds. Whatever a crashed kubelet left goes first.
pub fn power_on(cluster: &mut Cluster, index: u8) -> Result<()> {
    power_off(cluster, index)?;
    let disk = cluster.places.node(&name(index));
    for directory in VOLATILE {
        remove_directory(&disk.join(directory))?;
        make_directory(&disk.join(directory))?;
    }
    network::mend(index)?;
    start_runtime(cluster, index)?;
    start_kubelet(cluster, index)
}

fn launch(
    cluster: &mut Cluster,
    index: u8,
    program: &str,
    arguments: impl IntoIterator<Item = String>,
) -> Result<()> {
    let name = name(index);
    let mut command = enter(cluster, index)?;
    command.extend(command_line(cluster.state.binaries.join(program), arguments));
    let group = Cgroup::node(&name).child("system");
    cluster.launch(&format!("{program}-{name}"), Some(&name), &group, &command).map(drop)
}

/// The beginning of a command line that runs on a node: in the namespaces of its containerd.
fn enter(cluster: &Cluster, index: u8) -> Result<Vec<OsString>> {
    let runtime = format!("containerd-{}", name(index));
    let process = cluster.state.processes.iter().find(|process| process.name == runtime);
    let process = process.filter(|process| process.runs());
    let process = process.with_context(|| format!("{} is off", name(index)))?;
    Ok(command_line("nsenter", [&format!("--target={}", process.pid), "--mount", "--uts", "--net"]))
}

fn ctr(cluster: &Cluster, index: u8) -> Result<Command> {
    let line = enter(cluster, index)?;
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).args(["ctr", "--address", SOCKET]);
    Ok(command)
}

/// Every pod has a cable to its node and no neighbours: what it says to a pod beside it passes the node too,
/// which is where addresses of Services are translated.
fn pod_network(index: u8) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "testcluster",
        "plugins": [{
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": node_pods(index) }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
}

/// `restrict_oom_score_adj` because root here may not lower that score, and runc would die of trying.
fn containerd_config() -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = "{SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"#
    )
}

/// A lease of 8 s is renewed every 2 s, five times before the controllers call the node lost.
fn kubelet_config(cluster: &Cluster, index: u8) -> Result<Value> {
    let (name, pki) = (name(index), cluster.places.pki());
    let file = |name: String| -> PathBuf { pki.join(name) };
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node_ip(index),
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": file("ca.crt".into()) },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": file(format!("{name}.crt")),
        "tlsPrivateKeyFile": file(format!("{name}.key")),
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": Cgroup::node(&name).absolute(),
        "failCgroupV1": false,
        "failSwapOn": false,
        "resolvConf": cluster.places.node(&name).join("etc/resolv.conf"),
        "volumePluginDir": "/var/lib/kubelet/plugins",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": EVICTION.to_string(),
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
    });
    config["systemReserved"] = reserved(&cluster.state.shape, &Machine::read()?)?;
    Ok(config)
}

/// What the machine has.
struct Machine {
    cpu: MilliCpu,
    memory: Bytes,
}

impl Machine {
    /// As a kubelet counts it.
    fn read() -> Result<Machine> {
        let processors = fs::read_to_string("/proc/cpuinfo").context("count processors")?;
        let memory = fs::read_to_string("/proc/meminfo").context("measure memory")?;
        let cores = processors.lines().filter(|line| line.starts_with("processor")).count();
        let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.strip_suffix("kB"));
        let kib: u64 = total.context("find MemTotal")?.trim().parse().context("read MemTotal")?;
        Ok(Machine { cpu: MilliCpu(cores as u64 * 1000), memory: Bytes(kib << 10) })
    }
}

/// What a kubelet sets aside so that it offers what was asked for.
fn reserved(shape: &Shape, machine: &Machine) -> Result<Value> {
    let mut reserved = json!({});
    if let Some(cpu) = shape.node_cpu {
        ensure!(cpu <= machine.cpu, "a real node cannot offer {cpu} of the machine's {}", machine.cpu);
        reserved["cpu"] = MilliCpu(machine.cpu.0 - cpu.0).to_string().into();
    }
    if let Some(memory) = shape.node_memory {
        let most = Bytes(machine.memory.0.saturating_sub(EVICTION.0));
        ensure!(memory <= most, "a real node cannot offer {memory} where the machine has {most}");
        reserved["memory"] = Bytes(most.0 - memory.0).to_string().into();
    }
    Ok(reserved)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(cpu: Option<&str>, memory: Option<&str>) -> Shape {
        Shape {
            nodes: 3,
            node_cpu: cpu.map(|text| text.parse().unwrap()),
            node_memory: memory.map(|text| text.parse().unwrap()),
            simulated: 0,
            simulated_cpu: MilliCpu(1),
            simulated_memory: Bytes(1),
        }
    }

    #[test]
    fn what_a_node_does_not_offer_is_set_aside() {
        let machine = Machine { cpu: MilliCpu(2000), memory: Bytes(8 << 30) };
        let set_aside = reserved(&shape(Some("1500m"), Some("2Gi")), &machine).unwrap();
        // 8 GiB less 2 GiB less the 100 MiB below which pods are evicted
        assert_eq!(set_aside, json!({ "cpu": "500m", "memory": "6189056Ki" }));
        assert_eq!(reserved(&shape(None, None), &machine).unwrap(), json!({}));
    }

    #[test]
    fn a_node_cannot_offer_more_than_the_machine_has() {
        let machine = Machine { cpu: MilliCpu(2000), memory: Bytes(8 << 30) };
        assert!(reserved(&shape(Some("3"), None), &machine).is_err());
        assert!(reserved(&shape(None, Some("8Gi")), &machine).is_err());
    }

    #[test]
    fn a_node_is_meant_by_name_or_number() {
        assert_eq!(index("n2", 3).unwrap(), 2);
        assert_eq!(index("2", 3).unwrap(), 2);
        for text in ["0", "n4", "node", ""] {
            assert!(index(text, 3).is_err(), "{text:?}");
        }
    }
}
