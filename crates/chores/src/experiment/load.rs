//! The operator under load: hundreds of jobs on hundreds of simulated nodes, submitted several a second.
//!
//! The operator is the one that ships, and measures itself. Masters are stood for by one process
//! ([`StandIns`](super::kubelet::StandIns)), and workers are only simulated: there is no room for thousands of real
//! ones here.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use elasticdl_operator::names;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::chart::{Chart, Panel};
use super::job::Size;
use super::kubelet::PROCESSES;
use super::lab::{Lab, simulated_nodes, tolerations};
use super::prometheus::Samples;
use super::report::{Report, number};
use super::usage::{Counts, Series, Usage};
use super::{Outcome, Picture};
use crate::kube::Lent;

const NAMESPACE: &str = "load";
/// Where the operator tells its metrics.
const METRICS: &str = "127.0.0.1:7099";
/// What is promised; and what is too long for a test, of which nobody knows what else the machine does.
const LATENCY_MAX: f64 = 1.0;
const LATENCY_MAX_SHORT: f64 = 5.0;

/// How long the job lasts that goes ahead.
const WARM_UP: Duration = Duration::from_secs(2);
/// In which Linux tells processor time, on all machines that this runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// How large the load is.
#[derive(Debug, Clone)]
pub struct Scale {
    /// Simulated nodes.
    pub nodes: u16,
    /// Processors of each.
    pub node_cpus: u32,
    jobs: u32,
    workers: u32,
    /// Jobs submitted in a second.
    rate: f64,
    /// How long each lasts.
    life: Duration,
    /// 99 of 100 looks must end with the status written within so many seconds.
    latency_max: f64,
}

impl Scale {
    /// What is promised for, or a short form.
    pub fn of(short: bool) -> Scale {
        if short {
            return Scale {
                nodes: 50,
                node_cpus: 16,
                jobs: 20,
                workers: 20,
                rate: 5.0,
                life: Duration::from_secs(6),
                latency_max: LATENCY_MAX_SHORT,
            };
        }
        Scale {
            nodes: 500,
            node_cpus: 16,
            jobs: 200,
            workers: 20,
            rate: 5.0,
            life: Duration::from_secs(60),
            latency_max: LATENCY_MAX,
        }
    }
}

/// What was measured.
#[derive(Debug)]
struct Run {
    /// Seconds from the first submission to the end of the last job.
    seconds: f64,
    /// What the operator says of itself.
    samples: Samples,
    /// Seconds of processor time, by process.
    processors: BTreeMap<String, f64>,
    usage: Usage,
}

/// Runs it, and tells what came of it.
pub async fn run(lab: &mut Lab, cluster: &Lent, scale: &Scale) -> Result<Outcome> {
    warm_up(lab, scale).await?;
    lab.start_stand_ins(scale.life);
    lab.start_operator(&["--metrics", METRICS])?;
    lab.namespace(NAMESPACE).await?;
    let series =
        [Series { label: names::ROLE, value: "worker" }, Series { label: names::ROLE, value: "master" }];
    let observation = lab.observe(NAMESPACE, Usage::new(&series, Counts::Running));
    let operator = lab.operator_pid().context("the operator runs")?;
    let processes = || {
        let mut all = cluster.processes();
        all.push(("operator".to_owned(), operator));
        all.push(("this program, for all masters".to_owned(), std::process::id()));
        all.into_iter().map(|(name, pid)| (name, processor_seconds(pid))).collect::<BTreeMap<_, _>>()
    };
    let before = processes();
    let began = Instant::now();
    let submit = async |n: u32| {
        tokio::time::sleep_until((began + Duration::from_secs_f64(f64::from(n) / scale.rate)).into()).await;
        lab.submit(NAMESPACE, resource(lab, scale, n)).await
    };
    // One that takes its time does not keep the others.
    futures::future::try_join_all((0..scale.jobs).map(submit)).await?;
    let submitted = began.elapsed();
    eprintln!("[{:>6.1} s] {} jobs are submitted", submitted.as_secs_f64(), scale.jobs);
    let limit = scale.life * 3 + Duration::from_secs(120);
    lab.until_over(NAMESPACE, scale.jobs as usize, limit).await?;
    let seconds = began.elapsed().as_secs_f64();
    let after = processes();
    let used = |(name, at_end): (String, f64)| {
        let used = at_end - before.get(&name).copied().unwrap_or_default();
        (name, used)
    };
    let run = Run {
        seconds,
        samples: Samples::read(&metrics().await?),
        processors: after.into_iter().map(used).collect(),
        usage: observation.usage(),
    };
    Ok(Outcome {
        name: "load".into(),
        report: report(scale, &run),
        picture: Picture::Areas(chart(scale, &run)),
        problems: problems(scale, &run),
    })
}

