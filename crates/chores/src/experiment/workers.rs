//! As many workers as are of use: a job that finds out by itself, beside jobs of every fixed size.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::curves::{Curve, Curves};
use super::local::Local;
use super::report::{Report, number};
use super::{Outcome, Picture};

/// How large.
#[derive(Debug, Clone)]
pub struct Size {
    /// Records of an epoch.
    pub rows: u64,
    /// Epochs of a job of fixed size, and of one that has to find its size first.
    epochs: u32,
    epochs_automatic: u32,
    /// Fixed sizes to compare with.
    fixed: &'static [u32],
    /// How often each of them runs.
    rounds: u32,
}

/// The limit of the job that finds out by itself.
const MAX: u32 = 8;
/// It is to settle at no more workers than that, and to be slower than the best fixed size by no more.
const SETTLES_AT: u32 = 3;
const SLOWER: f64 = 0.05;

impl Size {
    /// The whole comparison. Three epochs are about half a minute on two cores, and as long as it takes to find the size.
    pub fn new() -> Size {
        Size { rows: 4_000_000, epochs: 3, epochs_automatic: 9, fixed: &[1, 2, 3, 4], rounds: 2 }
    }
}

/// One job.
#[derive(Debug, Clone, Default, PartialEq)]
struct Run {
    /// Seconds and records done by then.
    progress: Vec<(f64, u64)>,
    /// Seconds, and workers that were wanted from then on.
    wanted: Vec<(f64, u32)>,
    /// Whether the last of them were found to be the right number, and not only tried.
    settled: bool,
}

impl Run {
    fn tell(&mut self, event: &Value) {
        let seconds = event["seconds"].as_f64().unwrap_or(0.0);
        match event["event"].as_str().unwrap_or_default() {
            "progress" => self.progress.extend(event["records"].as_u64().map(|records| (seconds, records))),
            "scaled" => {
                self.wanted.extend(event["to"].as_u64().map(|workers| (seconds, workers as u32)));
                self.settled = event["settled"] == true;
            }
            _ => {}
        }
    }

    /// Records a second from the middle of the run on, or from where its size had been settled.
    fn speed(&self) -> f64 {
        let (Some(first), Some(&(end, all))) = (self.progress.first(), self.progress.last()) else {
            return 0.0;
        };
        let settled = self.wanted.last().map_or(0.0, |(at, _)| *at);
        let from = settled.max((first.0 + end) / 2.0).min(end - (end - first.0) / 4.0);
        let before = self.progress.iter().rfind(|(at, _)| *at <= from).unwrap_or(first);
        (all - before.1) as f64 / (end - before.0).max(f64::MIN_POSITIVE)
    }

    /// How long all of it took.
    fn seconds(&self) -> f64 {
        self.progress.last().map_or(0.0, |(at, _)| *at)
    }
}

/// Runs all sizes, in turn.
pub fn run(local: &Local, size: &Size) -> Result<Outcome> {
    let mut fixed = vec![Vec::new(); size.fixed.len()];
    let mut automatic = Vec::new();
    for round in 0..size.rounds {
        for (runs, workers) in fixed.iter_mut().zip(size.fixed) {
            let name = format!("fixed-{workers}-{round}");
            runs.push(train(local, size.epochs, &name, json!({ "count": workers, "max": MAX }))?);
        }
        let workers = json!({ "min": 1, "max": MAX });
        automatic.push(train(local, size.epochs_automatic, &format!("auto-{round}"), workers)?);
    }
    outcome(size, &fixed, &automatic)
}

fn train(local: &Local, epochs: u32, name: &str, workers: Value) -> Result<Run> {
    let mut run = Run::default();
    let train = json!({ "epochs": epochs, "batch": 256, "optimizer": "adagrad", "learning_rate": 0.1 });
    local.train(name, json!({ "train": train, "workers": workers, "servers": { "count": 2 } }), |event| {
        run.tell(event);
        Ok(())
    })?;
    eprintln!("{name}: {:.0} s, {:.0} records/s in the end", run.seconds(), run.speed());
    Ok(run)
}

