//! How good predictions are: log loss and AUC, mergeable over workers.

use serde::{Deserialize, Serialize};

/// Bins of the histogram over the logit; AUC from it is within 1e-4 of the exact one.
const BINS: usize = 16_384;
/// Logits beyond this share the outermost bins.
const LOGIT_MAX: f32 = 20.0;

/// Scores of a set of records. Merging is exact, in any order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(into = "Sparse", try_from = "Sparse")]
pub struct Scores {
    records: u64,
    loss_sum: f64,
    label_sum: f64,
    prediction_sum: f64,
    /// Records by bin of the predicted logit: negatives, positives.
    bins: Vec<[u64; 2]>,
}

impl Default for Scores {
    fn default() -> Self {
        Scores { records: 0, loss_sum: 0.0, label_sum: 0.0, prediction_sum: 0.0, bins: vec![[0; 2]; BINS] }
    }
}

impl Scores {
    /// Adds a record: the predicted probability of 1, and the label (0 or 1).
    pub fn add(&mut self, probability: f32, label: f32) {
        // As far from certainty as a 32-bit probability can be told apart from it; NaN stays NaN.
        let p = f64::from(probability.clamp(1e-7, 1.0 - 1e-7));
        let positive = label > 0.5;
        self.records += 1;
        self.loss_sum -= if positive { p.ln() } else { (-p).ln_1p() };
        self.label_sum += f64::from(label);
        self.prediction_sum += f64::from(probability);
        self.bins[bin(p as f32)][usize::from(positive)] += 1;
    }

    /// Adds the records of another.
    pub fn merge(&mut self, other: &Scores) {
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.label_sum += other.label_sum;
        self.prediction_sum += other.prediction_sum;
        for (ours, theirs) in self.bins.iter_mut().zip(&other.bins) {
            ours[0] += theirs[0];
            ours[1] += theirs[1];
        }
    }

    /// How many records.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Mean log loss; `None` without records.
    pub fn logloss(&self) -> Option<f64> {
        (self.records > 0).then(|| self.loss_sum / self.records as f64)
    }

    /// Mean prediction over mean label: 1 is calibrated. `None` without positives.
    pub fn calibration(&self) -> Option<f64> {
        (self.label_sum > 0.0).then(|| self.prediction_sum / self.label_sum)
    }

    /// Area under the ROC curve: how probable it is that a positive scores above a negative, a tie
    /// counting half. `None` where one of the two kinds is absent.
    pub fn auc(&self) -> Option<f64> {
        let (mut below, mut wins, mut positives) = (0.0, 0.0, 0.0);
        for &[negative, positive] in &self.bins {
            wins += positive as f64 * (below + negative as f64 / 2.0);
            below += negative as f64;
            positives += positive as f64;
        }
        (below > 0.0 && positives > 0.0).then(|| wins / (below * positives))
    }
}

fn bin(probability: f32) -> usize {
    let logit = (probability / (1.0 - probability)).ln();
    let scaled = (logit + LOGIT_MAX) / (2.0 * LOGIT_MAX) * BINS as f32;
    (scaled.max(0.0) as usize).min(BINS - 1)
}

/// The form in which scores travel: only the bins that hold something.
#[derive(Serialize, Deserialize)]
struct Sparse {
    records: u64,
    loss_sum: f64,
    label_sum: f64,
    prediction_sum: f64,
    bins: Vec<(u16, u64, u64)>,
}

impl From<Scores> for Sparse {
    fn from(scores: Scores) -> Self {
        let filled = scores.bins.iter().enumerate().filter(|(_, bin)| **bin != [0; 2]);
        Sparse {
            records: scores.records,
            loss_sum: scores.loss_sum,
            label_sum: scores.label_sum,
            prediction_sum: scores.prediction_sum,
            bins: filled.map(|(i, bin)| (i as u16, bin[0], bin[1])).collect(),
        }
    }
}

impl TryFrom<Sparse> for Scores {
    type Error = String;

    fn try_from(sparse: Sparse) -> Result<Self, String> {
        let mut scores = Scores {
            records: sparse.records,
            loss_sum: sparse.loss_sum,
            label_sum: sparse.label_sum,
            prediction_sum: sparse.prediction_sum,
            ..Scores::default()
        };
        for (index, negative, positive) in sparse.bins {
            let bin = scores.bins.get_mut(usize::from(index)).ok_or(format!("there is no bin {index}"))?;
            *bin = [negative, positive];
        }
        Ok(scores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Rng;
    use proptest::prelude::*;

    fn exact_auc(records: &[(f32, f32)]) -> f64 {
        let (mut wins, mut pairs) = (0.0, 0.0);
        for (p, _) in records.iter().filter(|r| r.1 == 1.0) {
            for (q, _) in records.iter().filter(|r| r.1 == 0.0) {
                pairs += 1.0;
                wins += if p > q {
                    1.0
                } else if p == q {
                    0.5
                } else {
                    0.0
                };
            }
        }
        wins / pairs
    }

    proptest! {
        #[test]
        fn auc_is_that_of_brute_force_however_the_records_are_spread(seed: u64) {
            let mut rng = Rng::new(seed);
            let records: Vec<(f32, f32)> = (0..800)
                .map(|_| {
                    let p = 1.0 / (1.0 + (-(rng.normal() * 1.5 - 1.0) as f32).exp());
                    (p, if rng.uniform() < f64::from(p) { 1.0 } else { 0.0 })
                })
                .collect();
            let mut parts = vec![Scores::default(); 3];
            for (i, (p, y)) in records.iter().enumerate() {
                parts[i % 3].add(*p, *y);
            }
            let mut all = Scores::default();
            for part in &parts {
                let travelled = serde_json::from_str(&serde_json::to_string(part).unwrap()).unwrap();
                all.merge(&travelled);
            }
            prop_assert!((all.auc().unwrap() - exact_auc(&records)).abs() < 5e-4);
            prop_assert_eq!(all.records(), 800);
        }
    }

    #[test]
    fn logloss_is_the_mean_and_ties_count_half() {
        let mut scores = Scores::default();
        for label in [0.0, 1.0] {
            scores.add(0.5, label);
        }
        assert!((scores.logloss().unwrap() - std::f64::consts::LN_2).abs() < 1e-12);
        assert_eq!(scores.auc(), Some(0.5));
        assert_eq!(scores.calibration(), Some(1.0));
    }

    #[test]
    fn nothing_is_not_a_figure_and_nan_shows() {
        assert_eq!((Scores::default().logloss(), Scores::default().auc()), (None, None));
        let mut scores = Scores::default();
        scores.add(f32::NAN, 1.0);
        assert!(scores.logloss().unwrap().is_nan());
    }
}
