//! The definition of the custom resource. Pure: the schema of `spec` comes from the table of settings.
//!
//! Unknown keys are kept at every level of `spec`. The API server would drop them otherwise, in silence where
//! `kubectl` does not check: a typo would train with the default. Kept, they reach the operator, which refuses
//! the job and names the nearest key. Values that may be written in several ways (a text or a list of them, an
//! amount as a number or a text) have no type here for the same reason; the operator checks them.

use elasticdl_spec::resolve::KIND;
use elasticdl_spec::settings::{Fallback, Rule, SETTINGS, Setting, find};
use serde_json::{Map, Value, json};

use crate::resource::{GROUP, PLURAL, Phase, VERSION};

/// Whatever is said here is what the job's ledger and checkpoints are made of.
const FIXED: [&str; 4] = ["model", "data", "train", "command"];

/// The definition.
pub fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{PLURAL}.{GROUP}") },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": format!("{KIND}List"),
                "plural": PLURAL,
                "singular": "elasticjob",
                "shortNames": ["ej"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.workers.count",
                        "statusReplicasPath": ".status.workers",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "additionalPrinterColumns": columns(),
                "schema": { "openAPIV3Schema": schema() },
            }],
        },
    })
}

fn columns() -> Value {
    let column =
        |name: &str, type_: &str, path: &str| json!({ "name": name, "type": type_, "jsonPath": path });
    json!([
        column("Phase", "string", ".status.phase"),
        column("Progress", "string", ".status.progress"),
        column("Workers", "integer", ".status.workers"),
        column("AUC", "string", ".status.auc"),
        column("Age", "date", ".metadata.creationTimestamp"),
    ])
}

fn schema() -> Value {
    json!({
        "description": "A training job: the file that `elasticdl train` takes.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "spec": spec(),
            "status": status(),
        },
        "x-kubernetes-validations": [{
            "rule": "self.metadata.name.size() <= 50 && !self.metadata.name.contains('.')",
            "message": "metadata.name takes lower-case letters, digits and dashes, at most 50: names of pods are made of it",
        }],
    })
}

/// The schema of `spec`, out of the settings.
fn spec() -> Value {
    let mut root = section("What is to be trained, on what, by how many.");
    for setting in SETTINGS.iter().filter(|setting| setting.path != "name") {
        insert(&mut root, setting);
    }
    let sections = FIXED.map(|name| {
        let rule = format!("has(self.{name}) == has(oldSelf.{name})");
        json!({ "rule": rule, "message": fixed(name) })
    });
    let partitions = |it: &str| format!("(has({it}.servers) && has({it}.servers.partitions))");
    let mut rules = sections.to_vec();
    rules.push(json!({
        "rule": "has(self.command) || (has(self.model) && has(self.data))",
        "message": "model and data are missing; or command, to run a program of your own",
    }));
    rules.push(json!({
        "rule": format!("{} == {}", partitions("self"), partitions("oldSelf")),
        "message": fixed("servers.partitions"),
    }));
    root["x-kubernetes-validations"] = json!(rules);
    for name in FIXED {
        root["properties"][name]["x-kubernetes-validations"] =
            json!([{ "rule": "self == oldSelf", "message": fixed(name) }]);
    }
    root["properties"]["servers"]["properties"]["partitions"]["x-kubernetes-validations"] =
        json!([{ "rule": "self == oldSelf", "message": fixed("servers.partitions") }]);
    let workers = &mut root["properties"]["workers"];
    let max = default("workers.max").expect("it has a default");
    let at_most = |key: &str| {
        let rule = format!("!has(self.{key}) || self.{key} <= (has(self.max) ? self.max : {max})");
        json!({ "rule": rule, "message": format!("workers.{key} is more than workers.max") })
    };
    workers["x-kubernetes-validations"] = json!([at_most("min"), at_most("count")]);
    // `kubectl scale` needs a number to start from, so a default of this one is written into the object.
    if let Some(count) = default("workers.count").and_then(|text| text.parse::<u64>().ok()) {
        workers["default"] = json!({});
        workers["properties"]["count"]["default"] = json!(count);
    }
    root
}

fn fixed(name: &str) -> String {
    let why = if name == "command" { "" } else { ": its checkpoints are made of it" };
    format!("{name} cannot change while the job is there{why}; make a job of another name")
}

fn default(path: &str) -> Option<&'static str> {
    match find(path)?.default {
        Fallback::Value(text) => Some(text),
        Fallback::Required | Fallback::RequiredToTrain | Fallback::Unset => None,
    }
}

/// Puts a setting where its path says.
fn insert(root: &mut Value, setting: &Setting) {
    let mut place = root;
    let mut keys: Vec<&str> = setting.path.split('.').collect();
    let last = keys.pop().expect("a path has a part");
    let (mut whole, required) = match setting.default {
        Fallback::Required => (true, true),
        // Within its section: a job that runs a program of its own has no such section.
        Fallback::RequiredToTrain => (false, true),
        Fallback::Unset | Fallback::Value(_) => (false, false),
    };
    for key in keys {
        if std::mem::replace(&mut whole, required) {
            require(place, key);
        }
        let sections = place["properties"].as_object_mut().expect("a section has properties");
        place = sections.entry(key).or_insert_with(|| section(&format!("Settings of {key}.")));
    }
    if required {
        require(place, last);
    }
    place["properties"][last] = field(setting);
}

