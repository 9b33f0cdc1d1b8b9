//! Edge: which cluster, and the objects of a job on it.

use std::time::Duration;

use futures::TryStreamExt;
use futures::{AsyncBufReadExt, Stream};
use k8s_openapi::api::core::v1::{Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, LogParams, Patch, PatchParams, PostParams};
use kube::config::KubeConfigOptions;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Config, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tracing::warn;

use crate::error::{Error, Result};
use crate::manifest::{Job, MASTER_PORT, Secrets};
use crate::names;
use crate::pod::{self, State};

/// How long the API server may take to answer.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Who writes down what masters remember, in the managed fields: others who apply the object leave that alone.
const BOOKKEEPER: &str = "elasticdl-master";

/// A cluster and a namespace on it.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    /// The namespace.
    pub namespace: String,
}

impl Cluster {
    /// The cluster that kubectl would use, or that of `context`.
    ///
    /// # Errors
    ///
    /// There is no such context, or no kubeconfig at all.
    pub async fn find(context: Option<&str>, namespace: Option<&str>) -> Result<Cluster> {
        let reach = |config: Config| Client::try_from(config).map_err(|e| Error::Config(e.into()));
        Cluster::find_with(context, namespace, reach).await
    }

    /// The same, reached by a client of one's own making.
    ///
    /// # Errors
    ///
    /// There is no such context, no kubeconfig at all, or no client for it.
    pub async fn find_with(
        context: Option<&str>,
        namespace: Option<&str>,
        reach: impl FnOnce(Config) -> Result<Client>,
    ) -> Result<Cluster> {
        let options = KubeConfigOptions { context: context.map(Into::into), ..KubeConfigOptions::default() };
        let config = match context {
            Some(_) => Config::from_kubeconfig(&options).await.map_err(|e| Error::Config(e.into())),
            None => Config::infer().await.map_err(|e| Error::Config(e.into())),
        };
        let mut config = config?;
        config.connect_timeout = Some(CALL_LIMIT);
        let namespace = namespace.map_or_else(|| config.default_namespace.clone(), Into::into);
        Ok(Cluster { client: reach(config)?, namespace })
    }

    /// A namespace of the cluster that `client` leads to.
    pub fn of(client: Client, namespace: String) -> Cluster {
        Cluster { client, namespace }
    }

    /// A client, for whoever watches.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Makes what a job needs beside its pods; what is there already stays. Tells what owns it all.
    pub async fn prepare(&self, job: &Job, secrets: &Secrets) -> Result<OwnerReference> {
        let anchor = self.ensure(&job.secret(secrets)).await?;
        let owned = Job { owner: Some(owner(&anchor)), ..job.clone() };
        let service = owned.service();
        if job.spec.kubernetes.service_account.is_some() {
            self.ensure(&service).await?;
            return Ok(owner(&anchor));
        }
        let (account, rights, binding) = owned.account();
        // None of them needs another to be made.
        tokio::try_join!(
            self.ensure(&service),
            self.ensure::<ServiceAccount>(&account),
            self.ensure::<Role>(&rights),
            self.ensure::<RoleBinding>(&binding),
        )?;
        Ok(owner(&anchor))
    }

    /// Makes the priority classes that jobs use, where they are missing and we may.
    pub async fn ensure_priorities(&self) -> Result<()> {
        let api: Api<PriorityClass> = Api::all(self.client.clone());
        for class in crate::manifest::priorities() {
            let name = class.name_any();
            let there = api
                .get_opt(&name)
                .await
                .map_err(Error::api(format!("looking for the priority class {name}")))?;
            if there.is_none() {
                let created = api.create(&PostParams::default(), &class).await;
                created.map_err(Error::api(format!("making the priority class {name}")))?;
            }
        }
        Ok(())
    }

    /// What owns the objects of a job that was prepared before.
    pub async fn owner(&self, job: &str) -> Result<OwnerReference> {
        let name = names::anchor(job);
        let secret = self.api::<Secret>().get(&name).await;
        Ok(owner(&secret.map_err(Error::api(format!("reading the secret {name}")))?))
    }

    /// The job's secret, where there is one.
    pub async fn anchor(&self, job: &str) -> Result<Option<Secret>> {
        let name = names::anchor(job);
        self.api().get_opt(&name).await.map_err(Error::api(format!("looking for the secret {name}")))
    }

