//! A batch's ids become unique ids grouped by partition, and for each occurrence which of them it is.
//!
//! Pure and hot: after the first batches nothing is allocated. Every partition has a stretch of one flat table, and an
//! id its place in there by its hash, so that what was put in comes out grouped, in one pass over the table. Almost
//! nothing depends on what an id turns out to be: in a batch of a click log every third one is new, and a processor
//! that guesses which would guess wrong all the time. Nothing here knows servers; where a row lives is `placement`'s
//! word alone.

use std::hint::select_unpredictable;
use std::ops::Range;

use elasticdl_spec::PartitionId;
use elasticdl_spec::mix::mix64;
use pulp::{Arch, NullaryFnOnce};

/// Ids that are looked for before any of them is put in, as many as a word has bits: to write to the table between two
/// looks would make each look wait for the one before.
const BLOCK: usize = u64::BITS as usize;
/// Slots whose bits are a word.
const GROUP: usize = u64::BITS as usize;
/// Slots behind those that hashes lead to, for what goes further on because its own slot is taken: so many, and one for
/// so many others.
const SLACK: usize = 16;
const SLACK_SHARE: usize = 64;
/// How often a partition's stretch is doubled where ids crowd; after that only what is behind it grows.
const DOUBLED_MAX: u32 = 2;
/// What a vacant slot holds at first: some number that is no small one.
const VACANT: u64 = 0x5bd1_e995_9d1b_54a5;

/// The unique ids of one batch. Every table of the model is asked for the same ids.
///
/// The order within a partition is a matter of the batch alone.
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
    /// Open addressing: ids where their hashes lead to, or further on. Between batches all slots are vacant.
    slots: Vec<u64>,
    /// What of it is taken when all ids are in.
    groups: Vec<Group>,
    /// What a vacant slot holds. Any word may be an id: when this one comes, another takes its part.
    vacant: u64,
}

impl Deduper {
    /// For a job with so many partitions.
    pub fn new(partitions: u32) -> Self {
        assert!(partitions > 0, "a job has at least one partition");
        Deduper { partitions, slots: Vec::new(), groups: Vec::new(), vacant: VACANT }
    }

    /// Replaces `keys` by those of `ids`.
    pub fn dedup(&mut self, ids: &[u64], keys: &mut Keys) {
        keys.index.resize(ids.len(), 0);
        keys.ids.resize(ids.len(), 0);
        let mut layout = Layout::new(ids.len(), self.partitions);
        loop {
            let len = self.slots.len().max(layout.slots());
            self.slots.resize(len, self.vacant);
            let slots = &mut self.slots[..layout.slots()];
            let (vacant, index) = (self.vacant, &mut keys.index);
            match Arch::new().dispatch(Filling { layout, slots, vacant, ids, index }) {
                Filled::All => break,
                Filled::Crowded => {
                    slots.fill(vacant);
                    layout = layout.roomier(ids.len());
                }
                Filled::MetVacant => {
                    self.vacant = mix64(vacant);
                    self.slots.fill(self.vacant);
                }
            }
        }
        let slots = &mut self.slots[..layout.slots()];
        self.groups.resize(slots.len() / GROUP, Group::default());
        let (vacant, groups) = (self.vacant, &mut self.groups);
        Arch::new().dispatch(Emptying { layout, slots, groups, vacant, keys });
    }
}

/// [`GROUP`] slots beside each other.
#[derive(Debug, Clone, Copy, Default)]
struct Group {
    /// A bit for each that is taken.
    taken: u64,
    /// How many are taken in the groups before.
    before: u32,
}

/// How the table is cut.
#[derive(Debug, Clone, Copy)]
struct Layout {
    partitions: u32,
    /// Of a partition's slots hashes lead to the first `1 << bits`.
    bits: u32,
    /// So many it has in all. The last one stays vacant, so that looking on ends there.
    stretch: u32,
    /// How often there was too little room.
    tries: u32,
}

impl Layout {
    /// On average at most seven of eight slots are taken if no id comes twice.
    fn new(ids: usize, partitions: u32) -> Self {
        let each = ids.div_ceil(partitions as usize);
        let bits = (each * 8 / 7 + 1).next_power_of_two().ilog2();
        Layout::of(partitions, bits, SLACK + (1 << bits) / SLACK_SHARE, 0)
    }

