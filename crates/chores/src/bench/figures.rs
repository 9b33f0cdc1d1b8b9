//! What of the parameter server is measured and what is wanted of it; measurements in, the table's rows out.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::document::{dash, markdown_table};

/// What the programs have told, each as JSON.
#[derive(Debug)]
pub struct Measured {
    /// Of `engine memory`.
    pub memory: Value,
    /// Of `engine large`.
    pub large: Value,
    /// Of `engine served` with dim 16 and a Redis.
    pub narrow: Value,
    /// Of `engine served` with dim 128.
    pub wide: Value,
    /// Of `engine checkpoint`.
    pub checkpoint: Value,
    /// Of `engine loaded`.
    pub loaded: Value,
    /// Of `engine moving`.
    pub moving: Value,
    /// Of `apart`.
    pub apart: Value,
    /// Of the worker's deduplication and numpy, in turn.
    pub dedup: Value,
}

/// One line of the table.
#[derive(Debug, PartialEq)]
pub struct Figure {
    title: &'static str,
    unit: &'static str,
    ours: f64,
    peer: Option<Peer>,
    wanted: Wanted,
}

/// Who was measured in turn with ours.
#[derive(Debug, PartialEq)]
struct Peer {
    name: &'static str,
    /// In the same unit.
    theirs: f64,
    /// The median of the ratios of neighbours in time, not the ratio of the medians.
    ratio: f64,
}

/// What a figure is held against.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wanted {
    /// At least so many times the peer.
    Ratio(f64),
    /// At most so many times the peer.
    RatioMost(f64),
    /// At least so much.
    Least(f64),
    /// At most so much.
    Most(f64),
    /// Told for its own sake.
    Nothing,
}

impl Figure {
    /// Whether it is as good as wanted; `None` where nothing is wanted.
    pub fn reached(&self) -> Option<bool> {
        match (self.wanted, &self.peer) {
            (Wanted::Ratio(least), Some(peer)) => Some(peer.ratio >= least),
            (Wanted::RatioMost(most), Some(peer)) => Some(peer.ratio <= most),
            (Wanted::Ratio(_) | Wanted::RatioMost(_), None) => Some(false),
            (Wanted::Least(least), _) => Some(self.ours >= least),
            (Wanted::Most(most), _) => Some(self.ours <= most),
            (Wanted::Nothing, _) => None,
        }
    }

    fn row(&self) -> Vec<String> {
        let wanted = match self.wanted {
            Wanted::Ratio(least) => format!("≥ {least}×"),
            Wanted::RatioMost(most) => format!("≤ {most}×"),
            Wanted::Least(least) => format!("≥ {least} {}", self.unit).trim_end().to_owned(),
            Wanted::Most(most) => format!("≤ {most} {}", self.unit).trim_end().to_owned(),
            Wanted::Nothing => dash(),
        };
        let amount = |value: f64| format!("{} {}", significant(value), self.unit).trim_end().to_owned();
        vec![
            self.title.to_owned(),
            amount(self.ours),
            self.peer.as_ref().map_or_else(dash, |peer| format!("{}: {}", peer.name, amount(peer.theirs))),
            self.peer.as_ref().map_or_else(dash, |peer| format!("{}×", significant(peer.ratio))),
            wanted,
            self.reached().map_or_else(dash, |reached| if reached { "yes" } else { "no" }.to_owned()),
        ]
    }

    /// For programs.
    pub fn summary(&self) -> Value {
        let (kind, bar) = match self.wanted {
            Wanted::Ratio(bar) => ("ratio_least", Some(bar)),
            Wanted::RatioMost(bar) => ("ratio_most", Some(bar)),
            Wanted::Least(bar) => ("least", Some(bar)),
            Wanted::Most(bar) => ("most", Some(bar)),
            Wanted::Nothing => ("nothing", None),
        };
        json!({
            "figure": self.title, "unit": self.unit, "ours": self.ours,
            "peer": self.peer.as_ref().map(|peer| peer.name),
            "theirs": self.peer.as_ref().map(|peer| peer.theirs),
            "ratio": self.peer.as_ref().map(|peer| peer.ratio),
            "wanted": { kind: bar }, "reached": self.reached(),
        })
    }
}

