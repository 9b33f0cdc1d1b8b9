//! `tables`: what is set for single tables of a model, by name, or by `"*"` for every table.
//!
//! Another key takes a line in [`TABLE_SETTINGS`], with which it is checked, a field in [`TableSpec`], and a sentence in
//! the help of `tables`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

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
];

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

/// What counts for one table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TableSpec {
    /// So much of a weight is added to its gradient before the optimizer's rule is applied; 0: nothing.
    pub l2: f32,
    /// How its rows and their gradients travel.
    pub wire: Precision,
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
        assert_eq!(said.of("users"), TableSpec { l2: 0.25, wire: Precision::F16 });
        assert_eq!(said.of("items"), TableSpec { l2: 0.5, wire: Precision::Bf16 });
        assert_eq!(said.of("others"), TableSpec { l2: 0.5, wire: Precision::F16 });
        assert_eq!(said.names().collect::<Vec<_>>(), ["items", "users"]);
    }

    #[test]
    fn nothing_said_is_the_default() {
        assert_eq!(TablesSpec::default().of("users"), TableSpec { l2: 0.0, wire: Precision::F32 });
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