    /// The same for ids whose hashes are less even than most. In the end all find room at the same place.
    fn roomier(self, ids: usize) -> Self {
        let tries = self.tries + 1;
        let bits = self.bits + u32::from(tries <= DOUBLED_MAX);
        let slack = 2 * (self.stretch as usize - (1 << self.bits));
        Layout::of(self.partitions, bits, slack.min(ids + 1), tries)
    }

    fn of(partitions: u32, bits: u32, slack: usize, tries: u32) -> Self {
        let stretch = (1 << bits) + slack;
        assert!(stretch * partitions as usize <= u32::MAX as usize, "slots are numbered by 32 bits");
        Layout { partitions, bits, stretch: stretch as u32, tries }
    }

    fn slots(self) -> usize {
        (self.stretch as usize * self.partitions as usize).next_multiple_of(GROUP)
    }

    /// Where an id of this hash is looked for first. The partition is that of `placement::partition_of_row`, by
    /// multiplications that vectors have.
    #[inline(always)]
    fn home(self, hash: u64) -> u32 {
        let partitions = u64::from(self.partitions);
        let low = u64::from(u32::MAX);
        let scaled = (hash >> 32) * partitions + (((hash & low) * partitions) >> 32);
        (scaled >> 32) as u32 * self.stretch + (((scaled & low) << self.bits) >> 32) as u32
    }
}

/// Puts the ids of a batch into the table.
struct Filling<'a> {
    layout: Layout,
    slots: &'a mut [u64],
    vacant: u64,
    ids: &'a [u64],
    /// Gets the slot of each.
    index: &'a mut [u32],
}

/// How that went.
enum Filled {
    All,
    /// Too many lie close to each other.
    Crowded,
    /// One of them is the word for a vacant slot.
    MetVacant,
}

impl NullaryFnOnce for Filling<'_> {
    type Output = Filled;

    #[inline(always)]
    fn call(self) -> Filled {
        let Filling { layout, slots, vacant, ids, index } = self;
        for (ids, index) in ids.chunks(BLOCK).zip(index.chunks_mut(BLOCK)) {
            let mut met = false;
            for (id, slot) in ids.iter().zip(&mut *index) {
                *slot = layout.home(mix64(*id));
                met |= *id == vacant;
            }
            if met {
                return Filled::MetVacant;
            }
            let mut missed = match (ids.first_chunk::<BLOCK>(), index.first_chunk::<BLOCK>()) {
                // Of a length that is known before, and so without a count.
                (Some(ids), Some(index)) => strangers(slots, ids, index),
                _ => strangers(slots, ids, index),
            };
            while missed != 0 {
                // Each takes its slot if that is vacant, or looks at the next one in the next round.
                let mut further = 0;
                while missed != 0 {
                    let place = missed.trailing_zeros() as usize;
                    missed &= missed - 1;
                    let slot = &mut index[place];
                    let Some(held) = slots.get_mut(*slot as usize) else { return Filled::Crowded };
                    let fits = (*held == vacant) | (*held == ids[place]);
                    *held = select_unpredictable(fits, ids[place], *held);
                    *slot += u32::from(!fits);
                    further |= u64::from(!fits) << place;
                }
                missed = further;
            }
        }
        let mut ends = slots.chunks_exact(layout.stretch as usize).filter_map(<[u64]>::last);
        if ends.all(|end| *end == vacant) { Filled::All } else { Filled::Crowded }
    }
}

/// Which ids are not in their slots: a bit for each.
#[inline(always)]
fn strangers(slots: &[u64], ids: &[u64], index: &[u32]) -> u64 {
    let mut bits = 0;
    for (place, (id, slot)) in ids.iter().zip(index).enumerate() {
        bits |= u64::from(slots[*slot as usize] != *id) << place;
    }
    bits
}

/// Takes the ids out of the table again, grouped, and tells the index where they went.
struct Emptying<'a> {
    layout: Layout,
    slots: &'a mut [u64],
    groups: &'a mut [Group],
    vacant: u64,
    keys: &'a mut Keys,
}

