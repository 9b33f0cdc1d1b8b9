//! Experiment 1: two jobs that do not fit beside each other, once as gangs, once elastic.
//!
//! Operator, scheduler, masters, servers and workers are real; only what a batch costs is a model: a worker sleeps
//! for the time that it stands for. Time is compressed, and everything that is not such a sleep takes its real
//! time, so start-up and draining weigh more here than they would.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use elasticdl_operator::names;
use elasticdl_operator::resource::ElasticJob;
use serde_json::Value;

use super::chart::{Chart, Panel};
use super::job::{Size, paced};
use super::lab::{Lab, Observation};
use super::report::{Report, number};
use super::usage::{Counts, Series, Usage};
use super::{Cpus, Outcome, Picture};

/// Names of the jobs.
const JOBS: [&str; 2] = ["first", "second"];
const SERIES: [Series; 2] =
    [Series { label: names::JOB, value: JOBS[0] }, Series { label: names::JOB, value: JOBS[1] }];
/// Records of a batch.
const BATCH: u64 = 4;
/// The second job's master must run after so many seconds of real time.
const WAIT_MAX: f64 = 1.0;

/// How large the experiment is.
#[derive(Debug, Clone)]
pub struct Scale {
    /// Processors of the cluster.
    pub cpus: u32,
    /// Simulated nodes that they are on.
    pub nodes: u16,
    servers: u32,
    workers: u32,
    /// Seconds that a job takes with all of its workers, times their number.
    work: f64,
    /// When the second job is submitted.
    second_at: f64,
    /// Seconds of the experiment in a second of this machine.
    compression: f64,
    /// Seconds of this machine that a batch takes.
    batch: f64,
    /// Whether times count that other work on this machine makes longer. In the short form they do not: at its speed
    /// a second of start-up is a third of a minute.
    strict: bool,
    published: Published,
}

/// What the original project published, in seconds.
#[derive(Debug, Clone, Copy)]
struct Published {
    gang: f64,
    elastic: f64,
    /// How long the second gang waited.
    wait: Option<f64>,
    /// Mean use of the cluster, gang and elastic.
    used: Option<[f64; 2]>,
}

impl Scale {
    /// The published sizes; the short form has the smaller one at a higher speed.
    pub fn of(cpus: Cpus, short: bool) -> Scale {
        match cpus {
            Cpus::Small => Scale {
                cpus: 24,
                nodes: 3,
                servers: 2,
                workers: 10,
                work: 3740.0,
                second_at: 30.0,
                compression: if short { 20.0 } else { 5.0 },
                batch: 0.4,
                strict: !short,
                published: Published { gang: 795.0, elastic: 580.0, wait: None, used: Some([0.51, 0.73]) },
            },
            Cpus::Large => Scale {
                cpus: 320,
                nodes: 10,
                servers: 2,
                workers: 172,
                work: 172.0 * 650.0,
                second_at: 300.0,
                compression: if short { 20.0 } else { 5.0 },
                batch: 1.0,
                strict: !short,
                published: Published { gang: 1300.0, elastic: 1100.0, wait: Some(350.0), used: None },
            },
        }
    }

    /// Batches of a job.
    fn batches(&self) -> u64 {
        (self.work / (self.batch * self.compression)).round() as u64
    }
}

/// Whether a job waits for room for all of its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Gang,
    Elastic,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Gang => "gang",
            Mode::Elastic => "elastic",
        }
    }
}

/// One of the two runs; times in seconds of this machine since its beginning.
#[derive(Debug)]
struct Run {
    usage: Usage,
    jobs: [Times; 2],
}

/// What became of a job.
#[derive(Debug, Clone, Copy)]
struct Times {
    submitted: f64,
    /// Its master's pod ran.
    master: f64,
    /// The first task was leased.
    leased: f64,
    /// Everything trained.
    end: f64,
    /// Records that were trained.
    records: u64,
}

impl Run {
    fn total(&self) -> f64 {
        self.jobs[0].end.max(self.jobs[1].end)
    }
}

/// Runs it, and tells what came of it.
pub async fn run(lab: &mut Lab, scale: &Scale) -> Result<Outcome> {
    lab.data(scale.batches() * BATCH).await?;
    lab.start_processes()?;
    lab.start_operator(&[])?;
    let gang = share(lab, scale, Mode::Gang).await.context("as gangs")?;
    let elastic = share(lab, scale, Mode::Elastic).await.context("elastic")?;
    let mut problems = problems(scale, &gang, &elastic);
    let whole = scale.batches() * BATCH;
    for run in [&gang, &elastic] {
        if run.jobs.iter().any(|job| job.records != whole) {
            problems.push(format!("a job trained other than {whole} records: {:?}", run.jobs));
        }
    }
    Ok(Outcome {
        name: format!("sharing-{}", scale.cpus),
        report: report(scale, &gang, &elastic),
        picture: Picture::Areas(chart(scale, &gang, &elastic)),
        problems,
    })
}

