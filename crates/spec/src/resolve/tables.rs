//! `tables`: whether what is said of single tables has a meaning. Which tables a model has is not known here.

use serde_json::{Map, Value};

use super::{Resolver, nearest, value};
use crate::settings::Rule;
use crate::tables::{EVERY_TABLE, TABLE_SETTINGS};

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
