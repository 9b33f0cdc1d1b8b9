//! How much of a cluster is in use over time, from what a watch tells of pods. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// What a pod takes while it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    series: usize,
    milli: u64,
}

/// Processors in use, by series, from each change to the next.
#[derive(Debug, Clone)]
pub struct Usage {
    /// In the order of a step's amounts.
    series: Vec<Series>,
    counts: Counts,
    held: BTreeMap<String, Held>,
    steps: Vec<Step>,
    firsts: BTreeMap<String, Lived>,
}

/// Pods that are counted together: those with this label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    /// The label's name.
    pub label: &'static str,
    /// Its value.
    pub value: &'static str,
}

/// From when to when a pod counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// While it runs.
    Running,
    /// From the moment it has a node.
    Bound,
}

/// Amounts from a moment on.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Seconds since the beginning.
    pub at: f64,
    /// Thousandths of processors, by series.
    pub milli: Vec<u64>,
}

/// When what was first seen of a pod, in seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lived {
    /// Seen at all.
    pub seen: f64,
    /// Bound to a node.
    pub bound: Option<f64>,
    /// Running and ready.
    pub ready: Option<f64>,
    /// Ended or gone.
    pub over: Option<f64>,
}

impl Usage {
    /// Nothing yet. Pods of no series do not count.
    pub fn new(series: &[Series], counts: Counts) -> Usage {
        Usage {
            series: series.to_vec(),
            counts,
            held: BTreeMap::new(),
            steps: vec![Step { at: 0.0, milli: vec![0; series.len()] }],
            firsts: BTreeMap::new(),
        }
    }

    /// A pod is there, or is another than it was.
    pub fn applied(&mut self, at: f64, pod: &Pod) {
        let Some(series) = self.series_of(pod) else { return };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
        let ended = matches!(phase, "Succeeded" | "Failed");
        let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        let lived = self.firsts.entry(key(pod)).or_insert_with(|| Lived { seen: at, ..Lived::default() });
        if bound {
            lived.bound.get_or_insert(at);
        }
        if phase == "Running" && is_ready(pod) {
            lived.ready.get_or_insert(at);
        }
        if ended {
            lived.over.get_or_insert(at);
        }
        let counts = match self.counts {
            Counts::Running => phase == "Running",
            Counts::Bound => bound && !ended,
        };
        let held = counts.then(|| Held { series, milli: requested(pod) });
        self.hold(at, key(pod), held);
    }

    /// A pod is gone.
    pub fn deleted(&mut self, at: f64, pod: &Pod) {
        if let Some(lived) = self.firsts.get_mut(&key(pod)) {
            lived.over.get_or_insert(at);
        }
        self.hold(at, key(pod), None);
    }

    fn hold(&mut self, at: f64, key: String, held: Option<Held>) {
        let before = match &held {
            Some(held) => self.held.insert(key, held.clone()),
            None => self.held.remove(&key),
        };
        if before == held {
            return;
        }
        let mut milli = vec![0; self.series.len()];
        self.held.values().for_each(|held| milli[held.series] += held.milli);
        self.steps.push(Step { at, milli });
    }

    fn series_of(&self, pod: &Pod) -> Option<usize> {
        let labels = pod.labels();
        let has = |series: &Series| labels.get(series.label).is_some_and(|value| value == series.value);
        self.series.iter().position(has)
    }

    /// All changes, the first at 0.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// What was seen of the pods whose name begins so.
    pub fn lives<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Lived> {
        self.firsts.iter().filter(move |(key, _)| key.starts_with(name)).map(|(_, lived)| lived)
    }

    /// Mean of the processors in use, all series together.
    pub fn mean(&self, from: f64, to: f64) -> f64 {
        let ends = self.steps.iter().skip(1).map(|step| step.at).chain([f64::INFINITY]);
        let area: f64 = self
            .steps
            .iter()
            .zip(ends)
            .map(|(step, end)| (end.min(to) - step.at.max(from)).max(0.0) * step.total())
            .sum();
        if to > from { area / (to - from) } else { 0.0 }
    }

    /// When all series together first come to so many processors, from a moment on.
    pub fn reaches(&self, cpus: f64, from: f64) -> Option<f64> {
        let before = self.steps.iter().take_while(|step| step.at <= from).last();
        let later = self.steps.iter().filter(|step| step.at > from);
        let mut steps = before.into_iter().chain(later);
        steps.find(|step| step.total() >= cpus - 1e-6).map(|step| step.at.max(from))
    }

