//! From a job file, the environment and flags to a [`JobSpec`]: default < file < environment < flag.
//!
//! Every problem is found in one go, each with its path, what is wrong and what would be right. Nothing
//! here touches the disk: whether files exist is asked by whoever starts the job.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value, json};

use crate::job::JobSpec;
use crate::settings::{Fallback, Rule, SETTINGS, Setting, find};

mod build;
mod command;
mod tables;
mod train;
mod value;

/// The version of the job file.
pub const API_VERSION: &str = "elasticdl.org/v1";
/// The kind of the job file.
pub const KIND: &str = "ElasticJob";

/// Something wrong with a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where: a path in the file, a variable or a flag.
    pub place: String,
    /// What is wrong.
    pub what: String,
    /// What would be right.
    pub hint: Option<String>,
}

/// Everything wrong with a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, p) in self.0.iter().enumerate() {
            let end = if i == 0 { "" } else { "\n" };
            write!(f, "{end}{}: {}", p.place, p.what)?;
            if let Some(hint) = &p.hint {
                write!(f, "\n  hint: {hint}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Who said a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Nobody.
    Default,
    /// The job file.
    File,
    /// An environment variable.
    Environment,
    /// A flag.
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Source::Default => "default",
            Source::File => "file",
            Source::Environment => "environment",
            Source::Flag => "flag",
        })
    }
}

/// What was said before it is resolved.
#[derive(Debug, Clone, Default)]
pub struct Inputs<'a> {
    /// Text of the job file.
    pub file: Option<&'a str>,
    /// The environment; variables that are no settings are passed over.
    pub environment: Vec<(String, String)>,
    /// `path=value` pairs: `--set`, and flags that stand for a setting.
    pub flags: Vec<(String, String)>,
}

/// A job with the origin of each of its values.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// Each set value by its path, and who said it.
    pub values: BTreeMap<&'static str, (Value, Source)>,
    /// The typed job.
    pub job: JobSpec,
}

/// Resolves a job, or tells everything that is wrong with it.
pub fn resolve(inputs: &Inputs<'_>) -> Result<Resolved, Problems> {
    let mut resolver = Resolver::default();
    resolver.defaults();
    if let Some(text) = inputs.file {
        resolver.file(text)?;
    }
    for setting in SETTINGS {
        let variable = setting.variable();
        if let Some((_, text)) = inputs.environment.iter().find(|(name, _)| *name == variable) {
            resolver.text(setting, &format!("environment variable {variable}"), text, Source::Environment);
        }
    }
    for (path, text) in &inputs.flags {
        match find(path) {
            Some(setting) => resolver.text(setting, &format!("flag {path}"), text, Source::Flag),
            None if tables::say(&mut resolver, path, text) => {}
            None => {
                let hint = tables::hint(path).or_else(|| nearest(path, SETTINGS.iter().map(|s| s.path)));
                resolver.problem(&format!("flag {path}"), "no such setting".into(), hint);
            }
        }
    }
    resolver.finish()
}

/// Collects values and problems.
#[derive(Default)]
struct Resolver {
    values: BTreeMap<&'static str, (Value, Source)>,
    problems: Vec<Problem>,
}

impl Resolver {
    fn problem(&mut self, place: &str, what: String, hint: Option<String>) {
        self.problems.push(Problem { place: place.into(), what, hint });
    }

    fn defaults(&mut self) {
        for setting in SETTINGS {
            if let Fallback::Value(text) = setting.default {
                let value = parse_yaml(text).expect("defaults are YAML");
                let value = value::check(setting.rule, &value).expect("defaults obey their rules");
                self.values.insert(setting.path, (value, Source::Default));
            }
        }
    }

    fn set(&mut self, setting: &'static Setting, place: &str, raw: &Value, source: Source) {
        match value::check(setting.rule, raw) {
            Ok(value) => {
                self.values.insert(setting.path, (value, source));
            }
            Err(found) => {
                let hint = match (setting.rule, raw) {
                    (Rule::OneOf(names), Value::String(text)) => nearest(text, names.iter().copied()),
                    _ => None,
                };
                let what = format!("{found} was given; this takes {}", setting.rule.expects());
                // A placeholder keeps the cross-checks from reporting the same thing as missing.
                self.values.entry(setting.path).or_insert((Value::Null, source));
                self.problem(place, what, hint);
            }
        }
    }

    /// A value given as text: YAML where that obeys the rule, else the text itself.
    fn text(&mut self, setting: &'static Setting, place: &str, text: &str, source: Source) {
        let literal = Value::String(text.into());
        let raw = parse_yaml(text).unwrap_or_else(|_| literal.clone());
        let best = if value::check(setting.rule, &raw).is_ok() { raw } else { literal };
        let shown =
            if value::check(setting.rule, &best).is_ok() { best } else { parse_yaml(text).unwrap_or(best) };
        self.set(setting, place, &shown, source);
    }

