//! Edge: the operator. Watches the resources and the masters' pods, and does what [`reconcile`] decides.
//!
//! What it costs the API server: four watches, of the resources, of masters' pods, of nodes and of all pods. A job that runs is looked at
//! every five seconds by a call to its master, which the API server does not see; its status is written only where
//! it changed, so at most once in five seconds. A job that rests or is over costs nothing, one that cannot begin a
//! read a minute.
//! Starting a master takes a list of the job's pods and six writes; stopping a job lists its pods every two seconds.
//! The secret of a job is read once in the life of an operator. At most [`JOBS_AT_ONCE`] jobs are looked at at
//! the same time.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock and waits")]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use elasticdl_spec::{JobSpec, Kind};
use elasticdl_wire::Identity;
use futures::channel::mpsc;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::runtime::controller::{self, Controller};
use kube::runtime::events::Recorder;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{PredicateConfig, WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::capacity::{Capacity, asks};
use crate::cluster::{Cluster, leader};
use crate::error::{Error, Result};
use crate::manifest::{Job, MASTER_PORT, Secrets, TLS_FILES};
use crate::metrics::Metrics;
use crate::names;
use crate::negotiate::Grant;
use crate::reconcile::{self, Action, Decision, FINALIZER, Seen};
use crate::recorder::{self, Story};
use crate::report::{Masters, Report};
use crate::resource::{ElasticJob, JobStatus};
use crate::sharing::Key;
use crate::supervise::{is_overdue, long_dead};

/// So many jobs are looked at at the same time. A look mostly waits, for a master or for the API server.
const JOBS_AT_ONCE: u16 = 256;
/// Between two tries of what failed: what may pass, and what a person must mend.
const RETRY: Duration = Duration::from_secs(2);
const RETRY_USER: Duration = Duration::from_secs(30);
/// Who writes the status.
const FIELD_MANAGER: &str = "elasticdl-operator";

/// Looks after the resources of a namespace, or of all of them, until `end`.
///
/// # Errors
///
/// The cluster does not know the resource, or does not let us see it.
pub async fn run(
    client: Client,
    namespace: Option<&str>,
    masters: Arc<dyn Masters>,
    metrics: Arc<Metrics>,
    end: impl Future<Output = ()> + Send + Sync + 'static,
) -> Result<()> {
    let jobs: Api<ElasticJob> = api(&client, namespace);
    let known = jobs.list(&ListParams::default()).await.map_err(Error::api("listing the ElasticJobs"))?;
    let (tell, touched) = mpsc::unbounded();
    let pods = watch_masters(&client, namespace, tell.clone()).await?;
    let capacity = Capacity::watch(&client, &known.items, tell).await?;
    let told = Arc::clone(&metrics);
    let touched = touched.map(move |key: Key| {
        told.seen(&key);
        ObjectRef::new(&key.name).within(&key.namespace)
    });
    let told = Arc::clone(&metrics);
    let (reader, writer) = reflector::store();
    let changes = watcher(jobs, watcher::Config::default()).default_backoff().reflect(writer);
    let changes = changes.applied_objects().predicate_filter(matter_of, PredicateConfig::default());
    let changes = changes.inspect_ok(move |job| told.seen(&Key::of(job)));
    let recorder = recorder::recorder(client.clone(), std::env::var("POD_NAME").ok());
    let operator =
        Arc::new(Operator { client, masters, pods, capacity, recorder, metrics, secrets: Mutex::default() });
    info!(namespace = namespace.unwrap_or("all"), "looking after ElasticJobs");
    Controller::for_stream(changes, reader)
        .with_config(controller::Config::default().concurrency(JOBS_AT_ONCE))
        .reconcile_on(touched)
        .graceful_shutdown_on(end)
        .run(look, failed, operator)
        .for_each(|_| futures::future::ready(()))
        .await;
    Ok(())
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// The pods of all masters, kept up to date; tells whose changed.
async fn watch_masters(
    client: &Client,
    namespace: Option<&str>,
    tell: mpsc::UnboundedSender<Key>,
) -> Result<Store<Pod>> {
    let (store, writer) = reflector::store();
    let config = watcher::Config::default().labels(&format!("{},{}=master", names::JOB, names::ROLE));
    let events = watcher(api::<Pod>(client, namespace), config).default_backoff().reflect(writer);
    tokio::spawn(async move {
        let mut events = std::pin::pin!(events.touched_objects());
        while let Some(event) = events.next().await {
            match event {
                Ok(pod) => {
                    let job = Key { namespace: pod.namespace().unwrap_or_default(), name: job_of(&pod) };
                    // Nobody listens any more where the operator ends.
                    let _ = tell.unbounded_send(job);
                }
                Err(error) => warn!(%error, "the watch of the masters' pods is cut off"),
            }
        }
    });
    let late =
        |_| Error::Late { what: "the masters' pods were not listed".into(), seconds: 30, why: String::new() };
    let ready =
        tokio::time::timeout(Duration::from_secs(30), store.wait_until_ready()).await.map_err(late)?;
    ready.map_err(|_| Error::Late {
        what: "the masters' pods were not listed".into(),
        seconds: 0,
        why: String::new(),
    })?;
    Ok(store)
}

/// What of a resource calls for a look when it changes. Figures of progress do not: they are our own writing, and
/// each write would bring about the next.
fn matter_of(job: &ElasticJob) -> Option<u64> {
    let status = job.status.as_ref();
    let phase = status.and_then(|status| status.phase).map(|phase| phase as u8);
    let stopping = status.is_some_and(|status| status.stopping_since.is_some());
    let deleted = job.metadata.deletion_timestamp.is_some();
    let mut hasher = DefaultHasher::new();
    (job.generation(), job.finalizers(), deleted, phase, stopping).hash(&mut hasher);
    Some(hasher.finish())
}

fn job_of(pod: &Pod) -> String {
    pod.labels().get(names::JOB).cloned().unwrap_or_default()
}

/// What the operator works with.
struct Operator {
    client: Client,
    masters: Arc<dyn Masters>,
    pods: Store<Pod>,
    /// Shares out the room; `None` where the account may not see it.
    capacity: Option<Arc<Capacity>>,
    recorder: Recorder,
    metrics: Arc<Metrics>,
    /// Of jobs, by their uid: they do not change in the life of one.
    secrets: Mutex<BTreeMap<String, Secrets>>,
}

/// One look at a job.
async fn look(job: Arc<ElasticJob>, operator: Arc<Operator>) -> Result<controller::Action> {
    let key = Key::of(&*job);
    let since = operator.metrics.begins(&key);
    let outcome = operator.look(&job).await;
    match &outcome {
        Ok(looked) => operator.metrics.ends(&key, since, looked.written, looked.again),
        Err(_) => operator.metrics.fails(&key, since),
    }
    if let Err(error) = &outcome
        && is_for_people(error)
    {
        let story = Story { reason: "Hindered".into(), note: error.chain(), warning: true };
        recorder::tell_one(&operator.recorder, &job.object_ref(&()), story).await;
    }
    let again = outcome?.again;
    Ok(again.map_or_else(controller::Action::await_change, controller::Action::requeue))
}

/// What came of a look.
struct Looked {
    /// When the status was written, where it was.
    written: Option<Instant>,
    /// When to look again, where nothing is seen before.
    again: Option<Duration>,
}

fn failed(job: Arc<ElasticJob>, error: &Error, _: Arc<Operator>) -> controller::Action {
    warn!(
        job = job.name_any(),
        namespace = job.namespace(),
        error = error.chain(),
        "a job cannot be looked after"
    );
    controller::Action::requeue(if is_for_people(error) { RETRY_USER } else { RETRY })
}

/// Whether somebody must do something about it. A conflict is none: we looked at something old.
fn is_for_people(error: &Error) -> bool {
    let conflict = matches!(error, Error::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == 409));
    error.kind() == Kind::User && !conflict
}

impl Operator {
    async fn look(&self, job: &ElasticJob) -> Result<Looked> {
        let cluster = Cluster::of(self.client.clone(), job.namespace().unwrap_or_default());
        let now = Timestamp::now();
        let (secrets, taken) = match self.secrets(&cluster, job).await? {
            Known::Ours(secrets) => (Some(secrets), false),
            Known::Nothing => (None, false),
            Known::Theirs => (None, true),
        };
        let mut seen = Seen { taken, ..Seen::default() };
        if reconcile::needs_members(job, now) {
            let pods = cluster.pods(&job.name_any()).await?;
            let (masters, members): (Vec<Pod>, Vec<Pod>) =
                pods.into_iter().partition(|pod| names::is_master(pod.labels()));
            (seen.masters, seen.members) = (masters, members.len());
        } else {
            seen.masters = self.masters_of(job);
        }
        if let Some(secrets) = &secrets {
            seen.report = self.report(&seen.masters, secrets).await;
        }
        seen.grant = self.grant(job, &seen);
        let mut decision = reconcile::decide(job, &seen, now);
        if decision.actions.contains(&Action::Start) {
            // The watch may lag behind what we did a moment ago; two masters are one too many.
            seen.masters = cluster.masters(&job.name_any()).await?;
            decision = reconcile::decide(job, &seen, now);
        }
        self.carry_out(job, &cluster, &seen, secrets.as_ref(), decision).await
    }

    async fn carry_out(
        &self,
        job: &ElasticJob,
        cluster: &Cluster,
        seen: &Seen,
        secrets: Option<&Secrets>,
        decision: Decision,
    ) -> Result<Looked> {
        for action in &decision.actions {
            info!(job = job.name_any(), namespace = cluster.namespace, ?action, "acting");
            self.act(job, cluster, seen, secrets, action).await?;
        }
        let ended = [Action::Release, Action::Remove].iter().any(|end| decision.actions.contains(end));
        let mut written = None;
        if !ended && job.status.as_ref() != Some(&decision.status) {
            self.write(job, cluster, &decision.status).await?;
            written = Some(Instant::now());
        }
        for story in decision.stories {
            recorder::tell_one(&self.recorder, &job.object_ref(&()), story).await;
        }
        Ok(Looked { written, again: decision.again })
    }

    async fn act(
        &self,
        job: &ElasticJob,
        cluster: &Cluster,
        seen: &Seen,
        secrets: Option<&Secrets>,
        action: &Action,
    ) -> Result<()> {
        match action {
            Action::Hold => self.finalize(job, cluster, true).await,
            Action::Release => {
                self.known().remove(&job.uid().unwrap_or_default());
                self.finalize(job, cluster, false).await
            }
            Action::Remove => {
                let preconditions = Preconditions { uid: job.uid(), resource_version: None };
                let params =
                    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
                let removed = self.jobs(cluster).delete(&job.name_any(), &params).await;
                removed.map(|_| ()).map_err(Error::api("removing the job"))
            }
            Action::Prepare => self.prepare(job, cluster).await.map(|_| ()),
            Action::Start => {
                let made = self.prepare(job, cluster).await?;
                let made = Job { allowed: seen.grant.as_ref().map(|grant| grant.workers.max(1)), ..made };
                let pod = cluster.start_master(&made).await?;
                info!(job = job.name_any(), pod, "master started");
                for name in long_dead(&seen.masters) {
                    cluster.delete_pod(&name, None).await?;
                }
                Ok(())
            }
            Action::Scale(workers) => {
                let workers = *workers;
                self.call(seen, secrets, move |masters, at, secrets| masters.scale(at, secrets, workers))
                    .await
            }
            Action::Allow(workers) => {
                let workers = *workers;
                self.call(seen, secrets, move |masters, at, secrets| masters.allow(at, secrets, workers))
                    .await
            }
            Action::Stop => self.call(seen, secrets, |masters, at, secrets| masters.stop(at, secrets)).await,
            Action::DeleteMasters => delete(cluster, &seen.masters, Timestamp::now()).await,
            Action::DeleteMembers => {
                delete(cluster, &cluster.pods(&job.name_any()).await?, Timestamp::now()).await
            }
        }
    }

    /// How many workers the job may have, where somebody shares out the room.
    fn grant(&self, job: &ElasticJob, seen: &Seen) -> Option<Grant> {
        let useful = seen.report.as_ref().and_then(|report| report.workers_useful);
        let ask = asks(job, useful).filter(|_| !seen.taken);
        self.capacity.as_ref().and_then(|capacity| capacity.ask(&Key::of(job), ask))
    }

    fn jobs(&self, cluster: &Cluster) -> Api<ElasticJob> {
        Api::namespaced(self.client.clone(), &cluster.namespace)
    }

    fn masters_of(&self, job: &ElasticJob) -> Vec<Pod> {
        let (name, namespace) = (job.name_any(), job.namespace());
        let ours = |pod: &Arc<Pod>| job_of(pod) == name && pod.namespace() == namespace;
        self.pods.state().into_iter().filter(ours).map(|pod| (*pod).clone()).collect()
    }

    /// What the master says, where one runs and answers.
    async fn report(&self, masters: &[Pod], secrets: &Secrets) -> Option<Report> {
        let at = address(masters)?;
        let (masters, secrets) = (Arc::clone(&self.masters), secrets.clone());
        let asked = tokio::task::spawn_blocking(move || masters.report(&at, &secrets)).await;
        match asked {
            Ok(Ok(report)) => Some(report),
            Ok(Err(why)) => {
                info!(why, "a master does not answer");
                None
            }
            Err(error) => {
                warn!(%error, "asking a master failed");
                None
            }
        }
    }

    /// Asks something of the master; where that fails, the next look asks again.
    async fn call(
        &self,
        seen: &Seen,
        secrets: Option<&Secrets>,
        ask: impl FnOnce(&dyn Masters, &str, &Secrets) -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let (Some(at), Some(secrets)) = (address(&seen.masters), secrets.cloned()) else { return Ok(()) };
        let masters = Arc::clone(&self.masters);
        let asked = tokio::task::spawn_blocking(move || ask(&*masters, &at, &secrets)).await;
        if let Ok(Err(why)) = asked {
            warn!(why, "a master did not do what it was asked for");
        }
        Ok(())
    }

    /// The job with its objects made; its secrets stay what they are.
    async fn prepare(&self, job: &ElasticJob, cluster: &Cluster) -> Result<Job> {
        let spec: JobSpec = job.resolve().expect("what is not valid is not acted on");
        let secrets = match self.secrets(cluster, job).await? {
            Known::Ours(secrets) => secrets,
            _ => make_secrets()?,
        };
        let owner = job.controller_owner_ref(&());
        let run = job.uid().unwrap_or_default();
        let made =
            Job { spec, namespace: cluster.namespace.clone(), run, fresh: false, allowed: None, owner };
        let anchor = cluster.prepare(&made, &secrets).await?;
        self.known().insert(job.uid().unwrap_or_default(), secrets);
        Ok(Job { owner: Some(anchor), ..made })
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Secrets>> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The secrets of a job, where they are made already.
    async fn secrets(&self, cluster: &Cluster, job: &ElasticJob) -> Result<Known> {
        let uid = job.uid().unwrap_or_default();
        if let Some(secrets) = self.known().get(&uid) {
            return Ok(Known::Ours(secrets.clone()));
        }
        let Some(anchor) = cluster.anchor(&job.name_any()).await? else { return Ok(Known::Nothing) };
        let owners = anchor.owner_references();
        if !owners.iter().any(|owner| owner.uid == uid) {
            if owners.iter().any(|owner| owner.kind == ElasticJob::kind(&())) {
                let what = "the objects of an earlier job of this name were not removed".into();
                return Err(Error::Late { what, seconds: 0, why: "; they will be".into() });
            }
            return Ok(Known::Theirs);
        }
        let Some(secrets) = read(&anchor) else { return Ok(Known::Nothing) };
        self.known().insert(uid, secrets.clone());
        Ok(Known::Ours(secrets))
    }

    async fn finalize(&self, job: &ElasticJob, cluster: &Cluster, hold: bool) -> Result<()> {
        let mut names: Vec<&str> =
            job.finalizers().iter().map(String::as_str).filter(|name| *name != FINALIZER).collect();
        if hold {
            names.push(FINALIZER);
        }
        // Somebody else's finalizer that came meanwhile must stay: the version makes that a conflict.
        let metadata = json!({ "finalizers": names, "resourceVersion": job.resource_version() });
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        match self.jobs(cluster).patch(&job.name_any(), &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 && !hold => Ok(()),
            Err(error) => Err(Error::api("setting the finalizer of the job")(error)),
        }
    }

    async fn write(&self, job: &ElasticJob, cluster: &Cluster, status: &JobStatus) -> Result<()> {
        // With the uid, a job of the same name that came after this one is not written to.
        let metadata = json!({ "name": job.name_any(), "uid": job.uid() });
        let patch: Value = json!({ "apiVersion": job.api_version, "kind": job.kind, "metadata": metadata, "status": status });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match self.jobs(cluster).patch_status(&job.name_any(), &params, &Patch::Apply(patch)).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(gone)) if gone.code == 404 => Ok(()),
            Err(error) => Err(Error::api("writing the status of the job")(error)),
        }
    }
}

