//! Who gets how many workers: what is known of nodes, pods and jobs, laid before [`negotiate`]. Pure.
//!
//! Of a node counts what it offers, less what pods use that are of no job at the table. Pods of jobs at the table
//! count by what their jobs ask for, wherever they are. A job that runs is never sent away: where a node is lost
//! and there is no room for all, its pods wait for some.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU32;

use elasticdl_spec::JobSpec;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;

use crate::error::Result;
use crate::names;
use crate::negotiate::{Cluster, Grant, Job, Resources, negotiate};
use crate::placement::{Placement, offer, requests};
use crate::resource::{ElasticJob, pods_of};

/// Nobody has as many pods as that: what a node has of a place that is not limited.
const UNLIMITED: u64 = 1 << 40;

/// What is known, and what was agreed on.
#[derive(Debug, Default)]
pub struct Sharing {
    nodes: BTreeMap<String, Offer>,
    /// Pods that are on a node, by namespace and name.
    pods: BTreeMap<Key, Use>,
    jobs: BTreeMap<Key, Ask>,
    grants: BTreeMap<Key, Grant>,
    /// Whether anything has changed since it was agreed.
    changed: bool,
}

/// An object, by namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Key {
    /// The key of an object.
    pub fn of(object: &impl ResourceExt) -> Key {
        Key { namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What a job asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// When it came: any number that grows.
    pub arrival: u64,
    /// Higher ones are served first.
    pub priority: i32,
    /// Its part of the room beside that of its equals.
    pub weight: NonZeroU32,
    /// Workers without which it does not run.
    pub min: u32,
    /// Never more workers than that.
    pub max: u32,
    /// How many it could do with, where its master has said so.
    pub useful: Option<u32>,
    /// Whether it runs.
    pub runs: bool,
    /// Workers that it was granted, where that is remembered.
    pub granted: Option<u32>,
    /// A worker's pod.
    pub worker: Size,
    /// The pods of its master and servers.
    pub others: Vec<Size>,
}

/// What a pod takes, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Size {
    requests: Resources,
    placement: Placement,
}

/// A node, as far as it matters here.
#[derive(Debug, Clone, PartialEq)]
struct Offer {
    amounts: Resources,
    /// Without what changes with every sign of life.
    node: Node,
}

/// What a pod uses.
#[derive(Debug, Clone, PartialEq)]
struct Use {
    node: String,
    amounts: Resources,
    job: Option<Key>,
}

impl Sharing {
    /// A node is there, as it is now.
    pub fn node(&mut self, node: &Node) {
        let mut kept = Node { spec: node.spec.clone(), ..Node::default() };
        kept.metadata.name = node.metadata.name.clone();
        kept.metadata.labels = node.metadata.labels.clone();
        let offer = Offer { amounts: offer(node), node: kept };
        self.changed |= self.nodes.get(&node.name_any()) != Some(&offer);
        self.nodes.insert(node.name_any(), offer);
    }

    /// A node is gone.
    pub fn node_gone(&mut self, name: &str) {
        self.changed |= self.nodes.remove(name).is_some();
    }

    /// A pod is there, as it is now.
    pub fn pod(&mut self, pod: &Pod) {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let spec = pod.spec.as_ref().filter(|_| !matches!(phase, "Succeeded" | "Failed"));
        let Some((spec, node)) = spec.and_then(|spec| Some((spec, spec.node_name.clone()?))) else {
            return self.pod_gone(&Key::of(pod));
        };
        let job = pod.labels().get(names::JOB);
        let job = job.map(|name| Key { namespace: pod.namespace().unwrap_or_default(), name: name.clone() });
        let used = Use { node, amounts: requests(spec), job };
        let known = self.pods.insert(Key::of(pod), used.clone());
        self.changed |= known.as_ref() != Some(&used) && !self.is_at_table(&used);
    }

    /// A pod is gone.
    pub fn pod_gone(&mut self, key: &Key) {
        let known = self.pods.remove(key);
        self.changed |= known.is_some_and(|used| !self.is_at_table(&used));
    }

    fn is_at_table(&self, used: &Use) -> bool {
        used.job.as_ref().is_some_and(|job| self.jobs.contains_key(job))
    }

