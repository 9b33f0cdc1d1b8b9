//! What a job's objects look like. Pure: settings in, objects out.
//!
//! Objects are written as JSON and then read as the API's own types, so that what a person passes on (volumes,
//! tolerations, pod overrides) is checked where it is used, with the setting named.

use elasticdl_spec::kubernetes::{RolePods, SCRATCH};
use elasticdl_spec::{JobSpec, amount};
use elasticdl_wire::Identity;
use elasticdl_wire::control::Role;
use k8s_openapi::api::core::v1::{Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role as Rights, RoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::names;

mod gang;

/// Where a job's secrets are in its pods.
pub const SECRETS: &str = "/etc/elasticdl";
/// The port of the master.
pub const MASTER_PORT: u16 = 7070;
/// The port of a server.
pub const SERVER_PORT: u16 = 7071;
/// The user of the image; secrets are readable for its group.
pub const USER: i64 = 65532;
/// The image of this version, where the job names none.
pub const IMAGE: &str = concat!("elasticdl.org/elasticdl:", env!("CARGO_PKG_VERSION"));

/// What all objects of a job have in common.
#[derive(Debug, Clone)]
pub struct Job {
    /// The job.
    pub spec: JobSpec,
    /// Its namespace.
    pub namespace: String,
    /// Which run of it: names its directory.
    pub run: String,
    /// Whether checkpoints of an earlier run are to be removed.
    pub fresh: bool,
    /// No more workers than that at first, where somebody shares out the room.
    pub allowed: Option<u32>,
    /// What owns the objects.
    pub owner: Option<OwnerReference>,
}

/// A pod of a worker or server.
#[derive(Debug, Clone)]
pub struct Member {
    /// Worker or server.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Tells it apart from earlier pods of this number.
    pub launch: u32,
    /// Its name.
    pub name: String,
    /// Where the master is: host:port.
    pub master: String,
    /// Whether it is a worker with the high priority.
    pub high: bool,
    /// How often pods like it were killed for their memory.
    pub memory_deaths: u32,
}

/// What a job's secret holds.
#[derive(Debug, Clone)]
pub struct Secrets {
    /// The token.
    pub token: String,
    /// Certificate authority, certificate and key, as PEM.
    pub tls: [String; 3],
}

impl Secrets {
    /// A token and a certificate.
    pub fn of(token: &str, identity: &Identity) -> Self {
        let tls = [identity.ca_pem(), identity.cert_pem(), identity.key_pem()].map(String::from);
        Secrets { token: token.into(), tls }
    }
}

/// The files of an identity, in the order of [`Secrets::tls`].
pub const TLS_FILES: [&str; 3] = ["ca.pem", "cert.pem", "key.pem"];

impl Job {
    /// The directory of the job's events and, where they are not in object storage, of its checkpoints and ledger:
    /// on a volume, or without one the pod's own.
    pub fn directory(&self) -> String {
        if self.spec.command.is_some() {
            return gang::STATE.into();
        }
        let base = self.spec.kubernetes.directory().trim_end_matches('/');
        format!("{base}/.elasticdl/{}.{}/{}", self.namespace, self.spec.name, self.run)
    }

    /// A pod of a worker or server, or of a member of a person's own program.
    pub fn member(&self, member: &Member) -> Result<Pod> {
        if let Some(command) = &self.spec.command {
            return self.part(command, member);
        }
        let (pods, command, setting) = match member.role {
            Role::Worker => (&self.spec.kubernetes.workers, "worker", "workers"),
            Role::Server => (&self.spec.kubernetes.servers, "ps", "servers"),
        };
        let priority = match (member.role, member.high) {
            (Role::Server, _) => names::PRIORITY_SERVER,
            (Role::Worker, true) => names::PRIORITY_HIGH,
            (Role::Worker, false) => names::PRIORITY_LOW,
        };
        let id = member.id.to_string();
        let mut args = vec![command, "--id", &id, "--master", &member.master];
        let listen = format!("$(POD_IP):{SERVER_PORT}");
        if member.role == Role::Server {
            args.extend(["--listen", &listen]);
        }
        let labels = [
            (names::ROLE, json!(names::role(member.role))),
            (names::ID, json!(id)),
            (names::LAUNCH, json!(member.launch.to_string())),
        ];
        let pod = PodParts {
            name: &member.name,
            labels: &labels,
            annotations: &[(names::MEMORY_DEATHS, json!(member.memory_deaths.to_string()))],
            args: &args,
            env: &[("ELASTICDL_PROCESS", json!({"value": member.launch.to_string()}))],
            priority,
            account: None,
            memory: pods.memory_after(member.memory_deaths),
        };
        self.pod(&pod, pods, setting)
    }

    /// The pod of a master: the `attempt`-th of the job.
    pub fn master(&self, attempt: u32) -> Result<Pod> {
        let pods = &self.spec.kubernetes.master;
        let name = names::attempt(&names::master(&self.spec.name), attempt);
        // Everywhere: a tunnel through the API server comes in at the pod's own loopback address.
        let (dir, listen) = (self.directory(), format!("0.0.0.0:{MASTER_PORT}"));
        let mut args = vec!["master", "--on", "kubernetes", "--job-dir", &dir, "--listen", &listen];
        if self.fresh {
            args.push("--fresh");
        }
        let allowed = self.allowed.map(|workers| workers.to_string());
        if let Some(workers) = &allowed {
            args.extend(["--workers-allowed", workers]);
        }
        let anchor = names::anchor(&self.spec.name);
        let account = self.spec.kubernetes.service_account.as_deref().unwrap_or(&anchor);
        let pod = PodParts {
            name: &name,
            labels: &[(names::ROLE, json!("master")), (names::LAUNCH, json!(attempt.to_string()))],
            annotations: &[],
            args: &args,
            env: &[
                ("POD_NAMESPACE", field("metadata.namespace")),
                ("POD_NAME", field("metadata.name")),
                ("POD_UID", field("metadata.uid")),
            ],
            priority: names::PRIORITY_MASTER,
            account: Some(account),
            memory: pods.memory_after(0),
        };
        let mut pod = self.draft(&pod, pods, "master");
        if self.spec.command.is_some() {
            gang::dress_master(&mut pod);
        }
        finished(pod, pods, "master")
    }

    /// A pod that does one thing with the job's volumes and ends.
    pub fn errand(&self, name: &str, args: &[&str]) -> Result<Pod> {
        let pods = &self.spec.kubernetes.master;
        let pod = PodParts {
            name,
            labels: &[(names::ROLE, json!("errand"))],
            annotations: &[],
            args,
            env: &[],
            priority: names::PRIORITY_MASTER,
            account: None,
            memory: pods.memory_after(0),
        };
        self.pod(&pod, pods, "master")
    }

    /// What leads to the master, whichever pod that is.
    pub fn service(&self) -> Service {
        let name = names::master(&self.spec.name);
        known(json!({
            "metadata": self.metadata(&name, &[], &[]),
            "spec": {
                "selector": { names::JOB: self.spec.name, names::ROLE: "master" },
                "ports": [{ "name": "master", "port": MASTER_PORT, "targetPort": MASTER_PORT }],
            },
        }))
    }

    /// The object that owns all others: the job, its token and its identity.
    pub fn secret(&self, secrets: &Secrets) -> Secret {
        let spec = serde_json::to_string(&self.spec).expect("a job is JSON");
        let mut data = json!({ "job.json": spec, "run": self.run, "token": secrets.token });
        for (file, text) in TLS_FILES.iter().zip(&secrets.tls) {
            data[*file] = json!(text);
        }
        known(json!({
            "metadata": self.metadata(&names::anchor(&self.spec.name), &[], &[]),
            "type": "elasticdl.org/job",
            "stringData": data,
        }))
    }

    /// The master's account, with the least rights that do: pods of its namespace, and events.
    pub fn account(&self) -> (ServiceAccount, Rights, RoleBinding) {
        let name = names::anchor(&self.spec.name);
        let metadata = self.metadata(&name, &[], &[]);
        // A job without a volume keeps there what its next master must know.
        let secret = if self.spec.command.is_some() { &["get", "patch"][..] } else { &["get"] };
        let rights = json!({ "metadata": metadata, "rules": [
            { "apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "list", "watch"] },
            { "apiGroups": [""], "resources": ["services"], "verbs": ["get"], "resourceNames": [names::master(&self.spec.name)] },
            { "apiGroups": [""], "resources": ["secrets"], "verbs": secret, "resourceNames": [name] },
            { "apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"] },
        ]});
        let binding = json!({
            "metadata": metadata,
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": self.namespace }],
        });
        (known(json!({ "metadata": metadata })), known(rights), known(binding))
    }

    fn metadata(&self, name: &str, labels: &[(&str, Value)], annotations: &[(&str, Value)]) -> Value {
        let own = [
            ("app.kubernetes.io/name", json!("elasticdl")),
            ("app.kubernetes.io/instance", json!(self.spec.name)),
            ("app.kubernetes.io/managed-by", json!(names::MANAGER)),
            (names::JOB, json!(self.spec.name)),
        ];
        let of = |given: &[(&str, Value)]| -> Map<String, Value> {
            given.iter().map(|(key, value)| (key.to_string(), value.clone())).collect()
        };
        let mut all = of(&own);
        all.extend(of(labels));
        json!({
            "name": name,
            "namespace": self.namespace,
            "labels": all,
            "annotations": of(annotations),
            "ownerReferences": self.owner.iter().collect::<Vec<_>>(),
        })
    }

    fn pod(&self, parts: &PodParts<'_>, pods: &RolePods, setting: &str) -> Result<Pod> {
        finished(self.draft(parts, pods, setting), pods, setting)
    }

    /// A pod before the person's own words are laid over it.
    fn draft(&self, parts: &PodParts<'_>, pods: &RolePods, setting: &str) -> Value {
        let spec = &self.spec.kubernetes;
        let (volumes, mounts) = self.volumes();
        let resources = resources(pods, parts.memory, setting);
        let mut container = json!({
            "name": names::CONTAINER,
            "image": spec.image.as_deref().unwrap_or(IMAGE),
            "imagePullPolicy": spec.image_pull_policy,
            "args": parts.args,
            "env": self.env(parts.env),
            "resources": resources,
            "volumeMounts": mounts,
            "workingDir": spec.directory(),
            // The last lines of a pod that fails come with its status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        });
        if parts.labels.iter().any(|(_, role)| *role == "master") {
            container["ports"] = json!([{ "name": "master", "containerPort": MASTER_PORT }]);
        }
        let mut pod = json!({
            "metadata": self.metadata(parts.name, parts.labels, parts.annotations),
            "spec": {
                "restartPolicy": "Never",
                "containers": [container],
                "volumes": volumes,
                "priorityClassName": parts.priority,
                "terminationGracePeriodSeconds": spec.grace.as_secs().max(1),
                "automountServiceAccountToken": parts.account.is_some(),
                "securityContext": { "fsGroup": USER },
                "enableServiceLinks": false,
            },
        });
        if let Some(account) = parts.account {
            pod["spec"]["serviceAccountName"] = json!(account);
        }
        self.placement(&mut pod);
        for (key, pairs) in [("labels", &spec.labels), ("annotations", &spec.annotations)] {
            for (name, value) in pairs {
                pod["metadata"][key][name] = json!(value);
            }
        }
        pod
    }

    fn env(&self, own: &[(&str, Value)]) -> Vec<Value> {
        let file = |name: &str| json!({ "value": format!("{SECRETS}/{name}") });
        let standing = [
            ("POD_IP", field("status.podIP")),
            ("ELASTICDL_TOKEN_FILE", file("token")),
            ("ELASTICDL_TLS_DIR", json!({ "value": SECRETS })),
        ];
        let mut env: Vec<Value> = Vec::new();
        let mut add = |name: &str, value: &Value| {
            let mut entry = value.clone();
            entry["name"] = json!(name);
            env.push(entry);
        };
        standing.iter().chain(own).for_each(|(name, value)| add(name, value));
        self.spec.kubernetes.env.iter().for_each(|(name, value)| add(name, &json!({ "value": value })));
        env
    }

    /// The job's volumes and where they are mounted, its secrets first. A job in object storage needs none; its
    /// pods get a place for what they can make again.
    fn volumes(&self) -> (Vec<Value>, Vec<Value>) {
        let secret = names::anchor(&self.spec.name);
        let mut volumes =
            vec![json!({ "name": "job", "secret": { "secretName": secret, "defaultMode": 0o440 } })];
        let mut mounts = vec![json!({ "name": "job", "mountPath": SECRETS, "readOnly": true })];
        if self.spec.kubernetes.volumes.is_empty() && self.spec.command.is_none() {
            volumes.push(json!({ "name": "scratch", "emptyDir": {} }));
            mounts.push(json!({ "name": "scratch", "mountPath": SCRATCH }));
        }
        for (n, given) in self.spec.kubernetes.volumes.iter().enumerate() {
            let (mut volume, mut mount) = (Map::new(), Map::new());
            for (key, value) in given {
                let place = match key.as_str() {
                    "mountPath" | "readOnly" | "subPath" => &mut mount,
                    _ => &mut volume,
                };
                place.insert(key.clone(), value.clone());
            }
            let name = volume.entry("name").or_insert_with(|| json!(format!("volume-{n}"))).clone();
            mount.insert("name".into(), name);
            volumes.push(volume.into());
            mounts.push(mount.into());
        }
        (volumes, mounts)
    }

    fn placement(&self, pod: &mut Value) {
        let spec = &self.spec.kubernetes;
        let secrets: Vec<Value> =
            spec.image_pull_secrets.iter().map(|name| json!({ "name": name })).collect();
        let given = [
            ("nodeSelector", json!(spec.node_selector)),
            ("tolerations", json!(spec.tolerations)),
            ("imagePullSecrets", json!(secrets)),
            ("affinity", spec.affinity.clone().unwrap_or_default()),
        ];
        for (key, value) in given {
            let empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
            if !empty && value.as_object().is_none_or(|map| !map.is_empty()) {
                pod["spec"][key] = value;
            }
        }
    }
}

/// The priority classes of jobs: masters and servers displace workers, and low workers give way to everything that
/// has no class of its own.
pub fn priorities() -> Vec<PriorityClass> {
    const CLASSES: [(&str, i32, &str); 4] = [
        (names::PRIORITY_MASTER, 1_000_200, "Masters of training jobs."),
        (names::PRIORITY_SERVER, 1_000_100, "Parameter servers of training jobs."),
        (names::PRIORITY_HIGH, 1_000_000, "Workers of training jobs with workers.priority: high."),
        (names::PRIORITY_LOW, -1_000, "Workers of training jobs; they give way to online services."),
    ];
    let class = |(name, value, description): (&str, i32, &str)| {
        known(json!({ "metadata": { "name": name }, "value": value, "description": description }))
    };
    CLASSES.into_iter().map(class).collect()
}

/// A pod with the person's own words laid over it.
fn finished(mut pod: Value, pods: &RolePods, setting: &str) -> Result<Pod> {
    if let Some(over) = &pods.pod {
        lay_over(&mut pod, over);
    }
    let wrong =
        |source| Error::Manifest { what: format!("{setting}.pod or kubernetes"), kind: "pod", source };
    serde_json::from_value(pod).map_err(wrong)
}

/// What differs between the pods of a job.
struct PodParts<'a> {
    name: &'a str,
    labels: &'a [(&'a str, Value)],
    annotations: &'a [(&'a str, Value)],
    args: &'a [&'a str],
    env: &'a [(&'a str, Value)],
    priority: &'a str,
    account: Option<&'a str>,
    memory: u64,
}

