//! What a partition has applied, counted where rows change, so that marks need not be believed.

use std::collections::BTreeMap;

use elasticdl_spec::TaskId;
use elasticdl_spec::mix::mix2;
use serde::{Deserialize, Serialize};

/// What was applied, by epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Audit {
    epochs: BTreeMap<u32, Tally>,
}

/// What was applied in one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Records of all batches applied.
    pub records: u64,
    /// Batches applied.
    pub batches: u64,
    /// The sum of [`digest`] over all batches applied: whatever their order, and a batch that was applied
    /// twice does not cancel out.
    pub digest: u64,
}

/// The number that stands for one batch of one task.
pub fn digest(task: TaskId, batch: u64) -> u64 {
    mix2(task.as_u64(), batch)
}

impl Audit {
    /// Counts a batch. To be called where its gradients are applied, and nowhere else.
    pub(crate) fn count(&mut self, task: TaskId, batch: u64, records: u64) {
        let tally = self.epochs.entry(task.epoch).or_default();
        tally.records += records;
        tally.batches += 1;
        tally.digest = tally.digest.wrapping_add(digest(task, batch));
    }

    /// The tallies by epoch.
    pub fn epochs(&self) -> &BTreeMap<u32, Tally> {
        &self.epochs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_knows_no_order_and_sees_what_is_lost_or_doubled() {
        let count = |batches: &[(u32, u64)]| {
            let mut audit = Audit::default();
            batches.iter().for_each(|(shard, batch)| audit.count(TaskId::train(0, *shard), *batch, 10));
            audit.epochs()[&0]
        };
        let whole = count(&[(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(whole, count(&[(1, 1), (0, 0), (1, 0), (0, 1)]));
        assert_eq!((whole.records, whole.batches), (40, 4));
        // One lost and another doubled: the counts agree, the digest does not.
        let wrong = count(&[(0, 0), (0, 0), (1, 0), (1, 1)]);
        assert_eq!((wrong.records, wrong.batches), (40, 4));
        assert_ne!(whole.digest, wrong.digest);
    }
}
