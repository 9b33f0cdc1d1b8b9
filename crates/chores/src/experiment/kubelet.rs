//! A kubelet for simulated nodes: each pod that asks for it is a real process of this machine.
//!
//! It does what a kubelet does for pods of one container that never restarts: starts them once they are bound,
//! tells of them, sends SIGTERM when they are deleted and SIGKILL when their time is over, and lets go of their
//! objects. Nothing is isolated: processes see the machine, are told apart by loopback addresses, and get the files
//! of their job's secret in a directory. A pod's account is real: the API server holds it to its rights.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;

mod addresses;
mod node;
mod objects;
mod stand_in;
mod status;
mod workload;

pub use node::{Config, Processes};
pub use stand_in::StandIns;

/// The annotation of pods that are processes; kwok leaves them alone.
pub const PROCESSES: &str = "simulate.elasticdl.org/processes";

/// Runs pods until it is dropped, and then ends them.
#[derive(Debug)]
pub struct Kubelet {
    watching: tokio::task::JoinHandle<()>,
}

/// What pods are here.
pub trait Host: Send + Sync + 'static {
    /// A pod from the moment it is bound until its object is gone.
    fn live(self: Arc<Self>, pod: Pod, order: watch::Receiver<Order>) -> impl Future<Output = ()> + Send;
}

impl Kubelet {
    /// Begins to look after the pods of all namespaces.
    pub fn start(client: Client, host: impl Host) -> Kubelet {
        Kubelet { watching: tokio::spawn(attend_all(client, Arc::new(host))) }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// What is to become of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// It is to run.
    Run,
    /// It is to end, within so long.
    End(Duration),
    /// Its object is gone.
    Forget,
}

/// Watches the pods and hands on what is to become of each.
async fn attend_all(client: Client, host: Arc<impl Host>) {
    let events = watcher(Api::<Pod>::all(client), watcher::Config::default()).default_backoff();
    let mut events = std::pin::pin!(events);
    // Ended with this task, and their processes with them.
    let mut lives = JoinSet::new();
    let mut orders: BTreeMap<String, watch::Sender<Order>> = BTreeMap::new();
    let mut listed = BTreeSet::new();
    loop {
        let pod = match events.try_next().await {
            Ok(Some(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))) => pod,
            Ok(Some(watcher::Event::Delete(pod))) => {
                if let Some(order) = orders.remove(&pod.uid().unwrap_or_default()) {
                    order.send_replace(Order::Forget);
                }
                continue;
            }
            Ok(Some(watcher::Event::Init)) => {
                listed.clear();
                continue;
            }
            Ok(Some(watcher::Event::InitDone)) => {
                // What went while nobody watched.
                orders.retain(|uid, order| {
                    let there = listed.contains(uid);
                    if !there {
                        order.send_replace(Order::Forget);
                    }
                    there
                });
                continue;
            }
            Ok(None) => return,
            Err(error) => {
                eprintln!("the kubelet's watch is cut off: {error}");
                continue;
            }
        };
        let uid = pod.uid().unwrap_or_default();
        listed.insert(uid.clone());
        if !is_ours(&pod) {
            continue;
        }
        let wanted = order(&pod);
        match orders.get(&uid) {
            Some(order) => {
                order.send_if_modified(|known| std::mem::replace(known, wanted) != wanted);
            }
            // Another kubelet ran it; it does not begin again.
            None if has_ended(&pod) => {}
            None => {
                let (order, ordered) = watch::channel(wanted);
                orders.insert(uid, order);
                lives.spawn(Arc::clone(&host).live(pod, ordered));
            }
        }
        while lives.try_join_next().is_some() {}
    }
}

/// Whether a pod is bound and wants to be a process.
fn is_ours(pod: &Pod) -> bool {
    let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    bound && pod.annotations().contains_key(PROCESSES)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn order(pod: &Pod) -> Order {
    match pod.metadata.deletion_timestamp {
        None => Order::Run,
        Some(_) => {
            let seconds = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
            Order::End(Duration::from_secs(u64::try_from(seconds).unwrap_or_default()))
        }
    }
}
