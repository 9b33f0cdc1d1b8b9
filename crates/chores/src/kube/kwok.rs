//! Simulated nodes: Node objects of any size that kwok keeps alive, on which pods only seem to run.
//!
//! What becomes of their pods stands in `deploy/testcluster/kwok/stages.yaml`.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::Shape;
use super::cluster::Cluster;
use super::control;

/// The annotation by which kwok knows its nodes, and their taint: only pods that tolerate it come here.
const MARK: &str = "kwok.x-k8s.io/node";

/// A renewal every 4 s, so that a machine under load may miss one.
const LEASE_SECONDS: u32 = 16;

/// Starts kwok and makes the nodes.
pub fn start(cluster: &mut Cluster) -> Result<()> {
    let arguments = [
        format!("--kubeconfig={}", cluster.places.admin_config().display()),
        format!("--config={}", cluster.places.sources.join("kwok/stages.yaml").display()),
        "--manage-all-nodes=false".into(),
        format!("--manage-nodes-with-annotation-selector={MARK}=fake"),
        format!("--node-lease-duration-seconds={LEASE_SECONDS}"),
    ];
    control::launch(cluster, "kwok", arguments)?;
    cluster.kubectl().create(&nodes(&cluster.state.shape))
}

/// Waits until every simulated node is ready.
pub fn wait(cluster: &Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    let ready = r#"--output=jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}"#;
    cluster.until("simulated nodes to be ready", Duration::from_secs(120), || {
        let states = kubectl.text(&["get", "nodes", "--selector=type=kwok", ready])?;
        let count = states.split_whitespace().filter(|&state| state == "True").count();
        Ok((count == usize::from(cluster.state.shape.simulated)).then_some(()))
    })
}

fn nodes(shape: &Shape) -> Value {
    let nodes: Vec<Value> = (0..shape.simulated).map(|index| node(index, shape)).collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": nodes })
}

/// Addresses of its pods are its own, and lead nowhere.
fn node(index: u16, shape: &Shape) -> Value {
    let name = format!("sim-{}", index + 1);
    let pods = format!("10.{}.{}.0/24", 128 + index / 256, index % 256);
    let size = json!({
        "cpu": shape.simulated_cpu.to_string(),
        "memory": shape.simulated_memory.to_string(),
        "pods": "110",
    });
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
            },
            "annotations": { MARK: "fake" },
        },
        "spec": {
            "podCIDR": pods,
            "podCIDRs": [pods],
            "taints": [{ "key": MARK, "value": "fake", "effect": "NoSchedule" }],
        },
        "status": { "allocatable": size, "capacity": size },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn simulated_nodes_differ_in_name_and_addresses_and_have_the_wanted_size() {
        let shape = Shape {
            nodes: 0,
            node_cpu: None,
            node_memory: None,
            simulated: 600,
            simulated_cpu: "32".parse().unwrap(),
            simulated_memory: "128Gi".parse().unwrap(),
        };
        let made = nodes(&shape);
        let items = made["items"].as_array().unwrap();
        let different = |pointer: &str| {
            items.iter().map(|node| node.pointer(pointer).unwrap().to_string()).collect::<BTreeSet<_>>().len()
        };
        assert_eq!((different("/metadata/name"), different("/spec/podCIDR")), (600, 600));
        assert_eq!(items[599]["spec"]["podCIDR"], "10.130.87.0/24");
        assert_eq!(items[0]["status"]["allocatable"]["cpu"], "32000m");
        assert_eq!(items[0]["status"]["allocatable"]["memory"], "134217728Ki");
    }
}
