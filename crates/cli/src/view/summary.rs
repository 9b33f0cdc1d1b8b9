//! The end of a job as a table. Pure.

use comfy_table::{CellAlignment, Table, presets};
use elasticdl_master::status::Event;
use serde_json::Value;

use crate::print;

/// The figures of a `finished` event, in the order in which people ask for them.
pub fn summary(job: &str, finished: &Event) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([job, finished.fields.get("outcome").and_then(Value::as_str).unwrap_or("?")]);
    let number = |name: &str| finished.fields.get(name).and_then(Value::as_f64);
    let mut row = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            table.add_row([name.to_string(), value]);
        }
    };
    row("logloss", number("logloss").map(|v| format!("{v:.5}")));
    row("best reachable logloss", number("best_logloss").map(|v| format!("{v:.5}")));
    row("AUC", number("auc").map(|v| format!("{v:.5}")));
    row("best reachable AUC", number("best_auc").map(|v| format!("{v:.5}")));
    row("records", number("records").map(|v| print::count(v as u64)));
    row("bad records set aside", number("bad_records").filter(|n| *n > 0.0).map(|v| print::count(v as u64)));
    row("members", number("members").map(|v| print::count(v as u64)));
    row("restarts", number("restarts").map(|v| print::count(v as u64)));
    row("time", Some(print::seconds(finished.seconds)));
    row("records/s", number("records_per_second").map(|v| print::count(v as u64)));
    for name in ["output", "error"] {
        row(name, finished.fields.get(name).and_then(Value::as_str).map(Into::into));
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table_has_what_the_event_has() {
        let event = json!({
            "event": "finished", "seq": 9, "seconds": 41.5, "outcome": "done", "logloss": 0.4512345,
            "auc": 0.79123, "best_logloss": 0.447, "best_auc": 0.8, "records": 2_000_000,
            "records_per_second": 48_192.7,
        });
        insta::assert_snapshot!(summary("ctr", &serde_json::from_value(event).unwrap()));
    }
}
