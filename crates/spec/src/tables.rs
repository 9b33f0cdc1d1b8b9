//! `tables`: what is set for single tables of a model, by name, or by `"*"` for every table.
//!
//! Another key takes a line in [`TABLE_SETTINGS`], with which it is checked, a field in [`TableSpec`], and a sentence in
//! the help of `tables`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::amount;
use crate::settings::Rule;

/// The name that stands for every table.
pub const EVERY_TABLE: &str = "*";

/// A key of a table's settings.
#[derive(Debug, Clone, Copy)]
pub struct TableSetting {
    /// Its name.
    pub key: &'static str,
    /// What it takes.
    pub rule: Rule,
}

/// All keys.
pub const TABLE_SETTINGS: &[TableSetting] = &[
    TableSetting { key: "l2", rule: Rule::NotNegative },
    TableSetting { key: "wire", rule: Rule::OneOf(&["f32", "bf16", "f16"]) },
    TableSetting { key: "memory_max", rule: Rule::Memory },
    TableSetting { key: "admit_after", rule: Rule::Count { min: 1, max: ADMIT_AFTER_MAX } },
    TableSetting { key: "evict", rule: Rule::OneOf(&["use", "age"]) },
];

/// Servers count the pushes of an id that has no row up to this.
pub const ADMIT_AFTER_MAX: u64 = 255;

/// How exact the numbers are that travel between workers and servers. Servers and workers compute with f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// The range of f32 and 8 bits of precision.
    Bf16,
    /// 11 bits of precision, up to 65,504.
    F16,
}

/// Whose row goes where a table is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Evict {
    /// One that was not trained for about a round of the clock.
    #[default]
    Use,
    /// The one that was born first.
    Age,
}

/// What counts for one table.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TableSpec {
    /// So much of a weight is added to its gradient before the optimizer's rule is applied; 0: nothing.
    pub l2: f32,
    /// How its rows and their gradients travel.
    pub wire: Precision,
    /// So many bytes may its rows, slots and indexes take over all partitions; `None`: as many as they need.
    #[serde(deserialize_with = "bytes")]
    pub memory_max: Option<u64>,
    /// So many pushes name an id before it gets a row.
    pub admit_after: u8,
    /// Whose row goes where the table is full.
    pub evict: Evict,
}

impl Default for TableSpec {
    fn default() -> Self {
        TableSpec { l2: 0.0, wire: Precision::F32, memory_max: None, admit_after: 1, evict: Evict::Use }
    }
}

/// An amount of memory as a job file has it.
fn bytes<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
    let wrong = || serde::de::Error::custom(format!("{text:?} is no amount of memory"));
    amount::whole(&text).map(Some).ok_or_else(wrong)
}

/// What was said of tables, checked.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TablesSpec(BTreeMap<String, Map<String, Value>>);

impl TablesSpec {
    /// What counts for the table `name`: key by key what was said of it, else what was said of every table,
    /// else the default.
    pub fn of(&self, name: &str) -> TableSpec {
        let said = [EVERY_TABLE, name].into_iter().filter_map(|name| self.0.get(name));
        let merged: Map<String, Value> = said.flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        serde_json::from_value(merged.into()).expect("what was said of tables has been checked")
    }

    /// Where the value of a key that was said of the table `name` comes from: that name, or [`EVERY_TABLE`].
    pub fn said_of<'a>(&self, name: &'a str, key: &str) -> &'a str {
        if self.0.get(name).is_some_and(|said| said.contains_key(key)) { name } else { EVERY_TABLE }
    }

    /// The tables that were named.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|name| *name != EVERY_TABLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(json: &str) -> TablesSpec {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn what_is_said_of_one_table_counts_before_what_is_said_of_all() {
        let said = tables(
            r#"{ "*": { "l2": 0.5, "wire": "f16" }, "users": { "l2": 0.25 }, "items": { "wire": "bf16" } }"#,
        );
        assert_eq!(said.of("users"), TableSpec { l2: 0.25, wire: Precision::F16, ..TableSpec::default() });
        assert_eq!(said.of("items"), TableSpec { l2: 0.5, wire: Precision::Bf16, ..TableSpec::default() });
        assert_eq!(said.of("others"), TableSpec { l2: 0.5, wire: Precision::F16, ..TableSpec::default() });
        assert_eq!(said.names().collect::<Vec<_>>(), ["items", "users"]);
    }

    #[test]
    fn nothing_said_is_the_default() {
        let spec = TablesSpec::default().of("users");
        assert_eq!(spec, TableSpec::default());
        assert_eq!((spec.l2, spec.wire, spec.memory_max, spec.admit_after), (0.0, Precision::F32, None, 1));
    }

    #[test]
    fn memory_is_an_amount_and_the_rest_counts_for_all_tables() {
        let said = tables(
            r#"{ "*": { "evict": "age", "admit_after": 3 }, "users": { "memory_max": "2Gi", "admit_after": 255 } }"#,
        );
        let users = said.of("users");
        assert_eq!((users.memory_max, users.admit_after, users.evict), (Some(2 << 30), 255, Evict::Age));
        assert_eq!((said.of("items").memory_max, said.of("items").admit_after), (None, 3));
    }

    /// Goal: a key that is checked is also read.
    #[test]
    fn every_setting_has_a_field() {
        for setting in TABLE_SETTINGS {
            let spec = serde_json::to_value(TableSpec::default()).unwrap();
            assert!(spec.get(setting.key).is_some(), "{}", setting.key);
        }
    }
}
