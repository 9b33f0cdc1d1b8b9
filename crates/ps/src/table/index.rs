//! From id to row number: buckets of one cache line, in segments that grow by themselves.
//!
//! A lookup touches one cache line as a rule (`index/bucket.rs`). A single array would stop everybody for the time it
//! takes to move all entries when it grows; here a segment of at most a megabyte grows or splits into two (extendible
//! hashing), which takes a fraction of a millisecond however large the table is. Segments come in three sizes
//! (`index/arena.rs`), so that an index is never emptier than needed: hashes are even, and all segments of a table
//! split at about the same time.
//!
//! Ids lie in the order of their hashes, segment by segment and bucket by bucket. Workers ask for a batch's ids in that
//! order, so that neighbours in a request are neighbours here, and the processor finds the pages of one close to those
//! of the one before.

mod arena;
mod bucket;

use elasticdl_spec::mix::mix64;

use self::arena::{Arena, Shared, Size, Slot};
use self::bucket::PLACES;
pub(super) use self::bucket::{Bucket, ELSEWHERE, NONE, entries, glance};
use super::pages::LITTLE;
use super::prefetch;

/// So many bits of a hash, behind those that say which segment, say which bucket of it.
const BUCKET_BITS: u32 = 32;
/// A segment takes so many parts of a hundred of its places. The fuller it is, the more lookups touch a second line.
const FILL_PERCENT: usize = 75;

/// Buckets that are looked at together by who goes through all. In tests small indexes have many stretches.
const STRETCH: usize = if cfg!(test) { 2 } else { 256 };

/// From eight segments on they share huge pages.
const SHARED_DEPTH: u32 = 3;

/// A segment has room for so many standard deviations more than its share, where ids only come; and where they come and
/// go for as long as a job lives.
const DEVIATIONS: f64 = 4.0;
const DEVIATIONS_BOUNDED: f64 = 8.0;

/// Row numbers by id.
#[derive(Debug)]
pub(super) struct Index {
    spread: Spread,
    /// Which segment holds the ids whose hash begins with these bits, and where its buckets are.
    directory: Vec<Lead>,
    segments: Vec<Segment>,
    /// Where the buckets are.
    memory: Arena,
    /// What it becomes at once when a single segment is not enough; `None`: it splits on and on.
    planned: Option<Layout>,
}

/// How ids are spread, in a job with so many partitions: by what is left of their hash when it has picked the partition
/// (`spec::placement`).
#[derive(Debug, Clone, Copy)]
struct Spread(u64);

impl Spread {
    #[inline(always)]
    fn hash(self, id: u64) -> u64 {
        mix64(id).wrapping_mul(self.0)
    }
}

/// Segments of one size.
#[derive(Debug, Clone, Copy)]
struct Layout {
    depth: u32,
    size: Size,
}

#[derive(Debug, Clone, Copy)]
struct Lead {
    slot: Slot,
    segment: u32,
    skip: Skip,
}

/// So many bits of a hash say nothing of the bucket.
#[derive(Debug, Clone, Copy)]
struct Skip(u8);

/// Ids whose hashes agree in their first `depth` bits.
///
/// Invariant: some places are empty, so probing ends.
#[derive(Debug)]
struct Segment {
    slot: Slot,
    size: Size,
    /// How many more ids it takes before it must grow.
    room: u32,
    depth: u32,
}

/// How far an index was gone through. Ids may be added in between.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    segment: usize,
    bucket: usize,
    /// The segment's size and depth when it was looked at last. One that has grown or split since is looked through
    /// again from its first bucket on.
    layout: Option<(Size, u32)>,
}

impl Index {
    /// For a table of a job with so many partitions.
    pub(super) fn new(partitions: u32) -> Self {
        Index::of(Spread(partitions.into()), Layout { depth: 0, size: Size::FIRST })
    }

    /// The hash that says where an id is.
    #[inline(always)]
    pub(super) fn hash(&self, id: u64) -> u64 {
        self.spread.hash(id)
    }