fn field(path: &str) -> Value {
    json!({ "valueFrom": { "fieldRef": { "fieldPath": path } } })
}

fn resources(pods: &RolePods, memory: u64, setting: &str) -> Value {
    let memory_text = amount::bytes(memory);
    let mut requests = json!({ "cpu": pods.cpu, "memory": memory_text });
    let mut limits = json!({});
    if let Some(cpu) = &pods.cpu_limit {
        limits["cpu"] = json!(cpu);
    }
    match &pods.memory_limit {
        // A limit that was said grows with what is asked for.
        Some(limit) => {
            let said = amount::whole(limit).unwrap_or(memory);
            limits["memory"] = json!(amount::bytes(said.max(memory)));
        }
        None if setting != "master" => limits["memory"] = json!(memory_text),
        None => {}
    }
    if pods.gpu > 0 {
        requests["nvidia.com/gpu"] = json!(pods.gpu.to_string());
        limits["nvidia.com/gpu"] = json!(pods.gpu.to_string());
    }
    json!({ "requests": requests, "limits": limits })
}

/// Lays a person's own words over a pod: mappings are merged, lists of things with a name are merged by name,
/// all else is replaced.
fn lay_over(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                lay_over(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(base), Value::Array(over)) if over.iter().all(|item| item.get("name").is_some()) => {
            for item in over {
                match base.iter_mut().find(|known| known.get("name") == item.get("name")) {
                    Some(known) => lay_over(known, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

/// An object of our own making.
fn known<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("our own objects are what Kubernetes knows")
}

#[cfg(test)]
mod tests;
