//! What pods ask for, what nodes offer, and which nodes a pod may go to. Pure.
//!
//! It follows the scheduler in what decides whether there is room at all: requests, taints, selectors and required
//! node affinity. What only makes one node better than another is the scheduler's own business.

use std::collections::BTreeMap;

use elasticdl_spec::amount;
use k8s_openapi::api::core::v1::{
    Container, Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::negotiate::Resources;

/// The number of pods of a node is limited too.
const PODS: &str = "pods";

/// Which nodes a pod may go to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Placement {
    selector: BTreeMap<String, String>,
    tolerations: Vec<Toleration>,
    /// Any of them will do; none: all nodes will.
    terms: Vec<NodeSelectorTerm>,
}

impl Placement {
    /// Where this pod may go.
    pub fn of(pod: &PodSpec) -> Placement {
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required =
            affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        Placement {
            selector: pod.node_selector.clone().unwrap_or_default(),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
            terms: required.map(|required| required.node_selector_terms.clone()).unwrap_or_default(),
        }
    }

    /// Whether a pod may be put on this node now.
    pub fn suits(&self, node: &Node) -> bool {
        let spec = node.spec.clone().unwrap_or_default();
        let labels = node.metadata.labels.clone().unwrap_or_default();
        let taints = spec.taints.unwrap_or_default();
        let selected = self.selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let tolerated = taints.iter().filter(|taint| taint.effect != "PreferNoSchedule");
        let tolerated = tolerated.into_iter().all(|taint| self.tolerates(taint));
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let wanted = self.terms.is_empty() || self.terms.iter().any(|term| matches(term, &labels, name));
        !spec.unschedulable.unwrap_or(false) && selected && tolerated && wanted
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| {
            let effect = toleration.effect.as_deref().is_none_or(|effect| effect == taint.effect);
            let exists = toleration.operator.as_deref() == Some("Exists");
            let value = exists
                || toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default();
            let key = match toleration.key.as_deref().unwrap_or_default() {
                "" => exists,
                key => key == taint.key,
            };
            effect && key && value
        })
    }
}

/// Whether a node is what a term of an affinity wants. A term that wants nothing fits no node.
fn matches(term: &NodeSelectorTerm, labels: &BTreeMap<String, String>, name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let own = BTreeMap::from([("metadata.name".to_string(), name.to_string())]);
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|wanted| holds(wanted, labels))
        && fields.iter().all(|wanted| holds(wanted, &own))
}

fn holds(wanted: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let (value, values) = (labels.get(&wanted.key), wanted.values.as_deref().unwrap_or_default());
    let listed = value.is_some_and(|value| values.contains(value));
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    let compared = number(value).zip(number(values.first()));
    match wanted.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared.is_some_and(|(has, than)| has > than),
        "Lt" => compared.is_some_and(|(has, than)| has < than),
        _ => false,
    }
}

/// What a node offers to pods.
pub fn offer(node: &Node) -> Resources {
    let status = node.status.as_ref();
    resources(status.and_then(|status| status.allocatable.as_ref()).unwrap_or(&BTreeMap::new()))
}

/// What a pod takes of a node: its containers together, or one that runs before them where that is more.
pub fn requests(pod: &PodSpec) -> Resources {
    let of = |container: &Container| {
        let asked = container.resources.as_ref().and_then(|asked| asked.requests.as_ref());
        asked.map(resources).unwrap_or_default()
    };
    let stays = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let before = pod.init_containers.as_deref().unwrap_or_default();
    let running: Vec<Resources> = pod.containers.iter().chain(before.iter().filter(stays)).map(of).collect();
    let mut most = Resources::sum(&running);
    for first in before.iter().filter(|container| !stays(container)).map(of) {
        most = most.or_more(&first);
    }
    let extra = pod.overhead.as_ref().map(resources).unwrap_or_default();
    let mut all = Resources::sum([&most, &extra]);
    all.extended.insert(PODS.into(), 1);
    all
}