    /// An empty index that will never hold more than so many ids, and then takes [`Index::bytes_bounded`] at most,
    /// however often ids come and go.
    pub(super) fn bounded(partitions: u32, ids: usize) -> Self {
        let planned = Layout::of(ids, DEVIATIONS_BOUNDED);
        Index { planned: (planned.depth > 0).then_some(planned), ..Index::new(partitions) }
    }

    /// The bytes of a bounded index for so many ids at the worst moment: when it has grown last, and what it was before is
    /// there still, if that is not little.
    pub(super) fn bytes_bounded(ids: usize) -> u64 {
        let Layout { depth, size } = Layout::of(ids, DEVIATIONS_BOUNDED);
        let segments = 1u64 << depth;
        let before = if depth == 0 { size.before() } else { Some(Size::LAST) };
        let before = before.map_or(0, |size| arena::bytes(size, 1, Shared::No));
        let before = if before < LITTLE as u64 { 0 } else { before };
        before + arena::bytes(size, segments, shared(depth)) + segments * size_of::<Lead>() as u64
    }

    /// An empty index with room for so many ids of the same table.
    ///
    /// Ids that come in the order of another index would else crowd at one end of a segment that is still small, and
    /// each would be looked for in all full buckets before its own.
    pub(super) fn emptied(&self, room: usize) -> Self {
        Index::of(self.spread, Layout::of(room, DEVIATIONS))
    }

    fn of(spread: Spread, Layout { depth, size }: Layout) -> Self {
        let mut memory = Arena::default();
        let segments: Vec<Segment> =
            (0..1u32 << depth).map(|_| Segment::new(&mut memory, size, depth)).collect();
        let directory = segments.iter().zip(0..).map(|(segment, number)| segment.lead(number)).collect();
        Index { spread, directory, segments, memory, planned: None }
    }

    /// The bucket where ids of this hash are looked for first.
    #[inline(always)]
    pub(super) fn bucket(&self, hash: u64) -> &Bucket {
        let lead = self.lead(hash);
        self.memory.bucket(&lead.slot, home(hash, lead.skip, lead.slot.buckets.into()))
    }

    /// The bucket where ids of this hash are looked for so many buckets further on, when they are not in the one before
    /// that; `None`: they are nowhere.
    #[inline(always)]
    pub(super) fn bucket_after(&self, before: &Bucket, hash: u64, hops: usize) -> Option<&Bucket> {
        if !bucket::was_passed(before) {
            return None;
        }
        let Lead { slot, skip, .. } = *self.lead(hash);
        let buckets = self.memory.buckets(slot);
        let place = home(hash, skip, buckets.len()) + hops;
        // Where ids were taken out, each bucket may have been passed by some that are still there.
        let around = hops >= buckets.len();
        (!around).then(|| &buckets[if place < buckets.len() { place } else { place - buckets.len() }])
    }

    /// Asks for the bucket where an id is looked for first.
    #[inline(always)]
    pub(super) fn ask_for(&self, id: u64) {
        prefetch::item(self.bucket(self.hash(id)));
    }

    /// The row of `id`.
    pub(super) fn find(&self, id: u64) -> Option<u32> {
        self.find_by(self.hash(id), id)
    }

    fn find_by(&self, hash: u64, id: u64) -> Option<u32> {
        let Lead { slot, skip, .. } = *self.lead(hash);
        let buckets = self.memory.buckets(slot);
        bucket::find(buckets, home(hash, skip, buckets.len()), id)
    }

    /// The row of `id`; where there is none, `fresh` becomes it.
    pub(super) fn find_or_insert(&mut self, id: u64, fresh: u32) -> u32 {
        let hash = self.hash(id);
        match self.find_by(hash, id) {
            Some(row) => row,
            None => {
                self.insert(hash, id, fresh);
                fresh
            }
        }
    }

    /// Takes an id out and tells its row; `None`: it is not there. Nothing else moves.
    pub(super) fn remove(&mut self, id: u64) -> Option<u32> {
        let hash = self.hash(id);
        let Lead { slot, segment, skip } = *self.lead(hash);
        let buckets = self.memory.buckets_mut(slot);
        let row = bucket::remove(buckets, home(hash, skip, buckets.len()), id)?;
        self.segments[segment as usize].room += 1;
        Some(row)
    }

