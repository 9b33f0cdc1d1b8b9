//! A job on a cluster, seen from this machine: what looks here like its master leads to the one in a pod.
//!
//! It makes the job's objects, starts the master's pod and starts it again where it dies, opens a port that leads
//! to it, and copies what the pods write into the job's directory. So every command that finds a job by its name
//! works on this one as on any other. The job does not need it: where this process ends, the job goes on, and
//! the next one takes up where this one was.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::pin::pin;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use elasticdl_operator::cluster::Cluster;
use elasticdl_operator::manifest::{Job, Secrets};
use elasticdl_operator::pod::{self, End, State, Wait};
use elasticdl_operator::supervise::{Verdict, verdict};
use elasticdl_operator::watched::Watched;
use elasticdl_operator::{names, tunnel};
use elasticdl_wire::Token;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::args::Tether;
use crate::fault::{Exit, Fault};
use crate::home::{JobDir, MasterAt, OnCluster, Record};
use crate::lock::{Lock, Refused};
use crate::revive::{Next, Revivals};
use crate::submit::{append, running};

/// How long the last lines of pods that have ended may take to arrive.
const LAST_LINES: Duration = Duration::from_secs(10);
/// Between two tries to read a pod's log.
const LOG_RETRY: Duration = Duration::from_millis(500);
/// How long the objects of an earlier job of the same name may take to go.
const GONE_LIMIT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(200);

/// `tether`: leads to a job on a cluster until it is over.
pub async fn tether(args: Tether) -> anyhow::Result<Exit> {
    let dir = JobDir::at(&args.job_dir)?;
    let record = dir.record()?;
    let name = record.job.name.clone();
    let _lock = Lock::take(&dir.lock(), &name).map_err(|refused| match refused {
        Refused::Held(holder) => running(&name, holder.as_ref(), "is running"),
        Refused::Io(e) => Fault::user(format!("cannot lock {}", dir.lock().display())).because(e),
    })?;
    let on = record.on.clone().context("a job on a cluster says which")?;
    if args.attached {
        end_with_client()?;
    }
    let cluster = find(&on).await?;
    let job = prepared(&cluster, &dir, &record, &on, args.resume).await?;
    let address = tunnel::open(cluster.clone(), name.clone()).await?.to_string();
    fs::create_dir_all(dir.logs()).with_context(|| format!("making {}", dir.logs().display()))?;
    let mut led = Led {
        cluster,
        job,
        dir,
        pods: Watched::default(),
        copied: BTreeSet::new(),
        copies: JoinSet::new(),
        at: None,
    };
    led.at = Some(MasterAt { address, pid: std::process::id() });
    let outcome = led.lead(record.job.limits.restarts).await;
    let _ = fs::remove_file(led.dir.master_file());
    outcome
}

/// The end of stdin: the client is gone, and with it whoever wanted to see the job. The job goes on.
fn end_with_client() -> anyhow::Result<()> {
    let listen = || {
        let mut byte = [0];
        while matches!(std::io::stdin().lock().read(&mut byte), Ok(n) if n > 0) {}
        std::process::exit(0);
    };
    thread::Builder::new().name("client".into()).spawn(listen).context("starting a thread")?;
    Ok(())
}

/// The cluster of a job.
pub async fn find(on: &OnCluster) -> anyhow::Result<Cluster> {
    let found = Cluster::find(on.context.as_deref(), on.namespace.as_deref()).await;
    found.map_err(|e| {
        Fault::user("there is no cluster to run the job on")
            .because(anyhow::anyhow!("{}", e.chain()))
            .hint("kubectl must be able to reach one: set KUBECONFIG, or name a context with --context")
            .into()
    })
}

/// The job as its objects say it; nothing owns them yet.
pub fn job(cluster: &Cluster, record: &Record, on: &OnCluster) -> Job {
    let (namespace, run) = (cluster.namespace.clone(), on.run.clone());
    Job { spec: record.job.clone(), namespace, run, fresh: on.fresh, allowed: None, owner: None }
}

