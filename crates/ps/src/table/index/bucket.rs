//! Entries of an index, five to a cache line.
//!
//! The eight words of a bucket: five ids; their rows' numbers plus one, two to a word (0: the place is empty, so every
//! id is a valid one); and in the last half word how many ids that belong to this bucket or one before it lie further
//! on, because this one was full. No entry is moved when another one comes.

/// Entries of a bucket.
pub(super) const PLACES: usize = 5;

/// A cache line of entries; all zero: empty.
pub(in crate::table) type Bucket = [u64; WORDS];

/// A bucket without an entry.
pub(in crate::table) const NONE: Bucket = [0; WORDS];

/// Words of a bucket.
pub(super) const WORDS: usize = 8;

/// Looks for `id` in one bucket.
#[inline(always)]
pub(in crate::table) fn glance(bucket: &Bucket, id: u64) -> Option<u32> {
    number_of(bucket, id).checked_sub(1)
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
    }
}

/// Adds an id that is not there, from the bucket on where it belongs. Some bucket has room.
pub(super) fn fill(buckets: &mut [Bucket], home: usize, id: u64, row: u32) {
    let mut place = home;
    loop {
        let bucket = &mut buckets[place];
        if let Some(vacant) = (0..PLACES).find(|i| half(bucket, *i) == 0) {
            bucket[vacant] = id;
            return set_half(bucket, vacant, row.checked_add(1).expect("a row's number is below 2^32 - 1"));
        }
        set_half(bucket, PLACES, passed(bucket) + 1);
        place = next(buckets, place);
    }
}

/// The ids of a bucket with their rows.
pub(in crate::table) fn entries(bucket: &Bucket) -> impl Iterator<Item = (u64, u32)> {
    (0..PLACES).filter_map(|i| Some((bucket[i], half(bucket, i).checked_sub(1)?)))
}

/// The row's number plus one; 0 where the id is not in this bucket. Looks at all places without a branch: which one
/// it is cannot be foretold.
#[inline(always)]
fn number_of(bucket: &Bucket, id: u64) -> u32 {
    (0..PLACES).fold(0, |found, i| found | (half(bucket, i) & u32::from(bucket[i] == id).wrapping_neg()))
}

/// Ids that were put further on because this bucket was full.
#[inline(always)]
fn passed(bucket: &Bucket) -> u32 {
    half(bucket, PLACES)
}

#[inline(always)]
fn half(bucket: &Bucket, i: usize) -> u32 {
    (bucket[PLACES + i / 2] >> (32 * (i % 2))) as u32
}

#[inline(always)]
fn set_half(bucket: &mut Bucket, i: usize, half: u32) {
    let (word, shift) = (&mut bucket[PLACES + i / 2], 32 * (i % 2));
    *word = *word & !(u64::from(u32::MAX) << shift) | u64::from(half) << shift;
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

    #[test]
    fn the_id_zero_and_the_last_row_are_as_good_as_any() {
        let mut buckets = [Bucket::default(); 2];
        assert_eq!(find(&buckets, 1, 0), None, "an empty place is no id");
        fill(&mut buckets, 1, 0, u32::MAX - 1);
        assert_eq!(find(&buckets, 1, 0), Some(u32::MAX - 1));
    }
}
