//! Pods as processes of this machine.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::addresses::Addresses;
use super::objects::Objects;
use super::status::{self, End};
use super::workload::{self, Places, Workload};
use super::{Host, Order};

/// So many processes start at the same time: real nodes would not share two cores.
const STARTS_AT_ONCE: usize = 4;

/// What the processes need.
#[derive(Debug, Clone)]
pub struct Config {
    /// The program of all pods.
    pub program: PathBuf,
    /// Where secrets and logs are kept.
    pub home: PathBuf,
    /// The kubeconfig of an administrator, as JSON.
    pub kubeconfig: PathBuf,
}

/// Runs pods as processes.
pub struct Processes {
    client: Client,
    objects: Objects,
    config: Config,
    addresses: Mutex<Addresses>,
    starts: Semaphore,
}

impl Host for Processes {
    async fn live(self: Arc<Self>, pod: Pod, mut order: watch::Receiver<Order>) {
        if *order.borrow_and_update() == Order::Run
            && let Err(error) = self.run(&pod, &mut order).await
        {
            self.objects.fail(&pod, &error).await;
        }
        self.objects.until_gone(&pod, order).await;
    }
}

impl Processes {
    /// A host for the pods of a cluster.
    pub fn new(client: Client, config: Config) -> Processes {
        let starts = Semaphore::new(STARTS_AT_ONCE);
        Processes { objects: Objects(client.clone()), client, config, addresses: Mutex::default(), starts }
    }

    async fn run(&self, pod: &Pod, order: &mut watch::Receiver<Order>) -> Result<()> {
        let permit = self.starts.acquire().await.context("wait for a turn")?;
        let (address, master) = self.addresses(pod);
        let papers = self.papers(pod).await?;
        if *order.borrow() != Order::Run {
            return Ok(());
        }
        let mut child = self.start(pod, &Places { address, master, secrets: &papers })?;
        let started = Timestamp::now();
        self.objects.tell(pod, status::running(pod, &address.to_string(), started)).await;
        drop(permit);
        let exit = attend(&mut child, order).await?;
        let read = |path: PathBuf| fs::read(path).unwrap_or_default();
        let (message, log) = (read(self.message(pod)), read(self.log(pod)));
        let end = End::of(exit, &String::from_utf8_lossy(&message), &String::from_utf8_lossy(&log));
        if *order.borrow() != Order::Forget {
            self.objects.tell(pod, status::ended(pod, &end, started, Timestamp::now())).await;
        }
        Ok(())
    }

    fn addresses(&self, pod: &Pod) -> (Ipv4Addr, Ipv4Addr) {
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let master = addresses.master(&workload::job(pod));
        let own = elasticdl_operator::names::is_master(pod.labels());
        (if own { master } else { addresses.fresh() }, master)
    }

    fn start(&self, pod: &Pod, places: &Places<'_>) -> Result<Child> {
        let workload = Workload::of(pod, places)?;
        let path = self.log(pod);
        let log = fs::File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let errors = log.try_clone().context("share a log")?;
        let mut command = Command::new(&self.config.program);
        command.args(&workload.args).env_clear().envs(&workload.env).current_dir(&workload.directory);
        command.env("ELASTICDL_TERMINATION_LOG", self.message(pod));
        command.env("KUBECONFIG", places.secrets.join("kubeconfig"));
        command.stdin(Stdio::null()).stdout(log).stderr(errors).kill_on_drop(true);
        command.spawn().with_context(|| format!("start {}", self.config.program.display()))
    }

    /// The files of a pod's secret, and a kubeconfig of its account where it has one.
    async fn papers(&self, pod: &Pod) -> Result<PathBuf> {
        let namespace = pod.namespace().unwrap_or_default();
        let (name, _) = workload::secret(pod).context("the pod mounts no secret of a job")?;
        // The secret owns the pods of its job, so its directory is known before it is read.
        let owner = pod.owner_references().iter().find(|owner| owner.name == name);
        let uid = owner.map_or_else(|| pod.uid().unwrap_or_default(), |owner| owner.uid.clone());
        let directory = self.config.home.join(format!("{name}.{uid}"));
        let spec = pod.spec.clone().unwrap_or_default();
        if !directory.exists() {
            let api: Api<Secret> = Api::namespaced(self.client.clone(), &namespace);
            let secret = api.get(&name).await.with_context(|| format!("read the secret {name}"))?;
            // Whole or not at all: another pod of the job may look for it at the same time.
            let partial = self.config.home.join(format!("{name}.{}.partial", pod.uid().unwrap_or_default()));
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&partial);
            made.with_context(|| format!("create {}", partial.display()))?;
            for (file, content) in secret.data.iter().flatten() {
                write_private(&partial.join(file), &content.0)?;
            }
            if let Err(error) = fs::rename(&partial, &directory) {
                ensure!(directory.exists(), "rename {}: {error}", partial.display());
            }
        }
        if let (Some(account), Some(true)) = (spec.service_account_name, spec.automount_service_account_token)
        {
            let config = self.account_config(&namespace, &account).await?;
            write_private(&directory.join("kubeconfig"), config.to_string().as_bytes())?;
        }
        Ok(directory)
    }

    /// A kubeconfig with a token of an account.
    async fn account_config(&self, namespace: &str, account: &str) -> Result<Value> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let request = TokenRequest {
            spec: TokenRequestSpec { expiration_seconds: Some(3600), ..TokenRequestSpec::default() },
            ..TokenRequest::default()
        };
        let granted = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let status = granted.with_context(|| format!("ask for a token of {account}"))?.status;
        let token = status.context("the API server grants no token")?.token;
        let text = fs::read_to_string(&self.config.kubeconfig).context("read the kubeconfig")?;
        let mut config: Value = serde_json::from_str(&text).context("read the kubeconfig as JSON")?;
        config["users"][0]["user"] = json!({ "token": token });
        config["contexts"][0]["context"]["namespace"] = json!(namespace);
        Ok(config)
    }

    fn log(&self, pod: &Pod) -> PathBuf {
        self.config.home.join(format!("{}.{}.log", pod.name_any(), pod.uid().unwrap_or_default()))
    }

    fn message(&self, pod: &Pod) -> PathBuf {
        self.log(pod).with_extension("message")
    }
}

/// Waits for the end of a process, and brings it about where that is ordered.
async fn attend(child: &mut Child, order: &mut watch::Receiver<Order>) -> Result<ExitStatus> {
    let mut patience: Option<Instant> = None;
    loop {
        let until = patience.unwrap_or_else(Instant::now);
        tokio::select! {
            exit = child.wait() => return exit.context("wait for a process"),
            () = tokio::time::sleep_until(until), if patience.is_some() => {
                child.start_kill().context("kill a process")?;
                patience = None;
            }
            changed = order.changed() => match (changed, *order.borrow_and_update()) {
                (Ok(()), Order::Run) => {}
                (Ok(()), Order::End(grace)) => {
                    terminate(child);
                    patience = Some(Instant::now() + grace);
                }
                (Ok(()), Order::Forget) | (Err(_), _) => child.start_kill().context("kill a process")?,
            },
        }
    }
}

fn terminate(child: &Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid {
        // One that has just ended cannot be signalled, and need not be.
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn write_private(path: &Path, content: &[u8]) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| std::io::Write::write_all(&mut file, content))
        .with_context(|| format!("write {}", path.display()))
}
