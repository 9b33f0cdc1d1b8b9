//! Edge: starts, stops and watches the pods of a job's workers and servers.
//!
//! Nothing here waits for the API server: calls run as tasks of their own, tried again for as long as that can
//! help, and what comes of them is news. The watch goes on where it was cut off, or begins anew and finds out
//! what was missed.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock and waits")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use elasticdl_wire::control::Role;
use elasticdl_wire::retry::Backoff;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};

use crate::error::{Error, Result};
use crate::manifest::{Job, Member};
use crate::names;
use crate::pod::{Cause, End, Wait};
use crate::roster::{News, Roster, Who};

/// Between two tries of a call.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(10);
/// How long the first look at the pods may take.
const FIRST_LOOK: Duration = Duration::from_secs(30);
/// How often pods that should be gone are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// Pods that failed are kept, so that people can look at them; the newest of them.
const KEPT: usize = 10;

/// The pods of a job. Dropping it ends the watch and leaves the pods alone.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    launch_last: u32,
    /// Dropped with the fleet, which ends the watch.
    _watching: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Shared {
    job: Job,
    master: String,
    pods: Api<Pod>,
    roster: Mutex<Roster>,
    /// Being made, and to be unmade when that is over.
    unwanted: Mutex<BTreeSet<u32>>,
    news: mpsc::UnboundedSender<News>,
    runtime: Handle,
}

impl Fleet {
    /// The pods of `job`, whose master is at `master`; waits until it is known which there are.
    ///
    /// # Errors
    ///
    /// The API server does not let us list pods.
    pub async fn watch(
        client: Client,
        job: Job,
        master: String,
        news: mpsc::UnboundedSender<News>,
    ) -> Result<Fleet> {
        let pods = Api::namespaced(client, &job.namespace);
        let shared = Arc::new(Shared {
            job,
            master,
            pods,
            roster: Mutex::default(),
            unwanted: Mutex::default(),
            news,
            runtime: Handle::current(),
        });
        let (known, first_look) = oneshot::channel();
        let (_watching, end) = oneshot::channel();
        tokio::spawn(watch(Arc::clone(&shared), known, end));
        let late = |why: String| Error::Late {
            what: "the pods could not be listed".into(),
            seconds: FIRST_LOOK.as_secs(),
            why,
        };
        match tokio::time::timeout(FIRST_LOOK, first_look).await {
            Ok(Ok(())) => Ok(Fleet { shared, launch_last: 0, _watching }),
            _ => Err(late(": is the account allowed to?".into())),
        }
    }

    /// Starts a worker or server; the number of the launch tells it apart from others of its id.
    pub fn start(&mut self, role: Role, id: u32) -> u32 {
        self.launch_last = unix_seconds().max(self.launch_last + 1);
        let who = Who { role, id, launch: self.launch_last };
        self.shared.roster().starts(who);
        let shared = Arc::clone(&self.shared);
        self.shared.runtime.spawn(async move { shared.create(who).await });
        who.launch
    }

    /// Whether this very pod is there.
    pub fn is_alive(&self, who: Who) -> bool {
        self.shared.roster().is_alive(who)
    }

    /// Whether this very pod is known, though it may have ended; then that was told.
    pub fn knows(&self, who: Who) -> bool {
        self.shared.roster().knows(who)
    }

    /// Asks a pod to end: it drains.
    pub fn stop(&self, who: Who) {
        self.delete(who, DeleteParams::default());
    }

    /// Ends a pod at once, even where its node does not answer.
    pub fn kill(&self, who: Who) {
        self.delete(who, DeleteParams::default().grace_period(0));
    }

    fn delete(&self, who: Who, params: DeleteParams) {
        let name = self.shared.roster().name_of(who).map(str::to_string);
        let Some(name) = name else {
            self.shared.unwanted().insert(who.launch);
            return;
        };
        let shared = Arc::clone(&self.shared);
        self.shared.runtime.spawn(async move { shared.delete(&name, &params).await });
    }
}

impl Shared {
    fn roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unwanted(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.unwanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, news: impl IntoIterator<Item = News>) {
        // Nobody listens any more where the job is over.
        news.into_iter().for_each(|news| drop(self.news.send(news)));
    }

