//! What is known about data that was made: how good the best possible model is on it.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::world::probability;
use crate::files::discover;

/// The name of the file that holds it, beside the data.
pub(crate) const FILE: &str = "truth.json";

/// What is known about data that was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Truth {
    /// The layout of the data.
    pub layout: String,
    /// The seed it was made from.
    pub seed: u64,
    /// Different ids in the training data, over all fields.
    pub distinct_ids: u64,
    /// The records to train on.
    pub train: SplitTruth,
    /// The records to judge by; `None` where none were made.
    pub test: Option<SplitTruth>,
}

/// What is known about one part of the data. No model can be expected to do better on it: these are
/// the figures of one that knows each record's true probability.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitTruth {
    /// Records.
    pub rows: u64,
    /// Share of records whose label is 1.
    pub positive: f64,
    /// Logloss of the true probabilities.
    pub best_logloss: f64,
    /// Area under the ROC curve of the true probabilities.
    pub best_auc: f64,
}

impl Truth {
    /// The truth that lies beside the data files which `patterns` name, if it was made.
    pub fn beside(patterns: &[String]) -> Option<Truth> {
        let files = discover(patterns, None).ok()?;
        let directory = Path::new(&files.first()?.path).parent()?;
        let text = elasticdl_storage::read(directory.join(FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

/// Collects what [`SplitTruth`] says, record by record.
#[derive(Debug, Clone)]
pub(crate) struct Score {
    rows: u64,
    loss: f64,
    /// How many records with label 0 and 1 have log-odds in each of many narrow steps.
    steps: Vec<[u64; 2]>,
}

impl Score {
    /// Log-odds are told apart to 1/2048 between −16 and 16: ties that this makes don't show in the AUC.
    const STEPS: usize = 1 << 16;

    pub fn new() -> Self {
        Score { rows: 0, loss: 0.0, steps: vec![[0; 2]; Self::STEPS] }
    }

    /// Counts a record.
    #[inline]
    pub fn add(&mut self, logit: f32, label: bool) {
        self.rows += 1;
        self.loss -= if label { probability(logit).ln() } else { probability(-logit).ln() };
        let step = ((logit + 16.0) * 2048.0).clamp(0.0, (Self::STEPS - 1) as f32) as usize;
        self.steps[step][usize::from(label)] += 1;
    }

    /// Adds what another one counted.
    pub fn merge(&mut self, other: &Score) {
        self.rows += other.rows;
        self.loss += other.loss;
        for (mine, theirs) in self.steps.iter_mut().zip(&other.steps) {
            mine[0] += theirs[0];
            mine[1] += theirs[1];
        }
    }

    /// The figures; `None` without records.
    pub fn truth(&self) -> Option<SplitTruth> {
        if self.rows == 0 {
            return None;
        }
        let (mut zeros, mut ones, mut ordered) = (0.0, 0.0, 0.0);
        for [zero, one] in &self.steps {
            let (zero, one) = (*zero as f64, *one as f64);
            ordered += one * (zeros + zero / 2.0);
            zeros += zero;
            ones += one;
        }
        let pairs: f64 = zeros * ones;
        Some(SplitTruth {
            rows: self.rows,
            positive: ones / self.rows as f64,
            best_logloss: self.loss / self.rows as f64,
            best_auc: if pairs > 0.0 { ordered / pairs } else { 0.5 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_definition() {
        let mut score = Score::new();
        assert_eq!(score.truth(), None);
        for (logit, label) in [(0.0, false), (2.0, true), (2.0, false), (-1.0, true), (3.0, true)] {
            score.add(logit, label);
        }
        let truth = score.truth().expect("it has records");
        // Pairs (1, 0): 2>0, 2=2, -1<0, -1<2, 3>0, 3>2: 3.5 of 6.
        assert!((truth.best_auc - 3.5 / 6.0).abs() < 1e-12, "{}", truth.best_auc);
        let loss = |p: f64| -p.ln();
        let expected = loss(0.5) + loss(0.880797) + loss(0.119203) + loss(0.268941) + loss(0.952574);
        assert!((truth.best_logloss - expected / 5.0).abs() < 1e-5, "{}", truth.best_logloss);
        assert_eq!((truth.rows, truth.positive), (5, 0.6));
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let (mut whole, mut left, mut right) = (Score::new(), Score::new(), Score::new());
        for at in 0..100 {
            let (logit, label) = (at as f32 * 0.07 - 3.0, at % 3 == 0);
            whole.add(logit, label);
            if at < 50 { &mut left } else { &mut right }.add(logit, label);
        }
        left.merge(&right);
        let (whole, parts) = (whole.truth().expect("records"), left.truth().expect("records"));
        assert_eq!(whole.best_auc, parts.best_auc);
        assert!((whole.best_logloss - parts.best_logloss).abs() < 1e-12);
    }
}
