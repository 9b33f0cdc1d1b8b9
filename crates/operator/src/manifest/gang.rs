//! The pods of a job that runs a person's own program.
//!
//! The program runs in the person's image; our own program, which starts it there, is brought along by an init
//! container. What the master must remember is written to the object that owns the job, so that it needs no volume.

use elasticdl_spec::command::CommandSpec;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{IMAGE, Job, Member, PodParts, finished};
use crate::error::Result;
use crate::names;

/// Where a master keeps its events; they go with its pod.
pub const STATE: &str = "/var/lib/elasticdl";
/// Where our own program is in the person's image.
const TOOLS: &str = "/elasticdl";

impl Job {
    /// The pod of a member; its id is its rank.
    pub(super) fn part(&self, command: &CommandSpec, member: &Member) -> Result<Pod> {
        let name = command.member(member.id);
        let kubernetes = &self.spec.kubernetes;
        let (pods, setting) = match CommandSpec::holds_parameters(name.role) {
            true => (&kubernetes.servers, "servers"),
            false => (&kubernetes.workers, "workers"),
        };
        let (rank, index) = (member.id.to_string(), name.index.to_string());
        let listen = format!("$(POD_IP):{}", command.port);
        let launch = member.launch.to_string();
        let parts = PodParts {
            name: &member.name,
            labels: &[
                (names::ROLE, json!(name.role)),
                (names::ID, json!(index)),
                (names::MEMBER, json!(rank)),
                (names::LAUNCH, json!(launch)),
            ],
            annotations: &[(names::MEMORY_DEATHS, json!(member.memory_deaths.to_string()))],
            args: &["member", "run", "--id", &rank, "--master", &member.master, "--listen", &listen],
            env: &[("ELASTICDL_PROCESS", json!({ "value": launch }))],
            priority: if member.high { names::PRIORITY_HIGH } else { names::PRIORITY_LOW },
            account: None,
            memory: pods.memory_after(member.memory_deaths),
        };
        let mut pod = self.draft(&parts, pods, setting);
        self.dress(&mut pod, command);
        finished(pod, pods, setting)
    }

    fn dress(&self, pod: &mut Value, command: &CommandSpec) {
        let kubernetes = &self.spec.kubernetes;
        let container = &mut pod["spec"]["containers"][0];
        container["ports"] = json!([{ "name": "program", "containerPort": command.port }]);
        if kubernetes.directory.is_none() {
            // That of the image.
            remove(container, "workingDir");
        }
        let Some(image) = &command.image else { return };
        container["image"] = json!(image);
        container["command"] = json!([format!("{TOOLS}/elasticdl")]);
        let mount = json!({ "name": "elasticdl", "mountPath": TOOLS });
        push(&mut container["volumeMounts"], mount.clone());
        let install = json!({
            "name": "elasticdl-install",
            "image": kubernetes.image.as_deref().unwrap_or(IMAGE),
            "imagePullPolicy": kubernetes.image_pull_policy,
            "args": ["member", "install", TOOLS],
            // No more than the program itself: the pod asks for the greater of the two.
            "resources": container["resources"],
            "volumeMounts": [mount],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        });
        pod["spec"]["initContainers"] = json!([install]);
        push(&mut pod["spec"]["volumes"], json!({ "name": "elasticdl", "emptyDir": {} }));
    }
}

/// The master needs none of the program's volumes, and a place for its events.
pub(super) fn dress_master(pod: &mut Value) {
    let container = &mut pod["spec"]["containers"][0];
    container["workingDir"] = json!(STATE);
    let mounts = &mut container["volumeMounts"];
    keep_first(mounts);
    push(mounts, json!({ "name": "state", "mountPath": STATE }));
    let volumes = &mut pod["spec"]["volumes"];
    keep_first(volumes);
    push(volumes, json!({ "name": "state", "emptyDir": {} }));
}

/// The secrets come first; all others are the person's.
fn keep_first(list: &mut Value) {
    if let Value::Array(items) = list {
        items.truncate(1);
    }
}

fn push(list: &mut Value, item: Value) {
    if let Value::Array(items) = list {
        items.push(item);
    }
}

fn remove(object: &mut Value, key: &str) {
    if let Value::Object(map) = object {
        map.remove(key);
    }
}
