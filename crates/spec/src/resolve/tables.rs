//! `tables`: whether what is said of single tables has a meaning. Which tables a model has is not known here.

use serde_json::{Map, Value, json};

use super::{Resolver, Source, nearest, parse_yaml, value};
use crate::settings::Rule;
use crate::tables::{EVERY_TABLE, TABLE_SETTINGS};

/// Takes a flag `tables.NAME.KEY` beside what was said of tables before. `false`: it is none.
pub fn say(resolver: &mut Resolver, path: &str, text: &str) -> bool {
    let said = path.strip_prefix("tables.").and_then(|rest| rest.rsplit_once('.'));
    let Some((name, key)) = said.filter(|(name, key)| !name.is_empty() && !key.is_empty()) else {
        return false;
    };
    let raw = parse_yaml(text).unwrap_or_else(|_| text.into());
    let (said, source) = resolver.values.entry("tables").or_insert_with(|| (json!({}), Source::Flag));
    // What is no mapping has been found fault with already.
    if let Value::Object(tables) = said {
        let of_table = tables.entry(name).or_insert_with(|| json!({}));
        if of_table.is_null() {
            *of_table = json!({});
        }
        if let Value::Object(of_table) = of_table {
            of_table.insert(key.into(), raw);
        }
        *source = Source::Flag;
    }
    true
}

/// What a flag `tables.KEY` lacks.
pub fn hint(path: &str) -> Option<String> {
    let key = path.strip_prefix("tables.").filter(|key| keys().contains(key))?;
    Some(format!("tables.*.{key} is for every table, tables.NAME.{key} for one"))
}

/// Checks what is said of each table, and puts it in its normal form.
pub fn check(resolver: &mut Resolver) {
    let Some((Value::Object(said), source)) = resolver.values.get("tables").cloned() else { return };
    check_evict(resolver, &said);
    let mut tables = Map::new();
    for (name, settings) in said {
        let place = format!("spec.tables.{name}");
        match settings {
            Value::Object(settings) => {
                tables.insert(name, Value::Object(check_one(resolver, &place, &settings)));
            }
            Value::Null => {}
            other => {
                let what =
                    format!("{} was given; this takes {}", value::describe(&other), Rule::Mapping.expects());
                resolver.problem(&place, what, Some(format!("keys here: {}", keys().join(", "))));
            }
        }
    }
    resolver.values.insert("tables", (tables.into(), source));
}

/// Nothing is evicted from a table that may take as much memory as it needs.
fn check_evict(resolver: &mut Resolver, tables: &Map<String, Value>) {
    let says = |settings: &Value, key: &str| settings.get(key).is_some();
    let every = tables.get(EVERY_TABLE).is_some_and(|every| says(every, "memory_max"));
    let some = tables.values().any(|settings| says(settings, "memory_max"));
    for (name, settings) in tables {
        let bounded = every || says(settings, "memory_max") || (name == EVERY_TABLE && some);
        if says(settings, "evict") && !bounded {
            let what = "nothing is evicted from a table without memory_max".into();
            let hint = "say how much memory its rows may take, as in memory_max: 2Gi, or leave evict out";
            resolver.problem(&format!("spec.tables.{name}.evict"), what, Some(hint.into()));
        }
    }
}

fn check_one(resolver: &mut Resolver, place: &str, settings: &Map<String, Value>) -> Map<String, Value> {
    let mut checked = Map::new();
    for (key, raw) in settings {
        let place = format!("{place}.{key}");
        let Some(setting) = TABLE_SETTINGS.iter().find(|setting| setting.key == key) else {
            let hint = nearest(key, keys().into_iter())
                .or_else(|| Some(format!("keys here: {}", keys().join(", "))));
            resolver.problem(&place, "unknown key".into(), hint);
            continue;
        };
        match value::check(setting.rule, raw) {
            Ok(value) => drop(checked.insert(key.clone(), value)),
            Err(found) => {
                let what = format!("{found} was given; this takes {}", setting.rule.expects());
                resolver.problem(&place, what, None);
            }
        }
    }
    checked
}

fn keys() -> Vec<&'static str> {
    TABLE_SETTINGS.iter().map(|setting| setting.key).collect()
}

#[cfg(test)]
mod tests {
    use crate::resolve::{Inputs, Resolved, Source, resolve};
    use crate::tables::Precision;

    fn with(tables: &str, flags: &[(&str, &str)]) -> Result<Resolved, String> {
        let file = format!(
            "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: ctr }}\nspec:\n  \
             model: {{ zoo: deepfm }}\n  data: {{ train: a.tsv, layout: criteo }}\n  tables: {tables}\n"
        );
        let flags = flags.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
        resolve(&Inputs { file: Some(&file), flags, ..Inputs::default() }).map_err(|p| p.to_string())
    }

    #[test]
    fn a_flag_says_one_thing_of_one_table_and_leaves_the_rest() {
        let file = r#"{ "*": { wire: f16, l2: 0.5 }, words: }"#;
        let flags = [("tables.*.memory_max", "2Gi"), ("tables.*.l2", "0.25"), ("tables.words.wire", "bf16")];
        let resolved = with(file, &flags).unwrap();
        let (every, words) = (resolved.job.tables.of("embedding"), resolved.job.tables.of("words"));
        assert_eq!((every.memory_max, every.l2, every.wire), (Some(2 << 30), 0.25, Precision::F16));
        assert_eq!((words.memory_max, words.l2, words.wire), (Some(2 << 30), 0.25, Precision::Bf16));
        assert_eq!(resolved.values["tables"].1, Source::Flag);
        assert_eq!(with("{}", &flags[..1]).unwrap().job.tables.of("x").memory_max, Some(2 << 30));
    }

    #[test]
    fn a_flag_for_a_table_is_checked_as_the_file_is() {
        let refused = with("{}", &[("tables.*.memory_mx", "2Gi")]).unwrap_err();
        assert_eq!(refused, "spec.tables.*.memory_mx: unknown key\n  hint: did you mean memory_max?");
        let refused = with("{}", &[("tables.*.memory_max", "much")]).unwrap_err();
        assert!(refused.starts_with("spec.tables.*.memory_max: \"much\" was given; this takes"), "{refused}");
        let refused = with("{}", &[("tables.memory_max", "2Gi")]).unwrap_err();
        let hint = "hint: tables.*.memory_max is for every table, tables.NAME.memory_max for one";
        assert_eq!(refused, format!("flag tables.memory_max: no such setting\n  {hint}"));
        for nothing in ["table.*.wire", "tables..wire", "tables.*.", "tables."] {
            let refused = with("{}", &[(nothing, "f16")]).unwrap_err();
            assert!(refused.starts_with(&format!("flag {nothing}: no such setting")), "{refused}");
        }
    }
}
