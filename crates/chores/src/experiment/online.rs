//! Experiment 2: an online service grows and shrinks beside a job that takes whatever is left.
//!
//! The service is a Deployment of the default priority; workers have a lower one, so the scheduler preempts them.
//! The small form runs real nginx and real workers in containers on real nodes, in real time; a CPU of the trace is
//! a tenth of one there. The large one and the short form run on simulated nodes with time compressed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use elasticdl_operator::names;
use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::chart::{Chart, Panel};
use super::job::{Size, paced};
use super::lab::{GRACE, Lab, Observation, simulated_nodes, tolerations};
use super::report::{Report, number};
use super::trace::Trace;
use super::usage::{Counts, Lived, Series, Usage};
use super::{Cpus, Outcome, Picture};
use crate::kube::NGINX;

const NAMESPACE: &str = "online";
const JOB: &str = "training";
const SERVICE: &str = "nginx";
const SERIES: [Series; 2] =
    [Series { label: "app", value: SERVICE }, Series { label: names::JOB, value: JOB }];
/// How long the job may take to fill the cluster first.
const FILLED: Duration = Duration::from_secs(120);
/// What is promised: a pod of the service waits for the drain of a worker, and no longer than this beyond it.
const WAIT_BEYOND_GRACE: f64 = 5.0;
/// And so much of what can be scheduled is in use, on average.
const USED_MIN: f64 = 0.95;
/// Records of a batch, and of the data.
const BATCH: u64 = 4;
const ROWS: u64 = 20_000;

/// How large the experiment is.
#[derive(Debug, Clone)]
pub struct Scale {
    /// CPU of the trace.
    pub cpus: u32,
    /// Whether containers run on real nodes.
    pub real: bool,
    /// Nodes.
    pub nodes: u16,
    servers: u32,
    /// What a CPU of the trace is on the cluster.
    cpu: &'static str,
    trace: Trace,
    compression: f64,
    /// Seconds of a batch, real time.
    batch: f64,
    published: &'static str,
}

impl Scale {
    /// The published sizes; the short form has the smaller one on simulated nodes.
    pub fn of(cpus: Cpus, short: bool) -> Scale {
        let trace = Trace::published(cpus);
        match cpus {
            Cpus::Small => Scale {
                cpus: 24,
                real: !short,
                nodes: if short { 3 } else { 2 },
                servers: 2,
                cpu: if short { "1" } else { "100m" },
                trace,
                compression: if short { 30.0 } else { 1.0 },
                batch: 0.5,
                published: "98 % of what is schedulable; refilled in 5–13 s",
            },
            Cpus::Large => Scale {
                cpus: 320,
                real: false,
                nodes: 10,
                servers: 2,
                cpu: "1",
                trace,
                compression: if short { 40.0 } else { 10.0 },
                batch: 1.0,
                published: "above 90 %, with dips of 20–40 s",
            },
        }
    }

    /// CPU of the cluster in CPU of the trace.
    fn per_cpu(&self) -> f64 {
        super::usage::milli(self.cpu).map_or(1.0, |milli| milli as f64 / 1000.0)
    }
}

/// What was seen; times in seconds of this machine since the cluster was full.
#[derive(Debug)]
struct Run {
    usage: Usage,
    /// When it was full, in the time of `usage`.
    began: f64,
    end: f64,
}

impl Run {
    /// Share of what can be scheduled that was in use.
    fn used(&self, scale: &Scale) -> f64 {
        self.usage.mean(self.began, self.end) / (f64::from(scale.cpus) * scale.per_cpu())
    }

    /// Seconds from the creation of each pod of the service to its being ready, shortest first.
    fn waits(&self) -> Vec<f64> {
        let lives = self.usage.lives(SERVICE);
        // One that never was counts with all the time that it waited.
        let until = |lived: &Lived| lived.ready.or(lived.over).unwrap_or(self.end);
        let mut waits: Vec<f64> = lives.map(|lived| until(lived) - lived.seen).collect();
        waits.sort_by(f64::total_cmp);
        waits
    }
}