fn require(section: &mut Value, key: &str) {
    let section = section.as_object_mut().expect("a section is a mapping");
    let required = section.entry("required").or_insert_with(|| json!([]));
    let required = required.as_array_mut().expect("a list of names");
    if !required.iter().any(|known| known == key) {
        required.push(json!(key));
    }
}

fn section(description: &str) -> Value {
    json!({
        "type": "object",
        "description": description,
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {},
    })
}

fn field(setting: &Setting) -> Value {
    let mut field = kind(setting.rule);
    let default = match setting.default {
        Fallback::Value(text) => format!(" Default: {text}."),
        Fallback::Required | Fallback::RequiredToTrain | Fallback::Unset => String::new(),
    };
    field.insert("description".into(), json!(format!("{}{default}", setting.help)));
    field.into()
}

/// What the API server checks of a rule.
fn kind(rule: Rule) -> Map<String, Value> {
    let kind = match rule {
        Rule::Name | Rule::Duration | Rule::Character => json!({ "type": "string" }),
        Rule::OneOf(names) => json!({ "type": "string", "enum": names }),
        Rule::Flag => json!({ "type": "boolean" }),
        Rule::Count { min, max: u64::MAX } => json!({ "type": "integer", "format": "int64", "minimum": min }),
        Rule::Count { min, max } => {
            json!({ "type": "integer", "format": "int64", "minimum": min, "maximum": max })
        }
        Rule::Counts => {
            json!({ "type": "array", "items": { "type": "integer", "format": "int64", "minimum": 1 } })
        }
        Rule::Mapping | Rule::Pairs | Rule::Tally => {
            json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
        }
        Rule::Mappings => json!({
            "type": "array",
            "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
        }),
        // Numbers that YAML takes for texts (1e-8), texts that it takes for numbers, one or a list of them.
        Rule::Text
        | Rule::Texts
        | Rule::Amount
        | Rule::Memory
        | Rule::Priority
        | Rule::Positive
        | Rule::Fraction
        | Rule::NotNegative => json!({ "x-kubernetes-preserve-unknown-fields": true }),
    };
    match kind {
        Value::Object(kind) => kind,
        _ => unreachable!("all of them are mappings"),
    }
}

fn status() -> Value {
    let text = |description: &str| json!({ "type": "string", "description": description });
    let number =
        |description: &str| json!({ "type": "integer", "format": "int64", "description": description });
    let time =
        |description: &str| json!({ "type": "string", "format": "date-time", "description": description });
    let phases: Vec<Value> = Phase::ALL.iter().map(|phase| json!(phase)).collect();
    json!({
        "description": "What is known of the job.",
        "type": "object",
        "properties": {
            "phase": { "type": "string", "enum": phases, "description": "Where the job is." },
            "progress": text("How much of it is done."),
            "records": number("Records trained."),
            "epoch": number("The epoch being trained, from 1."),
            "workers": number("Workers that run."),
            "workersGranted": number("Workers that it may have: no more are started."),
            "auc": text("AUC of the last evaluation."),
            "logloss": text("Logloss of the last evaluation."),
            "error": text("Why the job failed, or does not begin."),
            "selector": text("Selects the pods of the workers."),
            "observedGeneration": number("The generation of the resource that this is about."),
            "startTime": time("When the job began, or was last resumed."),
            "completionTime": time("When it was over."),
            "stoppingSince": time("Since when it is being stopped."),
            "restarts": number("How often a master died and another was started."),
            "restartsInRow": number("How many of those in a row, without a record done in between."),
            "restartRecords": number("Records that were done when a master was last started again."),
            "restartTime": time("When that was."),
            "conditions": {
                "type": "array",
                "description": "Valid, Admitted, Running, Suspended, Complete, Failed.",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": {
                    "type": "object",
                    "required": ["type", "status", "reason", "lastTransitionTime"],
                    "properties": {
                        "type": { "type": "string" },
                        "status": { "type": "string", "enum": ["True", "False"] },
                        "reason": { "type": "string" },
                        "message": { "type": "string" },
                        "lastTransitionTime": { "type": "string", "format": "date-time" },
                    },
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

    use super::*;

    #[test]
    fn the_definition_is_what_kubernetes_knows() {
        let definition: CustomResourceDefinition = serde_json::from_value(definition()).unwrap();
        assert_eq!(definition.metadata.name.as_deref(), Some("elasticjobs.elasticdl.org"));
    }

    #[test]
    fn every_setting_has_a_place_and_every_level_keeps_unknown_keys() {
        let spec = spec();
        for setting in SETTINGS.iter().filter(|setting| setting.path != "name") {
            let mut place = &spec;
            for key in setting.path.split('.') {
                assert_eq!(place["x-kubernetes-preserve-unknown-fields"], true, "{}", setting.path);
                place = &place["properties"][key];
            }
            assert!(place["description"].as_str().unwrap().starts_with(setting.help), "{}", setting.path);
        }
        assert_eq!(spec["required"], Value::Null, "a rule says that it is these or a command");
        assert_eq!(spec["properties"]["data"]["required"], json!(["train", "layout"]));
    }

    #[test]
    fn rules_become_types() {
        let spec = spec();
        let workers = &spec["properties"]["workers"];
        assert_eq!(workers["properties"]["max"]["maximum"], 1024);
        assert_eq!(
            workers["x-kubernetes-validations"][0]["rule"],
            "!has(self.min) || self.min <= (has(self.max) ? self.max : 16)"
        );
        assert_eq!(spec["properties"]["suspend"]["type"], "boolean");
        assert_eq!(
            spec["properties"]["train"]["properties"]["batch"]["description"],
            "Records in a batch. Default: 4096."
        );
    }
}
