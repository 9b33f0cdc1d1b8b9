//! From the command line to a resolved job, and `config show`.

use std::fs;
use std::path::Path;

use elasticdl_spec::resolve::{Inputs, Resolved, Source, nearest, resolve};
use elasticdl_spec::settings::SETTINGS;
use serde_json::{Map, Value, json};

use crate::args::{JobFile, Show};
use crate::fault::{self, Exit, Fault};
use crate::print;

/// Variables that begin like settings and are none.
const OTHER_VARIABLES: [&str; 5] = [
    "ELASTICDL_HOME",
    "ELASTICDL_LOG",
    "ELASTICDL_TLS_DIR",
    "ELASTICDL_FAILPOINTS",
    "ELASTICDL_FAILPOINTS_LOG",
];

/// Reads a job file and resolves it with the environment and flags.
pub fn load(job: &JobFile) -> anyhow::Result<Resolved> {
    load_file(&job.file, job.overrides())
}

/// Reads a job file and resolves it with the environment and `path=value` pairs.
pub fn load_file(file: &Path, flags: Vec<(String, String)>) -> anyhow::Result<Resolved> {
    let path = file.display();
    let text = fs::read_to_string(file).map_err(|e| {
        Fault::user(format!("cannot read the job file {path}"))
            .because(e)
            .hint("examples/ has some to start from")
    })?;
    let environment: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| name.starts_with("ELASTICDL_"))
        .collect();
    for (name, _) in &environment {
        warn_of_unknown(name);
    }
    let inputs = Inputs { file: Some(&text), environment, flags };
    resolve(&inputs).map_err(|problems| fault::problems(&path.to_string(), &problems).into())
}

/// A mistyped variable would be passed over in silence otherwise.
fn warn_of_unknown(name: &str) {
    let known: Vec<String> = SETTINGS.iter().map(|s| s.variable()).collect();
    if known.iter().any(|k| k == name) || OTHER_VARIABLES.contains(&name) {
        return;
    }
    if let Some(hint) = nearest(name, known.iter().map(String::as_str)) {
        print::note(&format!("warning: the environment variable {name} is no setting; {hint}"));
    }
}

/// `config show`.
pub fn show(args: &Show) -> anyhow::Result<Exit> {
    let resolved = load(&args.job)?;
    let text = if args.json { as_json(&resolved) } else { as_table(&resolved) };
    print::line(&text)?;
    Ok(Exit::Done)
}

fn as_json(resolved: &Resolved) -> String {
    let mut all = Map::new();
    for setting in SETTINGS {
        let (value, source) = match resolved.values.get(setting.path) {
            Some((value, source)) => (value.clone(), source.to_string()),
            None => (Value::Null, Source::Default.to_string()),
        };
        all.insert(setting.path.into(), json!({ "value": value, "source": source, "help": setting.help }));
    }
    serde_json::to_string_pretty(&all).expect("JSON values are JSON")
}

fn as_table(resolved: &Resolved) -> String {
    let rows: Vec<(&str, String, String)> = SETTINGS
        .iter()
        .map(|setting| match resolved.values.get(setting.path) {
            Some((value, source)) => (setting.path, value_text(value), source.to_string()),
            None => (setting.path, "(unset)".into(), Source::Default.to_string()),
        })
        .collect();
    let width = |of: fn(&(&str, String, String)) -> usize| rows.iter().map(of).max().unwrap_or(0);
    let paths = width(|(path, _, _)| path.chars().count());
    // A long list of columns would push the last column off the screen of all others.
    let values = width(|(_, value, _)| value.chars().count()).min(40);
    let line =
        |(path, value, source): &(&str, String, String)| format!("{path:paths$}  {value:values$}  {source}");
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A value as one would write it in the file.
fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) if text.is_empty() || text.trim() != text || text.contains('\t') => {
            serde_json::to_string(text).expect("text is JSON")
        }
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(value_text).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}
