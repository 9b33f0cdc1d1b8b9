//! From checked values to the typed job, and the rules that concern several values.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Resolver, Source, command, train};
use crate::amount;
use crate::job::{
    CheckpointSpec, DataSpec, EvaluateSpec, JobSpec, LimitsSpec, ModelSpec, SecuritySpec, ServersSpec,
    WorkersSpec, Zoo,
};
use crate::kubernetes::{Care, KubernetesSpec, RolePods};
use crate::layout::{Bucket, CategoricalField, Label, Layout, NumericField, Scale, TextStyle};

pub(super) type Values = BTreeMap<&'static str, (Value, Source)>;

/// Problems that no single value shows.
pub fn cross_check(resolver: &mut Resolver) {
    let values = resolver.values.clone();
    let number = |path| values.get(path).and_then(|(v, _)| v.as_u64());
    if let (Some(servers), Some(partitions)) = (number("servers.count"), number("servers.partitions"))
        && servers > partitions
    {
        let what = format!("{servers} servers for {partitions} partitions: some would hold nothing");
        let hint = Some(format!("at most {partitions}, or raise spec.servers.partitions"));
        resolver.problem("spec.servers.count", what, hint);
    }
    check_replicas(resolver, &values);
    check_workers(resolver, &values);
    check_limits(resolver, &values);
    check_volumes(resolver, &values);
    command::check(resolver, &values);
    if values.get("data.train").is_some_and(|(v, _)| v.as_array().is_some_and(Vec::is_empty)) {
        resolver.problem("spec.data.train", "no file is named".into(), Some("name a path or a glob".into()));
    }
    train::check(resolver, &values);
    check_layout(resolver, &values);
}

/// A backup is at another server, and takes over in the middle of whatever goes on.
fn check_replicas(resolver: &mut Resolver, values: &Values) {
    let number = |path| values.get(path).and_then(|(v, _)| v.as_u64());
    if number("servers.replicas") != Some(2) {
        return;
    }
    if number("servers.count") == Some(1) {
        let what = "2 replicas take two servers, and spec.servers.count is 1".to_string();
        resolver.problem("spec.servers.replicas", what, Some("set spec.servers.count to 2 or more".into()));
    }
    let synchronous = values.get("train.consistency").is_some_and(|(v, _)| v.as_str() == Some("synchronous"));
    if synchronous || number("train.staleness") == Some(0) {
        let how = if synchronous { "spec.train.consistency: synchronous" } else { "spec.train.staleness: 0" };
        let what = format!("{how} has no backups: a server's death takes all partitions back to one step");
        let hint = "leave it out, or train with the consistency asynchronous or hybrid";
        resolver.problem("spec.servers.replicas", what, Some(hint.into()));
    }
}

/// From `workers.min` to `workers.max`, with `workers.count` between them.
fn check_workers(resolver: &mut Resolver, values: &Values) {
    let number = |path| values.get(path).and_then(|(v, _)| v.as_u64());
    let (min, count, max) = (number("workers.min"), number("workers.count"), number("workers.max"));
    if let (Some(count), Some(max)) = (count, max)
        && count > max
    {
        let what = format!("{count} workers at the start are more than spec.workers.max: {max}");
        resolver.problem("spec.workers.count", what, Some("raise spec.workers.max".into()));
    }
    if let (Some(min), Some(count)) = (min, count)
        && count < min
    {
        let what = format!("{count} workers at the start are fewer than spec.workers.min: {min}");
        let hint = "raise it, lower spec.workers.min, or leave it out and set spec.workers.max: then as many are \
                    asked for as are of use";
        resolver.problem("spec.workers.count", what, Some(hint.into()));
    }
    if let (Some(min), Some(max)) = (min, max)
        && min > max
    {
        let what = format!("at least {min} workers are more than spec.workers.max: {max}");
        resolver.problem("spec.workers.min", what, Some("lower it, or raise spec.workers.max".into()));
    }
}

/// What a pod is allowed is at least what it asks for: Kubernetes would refuse the pod.
fn check_limits(resolver: &mut Resolver, values: &Values) {
    for (role, what) in
        ["master", "servers", "workers"].into_iter().flat_map(|role| [(role, "cpu"), (role, "memory")])
    {
        let amount = |path: &str| values.get(path).and_then(|(v, _)| v.as_str()).map(str::to_owned);
        let (path, limit_path) = (format!("{role}.{what}"), format!("{role}.{what}_limit"));
        let (Some(asked), Some(limit)) = (amount(&path), amount(&limit_path)) else { continue };
        if amount::parse(&limit) < amount::parse(&asked) {
            let told = format!("{limit} is less than spec.{path}: {asked}");
            resolver.problem(
                &format!("spec.{limit_path}"),
                told,
                Some(format!("raise it, or lower spec.{path}")),
            );
        }
    }
}

