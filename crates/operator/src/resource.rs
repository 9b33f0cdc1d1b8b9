//! The custom resource: a job file as an object of the cluster, and what is known of its job.

use std::borrow::Cow;

use elasticdl_spec::JobSpec;
use elasticdl_spec::resolve::{API_VERSION, Inputs, KIND, Problem, Problems, resolve};
use elasticdl_wire::control::Role;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Error;
use crate::manifest::{Job, Member};

/// The group of the resource.
pub const GROUP: &str = "elasticdl.org";
/// Its version.
pub const VERSION: &str = "v1";
/// Its plural name.
pub const PLURAL: &str = "elasticjobs";

/// A job file as an object of the cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ElasticJob {
    /// `elasticdl.org/v1`
    pub api_version: String,
    /// `ElasticJob`
    pub kind: String,
    /// Its name is the job's.
    pub metadata: ObjectMeta,
    /// What the file says, as it was said: [`ElasticJob::resolve`] reads it.
    #[serde(default)]
    pub spec: Value,
    /// What is known of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<JobStatus>,
}

/// What is known of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct JobStatus {
    /// Where the job is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// How much of it is done, for people: `42 %`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// Records trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// The epoch being trained, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
    /// Workers that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Workers that it may have: no more are started. None: nobody shares out the room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers_granted: Option<u32>,
    /// Of the last evaluation, for people: four places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<String>,
    /// Of the last evaluation, for people: four places.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logloss: Option<String>,
    /// Why the job failed, or does not begin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Selects the pods of the workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// The generation of the resource that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the job began, or was last resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When it was over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Since when it is being stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopping_since: Option<Time>,
    /// How often a master died and another was started.
    #[serde(skip_serializing_if = "is_zero")]
    pub restarts: u32,
    /// How many of those in a row, without a record done in between.
    #[serde(skip_serializing_if = "is_zero")]
    pub restarts_in_row: u32,
    /// Records that were done when a master was last started again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_records: Option<u64>,
    /// When that was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_time: Option<Time>,
    /// What holds and what does not, for programs and `kubectl wait`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Where a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// It does not begin: something is wrong with it, or there is no room.
    Pending,
    /// Its master or its servers start.
    Starting,
    /// Training.
    Training,
    /// A person's own program runs.
    Running,
    /// All is trained; the last checkpoint is written.
    Saving,
    /// The saved model is judged.
    Evaluating,
    /// It is being stopped, after a checkpoint.
    Stopping,
    /// It rests; nothing of it runs.
    Suspended,
    /// Over: somebody stopped its master.
    Stopped,
    /// Over: everything trained.
    Done,
    /// Over: something went wrong that trying again cannot mend.
    Failed,
}

impl Phase {
    /// Whether the job is over.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Stopped | Phase::Done | Phase::Failed)
    }

    /// All of them.
    pub const ALL: [Phase; 11] = [
        Phase::Pending,
        Phase::Starting,
        Phase::Training,
        Phase::Running,
        Phase::Saving,
        Phase::Evaluating,
        Phase::Stopping,
        Phase::Suspended,
        Phase::Stopped,
        Phase::Done,
        Phase::Failed,
    ];
}

/// Something that holds or not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What: Valid, Admitted, Running, Suspended, Complete, Failed.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True` or `False`.
    pub status: String,
    /// A word, in PascalCase.
    pub reason: String,
    /// A sentence.
    #[serde(default)]
    pub message: String,
    /// Since when `status` is so.
    pub last_transition_time: Time,
}

impl ElasticJob {
    /// The job that it describes, or everything that is wrong with it.
    pub fn resolve(&self) -> Result<JobSpec, Problems> {
        let name = self.name_any();
        let file = json!({ "apiVersion": self.api_version, "kind": self.kind, "metadata": { "name": name }, "spec": self.spec });
        // JSON is YAML.
        let inputs = Inputs { file: Some(&file.to_string()), ..Inputs::default() };
        let job = resolve(&inputs)?.job;
        let mut problems = Vec::new();
        if job.kubernetes.volumes.is_empty() && job.command.is_none() && !job.is_in_object_storage() {
            let hint = "as in [{ persistentVolumeClaim: { claimName: data }, mountPath: /data }]; or keep data, \
                        checkpoint.dir and output in object storage";
            problems.push(Problem {
                place: "spec.kubernetes.volumes".into(),
                what: "a job on a cluster needs a volume that all its pods can write to".into(),
                hint: Some(hint.into()),
            });
        }
        let namespace = self.namespace().unwrap_or_default();
        if let Some(other) = job.kubernetes.namespace.as_ref().filter(|other| **other != namespace) {
            problems.push(Problem {
                place: "spec.kubernetes.namespace".into(),
                what: format!("the job is in the namespace {namespace}, and {other} was given"),
                hint: Some(format!("leave it out, or apply the file with kubectl -n {other}")),
            });
        }
        problems.extend(unmakable(&job, &namespace));
        if problems.is_empty() { Ok(job) } else { Err(Problems(problems)) }
    }

    /// The number of the spec as it is now.
    pub fn generation(&self) -> Option<i64> {
        self.metadata.generation
    }
}

