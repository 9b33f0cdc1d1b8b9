//! The index against a map, and its memory.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_spec::placement::partition_of_row;
use proptest::prelude::*;

use super::*;

const PARTITIONS: u32 = 8;

#[test]
fn every_id_keeps_its_row_while_segments_grow_and_split() {
    let mut index = Index::new(PARTITIONS);
    let ids: Vec<u64> = (0..400_000u64).map(|i| i * 3).chain([u64::MAX]).collect();
    for (row, id) in ids.iter().enumerate() {
        assert_eq!(index.find(*id), None);
        assert_eq!(index.find_or_insert(*id, row as u32), row as u32);
    }
    assert!(index.segments.len() > 4, "{} segments", index.segments.len());
    for (row, id) in ids.iter().enumerate() {
        assert_eq!(index.find(*id), Some(row as u32));
        assert_eq!(index.find_or_insert(*id, 9), row as u32);
        let unknown = id ^ 1 << 40;
        assert_eq!(index.find(unknown), None, "{id}");
    }
    let mut seen = vec![u64::MAX - 1; ids.len()];
    index.for_each(|id, row| seen[row as usize] = id);
    assert_eq!(seen, ids);
}

/// Goal: an index that is filled from another one needs no growth, takes no more memory, and crowds nowhere.
#[test]
fn an_index_with_room_for_its_ids_stays_as_it_is() {
    for ids in [0, 1, 15, 1000, 60_000, 61_000, 500_000] {
        let mut grown = Index::new(PARTITIONS);
        (0..ids).for_each(|id| assert_eq!(grown.find_or_insert(id, id as u32), id as u32));
        let mut index = Index::new(PARTITIONS).emptied(ids as usize);
        let (bytes, segments) = (index.bytes(), index.segments.len());
        grown.for_each(|id, row| assert_eq!(index.find_or_insert(id, row), row));
        assert_eq!((index.bytes(), index.segments.len()), (bytes, segments), "{ids} ids");
        assert!(bytes as f64 <= 1.35 * grown.bytes() as f64, "{bytes} bytes for {ids}, {}", grown.bytes());
        assert!((0..ids).all(|id| index.find(id) == Some(id as u32)), "{ids} ids");
    }
}

/// Goal: whoever asks for ids in the order of their hashes goes through the index from one end to the other.
#[test]
fn ids_lie_in_the_order_of_their_hashes() {
    for partitions in [1, 7, 8] {
        let mut index = Index::new(partitions);
        let all = (0..).filter(|id| partition_of_row(*id, partitions).0 == 0);
        let mut ids: Vec<u64> = all.take(200_000).collect();
        ids.iter().zip(0..).for_each(|(id, row)| assert_eq!(index.find_or_insert(*id, row), row));
        ids.sort_unstable_by_key(|id| mix64(*id));
        let places = ids.iter().map(|id| {
            let Lead { slot, segment, skip } = *index.lead(index.hash(*id));
            let lead = index.directory.iter().position(|lead| lead.segment == segment);
            (lead.expect("something leads to each segment"), home(index.hash(*id), skip, slot.buckets.into()))
        });
        let places: Vec<_> = places.collect();
        assert!(places.is_sorted(), "{partitions} partitions");
        assert!(index.segments.len() > 2 && places[0].0 == 0);
    }
}