/// Two jobs, the second somewhat later.
async fn share(lab: &Lab, scale: &Scale, mode: Mode) -> Result<Run> {
    let namespace = format!("sharing-{}", mode.name());
    lab.namespace(&namespace).await?;
    let observation = lab.observe(&namespace, Usage::new(&SERIES, Counts::Running));
    let mut jobs = Vec::new();
    for (n, name) in JOBS.into_iter().enumerate() {
        observation.until(n as f64 * scale.second_at / scale.compression).await;
        let submitted = observation.now();
        jobs.push((submitted, lab.submit(&namespace, resource(lab, scale, mode, name)).await?));
        eprintln!("[{:>6.1} s] {}: {name} submitted", observation.now(), mode.name());
    }
    let limit = Duration::from_secs_f64(4.0 * scale.published.gang / scale.compression + 60.0);
    lab.until_over(&namespace, JOBS.len(), limit).await?;
    let usage = observation.usage();
    let mut times = Vec::new();
    for (submitted, job) in &jobs {
        times.push(job_times(lab, &observation, &usage, *submitted, job)?);
    }
    let jobs = <[Times; 2]>::try_from(times).ok().context("there are two jobs")?;
    let run = Run { usage, jobs };
    eprintln!("[{:>6.1} s] {}: both are done", observation.now(), mode.name());
    Ok(run)
}

fn job_times(
    lab: &Lab,
    observation: &Observation,
    usage: &Usage,
    submitted: f64,
    job: &ElasticJob,
) -> Result<Times> {
    let events = lab.events(job)?;
    let of = |name: &str| events.iter().find(|event| event["event"] == name);
    let time = |name: &str| {
        let told = of(name).and_then(|event| event["unix_ms"].as_f64());
        told.map(|at| observation.since(at))
            .with_context(|| format!("no event {name:?} of {:?}", job.metadata.name))
    };
    let master = names::master(&job.metadata.name.clone().unwrap_or_default());
    let running = usage.lives(&master).filter_map(|lived| lived.ready).fold(f64::INFINITY, f64::min);
    ensure!(running.is_finite(), "no pod of {master} was seen running");
    let finished = of("finished").context("no job ends without saying so")?;
    Ok(Times {
        submitted,
        master: running,
        leased: time("leasing")?,
        end: time("finished")?,
        records: finished["records"].as_u64().unwrap_or_default(),
    })
}

/// A job of the experiment.
fn resource(lab: &Lab, scale: &Scale, mode: Mode, name: &str) -> Value {
    let size = Size {
        servers: scale.servers,
        workers: scale.workers,
        workers_min: if mode == Mode::Gang { scale.workers } else { 1 },
        cpu: "1",
        epochs: 1,
        batch: BATCH,
    };
    size.resource(name, lab.simulated(&paced(scale.batch)))
}

/// What falls short of what is promised.
fn problems(scale: &Scale, gang: &Run, elastic: &Run) -> Vec<String> {
    let mut problems = Vec::new();
    let total = |run: &Run| run.total() * scale.compression;
    if scale.strict && total(elastic) > scale.published.elastic {
        problems.push(format!(
            "elastic took {:.0} s, more than the published {:.0} s",
            total(elastic),
            scale.published.elastic
        ));
    }
    let (ratio, published) = (elastic.total() / gang.total(), scale.published.elastic / scale.published.gang);
    if ratio > published {
        problems.push(format!(
            "elastic took {:.0} % of the time of gangs, more than the published {:.0} %",
            ratio * 100.0,
            published * 100.0
        ));
    }
    let second = elastic.jobs[1];
    let wait = second.master - second.submitted;
    if scale.strict && wait > WAIT_MAX {
        problems.push(format!("the second job waited {wait:.2} s of real time for its master"));
    }
    if elastic.jobs[1].leased > elastic.jobs[0].end {
        problems.push("the second job did not train beside the first".into());
    }
    if gang.jobs[1].master < gang.jobs[0].end {
        problems.push("a gang was let in without room for all of it".into());
    }
    problems
}

