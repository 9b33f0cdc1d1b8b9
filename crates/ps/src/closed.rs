//! The tasks of which nothing can change any more: covered by a committed checkpoint.
//!
//! Shards of an epoch are closed more or less in order, so they are kept as ranges: a finished epoch is
//! one range, however many shards it had.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

type Ranges = Vec<(u32, u32)>;

/// Closed shards by epoch, as ranges (first and last) in growing order.
///
/// Invariant: two ranges of an epoch neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<u32, Ranges>", into = "BTreeMap<u32, Ranges>")]
pub struct Closed {
    epochs: BTreeMap<u32, Ranges>,
}

impl TryFrom<BTreeMap<u32, Ranges>> for Closed {
    type Error = String;

    /// Ranges from elsewhere: in any order, and refused where one ends before it begins.
    fn try_from(epochs: BTreeMap<u32, Ranges>) -> Result<Self, String> {
        let mut closed = Closed::default();
        for (epoch, ranges) in epochs {
            if let Some((first, last)) = ranges.iter().find(|(first, last)| first > last) {
                return Err(format!("shards {first} to {last} of epoch {epoch} are no range"));
            }
            if !ranges.is_empty() {
                closed.epochs.insert(epoch, joined(ranges));
            }
        }
        Ok(closed)
    }
}

impl From<Closed> for BTreeMap<u32, Ranges> {
    fn from(closed: Closed) -> Self {
        closed.epochs
    }
}

/// The same shards in ranges that neither overlap nor touch.
fn joined(mut ranges: Ranges) -> Ranges {
    ranges.sort_unstable();
    let mut joined = Ranges::new();
    for (first, last) in ranges {
        match joined.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => joined.push((first, last)),
        }
    }
    joined
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

    /// Closes all that `other` has closed.
    pub fn merge(&mut self, other: &Closed) {
        for (epoch, ranges) in &other.epochs {
            let mine = self.epochs.entry(*epoch).or_default();
            let mut all = std::mem::take(mine);
            all.extend(ranges);
            *mine = joined(all);
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

    #[test]
    fn ranges_from_elsewhere_are_put_in_order_or_refused() {
        let closed: Closed = serde_json::from_str(r#"{"0":[[5,6],[0,2],[3,3]],"7":[]}"#).unwrap();
        assert_eq!(closed.epochs[&0], [(0, 3), (5, 6)]);
        assert_eq!(serde_json::to_string(&closed).unwrap(), r#"{"0":[[0,3],[5,6]]}"#);
        let error = serde_json::from_str::<Closed>(r#"{"1":[[3,2]]}"#).unwrap_err();
        assert!(error.to_string().contains("shards 3 to 2 of epoch 1 are no range"), "{error}");
    }

    proptest! {
        #[test]
        fn merging_is_the_union_of_sets(
            mine in proptest::collection::vec(0..60u32, 0..60),
            theirs in proptest::collection::vec(0..60u32, 0..60),
        ) {
            let of = |shards: &[u32]| {
                let mut closed = Closed::default();
                shards.iter().for_each(|s| closed.insert(1, *s));
                closed
            };
            let mut merged = of(&mine);
            merged.merge(&of(&theirs));
            let all = of(&[mine, theirs].concat());
            prop_assert_eq!(merged.epochs.get(&1), all.epochs.get(&1));
        }

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
