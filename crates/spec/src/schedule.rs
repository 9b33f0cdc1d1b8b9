//! How the learning rate goes over a job.
//!
//! The rate of a batch is a pure function of its place in the nominal order of the job: its epoch, its task's
//! turn in that epoch, its number in the task. When it arrives, and who sends it, says nothing: a batch that is
//! replayed after a death gets the very rate that it had.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// How the learning rate goes: up from nothing at first, then down as [`Decay`] says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// `train.warmup_steps`: the rate grows linearly over so many batches.
    pub warmup_steps: u64,
    /// `train.schedule`
    pub decay: Decay,
}

/// How the learning rate falls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Decay {
    /// It stays.
    #[default]
    Constant,
    /// By a factor, again and again.
    Step {
        /// `train.decay_steps`: after each so many batches.
        steps: u64,
        /// `train.decay_factor`
        factor: f64,
    },
    /// By half a cosine, from the end of the warm-up to the last batch of the job.
    Cosine {
        /// What is left of the rate at the last batch: `train.learning_rate_end` by `train.learning_rate`.
        end: f64,
    },
}

/// Where a task stands in the nominal order of the job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// Batches of the job before the first one of the task.
    pub first: u64,
    /// Batches of the whole job.
    pub total: u64,
}

impl Schedule {
    /// Whether the rate differs from batch to batch, so that a task's position must be known.
    pub fn varies(&self) -> bool {
        *self != Schedule::default()
    }

    /// What the learning rate is multiplied by for this batch of the task at `position`.
    pub fn factor(&self, position: Position, batch: u64) -> f32 {
        let step = position.first + batch;
        let warm = match self.warmup_steps {
            warmup if step < warmup => (step + 1) as f64 / warmup as f64,
            _ => 1.0,
        };
        let decay = match self.decay {
            Decay::Constant => 1.0,
            Decay::Step { steps, factor } => power(factor, step / steps),
            Decay::Cosine { end } => {
                let last = position.total.saturating_sub(self.warmup_steps.saturating_add(1)).max(1);
                let done = step.saturating_sub(self.warmup_steps) as f64 / last as f64;
                // The series ends a hair below -1, and a rate is not negative.
                let left = (1.0 + cosine_of_half_turns(done.min(1.0))).max(0.0);
                end + (1.0 - end) * 0.5 * left
            }
        };
        (warm * decay) as f32
    }
}

/// `factor` to the n-th, by squaring: a library's power may differ in its last bit from machine to machine.
fn power(factor: f64, mut n: u64) -> f64 {
    let (mut product, mut square) = (1.0, factor);
    while n > 0 {
        if n & 1 == 1 {
            product *= square;
        }
        square *= square;
        n >>= 1;
    }
    product
}

/// cos(π·x) for x from 0 to 1, from additions and products alone for the same reason: the series of
/// sin(π·(½ - x)), whose first term left out is below 1e-16.
fn cosine_of_half_turns(x: f64) -> f64 {
    const TERMS: u32 = 12;
    let y = PI * (0.5 - x);
    let (mut term, mut sum) = (y, y);
    for n in 1..TERMS {
        let k = f64::from(2 * n);
        term *= -y * y / (k * (k + 1.0));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(schedule: Schedule, total: u64, steps: &[u64]) -> Vec<f32> {
        steps.iter().map(|step| schedule.factor(Position { first: *step, total }, 0)).collect()
    }

    #[test]
    fn a_constant_rate_stays_and_needs_no_place() {
        let schedule = Schedule::default();
        assert!(!schedule.varies());
        assert_eq!(factors(schedule, 0, &[0, 1, 1 << 40]), [1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_warm_up_grows_from_the_first_batch_to_the_full_rate() {
        let schedule = Schedule { warmup_steps: 4, decay: Decay::Constant };
        assert!(schedule.varies());
        assert_eq!(factors(schedule, 100, &[0, 1, 2, 3, 4, 99]), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn steps_are_counted_from_the_beginning_of_the_job() {
        let schedule = Schedule { warmup_steps: 2, decay: Decay::Step { steps: 10, factor: 0.5 } };
        assert_eq!(
            factors(schedule, 100, &[0, 1, 9, 10, 19, 20, 35]),
            [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.125]
        );
        let far = Schedule { warmup_steps: 0, decay: Decay::Step { steps: 1, factor: 0.5 } };
        assert_eq!(factors(far, 100, &[u64::MAX]), [0.0]);
    }

    #[test]
    fn half_a_cosine_ends_with_the_last_batch() {
        let schedule = Schedule { warmup_steps: 0, decay: Decay::Cosine { end: 0.1 } };
        let got = factors(schedule, 101, &[0, 25, 50, 75, 100, 200]);
        // 0.1 + 0.9 · ½ · (1 + cos(π · step / 100))
        let want = [1.0, 0.868_198, 0.55, 0.231_801_95, 0.1, 0.1];
        assert!(got.iter().zip(want).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6), "{got:?}");
        let warm = Schedule { warmup_steps: 10, decay: Decay::Cosine { end: 0.0 } };
        assert_eq!(factors(warm, 21, &[4, 9, 10, 15, 20]), [0.5, 1.0, 1.0, 0.5, 0.0]);
        assert_eq!(factors(warm, 3, &[0, 2]), [0.1, 0.3], "a job shorter than its warm-up");
    }

    /// Goal: servers refuse factors that are negative or not finite.
    #[test]
    fn every_factor_is_from_nothing_to_one() {
        let decays = [
            Decay::Constant,
            Decay::Step { steps: 3, factor: 0.0 },
            Decay::Step { steps: 1, factor: 0.9 },
            Decay::Cosine { end: 0.0 },
            Decay::Cosine { end: 0.5 },
        ];
        for (decay, warmup_steps) in decays.into_iter().flat_map(|d| [0, 1, 7, u64::MAX].map(|w| (d, w))) {
            let schedule = Schedule { warmup_steps, decay };
            for total in [0, 1, 2, 50, 1000] {
                let all: Vec<u64> = (0..=total).collect();
                let factors = factors(schedule, total, &all);
                assert!(factors.iter().all(|f| (0.0..=1.0).contains(f)), "{schedule:?} {factors:?}");
            }
        }
    }

    #[test]
    fn the_cosine_is_that_of_the_library() {
        for n in 0..=1000 {
            let x = f64::from(n) / 1000.0;
            assert!((cosine_of_half_turns(x) - (PI * x).cos()).abs() < 1e-15, "{x}");
        }
    }

    #[test]
    fn a_batch_has_one_rate_whatever_task_it_is_counted_from() {
        let schedule = Schedule { warmup_steps: 7, decay: Decay::Cosine { end: 0.01 } };
        let at = |first, batch| schedule.factor(Position { first, total: 50 }, batch).to_bits();
        assert_eq!(at(32, 3), at(35, 0));
        assert_eq!(at(0, 5), at(5, 0));
    }
}
