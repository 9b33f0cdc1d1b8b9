//! From id to row number: open addressing with linear probing, in segments that grow by themselves.
//!
//! An entry is 12 bytes: the id, and the row's number plus one (0: empty, so every id is a valid one). A
//! lookup touches one cache line as a rule. A single array would stop everybody for the time it takes to
//! move all entries when it doubles; here a segment of at most 65,536 entries splits into two (extendible
//! hashing), which takes a fraction of a millisecond however large the table is. Segments lie beside each other on
//! huge pages, eight to an allocation.

use elasticdl_spec::mix::mix64;

use super::pages::Pages;
use super::prefetch;

/// Entries of a full-grown segment, as a power of two.
const SEGMENT_BITS: u32 = 16;
/// Words of a full-grown segment.
const SEGMENT_WORDS: usize = WORDS << SEGMENT_BITS;
/// Entries that a table begins with.
const FIRST_ENTRIES: usize = 16;
/// Segments in one allocation: 6 MiB, three huge pages.
const TOGETHER: usize = 8;

/// Words of an entry: the id (low half, high half) and the row's number plus one.
const WORDS: usize = 3;

/// Row numbers by id.
#[derive(Debug)]
pub(super) struct Index {
    /// Which segment holds the ids whose hash has these bits above [`SEGMENT_BITS`].
    directory: Vec<u32>,
    segments: Vec<Segment>,
    /// Where the entries are: the first segment's, and [`TOGETHER`] in each of the others.
    memory: Vec<Pages<u32>>,
}

/// Ids whose hashes agree in `depth` bits above [`SEGMENT_BITS`].
///
/// Invariant: at least a fifth of the entries is empty, so probing ends.
#[derive(Debug)]
struct Segment {
    /// In which allocation its entries are, and from which word on.
    memory: u32,
    from: u32,
    /// A power of two of them, less one.
    mask: u32,
    /// How many more ids it takes before it must grow.
    room: u32,
    depth: u32,
}

/// Where an id is, or the word at which it would be.
enum Found {
    Row(u32),
    Vacant(usize),
}

/// The hash by which ids are spread. Its high bits pick the partition (`spec::placement`), its low ones
/// the entry.
#[inline(always)]
pub(super) fn hash(id: u64) -> u64 {
    mix64(id)
}

impl Index {
    pub(super) fn new() -> Self {
        let first = Segment::new(0, 0, FIRST_ENTRIES, 0);
        Index { directory: vec![0], segments: vec![first], memory: vec![Pages::small(FIRST_ENTRIES * WORDS)] }
    }

    /// Asks for the memory that a lookup of this hash will touch.
    #[inline(always)]
    pub(super) fn prefetch(&self, hash: u64) {
        let segment = &self.segments[self.segment_of(hash)];
        prefetch::item(&self.entries(segment)[segment.place(hash)]);
    }

    /// The row of `id`, whose hash is `hash`.
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, id: u64) -> Option<u32> {
        let segment = &self.segments[self.segment_of(hash)];
        match segment.probe(self.entries(segment), hash, id) {
            Found::Row(row) => Some(row),
            Found::Vacant(_) => None,
        }
    }

    /// The row of `id`; where there is none, `fresh` becomes it.
    #[inline(always)]
    pub(super) fn find_or_insert(&mut self, hash: u64, id: u64, fresh: u32) -> u32 {
        let number = self.segment_of(hash);
        let segment = &mut self.segments[number];
        let entries = &mut self.memory[segment.memory as usize].from_mut(segment.from as usize);
        match segment.probe(entries, hash, id) {
            Found::Row(row) => return row,
            Found::Vacant(place) if segment.room > 0 => segment.fill(entries, place, id, fresh),
            Found::Vacant(_) => self.insert_growing(hash, id, fresh),
        }
        fresh
    }

    /// Every id with its row, in no particular order.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, u32)) {
        for segment in &self.segments {
            let entries = &self.entries(segment)[..segment.words()];
            for entry in entries.chunks_exact(WORDS).filter(|entry| entry[2] != 0) {
                visit(id_of(entry), entry[2] - 1);
            }
        }
    }

    /// Bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        let words: usize = self.segments.iter().map(Segment::words).sum();
        ((words + self.directory.len()) * size_of::<u32>()) as u64
    }

    #[inline(always)]
    fn segment_of(&self, hash: u64) -> usize {
        self.directory[(hash >> SEGMENT_BITS) as usize & (self.directory.len() - 1)] as usize
    }

    /// The entries of a segment, and whatever lies behind them.
    #[inline(always)]
    fn entries(&self, segment: &Segment) -> &[u32] {
        self.memory[segment.memory as usize].from(segment.from as usize)
    }

    #[cold]
    fn insert_growing(&mut self, hash: u64, id: u64, row: u32) {
        loop {
            let number = self.segment_of(hash);
            if self.segments[number].room > 0 {
                return self.insert(number, hash, id, row);
            }
            if self.segments[number].words() < SEGMENT_WORDS {
                self.double();
            } else {
                self.split(number, hash);
            }
        }
    }

    /// An id that is not there yet, where there is room for it.
    fn insert(&mut self, number: usize, hash: u64, id: u64, row: u32) {
        let segment = &mut self.segments[number];
        let entries = self.memory[segment.memory as usize].from_mut(segment.from as usize);
        match segment.probe(entries, hash, id) {
            Found::Vacant(place) => segment.fill(entries, place, id, row),
            Found::Row(_) => panic!("id {id} is inserted once"),
        }
    }

    /// Doubles the first segment, which is the only one until it is full-grown.
    fn double(&mut self) {
        let entries = self.segments[0].mask as usize + 1;
        let before = std::mem::replace(&mut self.memory[0], Pages::small(2 * entries * WORDS));
        self.segments[0] = Segment::new(0, 0, 2 * entries, 0);
        for entry in before.chunks_exact(WORDS).filter(|entry| entry[2] != 0) {
            let id = id_of(entry);
            self.insert(0, hash(id), id, entry[2] - 1);
        }
    }

    /// Splits the full segment `number`, which `hash` leads to, by one more bit.
    fn split(&mut self, number: usize, hash: u64) {
        let Segment { memory, from, depth, .. } = self.segments[number];
        let bit = 1usize << depth;
        if self.directory.len() == bit {
            self.directory.extend_from_within(..);
        }
        let entries = &mut self.memory[memory as usize].from_mut(from as usize)[..SEGMENT_WORDS];
        let before = entries.to_vec();
        entries.fill(0);
        self.segments[number] = Segment::new(memory, from, 1 << SEGMENT_BITS, depth + 1);
        let fresh = self.add_segment(depth + 1);
        for entry in before.chunks_exact(WORDS).filter(|entry| entry[2] != 0) {
            let id = id_of(entry);
            let hash = self::hash(id);
            let high = (hash >> SEGMENT_BITS) as usize & bit != 0;
            self.insert(if high { fresh } else { number }, hash, id, entry[2] - 1);
        }
        // The directory entries that lead here agree in the low `depth` bits; half of them have `bit`.
        let first = ((hash >> SEGMENT_BITS) as usize & (bit - 1)) | bit;
        for place in (first..self.directory.len()).step_by(2 * bit) {
            assert_eq!(self.directory[place], number as u32, "a segment is where its bits lead");
            self.directory[place] = fresh as u32;
        }
    }

    /// One more full-grown segment without an entry.
    fn add_segment(&mut self, depth: u32) -> usize {
        let fresh = self.segments.len();
        // The first has an allocation of its own.
        let (memory, place) = (1 + (fresh - 1) / TOGETHER, (fresh - 1) % TOGETHER);
        if memory == self.memory.len() {
            self.memory.push(Pages::huge(TOGETHER * SEGMENT_WORDS));
        }
        let memory = u32::try_from(memory).expect("there are fewer segments than rows");
        self.segments.push(Segment::new(memory, (place * SEGMENT_WORDS) as u32, 1 << SEGMENT_BITS, depth));
        fresh
    }
}

