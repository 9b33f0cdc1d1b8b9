//! A master in a pod: it leads the job whose secret is mounted, with pods for workers and servers.
//!
//! Its directory is on a volume, one for each run of a job, so that whichever pod leads next goes on from its
//! ledger. Where the ledger is in object storage the directory may be the pod's own: an object beside the ledger
//! then says which run has begun. No lock is taken: the one before may hang on a node that does not answer, and
//! its term is over when the next one claims its own.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock")]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use elasticdl_master::config::Outside;
use elasticdl_master::status::{Event, Phase};
use elasticdl_operator::cluster::Cluster;
use elasticdl_operator::fleet::Fleet;
use elasticdl_operator::manifest::{Job, SECRETS};
use elasticdl_operator::recorder::{self, Story};
use elasticdl_operator::report::Report;
use elasticdl_operator::resource;
use elasticdl_spec::JobSpec;
use elasticdl_wire::Token;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::args::Master;
use crate::check::Missing;
use crate::fault::{self, Exit};
use crate::home::{JobDir, Record};
use crate::pods::{Pods, hand_on};
use crate::submit::{self, Earlier};
use crate::view::event;
use crate::{check, print, roles};

mod memory;

/// What a master that was told to end exits with: another one is to go on, which is no outcome of the job.
const TERMINATED: i32 = 143;
/// What is in this file when a pod ends is told with its status; a variable names it where it is another one.
const LAST_MESSAGE: &str = "/dev/termination-log";
const LAST_MESSAGE_VARIABLE: &str = "ELASTICDL_TERMINATION_LOG";
/// How long the last events may take to be told.
const FAREWELL: Duration = Duration::from_secs(3);

/// `master --on kubernetes`.
pub async fn master(args: Master) -> anyhow::Result<Exit> {
    end_on_sigterm()?;
    // The job's token and certificate are files of one secret, which is mounted in one place.
    let secrets = args.tls_dir.clone().unwrap_or_else(|| SECRETS.into());
    let spec = spec(&secrets)?;
    let dir = JobDir::at(&args.job_dir)?;
    let run = secret(&secrets, "run")?;
    let wanted = args.wanted.request();
    check::wanted(&spec, wanted)?;
    let record = begun(&dir, &spec, &run, args.fresh)?;
    let listener = roles::bind(args.listen, Duration::ZERO).await?;
    let identity = roles::identity(args.tls_dir.as_deref(), args.listen)?;

    let cluster = Cluster::find(None, std::env::var("POD_NAMESPACE").ok().as_deref()).await?;
    let namespace = cluster.namespace.clone();
    let owner = Some(cluster.owner(&spec.name).await?);
    let job = Job { spec: spec.clone(), namespace, run, fresh: false, allowed: None, owner };
    let address = cluster.master_address(&spec.name).await?;
    let (pod_news_in, pod_news) = mpsc::unbounded_channel();
    let fleet = Fleet::watch(cluster.client(), job, address, pod_news_in).await?;
    let (news_in, news) = mpsc::unbounded_channel();
    let gone = spec.command.is_some().then(|| news_in.clone());
    tokio::spawn(hand_on(spec.clone(), pod_news, news_in));
    let (told, events) = mpsc::unbounded_channel();
    let telling = tokio::spawn(tell(cluster.clone(), events));

    let (_stops, stops) = mpsc::unbounded_channel();
    let outside = Outside {
        job_dir: dir.path().into(),
        token: Token::read(&secrets.join("token"))?,
        identity,
        listener,
        resume: false,
        launcher: Box::new(Pods { fleet, gone }),
        news,
        stops,
        told: Some(told),
    };
    let outcome = match spec.command {
        None => roles::lead(&dir, &record, outside, wanted, args.workers_allowed, None).await,
        Some(_) => {
            let (memory, remembering) = memory::open(cluster.clone(), &spec.name).await?;
            let outcome = roles::lead(&dir, &record, outside, wanted, None, Some(Box::new(memory))).await;
            // That it is over is the last thing that the next master must not forget.
            let _ = tokio::time::timeout(FAREWELL, remembering).await;
            outcome
        }
    };
    if outcome.is_ok()
        && let Err(error) = cluster.end_members(&spec.name).await
    {
        tracing::warn!(error = error.chain(), "some pods are left");
    }
    // The last events are the ones that people look for.
    let _ = tokio::time::timeout(FAREWELL, telling).await;
    match outcome?.phase {
        Phase::Done | Phase::Stopped => Ok(Exit::Done),
        _ => Ok(Exit::Job),
    }
}

