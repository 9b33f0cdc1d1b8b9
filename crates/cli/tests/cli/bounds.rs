//! Tables that may take so much memory and no more: rows are refused and go while the job trains, a server dies, a
//! partition moves, and every record counts once all the same.

use rustix::process::Signal;
use serde_json::Value;

use super::chaos::audit;
use super::world::{World, signal, wait_for};

const ROWS: u64 = 20_000;
const EPOCHS: u64 = 40;
/// Of the whole table, and room for a part of the ids only.
const MEMORY_MAX: u64 = 256 << 10;

/// A figure of the bounded tables, over all servers.
pub(super) fn sum(status: &Value, key: &str) -> u64 {
    let servers = status["servers"].as_array().unwrap().iter();
    let tables = servers.filter_map(|server| server["gauges"]["bounded"].as_object()).flatten();
    tables.filter_map(|(_, table)| table[key].as_u64()).sum()
}

#[test]
fn a_table_stays_within_its_memory_whatever_dies() {
    let world = World::with_data(ROWS);
    let more = format!(
        "tables: {{ '*': {{ memory_max: {}Ki, admit_after: 2 }} }}\n\
         train: {{ batch: 64, epochs: {EPOCHS} }}\nservers: {{ count: 2, partitions: 4 }}\n\
         workers: {{ count: 2 }}\ncheckpoint: {{ every: 1s }}",
        MEMORY_MAX >> 10
    );
    let file = world.job("ctr", &more);
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let first = wait_for("rows to be refused and to go", || {
        let status = world.status("ctr");
        let all_told = sum(&status, "limit") == MEMORY_MAX;
        (all_told && sum(&status, "refused") > 0 && sum(&status, "evicted") > 0).then_some(status)
    });
    assert!(sum(&first, "bytes") <= MEMORY_MAX, "{first}");
    let shown = world.run(&["status", "ctr"]).ok();
    let figures = [" rows refused, ", " % of memory_max", " bytes a row, index ", " % full, staleness "];
    assert!(figures.iter().all(|figure| shown.contains(figure)), "{shown}");
    job.until("a checkpoint", |e| e["event"] == "checkpoint");
    signal(first["servers"][0]["pid"].as_u64().unwrap() as u32, Signal::KILL);
    job.until("the server", |e| e["event"] == "server_ready");
    world.run(&["scale", "ctr", "--servers", "3"]).ok();
    job.until("a move", |e| e["event"] == "moved");
    let status = world.status("ctr");
    assert!(sum(&status, "refused") > 0 && sum(&status, "evicted") > 0, "{status}");
    for server in status["servers"].as_array().unwrap() {
        let table = &server["gauges"]["bounded"]["embedding"];
        assert!(table.is_null() || table["bytes"].as_u64() <= table["limit"].as_u64(), "{status}");
    }
    let (last, code) = job.end();
    assert_eq!(
        (&last["outcome"], &last["records"], code),
        (&"done".into(), &(EPOCHS * ROWS).into(), Some(0)),
        "{last}"
    );
    let audit = audit(&world, "ctr");
    for epoch in audit["epochs"].as_array().unwrap() {
        assert_eq!((&epoch["expected"], &epoch["applied_min"]), (&ROWS.into(), &ROWS.into()), "{epoch}");
    }
    let auc = last["auc"].as_f64().unwrap();
    assert!(auc > 0.6, "it learns all the same: {auc}");
}

#[test]
fn a_bound_that_is_too_small_is_refused_with_the_least_that_is_not() {
    let world = World::with_data(200);
    let train = |memory: &str| {
        let more = format!(
            "tables: {{ '*': {{ memory_max: {memory}, admit_after: 3 }} }}\nservers: {{ count: 1, partitions: 4 }}"
        );
        world.run(&["train", &world.job("ctr", &more)])
    };
    let said = train("8Ki").failed(1);
    let told = "spec.tables.*.memory_max: table \"embedding\" needs ";
    assert!(said.contains(told) && said.contains("for 64 rows in each of 4 partitions"), "{said}");
    let least = said.split("hint: say ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    train(least).ok();
}
