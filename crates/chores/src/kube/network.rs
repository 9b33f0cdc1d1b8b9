//! The cluster's network: a bridge in the control plane's namespace, a cable to every node and one to the machine.
//!
//! | range | what |
//! | --- | --- |
//! | 10.250.0.0/24 | .1 the control plane, .10 + i the node i, .254 the machine |
//! | 10.244.i.0/24 | pods of the node i |
//! | 10.96.0.0/16 | Services |

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::process::succeed;

/// The control plane's address.
pub const CONTROL_IP: &str = "10.250.0.1";
/// The machine's own, as nodes and pods see it.
pub const MACHINE_IP: &str = "10.250.0.254";
/// The first Service is the API server's own.
pub const API_SERVICE_IP: &str = "10.96.0.1";
/// Services.
pub const SERVICES: &str = "10.96.0.0/16";
/// Pods of real nodes.
pub const PODS: &str = "10.244.0.0/16";
/// The control plane's namespace.
pub const CONTROL: &str = "elasticdl-control";

const NAMES: &str = "/run/netns";
const PREFIX: &str = "elasticdl-";
/// The machine's end of its cable.
const CABLE: &str = "elasticdl0";

/// The address of a node.
pub fn node_ip(index: u8) -> String {
    format!("10.250.0.{}", 10 + index)
}

/// The addresses of a node's pods.
pub fn node_pods(index: u8) -> String {
    format!("10.244.{index}.0/24")
}

/// The namespace of a node.
pub fn node_namespace(index: u8) -> String {
    format!("{PREFIX}n{index}")
}

/// The path by which a namespace is entered.
pub fn namespace_path(name: &str) -> String {
    format!("{NAMES}/{name}")
}

/// Makes the control plane's namespace and the machine's way to it, to `nodes` nodes and to their pods.
pub fn make_control(nodes: u8) -> Result<()> {
    ip(&["netns", "add", CONTROL])?;
    // A bridge takes the lowest address of its cables unless it has one of its own, and would change it
    // under open connections when a node comes.
    batch(
        CONTROL,
        &format!(
            "link set lo up\n\
             link add br0 address 02:00:0a:fa:00:01 type bridge\n\
             address add {CONTROL_IP}/24 dev br0\n\
             link set br0 up\n"
        ),
    )?;
    inside(CONTROL, || {
        set("net/ipv4/ip_forward", "1")?;
        // What only crosses the bridge is none of the control plane's business.
        if Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists() {
            set("net/bridge/bridge-nf-call-iptables", "0")?;
        }
        Ok(())
    })?;
    ip(&["link", "add", CABLE, "type", "veth", "peer", "name", "machine", "netns", CONTROL])?;
    batch(CONTROL, "link set machine master br0 up\n")?;
    ip(&["address", "add", &format!("{MACHINE_IP}/24"), "dev", CABLE])?;
    ip(&["link", "set", CABLE, "up"])?;
    ip(&["route", "add", SERVICES, "via", CONTROL_IP])?;
    for index in 1..=nodes {
        ip(&["route", "add", &node_pods(index), "via", &node_ip(index)])?;
        batch(CONTROL, &format!("route add {} via {}\n", node_pods(index), node_ip(index)))?;
    }
    Ok(())
}

/// Makes a node's namespace, its cable, and its ways to the pods of the `nodes` nodes.
pub fn make_node(index: u8, nodes: u8) -> Result<()> {
    let namespace = node_namespace(index);
    ip(&["netns", "add", &namespace])?;
    batch(
        CONTROL,
        &format!(
            "link add n{index} type veth peer name eth0 netns {namespace}\nlink set n{index} master br0 up\n"
        ),
    )?;
    let mut lines = format!(
        "link set lo up\naddress add {}/24 dev eth0\nlink set eth0 up\nroute add default via {CONTROL_IP}\n",
        node_ip(index)
    );
    for other in (1..=nodes).filter(|&other| other != index) {
        lines.push_str(&format!("route add {} via {}\n", node_pods(other), node_ip(other)));
    }
    batch(&namespace, &lines)?;
    inside(&namespace, || set("net/ipv4/ip_forward", "1"))
}

/// Cuts a node's cable.
pub fn cut(index: u8) -> Result<()> {
    batch(CONTROL, &format!("link set n{index} down\n"))
}

/// Mends a node's cable.
pub fn mend(index: u8) -> Result<()> {
    batch(CONTROL, &format!("link set n{index} up\n"))
}

/// Removes every namespace and cable of the cluster. Routes go with the cable.
pub fn remove() -> Result<()> {
    if Path::new("/sys/class/net").join(CABLE).exists() {
        ip(&["link", "delete", CABLE])?;
    }
    for name in namespaces() {
        ip(&["netns", "delete", &name])?;
    }
    Ok(())
}

/// Whether anything of it is there.
pub fn exists() -> bool {
    Path::new("/sys/class/net").join(CABLE).exists() || !namespaces().is_empty()
}

/// Does something in a namespace, on a thread that ends there.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let path = namespace_path(namespace);
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let handle = fs::File::open(&path).with_context(|| format!("open {path}"))?;
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&handle), Some(LinkNameSpaceType::Network))
                .with_context(|| format!("enter {path}"))?;
            work()
        });
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn namespaces() -> Vec<String> {
    let Ok(entries) = fs::read_dir(NAMES) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(PREFIX)).collect()
}

fn set(name: &str, value: &str) -> Result<()> {
    fs::write(Path::new("/proc/sys").join(name), value).with_context(|| format!("set {name} to {value}"))
}

fn ip(arguments: &[&str]) -> Result<()> {
    succeed(Command::new("ip").args(arguments)).with_context(|| format!("ip {}", arguments.join(" ")))
}

/// Several `ip` commands in one namespace.
fn batch(namespace: &str, lines: &str) -> Result<()> {
    let mut child = Command::new("ip")
        .args(["-netns", namespace, "-batch", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start ip")?;
    let mut input = child.stdin.take().context("ip takes commands")?;
    input.write_all(lines.as_bytes()).context("tell ip what to do")?;
    drop(input);
    let output = child.wait_with_output().context("wait for ip")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "ip in {namespace} failed: {}\n{lines}", errors.trim());
    Ok(())
}