/// The API server takes seconds for the first object of each kind. One job goes ahead, with an operator of its own that
/// ends when the next one starts.
async fn warm_up(lab: &mut Lab, scale: &Scale) -> Result<()> {
    let namespace = "warm-up";
    lab.start_stand_ins(WARM_UP);
    lab.namespace(namespace).await?;
    lab.start_operator(&[])?;
    lab.submit(namespace, resource(lab, scale, 0)).await?;
    lab.until_over(namespace, 1, WARM_UP + Duration::from_secs(60)).await
}

/// A job of which only the master's pod is stood for; kwok has the others.
fn resource(lab: &Lab, scale: &Scale, n: u32) -> Value {
    let size = Size { servers: 1, workers: scale.workers, workers_min: 1, cpu: "1", epochs: 1, batch: 64 };
    let mut kubernetes = lab.real(&json!({}));
    kubernetes["node_selector"] = simulated_nodes();
    kubernetes["tolerations"] = tolerations();
    let mut resource = size.resource(&format!("job-{n}"), kubernetes);
    resource["spec"]["master"]["pod"] = json!({ "metadata": { "annotations": { PROCESSES: "true" } } });
    resource
}

/// What the operator says of itself.
async fn metrics() -> Result<String> {
    let mut stream = TcpStream::connect(METRICS).await.context("reach the operator's metrics")?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: operator\r\n\r\n").await.context("ask for metrics")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.context("read metrics")?;
    Ok(text)
}

/// Processor time of a process so far.
fn processor_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    ticks_used(&stat).map_or(0.0, |used| used as f64 / TICKS_PER_SECOND)
}

