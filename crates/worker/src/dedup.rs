//! A batch's ids become unique ids grouped by partition, and for each occurrence which of them it is.
//!
//! Pure and hot: after the first batches nothing is allocated. Ids go into a table by their hashes and come out of it
//! grouped (`table`); what is done with some at a time has forms for wide vectors (`x86`) beside that for all
//! processors (`lanes`). Nothing here knows servers; where a row lives is `placement`'s word alone.

mod lanes;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use elasticdl_spec::PartitionId;

use self::lanes::Reach;
use self::table::Table;

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
    table: Table,
    reach: Reach,
}

impl Deduper {
    /// For a job with so many partitions.
    pub fn new(partitions: u32) -> Self {
        assert!(partitions > 0, "a job has at least one partition");
        let reach = Reach::here().pop().expect("every processor has something");
        Deduper { table: Table::new(partitions), reach }
    }

    /// Replaces `keys` by those of `ids`.
    pub fn dedup(&mut self, ids: &[u64], keys: &mut Keys) {
        self.table.dedup(self.reach, ids, keys);
    }
}

#[cfg(test)]
mod tests {
    use super::table::VACANT;
    use super::*;
    use elasticdl_spec::mix::mix64;
    use elasticdl_spec::placement::partition_of_row;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// One deduper for each way in which this processor can do it, the same batches for all of them.
    struct Dedupers(Vec<Deduper>);

    impl Dedupers {
        fn new(partitions: u32) -> Self {
            let each = |reach| Deduper { table: Table::new(partitions), reach };
            Dedupers(Reach::here().into_iter().map(each).collect())
        }

        fn dedup(&mut self, ids: &[u64]) -> Keys {
            let found = self.0.iter_mut().map(|deduper| {
                let mut keys = Keys::default();
                deduper.dedup(ids, &mut keys);
                keys
            });
            let found: Vec<Keys> = found.collect();
            assert!(found.iter().all(|keys| *keys == found[0]), "how it is done makes no difference");
            found[0].clone()
        }
    }

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

    fn deduped(partitions: u32, ids: &[u64]) -> Keys {
        let keys = Dedupers::new(partitions).dedup(ids);
        check(&keys, ids, partitions);
        keys
    }

    #[test]
    fn the_word_of_a_vacant_place_is_an_id_as_good_as_any() {
        let ids = [0, u64::MAX, VACANT, 0, 1 << 32, mix64(VACANT), u64::MAX, VACANT];
        let mut dedupers = Dedupers::new(3);
        let first = dedupers.dedup(&ids);
        check(&first, &ids, 3);
        assert_eq!(dedupers.dedup(&ids), first, "the word has changed, and nothing else");
    }

    /// Goal: the word comes when others are in already, and those are taken out again.
    #[test]
    fn the_word_of_a_vacant_place_may_come_late() {
        let mut ids: Vec<u64> = (0..700).collect();
        ids[650] = VACANT;
        let mut others = Dedupers::new(3);
        others.dedup(&[VACANT]);
        assert_eq!(deduped(3, &ids), others.dedup(&ids));
    }

    /// Goal: ids that all belong to one place are slow, and no more; also at the table's end.
    #[test]
    fn ids_that_crowd_find_room() {
        for (place, partitions) in [(7, 8), (4095, 8), (4095, 1)] {
            let once = (0..1 << 22).filter(|id| mix64(*id) >> 52 == place);
            let ids: Vec<u64> = once.flat_map(|id| [id, id]).collect();
            assert!(ids.len() > 1000);
            let mut dedupers = Dedupers::new(partitions);
            check(&dedupers.dedup(&ids), &ids, partitions);
            let few: Vec<u64> = (0..50).collect();
            assert_eq!(dedupers.dedup(&few), deduped(partitions, &few), "and leave nothing behind");
        }
    }

    /// Goal: the table is laid out for ids that come more than once, and these do not.
    #[test]
    fn a_batch_in_which_every_id_is_new_finds_room() {
        let ids: Vec<u64> = (0..50_000).collect();
        assert_eq!(deduped(8, &ids).unique(), ids.len());
    }

    /// Goal: blocks of ids are numbered by a few bits, and there are more blocks than such numbers.
    #[test]
    fn a_batch_may_have_more_blocks_than_there_are_numbers_for_them() {
        let ids: Vec<u64> = (0..1_200_000).map(|i| mix64(i % 1000 + 200 * (i / 200_000))).collect();
        assert_eq!(deduped(8, &ids).unique(), 2000);
    }

    /// Goal: servers find ids faster that come in this order.
    #[test]
    fn ids_come_in_the_order_of_their_hashes_but_for_those_of_a_line() {
        let ids: Vec<u64> = (0..20_000).flat_map(|id| [id, id, id]).collect();
        let keys = deduped(8, &ids);
        let ranges: Vec<u64> = keys.ids().iter().map(|id| mix64(*id) >> 54).collect();
        let in_order = ranges.windows(2).filter(|pair| pair[0] <= pair[1]).count();
        assert!(in_order > 19_000, "{in_order} of 20000");
    }

    #[test]
    fn an_empty_batch_has_no_keys_and_all_partitions() {
        let keys = deduped(4, &[]);
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
            let mut dedupers = Dedupers::new(partitions);
            for batch in batches {
                let ids: Vec<u64> = batch.iter().map(|id| id.wrapping_mul(spread | 1)).collect();
                let keys = dedupers.dedup(&ids);
                check(&keys, &ids, partitions);
                prop_assert_eq!(&keys, &deduped(partitions, &ids));
            }
        }
    }
}