/// Runs it, and tells what came of it.
pub async fn run(lab: &mut Lab, scale: &Scale) -> Result<Outcome> {
    lab.data(ROWS).await?;
    lab.start_processes()?;
    lab.start_operator(&[])?;
    lab.namespace(NAMESPACE).await?;
    let observation = lab.observe(NAMESPACE, Usage::new(&SERIES, Counts::Bound));
    let deployments: Api<Deployment> = Api::namespaced(lab.client.clone(), NAMESPACE);
    let service = serde_json::from_value(service(scale)).context("write the service")?;
    deployments.create(&PostParams::default(), &service).await.context("make the service")?;
    let env = paced(scale.batch);
    let kubernetes = if scale.real { lab.real(&env) } else { lab.simulated(&env) };
    lab.submit(NAMESPACE, size(scale).resource(JOB, kubernetes)).await?;
    let began = until_full(scale, &observation).await?;
    eprintln!("[{:>6.1} s] training fills the cluster", observation.now());
    let trace = scale.trace.compressed(scale.compression);
    for (at, replicas) in &trace.steps {
        observation.until(began + at).await;
        let wanted = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        let scaled = deployments.patch(SERVICE, &PatchParams::default(), &wanted).await;
        scaled.context("scale the service")?;
        eprintln!("[{:>6.1} s] {replicas} of {SERVICE} are wanted", observation.now());
    }
    observation.until(began + trace.end).await;
    let run = Run { usage: observation.usage(), began, end: began + trace.end };
    Ok(Outcome {
        name: format!("online-{}", scale.cpus),
        report: report(scale, &run),
        picture: Picture::Areas(chart(scale, &run)),
        problems: problems(scale, &run),
    })
}

/// The job takes all that there is: a worker on every CPU beside its master and its servers.
fn size(scale: &Scale) -> Size {
    Size {
        servers: scale.servers,
        workers: scale.cpus - 1 - scale.servers,
        workers_min: 1,
        cpu: scale.cpu,
        epochs: 100_000,
        batch: BATCH,
    }
}

/// When all pods of the job run, which fill the cluster.
async fn until_full(scale: &Scale, observation: &Observation) -> Result<f64> {
    loop {
        let usage = observation.usage();
        let runs = |lived: &&Lived| lived.ready.is_some() && lived.over.is_none();
        if usage.lives(JOB).filter(runs).count() == scale.cpus as usize {
            return Ok(observation.now());
        }
        ensure!(observation.now() < FILLED.as_secs_f64(), "training does not fill the cluster");
        observation.until(observation.now() + 0.2).await;
    }
}

