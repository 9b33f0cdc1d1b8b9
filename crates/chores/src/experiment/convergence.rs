//! AUC over steps with 4 workers, with 8, and with a number that changes between 4 and 8 while they train.
//!
//! Every way is run with the same seeds on the same data, so that runs are compared in pairs. Between two evaluations
//! of a model that is being trained it goes on changing; the last one is of the model as it is saved.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::curves::{Curve, Curves};
use super::equivalence::Interval;
use super::local::Local;
use super::report::{Report, number};
use super::{Outcome, Picture};

/// Differences below this are what was published.
const MARGIN: f64 = 0.0017;
const BATCH: u64 = 256;

/// How large.
#[derive(Debug, Clone)]
pub struct Size {
    /// Records of the one epoch.
    pub rows: u64,
    seeds: &'static [u64],
    /// So many steps between two evaluations.
    steps: u64,
}

impl Size {
    /// The published kind of experiment, or a short form.
    pub fn of(short: bool) -> Size {
        match short {
            true => Size { rows: 4_000_000, seeds: &[1], steps: 5000 },
            false => Size { rows: 4_000_000, seeds: &[1, 2, 3], steps: 2000 },
        }
    }
}

/// How many workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workers {
    Fixed(u32),
    Elastic,
}

/// Where the elastic job changes, in hundredths of its steps, and to how many workers.
const CHANGES: [(u64, u32); 5] = [(15, 8), (35, 5), (50, 8), (70, 4), (85, 6)];
const WAYS: [Workers; 3] = [Workers::Fixed(4), Workers::Fixed(8), Workers::Elastic];

impl Workers {
    fn name(self) -> String {
        match self {
            Workers::Fixed(workers) => format!("{workers} workers"),
            Workers::Elastic => "4 to 8 workers, elastic".into(),
        }
    }

    fn first(self) -> u32 {
        match self {
            Workers::Fixed(workers) => workers,
            Workers::Elastic => 4,
        }
    }
}

/// AUC after steps, in order; the last is that of the saved model.
type Points = Vec<(u64, f64)>;

/// Runs all ways with all seeds.
pub fn run(local: &Local, size: &Size) -> Result<Outcome> {
    let mut runs: Vec<Vec<Points>> = vec![Vec::new(); WAYS.len()];
    for seed in size.seeds {
        // The ways take turns, so that what else the machine does hits all of them.
        for (way, workers) in WAYS.into_iter().enumerate() {
            let points = train(local, size, workers, *seed)?;
            let (steps, auc) = points[points.len() - 1];
            eprintln!("{}, seed {seed}: AUC {auc:.5} after {steps} steps", workers.name());
            runs[way].push(points);
        }
    }
    Ok(outcome(size, &runs))
}