    /// Every id with its row, about in the order of their hashes.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, u32)) {
        let mut last = None;
        for lead in &self.directory {
            // One that has not split as often as others is led to by several.
            if last.replace(lead.segment) != Some(lead.segment) {
                let buckets = self.memory.buckets(lead.slot);
                buckets.iter().flat_map(bucket::entries).for_each(|(id, row)| visit(id, row));
            }
        }
    }

    /// The next buckets from a place on; none: that was all. Whatever is added meanwhile, every id that was there at
    /// the first call comes at least once: of a segment that splits, one half keeps its number, and the other one gets
    /// a number that is yet to come. One that was taken out and came again may be left out.
    pub(super) fn next_buckets(&self, place: &mut Place) -> &[Bucket] {
        let Some(segment) = self.segments.get(place.segment) else { return &[] };
        let layout = Some((segment.size, segment.depth));
        if place.layout != layout {
            (place.bucket, place.layout) = (0, layout);
        }
        let left = &self.memory.buckets(segment.slot)[place.bucket..];
        let buckets = &left[..left.len().min(STRETCH)];
        place.bucket += buckets.len();
        if buckets.len() == left.len() {
            *place = Place { segment: place.segment + 1, ..Place::default() };
        }
        buckets
    }

    /// Places for entries in all segments.
    pub(super) fn places(&self) -> u64 {
        self.segments.iter().map(|segment| (segment.size.buckets() * PLACES) as u64).sum()
    }

    /// Bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes() + size_of_val(&self.directory[..]) as u64
    }

    #[inline(always)]
    fn lead(&self, hash: u64) -> &Lead {
        &self.directory[first_bits(hash, self.directory.len().ilog2())]
    }

    /// Takes in an id that is not there yet.
    fn insert(&mut self, hash: u64, id: u64, row: u32) {
        loop {
            let number = self.lead(hash).segment as usize;
            let segment = &mut self.segments[number];
            if segment.room > 0 {
                return segment.fill(&mut self.memory, hash, id, row);
            }
            match (segment.size.next(), self.planned.take_if(|_| segment.size.next().is_none())) {
                (Some(size), _) => self.grow(hash, size),
                (None, Some(planned)) => self.become_of(planned),
                (None, None) => self.split(hash),
            }
        }
    }

    /// Takes all ids over into other segments.
    fn become_of(&mut self, layout: Layout) {
        let before = std::mem::replace(self, Index::of(self.spread, layout));
        before.for_each(|id, row| self.insert(before.hash(id), id, row));
    }

    /// Gives the full segment that `hash` leads to more room.
    fn grow(&mut self, hash: u64, size: Size) {
        let number = self.lead(hash).segment;
        let Segment { slot, depth, .. } = self.segments[number as usize];
        let mut grown = Refilled::new(&mut self.memory, size, depth);
        let spread = self.spread;
        self.memory.empty(slot, |memory, entries| grown.append(memory, spread, entries));
        self.put(number, grown.segment, hash);
    }

    /// Splits the full segment that `hash` leads to by one more bit.
    fn split(&mut self, hash: u64) {
        let number = self.lead(hash).segment;
        let Segment { slot, depth, .. } = self.segments[number as usize];
        let bit = 1 << (u64::BITS - 1 - depth);
        if self.directory.len() == 1 << depth {
            self.directory = self.directory.iter().flat_map(|lead| [*lead; 2]).collect();
        }
        let mut halves = [(); 2].map(|()| Refilled::new(&mut self.memory, Size::SPLIT, depth + 1));
        let spread = self.spread;
        let half = |(id, _): &(u64, u32)| usize::from(spread.hash(*id) & bit != 0);
        self.memory.empty(slot, |memory, entries| {
            // They come in the order of their hashes, but for those that found no room in their own bucket.
            for entries in entries.chunk_by(|one, next| half(one) == half(next)) {
                halves[half(&entries[0])].append(memory, spread, entries);
            }
        });
        let [low, high] = halves.map(|half| half.segment);
        let fresh = u32::try_from(self.segments.len()).expect("there are fewer segments than rows");
        self.put(number, low, hash & !bit);
        self.put(fresh, high, hash | bit);
    }

    /// Has all that leads to a segment lead to where it is now; `hash` is one of its.
    fn put(&mut self, number: u32, segment: Segment, hash: u64) {
        let leads = self.directory.len() >> segment.depth;
        self.directory[first_bits(hash, segment.depth) * leads..][..leads].fill(segment.lead(number));
        match self.segments.get_mut(number as usize) {
            Some(place) => *place = segment,
            None => self.segments.push(segment),
        }
    }
}