/// Amounts by name. Of what our pods never ask for (disk, huge pages) nothing is said.
fn resources(amounts: &BTreeMap<String, Quantity>) -> Resources {
    let whole = |amount: &Quantity| amount::whole(&amount.0).unwrap_or(0);
    let counted = |name: &&String| name.contains('/') || name.as_str() == PODS;
    let extended = amounts.keys().filter(counted).map(|name| (name.clone(), whole(&amounts[name])));
    let cpu = amounts.get("cpu").and_then(|amount| amount::parse(&amount.0)).unwrap_or(0);
    Resources {
        cpu_millis: u64::try_from(cpu).unwrap_or(u64::MAX),
        memory_bytes: amounts.get("memory").map_or(0, whole),
        extended: extended.collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(labels: Value, spec: Value) -> Node {
        let metadata = json!({ "name": "n1", "labels": labels });
        let allocatable = json!({ "cpu": "1930m", "memory": "4Gi", "pods": "110", "nvidia.com/gpu": "2", "ephemeral-storage": "1Gi" });
        let node = json!({ "metadata": metadata, "spec": spec, "status": { "allocatable": allocatable } });
        serde_json::from_value(node).unwrap()
    }

    fn pod(spec: Value) -> PodSpec {
        let mut spec = spec;
        if spec.get("containers").is_none() {
            spec["containers"] = json!([]);
        }
        serde_json::from_value(spec).unwrap()
    }

    fn suits(spec: Value, labels: Value, node_spec: Value) -> bool {
        Placement::of(&pod(spec)).suits(&node(labels, node_spec))
    }

    #[test]
    fn a_taint_keeps_pods_away_that_do_not_tolerate_it() {
        let taint = |effect: &str| json!({ "taints": [{ "key": "gpu", "value": "yes", "effect": effect }] });
        let with = |toleration: Value| json!({ "tolerations": [toleration] });
        assert!(!suits(json!({}), json!({}), taint("NoSchedule")));
        assert!(suits(json!({}), json!({}), taint("PreferNoSchedule")));
        for (toleration, tolerated) in [
            (json!({ "operator": "Exists" }), true),
            (json!({ "key": "gpu", "operator": "Exists" }), true),
            (json!({ "key": "gpu", "value": "yes" }), true),
            (json!({ "key": "gpu", "value": "no" }), false),
            (json!({ "key": "other", "operator": "Exists" }), false),
            (json!({ "key": "gpu", "operator": "Exists", "effect": "NoExecute" }), false),
        ] {
            assert_eq!(
                suits(with(toleration.clone()), json!({}), taint("NoSchedule")),
                tolerated,
                "{toleration}"
            );
        }
        assert!(!suits(json!({}), json!({}), json!({ "unschedulable": true })));
    }

    #[test]
    fn selectors_and_required_affinity_choose_nodes() {
        let labels = json!({ "zone": "a", "cores": "8" });
        assert!(suits(json!({ "nodeSelector": { "zone": "a" } }), labels.clone(), json!({})));
        assert!(!suits(json!({ "nodeSelector": { "zone": "b" } }), labels.clone(), json!({})));
        let wants = |key: &str, operator: &str, values: &[&str]| {
            let term =
                json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] });
            let required =
                json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [term] } });
            suits(json!({ "affinity": { "nodeAffinity": required } }), labels.clone(), json!({}))
        };
        assert!(wants("zone", "In", &["b", "a"]) && !wants("zone", "NotIn", &["a"]));
        assert!(wants("zone", "Exists", &[]) && !wants("zone", "DoesNotExist", &[]));
        assert!(
            wants("cores", "Gt", &["7"]) && !wants("cores", "Gt", &["8"]) && wants("cores", "Lt", &["9"])
        );
        assert!(!wants("zone", "Unheard", &["a"]));
    }

    #[test]
    fn what_a_pod_takes_and_a_node_offers() {
        let asks = |cpu: &str, memory: &str| json!({ "name": "c", "resources": { "requests": { "cpu": cpu, "memory": memory } } });
        let taken = requests(&pod(json!({
            "containers": [asks("500m", "1Gi"), asks("250m", "1Gi")],
            "initContainers": [asks("2", "64Mi")],
        })));
        assert_eq!((taken.cpu_millis, taken.memory_bytes, taken.extended["pods"]), (2000, 2 << 30, 1));
        let offered = offer(&node(json!({}), json!({})));
        assert_eq!((offered.cpu_millis, offered.memory_bytes), (1930, 4 << 30));
        assert_eq!(offered.extended, BTreeMap::from([("nvidia.com/gpu".into(), 2), ("pods".into(), 110)]));
    }
}