fn check_volumes(resolver: &mut Resolver, values: &Values) {
    let volumes = values.get("kubernetes.volumes").and_then(|(v, _)| v.as_array());
    for (n, volume) in volumes.into_iter().flatten().enumerate() {
        if volume.get("mountPath").and_then(Value::as_str).is_none_or(|path| !path.starts_with('/')) {
            let hint = Some("say where it is in the pods, as in mountPath: /data".into());
            let place = format!("spec.kubernetes.volumes[{n}].mountPath");
            resolver.problem(&place, "an absolute path is missing".into(), hint);
        }
    }
}

fn check_layout(resolver: &mut Resolver, values: &Values) {
    let Some(layout) = values.get("data.layout").and_then(|(v, _)| v.as_str()) else { return };
    const CUSTOM: [&str; 6] =
        ["data.columns", "data.label", "data.positive", "data.numeric", "data.scale", "data.categorical"];
    if layout != "custom" {
        for path in CUSTOM {
            if values.get(path).is_some_and(|(_, source)| *source != Source::Default) {
                let what = format!("the layout {layout} says this itself");
                let hint = Some("leave it out, or use layout: custom".into());
                resolver.problem(&format!("spec.{path}"), what, hint);
            }
        }
        if layout != "criteo" && values.contains_key("data.synth_rows") {
            let what = "synthetic data has the layout criteo".to_string();
            resolver.problem("spec.data.synth_rows", what, Some("leave it out".into()));
        }
        return;
    }
    if values.contains_key("data.synth_rows") {
        let hint = Some("leave it out, or use layout: criteo".into());
        resolver.problem("spec.data.synth_rows", "synthetic data has the layout criteo".into(), hint);
    }
    if !values.contains_key("data.label") {
        let hint = Some("with layout: custom, name the column to predict".into());
        resolver.problem("spec.data.label", "missing".into(), hint);
    }
    let columns = texts(values, "data.columns");
    let mut used = texts(values, "data.numeric");
    used.extend(texts(values, "data.categorical"));
    if used.is_empty() {
        let hint = Some("name the input columns in data.numeric and data.categorical".into());
        resolver.problem("spec.data.categorical", "the model would have no input".into(), hint);
    }
    let label: Option<String> = values.get("data.label").and_then(|(v, _)| v.as_str()).map(Into::into);
    used.extend(label);
    for column in used.iter().filter(|c| !columns.is_empty() && !columns.contains(c)) {
        let hint = super::nearest(column, columns.iter().map(String::as_str));
        resolver.problem("spec.data.columns", format!("there is no column {column:?} in it"), hint);
    }
}

/// The typed job. Every value has been checked.
pub fn job(values: &Values) -> JobSpec {
    let v = values;
    let mut job = JobSpec {
        name: get(v, "name"),
        command: command::spec(v),
        model: ModelSpec {
            // A job that runs a program of its own has no model, and nobody looks at this one.
            zoo: option::<Zoo>(v, "model.zoo").unwrap_or(Zoo::Lr),
            embedding_dim: get(v, "model.embedding_dim"),
            hidden: get(v, "model.hidden"),
        },
        data: data(v),
        train: train::spec(v),
        tables: get(v, "tables"),
        evaluate: EvaluateSpec { every: duration(v, "evaluate.every"), steps: option(v, "evaluate.steps") },
        workers: WorkersSpec {
            count: workers_count(v),
            max: get(v, "workers.max"),
            threads: get(v, "workers.threads"),
            pipeline: get(v, "workers.pipeline"),
        },
        servers: ServersSpec {
            count: get(v, "servers.count"),
            partitions: get(v, "servers.partitions"),
            replicas: get(v, "servers.replicas"),
        },
        checkpoint: CheckpointSpec {
            dir: option(v, "checkpoint.dir"),
            every: duration(v, "checkpoint.every"),
            full_every: get(v, "checkpoint.full_every"),
            keep: get(v, "checkpoint.keep"),
        },
        output: option(v, "output"),
        security: SecuritySpec { tls: get(v, "security.tls") },
        limits: LimitsSpec {
            lease: duration(v, "limits.lease").expect("it has a default"),
            orphan: duration(v, "limits.orphan").expect("it has a default"),
            silence: duration(v, "limits.silence").expect("it has a default"),
            restarts: get(v, "limits.restarts"),
        },
        kubernetes: kubernetes(v),
    };
    // Whoever counts workers counts the members of a program of its own: so many, neither fewer nor more.
    if let Some(size) = job.command.as_ref().map(|command| command.size()) {
        job.workers.count = Some(size);
        job.workers.max = size;
        job.kubernetes.workers_min = size;
    }
    job
}

/// How many workers are wanted; `None`: as many as are of use. That is only where the person has said how many
/// there may be at most: nobody is surprised by processes that he knows nothing of.
fn workers_count(v: &Values) -> Option<u32> {
    let (min, max): (u32, u32) = (get(v, "workers.min"), get(v, "workers.max"));
    let max_given = v.get("workers.max").is_some_and(|(_, source)| *source != Source::Default);
    option(v, "workers.count").or_else(|| (min == max || !max_given).then_some(min))
}

