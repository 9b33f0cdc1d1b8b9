//! Edge: watches nodes and pods, and has the jobs agree on who gets how many workers whenever something changes.
//!
//! Two watches are all that it costs the API server. Grants that have changed are told by name; whoever looks at
//! the job next finds them here.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock and waits")]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::channel::mpsc::UnboundedSender;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, oneshot};
use tracing::{info, warn};

use crate::error::{Error, Result};
use crate::negotiate::Grant;
use crate::reconcile;
use crate::resource::ElasticJob;
use crate::sharing::{Ask, Key, Sharing};

/// Changes come in crowds: at least so long between two agreements, and so many times as long as one took.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_TIMES: u32 = 4;
/// How long the first look at nodes and pods may take.
const FIRST_LOOK: Duration = Duration::from_secs(30);
/// Pods that use a node.
const ON_A_NODE: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// The room of a cluster, shared out.
pub struct Capacity {
    sharing: Mutex<Sharing>,
    changed: Notify,
    /// Whose grant has changed.
    touched: UnboundedSender<Key>,
}

impl Capacity {
    /// Watches the cluster on behalf of these jobs. `None`: the account may not see nodes and all pods, and so
    /// the scheduler alone decides.
    ///
    /// # Errors
    ///
    /// The API server does not answer.
    pub async fn watch(
        client: &Client,
        jobs: &[ElasticJob],
        touched: UnboundedSender<Key>,
    ) -> Result<Option<Arc<Capacity>>> {
        let (nodes, pods): (Api<Node>, Api<Pod>) = (Api::all(client.clone()), Api::all(client.clone()));
        let one = ListParams::default().limit(1);
        let seen = match nodes.list(&one).await {
            Ok(_) => pods.list(&one).await.map(|_| ()),
            Err(error) => Err(error),
        };
        match seen {
            Err(kube::Error::Api(refused)) if refused.code == 403 => {
                warn!(
                    why = refused.message,
                    "jobs do not share by agreement: that takes the right to list nodes and all pods"
                );
                return Ok(None);
            }
            seen => seen.map_err(Error::api("listing nodes and pods"))?,
        }
        let mut sharing = Sharing::default();
        for job in jobs {
            sharing.ask(&Key::of(job), asks(job, None));
        }
        let capacity = Arc::new(Capacity { sharing: Mutex::new(sharing), changed: Notify::new(), touched });
        let (nodes_known, nodes_told) = oneshot::channel();
        let (pods_known, pods_told) = oneshot::channel();
        tokio::spawn(Arc::clone(&capacity).follow(nodes, watcher::Config::default(), nodes_known));
        tokio::spawn(Arc::clone(&capacity).follow(
            pods,
            watcher::Config::default().fields(ON_A_NODE),
            pods_known,
        ));
        let both = async { nodes_told.await.is_ok() && pods_told.await.is_ok() };
        if !tokio::time::timeout(FIRST_LOOK, both).await.unwrap_or(false) {
            let what = "nodes and pods could not be listed".into();
            return Err(Error::Late { what, seconds: FIRST_LOOK.as_secs(), why: String::new() });
        }
        capacity.agree();
        tokio::spawn(Arc::clone(&capacity).keep_agreeing());
        Ok(Some(capacity))
    }

    /// Tells what a job asks for, `None` where it asks for nothing, and finds out what it may have. One that was
    /// not heard of before is not kept waiting.
    pub fn ask(&self, key: &Key, ask: Option<Ask>) -> Option<Grant> {
        let asks = ask.is_some();
        self.sharing().ask(key, ask);
        if asks && self.sharing().grant(key).is_none() {
            self.agree();
        } else if self.sharing().has_changed() {
            self.changed.notify_one();
        }
        self.sharing().grant(key).cloned()
    }

    fn sharing(&self) -> MutexGuard<'_, Sharing> {
        self.sharing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn agree(&self) {
        let touched = self.sharing().agree();
        for key in touched {
            if let Some(grant) = self.sharing().grant(&key) {
                info!(job = %key, workers = grant.workers, reason = %grant.reason, "granted");
            }
            // Nobody listens any more where the operator ends.
            let _ = self.touched.unbounded_send(key);
        }
    }

    async fn keep_agreeing(self: Arc<Self>) {
        loop {
            self.changed.notified().await;
            let began = Instant::now();
            if self.sharing().has_changed() {
                self.agree();
            }
            tokio::time::sleep(PAUSE.max(began.elapsed() * PAUSE_TIMES)).await;
        }
    }

    /// Follows all objects of a kind; tells once when all of them are known.
    async fn follow<K: Counts>(
        self: Arc<Self>,
        objects: Api<K>,
        config: watcher::Config,
        known: oneshot::Sender<()>,
    ) {
        let mut known = Some(known);
        let mut there: BTreeSet<Key> = BTreeSet::new();
        let mut listed: BTreeSet<Key> = BTreeSet::new();
        let mut events = std::pin::pin!(watcher(objects, config).default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(object)) => {
                    listed.insert(Key::of(&object));
                    object.is_there(&mut self.sharing());
                }
                Ok(watcher::Event::InitDone) => {
                    for gone in there.difference(&listed) {
                        K::is_gone(gone, &mut self.sharing());
                    }
                    there = std::mem::take(&mut listed);
                    known.take().map(|known| known.send(()));
                }
                Ok(watcher::Event::Apply(object)) => {
                    there.insert(Key::of(&object));
                    object.is_there(&mut self.sharing());
                }
                Ok(watcher::Event::Delete(object)) => {
                    there.remove(&Key::of(&object));
                    K::is_gone(&Key::of(&object), &mut self.sharing());
                }
                Err(error) => warn!(%error, "the watch of nodes or pods is cut off"),
            }
            if self.sharing().has_changed() {
                self.changed.notify_one();
            }
        }
    }
}

/// What a job asks for, where it is at the table.
pub fn asks(job: &ElasticJob, useful: Option<u32>) -> Option<Ask> {
    let spec = job.resolve().ok().filter(|spec| reconcile::wants_room(job, spec))?;
    Ask::of(job, &spec, useful).ok()
}

/// Something whose coming and going changes the room.
trait Counts: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static {
    fn is_there(&self, sharing: &mut Sharing);
    fn is_gone(key: &Key, sharing: &mut Sharing);
}

impl Counts for Node {
    fn is_there(&self, sharing: &mut Sharing) {
        sharing.node(self);
    }

    fn is_gone(key: &Key, sharing: &mut Sharing) {
        sharing.node_gone(&key.name);
    }
}

impl Counts for Pod {
    fn is_there(&self, sharing: &mut Sharing) {
        sharing.pod(self);
    }

    fn is_gone(key: &Key, sharing: &mut Sharing) {
        sharing.pod_gone(key);
    }
}