/// Deletes pods. Those that are on their way already have their time, and are forgotten after it: their node does
/// not answer, and what may still run there is fenced off by the job itself.
async fn delete(cluster: &Cluster, pods: &[Pod], now: Timestamp) -> Result<()> {
    for pod in pods {
        let name = pod.name_any();
        if pod.metadata.deletion_timestamp.is_none() {
            cluster.delete_pod(&name, None).await?;
        } else if is_overdue(pod, now.as_second()) {
            warn!(pod = name, "a pod that does not end is forgotten");
            cluster.delete_pod(&name, Some(0)).await?;
        }
    }
    Ok(())
}

/// What is known of a job's secrets.
enum Known {
    /// There are none.
    Nothing,
    /// These.
    Ours(Secrets),
    /// There are some, of a job that a client started.
    Theirs,
}

fn read(secret: &Secret) -> Option<Secrets> {
    let data = secret.data.as_ref()?;
    let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
    let [ca, cert, key] = TLS_FILES;
    Some(Secrets { token: text("token")?, tls: [text(ca)?, text(cert)?, text(key)?] })
}

fn make_secrets() -> Result<Secrets> {
    let failed = |source| Error::Io { attempt: "drawing a token".into(), source };
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(failed)?;
    let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let wrong = |error: elasticdl_wire::Error| Error::Io {
        attempt: "making a certificate".into(),
        source: std::io::Error::other(error),
    };
    let identity = Identity::make(SystemTime::now()).map_err(wrong)?;
    Ok(Secrets::of(&token, &identity))
}

