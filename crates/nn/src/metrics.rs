//! How good predictions are: logloss, AUC, calibration. Mergeable, so that each worker scores its
//! own records.

use serde::{Deserialize, Serialize};

/// Bins of the histogram of predictions, over log-odds in ±[`LOG_ODDS_MAX`]. At 2,000 bins per
/// unit AUC is within 1e-4 of exact even where all predictions are close together.
const BINS: usize = 1 << 16;

/// Log-odds beyond this share the last bin; an f32 probability near 1 knows no larger ones.
const LOG_ODDS_MAX: f64 = 16.0;

/// Probabilities are moved this far away from 0 and 1 for logloss, which is infinite there.
const PROBABILITY_MIN: f64 = 1e-7;

/// Scores of some records; those of others can be merged in.
///
/// Equal predictions are ties, each worth half in AUC. A prediction that is NaN makes logloss and
/// AUC NaN, and so do merges with it: bad numbers are never averaged away.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Compact", try_from = "Compact")]
pub struct Scores {
    count: u64,
    logloss_sum: f64,
    label_sum: f64,
    prediction_sum: f64,
    /// Records with label 0 and 1 by bin of prediction; empty until the first record.
    bins: Vec<[u64; 2]>,
}

impl Scores {
    /// Adds a record.
    pub fn add(&mut self, probability: f32, label: f32) {
        let (p, y) = (f64::from(probability), f64::from(label));
        self.count += 1;
        self.label_sum += y;
        self.prediction_sum += p;
        if p.is_nan() {
            self.logloss_sum = f64::NAN;
            return;
        }
        let clipped = p.clamp(PROBABILITY_MIN, 1.0 - PROBABILITY_MIN);
        self.logloss_sum -= y * clipped.ln() + (1.0 - y) * (-clipped).ln_1p();
        if self.bins.is_empty() {
            self.bins = vec![[0; 2]; BINS];
        }
        self.bins[bin(p)][usize::from(label > 0.5)] += 1;
    }

    /// Adds a record per pair.
    pub fn add_all(&mut self, probabilities: &[f32], labels: &[f32]) {
        assert_eq!(probabilities.len(), labels.len(), "a label per prediction");
        probabilities.iter().zip(labels).for_each(|(&p, &y)| self.add(p, y));
    }

    /// Adds what another one has seen.
    pub fn merge(&mut self, other: &Scores) {
        self.count += other.count;
        self.logloss_sum += other.logloss_sum;
        self.label_sum += other.label_sum;
        self.prediction_sum += other.prediction_sum;
        if self.bins.is_empty() {
            self.bins.clone_from(&other.bins);
            return;
        }
        for (mine, theirs) in self.bins.iter_mut().zip(&other.bins) {
            mine[0] += theirs[0];
            mine[1] += theirs[1];
        }
    }

    /// Records seen.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean logloss; NaN without records.
    pub fn logloss(&self) -> f64 {
        self.logloss_sum / self.count as f64
    }

    /// Mean label: how often it was 1; NaN without records.
    pub fn label_mean(&self) -> f64 {
        self.label_sum / self.count as f64
    }

    /// Mean prediction, which is near the mean label when calibrated; NaN without records.
    pub fn prediction_mean(&self) -> f64 {
        self.prediction_sum / self.count as f64
    }

    /// Chance that a record with label 1 is given a higher prediction than one with label 0; NaN
    /// where one of the labels was never seen.
    pub fn auc(&self) -> f64 {
        if self.logloss_sum.is_nan() {
            return f64::NAN;
        }
        let (mut below, mut wins, mut positives) = (0.0, 0.0, 0.0);
        for &[negative, positive] in &self.bins {
            let (negative, positive) = (negative as f64, positive as f64);
            wins += positive * (below + 0.5 * negative);
            below += negative;
            positives += positive;
        }
        wins / (positives * below)
    }
}

/// The bin of a probability: even steps of log-odds.
fn bin(p: f64) -> usize {
    let log_odds = (p / (1.0 - p)).ln();
    let scaled = (log_odds + LOG_ODDS_MAX) * (BINS as f64 / (2.0 * LOG_ODDS_MAX));
    // A cast saturates, so that 0 and 1, whose log-odds are infinite, get the first and last bin.
    (scaled as usize).min(BINS - 1)
}

/// [`Scores`] on the way to another process. NaN is `None`, which JSON can hold.
#[derive(Serialize, Deserialize)]
struct Compact {
    count: u64,
    logloss_sum: Option<f64>,
    label_sum: Option<f64>,
    prediction_sum: Option<f64>,
    /// For each bin that is not empty: bins since the last one, label 0, label 1.
    bins: Vec<(u32, u64, u64)>,
}

impl From<Scores> for Compact {
    fn from(scores: Scores) -> Compact {
        let some = |x: f64| (!x.is_nan()).then_some(x);
        let mut last = 0;
        let mut bins = Vec::new();
        for (bin, &[negative, positive]) in scores.bins.iter().enumerate() {
            if negative + positive > 0 {
                bins.push(((bin - last) as u32, negative, positive));
                last = bin;
            }
        }
        Compact {
            count: scores.count,
            logloss_sum: some(scores.logloss_sum),
            label_sum: some(scores.label_sum),
            prediction_sum: some(scores.prediction_sum),
            bins,
        }
    }
}

impl TryFrom<Compact> for Scores {
    type Error = String;