/// The online service.
fn service(scale: &Scale) -> Value {
    let mut container = json!({
        "name": SERVICE, "image": NGINX, "imagePullPolicy": "IfNotPresent",
        "resources": { "requests": { "cpu": scale.cpu, "memory": "16Mi" } },
        "readinessProbe": { "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 1 },
    });
    if !scale.real {
        // Nobody probes on a simulated node.
        container["readinessProbe"] = Value::Null;
    }
    // As root it would look for a user that the image does not have.
    let user = json!({ "runAsUser": 65532, "runAsGroup": 65532 });
    let mut pod =
        json!({ "terminationGracePeriodSeconds": 2, "securityContext": user, "containers": [container] });
    if !scale.real {
        pod["nodeSelector"] = simulated_nodes();
        pod["tolerations"] = tolerations();
    }
    json!({
        "metadata": { "name": SERVICE },
        "spec": {
            "replicas": 0,
            "selector": { "matchLabels": { "app": SERVICE } },
            "template": { "metadata": { "labels": { "app": SERVICE } }, "spec": pod },
        },
    })
}

fn problems(scale: &Scale, run: &Run) -> Vec<String> {
    let mut problems = Vec::new();
    let used = run.used(scale);
    if used < USED_MIN {
        problems.push(format!("only {:.1} % of the cluster were in use", used * 100.0));
    }
    let (longest, limit) = (run.waits().last().copied(), GRACE.as_secs_f64() + WAIT_BEYOND_GRACE);
    if longest.is_none_or(|longest| longest > limit) {
        problems.push(format!("a pod of the service waited {longest:?} s, more than {limit} s"));
    }
    problems
}

fn report(scale: &Scale, run: &Run) -> Report {
    let trace = scale.trace.compressed(scale.compression);
    let title = format!("An online service beside training on {} CPU", scale.cpus);
    let mut report = Report::new(
        title,
        &[
            "from, s",
            "nginx, CPU",
            "training before, CPU",
            "training after, CPU",
            "cluster full again after, s of real time",
        ],
    );
    let training = |at: f64| number(run.usage.at(at, 1) / scale.per_cpu(), 0);
    let all = f64::from(scale.cpus) * scale.per_cpu();
    for (n, &(at, replicas)) in trace.steps.iter().enumerate() {
        let (at, until) = (run.began + at, run.began + trace.until(n));
        // The moment itself is still full: what comes after the first change counts.
        let changed = run.usage.steps().iter().find(|step| step.at > at).map_or(at, |step| step.at);
        let full = run.usage.reaches(all, changed).filter(|full| *full < until);
        report.row(&[
            number(scale.trace.steps[n].0, 0),
            replicas.to_string(),
            training(at - 0.01),
            training(until - 0.01),
            full.map_or("–".into(), |full| number(full - at, 1)),
        ]);
    }
    let waits = run.waits();
    let at = |share: f64| waits.get(((waits.len() as f64 * share).ceil() as usize).max(1) - 1).copied();
    let seconds = |value: Option<f64>| value.map_or("–".into(), |value| number(value, 1));
    report.note(&format!(
        "**Mean use of what is schedulable: {:.1} %** (published: {}). From its creation to ready, a pod of nginx waited {} s \
         (median), {} s (99 %), **{} s at most**, real time, of {} pods; a worker may take {} s to drain.",
        run.used(scale) * 100.0,
        scale.published,
        seconds(at(0.5)),
        seconds(at(0.99)),
        seconds(waits.last().copied()),
        waits.len(),
        GRACE.as_secs(),
    ));
    let nodes = if scale.real {
        format!(
            "Real nginx and real workers in containers on {} real nodes, in real time; a CPU of the trace is {} here",
            scale.nodes, scale.cpu
        )
    } else {
        format!(
            "{} simulated nodes; a second of this machine stands for {} s",
            scale.nodes, scale.compression
        )
    };
    let size = size(scale);
    report.note(&format!(
        "The job: 1 master, {} servers and up to {} workers. {nodes}. A batch of a worker takes {} s of real time.",
        size.servers, size.workers, scale.batch
    ));
    report
}

fn chart(scale: &Scale, run: &Run) -> Chart {
    let amounts =
        |milli: &[u64]| milli.iter().map(|&milli| milli as f64 / 1000.0 / scale.per_cpu()).collect();
    let at = |real: f64| (real - run.began).max(0.0) * scale.compression;
    let steps = run.usage.steps().iter().map(|step| (at(step.at), amounts(&step.milli)));
    let unit_x = match scale.compression {
        1.0 => "seconds".into(),
        times => format!("seconds (time compressed {times} times)"),
    };
    Chart {
        title: format!("nginx and training on {} CPU: CPU of pods that have a node", scale.cpus),
        series: vec![SERVICE.into(), JOB.into()],
        unit_x,
        unit_y: "CPU".into(),
        limit: f64::from(scale.cpus),
        panels: vec![Panel {
            title: String::new(),
            steps: steps.collect(),
            end: at(run.end),
            marks: Vec::new(),
        }],
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    fn pod(name: &str, label: (&str, &str), ready: bool, cpu: u32) -> Pod {
        let status = if ready { "True" } else { "False" };
        serde_json::from_value(json!({
            "metadata": { "name": name, "uid": name, "labels": { label.0: label.1 } },
            "spec": { "nodeName": "n", "containers": [{ "name": "c", "resources": { "requests": { "cpu": cpu.to_string() } } }] },
            "status": { "phase": if ready { "Running" } else { "Pending" }, "conditions": [{ "type": "Ready", "status": status }] },
        }))
        .unwrap()
    }

    fn run() -> Run {
        let mut usage = Usage::new(&SERIES, Counts::Bound);
        let training = pod("training-worker-0", (names::JOB, JOB), true, 24);
        usage.applied(2.0, &training);
        usage.deleted(10.0, &training);
        usage.applied(10.0, &pod("nginx-a", ("app", SERVICE), false, 3));
        usage.applied(10.0, &pod("training-worker-1", (names::JOB, JOB), true, 20));
        usage.applied(12.0, &pod("nginx-a", ("app", SERVICE), true, 3));
        Run { usage, began: 2.0, end: 42.0 }
    }

    #[test]
    fn use_and_waits_are_told_and_judged() {
        let scale = Scale { compression: 15.0, ..Scale::of(Cpus::Small, true) };
        let run = run();
        // 24 CPU for 8 s and 23 for 32 s, of 24 for 40 s.
        assert!((run.used(&scale) - (24.0 * 8.0 + 23.0 * 32.0) / (24.0 * 40.0)).abs() < 1e-9);
        assert_eq!(run.waits(), [2.0]);
        assert_eq!(problems(&scale, &run), Vec::<String>::new());
        let text = report(&scale, &run).markdown();
        assert!(text.contains("**Mean use of what is schedulable: 96.7 %**"), "{text}");
        assert!(text.contains("| 85 | 3 | 24 | 20 | – |"), "{text}");
    }

    #[test]
    fn what_falls_short_is_told() {
        let mut scale = Scale::of(Cpus::Small, true);
        scale.cpus = 32;
        let mut late = run();
        late.usage.applied(20.0, &pod("nginx-b", ("app", SERVICE), false, 0));
        assert_eq!(
            problems(&scale, &late),
            [
                "only 72.5 % of the cluster were in use",
                "a pod of the service waited Some(22.0) s, more than 15 s"
            ]
        );
    }

    #[test]
    fn the_job_takes_all_that_there_is() {
        for (cpus, workers) in [(Cpus::Small, 21), (Cpus::Large, 317)] {
            assert_eq!(size(&Scale::of(cpus, false)).workers, workers);
        }
    }
}
