//! The pods of a job as a watch tells of them. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher::Event;

use crate::names;

/// The pods of a job.
#[derive(Debug, Default)]
pub struct Watched {
    pods: BTreeMap<String, Pod>,
    /// Whether those are all. A watch that was cut off begins anew, and then they are not.
    complete: bool,
}

impl Watched {
    /// Takes in what a watch tells.
    pub fn take(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => {
                self.pods.clear();
                self.complete = false;
            }
            Event::InitDone => self.complete = true,
            Event::InitApply(pod) | Event::Apply(pod) => self.add(pod),
            Event::Delete(pod) => {
                // Another one may have its name by now, though the watch has not told of it yet.
                if self.pods.get(&pod.name_any()).is_some_and(|known| known.uid() == pod.uid()) {
                    self.pods.remove(&pod.name_any());
                }
            }
        }
    }

    /// A pod is there, though the watch may not have told of it yet.
    pub fn add(&mut self, pod: Pod) {
        self.pods.insert(pod.name_any(), pod);
    }

    /// The pods of the master; `None` while it is not known which there are.
    pub fn masters(&self) -> Option<Vec<Pod>> {
        let masters = self.pods.values().filter(|pod| names::is_master(pod.labels()));
        self.complete.then(|| masters.cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, role: &str) -> Pod {
        let metadata = json!({ "name": name, "labels": { names::ROLE: role } });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    fn masters(watched: &Watched) -> Option<Vec<String>> {
        watched.masters().map(|pods| pods.iter().map(ResourceExt::name_any).collect())
    }

    /// Goal: nobody starts a second master because the list of pods is not complete yet.
    #[test]
    fn while_a_watch_begins_anew_nobody_knows_which_masters_there_are() {
        let mut watched = Watched::default();
        assert_eq!(masters(&watched), None);
        for _ in 0..2 {
            watched.take(Event::Init);
            watched.take(Event::InitApply(pod("j-worker-0", "worker")));
            assert_eq!(masters(&watched), None);
            watched.take(Event::InitApply(pod("j-master", "master")));
            watched.take(Event::InitDone);
            assert_eq!(masters(&watched), Some(vec!["j-master".into()]));
        }
        watched.take(Event::Delete(pod("j-master", "master")));
        assert_eq!(masters(&watched), Some(vec![]));
        watched.add(pod("j-master-1", "master"));
        assert_eq!(masters(&watched), Some(vec!["j-master-1".into()]));
    }

    /// Goal: nobody starts a third master because the end of the first is told after the start of the second.
    #[test]
    fn the_end_of_a_pod_is_not_that_of_the_next_one_of_its_name() {
        let life = |uid: &str| {
            let mut pod = pod("j-master", "master");
            pod.metadata.uid = Some(uid.into());
            pod
        };
        let mut watched = Watched::default();
        watched.take(Event::InitDone);
        watched.take(Event::Apply(life("a")));
        watched.add(life("b"));
        watched.take(Event::Delete(life("a")));
        assert_eq!(masters(&watched), Some(vec!["j-master".into()]));
        watched.take(Event::Delete(life("b")));
        assert_eq!(masters(&watched), Some(vec![]));
    }
}