    /// What the masters of a person's own program remember.
    pub async fn recall(&self, job: &str) -> Result<Option<String>> {
        let secret = self.anchor(job).await?;
        Ok(secret.and_then(|secret| secret.annotations().get(names::BOOK).cloned()))
    }

    /// Remembers for the next master. `is_ours` tells from what was remembered whether this one still leads;
    /// `false`: it does not.
    pub async fn remember(&self, job: &str, book: &str, is_ours: impl Fn(&str) -> bool) -> Result<bool> {
        let name = names::anchor(job);
        let failed = || Error::api(format!("writing to the secret {name}"));
        loop {
            let secret: Secret = self.api().get(&name).await.map_err(failed())?;
            if secret.annotations().get(names::BOOK).is_some_and(|known| !is_ours(known)) {
                return Ok(false);
            }
            // Whoever has written in between, with the version that was looked at this is a conflict.
            let metadata =
                json!({ "annotations": { names::BOOK: book }, "resourceVersion": secret.resource_version() });
            let patch = Patch::Merge(json!({ "metadata": metadata }));
            let params = PatchParams { field_manager: Some(BOOKKEEPER.into()), ..PatchParams::default() };
            match self.api::<Secret>().patch(&name, &params, &patch).await {
                Ok(_) => return Ok(true),
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(failed()(error)),
            }
        }
    }

    /// Where the master is called from inside the cluster.
    pub async fn master_address(&self, job: &str) -> Result<String> {
        let name = names::master(job);
        let service: Service =
            self.api().get(&name).await.map_err(Error::api(format!("reading the service {name}")))?;
        let ip = service.spec.and_then(|spec| spec.cluster_ip).unwrap_or_default();
        Ok(format!("{ip}:{MASTER_PORT}"))
    }

    /// Starts the master, under the first name that is free.
    pub async fn start_master(&self, job: &Job) -> Result<String> {
        for attempt in 0.. {
            let pod = job.master(attempt)?;
            match self.api::<Pod>().create(&PostParams::default(), &pod).await {
                Ok(created) => return Ok(created.name_any()),
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(Error::api(format!("starting {}", pod.name_any()))(error)),
            }
        }
        unreachable!("some name is free")
    }

    /// The pods of a job's master, the newest last.
    pub async fn masters(&self, job: &str) -> Result<Vec<Pod>> {
        let params = ListParams::default().labels(&names::master_selector(job));
        let pods = self.api::<Pod>().list(&params).await;
        let mut pods = pods.map_err(Error::api("listing the master's pods"))?.items;
        pods.sort_by_key(|pod| pod.creation_timestamp().map(|time| time.0));
        Ok(pods)
    }

    /// The pods of a job.
    pub async fn pods(&self, job: &str) -> Result<Vec<Pod>> {
        let params = ListParams::default().labels(&format!("{}={job}", names::JOB));
        Ok(self.api::<Pod>().list(&params).await.map_err(Error::api("listing the job's pods"))?.items)
    }

    /// What becomes of all pods of a job, the master's too. Goes on where it was cut off.
    pub fn watch_pods(&self, job: &str) -> impl Stream<Item = watcher::Result<watcher::Event<Pod>>> + use<> {
        let config = watcher::Config::default().labels(&format!("{}={job}", names::JOB));
        watcher(self.api::<Pod>(), config).default_backoff()
    }

    /// The lines that a pod has written and writes until it ends.
    pub async fn logs(&self, pod: &str) -> Result<impl Stream<Item = Result<String>> + use<>> {
        let params =
            LogParams { follow: true, container: Some(names::CONTAINER.into()), ..LogParams::default() };
        let failed = |pod: &str| format!("reading the log of {pod}");
        let stream = self.api::<Pod>().log_stream(pod, &params).await.map_err(Error::api(failed(pod)))?;
        let attempt = failed(pod);
        Ok(stream.lines().map_err(move |source| Error::Io { attempt: attempt.clone(), source }))
    }