/// Goal: a table whose first requests come in the order of their hashes is as quick as any other.
#[test]
fn ids_that_come_in_order_do_not_crowd() {
    let mut ids: Vec<u64> = (0..61_000).collect();
    ids.sort_unstable_by_key(|id| mix64(*id));
    for count in [100, 5_000, 61_000] {
        let mut index = Index::new(1);
        ids.iter().take(count).zip(0..).for_each(|(id, row)| assert_eq!(index.find_or_insert(*id, row), row));
        let first = |id: &&u64| glance(index.bucket(index.hash(**id)), **id) != ELSEWHERE;
        let at_once = ids.iter().take(count).filter(first).count();
        assert!(at_once * 10 > count * 8, "{at_once} of {count} are where they are looked for first");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Goal: an index does what a map does, in small segments that overflow and in those that grow and split; and
    /// who goes through it meets every id that stays.
    #[test]
    fn an_index_is_a_map(
        events in proptest::collection::vec((0..5u8, 0..4000u64, 1..400u64), 1..120),
        bounded in any::<bool>(),
        ids in 4_u64..4000,
    ) {
        let mut index = if bounded { Index::bounded(PARTITIONS, ids as usize) } else { Index::new(PARTITIONS) };
        let (mut map, mut fresh) = (BTreeMap::new(), 0);
        let (mut place, mut due) = (Place::default(), BTreeSet::new());
        for (what, from, count) in events {
            for id in (from..from + count).map(|id| id % ids) {
                match what {
                    0..3 => {
                        let row = *map.entry(id).or_insert(fresh);
                        prop_assert_eq!(index.find_or_insert(id, fresh), row);
                        fresh += 1;
                    }
                    3 => {
                        due.remove(&id);
                        prop_assert_eq!(index.remove(id), map.remove(&id));
                        prop_assert_eq!(index.remove(id), None);
                    }
                    _ => {
                        let buckets = index.next_buckets(&mut place);
                        let seen: BTreeSet<u64> = buckets.iter().flat_map(entries).map(|(id, _)| id).collect();
                        due.retain(|id| !seen.contains(id));
                        if buckets.is_empty() {
                            prop_assert!(due.is_empty(), "{due:?} were left out");
                            (place, due) = (Place::default(), map.keys().copied().collect());
                        }
                    }
                }
            }
            for id in 0..ids {
                prop_assert_eq!(index.find(id), map.get(&id).copied(), "{}", id);
            }
        }
        let mut held = BTreeMap::new();
        index.for_each(|id, row| held.extend([(id, row)]));
        prop_assert_eq!(held, map);
    }
}

/// Goal: an index with a bound takes no more than was said, on the way there and after ten of its lives.
#[test]
fn a_bounded_index_stays_within_its_bytes_however_often_ids_change() {
    for ids in [4u64, 100, 61_440, 61_441, 150_000, 300_000] {
        let mut index = Index::bounded(PARTITIONS, ids as usize);
        let most = Index::bytes_bounded(ids as usize);
        for id in 0..ids {
            index.find_or_insert(id, id as u32);
            assert!(index.bytes() <= most, "{} of {most} bytes at {id} of {ids}", index.bytes());
        }
        let rounds = if ids > 61_441 { 4 } else { 10 };
        for id in ids..rounds * ids {
            assert_eq!(index.remove(id - ids), Some((id % ids) as u32));
            index.find_or_insert(id, (id % ids) as u32);
        }
        assert!(index.bytes() <= most, "{} of {most} bytes after all", index.bytes());
        let last = rounds * ids;
        assert!((last - ids..last).all(|id| index.find(id) == Some((id % ids) as u32)));
        assert_eq!(index.find(last - ids - 1), None);
    }
}

/// Goal: nothing is left out while segments grow and split under the reader.
#[test]
fn an_index_is_gone_through_while_ids_are_added() {
    let mut index = Index::new(PARTITIONS);
    let old = 50_000;
    (0..old).for_each(|id| assert_eq!(u64::from(index.find_or_insert(id, id as u32)), id));
    let (mut place, mut seen, mut fresh) = (Place::default(), vec![false; old as usize], old);
    loop {
        let buckets = index.next_buckets(&mut place);
        if buckets.is_empty() {
            break;
        }
        for (id, row) in buckets.iter().flat_map(entries).filter(|(id, _)| *id < old) {
            assert_eq!(u64::from(row), id);
            seen[row as usize] = true;
        }
        let more = fresh..(fresh + 150).min(600_000);
        fresh = more.end;
        more.for_each(|id| assert_eq!(u64::from(index.find_or_insert(id, id as u32)), id));
    }
    assert_eq!((fresh, seen.iter().filter(|seen| !**seen).count()), (600_000, 0));
}

/// Goal: 23 bytes an id on average over all numbers of them, 40 in the worst moment of any
/// growth, but for what a table begins with.
#[test]
fn an_index_is_never_emptier_than_needed() {
    let mut index = Index::new(PARTITIONS);
    let (mut most, mut sum) = (0.0f64, 0.0);
    for id in 0..1_200_000 {
        index.find_or_insert(id, id as u32);
        if id >= 200_000 {
            let bytes = index.bytes() as f64 / (id + 1) as f64;
            (most, sum) = (most.max(bytes), sum + bytes);
        }
    }
    assert!(most <= 40.0 && sum / 1e6 <= 23.0, "{most} bytes an id at most, {} on average", sum / 1e6);
}