    /// Makes a pod, for as long as that takes.
    async fn create(&self, who: Who) {
        let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, who.launch.into());
        let mut attempt = 0;
        loop {
            if self.unwanted().remove(&who.launch) {
                let end = End { code: Some(0), ..End::by(Cause::Deleted) };
                return self.tell([News::Ended(who, end)]);
            }
            let (pod, name) = match self.pod(who, &mut attempt) {
                Ok(made) => made,
                Err(error) => return self.tell([News::refused(who, error.chain())]),
            };
            match self.pods.create(&PostParams::default(), &pod).await {
                Ok(created) => {
                    info!(pod = name, "pod created");
                    let news = self.roster().created(&created);
                    self.tell(news);
                    if self.unwanted().remove(&who.launch) {
                        self.delete(&name, &DeleteParams::default()).await;
                    }
                    return;
                }
                Err(kube::Error::Api(status)) if status.code == 409 && status.is_already_exists() => {
                    attempt += 1
                }
                Err(error) => match refusal(&error) {
                    Refusal::Final => {
                        let why = format!("the pod {name} cannot be made: {error}");
                        return self.tell([News::refused(who, why)]);
                    }
                    Refusal::Passing => {
                        warn!(pod = name, %error, "pod not created yet");
                        self.tell([News::Waits(who, Wait { may_pass: true, why: error.to_string() })]);
                        tokio::time::sleep(backoff.pause()).await;
                    }
                },
            }
        }
    }

    /// The pod to be made, under the first name that is free.
    fn pod(&self, who: Who, attempt: &mut u32) -> Result<(Pod, String)> {
        let roster = self.roster();
        let plain = match &self.job.spec.command {
            Some(command) => names::part(&self.job.spec.name, command.member(who.id)),
            None => names::member(&self.job.spec.name, who.role, who.id),
        };
        while roster.has(&names::attempt(&plain, *attempt)) {
            *attempt += 1;
        }
        let (workers, high) = roster.workers();
        let name = names::attempt(&plain, *attempt);
        let member = Member {
            role: who.role,
            id: who.id,
            launch: who.launch,
            name: name.clone(),
            master: self.master.clone(),
            high: who.role == Role::Worker && self.job.spec.kubernetes.is_high(high, workers + 1),
            memory_deaths: roster.memory_deaths(who.role, who.id),
        };
        Ok((self.job.member(&member)?, name))
    }

    async fn delete(&self, name: &str, params: &DeleteParams) {
        let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, 0);
        loop {
            match self.pods.delete(name, params).await {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code == 404 => return,
                Err(error) if matches!(refusal(&error), Refusal::Final) => {
                    return warn!(pod = name, %error, "pod not deleted");
                }
                Err(error) => {
                    warn!(pod = name, %error, "pod not deleted yet");
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    /// Removes pods that ended well or long ago.
    fn tidy(self: &Arc<Self>, news: &News, kept: &mut Vec<String>) {
        let News::Ended(who, end) = news else { return };
        let Some(name) = self.roster().name_of(*who).map(str::to_string) else { return };
        let remove = if self.roster().is_worth_a_look(&name, end) {
            kept.push(name);
            (kept.len() > KEPT).then(|| kept.remove(0))
        } else {
            // One that is stuck on a node that went away is left alone until the job is over.
            Some(name).filter(|name| self.roster().has_ended(name))
        };
        if let Some(name) = remove {
            let shared = Arc::clone(self);
            tokio::spawn(async move { shared.delete(&name, &DeleteParams::default()).await });
        }
    }
}

/// Whether a refusal may pass.
enum Refusal {
    Final,
    Passing,
}

fn refusal(error: &kube::Error) -> Refusal {
    match error {
        // A quota may have room again; a server that is busy says so with 429.
        kube::Error::Api(status) if status.code == 403 && status.message.contains("exceeded quota") => {
            Refusal::Passing
        }
        kube::Error::Api(status)
            if (400..500).contains(&status.code) && status.code != 429 && status.code != 409 =>
        {
            Refusal::Final
        }
        _ => Refusal::Passing,
    }
}

/// Watches the pods until the fleet is gone.
async fn watch(shared: Arc<Shared>, known: oneshot::Sender<()>, mut end: oneshot::Receiver<()>) {
    let selector = names::members_selector(&shared.job.spec.name);
    let events = watcher(shared.pods.clone(), watcher::Config::default().labels(&selector)).default_backoff();
    let mut events = std::pin::pin!(events);
    let mut look = tokio::time::interval(LOOK);
    let (mut known, mut kept) = (Some(known), Vec::new());
    loop {
        let news = tokio::select! {
            _ = &mut end => return,
            _ = look.tick() => shared.roster().overdue(i64::from(unix_seconds())),
            event = events.try_next() => match event {
                Ok(Some(watcher::Event::Init)) => {
                    shared.roster().relist_begins();
                    Vec::new()
                }
                Ok(Some(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod))) => {
                    shared.roster().applied(&pod).into_iter().collect()
                }
                Ok(Some(watcher::Event::Delete(pod))) => shared.roster().deleted(&pod).into_iter().collect(),
                Ok(Some(watcher::Event::InitDone)) => {
                    let news = shared.roster().relist_ends();
                    known.take().map(|known| known.send(()));
                    news
                }
                Ok(None) => return,
                Err(error) => {
                    warn!(%error, "the watch of the pods is cut off");
                    Vec::new()
                }
            },
        };
        news.iter().for_each(|news| shared.tidy(news, &mut kept));
        shared.tell(news);
    }
}

fn unix_seconds() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as u32)
}