/// The pods of each kind as the job would have them, and how many: the master, and of workers one, which comes last;
/// or the members of a person's own program.
pub(crate) fn pods_of(spec: &JobSpec, namespace: &str) -> Vec<(crate::Result<Pod>, u32)> {
    let (spec, namespace) = (spec.clone(), namespace.to_string());
    let job = Job { spec, namespace, run: String::new(), fresh: false, allowed: None, owner: None };
    let member = |role, id| {
        let (name, master) = ("pod".to_string(), String::new());
        job.member(&Member { role, id, launch: 0, name, master, high: false, memory_deaths: 0 })
    };
    let mut pods = vec![(job.master(0), 1)];
    match &job.spec.command {
        Some(command) => {
            let roles = command.roles.iter().filter_map(|role| Some((command.first(&role.name)?, role)));
            pods.extend(roles.map(|(rank, role)| (member(Role::Worker, rank), role.count)));
        }
        None => {
            pods.extend([(member(Role::Server, 0), job.spec.servers.count), (member(Role::Worker, 0), 1)])
        }
    }
    pods
}

/// What Kubernetes would not take of a job's pods, before any is made.
fn unmakable(spec: &JobSpec, namespace: &str) -> Vec<Problem> {
    let pods = pods_of(spec, namespace).into_iter().map(|(pod, _)| pod);
    let problem = |error: Error| Problem { place: "spec".into(), what: error.chain(), hint: None };
    pods.into_iter().filter_map(Result::err).map(problem).collect()
}

impl JobStatus {
    /// The condition of this type.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// Whether a condition holds.
    pub fn holds(&self, type_: &str) -> bool {
        self.condition(type_).is_some_and(|condition| condition.status == "True")
    }

    /// Says whether something holds; since when changes only with whether.
    pub fn set(&mut self, type_: &str, holds: bool, reason: &str, message: impl Into<String>, now: &Time) {
        let status = if holds { "True" } else { "False" };
        let since =
            self.condition(type_).filter(|c| c.status == status).map(|c| c.last_transition_time.clone());
        let condition = Condition {
            type_: type_.into(),
            status: status.into(),
            reason: reason.into(),
            message: message.into(),
            last_transition_time: since.unwrap_or_else(|| now.clone()),
        };
        match self.conditions.iter_mut().find(|condition| condition.type_ == type_) {
            Some(known) => *known = condition,
            None => self.conditions.push(condition),
        }
    }
}

impl Resource for ElasticJob {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn api_version((): &()) -> Cow<'_, str> {
        API_VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn job(spec: Value) -> ElasticJob {
        serde_json::from_value(json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob",
            "metadata": { "name": "ctr", "namespace": "ads", "labels": { "team": "a" } }, "spec": spec,
        }))
        .unwrap()
    }

    fn spec() -> Value {
        json!({
            "model": { "zoo": "lr" },
            "data": { "train": "t.tsv", "layout": "criteo" },
            "kubernetes": { "volumes": [{ "hostPath": { "path": "/srv" }, "mountPath": "/data" }] },
        })
    }

    #[test]
    fn a_resource_is_a_job_file() {
        let resolved = job(spec()).resolve().unwrap();
        assert_eq!((resolved.name.as_str(), resolved.data.train), ("ctr", vec!["t.tsv".to_string()]));
    }

    #[test]
    fn what_is_wrong_is_told_with_the_nearest_key() {
        let mut wrong = spec();
        wrong["train"] = json!({ "lerning_rate": 0.1 });
        let problems = job(wrong).resolve().unwrap_err().to_string();
        assert!(problems.contains("spec.train.lerning_rate: unknown key"), "{problems}");
        assert!(problems.contains("did you mean learning_rate?"), "{problems}");
    }

    #[test]
    fn a_volume_is_needed_and_the_namespace_is_that_of_the_resource() {
        let mut wrong = spec();
        wrong["kubernetes"] = json!({ "namespace": "other" });
        let problems = job(wrong).resolve().unwrap_err().to_string();
        assert!(
            problems.contains("spec.kubernetes.volumes") && problems.contains("kubectl -n other"),
            "{problems}"
        );
    }

    #[test]
    fn a_program_of_its_own_needs_no_volume() {
        let roles = json!({ "worker": 2, "ps": 1 });
        let mut spec = json!({ "command": { "run": ["a"], "framework": "tensorflow", "roles": roles } });
        assert_eq!(job(spec.clone()).resolve().unwrap().command.unwrap().size(), 3);
        spec["servers"] = json!({ "pod": { "spec": { "containers": 7 } } });
        let problems = job(spec).resolve().unwrap_err().to_string();
        assert!(problems.contains("servers.pod"), "{problems}");
    }

    #[test]
    fn a_job_in_object_storage_needs_no_volume() {
        let mut spec = spec();
        spec["kubernetes"] = json!({});
        spec["data"]["train"] = json!("s3://b/t-*.tsv");
        spec["checkpoint"] = json!({ "dir": "s3://b/ckpt" });
        job(spec.clone()).resolve().unwrap();
        spec["output"] = json!("model/");
        let problems = job(spec).resolve().unwrap_err().to_string();
        assert!(problems.contains("spec.kubernetes.volumes"), "{problems}");
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_changes() {
        let mut status = JobStatus::default();
        status.set("Valid", true, "Checked", "", &at(1));
        status.set("Valid", true, "Checked", "again", &at(2));
        assert_eq!(status.condition("Valid").unwrap().last_transition_time, at(1));
        status.set("Valid", false, "Wrong", "", &at(3));
        assert_eq!(status.condition("Valid").unwrap().last_transition_time, at(3));
        assert_eq!(status.conditions.len(), 1);
    }
}