    fn file(&mut self, text: &str) -> Result<(), Problems> {
        let fatal = |what: String| {
            let hint = Some("a job file begins with apiVersion: elasticdl.org/v1".to_string());
            Problems(vec![Problem { place: "job file".into(), what, hint }])
        };
        let root = match parse_yaml(text).map_err(|e| fatal(format!("not YAML: {e}")))? {
            Value::Object(root) => root,
            Value::Null => return Err(fatal("it is empty".into())),
            other => {
                return Err(fatal(format!("a mapping is wanted, {} was given", value::describe(&other))));
            }
        };
        self.head(&root, "apiVersion", API_VERSION);
        self.head(&root, "kind", KIND);
        for (key, value) in &root {
            match key.as_str() {
                "apiVersion" | "kind" => {}
                "metadata" => self.section("metadata", "", value, &["name"]),
                "spec" => {
                    let known = child_keys("");
                    let known: Vec<&str> = known.iter().copied().filter(|k| *k != "name").collect();
                    self.section("spec", "", value, &known);
                }
                other => {
                    let hint = nearest(other, ["apiVersion", "kind", "metadata", "spec"].into_iter());
                    self.problem(other, "unknown key".into(), hint);
                }
            }
        }
        Ok(())
    }

    /// A line that says what file this is.
    fn head(&mut self, root: &Map<String, Value>, key: &str, right: &str) {
        match root.get(key) {
            Some(Value::String(text)) if text == right => {}
            Some(other) => {
                let what = format!("{right} is wanted, {} was given", value::describe(other));
                self.problem(key, what, None);
            }
            None => self.problem(key, "missing".into(), Some(format!("add the line {key}: {right}"))),
        }
    }

    /// A mapping whose keys are settings or further mappings. `place` is its path in the file, `prefix`
    /// the same without `spec`.
    fn section(&mut self, place: &str, prefix: &str, value: &Value, known: &[&str]) {
        let map = match value {
            Value::Object(map) => map,
            Value::Null => return,
            other => {
                let what = format!("a mapping is wanted, {} was given", value::describe(other));
                let hint = Some(format!("keys here: {}", known.join(", ")));
                return self.problem(place, what, hint);
            }
        };
        for (key, value) in map {
            let place = format!("{place}.{key}");
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            if !known.contains(&key.as_str()) {
                let hint = nearest(key, known.iter().copied())
                    .or_else(|| Some(format!("keys here: {}", known.join(", "))));
                self.problem(&place, "unknown key".into(), hint);
            } else if let Some(setting) = find(&path) {
                self.set(setting, &place, value, Source::File);
            } else {
                self.section(&place, &path, value, &child_keys(&path));
            }
        }
    }

    fn finish(mut self) -> Result<Resolved, Problems> {
        let trains = !self.values.contains_key("command.run");
        for setting in SETTINGS {
            let required = match setting.default {
                Fallback::Required => true,
                Fallback::RequiredToTrain => trains,
                Fallback::Unset | Fallback::Value(_) => false,
            };
            if required && !self.values.contains_key(setting.path) {
                let hint = Some(format!("{} ({})", setting.help, setting.rule.expects()));
                self.problem(&setting.file_path(), "missing".into(), hint);
            }
        }
        build::cross_check(&mut self);
        if !self.problems.is_empty() {
            return Err(Problems(self.problems));
        }
        let job = build::job(&self.values);
        Ok(Resolved { values: self.values, job })
    }
}

/// The keys directly below `prefix`.
fn child_keys(prefix: &str) -> Vec<&'static str> {
    let mut keys: Vec<&'static str> = Vec::new();
    for setting in SETTINGS {
        let below = match prefix {
            "" => Some(setting.path),
            _ => setting.path.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')),
        };
        let key = below.map(|path| path.split('.').next().expect("split gives at least one part"));
        if let Some(key) = key.filter(|key| !keys.contains(key)) {
            keys.push(key);
        }
    }
    keys
}

/// A hint with the name nearest to `text`, where one is near.
pub fn nearest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let distance = |name: &str| strsim::damerau_levenshtein(&text.to_lowercase(), &name.to_lowercase());
    names
        .map(|name| (distance(name), name))
        .filter(|(d, name)| *d <= (name.len().max(text.len()) / 3).max(1))
        .min()
        .map(|(_, name)| format!("did you mean {name}?"))
}

/// Parses YAML into JSON values; keys that are not text become their text.
fn parse_yaml(text: &str) -> Result<Value, String> {
    serde_norway::from_str::<serde_norway::Value>(text).map(to_json).map_err(|e| e.to_string())
}

fn to_json(yaml: serde_norway::Value) -> Value {
    use serde_norway::Value as Yaml;
    match yaml {
        Yaml::Null => Value::Null,
        Yaml::Bool(b) => json!(b),
        // NaN and infinities have no JSON; as text they fail every numeric rule with their own words.
        Yaml::Number(n) => match (n.as_u64(), n.as_i64(), n.as_f64()) {
            (Some(u), _, _) => json!(u),
            (_, Some(i), _) => json!(i),
            (_, _, Some(f)) if f.is_finite() => json!(f),
            _ => json!(n.to_string()),
        },
        Yaml::String(s) => json!(s),
        Yaml::Sequence(items) => Value::Array(items.into_iter().map(to_json).collect()),
        Yaml::Mapping(map) => {
            let text_key = |key| match to_json(key) {
                Value::String(s) => s,
                other => other.to_string(),
            };
            Value::Object(map.into_iter().map(|(k, v)| (text_key(k), to_json(v))).collect())
        }
        Yaml::Tagged(tagged) => to_json(tagged.value),
    }
}

#[cfg(test)]
mod tests;