fn train(local: &Local, size: &Size, workers: Workers, seed: u64) -> Result<Points> {
    let mut changes = if workers == Workers::Elastic { CHANGES.to_vec() } else { Vec::new() };
    let name =
        format!("{}-{seed}", if changes.is_empty() { workers.first().to_string() } else { "elastic".into() });
    let steps_all = size.rows / BATCH;
    let mut points = Points::new();
    local.train(&name, job(size, workers, seed), |event| {
        match event["event"].as_str().unwrap_or_default() {
            "evaluated" => points.extend(event["steps"].as_u64().zip(event["auc"].as_f64())),
            "progress" => {
                let steps = event["records"].as_u64().unwrap_or(0) / BATCH;
                while let Some(&(_, to)) = changes.first().filter(|(at, _)| steps * 100 >= steps_all * at) {
                    changes.remove(0);
                    local.scale(&name, to)?;
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    ensure!(
        changes.is_empty(),
        "the job {name} was over before its workers had changed: {changes:?} are left"
    );
    ensure!(!points.is_empty(), "the job {name} was never evaluated");
    Ok(points)
}

fn job(size: &Size, workers: Workers, seed: u64) -> Value {
    json!({
        "train": { "epochs": 1, "batch": BATCH, "optimizer": "adagrad", "learning_rate": 0.1, "seed": seed },
        "evaluate": { "steps": size.steps },
        // One batch under way in each worker, as in the original: steps of many workers at once are stale in any
        // case, and it is their number that is looked at.
        "workers": { "count": workers.first(), "max": 8, "pipeline": 1 },
        "servers": { "count": 2 },
    })
}

/// What the runs say.
fn outcome(size: &Size, runs: &[Vec<Points>]) -> Outcome {
    let mut report = Report::new(
        format!("AUC over steps with 4, 8 and 4 to 8 workers, {} seeds", size.seeds.len()),
        &["", "mean AUC at the end", "difference to 4 workers", "to 8 workers"],
    );
    let mut problems = Vec::new();
    let mut worst = (0.0, 0);
    for (way, workers) in WAYS.into_iter().enumerate() {
        let mut cells = vec![workers.name(), number_auc(mean(&last(&runs[way])))];
        for other in 0..2 {
            if other >= way {
                cells.push("".into());
                continue;
            }
            let interval = Interval::of(&differences(&last(&runs[way]), &last(&runs[other])));
            cells.push(format!("{:+.5} ± {:.5}", interval.mean, interval.reach));
            if !interval.is_within(MARGIN) {
                let (a, b) = (workers.name(), WAYS[other].name());
                problems.push(format!("{a} and {b} may differ by {:.5} at the end", interval.farthest()));
            }
            for (steps, on_the_way) in on_the_way(&runs[way], &runs[other]) {
                if on_the_way.mean.abs() > f64::abs(worst.0) {
                    worst = (on_the_way.mean, steps);
                }
                if on_the_way.mean.abs() > MARGIN {
                    let (a, b) = (workers.name(), WAYS[other].name());
                    problems
                        .push(format!("{a} and {b} differ by {:+.5} after {steps} steps", on_the_way.mean));
                }
            }
        }
        report.row(&cells);
    }
    report.note(&format!(
        "Differences are means over pairs with one seed, ± half of the 90 % confidence interval: two ways are equivalent where \
         that lies within ±{MARGIN}. On the way, at equal steps, no two means differ by more than {:.5} (after {} steps). \
         DeepFM on {} synthetic records, batches of {BATCH}, asynchronous, one batch under way in each worker, two servers; the elastic job changes to {} workers.",
        f64::abs(worst.0),
        number(worst.1 as f64, 0),
        number(size.rows as f64, 0),
        CHANGES.map(|(at, to)| format!("{to} at {at} %")).join(", "),
    ));
    let curves = WAYS.iter().zip(runs).map(|(workers, runs)| Curve {
        name: workers.name(),
        runs: runs
            .iter()
            .map(|points| points.iter().map(|(steps, auc)| (*steps as f64, *auc)).collect())
            .collect(),
    });
    let chart = Curves {
        title: "AUC over steps, one line a seed".into(),
        unit_x: "steps".into(),
        unit_y: "AUC".into(),
        curves: curves.collect(),
    };
    Outcome { name: "convergence".into(), report, picture: Picture::Curves(chart), problems }
}

fn number_auc(auc: f64) -> String {
    format!("{auc:.5}")
}

fn last(runs: &[Points]) -> Vec<f64> {
    runs.iter().filter_map(|points| points.last()).map(|(_, auc)| *auc).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn differences(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(a, b)| a - b).collect()
}

/// Differences at each evaluation that all runs have, with the steps it began at. The first half is left out: AUC
/// climbs there, and a few steps more or less make a difference that says nothing of the workers.
fn on_the_way(ours: &[Points], theirs: &[Points]) -> Vec<(u64, Interval)> {
    let count = ours.iter().chain(theirs).map(Vec::len).min().unwrap_or(0).saturating_sub(1);
    let at = |n: usize| {
        let auc = |runs: &[Points]| runs.iter().map(|points| points[n].1).collect::<Vec<f64>>();
        (ours[0][n].0, Interval::of(&differences(&auc(ours), &auc(theirs))))
    };
    (count / 2..count).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(shift: f64) -> Vec<Points> {
        (0..3)
            .map(|seed| {
                (1..=4).map(|n| (n * 100, 0.7 + n as f64 * 0.01 + f64::from(seed) * 0.001 + shift)).collect()
            })
            .collect()
    }

    #[test]
    fn ways_that_differ_by_less_than_the_margin_pass_and_others_do_not() {
        let size = Size::of(false);
        let same = outcome(&size, &[runs(0.0), runs(0.001), runs(0.0005)]);
        assert_eq!(same.problems, [""; 0]);
        assert!(
            same.report.markdown().contains("| 8 workers | 0.74200 | +0.00100 ± 0.00000 |  |"),
            "{}",
            same.report.markdown()
        );
        let other = outcome(&size, &[runs(0.0), runs(0.0), runs(0.002)]);
        assert!(
            other
                .problems
                .iter()
                .any(|p| p.contains("elastic and 4 workers may differ by 0.00200 at the end")),
            "{:?}",
            other.problems
        );
        assert!(other.problems.iter().any(|p| p.contains("after 300 steps")), "{:?}", other.problems);
    }
}
