use super::*;

/// What the programs tell, with figures that are easy to recognize.
fn measured() -> Measured {
    let served = |pull: f64, redis: Value, of_redis: Value| {
        json!({
            "million_rows_per_second": {
                "pull": pull, "raw": 50.0, "tls": 8.0, "redis": redis, "push": 9.0, "tls_push": 6.0,
            },
            "pull_of_raw": 0.3, "pull_of_redis": of_redis, "tls_of_pull": 0.8,
            "push_of_raw": 0.18, "tls_of_push": 0.66,
        })
    };
    Measured {
        memory: json!({
            "bytes_per_row": 170.5,
            "million_rows_per_second": {
                "gather": 60.0, "pull": 30.0, "boxed": 10.0, "adagrad": 15.0, "adam": 10.0, "born": 5.0,
                "unordered": 24.0, "gather_on": 100.0,
            },
            "unordered_of_gather": 0.4, "pull_of_gather_on": 0.3,
            "pull_of_gather": 0.5, "pull_of_boxed": 3.0, "adagrad_of_pull": 0.4999, "adam_of_pull": 0.35,
        }),
        large: json!({
            "peak_bytes": 5u64 << 30, "pull_of_gather": 0.4, "pull_of_gather_few": 0.5, "large_of_few": 0.8,
        }),
        narrow: served(10.0, json!(0.7), json!(14.0)),
        wide: served(2.0, Value::Null, Value::Null),
        checkpoint: json!({
            "megabytes_per_second": { "checkpoint": 600.0, "raw": 800.0 }, "checkpoint_of_raw": 0.75,
        }),
        loaded: json!({
            "whole": {
                "seconds": 30.0, "more_memory": 0.26, "training_lost": 0.0999, "longest_pull_ms_more": 101.0,
            },
            "added": {
                "seconds": 1.0, "more_memory": 0.1, "training_lost": 0.01, "longest_pull_ms_more": 1.0,
            },
        }),
        moving: json!({
            "idle": { "seconds": 1.0, "loopback_seconds": 0.2, "times_loopback": 5.0 },
            "loaded": { "seconds": 15.5, "training_lost": 0.2, "longest_pull_ms_more": 100.0, "partitions_wrong": 1 },
        }),
        apart: json!({
            "large": {
                "records_per_second": { "in_one": 60_000.0, "apart": 45_000.0 }, "apart_of_in_one": 0.7,
            },
            "small": {
                "records_per_second": { "in_one": 900_000.0, "apart": 600_000.0 }, "apart_of_in_one": 0.66,
            },
        }),
        dedup: json!({
            "million_ids_per_second": { "ours": 100.0, "numpy": 11.0 }, "ours_of_numpy": 9.1,
        }),
    }
}

#[test]
fn a_figure_at_its_bar_is_reached_and_one_below_it_is_not() {
    let reached: Vec<_> = figures(&measured()).unwrap().iter().map(Figure::reached).collect();
    let memory = [Some(true), None, None, Some(true), Some(false), Some(true), Some(true), Some(false)];
    assert_eq!(reached[..8], memory);
    assert_eq!(reached[8..10], [Some(true), Some(true)]);
    // Redis, raw TCP narrow and wide; TLS twice, pushes, and these with TLS.
    assert_eq!(reached[10..13], [Some(true), Some(true), Some(false)]);
    assert_eq!(reached[13..19], [None; 6]);
    assert_eq!(reached[19..21], [Some(false), Some(true)]);
    // Time, memory, loss and wait of a checkpoint under load; times of loopback, time, loss, wait and audit of moves.
    assert_eq!(reached[21..25], [Some(true), Some(false), Some(true), Some(false)]);
    assert_eq!(reached[25..30], [Some(true), Some(false), Some(true), Some(true), Some(false)]);
    assert_eq!(reached[30..], [Some(true), None]);
}

#[test]
fn rows_tell_ours_the_peer_the_ratio_and_the_verdict() {
    let figures = figures(&measured()).unwrap();
    let row = |place: usize| figures[place].row()[1..].join(" | ");
    assert_eq!(row(4), "15.0 M rows/s | pull: 30.0 M rows/s | 0.500× | ≥ 0.5× | no");
    assert_eq!(row(7), "170.5 bytes | – | – | ≤ 170 bytes | no");
    assert_eq!(row(9), "0.400 | 1 M rows: 0.500 | 0.800× | ≥ 0.8× | yes");
    assert_eq!(row(11), "0.640 GB/s | raw TCP: 3.20 GB/s | 0.300× | ≥ 0.3× | yes");
    assert_eq!(row(13), "8.00 M rows/s | without TLS: 10.0 M rows/s | 0.800× | – | –");
    assert_eq!(row(16), "4.61 GB/s | raw TCP: 25.6 GB/s | 0.180× | – | –");
    assert_eq!(row(17), "6.00 M rows/s | without TLS: 9.00 M rows/s | 0.660× | – | –");
    assert_eq!(row(22), "26.0 % | – | – | ≤ 25 % | no");
    assert_eq!(row(24), "101.0 ms | – | – | ≤ 100 ms | no");
    assert_eq!(row(25), "1.00 s | raw TCP: 0.200 s | 5.00× | ≤ 5× | yes");
    assert_eq!(row(29), "1.00 | – | – | ≤ 0 | no");
    assert_eq!(row(30), "45.0 k records/s | one process: 60.0 k records/s | 0.700× | ≥ 0.7× | yes");
    assert_eq!(row(31), "600.0 k records/s | one process: 900.0 k records/s | 0.660× | – | –");
    assert_eq!(table(&figures).lines().count(), 2 + figures.len());
}

#[test]
fn programs_are_told_the_bar_and_its_kind() {
    let figures = figures(&measured()).unwrap();
    let wanted = |place: usize| figures[place].summary()["wanted"].clone();
    assert_eq!(wanted(24), json!({ "most": 100.0 }));
    assert_eq!(wanted(25), json!({ "ratio_most": 5.0 }));
    assert_eq!(wanted(30), json!({ "ratio_least": 0.7 }));
}

#[test]
fn a_number_that_was_not_told_is_an_error_that_names_it() {
    let mut measured = measured();
    measured.narrow["pull_of_redis"] = Value::Null;
    let error = figures(&measured).unwrap_err().to_string();
    assert!(error.starts_with("find a number at /pull_of_redis in {"), "{error}");
}