impl NullaryFnOnce for Emptying<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Emptying { layout, slots, groups, vacant, keys: Keys { ids, starts, index } } = self;
        let mut next = 0;
        let out = &mut ids[..];
        let (in_groups, _) = slots.as_chunks_mut::<GROUP>();
        for (slots, group) in in_groups.iter_mut().zip(&mut *groups) {
            let mut left = 0;
            for (slot, bit) in slots.iter().zip(0..) {
                left |= u64::from(*slot != vacant) << bit;
            }
            *group = Group { taken: left, before: next as u32 };
            while left != 0 {
                let slot = &mut slots[left.trailing_zeros() as usize];
                out[next] = std::mem::replace(slot, vacant);
                next += 1;
                left &= left - 1;
            }
        }
        ids.truncate(next);
        // A batch's groups fit the nearest cache, or almost; its slots do not.
        let place = |slot: u32| {
            let Group { taken, before } = groups[slot as usize / GROUP];
            before + (taken & !(u64::MAX << (slot as usize % GROUP))).count_ones()
        };
        starts.clear();
        starts.extend((0..layout.partitions).map(|p| place(p * layout.stretch) as usize));
        starts.push(next);
        for slot in index {
            *slot = place(*slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elasticdl_spec::placement::partition_of_row;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Keys are those of a batch if every id is there once, in its partition, and every occurrence leads to it.
    fn check(keys: &Keys, ids: &[u64], partitions: u32) {
        let found: Vec<u64> = keys.index().iter().map(|place| keys.ids()[*place as usize]).collect();
        assert_eq!(found, ids);
        assert_eq!(BTreeSet::from_iter(keys.ids()), BTreeSet::from_iter(ids));
        assert_eq!(keys.unique(), BTreeSet::from_iter(ids).len(), "no id is there twice");
        let parts = (0..partitions).flat_map(|p| keys.part(PartitionId(p)).map(move |_| PartitionId(p)));
        let homes = keys.ids().iter().map(|id| partition_of_row(*id, partitions));
        assert!(parts.eq(homes));
    }

    fn deduped(deduper: &mut Deduper, ids: &[u64]) -> Keys {
        let mut keys = Keys::default();
        deduper.dedup(ids, &mut keys);
        keys
    }

    #[test]
    fn the_word_of_a_vacant_slot_is_an_id_as_good_as_any() {
        let ids = [0, u64::MAX, VACANT, 0, 1 << 32, mix64(VACANT), u64::MAX, VACANT];
        let mut deduper = Deduper::new(3);
        let first = deduped(&mut deduper, &ids);
        check(&first, &ids, 3);
        assert_eq!(deduped(&mut deduper, &ids), first, "the word has changed, and nothing else");
    }

    /// Goal: the word comes when others are in already, and those are taken out again.
    #[test]
    fn the_word_of_a_vacant_slot_may_come_late() {
        let mut ids: Vec<u64> = (0..200).collect();
        ids[150] = VACANT;
        let mut another = Deduper::new(3);
        deduped(&mut another, &[VACANT]);
        let found = deduped(&mut Deduper::new(3), &ids);
        check(&found, &ids, 3);
        assert_eq!(found, deduped(&mut another, &ids));
    }

    /// Goal: ids that all belong to one place are slow, and no more; also at the table's end.
    #[test]
    fn ids_that_crowd_find_room() {
        for (place, partitions) in [(7, 8), (4095, 8), (4095, 1)] {
            let once = (0..1 << 22).filter(|id| mix64(*id) >> 52 == place);
            let ids: Vec<u64> = once.flat_map(|id| [id, id]).collect();
            assert!(ids.len() > 1000);
            let mut deduper = Deduper::new(partitions);
            check(&deduped(&mut deduper, &ids), &ids, partitions);
            let few: Vec<u64> = (0..50).collect();
            let after = deduped(&mut deduper, &few);
            check(&after, &few, partitions);
            assert_eq!(after, deduped(&mut Deduper::new(partitions), &few));
        }
    }

    #[test]
    fn an_empty_batch_has_no_keys_and_all_partitions() {
        let mut keys = Keys::default();
        Deduper::new(4).dedup(&[], &mut keys);
        assert_eq!((keys.unique(), keys.partitions(), keys.part(PartitionId(3))), (0, 4, 0..0));
    }

    proptest! {
        /// The same deduper serves batches of every size, one after the other, growing on the way, and what it did
        /// before makes no difference.
        #[test]
        fn every_id_comes_once_and_in_its_partition(
            batches in proptest::collection::vec(proptest::collection::vec(0u64..700, 0..1500), 1..4),
            spread in any::<u64>(),
            partitions in 1u32..40,
        ) {
            let mut deduper = Deduper::new(partitions);
            let mut keys = Keys::default();
            for batch in batches {
                let ids: Vec<u64> = batch.iter().map(|id| id.wrapping_mul(spread | 1)).collect();
                deduper.dedup(&ids, &mut keys);
                check(&keys, &ids, partitions);
                prop_assert_eq!(&keys, &deduped(&mut Deduper::new(partitions), &ids));
            }
        }
    }
}
