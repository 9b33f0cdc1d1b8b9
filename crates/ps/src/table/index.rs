//! From id to row number: open addressing with linear probing, in segments that grow by themselves.
//!
//! An entry is 12 bytes: the id, and the row's number plus one (0: empty, so every id is a valid one). A
//! lookup touches one cache line as a rule. A single array would stop everybody for the time it takes to
//! move all entries when it doubles; here a segment of at most 65,536 entries splits into two (extendible
//! hashing), which takes a fraction of a millisecond however large the table is.

use elasticdl_spec::mix::mix64;

use super::prefetch;

/// Entries of a full-grown segment, as a power of two.
const SEGMENT_BITS: u32 = 16;
/// Entries that a table begins with.
const FIRST_ENTRIES: usize = 16;

/// Id (low half, high half) and row number plus one.
type Entry = [u32; 3];
const EMPTY: Entry = [0; 3];

/// Row numbers by id.
#[derive(Debug)]
pub(super) struct Index {
    /// Which segment holds the ids whose hash has these bits above [`SEGMENT_BITS`].
    directory: Vec<u32>,
    segments: Vec<Segment>,
}

/// Ids whose hashes agree in `depth` bits above [`SEGMENT_BITS`].
///
/// Invariant: at least a fifth of the entries is empty, so probing ends.
#[derive(Debug)]
struct Segment {
    /// A power of two of them.
    entries: Box<[Entry]>,
    /// How many more ids it takes before it must grow.
    room: usize,
    depth: u32,
}

/// Where an id is, or where it would be.
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
        Index { directory: vec![0], segments: vec![Segment::new(FIRST_ENTRIES, 0)] }
    }

    /// Asks for the memory that a lookup of this hash will touch.
    #[inline(always)]
    pub(super) fn prefetch(&self, hash: u64) {
        let entries = &self.segments[self.segment_of(hash)].entries;
        prefetch::item(&entries[hash as usize & (entries.len() - 1)]);
    }

    /// The row of `id`, whose hash is `hash`.
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, id: u64) -> Option<u32> {
        match self.segments[self.segment_of(hash)].probe(hash, id) {
            Found::Row(row) => Some(row),
            Found::Vacant(_) => None,
        }
    }

    /// The row of `id`; where there is none, `fresh` becomes it.
    #[inline(always)]
    pub(super) fn find_or_insert(&mut self, hash: u64, id: u64, fresh: u32) -> u32 {
        let number = self.segment_of(hash);
        let segment = &mut self.segments[number];
        match segment.probe(hash, id) {
            Found::Row(row) => return row,
            Found::Vacant(place) if segment.room > 0 => segment.fill(place, id, fresh),
            Found::Vacant(_) => self.insert_growing(hash, id, fresh),
        }
        fresh
    }

    /// Every id with its row, in no particular order.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, u32)) {
        for segment in &self.segments {
            for entry in segment.entries.iter().filter(|e| e[2] != 0) {
                visit(id_of(entry), entry[2] - 1);
            }
        }
    }

    /// Bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        let entries: usize = self.segments.iter().map(|s| s.entries.len()).sum();
        (entries * size_of::<Entry>() + self.directory.len() * 4) as u64
    }

    #[inline(always)]
    fn segment_of(&self, hash: u64) -> usize {
        self.directory[(hash >> SEGMENT_BITS) as usize & (self.directory.len() - 1)] as usize
    }

    #[cold]
    fn insert_growing(&mut self, hash: u64, id: u64, row: u32) {
        loop {
            let number = self.segment_of(hash);
            if self.segments[number].room > 0 {
                return self.segments[number].insert(hash, id, row);
            }
            if self.segments[number].entries.len() < 1 << SEGMENT_BITS {
                self.segments[number].double();
            } else {
                self.split(number, hash);
            }
        }
    }

    /// Splits the full segment `number`, which `hash` leads to, by one more bit.
    fn split(&mut self, number: usize, hash: u64) {
        let depth = self.segments[number].depth;
        let bit = 1usize << depth;
        if self.directory.len() == bit {
            self.directory.extend_from_within(..);
        }
        let size = self.segments[number].entries.len();
        let mut halves = [Segment::new(size, depth + 1), Segment::new(size, depth + 1)];
        for entry in self.segments[number].entries.iter().filter(|e| e[2] != 0) {
            let id = id_of(entry);
            let hash = self::hash(id);
            let half = (hash >> SEGMENT_BITS) as usize & bit != 0;
            halves[usize::from(half)].insert(hash, id, entry[2] - 1);
        }
        let [low, high] = halves;
        self.segments[number] = low;
        let fresh = u32::try_from(self.segments.len()).expect("there are fewer segments than rows");
        self.segments.push(high);
        // The directory entries that lead here agree in the low `depth` bits; half of them have `bit`.
        let first = ((hash >> SEGMENT_BITS) as usize & (bit - 1)) | bit;
        for place in (first..self.directory.len()).step_by(2 * bit) {
            assert_eq!(self.directory[place], number as u32, "a segment is where its bits lead");
            self.directory[place] = fresh;
        }
    }
}

impl Segment {
    fn new(entries: usize, depth: u32) -> Self {
        assert!(entries.is_power_of_two(), "entries are found with a mask");
        Segment { entries: vec![EMPTY; entries].into_boxed_slice(), room: entries - entries / 5, depth }
    }

    #[inline(always)]
    fn probe(&self, hash: u64, id: u64) -> Found {
        let mask = self.entries.len() - 1;
        let (low, high) = (id as u32, (id >> 32) as u32);
        let mut place = hash as usize & mask;
        loop {
            let entry = self.entries[place];
            if entry[2] == 0 {
                return Found::Vacant(place);
            }
            if entry[0] == low && entry[1] == high {
                return Found::Row(entry[2] - 1);
            }
            place = (place + 1) & mask;
        }
    }

    fn insert(&mut self, hash: u64, id: u64, row: u32) {
        match self.probe(hash, id) {
            Found::Vacant(place) => self.fill(place, id, row),
            Found::Row(_) => panic!("id {id} is inserted once"),
        }
    }

    #[inline(always)]
    fn fill(&mut self, place: usize, id: u64, row: u32) {
        assert!(self.room > 0, "a segment grows before it is full");
        self.room -= 1;
        self.entries[place] = [id as u32, (id >> 32) as u32, row + 1];
    }

    fn double(&mut self) {
        let mut larger = Segment::new(self.entries.len() * 2, self.depth);
        for entry in self.entries.iter().filter(|e| e[2] != 0) {
            let id = id_of(entry);
            larger.insert(hash(id), id, entry[2] - 1);
        }
        *self = larger;
    }
}

#[inline(always)]
fn id_of(entry: &Entry) -> u64 {
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
