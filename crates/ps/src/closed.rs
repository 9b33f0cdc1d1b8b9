//! The tasks of which nothing can change any more: covered by a committed checkpoint.
//!
//! Shards of an epoch are closed more or less in order, so they are kept as ranges: a finished epoch is
//! one range, however many shards it had.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Closed shards by epoch, as ranges (first and last) in growing order.
///
/// Invariant: two ranges of an epoch neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Closed {
    epochs: BTreeMap<u32, Vec<(u32, u32)>>,
}

impl Closed {
    /// Whether this shard of this epoch is closed.
    pub fn contains(&self, epoch: u32, shard: u32) -> bool {
        let Some(ranges) = self.epochs.get(&epoch) else { return false };
        let after = ranges.partition_point(|(first, _)| *first <= shard);
        after > 0 && ranges[after - 1].1 >= shard
    }

    /// Closes a shard of an epoch. Closing it again changes nothing.
    pub fn insert(&mut self, epoch: u32, shard: u32) {
        if self.contains(epoch, shard) {
            return;
        }
        let ranges = self.epochs.entry(epoch).or_default();
        let after = ranges.partition_point(|(first, _)| *first <= shard);
        let joins_left = after > 0 && ranges[after - 1].1 + 1 == shard;
        let joins_right = ranges.get(after).is_some_and(|(first, _)| first - 1 == shard);
        match (joins_left, joins_right) {
            (true, true) => {
                ranges[after - 1].1 = ranges[after].1;
                ranges.remove(after);
            }
            (true, false) => ranges[after - 1].1 = shard,
            (false, true) => ranges[after].0 = shard,
            (false, false) => ranges.insert(after, (shard, shard)),
        }
    }

    /// How many shards are closed, over all epochs.
    pub fn len(&self) -> u64 {
        self.epochs.values().flatten().map(|(first, last)| u64::from(last - first) + 1).sum()
    }

    /// Whether nothing is closed.
    pub fn is_empty(&self) -> bool {
        self.epochs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_finished_epoch_is_one_range() {
        let mut closed = Closed::default();
        for shard in (0..1000).rev().step_by(2).chain(0..1000) {
            closed.insert(4, shard);
        }
        assert_eq!(closed.epochs[&4], [(0, 999)]);
        assert!(!closed.contains(3, 7));
    }

    #[test]
    fn the_last_possible_shard_can_be_closed() {
        let mut closed = Closed::default();
        closed.insert(0, u32::MAX);
        closed.insert(0, u32::MAX - 1);
        closed.insert(0, 0);
        assert!(closed.contains(0, u32::MAX) && closed.contains(0, 0) && !closed.contains(0, 1));
        assert_eq!(closed.epochs[&0], [(0, 0), (u32::MAX - 1, u32::MAX)]);
    }

    proptest! {
        #[test]
        fn ranges_behave_like_a_set(shards in proptest::collection::vec(0..60u32, 0..60)) {
            let mut closed = Closed::default();
            let set: BTreeSet<u32> = shards.iter().copied().collect();
            shards.iter().for_each(|s| closed.insert(1, *s));
            for shard in 0..60 {
                prop_assert_eq!(closed.contains(1, shard), set.contains(&shard));
            }
            prop_assert_eq!(closed.len(), set.len() as u64);
            for pair in closed.epochs.values().flat_map(|r| r.windows(2)) {
                prop_assert!(pair[0].1 + 1 < pair[1].0, "{:?} touch", pair);
            }
        }
    }
}