    fn try_from(compact: Compact) -> Result<Scores, String> {
        let mut bins = if compact.bins.is_empty() { Vec::new() } else { vec![[0; 2]; BINS] };
        let mut bin = 0usize;
        for (gap, negative, positive) in compact.bins {
            bin += gap as usize;
            let counts =
                bins.get_mut(bin).ok_or_else(|| format!("scores have {BINS} bins, not one {bin}"))?;
            *counts = [negative, positive];
        }
        Ok(Scores {
            count: compact.count,
            logloss_sum: compact.logloss_sum.unwrap_or(f64::NAN),
            label_sum: compact.label_sum.unwrap_or(f64::NAN),
            prediction_sum: compact.prediction_sum.unwrap_or(f64::NAN),
            bins,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elasticdl_spec::mix::Rng;
    use proptest::prelude::*;

    /// AUC by its definition: all pairs.
    fn auc_of_all_pairs(records: &[(f32, f32)]) -> f64 {
        let of = |label: f32| records.iter().filter(move |r| r.1 == label).map(|r| r.0);
        let (mut wins, mut pairs) = (0.0, 0.0);
        for positive in of(1.0) {
            for negative in of(0.0) {
                pairs += 1.0;
                wins += if positive > negative {
                    1.0
                } else if positive == negative {
                    0.5
                } else {
                    0.0
                };
            }
        }
        wins / pairs
    }

    fn scores_of(records: &[(f32, f32)]) -> Scores {
        let mut scores = Scores::default();
        records.iter().for_each(|&(p, y)| scores.add(p, y));
        scores
    }

    /// Records whose label follows the prediction, spread so wide in log-odds around a centre.
    fn planted(seed: u64, count: usize, centre: f64, spread: f64) -> Vec<(f32, f32)> {
        let mut rng = Rng::new(seed);
        (0..count)
            .map(|_| {
                let label = f64::from(u8::from(rng.uniform() < 0.4));
                let log_odds = centre + spread * (rng.normal() + label);
                ((1.0 / (1.0 + (-log_odds).exp())) as f32, label as f32)
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn auc_is_that_of_all_pairs(seed: u64, centre in -6.0..6.0f64, spread in 0.02..3.0f64) {
            let records = planted(seed, 2000, centre, spread);
            let (binned, exact) = (scores_of(&records).auc(), auc_of_all_pairs(&records));
            prop_assert!((binned - exact).abs() < 1e-4, "{binned} {exact}");
        }

        #[test]
        fn ties_count_half_exactly(records in prop::collection::vec((0u8..5, 0u8..2), 2..200)) {
            let records: Vec<(f32, f32)> =
                records.iter().map(|&(p, y)| (f32::from(p) * 0.25, f32::from(y))).collect();
            let (binned, exact) = (scores_of(&records).auc(), auc_of_all_pairs(&records));
            prop_assert!(binned == exact || binned.is_nan() && exact.is_nan(), "{binned} {exact}");
        }

        #[test]
        fn merging_parts_is_scoring_the_whole(seed: u64, cut in 0usize..300) {
            let records = planted(seed, 300, 0.0, 1.0);
            let whole = scores_of(&records);
            let mut merged = scores_of(&records[..cut]);
            merged.merge(&scores_of(&records[cut..]));
            prop_assert_eq!(merged.auc().to_bits(), whole.auc().to_bits());
            prop_assert_eq!(merged.count(), 300);
            prop_assert!((merged.logloss() - whole.logloss()).abs() < 1e-12);
            prop_assert!((merged.prediction_mean() - whole.prediction_mean()).abs() < 1e-12);
        }
    }

    #[test]
    fn logloss_is_finite_at_the_ends_and_exact_between() {
        let scores = scores_of(&[(0.25, 1.0), (0.25, 0.0)]);
        assert!((scores.logloss() - -(0.25f64.ln() + 0.75f64.ln()) / 2.0).abs() < 1e-12);
        assert_eq!((scores.label_mean(), scores.prediction_mean()), (0.5, 0.25));
        let wrong = scores_of(&[(0.0, 1.0), (1.0, 0.0)]);
        assert!((wrong.logloss() - -1e-7f64.ln()).abs() < 1e-6, "{}", wrong.logloss());
        assert_eq!(wrong.auc(), 0.0);
    }

    #[test]
    fn nan_survives_merging_and_json() {
        let mut scores = scores_of(&[(0.3, 1.0), (0.2, 0.0)]);
        scores.merge(&scores_of(&[(f32::NAN, 1.0)]));
        let text = serde_json::to_string(&scores).expect("scores are JSON");
        let back: Scores = serde_json::from_str(&text).expect("our own JSON");
        assert_eq!(back.count(), 3);
        assert!(back.logloss().is_nan() && back.auc().is_nan() && back.prediction_mean().is_nan());
    }

    #[test]
    fn json_is_sparse_and_complete() {
        assert_eq!(
            serde_json::from_str::<Scores>(&serde_json::to_string(&Scores::default()).unwrap()).unwrap(),
            Scores::default()
        );
        let scores = scores_of(&[(0.0, 0.0), (0.5, 1.0), (1.0, 1.0)]);
        let text = serde_json::to_string(&scores).unwrap();
        assert!(text.ends_with(r#""bins":[[0,1,0],[32768,0,1],[32767,0,1]]}"#), "{text}");
        assert_eq!(serde_json::from_str::<Scores>(&text).unwrap(), scores);
        let beyond = text.replace("32767", "32768");
        assert!(serde_json::from_str::<Scores>(&beyond).unwrap_err().to_string().contains("65536 bins"));
    }

    #[test]
    fn no_records_have_no_scores() {
        let none = Scores::default();
        assert!(none.auc().is_nan() && none.logloss().is_nan());
    }
}
