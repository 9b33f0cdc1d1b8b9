//! Memory of segments: some of one size share an allocation on huge pages, and one without a segment is given back.

use super::super::pages::Pages;
use super::bucket::{self, Bucket, WORDS};

/// How large a segment is. Small ones double; the last three sizes are close to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size(u8);

/// Buckets of each size.
const BUCKETS: [u16; 15] = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_922, 13_107, 16_384];
/// Segments of each of the last sizes that share an allocation: one or two huge pages of 32,768 buckets, almost filled.
const TOGETHER: [u32; 3] = [3, 5, 2];

/// Buckets whose entries are taken out together: few enough for the nearest cache.
const TOGETHER_EMPTIED: usize = 64;

impl Size {
    /// What a table begins with.
    pub const FIRST: Size = Size(0);
    /// What the halves of the largest begin with: three quarters as full as it was.
    pub const SPLIT: Size = Size((BUCKETS.len() - TOGETHER.len()) as u8);
    /// The largest.
    pub const LAST: Size = Size(BUCKETS.len() as u8 - 1);

    pub fn buckets(self) -> usize {
        BUCKETS[usize::from(self.0)].into()
    }

    /// The next smaller; `None`: it is the smallest.
    pub fn before(self) -> Option<Size> {
        self.0.checked_sub(1).map(Size)
    }

    /// The next larger; `None`: it is the largest.
    pub fn next(self) -> Option<Size> {
        (usize::from(self.0) + 1 < BUCKETS.len()).then_some(Size(self.0 + 1))
    }

    /// How many may share an allocation.
    fn together(self) -> u32 {
        self.0.checked_sub(Size::SPLIT.0).map_or(1, |i| TOGETHER[usize::from(i)])
    }
}

/// Whether a segment may share an allocation with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shared {
    Yes,
    No,
}

/// Where a segment's buckets are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    allocation: u32,
    from: u16,
    pub buckets: u16,
}

/// The buckets of all segments.
#[derive(Debug, Default)]
pub(super) struct Arena {
    /// By allocation, as words: it begins at a cache line only if its items are smaller than one. One that was given
    /// back has a single word, and its place is used again.
    words: Vec<Pages<u64>>,
    rooms: Vec<Room>,
    bytes: u64,
}

/// What is free in an allocation.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// How large its segments are, and how many it has room for; `None`: it was given back.
    holds: Option<(Size, u32)>,
    /// One bit for each slot that has no segment.
    vacant: u32,
}

const GIVEN_BACK: Room = Room { holds: None, vacant: 0 };

impl Arena {
    /// Room for a segment, empty; in a small index it shares with none, for huge pages would be mostly empty.
    pub fn take(&mut self, size: Size, shared: Shared) -> Slot {
        let together = if shared == Shared::Yes { size.together() } else { 1 };
        let open = |room: &Room| room.holds == Some((size, together)) && room.vacant != 0;
        // The last ones are those with room, as a rule.
        let number = self.rooms.iter().rposition(open).unwrap_or_else(|| self.allocate(size, together));
        let slot = self.rooms[number].vacant.trailing_zeros();
        self.rooms[number].vacant &= !(1 << slot);
        let buckets = BUCKETS[usize::from(size.0)];
        let allocation = u32::try_from(number).expect("there are fewer segments than rows");
        Slot { allocation, from: slot as u16 * buckets, buckets }
    }

    /// Hands all entries of a segment to `give`, some at a time in the order of their buckets, and takes its room back.
    pub fn empty(&mut self, slot: Slot, mut give: impl FnMut(&mut Arena, &[(u64, u32)])) {
        let number = slot.allocation as usize;
        let mut words = std::mem::replace(&mut self.words[number], Pages::small(1));
        let held = &mut words[slot.from as usize * WORDS..][..slot.buckets as usize * WORDS];
        let mut entries = Vec::new();
        for buckets in held.as_chunks().0.chunks(TOGETHER_EMPTIED) {
            bucket::collect(buckets, &mut entries);
            give(self, &entries);
        }
        let room = &mut self.rooms[number];
        room.vacant |= 1 << (slot.from / slot.buckets);
        if room.holds.is_some_and(|(_, together)| room.vacant == all(together)) {
            *room = GIVEN_BACK;
            self.bytes -= words.bytes();
            return;
        }
        held.fill(0);
        self.words[number] = words;
    }

    /// One bucket of a segment.
    #[inline(always)]
    pub fn bucket(&self, slot: &Slot, bucket: usize) -> &Bucket {
        &self.words[slot.allocation as usize].as_chunks().0[slot.from as usize + bucket]
    }

    pub fn buckets(&self, slot: Slot) -> &[Bucket] {
        let words = &self.words[slot.allocation as usize];
        &words.from(slot.from as usize * WORDS).as_chunks().0[..slot.buckets as usize]
    }

    pub fn buckets_mut(&mut self, slot: Slot) -> &mut [Bucket] {
        let words = &mut self.words[slot.allocation as usize];
        &mut words.from_mut(slot.from as usize * WORDS).as_chunks_mut().0[..slot.buckets as usize]
    }

    /// Bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn allocate(&mut self, size: Size, together: u32) -> usize {
        let words = size.buckets() * together as usize * WORDS;
        let words = if together == 1 { Pages::small(words) } else { Pages::huge(words) };
        self.bytes += words.bytes();
        let room = Room { holds: Some((size, together)), vacant: all(together) };
        if let Some(number) = self.rooms.iter().position(|room| room.holds.is_none()) {
            (self.words[number], self.rooms[number]) = (words, room);
            return number;
        }
        self.words.push(words);
        self.rooms.push(room);
        self.words.len() - 1
    }
}

/// Bytes of so many segments of one size, where nothing else is.
pub(super) fn bytes(size: Size, segments: u64, shared: Shared) -> u64 {
    let words = size.buckets() * WORDS;
    match (shared, size.together()) {
        (Shared::No, _) | (_, 1) => segments * Pages::<u64>::bytes_small(words),
        (Shared::Yes, together) => {
            segments.div_ceil(together.into()) * Pages::<u64>::bytes_huge(words * together as usize)
        }
    }
}

/// The bits of all slots of an allocation.
fn all(together: u32) -> u32 {
    (1 << together) - 1
}