fn kubernetes(v: &Values) -> KubernetesSpec {
    let role = |role: &str| {
        let path = |key: &str| format!("{role}.{key}");
        RolePods {
            cpu: get(v, &path("cpu")),
            memory: get(v, &path("memory")),
            gpu: option(v, &path("gpu")).unwrap_or(0),
            cpu_limit: option(v, &path("cpu_limit")),
            memory_limit: option(v, &path("memory_limit")),
            memory_max: option(v, &path("memory_max")),
            pod: option(v, &path("pod")),
        }
    };
    KubernetesSpec {
        master: role("master"),
        servers: role("servers"),
        workers: role("workers"),
        workers_min: get(v, "workers.min"),
        priority: match option::<Value>(v, "workers.priority") {
            Some(Value::String(name)) if name == "high" => 1.0,
            Some(value) => value.as_f64().unwrap_or(0.0),
            None => 0.0,
        },
        namespace: option(v, "kubernetes.namespace"),
        image: option(v, "kubernetes.image"),
        image_pull_policy: get(v, "kubernetes.image_pull_policy"),
        image_pull_secrets: texts(v, "kubernetes.image_pull_secrets"),
        service_account: option(v, "kubernetes.service_account"),
        directory: option(v, "kubernetes.directory"),
        volumes: get(v, "kubernetes.volumes"),
        env: get(v, "kubernetes.env"),
        labels: get(v, "kubernetes.labels"),
        annotations: get(v, "kubernetes.annotations"),
        node_selector: get(v, "kubernetes.node_selector"),
        tolerations: get(v, "kubernetes.tolerations"),
        affinity: option(v, "kubernetes.affinity"),
        grace: duration(v, "kubernetes.grace").expect("it has a default"),
        care: Care {
            suspend: get(v, "suspend"),
            deadline: duration(v, "deadline"),
            ttl: duration(v, "ttl"),
            weight: get(v, "weight"),
        },
    }
}

fn data(v: &Values) -> DataSpec {
    DataSpec {
        train: texts(v, "data.train"),
        validate: texts(v, "data.validate"),
        layout: layout(v),
        format: option(v, "data.format"),
        synth_rows: option(v, "data.synth_rows"),
        bad_records_max: get(v, "data.bad_records_max"),
        shuffle: get(v, "data.shuffle"),
        batches_per_task: get(v, "data.batches_per_task"),
    }
}

fn layout(v: &Values) -> Layout {
    // Like the model, a placeholder where the job runs a program of its own.
    let name: String = option(v, "data.layout").unwrap_or_else(|| "criteo".into());
    let mut layout = Layout::known(&name).unwrap_or_else(|| custom_layout(v));
    if let Some(delimiter) = option(v, "data.delimiter") {
        layout.text.delimiter = delimiter;
    }
    if let Some(header) = option(v, "data.header") {
        layout.text.header = header;
    }
    if let Some(quotes) = option(v, "data.quotes") {
        layout.text.quotes = quotes;
    }
    if let Some(missing) = option(v, "data.missing") {
        layout.text.missing = missing;
    }
    layout
}

fn custom_layout(v: &Values) -> Layout {
    let columns = texts(v, "data.columns");
    let tabs = texts(v, "data.train").iter().any(|p| p.contains(".tsv"));
    let scale = if get::<String>(v, "data.scale") == "log" { Scale::Log } else { Scale::Identity };
    let number = |column| NumericField { column, scale };
    let id = |column: String| CategoricalField { name: column.clone(), column, bucket: Bucket::Value };
    Layout {
        name: "custom".into(),
        text: TextStyle {
            delimiter: if tabs { '\t' } else { ',' },
            header: columns.is_empty(),
            quotes: true,
            trim: true,
            missing: vec![],
        },
        columns,
        label: Some(Label { column: get(v, "data.label"), positive: texts(v, "data.positive") }),
        numeric: texts(v, "data.numeric").into_iter().map(number).collect(),
        categorical: texts(v, "data.categorical").into_iter().map(id).collect(),
    }
}

pub(super) fn get<T: DeserializeOwned>(values: &Values, path: &str) -> T {
    option(values, path).unwrap_or_else(|| panic!("{path} has a default or is required"))
}

pub(super) fn option<T: DeserializeOwned>(values: &Values, path: &str) -> Option<T> {
    let (value, _) = values.get(path)?;
    let typed = serde_json::from_value(value.clone());
    Some(typed.unwrap_or_else(|e| panic!("the rule of {path} let {value} through: {e}")))
}

pub(super) fn texts(values: &Values, path: &str) -> Vec<String> {
    let list = values.get(path).and_then(|(v, _)| v.as_array());
    list.into_iter().flatten().filter_map(|v| v.as_str().map(Into::into)).collect()
}

pub(super) fn duration(values: &Values, path: &str) -> Option<Duration> {
    let text: String = option(values, path)?;
    Some(humantime::parse_duration(&text).expect("the rule checked it"))
}