    /// What a job asks for; `None`: it is over, rests, or cannot run.
    pub fn ask(&mut self, key: &Key, ask: Option<Ask>) {
        let Some(mut ask) = ask else {
            self.grants.remove(key);
            self.changed |= self.jobs.remove(key).is_some();
            return;
        };
        let known = self.jobs.get(key);
        ask.useful = ask.useful.or(known.and_then(|known| known.useful));
        // What was agreed is known better here than to whoever reads it from the resource.
        let same = known.is_some_and(|known| Ask { granted: ask.granted, ..known.clone() } == ask);
        self.changed |= !same;
        self.jobs.insert(key.clone(), ask);
    }

    /// Whether it must be agreed anew.
    pub fn has_changed(&self) -> bool {
        self.changed
    }

    /// What a job may have; `None`: nobody has negotiated about it.
    pub fn grant(&self, key: &Key) -> Option<&Grant> {
        self.grants.get(key)
    }

    /// Agrees on who gets how many, and tells whose grant is another one now.
    pub fn agree(&mut self) -> Vec<Key> {
        self.changed = false;
        let (cluster, jobs) = self.table();
        let mut grants: BTreeMap<String, Grant> =
            negotiate(&cluster, &jobs).into_iter().map(|grant| (grant.job.clone(), grant)).collect();
        let mut touched = Vec::new();
        for (key, ask) in &self.jobs {
            let mut grant = grants.remove(&key.to_string()).expect("everybody gets an answer");
            if ask.runs {
                grant.workers = grant.workers.max(ask.floor());
            }
            if self.grants.get(key) != Some(&grant) {
                self.grants.insert(key.clone(), grant);
                touched.push(key.clone());
            }
        }
        touched
    }

    fn table(&self) -> (Cluster, Vec<Job>) {
        let sizes = self.jobs.values().flat_map(|ask| ask.others.iter().chain([&ask.worker]));
        let mut places: Vec<&Placement> = Vec::new();
        for size in sizes {
            if !places.contains(&&size.placement) {
                places.push(&size.placement);
            }
        }
        let resources = |size: &Size| {
            let place = places.iter().position(|place| **place == size.placement);
            let place = place.expect("all places are listed");
            let mut resources = size.requests.clone();
            resources.extended.insert(place_name(place), 1);
            resources
        };
        let job = |(key, ask): (&Key, &Ask)| Job {
            name: key.to_string(),
            priority: ask.priority,
            weight: ask.weight,
            arrival: ask.arrival,
            min: ask.min,
            max: ask.max,
            useful: ask.useful.unwrap_or(u32::MAX),
            worker: resources(&ask.worker),
            overhead: ask.others.iter().map(resources).collect(),
            held: self.held(key, ask),
        };
        (self.cluster(&places), self.jobs.iter().map(job).collect())
    }

    /// Workers that a job has been promised.
    fn held(&self, key: &Key, ask: &Ask) -> u32 {
        let agreed = self.grants.get(key).map(|grant| grant.workers).or(ask.granted).unwrap_or(0);
        if ask.runs { agreed.max(ask.floor()) } else { agreed }
    }

    fn cluster(&self, places: &[&Placement]) -> Cluster {
        let mut used: BTreeMap<&str, Vec<&Resources>> = BTreeMap::new();
        for pod in self.pods.values().filter(|pod| !self.is_at_table(pod)) {
            used.entry(&pod.node).or_default().push(&pod.amounts);
        }
        let mut nodes = Vec::new();
        for (name, offer) in &self.nodes {
            let suited: BTreeSet<usize> =
                (0..places.len()).filter(|&n| places[n].suits(&offer.node)).collect();
            if suited.is_empty() {
                continue;
            }
            let used = used.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
            let mut left = offer.amounts.less(&Resources::sum(used.iter().copied()));
            left.extended.extend(suited.into_iter().map(|n| (place_name(n), UNLIMITED)));
            nodes.push(left);
        }
        Cluster { nodes }
    }
}

/// A kind of places is something that nodes have, and pods that may go nowhere else ask for one.
fn place_name(n: usize) -> String {
    format!("place/{n}")
}