/// Three digits that count, and some more of large numbers.
fn significant(value: f64) -> String {
    match value.abs() {
        large if large >= 999.5 => format!("{value:.0}"),
        middling if middling >= 9.995 => format!("{value:.1}"),
        small if small >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// For people, and valid Markdown.
pub fn table(figures: &[Figure]) -> String {
    let header = ["figure", "ours", "peer", "ratio", "wanted", "reached"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(figures.iter().map(Figure::row));
    markdown_table(&rows, 1)
}

/// All lines, in the order of the table.
pub fn figures(measured: &Measured) -> Result<Vec<Figure>> {
    let mut all = in_memory(&measured.memory)?;
    all.extend(of_many_rows(&measured.large)?);
    all.extend(over_loopback(&measured.narrow, &measured.wide)?);
    let ids = "/million_ids_per_second";
    all.push(Figure {
        title: "deduplicate and route a batch of 106,496 ids",
        unit: "M ids/s",
        ours: number(&measured.dedup, &format!("{ids}/ours"))?,
        peer: Some(peer("numpy.unique", &measured.dedup, &format!("{ids}/numpy"), "/ours_of_numpy", 1.0)?),
        wanted: Wanted::Ratio(20.0),
    });
    all.extend(of_checkpoints(&measured.checkpoint, &measured.loaded)?);
    all.extend(of_moves(&measured.moving)?);
    all.extend(of_two_processes(&measured.apart)?);
    Ok(all)
}

fn in_memory(told: &Value) -> Result<Vec<Figure>> {
    const UNIT: &str = "M rows/s";
    let rate = |name: &str| number(told, &format!("/million_rows_per_second/{name}"));
    let beside = |title, ours: &str, name, theirs: &str, ratio: &str, wanted| -> Result<Figure> {
        let peer = Peer { name, theirs: rate(theirs)?, ratio: number(told, ratio)? };
        Ok(Figure { title, unit: UNIT, ours: rate(ours)?, peer: Some(peer), wanted })
    };
    let against = |title, ours: &str, name, theirs: &str, ratio: &str, least| {
        beside(title, ours, name, theirs, ratio, Wanted::Ratio(least))
    };
    let pull = "pull, dim 16, 2 GiB, in one process";
    Ok(vec![
        against(pull, "pull", "prefetched gather", "gather", "/pull_of_gather", 0.5)?,
        beside(
            "the same",
            "pull",
            "gather without pauses",
            "gather_on",
            "/pull_of_gather_on",
            Wanted::Nothing,
        )?,
        beside(
            "the same with the ids of a batch in no order",
            "unordered",
            "prefetched gather",
            "gather",
            "/unordered_of_gather",
            Wanted::Nothing,
        )?,
        against(pull, "pull", "hashbrown, boxed rows", "boxed", "/pull_of_boxed", 2.0)?,
        against("push with Adagrad", "adagrad", "pull", "pull", "/adagrad_of_pull", 0.5)?,
        against("push with Adam", "adam", "pull", "pull", "/adam_of_pull", 0.35)?,
        alone("new rows, of one core", UNIT, rate("born")?, Wanted::Least(5.0)),
        alone(
            "a row of dim 16 with Adagrad's slots",
            "bytes",
            number(told, "/bytes_per_row")?,
            Wanted::Most(170.0),
        ),
    ])
}

fn of_many_rows(told: &Value) -> Result<Vec<Figure>> {
    let resident = number(told, "/peak_bytes")? / f64::from(1 << 30);
    Ok(vec![
        alone("100 M rows of dim 8, most memory resident", "GiB", resident, Wanted::Most(5.0)),
        Figure {
            title: "pull from 100 M rows, as part of a gather from as many",
            unit: "",
            ours: number(told, "/pull_of_gather")?,
            peer: Some(peer("1 M rows", told, "/pull_of_gather_few", "/large_of_few", 1.0)?),
            wanted: Wanted::Ratio(0.8),
        },
    ])
}

fn over_loopback(narrow: &Value, wide: &Value) -> Result<Vec<Figure>> {
    let rate = "/million_rows_per_second";
    let against_redis = Figure {
        title: "pull of 40,000 ids over loopback, dim 16",
        unit: "M keys/s",
        ours: number(narrow, &format!("{rate}/pull"))?,
        peer: Some(peer("Redis MGET", narrow, &format!("{rate}/redis"), "/pull_of_redis", 1.0)?),
        wanted: Wanted::Ratio(10.0),
    };
    let against_raw = |title, (told, dim): (&Value, f64), what: &str, wanted| -> Result<Figure> {
        // Millions of rows to gigabytes.
        let per_row = dim * 4.0 / 1e3;
        let ours = number(told, &format!("{rate}/{what}"))? * per_row;
        let peer = peer("raw TCP", told, &format!("{rate}/raw"), &format!("/{what}_of_raw"), per_row)?;
        Ok(Figure { title, unit: "GB/s", ours, peer: Some(peer), wanted })
    };
    let with_tls = |title, told: &Value, tls: &str, plain: &str| -> Result<Figure> {
        let ours = number(told, &format!("{rate}/{tls}"))?;
        let peer = peer("without TLS", told, &format!("{rate}/{plain}"), &format!("/tls_of_{plain}"), 1.0)?;
        Ok(Figure { title, unit: "M rows/s", ours, peer: Some(peer), wanted: Wanted::Nothing })
    };
    let (dim_16, dim_128) = ((narrow, 16.0), (wide, 128.0));
    Ok(vec![
        against_redis,
        against_raw("the same in bytes of rows", dim_16, "pull", Wanted::Ratio(0.3))?,
        against_raw("the same with dim 128", dim_128, "pull", Wanted::Ratio(0.6))?,
        with_tls("pull with TLS, dim 16", narrow, "tls", "pull")?,
        with_tls("pull with TLS, dim 128", wide, "tls", "pull")?,
        against_raw("push with Adagrad over loopback, dim 16", dim_16, "push", Wanted::Nothing)?,
        against_raw("the same with dim 128", dim_128, "push", Wanted::Nothing)?,
        with_tls("push with TLS, dim 16", narrow, "tls_push", "push")?,
        with_tls("push with TLS, dim 128", wide, "tls_push", "push")?,
    ])
}

fn of_checkpoints(idle: &Value, loaded: &Value) -> Result<Vec<Figure>> {
    let bytes = "/megabytes_per_second";
    let raw = peer("write and sync", idle, &format!("{bytes}/raw"), "/checkpoint_of_raw", 1.0)?;
    let idle = Figure {
        title: "checkpoint of 2 GiB, idle",
        unit: "MB/s",
        ours: number(idle, &format!("{bytes}/checkpoint"))?,
        peer: Some(raw),
        wanted: Wanted::Ratio(0.7),
    };
    let loaded = while_training(
        &loaded["whole"],
        &[
            ("checkpoint of 2 GiB while training: done after", "s", "/seconds", 30.0),
            ("checkpoint of 2 GiB while training: more memory", "%", "/more_memory", 25.0),
            ("checkpoint of 2 GiB while training: training loses", "%", "/training_lost", 10.0),
            (
                "checkpoint of 2 GiB while training: longest pull beyond the undisturbed one",
                "ms",
                "/longest_pull_ms_more",
                100.0,
            ),
        ],
    )?;
    Ok([idle].into_iter().chain(loaded).collect())
}

/// What something costs that is done while others train: title, unit, where it is told, and how much it may be.
fn while_training(told: &Value, lines: &[(&'static str, &'static str, &str, f64)]) -> Result<Vec<Figure>> {
    let line = |&(title, unit, path, most): &(&'static str, &'static str, &str, f64)| {
        let times = if unit == "%" { 100.0 } else { 1.0 };
        Ok(alone(title, unit, number(told, path)? * times, Wanted::Most(most)))
    };
    lines.iter().map(line).collect()
}

fn of_moves(told: &Value) -> Result<Vec<Figure>> {
    let (theirs, ratio) = ("/idle/loopback_seconds", "/idle/times_loopback");
    let idle = Figure {
        title: "moving partitions 2 → 3 servers, 2 GiB, idle",
        unit: "s",
        ours: number(told, "/idle/seconds")?,
        peer: Some(peer("raw TCP", told, theirs, ratio, 1.0)?),
        wanted: Wanted::RatioMost(5.0),
    };
    let loaded = while_training(
        &told["loaded"],
        &[
            ("moving partitions while training: done after", "s", "/seconds", 15.0),
            ("moving partitions while training: training loses", "%", "/training_lost", 20.0),
            (
                "moving partitions while training: longest pull beyond the undisturbed one",
                "ms",
                "/longest_pull_ms_more",
                100.0,
            ),
            (
                "moving partitions while training: partitions whose audit is not exact",
                "",
                "/partitions_wrong",
                0.0,
            ),
        ],
    )?;
    Ok([idle].into_iter().chain(loaded).collect())
}

fn of_two_processes(told: &Value) -> Result<Vec<Figure>> {
    let figure = |title, job: &str, wanted| -> Result<Figure> {
        let rate = format!("/{job}/records_per_second");
        let (theirs, ratio) = (format!("{rate}/in_one"), format!("/{job}/apart_of_in_one"));
        Ok(Figure {
            title,
            unit: "k records/s",
            ours: number(told, &format!("{rate}/apart"))? / 1e3,
            peer: Some(peer("one process", told, &theirs, &ratio, 1e-3)?),
            wanted,
        })
    };
    Ok(vec![
        figure("1 worker + 1 server as processes, MLP 400-400-400, dim 16", "large", Wanted::Ratio(0.7))?,
        figure("1 worker + 1 server as processes, MLP 16-4, dim 8", "small", Wanted::Nothing)?,
    ])
}

/// A figure without a peer.
fn alone(title: &'static str, unit: &'static str, ours: f64, wanted: Wanted) -> Figure {
    Figure { title, unit, ours, peer: None, wanted }
}

fn peer(name: &'static str, told: &Value, theirs: &str, ratio: &str, times: f64) -> Result<Peer> {
    Ok(Peer { name, theirs: number(told, theirs)? * times, ratio: number(told, ratio)? })
}

/// A number that a program has told, by its path.
fn number(told: &Value, path: &str) -> Result<f64> {
    told.pointer(path).and_then(Value::as_f64).with_context(|| format!("find a number at {path} in {told}"))
}

#[cfg(test)]
mod tests;