fn secret(secrets: &Path, name: &str) -> anyhow::Result<String> {
    let path = secrets.join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// The job that the mounted secret holds.
fn spec(secrets: &Path) -> anyhow::Result<JobSpec> {
    serde_json::from_str(&secret(secrets, "job.json")?).context("reading the job from its secret")
}

/// The job of this pod, whose own directory knows nothing of it.
pub fn record() -> anyhow::Result<Record> {
    let job = spec(Path::new(SECRETS))?;
    Ok(Record { created: 0, cwd: job.kubernetes.directory().into(), job, on: None })
}

/// The job's directory, made where this is the first master of the run, or the first in this pod.
fn begun(dir: &JobDir, spec: &JobSpec, run: &str, fresh: bool) -> anyhow::Result<Record> {
    if spec.command.is_some() {
        // Its program finds its files itself, and its master needs none.
        dir.create().with_context(|| format!("making {}", dir.path().display()))?;
        return Ok(Record { created: 0, cwd: dir.path().into(), job: spec.clone(), on: None });
    }
    let cwd = Path::new(spec.kubernetes.directory()).to_path_buf();
    std::env::set_current_dir(&cwd).with_context(|| format!("going to {}", cwd.display()))?;
    if let Ok(record) = dir.record() {
        return Ok(record);
    }
    dir.create().with_context(|| {
        format!(
            "making {}; kubernetes.volumes must hold a place that the pods can write to",
            dir.path().display()
        )
    })?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let record = Record { created, cwd, job: spec.clone(), on: None };
    let begun = Begun::at(&dir.checkpoints(&record));
    if !begun.is(run)? {
        check::check(dir, &record, Missing::Make)
            .map_err(|problems| fault::problems("the job", &problems))?;
        let earlier = if fresh { Earlier::Remove } else { Earlier::Refuse };
        submit::set_checkpoints_aside(dir, &record, earlier)?;
        begun.set(run)?;
    }
    // From here on the run has begun: the next master goes on.
    dir.write_record(&record).context("writing job.json")?;
    Ok(record)
}

/// Which run has begun, said in object storage: another pod finds nothing of this one's directory.
struct Begun(Option<PathBuf>);

impl Begun {
    fn at(checkpoints: &Path) -> Begun {
        Begun(elasticdl_storage::is_url(checkpoints).then(|| checkpoints.join("run")))
    }

    fn is(&self, run: &str) -> anyhow::Result<bool> {
        let Some(path) = &self.0 else { return Ok(false) };
        match elasticdl_storage::read(path) {
            Ok(known) => Ok(known == run.as_bytes()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
        }
    }

    fn set(&self, run: &str) -> anyhow::Result<()> {
        let Some(path) = &self.0 else { return Ok(()) };
        elasticdl_storage::replace(path, run.as_bytes())
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// SIGTERM is meant for this pod, not for the job: the ledger holds all that the next master needs.
fn end_on_sigterm() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    tokio::spawn(async move {
        if terminate.recv().await.is_some() {
            tracing::info!("told to end; another master is to go on");
            std::process::exit(TERMINATED);
        }
    });
    Ok(())
}

/// Events on stdout for whoever follows the job from outside, and the telling ones for `kubectl get events`.
async fn tell(cluster: Cluster, mut events: mpsc::UnboundedReceiver<Event>) {
    let variable = |name: &str| std::env::var(name).ok();
    let about = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: variable("POD_NAME"),
        namespace: Some(cluster.namespace.clone()),
        uid: variable("POD_UID"),
        ..ObjectReference::default()
    };
    let (stories_in, stories) = mpsc::unbounded_channel();
    let telling = tokio::spawn(recorder::tell(cluster.client(), about, stories));
    while let Some(event) = events.recv().await {
        if let Ok(line) = serde_json::to_string(&event) {
            let _ = print::line(&line);
        }
        if let Some(report) = report(&event) {
            // Only the operator reads it, and it has the exit code to go by.
            let file = variable(LAST_MESSAGE_VARIABLE).unwrap_or_else(|| LAST_MESSAGE.into());
            let _ = fs::write(file, report.to_line());
        }
        if let Some(story) = story(&event) {
            let _ = stories_in.send(story);
        }
    }
    drop(stories_in);
    let _ = telling.await;
}

/// The last report of a job, in the event that it is over.
fn report(told: &Event) -> Option<Report> {
    let number = |key: &str| told.fields.get(key).and_then(|v| v.as_u64());
    let quality = |key: &str| told.fields.get(key).and_then(|v| v.as_f64());
    let text = |key: &str| told.fields.get(key).and_then(|v| v.as_str());
    let phase = match (told.event.as_str(), text("outcome")?) {
        ("finished", "done") => resource::Phase::Done,
        ("finished", "stopped") => resource::Phase::Stopped,
        ("finished", _) => resource::Phase::Failed,
        _ => return None,
    };
    Some(Report {
        phase,
        records: number("records").unwrap_or(0),
        records_total: None,
        epoch: (phase == resource::Phase::Done).then(|| number("epochs").unwrap_or(0) as u32),
        workers: 0,
        workers_wanted: 0,
        workers_useful: None,
        workers_allowed: None,
        auc: quality("auc"),
        logloss: quality("logloss"),
        error: text("error").map(Into::into),
    })
}

/// What of an event is worth telling people who look at the cluster.
fn story(told: &Event) -> Option<Story> {
    let asked = told.fields.get("asked").and_then(|v| v.as_bool()).unwrap_or(false);
    let failed = told.fields.get("outcome").and_then(|v| v.as_str()) == Some("failed");
    let warning = match told.event.as_str() {
        "running" | "member_joined" | "restarting" | "given_back" | "started" | "training"
        | "worker_joined" | "server_ready" | "scaled" | "servers_scaled" | "moved" | "backed_up"
        | "promoted" | "allowed" | "checkpoint" | "replayed" | "evaluated" | "exported" | "stopping"
        | "pending" => false,
        "worker_exited" | "server_exited" | "member_exited" => !asked,
        "member_ended" => told.fields.get("code").and_then(|v| v.as_i64()) != Some(0),
        "replay" | "silent" | "lease_expired" | "quarantined" | "warning" => true,
        "finished" => failed,
        _ => return None,
    };
    let reason = told.event.split('_').map(capitalized).collect();
    let note = match told.event.as_str() {
        "finished" => outcome(told),
        _ => event::text(told)?,
    };
    Some(Story { reason, note, warning })
}

/// How a job ended, in a sentence.
fn outcome(told: &Event) -> String {
    let field = |name: &str| told.fields.get(name).filter(|v| !v.is_null());
    let word = |name: &str| field(name).and_then(|v| v.as_str()).unwrap_or_default();
    let mut text = format!("{} is {}", word("job"), word("outcome"));
    for name in ["records", "logloss", "auc", "replayed", "restarts"] {
        if let Some(value) = field(name) {
            text.push_str(&format!(", {name} {value}"));
        }
    }
    if let Some(error) = field("error").and_then(|v| v.as_str()) {
        text.push_str(&format!(": {error}"));
    }
    text
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(event: &str, fields: serde_json::Value) -> Option<Story> {
        let serde_json::Value::Object(fields) = fields else { panic!("{fields}") };
        story(&Event { event: event.into(), seq: 1, seconds: 1.0, unix_ms: 1, fields })
    }

    #[test]
    fn another_pod_is_told_that_the_run_has_begun_by_an_object_beside_the_ledger() {
        assert!(!Begun::at(Path::new("ckpt")).is("1").unwrap(), "on a volume the directory tells");
        let Some(base) = std::env::var_os("ELASTICDL_TEST_S3") else {
            eprintln!(
                "skipped: ELASTICDL_TEST_S3 names no bucket; `cargo xtask test` starts a server and sets it"
            );
            return;
        };
        let unique = tempfile::tempdir().unwrap();
        let begun = Begun::at(&Path::new(&base).join("pod").join(unique.path().file_name().unwrap()));
        assert!(!begun.is("1").unwrap());
        begun.set("1").unwrap();
        assert!(begun.is("1").unwrap() && !begun.is("2").unwrap());
    }

    #[test]
    fn the_end_of_a_job_is_its_last_report() {
        let fields = json!({ "outcome": "done", "records": 12, "epochs": 2, "auc": 0.75, "logloss": null });
        let serde_json::Value::Object(fields) = fields else { panic!("{fields}") };
        let finished = Event { event: "finished".into(), seq: 1, seconds: 1.0, unix_ms: 1, fields };
        let read = Report::from_line(&report(&finished).unwrap().to_line()).unwrap();
        assert_eq!((read.phase, read.records, read.epoch), (resource::Phase::Done, 12, Some(2)));
        assert_eq!((read.auc, read.logloss, read.error), (Some(0.75), None, None));
        assert_eq!(report(&Event { event: "progress".into(), ..finished }), None);
    }

    #[test]
    fn what_people_look_for_on_a_cluster_is_told_in_sentences() {
        let exited =
            told("worker_exited", json!({ "worker": 3, "asked": false, "why": "preempted" })).unwrap();
        assert_eq!((exited.reason.as_str(), exited.warning), ("WorkerExited", true));
        assert_eq!(exited.note, "worker-3 was preempted; a replacement is started");
        assert!(!told("worker_exited", json!({ "worker": 3, "asked": true })).unwrap().warning);
        assert_eq!(told("progress", json!({})), None);
        let finished =
            told("finished", json!({ "job": "ctr", "outcome": "failed", "error": "no room" })).unwrap();
        assert!(finished.warning && finished.note.contains("ctr"), "{finished:?}");
    }
}
