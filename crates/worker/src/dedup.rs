//! A batch's ids become unique ids grouped by partition, and for each occurrence which of them it is.
//!
//! Pure and hot: after the first batches nothing is allocated, and every id costs one probe of a flat
//! table. Nothing here knows servers; where a row lives is `placement`'s word alone.

use std::ops::Range;

use elasticdl_spec::PartitionId;
use elasticdl_spec::mix::mix64;

const SLOTS_MIN: usize = 1 << 10;

/// The unique ids of one batch. Every table of the model is asked for the same ids.
///
/// Invariant: `ids` has no id twice; those of partition `p` are `ids[starts[p]..starts[p + 1]]`; every
/// number in `index` is a position in `ids`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys {
    ids: Vec<u64>,
    starts: Vec<usize>,
    index: Vec<u32>,
}

impl Keys {
    /// The unique ids, those of one partition beside each other, in order of partition.
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// How many unique ids there are.
    pub fn unique(&self) -> usize {
        self.ids.len()
    }

    /// For each occurrence in the batch, its position in [`Keys::ids`].
    pub fn index(&self) -> &[u32] {
        &self.index
    }

    /// How many partitions the ids are dealt to.
    pub fn partitions(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Which of [`Keys::ids`] live in this partition.
    pub fn part(&self, partition: PartitionId) -> Range<usize> {
        let p = partition.0 as usize;
        self.starts[p]..self.starts[p + 1]
    }
}

/// Deduplicates batch after batch, with working memory that only grows.
#[derive(Debug)]
pub struct Deduper {
    partitions: u32,
    /// Open addressing, at most half full. A word is 0 for an empty slot, else the position of the id in
    /// `found` plus one in the low half and 32 bits of the id's hash in the high half: 8 bytes a slot keep
    /// the table of a common batch inside the second-level cache, where 16 would not.
    slots: Vec<u64>,
    /// Unique ids in the order in which they were first seen.
    found: Vec<u64>,
    /// The partition of each of `found`.
    homes: Vec<u32>,
    /// Where each of `found` goes in `Keys::ids`.
    places: Vec<u32>,
}

impl Deduper {
    /// For a job with so many partitions.
    pub fn new(partitions: u32) -> Self {
        assert!(partitions > 0, "a job has at least one partition");
        Deduper {
            partitions,
            slots: vec![0; SLOTS_MIN],
            found: Vec::new(),
            homes: Vec::new(),
            places: Vec::new(),
        }
    }

    /// Replaces `keys` by those of `ids`.
    pub fn dedup(&mut self, ids: &[u64], keys: &mut Keys) {
        assert!(ids.len() < u32::MAX as usize, "positions fit 32 bits");
        self.slots.fill(0);
        self.found.clear();
        self.homes.clear();
        keys.index.clear();
        keys.index.resize(ids.len(), 0);
        for (&id, position) in ids.iter().zip(&mut keys.index) {
            *position = self.position(id);
        }
        self.group(keys);
    }

    /// The position of `id` in `found`, where it is put if it is new.
    #[inline]
    fn position(&mut self, id: u64) -> u32 {
        let hash = mix64(id);
        let tag = hash & !u64::from(u32::MAX);
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            let position = (slot as u32) - 1;
            if slot & !u64::from(u32::MAX) == tag && self.found[position as usize] == id {
                return position;
            }
            at = (at + 1) & mask;
        }
        let position = self.found.len() as u32;
        self.slots[at] = tag | u64::from(position + 1);
        self.found.push(id);
        // The same as placement::partition_of_row, with the hash that is at hand.
        self.homes.push(((u128::from(hash) * u128::from(self.partitions)) >> 64) as u32);
        if self.found.len() * 2 > self.slots.len() {
            self.grow();
        }
        position
    }

    /// Doubles the table.
    #[cold]
    fn grow(&mut self) {
        let len = self.slots.len() * 2;
        self.slots.clear();
        self.slots.resize(len, 0);
        let mask = len - 1;
        for (position, &id) in self.found.iter().enumerate() {
            let hash = mix64(id);
            let mut at = hash as usize & mask;
            while self.slots[at] != 0 {
                at = (at + 1) & mask;
            }
            self.slots[at] = (hash & !u64::from(u32::MAX)) | (position as u64 + 1);
        }
    }

    /// Moves the ids of one partition beside each other, and the index after them.
    fn group(&mut self, keys: &mut Keys) {
        keys.starts.clear();
        keys.starts.resize(self.partitions as usize + 1, 0);
        for &home in &self.homes {
            keys.starts[home as usize + 1] += 1;
        }
        for p in 1..keys.starts.len() {
            keys.starts[p] += keys.starts[p - 1];
        }
        keys.ids.clear();
        keys.ids.resize(self.found.len(), 0);
        self.places.clear();
        // While the ids are dealt, starts[p] is the next free place of p; afterwards it has become the
        // start of p + 1, so all move up by one.
        for (&id, &home) in self.found.iter().zip(&self.homes) {
            let place = &mut keys.starts[home as usize];
            keys.ids[*place] = id;
            self.places.push(*place as u32);
            *place += 1;
        }
        keys.starts.rotate_right(1);
        keys.starts[0] = 0;
        for position in &mut keys.index {
            *position = self.places[*position as usize];
        }
        assert_eq!(keys.starts.last(), Some(&keys.ids.len()), "every unique id has a partition");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elasticdl_spec::placement::partition_of_row;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// What the keys of a batch are, said as simply as possible.
    fn naive(ids: &[u64], partitions: u32) -> Keys {
        let mut seen = BTreeMap::new();
        let mut found = Vec::new();
        for &id in ids {
            seen.entry(id).or_insert_with(|| found.push(id));
        }
        let mut keys = Keys { ids: vec![], starts: vec![0], index: vec![] };
        for p in 0..partitions {
            keys.ids.extend(found.iter().filter(|id| partition_of_row(**id, partitions).0 == p));
            keys.starts.push(keys.ids.len());
        }
        let place = |id| keys.ids.iter().position(|other| other == id).unwrap() as u32;
        keys.index = ids.iter().map(place).collect();
        keys
    }

    #[test]
    fn the_word_of_an_empty_slot_is_no_id() {
        let mut keys = Keys::default();
        let ids = [0, u64::MAX, 0, 1 << 32, u64::MAX];
        Deduper::new(3).dedup(&ids, &mut keys);
        assert_eq!(keys, naive(&ids, 3));
        assert_eq!(keys.unique(), 3);
    }

    #[test]
    fn an_empty_batch_has_no_keys_and_all_partitions() {
        let mut keys = Keys::default();
        Deduper::new(4).dedup(&[], &mut keys);
        assert_eq!((keys.unique(), keys.partitions(), keys.part(PartitionId(3))), (0, 4, 0..0));
    }

    proptest! {
        /// The same deduper serves batches of every size, one after the other, growing on the way.
        #[test]
        fn keys_are_those_of_the_naive_version(
            batches in proptest::collection::vec(proptest::collection::vec(0u64..700, 0..1500), 1..4),
            spread in any::<u64>(),
            partitions in 1u32..40,
        ) {
            let mut deduper = Deduper::new(partitions);
            let mut keys = Keys::default();
            for batch in batches {
                let ids: Vec<u64> = batch.iter().map(|id| id.wrapping_mul(spread | 1)).collect();
                deduper.dedup(&ids, &mut keys);
                prop_assert_eq!(&keys, &naive(&ids, partitions));
                for (id, position) in ids.iter().zip(keys.index()) {
                    prop_assert_eq!(keys.ids()[*position as usize], *id);
                }
            }
        }
    }
}