impl Segment {
    fn new(memory: u32, from: u32, entries: usize, depth: u32) -> Self {
        assert!(entries.is_power_of_two(), "entries are found with a mask");
        Segment { memory, from, mask: entries as u32 - 1, room: (entries - entries / 5) as u32, depth }
    }

    /// Words of all its entries.
    fn words(&self) -> usize {
        (self.mask as usize + 1) * WORDS
    }

    /// The word at which an id of this hash is looked for first.
    #[inline(always)]
    fn place(&self, hash: u64) -> usize {
        (hash as u32 & self.mask) as usize * WORDS
    }

    #[inline(always)]
    fn probe(&self, entries: &[u32], hash: u64, id: u64) -> Found {
        let (low, high) = (id as u32, (id >> 32) as u32);
        let mut place = self.place(hash);
        loop {
            let entry = &entries[place..][..WORDS];
            if entry[2] == 0 {
                return Found::Vacant(place);
            }
            if entry[0] == low && entry[1] == high {
                return Found::Row(entry[2] - 1);
            }
            place += WORDS;
            if place == self.words() {
                place = 0;
            }
        }
    }

    #[inline(always)]
    fn fill(&mut self, entries: &mut [u32], place: usize, id: u64, row: u32) {
        assert!(self.room > 0, "a segment grows before it is full");
        self.room -= 1;
        entries[place..][..WORDS].copy_from_slice(&[id as u32, (id >> 32) as u32, row + 1]);
    }
}

#[inline(always)]
fn id_of(entry: &[u32]) -> u64 {
    u64::from(entry[0]) | (u64::from(entry[1]) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_keeps_its_row_while_segments_double_and_split() {
        let mut index = Index::new();
        let ids: Vec<u64> = (0..300_000u64).map(|i| i * 3).chain([u64::MAX]).collect();
        for (row, id) in ids.iter().enumerate() {
            assert_eq!(index.find(hash(*id), *id), None);
            assert_eq!(index.find_or_insert(hash(*id), *id, row as u32), row as u32);
        }
        assert!(index.segments.len() > 4, "{} segments", index.segments.len());
        for (row, id) in ids.iter().enumerate() {
            assert_eq!(index.find(hash(*id), *id), Some(row as u32));
            assert_eq!(index.find_or_insert(hash(*id), *id, 9), row as u32);
            let unknown = id ^ 1 << 40;
            assert_eq!(index.find(hash(unknown), unknown), None, "{id}");
        }
        let mut seen = vec![u64::MAX - 1; ids.len()];
        index.for_each(|id, row| seen[row as usize] = id);
        assert_eq!(seen, ids);
    }

    #[test]
    fn an_entry_is_twelve_bytes_and_two_fifths_are_used_at_least() {
        let mut index = Index::new();
        for id in 0..1_000_000 {
            index.find_or_insert(hash(id), id, id as u32);
            assert!(index.bytes() <= 12 * 16 + 4 || index.bytes() <= (id + 1) * 31, "{id} {}", index.bytes());
        }
    }
}
