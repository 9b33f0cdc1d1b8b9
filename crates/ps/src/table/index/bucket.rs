//! Entries of an index, five to a cache line.
//!
//! The eight words of a bucket: five ids; their rows' numbers plus one, two to a word (0: the place is empty, so every
//! id is a valid one); and in the last half word how many ids that belong to this bucket or one before it lie further
//! on, because this one was full. No entry is moved when another one comes.

use std::hint::select_unpredictable;

/// Entries of a bucket.
pub(super) const PLACES: usize = 5;

/// A cache line of entries; all zero: empty.
pub(in crate::table) type Bucket = [u64; WORDS];

/// A bucket without an entry.
pub(in crate::table) const NONE: Bucket = [0; WORDS];

/// No row has this number.
pub(in crate::table) const ELSEWHERE: u32 = u32::MAX;

/// Words of a bucket.
pub(super) const WORDS: usize = 8;

/// Looks for `id` in one bucket; [`ELSEWHERE`]: it is not there.
#[inline(always)]
pub(in crate::table) fn glance(bucket: &Bucket, id: u64) -> u32 {
    number_of(bucket, id).wrapping_sub(1)
}

/// Looks for `id`, from the bucket on where it belongs.
pub(super) fn find(buckets: &[Bucket], home: usize, id: u64) -> Option<u32> {
    let mut place = home;
    loop {
        let number = number_of(&buckets[place], id);
        if number != 0 || passed(&buckets[place]) == 0 {
            return number.checked_sub(1);
        }
        place = next(buckets, place);
        // Where ids were taken out, each bucket may have been passed by some that are still there.
        if place == home {
            return None;
        }
    }
}

/// Takes an id out that was added from this bucket on, and tells its row; `None`: it is not there.
pub(super) fn remove(buckets: &mut [Bucket], home: usize, id: u64) -> Option<u32> {
    let row = find(buckets, home, id)?;
    let mut place = home;
    loop {
        let bucket = &mut buckets[place];
        if let Some(held) = (0..PLACES).find(|i| bucket[*i] == id && half(bucket, *i) != 0) {
            bucket[held] = 0;
            set_half(bucket, held, 0);
            return Some(row);
        }
        // It was full when the id came by.
        set_half(bucket, PLACES, passed(bucket) - 1);
        place = next(buckets, place);
    }
}

/// Adds an id that is not there, from the bucket on where it belongs. Some bucket has room.
pub(super) fn fill(buckets: &mut [Bucket], home: usize, id: u64, row: u32) {
    add(buckets, home, id, row, |bucket, _| first(|i| half(bucket, i) == 0));
}

/// The same where only this ever adds to the buckets, which were empty; `counts` tells how many entries each has.
#[inline(always)]
pub(super) fn append(buckets: &mut [Bucket], counts: &mut [u8], home: usize, id: u64, row: u32) {
    add(buckets, home, id, row, |_, place| {
        let vacant = counts[place];
        counts[place] += u8::from(usize::from(vacant) < PLACES);
        vacant.into()
    });
}

/// Adds an id where `vacant` has a place in a bucket of this number; [`PLACES`]: there is none.
#[inline(always)]
fn add(
    buckets: &mut [Bucket],
    home: usize,
    id: u64,
    row: u32,
    mut vacant: impl FnMut(&Bucket, usize) -> usize,
) {
    let mut place = home;
    loop {
        let bucket = &mut buckets[place];
        let vacant = vacant(bucket, place);
        if vacant < PLACES {
            bucket[vacant] = id;
            return set_half(bucket, vacant, row.checked_add(1).expect("a row's number is below 2^32 - 1"));
        }
        set_half(bucket, PLACES, passed(bucket) + 1);
        place = next(buckets, place);
    }
}

/// Replaces `entries` by those of some buckets: ids and rows. No step of it depends on how many a bucket has.
pub(super) fn collect(buckets: &[Bucket], entries: &mut Vec<(u64, u32)>) {
    entries.resize(buckets.len() * PLACES, (0, 0));
    let mut next = 0;
    for bucket in buckets {
        for (id, i) in bucket[..PLACES].iter().zip(0..) {
            let number = half(bucket, i);
            entries[next] = (*id, number.wrapping_sub(1));
            next += usize::from(number != 0);
        }
    }
    entries.truncate(next);
}

/// The ids of a bucket with their rows.
pub(in crate::table) fn entries(bucket: &Bucket) -> impl Iterator<Item = (u64, u32)> {
    (0..PLACES).filter_map(|i| Some((bucket[i], half(bucket, i).checked_sub(1)?)))
}

/// The row's number plus one; 0 where the id is not in this bucket. Looks at all places without a branch: which one
/// it is cannot be foretold. The id 0 is in places that are empty, too, whose number is 0.
#[inline(always)]
fn number_of(bucket: &Bucket, id: u64) -> u32 {
    (0..PLACES).fold(0, |number, i| number | select_unpredictable(bucket[i] == id, half(bucket, i), 0))
}

/// The first place of which this holds; [`PLACES`]: there is none.
#[inline(always)]
fn first(holds: impl Fn(usize) -> bool) -> usize {
    (0..PLACES).fold(1u32 << PLACES, |bits, i| bits | u32::from(holds(i)) << i).trailing_zeros() as usize
}

