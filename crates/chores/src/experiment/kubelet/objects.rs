//! What a kubelet does to the objects of its pods.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use tokio::sync::watch;

use super::Order;
use super::status::{self, End};

/// Between two tries of a call.
const RETRY: Duration = Duration::from_millis(200);

/// Pods on the API server.
pub struct Objects(pub Client);

impl Objects {
    /// Patches the status, until it is done or the pod is gone.
    pub async fn tell(&self, pod: &Pod, status: Value) {
        let api = self.pods(pod);
        let (name, params) = (pod.name_any(), PatchParams::default());
        loop {
            match api.patch_status(&name, &params, &Patch::Strategic(&status)).await {
                Ok(_) => return,
                Err(kube::Error::Api(gone)) if gone.code == 404 => return,
                Err(kube::Error::Api(refused)) if refused.code == 422 => {
                    return eprintln!("the status of {name} cannot be written: {}", refused.message);
                }
                Err(error) => eprintln!("the status of {name} is not written yet: {error}"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Tells that a pod cannot run.
    pub async fn fail(&self, pod: &Pod, error: &anyhow::Error) {
        eprintln!("the pod {} cannot run: {error:#}", pod.name_any());
        let (end, now) = (End { code: 128, message: format!("{error:#}") }, Timestamp::now());
        self.tell(pod, status::ended(pod, &end, now, now)).await;
    }

    /// Who is to end has ended, and its object goes; who ended by itself is kept until somebody deletes it.
    pub async fn until_gone(&self, pod: &Pod, mut order: watch::Receiver<Order>) {
        while *order.borrow_and_update() == Order::Run {
            if order.changed().await.is_err() {
                return;
            }
        }
        if matches!(*order.borrow(), Order::End(_)) {
            self.let_go(pod).await;
        }
    }

    /// Removes the object of a pod that has ended.
    async fn let_go(&self, pod: &Pod) {
        let preconditions = Some(Preconditions { uid: pod.uid(), resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default().grace_period(0) };
        loop {
            match self.pods(pod).delete(&pod.name_any(), &params).await {
                Ok(_) => return,
                // Gone, or another one has its name already.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return,
                Err(error) => eprintln!("the pod {} is not removed yet: {error}", pod.name_any()),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.0.clone(), &pod.namespace().unwrap_or_default())
    }
}
