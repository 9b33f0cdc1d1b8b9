//! `command.*`: the rules that concern several of its values, and the typed result.

use serde_json::Value;

use super::build::{Values, duration, get, option, texts};
use super::{Resolver, Source, nearest};
use crate::command::{CommandSpec, Framework, Policy, RestartSpec, RoleSpec, Scope, Success};

/// The order of ranks: who is asked for first by the others comes first. Other roles follow by name.
const ORDER: [&str; 6] = ["chief", "scheduler", "ps", "server", "worker", "evaluator"];
/// Names that objects of the job itself have.
const RESERVED: [&str; 2] = ["master", "errand"];
/// What is remembered of so many members still fits into an annotation.
const SIZE_MAX: u64 = 1024;
/// What only a job of ours has, and what its workers have.
const TRAINING: [&str; 15] = [
    "model.",
    "data.",
    "train.",
    "tables",
    "evaluate.",
    "checkpoint.",
    "output",
    "servers.count",
    "servers.partitions",
    "servers.replicas",
    "workers.count",
    "workers.max",
    "workers.min",
    "workers.threads",
    "workers.pipeline",
];

/// Problems that no single value shows.
pub fn check(resolver: &mut Resolver, values: &Values) {
    let said = |path: &str| values.get(path).is_some_and(|(_, source)| *source != Source::Default);
    if !said("command.run") {
        if let Some((path, _)) = values.iter().find(|(path, _)| path.starts_with("command.") && said(path)) {
            let what = format!("missing beside spec.{path}");
            let hint = Some("name the program and its arguments, as in [python, train.py]".into());
            resolver.problem("spec.command.run", what, hint);
        }
        return;
    }
    for path in values.keys().filter(|path| TRAINING.iter().any(|part| path.starts_with(part)) && said(path))
    {
        let what = "a job with spec.command has none: its program says this itself".to_string();
        let hint = match *path {
            "workers.count" | "workers.max" => "leave it out; spec.command.roles says how many there are",
            _ => "leave it out, or leave spec.command out",
        };
        resolver.problem(&format!("spec.{path}"), what, Some(hint.into()));
    }
    check_run(resolver, &texts(values, "command.run"));
    check_roles(resolver, values);
}

fn check_run(resolver: &mut Resolver, run: &[String]) {
    match run {
        [] => {
            let hint = Some("name the program and its arguments, as in [python, train.py]".into());
            resolver.problem("spec.command.run", "no program is named".into(), hint);
        }
        [line] if line.contains(char::is_whitespace) => {
            let words: Vec<&str> = line.split_whitespace().collect();
            let hint = format!("write it as a list, as in [{}]; or as [sh, -c, {line:?}]", words.join(", "));
            resolver.problem("spec.command.run", "a program has no blanks in its name".into(), Some(hint));
        }
        _ => {}
    }
}

/// Which roles there may be, and how many of each.
fn check_roles(resolver: &mut Resolver, values: &Values) {
    const PLACE: &str = "spec.command.roles";
    let Some(roles) = values.get("command.roles").and_then(|(v, _)| v.as_object()) else { return };
    let count = |role: &str| roles.get(role).and_then(Value::as_u64).unwrap_or(0);
    let framework = values.get("command.framework").and_then(|(v, _)| v.as_str()).unwrap_or("none");
    let known: &[&str] = match framework {
        "tensorflow" => &["chief", "worker", "ps", "evaluator"],
        "torch" => &["worker"],
        "dmlc" => &["scheduler", "server", "worker"],
        _ => &[],
    };
    for role in roles.keys() {
        if RESERVED.contains(&role.as_str()) {
            let hint = Some("give it another name; the chief of a tensorflow job is its chief".into());
            resolver.problem(PLACE, format!("{role:?} is a name of our own"), hint);
        } else if !known.is_empty() && !known.contains(&role.as_str()) {
            let hint = nearest(role, known.iter().copied())
                .unwrap_or_else(|| format!("roles of {framework}: {}", known.join(", ")));
            resolver.problem(PLACE, format!("{framework} has no role {role:?}"), Some(hint));
        }
    }
    let wanted: &[(&str, u64, u64)] = match framework {
        "tensorflow" => &[("chief", 0, 1), ("evaluator", 0, 1)],
        "dmlc" => &[("scheduler", 1, 1), ("server", 1, SIZE_MAX), ("worker", 1, SIZE_MAX)],
        "torch" => &[("worker", 1, SIZE_MAX)],
        _ => &[],
    };
    for (role, min, max) in wanted {
        if !(*min..=*max).contains(&count(role)) {
            let much = if min == max { format!("exactly {min}") } else { format!("{min} to {max}") };
            let what = format!("{framework} takes {much} of {role}, and there are {}", count(role));
            resolver.problem(PLACE, what, None);
        }
    }
    if framework == "tensorflow" && count("chief") + count("worker") == 0 {
        let what = "neither a chief nor a worker: nobody would train".to_string();
        resolver.problem(PLACE, what, Some("as in { chief: 1, worker: 3 }".into()));
    }
    let size: u64 = roles.values().filter_map(Value::as_u64).fold(0, u64::saturating_add);
    if size == 0 || size > SIZE_MAX {
        let what = format!("{size} in all; there are from 1 to {SIZE_MAX}");
        resolver.problem(PLACE, what, None);
    }
    let deciding = match values.get("command.success").and_then(|(v, _)| v.as_str()) {
        Some("chief") => "chief",
        Some("workers") => "worker",
        _ => return,
    };
    if count(deciding) == 0 {
        let what = format!("there is no {deciding} in spec.command.roles whose success could count");
        resolver.problem("spec.command.success", what, Some("leave it out, or add the role".into()));
    }
}

/// The typed result; `None`: the job trains a model of ours.
pub fn spec(v: &Values) -> Option<CommandSpec> {
    v.get("command.run")?;
    let framework: Framework = get(v, "command.framework");
    let roles = roles(v);
    let has = |role: &str| roles.iter().any(|known| known.name == role);
    let success = option(v, "command.success").unwrap_or(match (has("chief"), has("worker")) {
        (true, _) => Success::Chief,
        (false, true) => Success::Workers,
        (false, false) => Success::All,
    });
    let one = framework == Framework::Tensorflow && has("ps");
    Some(CommandSpec {
        run: texts(v, "command.run"),
        framework,
        port: get(v, "command.port"),
        env: get(v, "command.env"),
        image: option(v, "command.image"),
        success,
        restart: RestartSpec {
            policy: get::<Policy>(v, "command.restart.policy"),
            max: get(v, "command.restart.max"),
            scope: option(v, "command.restart.scope").unwrap_or(if one { Scope::One } else { Scope::All }),
        },
        wait: duration(v, "command.wait").expect("it has a default"),
        roles,
    })
}

/// The roles in the order of ranks, whatever the order in which they were said: an API server does not keep it.
fn roles(v: &Values) -> Vec<RoleSpec> {
    let said: std::collections::BTreeMap<String, u32> = get(v, "command.roles");
    let mut roles: Vec<RoleSpec> = said.into_iter().map(|(name, count)| RoleSpec { name, count }).collect();
    roles.sort_by_key(|role| ORDER.iter().position(|known| *known == role.name).unwrap_or(ORDER.len()));
    roles
}