/// The job with its objects made.
async fn prepared(
    cluster: &Cluster,
    dir: &JobDir,
    record: &Record,
    on: &OnCluster,
    resume: bool,
) -> anyhow::Result<Job> {
    let name = record.job.name.clone();
    let job = job(cluster, record, on);
    if !resume {
        replace_earlier(cluster, &name, &on.run).await?;
    }
    if let Err(error) = cluster.ensure_priorities().await {
        warn!(
            error = error.chain(),
            "the priority classes of elasticdl may be missing; whoever runs the cluster can apply deploy/operator"
        );
    }
    let identity = dir.identity()?.context("a job on a cluster has a certificate")?;
    let secrets = Secrets::of(Token::read(&dir.token())?.secret(), &identity);
    let owner = cluster.prepare(&job, &secrets).await.map_err(api)?;
    Ok(Job { owner: Some(owner), ..job })
}

/// What is left of an earlier job of this name goes; one that runs stays, and is an error.
async fn replace_earlier(cluster: &Cluster, name: &str, run: &str) -> anyhow::Result<()> {
    let Some(anchor) = cluster.anchor(name).await.map_err(api)? else { return Ok(()) };
    let theirs = anchor.data.as_ref().and_then(|data| data.get("run")).map(|bytes| bytes.0.as_slice());
    if theirs == Some(run.as_bytes()) {
        return Ok(());
    }
    let masters = cluster.masters(name).await.map_err(api)?;
    if let Verdict::Lead(_) | Verdict::Again(_) = verdict(&masters) {
        let what = format!("a job {name:?} runs in the namespace {} already", cluster.namespace);
        return Err(Fault::user(what)
            .hint("stop it, or give this one another metadata.name (--name)")
            .into());
    }
    cluster.remove(name).await.map_err(api)?;
    let gone = async {
        while !cluster.pods(name).await.map_err(api)?.is_empty() {
            tokio::time::sleep(LOOK).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(GONE_LIMIT, gone).await.context("waiting for the pods of an earlier job to go")?
}

/// An error of the cluster, for a person.
pub fn api(error: elasticdl_operator::Error) -> anyhow::Error {
    let text = error.chain();
    match error.kind() {
        elasticdl_spec::Kind::User => Fault::user(text).into(),
        _ => Fault::job(text).into(),
    }
}

/// A job that is led from here.
struct Led {
    cluster: Cluster,
    job: Job,
    dir: JobDir,
    pods: Watched,
    /// Pods whose log is being copied, or was, by their uid.
    copied: BTreeSet<String>,
    copies: JoinSet<()>,
    /// To be written down when the master can be called.
    at: Option<MasterAt>,
}

impl Led {
    async fn lead(&mut self, restarts: u32) -> anyhow::Result<Exit> {
        let mut revivals = Revivals::new(restarts);
        let mut events = pin!(self.cluster.watch_pods(&self.job.spec.name));
        let mut told = None;
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    if let watcher::Event::InitApply(pod) | watcher::Event::Apply(pod) = &event {
                        self.copy_log(pod);
                    }
                    self.pods.take(event);
                }
                Ok(None) => anyhow::bail!("the watch of the job's pods ended"),
                Err(error) => warn!(%error, "the watch of the job's pods is cut off"),
            }
            let Some(masters) = self.pods.masters() else { continue };
            match verdict(&masters) {
                Verdict::Start => self.start_master().await?,
                Verdict::Lead(wait) => self.leading(wait, &mut told)?,
                Verdict::Again(end) => self.again(&end, &mut revivals).await?,
                Verdict::Over(code, end) => return self.over(code, &end).await,
            }
        }
    }

    /// The master's pod ended before it had told the outcome. Where somebody needed its place, that says nothing
    /// about the next one.
    async fn again(&mut self, end: &End, revivals: &mut Revivals) -> anyhow::Result<()> {
        warn!(cause = %end.cause, code = end.code, signal = end.signal, "the master's pod ended; starting another");
        if !end.cause.is_from_outside() {
            self.records(revivals);
            let Next::Again(pause) = revivals.died() else {
                anyhow::bail!(Fault::job(format!("its master ended again and again: {}", end.error())));
            };
            tokio::time::sleep(pause).await;
        }
        self.start_master().await
    }

    async fn start_master(&mut self) -> anyhow::Result<()> {
        let name = self.cluster.start_master(&self.job).await.map_err(api)?;
        info!(pod = name, "master started");
        // The watch will tell of it; until then it counts as there.
        let pods = self.cluster.masters(&self.job.spec.name).await.map_err(api)?;
        pods.into_iter().for_each(|pod| self.pods.add(pod));
        Ok(())
    }

    /// A master leads, or waits for room.
    fn leading(&mut self, wait: Option<Wait>, told: &mut Option<Wait>) -> anyhow::Result<()> {
        if let Some(at) = self.at.take() {
            self.dir.write_master(&at).context("writing master.json")?;
        }
        if wait.is_some() && wait != *told {
            let why = wait.as_ref().map(|wait| wait.why.as_str()).unwrap_or_default();
            warn!(why, "the master's pod waits");
        }
        *told = wait;
        Ok(())
    }

    /// How far the job was when it was last heard of: deaths with progress in between are no row of deaths.
    fn records(&self, revivals: &mut Revivals) {
        let records =
            |event: &elasticdl_master::status::Event| event.fields.get("records").and_then(|v| v.as_u64());
        let events = self.dir.events_from(0);
        if let Some(records) = events.iter().rev().find_map(records) {
            revivals.records(records);
        }
        // A master that leads a program of its own says once that it runs.
        let last = events.iter().rev().find(|event| matches!(event.event.as_str(), "running" | "started"));
        if last.is_some_and(|event| event.event == "running") {
            revivals.progress();
        }
    }

    /// The job is over: what its pods wrote last is still to come.
    async fn over(&mut self, code: i32, end: &End) -> anyhow::Result<Exit> {
        let all = async { while self.copies.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_LINES, all).await.is_err() {
            warn!("the last lines of some pods are missing");
        }
        match code {
            0 => Ok(Exit::Done),
            1 => Err(Fault::user(end.error()).into()),
            _ => Ok(Exit::Job),
        }
    }

    /// Copies what a pod writes into the job's directory.
    fn copy_log(&mut self, pod: &Pod) {
        let runs = matches!(pod::state(pod), State::Runs | State::Ended(_) | State::Leaves(_));
        if !runs || !self.copied.insert(pod.uid().unwrap_or_default()) {
            return;
        }
        let (cluster, dir, name) = (self.cluster.clone(), self.dir.clone(), pod.name_any());
        let (master, log) = (names::is_master(pod.labels()), log_name(pod));
        self.copies.spawn(async move {
            if let Err(error) = copy(&cluster, &dir, &name, &log, master).await {
                warn!(pod = name, error = format!("{error:#}"), "the pod's log is not copied to its end");
            }
        });
    }
}

