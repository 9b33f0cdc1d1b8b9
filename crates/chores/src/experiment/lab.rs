//! Where experiments take place: a cluster with simulated nodes, the shipped operator as a process, a kubelet that
//! runs processes, and what is needed to submit jobs and to watch them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use elasticdl_operator::resource::{ElasticJob, Phase};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use super::kubelet::{self, Kubelet, PROCESSES, Processes, StandIns};
use super::usage::Usage;
use crate::kube::Lent;

/// How long the API server may take for what usually takes a moment.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long pods of jobs have to end.
pub const GRACE: Duration = Duration::from_secs(10);

/// Where an experiment takes place.
pub struct Lab {
    /// Leads to the API server.
    pub client: Client,
    /// The program under test.
    pub program: PathBuf,
    /// At the same path on this machine and on all nodes; empty at first.
    pub directory: PathBuf,
    kubeconfig: PathBuf,
    home: tempfile::TempDir,
    operator: Option<Child>,
    kubelet: Option<Kubelet>,
}

impl Lab {
    /// Sets one up on a cluster that runs.
    pub async fn set_up(cluster: &Lent, program: &Path) -> Result<Lab> {
        let kubeconfig = cluster.kubeconfig();
        let directory = cluster.shared().join("experiment");
        if directory.exists() {
            fs::remove_dir_all(&directory).context("remove what an earlier experiment left")?;
        }
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        // Pods on real nodes write there as a user of their own.
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).context("open it to pods")?;
        let home = tempfile::tempdir().context("make a directory for secrets and logs")?;
        let client = client(&kubeconfig).await?;
        let lab = Lab {
            client,
            program: program.into(),
            directory,
            kubeconfig,
            home,
            operator: None,
            kubelet: None,
        };
        lab.install().await?;
        Ok(lab)
    }

    /// The resource and the priority classes, as a person would install them.
    async fn install(&self) -> Result<()> {
        let crd =
            serde_json::to_value(elasticdl_operator::crd::definition()).context("write the definition")?;
        let params = PatchParams::apply("experiment").force();
        let name = "elasticjobs.elasticdl.org";
        let definitions: Api<
            k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
        > = Api::all(self.client.clone());
        definitions.patch(name, &params, &Patch::Apply(crd)).await.context("install the resource")?;
        let established = await_condition(definitions, name, kube::runtime::conditions::is_crd_established());
        tokio::time::timeout(PATIENCE, established).await.context("wait for the resource")??;
        // The first job takes the API server seconds to check; no job of an experiment is to wait for that.
        let first: ElasticJob = serde_json::from_value(json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": "first" }, "spec": {},
        }))?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        // Whether it finds the job good does not matter.
        let _ = self.jobs("default").create(&dry, &first).await;
        let cluster = elasticdl_operator::cluster::Cluster::of(self.client.clone(), "default".into());
        cluster.ensure_priorities().await.context("make the priority classes")
    }

    /// From now on pods that ask for it are processes.
    pub fn start_processes(&mut self) -> Result<()> {
        let home = self.home.path().join("kubelet");
        fs::create_dir_all(&home).context("make a directory for the kubelet")?;
        let config =
            kubelet::Config { program: self.program.clone(), home, kubeconfig: self.kubeconfig.clone() };
        let host = Processes::new(self.client.clone(), config);
        self.kubelet = Some(Kubelet::start(self.client.clone(), host));
        Ok(())
    }

    /// From now on masters that ask for it are stood for, each for so long.
    pub fn start_stand_ins(&mut self, life: Duration) {
        let host = StandIns::new(self.client.clone(), life);
        self.kubelet = Some(Kubelet::start(self.client.clone(), host));
    }

    /// A namespace, and the account that pods need.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let wanted: Namespace = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
        let made = namespaces.create(&PostParams::default(), &wanted).await;
        made.with_context(|| format!("make the namespace {name}"))?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), name);
        let there =
            await_condition(accounts, "default", |account: Option<&ServiceAccount>| account.is_some());
        tokio::time::timeout(PATIENCE, there).await.context("wait for the namespace's account")??;
        Ok(())
    }

    /// Starts the operator that ships, with these arguments beside its own.
    pub fn start_operator(&mut self, arguments: &[&str]) -> Result<()> {
        let path = self.operator_log();
        let log = fs::File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let mut command = Command::new(&self.program);
        command.arg("operator").args(arguments).env("KUBECONFIG", &self.kubeconfig).env("NO_PROXY", "*");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
        self.operator = Some(command.spawn().context("start the operator")?);
        Ok(())
    }

    /// The operator's process, where it was started.
    pub fn operator_pid(&self) -> Option<u32> {
        self.operator.as_ref()?.id()
    }

    fn operator_log(&self) -> PathBuf {
        self.home.path().join("operator.log")
    }

    /// Submits a job.
    pub async fn submit(&self, namespace: &str, job: Value) -> Result<ElasticJob> {
        let job: ElasticJob = serde_json::from_value(job).context("write a job")?;
        let name = job.name_any();
        let made = self.jobs(namespace).create(&PostParams::default(), &job).await;
        made.with_context(|| format!("submit {name}"))
    }

    /// Waits until so many jobs of a namespace are over, and fails where one of them did.
    pub async fn until_over(&self, namespace: &str, count: usize, limit: Duration) -> Result<()> {
        let jobs = self.jobs(namespace);
        let mut over = std::collections::BTreeSet::new();
        let watched = async {
            let events = watcher(jobs, watcher::Config::default()).default_backoff().applied_objects();
            let mut events = std::pin::pin!(events);
            while over.len() < count {
                let Some(job) = events.try_next().await? else { bail!("the watch of the jobs ended") };
                let status = job.status.clone().unwrap_or_default();
                match status.phase {
                    Some(Phase::Done) => {
                        over.insert(job.name_any());
                    }
                    Some(phase) if phase.is_over() => {
                        bail!("{} is {phase:?}: {}", job.name_any(), status.error.unwrap_or_default())
                    }
                    _ => {}
                }
            }
            Ok(())
        };
        let outcome = tokio::time::timeout(limit, watched).await;
        outcome.unwrap_or_else(|_| bail!("jobs were not done within {} s", limit.as_secs())).with_context(
            || {
                let log = fs::read_to_string(self.operator_log()).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                format!(
                    "the end of the operator's log:\n{}",
                    lines[lines.len().saturating_sub(10)..].join("\n")
                )
            },
        )
    }

    /// The events of a job's masters.
    pub fn events(&self, job: &ElasticJob) -> Result<Vec<Value>> {
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let run = job.uid().unwrap_or_default();
        let path = self.directory.join(format!(".elasticdl/{namespace}.{name}/{run}/events.jsonl"));
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Watches the pods of a namespace from now on.
    pub fn observe(&self, namespace: &str, usage: Usage) -> Observation {
        let usage = Arc::new(Mutex::new(usage));
        let began = Instant::now();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let watching = tokio::spawn(observe(pods, Arc::clone(&usage), began));
        Observation { usage, began, unix_ms: unix_ms(), watching }
    }

    /// Makes data for training, once.
    pub async fn data(&self, rows: u64) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["data", "synth", "criteo", "--test-rows", "10", "--files", "1", "--rows"]);
        command.arg(rows.to_string()).arg("--out").arg(self.directory.join("data"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let made = command.status().await.context("make data")?;
        ensure!(made.success(), "no data could be made");
        Ok(())
    }

    /// What a job says of this cluster where its pods are to be containers on real nodes.
    pub fn real(&self, env: &Value) -> Value {
        json!({
            "volumes": [{ "hostPath": { "path": self.directory }, "mountPath": self.directory }],
            "env": env,
            "grace": format!("{}s", GRACE.as_secs()),
        })
    }

    /// The same where they are to be processes on simulated nodes.
    pub fn simulated(&self, env: &Value) -> Value {
        let mut kubernetes = self.real(env);
        kubernetes["annotations"] = json!({ PROCESSES: "true" });
        kubernetes["node_selector"] = simulated_nodes();
        kubernetes["tolerations"] = tolerations();
        kubernetes
    }

    fn jobs(&self, namespace: &str) -> Api<ElasticJob> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

/// Selects simulated nodes.
pub fn simulated_nodes() -> Value {
    json!({ "type": "kwok" })
}

/// Pods with these may come to simulated nodes.
pub fn tolerations() -> Value {
    json!([{ "key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule" }])
}

/// What is seen of the pods of a namespace.
#[derive(Debug)]
pub struct Observation {
    usage: Arc<Mutex<Usage>>,
    began: Instant,
    unix_ms: f64,
    watching: JoinHandle<()>,
}

impl Observation {
    /// Seconds since it began.
    pub fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Waits until so many seconds have passed since it began.
    pub async fn until(&self, seconds: f64) {
        tokio::time::sleep_until((self.began + Duration::from_secs_f64(seconds)).into()).await;
    }

    /// When something happened that was told with the time of day.
    pub fn since(&self, unix_ms: f64) -> f64 {
        (unix_ms - self.unix_ms) / 1000.0
    }

    /// What was seen so far.
    pub fn usage(&self) -> Usage {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Observation {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

async fn observe(pods: Api<Pod>, usage: Arc<Mutex<Usage>>, began: Instant) {
    let mut events = std::pin::pin!(watcher(pods, watcher::Config::default()).default_backoff());
    loop {
        let event = events.try_next().await;
        let at = began.elapsed().as_secs_f64();
        let mut usage = usage.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Ok(Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => usage.applied(at, &pod),
            Ok(Some(watcher::Event::Delete(pod))) => usage.deleted(at, &pod),
            Ok(Some(_)) => {}
            Ok(None) => return,
            Err(error) => eprintln!("the watch of the pods is cut off: {error}"),
        }
    }
}

async fn client(kubeconfig: &Path) -> Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    let config = kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
    let mut config = config.context("use the kubeconfig")?;
    // The cluster is on this machine, and no proxy leads there.
    config.proxy_url = None;
    Client::try_from(config).context("reach the cluster")
}

fn unix_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
}
