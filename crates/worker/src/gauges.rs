//! Where a worker's time goes, for the status page. Counters only: what they mean is judged elsewhere.
#![expect(clippy::disallowed_methods, reason = "measures how long stages take; nothing decides by it")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What a thread spends time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading and decoding records, and deduplicating their ids.
    Reading,
    /// Fencing and pulling, with all waiting for servers.
    Pulling,
    /// The model.
    Computing,
    /// Pushing, with all waiting for servers.
    Pushing,
    /// The model's thread, waiting for a pulled batch.
    Waiting,
}

impl Stage {
    const ALL: [(Stage, &'static str); 5] = [
        (Stage::Reading, "reading_seconds"),
        (Stage::Pulling, "pulling_seconds"),
        (Stage::Computing, "computing_seconds"),
        (Stage::Pushing, "pushing_seconds"),
        (Stage::Waiting, "waiting_seconds"),
    ];
}

/// Counters since the worker started.
#[derive(Debug, Default)]
pub struct Gauges {
    nanoseconds: [AtomicU64; Stage::ALL.len()],
    batches: AtomicU64,
    records: AtomicU64,
    redone: AtomicU64,
}

impl Gauges {
    /// Does `what` and counts its time for `stage`.
    pub fn time<T>(&self, stage: Stage, what: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = what();
        let spent = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds[stage as usize].fetch_add(spent, Ordering::Relaxed);
        outcome
    }

    /// Counts a batch that was pushed and acknowledged, or evaluated.
    pub fn batch_done(&self, records: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records, Ordering::Relaxed);
    }

    /// Counts a task that goes back to its marks.
    pub fn task_redone(&self) {
        self.redone.fetch_add(1, Ordering::Relaxed);
    }

    /// Seconds spent on a stage.
    pub fn seconds(&self, stage: Stage) -> f64 {
        self.nanoseconds[stage as usize].load(Ordering::Relaxed) as f64 / 1e9
    }

    /// All of them as a JSON object.
    pub fn to_json(&self) -> String {
        let mut object = serde_json::Map::new();
        for (stage, name) in Stage::ALL {
            object.insert(name.into(), ((self.seconds(stage) * 1e3).round() / 1e3).into());
        }
        for (name, counter) in
            [("batches", &self.batches), ("records", &self.records), ("tasks_redone", &self.redone)]
        {
            object.insert(name.into(), counter.load(Ordering::Relaxed).into());
        }
        serde_json::Value::Object(object).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_its_own_counter() {
        for (i, (stage, _)) in Stage::ALL.iter().enumerate() {
            assert_eq!(*stage as usize, i);
        }
    }

    #[test]
    fn gauges_are_one_json_object() {
        let gauges = Gauges::default();
        gauges.batch_done(512);
        gauges.batch_done(100);
        gauges.task_redone();
        assert_eq!(gauges.time(Stage::Computing, || 7), 7);
        let json: serde_json::Value = serde_json::from_str(&gauges.to_json()).unwrap();
        assert_eq!(
            (&json["batches"], &json["records"], &json["tasks_redone"]),
            (&2.into(), &612.into(), &1.into())
        );
        assert!(json["computing_seconds"].is_f64() && json["waiting_seconds"] == 0.0);
    }
}