impl Layout {
    /// The smallest one for so many ids. Hashes are even, and no segment gets more than its share and so many standard
    /// deviations.
    fn of(ids: usize, deviations: f64) -> Self {
        let due = |depth: u32| {
            let share = ids as f64 / (1u64 << depth) as f64;
            if depth == 0 { share } else { share + deviations * share.sqrt() }
        };
        let (mut depth, mut size) = (0, Size::FIRST);
        while due(depth) > f64::from(room(size)) {
            (depth, size) = size.next().map_or((depth + 1, Size::SPLIT), |larger| (depth, larger));
        }
        Layout { depth, size }
    }
}

impl Segment {
    fn new(memory: &mut Arena, size: Size, depth: u32) -> Self {
        Segment { slot: memory.take(size, shared(depth)), size, room: room(size), depth }
    }

    /// Takes in an id that is not there yet.
    fn fill(&mut self, memory: &mut Arena, hash: u64, id: u64, row: u32) {
        assert!(self.room > 0, "a segment grows before it is full");
        self.room -= 1;
        let buckets = memory.buckets_mut(self.slot);
        bucket::fill(buckets, home(hash, self.skip(), buckets.len()), id, row);
    }

    fn lead(&self, number: u32) -> Lead {
        Lead { slot: self.slot, segment: number, skip: self.skip() }
    }

    /// A single segment is small, and gets most of its ids in few requests. In order of their hashes they would crowd at
    /// its beginning, so that other bits than those of the order count there.
    fn skip(&self) -> Skip {
        let bits = if self.depth == 0 { BUCKET_BITS } else { self.depth };
        Skip(bits as u8)
    }
}

/// A segment that takes over ids of another one.
struct Refilled {
    segment: Segment,
    /// Entries of each bucket. The buckets themselves are not read, so that no entry waits for the one before it.
    counts: Vec<u8>,
}

impl Refilled {
    fn new(memory: &mut Arena, size: Size, depth: u32) -> Self {
        Refilled { segment: Segment::new(memory, size, depth), counts: vec![0; size.buckets()] }
    }

    fn append(&mut self, memory: &mut Arena, spread: Spread, entries: &[(u64, u32)]) {
        let Refilled { segment, counts } = self;
        assert!(segment.room as usize >= entries.len(), "a segment grows before it is full");
        segment.room -= entries.len() as u32;
        let buckets = memory.buckets_mut(segment.slot);
        for (id, row) in entries {
            let home = home(spread.hash(*id), segment.skip(), buckets.len());
            bucket::append(buckets, counts, home, *id, *row);
        }
    }
}

/// Whether segments of this depth share huge pages.
fn shared(depth: u32) -> Shared {
    if depth < SHARED_DEPTH { Shared::No } else { Shared::Yes }
}

/// Ids that a segment of this size takes before it grows.
fn room(size: Size) -> u32 {
    (size.buckets() * PLACES * FILL_PERCENT / 100) as u32
}

/// The bucket at which an id of this hash is looked for first.
#[inline(always)]
fn home(hash: u64, Skip(skip): Skip, buckets: usize) -> usize {
    let bits = (hash << skip) >> (u64::BITS - BUCKET_BITS);
    ((bits * buckets as u64) >> BUCKET_BITS) as usize
}

/// The first bits of a hash as a number.
#[inline(always)]
fn first_bits(hash: u64, bits: u32) -> usize {
    (hash.rotate_left(bits) & ((1 << bits) - 1)) as usize
}

#[cfg(test)]
mod tests;