impl Ask {
    /// What a job asks for, with what its master thinks it could do with.
    ///
    /// # Errors
    ///
    /// Its pods cannot be made.
    pub fn of(job: &ElasticJob, spec: &JobSpec, useful: Option<u32>) -> Result<Ask> {
        let mut others = Vec::new();
        for (pod, count) in pods_of(spec, &job.namespace().unwrap_or_default()) {
            let pod = pod?.spec.unwrap_or_default();
            let size = Size { requests: requests(&pod), placement: Placement::of(&pod) };
            others.extend(std::iter::repeat_n(size, count as usize));
        }
        let worker = others.pop().expect("every job has pods");
        // The members of a person's own program come all or not at all: the last of them stands for a worker.
        let (min, max) = match spec.command {
            Some(_) => (1, 1),
            None => {
                let max = spec.workers.max;
                (spec.kubernetes.workers_min, spec.workers.count.map_or(max, |count| count.min(max)))
            }
        };
        let status = job.status.clone().unwrap_or_default();
        let created = job.creation_timestamp().map_or(0, |time| time.0.as_millisecond());
        Ok(Ask {
            arrival: u64::try_from(created).unwrap_or(0),
            // Workers with the high priority are never waited for.
            priority: i32::from(spec.kubernetes.priority >= 1.0),
            weight: spec.kubernetes.care.weight,
            min,
            max,
            useful,
            runs: status.start_time.is_some(),
            granted: status.workers_granted,
            worker,
            others,
        })
    }