fn report(scale: &Scale, gang: &Run, elastic: &Run) -> Report {
    let mut report = Report::new(
        format!("Two jobs on {} CPU", scale.cpus),
        &["", "gang", "elastic", "published: gang", "published: elastic"],
    );
    let virtual_ = |seconds: f64| number(seconds * scale.compression, 0);
    let published = |value: Option<f64>| value.map_or("–".into(), |value| number(value, 0));
    let mut row = |what: &str, of: &dyn Fn(&Run) -> String, known: [String; 2]| {
        let [known_gang, known_elastic] = known;
        report.row(&[what.into(), of(gang), of(elastic), known_gang, known_elastic]);
    };
    let none = || ["–".to_owned(), "–".to_owned()];
    row("second job submitted, s", &|run| virtual_(run.jobs[1].submitted), none());
    row("first job trains from, s", &|run| virtual_(run.jobs[0].leased), none());
    row("first job ends, s", &|run| virtual_(run.jobs[0].end), none());
    row("second job trains from, s", &|run| virtual_(run.jobs[1].leased), none());
    let waits = [published(scale.published.wait), published(scale.published.wait.map(|_| 0.0))];
    row(
        "second job waits for its master, s",
        &|run| virtual_(run.jobs[1].master - run.jobs[1].submitted),
        waits,
    );
    row("… in seconds of real time", &|run| number(run.jobs[1].master - run.jobs[1].submitted, 2), none());
    row(
        "… until its first task is leased, real time",
        &|run| number(run.jobs[1].leased - run.jobs[1].submitted, 2),
        none(),
    );
    let totals = [published(Some(scale.published.gang)), published(Some(scale.published.elastic))];
    row("**both jobs done, s**", &|run| format!("**{}**", virtual_(run.total())), totals);
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let used = scale.published.used.map_or_else(none, |used| used.map(percent));
    let share = |run: &Run| percent(run.usage.mean(0.0, run.total()) / f64::from(scale.cpus));
    row("mean use of the cluster", &share, used);
    report.note(&format!(
        "Each job: 1 master, {} servers and {} workers of one CPU on {} simulated nodes, {:.0} worker-seconds of work in \
         {} batches. A second of this machine stands for {} s, a batch sleeps for {} s of real time. All {} records of every \
         job were trained, each once.",
        scale.servers,
        scale.workers,
        scale.nodes,
        scale.work,
        scale.batches(),
        scale.compression,
        scale.batch,
        scale.batches() * BATCH,
    ));
    report
}

fn chart(scale: &Scale, gang: &Run, elastic: &Run) -> Chart {
    let panel = |title: &str, run: &Run| {
        let amounts = |milli: &[u64]| milli.iter().map(|&milli| milli as f64 / 1000.0).collect();
        let steps = run.usage.steps().iter().map(|step| (step.at * scale.compression, amounts(&step.milli)));
        Panel {
            title: title.into(),
            steps: steps.collect(),
            end: run.total() * scale.compression,
            marks: vec![(run.jobs[1].submitted * scale.compression, "second job submitted".into())],
        }
    };
    Chart {
        title: format!("Two jobs on {} CPU: CPU of running pods", scale.cpus),
        series: JOBS.iter().map(|name| format!("{name} job")).collect(),
        unit_x: format!("seconds (time compressed {} times)", scale.compression),
        unit_y: "CPU".into(),
        limit: f64::from(scale.cpus),
        panels: vec![
            panel("gang: a job waits for room for all of its workers", gang),
            panel("elastic", elastic),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first_end: f64, second: [f64; 4]) -> Run {
        let [submitted, master, leased, end] = second;
        let usage = Usage::new(&SERIES, Counts::Running);
        let first = Times { submitted: 0.0, master: 0.3, leased: 0.9, end: first_end, records: 1 };
        Run { usage, jobs: [first, Times { submitted, master, leased, end, records: 1 }] }
    }

    #[test]
    fn work_is_cut_into_batches_that_take_as_long_together() {
        let small = Scale::of(Cpus::Small, false);
        assert_eq!(small.batches(), 1870);
        assert!((small.batches() as f64 * small.batch * small.compression - small.work).abs() < 1.0);
        assert_eq!(Scale::of(Cpus::Large, false).batches(), 22360);
    }

    #[test]
    fn what_falls_short_is_told() {
        let scale = Scale::of(Cpus::Small, false);
        let gang = run(75.0, [6.0, 75.3, 76.0, 150.0]);
        let elastic = run(82.0, [6.0, 6.4, 7.0, 92.0]);
        assert_eq!(problems(&scale, &gang, &elastic), Vec::<String>::new());
        let late = run(82.0, [6.0, 7.5, 90.0, 120.0]);
        let told = problems(&scale, &gang, &late);
        assert_eq!(
            told,
            [
                "elastic took 600 s, more than the published 580 s",
                "elastic took 80 % of the time of gangs, more than the published 73 %",
                "the second job waited 1.50 s of real time for its master",
                "the second job did not train beside the first",
            ]
        );
        let early = run(75.0, [6.0, 6.3, 76.0, 150.0]);
        assert_eq!(problems(&scale, &early, &elastic), ["a gang was let in without room for all of it"]);
    }

    #[test]
    fn times_are_reported_in_the_time_of_the_experiment() {
        let scale = Scale::of(Cpus::Small, false);
        let text = report(&scale, &run(75.0, [6.0, 75.3, 76.0, 150.0]), &run(82.0, [6.0, 6.4, 7.0, 92.0]))
            .markdown();
        assert!(text.contains("| **both jobs done, s** | **750** | **460** | 795 | 580 |"), "{text}");
        assert!(text.contains("| … in seconds of real time | 69.30 | 0.40 | – | – |"), "{text}");
    }
}