/// Copies a pod's lines; the master's events go to where events are kept.
async fn copy(cluster: &Cluster, dir: &JobDir, pod: &str, log: &str, master: bool) -> anyhow::Result<()> {
    let mut lines = loop {
        match cluster.logs(pod).await {
            Ok(lines) => break Box::pin(lines),
            Err(error)
                if error.kind() == elasticdl_spec::Kind::Retry
                    || error.chain().contains("waiting to start") =>
            {
                tokio::time::sleep(LOG_RETRY).await;
            }
            Err(error) => return Err(api(error)),
        }
    };
    let mut file = append(&dir.log(log))?;
    let mut events = master.then(|| append(&dir.events())).transpose()?;
    let mut last = dir.last_seq();
    while let Some(line) = lines.try_next().await.map_err(api)? {
        if let Some(events) = &mut events
            && let Some(seq) = event_number(&line)
        {
            if seq > last {
                writeln!(events, "{line}")?;
                last = seq;
            }
            continue;
        }
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// The number of an event, where a line is one.
fn event_number(line: &str) -> Option<u64> {
    let value: serde_json::Value =
        line.starts_with("{\"event\":").then(|| serde_json::from_str(line).ok())??;
    value["seq"].as_u64()
}

/// The log of a pod as local processes call theirs: master, ps-0, worker-3.
fn log_name(pod: &Pod) -> String {
    let label = |name: &str| pod.labels().get(name).map(String::as_str).unwrap_or_default();
    match label(names::ROLE) {
        role @ ("master" | "errand") => role.to_string(),
        // A member of a program of its own is called by its role.
        "server" if !pod.labels().contains_key(names::MEMBER) => format!("ps-{}", label(names::ID)),
        role => format!("{role}-{}", label(names::ID)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_from_other_lines() {
        assert_eq!(event_number(r#"{"event":"leasing","seq":12,"seconds":0.1}"#), Some(12));
        assert_eq!(event_number("  2026-01-01 INFO serving"), None);
        assert_eq!(event_number(r#"{"event":"cut o"#), None);
    }
}