    /// The fewest workers with which it runs.
    pub fn floor(&self) -> u32 {
        self.min.min(self.max).max(1)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::negotiate::Reason;

    fn node(name: &str, cpu: u32, labels: Value) -> Node {
        let allocatable = json!({ "cpu": cpu.to_string(), "memory": "64Gi", "pods": "110" });
        let node = json!({ "metadata": { "name": name, "labels": labels }, "status": { "allocatable": allocatable } });
        serde_json::from_value(node).unwrap()
    }

    fn pod(name: &str, node: &str, cpu: u32, job: Option<&str>) -> Pod {
        let labels = job.map_or(json!({}), |job| json!({ names::JOB: job }));
        let container = json!({ "name": "c", "resources": { "requests": { "cpu": cpu.to_string() } } });
        let pod = json!({
            "metadata": { "name": name, "namespace": "ads", "labels": labels },
            "spec": { "nodeName": node, "containers": [container] },
            "status": { "phase": "Running" },
        });
        serde_json::from_value(pod).unwrap()
    }

    fn key(name: &str) -> Key {
        Key { namespace: "ads".into(), name: name.into() }
    }

    /// One master, one server and workers of a processor each.
    fn ask(name: &str, second: u32, more: Value) -> Ask {
        let mut spec = json!({
            "model": { "zoo": "lr" }, "data": { "train": "t.tsv", "layout": "criteo" },
            "master": { "cpu": 1, "memory": "1Gi" },
            "servers": { "count": 1, "cpu": 1, "memory": "1Gi" },
            "workers": { "min": 1, "max": 10, "cpu": 1, "memory": "1Gi" },
            "kubernetes": { "volumes": [{ "hostPath": { "path": "/srv" }, "mountPath": "/data" }] },
        });
        for (section, values) in more.as_object().unwrap() {
            for (setting, value) in values.as_object().unwrap() {
                spec[section][setting] = value.clone();
            }
        }
        let created = format!("2026-01-01T00:00:{second:02}Z");
        let job = json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "spec": spec,
            "metadata": { "name": name, "namespace": "ads", "creationTimestamp": created },
        });
        let job: ElasticJob = serde_json::from_value(job).unwrap();
        Ask::of(&job, &job.resolve().unwrap(), None).unwrap()
    }

    fn workers(sharing: &Sharing, name: &str) -> u32 {
        sharing.grant(&key(name)).unwrap().workers
    }

    #[test]
    fn a_late_job_gets_its_least_at_once_and_an_even_part_then() {
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({})));
        sharing.ask(&key("a"), Some(ask("a", 0, json!({}))));
        assert_eq!(sharing.agree(), [key("a")]);
        assert_eq!(workers(&sharing, "a"), 10, "two go to its master and its server");
        let late = ask("b", 9, json!({ "workers": { "min": 2 } }));
        sharing.ask(&key("b"), Some(late));
        assert_eq!(sharing.agree(), [key("a"), key("b")]);
        assert_eq!((workers(&sharing, "a"), workers(&sharing, "b")), (4, 4));
        assert_eq!(sharing.agree(), [], "once agreed it stays");
        sharing.ask(&key("a"), None);
        assert_eq!((sharing.agree(), workers(&sharing, "b")), (vec![key("b")], 10));
        assert_eq!(sharing.grant(&key("a")), None);
    }

    #[test]
    fn what_others_use_is_not_shared_out_and_pods_of_jobs_at_the_table_count_once() {
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({})));
        sharing.ask(&key("a"), Some(ask("a", 0, json!({}))));
        sharing.agree();
        sharing.pod(&pod("a-worker-0", "n1", 1, Some("a")));
        assert!(!sharing.has_changed(), "its own pods change nothing");
        sharing.pod(&pod("nginx", "n1", 6, None));
        sharing.pod(&pod("other-worker", "n1", 1, Some("no-resource")));
        assert!(sharing.has_changed());
        assert_eq!((sharing.agree(), workers(&sharing, "a")), (vec![key("a")], 3));
        let mut ended = pod("nginx", "n1", 6, None);
        ended.status.as_mut().unwrap().phase = Some("Succeeded".into());
        sharing.pod(&ended);
        assert_eq!((sharing.agree(), workers(&sharing, "a")), (vec![key("a")], 9));
    }

    #[test]
    fn a_gang_waits_until_it_fits_whole() {
        let gang = |name, second| ask(name, second, json!({ "workers": { "min": 6, "count": 6, "max": 6 } }));
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({})));
        sharing.ask(&key("a"), Some(gang("a", 0)));
        sharing.ask(&key("b"), Some(gang("b", 1)));
        sharing.agree();
        assert_eq!((workers(&sharing, "a"), workers(&sharing, "b")), (6, 0));
        assert_eq!(sharing.grant(&key("b")).unwrap().reason, Reason::NoRoom);
        sharing.ask(&key("a"), None);
        sharing.agree();
        assert_eq!(workers(&sharing, "b"), 6);
    }

    #[test]
    fn jobs_only_share_nodes_that_they_may_go_to() {
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({ "pool": "x" })));
        sharing.node(&node("n2", 6, json!({ "pool": "y" })));
        let picky = |name, second, pool: &str| {
            ask(name, second, json!({ "kubernetes": { "node_selector": { "pool": pool } } }))
        };
        sharing.ask(&key("x"), Some(picky("x", 0, "x")));
        sharing.ask(&key("y"), Some(picky("y", 1, "y")));
        sharing.ask(&key("z"), Some(picky("z", 2, "z")));
        sharing.agree();
        assert_eq!([workers(&sharing, "x"), workers(&sharing, "y"), workers(&sharing, "z")], [10, 4, 0]);
        assert_eq!(sharing.grant(&key("z")).unwrap().reason, Reason::TooLarge);
    }

    #[test]
    fn signs_of_life_of_a_node_change_nothing_and_its_loss_sends_no_job_away() {
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({})));
        sharing.ask(&key("a"), Some(Ask { runs: true, ..ask("a", 0, json!({ "workers": { "min": 3 } })) }));
        sharing.agree();
        let mut alive = node("n1", 12, json!({}));
        alive.metadata.resource_version = Some("77".into());
        sharing.node(&alive);
        assert!(!sharing.has_changed());
        sharing.node_gone("n1");
        assert_eq!((sharing.agree(), workers(&sharing, "a")), (vec![key("a")], 3));
        sharing.node(&alive);
        assert_eq!((sharing.agree(), workers(&sharing, "a")), (vec![key("a")], 10));
    }

    #[test]
    fn what_a_job_cannot_use_is_left_to_others_and_what_was_granted_is_remembered() {
        let mut sharing = Sharing::default();
        sharing.node(&node("n1", 12, json!({})));
        let (mut a, b) = (ask("a", 0, json!({})), ask("b", 1, json!({})));
        a.useful = Some(2);
        a.granted = Some(2);
        sharing.ask(&key("a"), Some(a.clone()));
        sharing.ask(&key("b"), Some(b));
        sharing.agree();
        assert_eq!((workers(&sharing, "a"), workers(&sharing, "b")), (2, 6));
        // A master that does not answer for a moment has not changed its mind.
        sharing.ask(&key("a"), Some(Ask { useful: None, ..a }));
        assert!(!sharing.has_changed());
    }

    #[test]
    fn two_hundred_jobs_share_five_hundred_nodes_evenly() {
        let mut sharing = Sharing::default();
        (0..500).for_each(|n| sharing.node(&node(&format!("n{n}"), 8, json!({}))));
        let job = ask("j", 0, json!({ "workers": { "max": 20 } }));
        let name = |n: u64| format!("j{n}");
        (0..200).for_each(|n| sharing.ask(&key(&name(n)), Some(Ask { arrival: n, ..job.clone() })));
        assert_eq!(sharing.agree().len(), 200);
        let workers: Vec<u32> = (0..200).map(|n| workers(&sharing, &name(n))).collect();
        assert_eq!(workers, [18; 200], "4,000 processors, of which 400 go to masters and servers");
    }
}