/// Of itself and of the system on its behalf: the 14th and 15th field, after a name that may hold anything.
fn ticks_used(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// The histogram of looks that ended with the status written.
const LOOKS: (&str, &str) = ("elasticdl_operator_look_seconds", "written=\"true\"");

/// Looks that ended with the status written: so long for this share of them.
fn within(run: &Run, share: f64) -> Option<f64> {
    let longest = run.samples.value("elasticdl_operator_look_seconds_max", LOOKS.1);
    // Where a bucket is wide, the longest says more than its bound.
    match (run.samples.quantile(LOOKS, share), longest) {
        (Some(quantile), Some(longest)) => Some(quantile.min(longest)),
        (quantile, longest) => quantile.or(longest),
    }
}

fn problems(scale: &Scale, run: &Run) -> Vec<String> {
    let mut problems = Vec::new();
    match within(run, 0.99) {
        Some(p99) if p99 <= scale.latency_max => {}
        p99 => problems.push(format!("99 % of the looks took {p99:?} s, more than {} s", scale.latency_max)),
    }
    let wanted = f64::from(scale.jobs * scale.workers);
    let most = run.usage.steps().iter().map(|step| step.milli[0] as f64 / 1000.0).fold(0.0, f64::max);
    let all_at_once = scale.life.as_secs_f64() > f64::from(scale.jobs) / scale.rate;
    if all_at_once && most < wanted * 0.5 {
        problems.push(format!("no more than {most} of {wanted} workers ran at once"));
    }
    problems
}

fn report(scale: &Scale, run: &Run) -> Report {
    let title = format!(
        "The operator with {} jobs of {} workers on {} nodes, {} submitted a second",
        scale.jobs, scale.workers, scale.nodes, scale.rate
    );
    let mut report = Report::new(title, &["what", "measured"]);
    let mut row = |what: &str, measured: String| report.row(&[what.into(), measured]);
    let seconds = |value: Option<f64>| value.map_or("–".into(), |value| format!("{} s", number(value, 3)));
    row("from a change seen to the status written: half of them within", seconds(within(run, 0.5)));
    row("**99 % within**", format!("**{}**", seconds(within(run, 0.99))));
    let longest = run.samples.value("elasticdl_operator_look_seconds_max", LOOKS.1);
    row("the longest", seconds(longest));
    let count =
        |samples: &Samples, labels: &str| samples.value("elasticdl_operator_look_seconds_count", labels);
    row("status written, times", number(count(&run.samples, LOOKS.1).unwrap_or(0.0), 0));
    row(
        "looks that found nothing to write",
        number(count(&run.samples, "written=\"false\"").unwrap_or(0.0), 0),
    );
    let failed = run.samples.value("elasticdl_operator_looks_failed_total", "").unwrap_or(0.0);
    row("looks that failed and were tried again", number(failed, 0));
    let requests = run.samples.sums("elasticdl_operator_api_requests_total", "verb");
    let all: f64 = requests.values().sum();
    let each = |count: f64| {
        format!(
            "{} a second, {} a job",
            number(count / run.seconds, 1),
            number(count / f64::from(scale.jobs), 1)
        )
    };
    row("requests of the operator to the API server", each(all));
    for (verb, count) in &requests {
        row(&format!("… {verb}"), each(*count));
    }
    let waited: f64 = run.samples.sums("elasticdl_operator_api_request_seconds_total", "verb").values().sum();
    row("mean time until the API server answers one", seconds(Some(waited / all.max(1.0))));
    for (name, used) in &run.processors {
        row(
            &format!("processor time of {name}"),
            format!("{} % of a core", number(used / run.seconds * 100.0, 0)),
        );
    }
    report.note(&format!(
        "From the first submission to the end of the last job {:.0} s; each job lasts {} s. Quantiles are read from a histogram, \
         between the bounds of its buckets. The control plane, kwok and the stand-ins share this machine's {} cores with the operator.",
        run.seconds,
        scale.life.as_secs(),
        std::thread::available_parallelism().map_or(0, usize::from),
    ));
    report
}

fn chart(scale: &Scale, run: &Run) -> Chart {
    let amounts = |milli: &[u64]| milli.iter().map(|&milli| milli as f64 / 1000.0).collect();
    let steps = run.usage.steps().iter().map(|step| (step.at, amounts(&step.milli)));
    Chart {
        title: format!("{} jobs, {} submitted a second: pods that run", scale.jobs, scale.rate),
        series: vec!["workers".into(), "masters".into()],
        unit_x: "seconds".into(),
        unit_y: "pods".into(),
        limit: f64::from(scale.jobs * (scale.workers + 1)),
        panels: vec![Panel {
            title: String::new(),
            steps: steps.collect(),
            end: run.seconds,
            marks: Vec::new(),
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_after_a_name_with_brackets() {
        let stat = "7 (a) b) S 1 1 1 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 4711";
        assert_eq!(ticks_used(stat), Some(300));
    }

    fn run_with(buckets: &str) -> Run {
        Run {
            seconds: 100.0,
            samples: Samples::read(buckets),
            processors: BTreeMap::from([("operator".into(), 25.0)]),
            usage: Usage::new(&[Series { label: "a", value: "b" }], Counts::Running),
        }
    }

    #[test]
    fn looks_and_requests_are_reported_and_slow_ones_are_a_problem() {
        let name = "elasticdl_operator_look_seconds";
        let text = format!(
            "{name}_bucket{{written=\"true\",le=\"0.5\"}} 900\n{name}_bucket{{written=\"true\",le=\"1\"}} 1000\n\
             {name}_bucket{{written=\"true\",le=\"+Inf\"}} 1000\n{name}_count{{written=\"true\"}} 1000\n\
             elasticdl_operator_api_requests_total{{verb=\"patch\",resource=\"a\"}} 600\n\
             elasticdl_operator_api_requests_total{{verb=\"patch\",resource=\"b\"}} 400\n"
        );
        let scale = Scale::of(false);
        let run = run_with(&text);
        assert_eq!(problems(&scale, &run).len(), 1, "no worker ran: {:?}", problems(&scale, &run));
        let table = report(&scale, &run).markdown();
        assert!(table.contains("| **99 % within** | **0.950 s** |"), "{table}");
        assert!(table.contains("| … patch | 10.0 a second, 5.0 a job |"), "{table}");
        assert!(table.contains("| processor time of operator | 25 % of a core |"), "{table}");
        let slow = text.replace("le=\"1\"} 1000", "le=\"1\"} 950");
        assert!(problems(&scale, &run_with(&slow))[0].contains("more than 1 s"));
    }
}