    /// Processors in use at a moment, of one series.
    pub fn at(&self, at: f64, series: usize) -> f64 {
        let step = self.steps.iter().take_while(|step| step.at <= at).last();
        step.map_or(0.0, |step| step.milli[series] as f64 / 1000.0)
    }
}

impl Step {
    /// Processors of all series.
    pub fn total(&self) -> f64 {
        self.milli.iter().sum::<u64>() as f64 / 1000.0
    }
}

/// Two pods of one name in a row are two pods.
fn key(pod: &Pod) -> String {
    format!("{}/{}", pod.name_any(), pod.uid().unwrap_or_default())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Thousandths of processors that a pod asks for.
pub fn requested(pod: &Pod) -> u64 {
    let of = |container: &k8s_openapi::api::core::v1::Container| {
        let requests = container.resources.as_ref()?.requests.as_ref()?;
        milli(&requests.get("cpu")?.0)
    };
    pod.spec.iter().flat_map(|spec| &spec.containers).filter_map(of).sum()
}

/// `1500m`, `2` or `0.5` in thousandths.
pub fn milli(quantity: &str) -> Option<u64> {
    match quantity.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => quantity.parse::<f64>().ok().map(|cores| (cores * 1000.0).round() as u64),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, job: &str, phase: &str, cpu: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "uid": format!("{name}-1"), "labels": { "job": job } },
            "spec": { "nodeName": "sim-1", "containers": [{ "name": "c", "resources": { "requests": { "cpu": cpu } } }] },
            "status": { "phase": phase, "conditions": [{ "type": "Ready", "status": if phase == "Running" { "True" } else { "False" } }] },
        }))
        .unwrap()
    }

    const A: Series = Series { label: "job", value: "a" };
    const B: Series = Series { label: "job", value: "b" };

    #[test]
    fn use_is_what_running_pods_ask_for_until_they_are_gone() {
        let mut usage = Usage::new(&[A, B], Counts::Running);
        usage.applied(1.0, &pod("a-0", "a", "Pending", "2"));
        usage.applied(2.0, &pod("a-0", "a", "Running", "2"));
        usage.applied(3.0, &pod("a-0", "a", "Running", "2"));
        usage.applied(4.0, &pod("b-0", "b", "Running", "500m"));
        usage.applied(4.0, &pod("c-0", "c", "Running", "500m"));
        usage.applied(6.0, &pod("a-0", "a", "Succeeded", "2"));
        usage.deleted(10.0, &pod("b-0", "b", "Running", "500m"));
        let steps: Vec<(f64, Vec<u64>)> = usage.steps().iter().map(|s| (s.at, s.milli.clone())).collect();
        assert_eq!(
            steps,
            [
                (0.0, vec![0, 0]),
                (2.0, vec![2000, 0]),
                (4.0, vec![2000, 500]),
                (6.0, vec![0, 500]),
                (10.0, vec![0, 0])
            ]
        );
        // 2 × 2 s + 2.5 × 2 s + 0.5 × 4 s
        assert!((usage.mean(0.0, 10.0) - 1.1).abs() < 1e-9);
        assert!((usage.mean(3.0, 5.0) - 2.25).abs() < 1e-9);
        assert_eq!((usage.reaches(2.5, 0.0), usage.reaches(2.5, 5.0)), (Some(4.0), Some(5.0)));
        assert_eq!((usage.reaches(2.5, 7.0), usage.reaches(0.5, 7.0)), (None, Some(7.0)));
        assert_eq!((usage.at(5.0, 0), usage.at(5.0, 1), usage.at(1.0, 0)), (2.0, 0.5, 0.0));
        let lived = usage.lives("a-").next().unwrap();
        assert_eq!(*lived, Lived { seen: 1.0, bound: Some(1.0), ready: Some(2.0), over: Some(6.0) });
    }

    #[test]
    fn a_bound_pod_counts_before_it_runs_where_that_is_asked_for() {
        let mut usage = Usage::new(&[A], Counts::Bound);
        usage.applied(1.0, &pod("a-0", "a", "Pending", "1"));
        usage.applied(2.0, &pod("a-0", "a", "Failed", "1"));
        assert_eq!((usage.at(1.5, 0), usage.at(2.5, 0)), (1.0, 0.0));
    }

    #[test]
    fn quantities_are_read() {
        let read: Vec<Option<u64>> = ["1500m", "2", "0.5", "x"].into_iter().map(milli).collect();
        assert_eq!(read, [Some(1500), Some(2000), Some(500), None]);
    }
}