/// Where the master that leads is called.
fn address(masters: &[Pod]) -> Option<String> {
    let mut masters = masters.to_vec();
    masters.sort_by_key(|pod| (pod.creation_timestamp().map(|time| time.0), pod.name_any()));
    let ip = leader(&masters)?.status.as_ref()?.pod_ip.clone()?;
    Some(if ip.contains(':') { format!("[{ip}]:{MASTER_PORT}") } else { format!("{ip}:{MASTER_PORT}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::Phase;

    #[test]
    fn our_own_figures_in_the_status_call_for_no_look_and_its_phase_does() {
        let mut job: ElasticJob = serde_json::from_value(json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": "j", "generation": 1 },
            "status": { "phase": "Training", "records": 10 },
        }))
        .unwrap();
        let before = matter_of(&job);
        let status = job.status.get_or_insert_default();
        (status.records, status.workers, status.progress) = (Some(20), Some(3), Some("20 %".into()));
        assert_eq!(matter_of(&job), before);
        job.status.get_or_insert_default().phase = Some(Phase::Done);
        assert_ne!(matter_of(&job), before, "its room is free for others");
        job.status.get_or_insert_default().phase = Some(Phase::Training);
        job.metadata.generation = Some(2);
        assert_ne!(matter_of(&job), before, "somebody changed the spec");
    }
}