    /// Has a pod do one thing with the job's volumes. Tells its exit code and what it wrote.
    ///
    /// # Errors
    ///
    /// It cannot be made, or did not end within `limit`.
    pub async fn errand(
        &self,
        job: &Job,
        what: &str,
        args: &[&str],
        limit: Duration,
    ) -> Result<(i32, String)> {
        let name = format!("{}-{what}", job.spec.name);
        let api = self.api::<Pod>();
        let ended = |pod: &Pod| match pod::state(pod) {
            State::Ended(end) => Some(end.code.unwrap_or(2)),
            _ => None,
        };
        let pod = api.create(&PostParams::default(), &job.errand(&name, args)?).await;
        pod.map_err(Error::api(format!("starting {name}")))?;
        let mut last = None;
        let watched = async {
            let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
            let mut events = std::pin::pin!(watcher(api.clone(), config).default_backoff().applied_objects());
            loop {
                match events.try_next().await {
                    Ok(Some(pod)) => match ended(&pod) {
                        Some(code) => return code,
                        None => last = Some(pod),
                    },
                    Ok(None) => return 2,
                    Err(error) => warn!(%error, "the watch of a pod is cut off"),
                }
            }
        };
        let code = tokio::time::timeout(limit, watched).await;
        let log = match &code {
            Ok(_) => api
                .logs(&name, &LogParams::default())
                .await
                .map_err(Error::api(format!("reading the log of {name}"))),
            Err(_) => Ok(String::new()),
        };
        // Whoever asked has the answer; a pod that stays behind goes with the job.
        let _ = api.delete(&name, &DeleteParams::default().grace_period(0)).await;
        let why = last.map(|pod| match pod::state(&pod) {
            State::Waits(Some(wait)) => format!(": {}", wait.why),
            _ => String::new(),
        });
        let late = |_| Error::Late {
            what: format!("{name} did not end"),
            seconds: limit.as_secs(),
            why: why.unwrap_or_default(),
        };
        Ok((code.map_err(late)?, log?))
    }

    /// Ends workers and servers that are left when a job is over; those that failed stay to be looked at.
    pub async fn end_members(&self, job: &str) -> Result<()> {
        let params = ListParams::default().labels(&names::members_selector(job));
        let pods = self.api::<Pod>().list(&params).await.map_err(Error::api("listing the job's pods"))?;
        for pod in pods.items.iter().filter(|pod| !matches!(pod::state(pod), State::Ended(_))) {
            let name = pod.name_any();
            match self.api::<Pod>().delete(&name, &DeleteParams::default().grace_period(0)).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(Error::api(format!("ending {name}"))(error)),
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Removes everything that belongs to a job: what owns it all, and so the rest.
    pub async fn remove(&self, job: &str) -> Result<()> {
        let name = names::anchor(job);
        match self.api::<Secret>().delete(&name, &DeleteParams::background()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(Error::api(format!("removing {name}"))(error)),
        }
    }

    /// Deletes a pod, which has its own time to end or this many seconds; one that is gone already is as well.
    pub async fn delete_pod(&self, name: &str, seconds: Option<u32>) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: seconds, ..DeleteParams::default() };
        match self.api::<Pod>().delete(name, &params).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(Error::api(format!("deleting {name}"))(error)),
        }
    }

    /// Access to the pods of the namespace.
    pub fn pods_api(&self) -> Api<Pod> {
        self.api()
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes an object, or makes the one that is there like it.
    async fn ensure<K>(&self, object: &K) -> Result<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + std::fmt::Debug,
        K::DynamicType: Default,
    {
        let name = object.name_any();
        let params = PatchParams::apply(names::MANAGER).force();
        let mut patch = serde_json::to_value(object).expect("objects are JSON");
        let kind = K::DynamicType::default();
        patch["apiVersion"] = K::api_version(&kind).into();
        patch["kind"] = K::kind(&kind).into();
        let applied = self.api::<K>().patch(&name, &params, &Patch::Apply(patch)).await;
        applied.map_err(Error::api(format!("making {} {name}", K::kind(&kind))))
    }
}

/// The newest master that has not ended.
pub fn leader(masters: &[Pod]) -> Option<&Pod> {
    masters.iter().rev().find(|pod| matches!(pod::state(pod), State::Waits(_) | State::Runs))
}

fn owner(secret: &Secret) -> OwnerReference {
    secret.controller_owner_ref(&()).expect("what the API server returned has a name and a uid")
}