/// Whether ids were put further on because this bucket was full.
#[inline(always)]
pub(super) fn was_passed(bucket: &Bucket) -> bool {
    passed(bucket) > 0
}

/// Ids that were put further on because this bucket was full.
#[inline(always)]
fn passed(bucket: &Bucket) -> u32 {
    half(bucket, PLACES)
}

#[inline(always)]
fn half(bucket: &Bucket, i: usize) -> u32 {
    bytemuck::cast_ref::<Bucket, [u32; 2 * WORDS]>(bucket)[2 * PLACES + i]
}

#[inline(always)]
fn set_half(bucket: &mut Bucket, i: usize, half: u32) {
    bytemuck::cast_mut::<Bucket, [u32; 2 * WORDS]>(bucket)[2 * PLACES + i] = half;
}

/// The bucket after this one; the first comes after the last.
#[inline(always)]
pub(super) fn next(buckets: &[Bucket], place: usize) -> usize {
    if place + 1 == buckets.len() { 0 } else { place + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_do_not_fit_are_found_further_on() {
        let mut buckets = [Bucket::default(); 3];
        // Seven that belong into the last one, and six into the first: the rest goes round.
        for id in 0..7 {
            fill(&mut buckets, 2, id, id as u32);
        }
        for id in 100..106 {
            fill(&mut buckets, 0, id, id as u32);
        }
        for (home, ids) in [(2, 0..7), (0, 100..106)] {
            for id in ids {
                assert_eq!(find(&buckets, home, id), Some(id as u32), "{id}");
            }
        }
        assert_eq!(buckets.each_ref().map(passed), [3, 0, 2]);
        assert_eq!((find(&buckets, 2, 99), find(&buckets, 1, 3)), (None, None));
        assert_eq!(buckets.iter().flat_map(entries).count(), 13);
    }

    /// Goal: whoever takes over the entries of others puts them where one by one they would have gone.
    #[test]
    fn what_is_appended_lies_where_it_would_have_been_filled_in() {
        let (mut filled, mut appended) = ([Bucket::default(); 4], [Bucket::default(); 4]);
        let mut counts = [0; 4];
        for (id, home) in (0..19).zip([3, 3, 0, 3, 1, 3, 3, 3].into_iter().cycle()) {
            fill(&mut filled, home, id, id as u32 + 7);
            append(&mut appended, &mut counts, home, id, id as u32 + 7);
        }
        assert_eq!(appended, filled);
        assert!(filled.iter().any(|bucket| passed(bucket) > 1));
        remove(&mut filled, 3, 1).unwrap();
        let mut collected = vec![(9, 9); 3];
        collect(&filled, &mut collected);
        assert_eq!(collected, filled.iter().flat_map(entries).collect::<Vec<_>>());
        assert_eq!(collected.len(), 18);
    }

    /// Goal: a bucket that was passed is left for good only when the last one that passed it is gone.
    #[test]
    fn what_is_taken_out_leaves_the_rest_to_be_found() {
        let mut buckets = [Bucket::default(); 3];
        (0..12).for_each(|id| fill(&mut buckets, 2, id, id as u32));
        assert_eq!(buckets.each_ref().map(passed), [2, 0, 7]);
        assert_eq!(remove(&mut buckets, 2, 0), Some(0));
        assert_eq!(remove(&mut buckets, 2, 0), None);
        assert_eq!(remove(&mut buckets, 2, 11), Some(11));
        assert_eq!(buckets.each_ref().map(passed), [1, 0, 6]);
        assert!((1..11).all(|id| find(&buckets, 2, id) == Some(id as u32)));
        fill(&mut buckets, 2, 99, 99);
        assert_eq!(buckets.each_ref().map(passed), [1, 0, 6], "there was room in the first");
        (1..11).chain([99]).for_each(|id| assert!(remove(&mut buckets, 2, id).is_some()));
        assert_eq!(buckets, [Bucket::default(); 3]);
    }

    /// Goal: looking for an id that is not there ends, even where every bucket was passed by one that stays.
    #[test]
    fn a_search_ends_where_all_buckets_were_passed() {
        let mut buckets = [Bucket::default(); 3];
        for home in 0..3 {
            // The sixth goes one further; the first five go again, so that the next bucket's own have room.
            let ids = 10 * home as u64..10 * home as u64 + 6;
            ids.clone().for_each(|id| fill(&mut buckets, home, id, 1));
            ids.take(5).for_each(|id| assert_eq!(remove(&mut buckets, home, id), Some(1)));
        }
        assert!(buckets.iter().all(|bucket| passed(bucket) > 0), "{:?}", buckets.each_ref().map(passed));
        assert_eq!(find(&buckets, 1, 77), None);
    }

    #[test]
    fn the_id_zero_and_the_last_row_are_as_good_as_any() {
        let mut buckets = [Bucket::default(); 2];
        assert_eq!(find(&buckets, 1, 0), None, "an empty place is no id");
        fill(&mut buckets, 1, 0, u32::MAX - 1);
        assert_eq!(find(&buckets, 1, 0), Some(u32::MAX - 1));
        let mut buckets = [Bucket::default(); 2];
        [7, 0, 8].into_iter().for_each(|id| fill(&mut buckets, 1, id, id as u32));
        assert_eq!(remove(&mut buckets, 1, 7), Some(7));
        assert_eq!(find(&buckets, 1, 0), Some(0), "not the empty place before it");
    }
}
