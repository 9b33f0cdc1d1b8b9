//! What a cluster needs to run the operator, as files for `kubectl apply -k`. Pure.

use serde_json::{Value, json};

use crate::resource::{GROUP, PLURAL};
use crate::{crd, lease, manifest, names};

/// The namespace of the operator.
pub const NAMESPACE: &str = "elasticdl";
/// Its account, its deployment.
const NAME: &str = "elasticdl-operator";

/// The files: their names and what is in them, ready to be written.
pub fn files() -> Vec<(&'static str, String)> {
    let priorities = manifest::priorities().into_iter().map(|class| {
        let mut value = serde_json::to_value(class).expect("objects are JSON");
        value["apiVersion"] = json!("scheduling.k8s.io/v1");
        value["kind"] = json!("PriorityClass");
        value
    });
    let files: [(&str, Vec<Value>); 4] = [
        ("crd.yaml", vec![crd::definition()]),
        ("rbac.yaml", rights()),
        ("deployment.yaml", vec![deployment()]),
        ("priorities.yaml", priorities.collect()),
    ];
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": files.iter().map(|(name, _)| name).collect::<Vec<_>>(),
    });
    let mut texts: Vec<(&str, String)> = files.iter().map(|(name, objects)| (*name, yaml(objects))).collect();
    texts.push(("kustomization.yaml", yaml(&[kustomization])));
    texts
}

/// All objects as one file, for `kubectl apply -f -`.
pub fn all() -> String {
    let objects = files().into_iter().filter(|(name, _)| *name != "kustomization.yaml");
    objects.map(|(_, text)| text).collect::<Vec<_>>().join("---\n")
}

/// Objects as YAML, one after the other.
pub fn yaml(objects: &[Value]) -> String {
    let one = |object: &Value| serde_norway::to_string(object).expect("JSON can be written as YAML");
    objects.iter().map(one).collect::<Vec<_>>().join("---\n")
}

/// The namespace, the account and its rights: no more than the controller and the masters' accounts that it
/// makes need. Nobody can give rights that they do not have, so those of masters are among them.
fn rights() -> Vec<Value> {
    let rule = |group: &str, resources: &[&str], verbs: &[&str]| json!({ "apiGroups": [group], "resources": resources, "verbs": verbs });
    let rules = [
        rule(GROUP, &[PLURAL], &["get", "list", "watch", "patch", "delete"]),
        rule(GROUP, &["elasticjobs/status"], &["patch"]),
        // To own the Secret in a way that holds the resource back until the Secret is gone.
        rule(GROUP, &["elasticjobs/finalizers"], &["update"]),
        rule("", &["pods"], &["create", "delete", "list", "watch"]),
        // To know how much room there is to share out.
        rule("", &["nodes"], &["list", "watch"]),
        rule("", &["secrets"], &["get", "create", "patch"]),
        // To be the controller of what the Secret owns.
        rule("", &["secrets/finalizers"], &["update"]),
        rule("", &["services", "serviceaccounts"], &["get", "create", "patch"]),
        rule("rbac.authorization.k8s.io", &["roles", "rolebindings"], &["get", "create", "patch"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        rule("scheduling.k8s.io", &["priorityclasses"], &["get"]),
    ];
    let lease_rules = [
        json!({ "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"] }),
        json!({ "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [lease::NAME], "verbs": ["get", "update"] }),
    ];
    let metadata = labelled(json!({ "name": NAME, "namespace": NAMESPACE }));
    let subjects = json!([{ "kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE }]);
    let reference =
        |kind: &str| json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": NAME });
    let rbac = "rbac.authorization.k8s.io/v1";
    vec![
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": labelled(json!({ "name": NAMESPACE })) }),
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata }),
        json!({ "apiVersion": rbac, "kind": "ClusterRole", "metadata": labelled(json!({ "name": NAME })), "rules": rules }),
        json!({ "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": labelled(json!({ "name": NAME })), "roleRef": reference("ClusterRole"), "subjects": subjects }),
        json!({ "apiVersion": rbac, "kind": "Role", "metadata": metadata, "rules": lease_rules }),
        json!({ "apiVersion": rbac, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference("Role"), "subjects": subjects }),
    ]
}

fn deployment() -> Value {
    let labels = json!({ "app.kubernetes.io/name": NAME });
    let field = |path: &str| json!({ "fieldRef": { "fieldPath": path } });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": labelled(json!({ "name": NAME, "namespace": NAMESPACE })),
        "spec": {
            "replicas": 2,
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "serviceAccountName": NAME,
                    "priorityClassName": names::PRIORITY_MASTER,
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": manifest::USER,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "containers": [{
                        "name": "operator",
                        "image": manifest::IMAGE,
                        "args": ["operator", "--namespace", "all", "--leader-elect"],
                        "env": [
                            { "name": "POD_NAME", "valueFrom": field("metadata.name") },
                            { "name": "POD_NAMESPACE", "valueFrom": field("metadata.namespace") },
                        ],
                        "resources": {
                            "requests": { "cpu": "50m", "memory": "64Mi" },
                            "limits": { "memory": "256Mi" },
                        },
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": { "drop": ["ALL"] },
                        },
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                    }],
                },
            },
        },
    })
}

fn labelled(mut metadata: Value) -> Value {
    metadata["labels"] =
        json!({ "app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "kustomize" });
    metadata
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_files_in_the_repository_are_up_to_date() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/operator");
        for (name, text) in files() {
            let there = fs::read_to_string(dir.join(name)).unwrap_or_default();
            assert!(there == text, "{name} is stale: elasticdl operator crd --out deploy/operator");
        }
        let known: Vec<&str> = files().into_iter().map(|(name, _)| name).collect();
        for entry in fs::read_dir(dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(known.contains(&name.as_str()), "{name} is made by nobody");
        }
    }

    #[test]
    fn the_operator_has_the_rights_that_it_gives_to_masters() {
        let own = rights();
        let rules = own[2]["rules"].as_array().unwrap();
        let may = |group: &str, resource: &str, verb: &str| {
            let has = |list: &Value, item: &str| list.as_array().unwrap().iter().any(|known| known == item);
            rules.iter().any(|r| {
                has(&r["apiGroups"], group) && has(&r["resources"], resource) && has(&r["verbs"], verb)
            })
        };
        for verb in ["create", "delete", "list", "watch"] {
            assert!(may("", "pods", verb));
        }
        assert!(may("", "services", "get") && may("", "secrets", "get"));
        assert!(may("events.k8s.io", "events", "create") && may("events.k8s.io", "events", "patch"));
        assert!(!may("", "secrets", "list"), "it reads the secrets of its jobs, one by one");
    }
}