fn outcome(size: &Size, fixed: &[Vec<Run>], automatic: &[Run]) -> Result<Outcome> {
    let mut report = Report::new(
        format!("As many workers as are of use: workers.max: {MAX} on a machine with 2 cores"),
        &["workers", "records/s once settled", "s for an epoch, finding the size included"],
    );
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let values: Vec<f64> = values.collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let speed = |runs: &[Run]| mean(&mut runs.iter().map(Run::speed));
    let seconds = |runs: &[Run], epochs: u32| mean(&mut runs.iter().map(Run::seconds)) / f64::from(epochs);
    for (workers, runs) in size.fixed.iter().zip(fixed) {
        report.row(&[
            format!("{workers}, fixed"),
            number(speed(runs), 0),
            number(seconds(runs, size.epochs), 1),
        ]);
    }
    let settled: Vec<u32> = automatic.iter().filter_map(|run| run.wanted.last()).map(|(_, n)| *n).collect();
    let names: Vec<String> = settled.iter().map(u32::to_string).collect();
    let title = format!("up to {MAX}, settled at {}", names.join(" and "));
    report.row(&[title, number(speed(automatic), 0), number(seconds(automatic, size.epochs_automatic), 1)]);
    let best = fixed.iter().map(|runs| speed(runs)).fold(0.0, f64::max);
    let slower = 1.0 - speed(automatic) / best;
    let way = automatic.first().context("a run")?.wanted.iter().map(|(at, n)| format!("{n} at {at:.0} s"));
    report.note(&format!(
        "Once settled it is {:+.1} % as fast as the best fixed size. The first run asked for {}. Means of {} runs each, taken in turn; \
         DeepFM on {} records, {} epochs with a fixed size and {} without, two servers.",
        -100.0 * slower,
        way.collect::<Vec<_>>().join(", "),
        size.rounds,
        number(size.rows as f64, 0),
        size.epochs,
        size.epochs_automatic,
    ));
    let mut problems = Vec::new();
    if let Some(many) = settled.iter().find(|n| **n > SETTLES_AT) {
        problems.push(format!("it settled at {many} workers"));
    }
    if automatic.iter().any(|run| !run.settled) {
        problems.push("it ended before it had settled".into());
    }
    if slower > SLOWER {
        problems.push(format!("it is {:.1} % slower than the best fixed size", 100.0 * slower));
    }
    let curve = |name: String, runs: &[Run]| Curve {
        name,
        runs: runs
            .iter()
            .map(|run| run.progress.iter().map(|(at, n)| (*at, *n as f64 / 1e6)).collect())
            .collect(),
    };
    let shown = size.fixed.iter().zip(fixed).take(3).map(|(n, runs)| curve(format!("{n} workers"), runs));
    let chart = Curves {
        title: "Records done over time".into(),
        unit_x: "seconds".into(),
        unit_y: "millions of records".into(),
        curves: shown.chain([curve(format!("up to {MAX}, as many as are of use"), automatic)]).collect(),
    };
    Ok(Outcome { name: "workers".into(), report, picture: Picture::Curves(chart), problems })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many records a second, for 100 seconds.
    fn steady(speed: u64, wanted: &[(f64, u32)]) -> Run {
        Run {
            progress: (0..=100).map(|at| (at as f64, at * speed)).collect(),
            wanted: wanted.to_vec(),
            settled: true,
        }
    }

    #[test]
    fn speed_is_that_of_the_settled_part() {
        assert_eq!(steady(1000, &[]).speed(), 1000.0);
        let mut late = steady(1000, &[(10.0, 2), (60.0, 3)]);
        late.progress
            .iter_mut()
            .filter(|(at, _)| *at > 60.0)
            .for_each(|(at, n)| *n = 60_000 + (*at as u64 - 60) * 2000);
        assert_eq!(late.speed(), 2000.0);
    }

    #[test]
    fn too_many_or_too_slow_falls_short() {
        let size = Size { fixed: &[1, 2], rounds: 1, ..Size::new() };
        let fixed = [vec![steady(1000, &[])], vec![steady(1800, &[])]];
        let good = outcome(&size, &fixed, &[steady(1750, &[(5.0, 2)])]).unwrap();
        assert_eq!(good.problems, [""; 0]);
        assert!(
            good.report.markdown().contains("| up to 8, settled at 2 | 1,750 | 11.1 |"),
            "{}",
            good.report.markdown()
        );
        let bad = outcome(&size, &fixed, &[steady(1600, &[(5.0, 4)])]).unwrap();
        assert_eq!(bad.problems, ["it settled at 4 workers", "it is 11.1 % slower than the best fixed size"]);
        let early = outcome(&size, &fixed, &[Run { settled: false, ..steady(1750, &[(5.0, 2)]) }]).unwrap();
        assert_eq!(early.problems, ["it ended before it had settled"]);
    }
}
