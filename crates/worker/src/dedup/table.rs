//! The table that the ids of a batch go into and come out of again, grouped.
//!
//! Lines of eight ids in the order of hashes, so that every partition has a stretch of lines. An id that finds its
//! line full goes to the next one of its partition, the last of which is followed by the first. Almost nothing depends
//! on what an id turns out to be: in a batch of a click log every third one is new, and a processor that guesses which
//! would guess wrong all the time. For the same reason some hundred ids are looked for before the new ones among them
//! are put in: to write to lines between two looks would make each look wait for the one before.

use elasticdl_spec::mix::mix64;

use super::Keys;
use super::lanes::{BLOCK, LINE, Lanes, Line, ROW, Reach, Strangers, Work};

/// A partition has a line for so many ids of the batch, most of which are there more than once.
const IDS_A_LINE: usize = 11;
/// And so many lines more, which matters where ids are few.
const LINES_MORE: usize = 2;
/// How often a partition's lines are doubled where ids crowd. After that all ids would find room in one partition.
const DOUBLED_MAX: u32 = 2;
/// An id that is as many lines from its own shows that ids crowd.
const WALK_MAX: u32 = 16;
/// What a vacant place holds at first: some number that is no small one.
pub(super) const VACANT: u64 = 0x5bd1_e995_9d1b_54a5;

/// The working memory of deduplication, which only grows.
///
/// Invariant: between batches all places are vacant.
#[derive(Debug)]
pub(super) struct Table {
    partitions: u32,
    lines: Vec<Line>,
    /// What is known of each line without a look at it.
    tags: Vec<Tag>,
    /// How many ids are in the lines before each, once all are in.
    before: Vec<u32>,
    /// Where in its line each id of the batch is.
    found: Vec<u8>,
    /// What a vacant place holds. Any word may be an id: when this one comes, another takes its part.
    vacant: u64,
}

impl Table {
    pub(super) fn new(partitions: u32) -> Self {
        let (lines, tags, before, found) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Table { partitions, lines, tags, before, found, vacant: VACANT }
    }

    /// Puts all ids in and takes them out again.
    pub(super) fn dedup(&mut self, reach: Reach, ids: &[u64], keys: &mut Keys) {
        let padded = ids.len().next_multiple_of(BLOCK);
        keys.index.resize(padded, 0);
        self.found.resize(padded, 0);
        let mut layout = Layout::new(ids.len(), self.partitions);
        loop {
            let lines = layout.lines() as usize;
            if self.lines.len() < lines {
                self.lines.resize(lines, Line([self.vacant; LINE]));
                self.tags.resize(lines, Tag::default());
                self.before.resize(lines, 0);
            }
            let (lines, tags) = (&mut self.lines[..lines], &mut self.tags[..lines]);
            let (index, found) = (&mut keys.index[..], &mut self.found[..]);
            match reach.run(Filling { layout, lines, tags, vacant: self.vacant, ids, index, found }) {
                Filled::All => break,
                Filled::Crowded => layout = layout.roomier(ids.len()),
                Filled::MetVacant => self.vacant = mix64(self.vacant),
            }
            self.lines.fill(Line([self.vacant; LINE]));
            self.tags.fill(Tag::default());
        }
        let lines = layout.lines() as usize;
        let (before, found) = (&mut self.before[..lines], &self.found[..]);
        let (lines, tags) = (&mut self.lines[..lines], &mut self.tags[..lines]);
        reach.run(Emptying { layout, lines, tags, before, vacant: self.vacant, found, keys });
        keys.index.truncate(ids.len());
    }
}

/// Which block's ids have last changed a line, and how many are in it.
///
/// Blocks are numbered by 12 bits: an old change may look like one of now, and costs a look then.
#[derive(Debug, Clone, Copy, Default)]
struct Tag(u16);

impl Tag {
    const COUNT: u16 = 15;

    #[inline(always)]
    fn new(block: usize, count: usize) -> Self {
        Tag(Tag::of(block) | count as u16)
    }

    /// The number after the block's, because nothing has changed a line that is still vacant.
    #[inline(always)]
    fn of(block: usize) -> u16 {
        ((block + 1) << 4) as u16
    }

    #[inline(always)]
    fn count(self) -> usize {
        usize::from(self.0 & Tag::COUNT)
    }

    /// Whether the line has room, and nothing was put in since the block's ids were looked for.
    #[inline(always)]
    fn is_open(self, block: usize) -> bool {
        (self.0 ^ Tag::of(block) > Tag::COUNT) & (self.count() < LINE)
    }
}

/// How the table is cut.
#[derive(Debug, Clone, Copy)]
struct Layout {
    partitions: u32,
    /// Lines of a partition.
    each: u32,
    /// How often there was too little room.
    tries: u32,
}

impl Layout {
    fn new(ids: usize, partitions: u32) -> Self {
        Layout::of(partitions, ids.div_ceil(partitions as usize) / IDS_A_LINE + LINES_MORE, 0)
    }

    /// The same for ids that are less often there twice than most, or whose hashes are less even.
    fn roomier(self, ids: usize) -> Self {
        let tries = self.tries + 1;
        let each = if tries <= DOUBLED_MAX { 2 * self.each as usize } else { ids / LINE + 1 };
        Layout::of(self.partitions, each.max(self.each as usize), tries)
    }

    fn of(partitions: u32, each: usize, tries: u32) -> Self {
        assert!(each * partitions as usize <= i32::MAX as usize, "lines are numbered by 31 bits");
        Layout { partitions, each: each as u32, tries }
    }

    fn lines(self) -> u32 {
        self.each * self.partitions
    }

    /// The line after this one.
    fn next(self, line: u32) -> u32 {
        if (line + 1).is_multiple_of(self.each) { line + 1 - self.each } else { line + 1 }
    }

    fn walk_max(self) -> u32 {
        if self.tries <= DOUBLED_MAX { WALK_MAX } else { u32::MAX }
    }
}

/// Puts the ids of a batch into the table.
struct Filling<'a> {
    layout: Layout,
    lines: &'a mut [Line],
    tags: &'a mut [Tag],
    vacant: u64,
    ids: &'a [u64],
    /// Gets the line of each, in whole blocks.
    index: &'a mut [u32],
    /// Gets its place in there, likewise.
    found: &'a mut [u8],
}

/// How that went.
enum Filled {
    All,
    /// Too many lie close to each other.
    Crowded,
    /// One of them is the word for a vacant place.
    MetVacant,
}

impl Work for Filling<'_> {
    type Output = Filled;

    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) -> Filled {
        let (whole, rest) = self.ids.as_chunks::<BLOCK>();
        // What the last block lacks is filled up with an id that it has.
        let mut last = [rest.first().copied().unwrap_or_default(); BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let (homes, _) = std::mem::take(&mut self.index).as_chunks_mut::<BLOCK>();
        let (found, _) = std::mem::take(&mut self.found).as_chunks_mut::<BLOCK>();
        let (lines, vacant) = (self.layout.lines(), self.vacant);
        let mut met = false;
        let mut strangers = Strangers::none();
        let (mut ids, mut nowhere) = (whole.first().unwrap_or(&last), [0; BLOCK]);
        if let Some(homes) = homes.first_mut() {
            for (ids, homes) in ids.as_chunks::<LINE>().0.iter().zip(homes.as_chunks_mut::<LINE>().0) {
                met |= lanes.has(ids, vacant);
                *homes = lanes.homes(lines, ids);
            }
        }
        for (block, found) in found.iter_mut().enumerate() {
            let next = whole.get(block + 1).unwrap_or(&last);
            let (homes, ahead) =
                homes[block..].split_first_mut().expect("as many blocks of lines as of places");
            let ahead = ahead.first_mut().unwrap_or(&mut nowhere);
            // The next block's lines are computed between the looks, which is faster than one after the other: hashes
            // and looks keep different parts of a processor busy.
            let here = ids.as_chunks::<LINE>().0.iter().zip(homes.as_chunks::<LINE>().0);
            let there = next.as_chunks::<LINE>().0.iter().zip(ahead.as_chunks_mut::<LINE>().0);
            let held = &*self.lines;
            for (((ids, homes), (next, ahead)), found) in here.zip(there).zip(found.as_chunks_mut::<LINE>().0)
            {
                met |= lanes.has(next, vacant);
                *ahead = lanes.homes(lines, next);
                lanes.look(held, ids, homes, found);
            }
            lanes.strangers(found, &mut strangers);
            if !self.put(block, ids, homes, found, strangers.as_slice()) {
                return Filled::Crowded;
            }
            ids = next;
        }
        if met { Filled::MetVacant } else { Filled::All }
    }
}

impl Filling<'_> {
    /// Puts in those of a block that were not found; `false` where they crowd.
    // On its own: inlined, the vectors of the looks would be put away and fetched again for every id that has to walk.
    #[inline(never)]
    fn put(
        &mut self,
        block: usize,
        ids: &[u64; BLOCK],
        homes: &mut [u32; BLOCK],
        found: &mut [u8; BLOCK],
        strangers: &[u32],
    ) -> bool {
        for number in strangers {
            let number = *number as usize % BLOCK;
            let (id, home) = (ids[number], &mut homes[number]);
            let tag = &mut self.tags[*home as usize];
            let count = tag.count();
            if tag.is_open(block) {
                *tag = Tag::new(block, count + 1);
                self.lines[*home as usize].0[count % LINE] = id;
                found[number] = 1 << count;
            } else {
                let Some((line, place)) = self.settle(block, id, *home) else { return false };
                *home = line;
                found[number] = 1 << place;
            }
        }
        true
    }

    /// Puts an id into the first line with room from its own on, unless one of these has it. `None` where that is far.
    #[cold]
    fn settle(&mut self, block: usize, id: u64, mut home: u32) -> Option<(u32, usize)> {
        for _ in 0..self.layout.walk_max() {
            let (line, tag) = (&mut self.lines[home as usize].0, &mut self.tags[home as usize]);
            let count = tag.count();
            if let Some(place) = line[..count].iter().position(|held| *held == id) {
                return Some((home, place));
            }
            if count < LINE {
                line[count] = id;
                *tag = Tag::new(block, count + 1);
                return Some((home, count));
            }
            home = self.layout.next(home);
        }
        None
    }
}

/// Takes the ids out of the table again, grouped, and tells the index where they went.
struct Emptying<'a> {
    layout: Layout,
    lines: &'a mut [Line],
    tags: &'a mut [Tag],
    before: &'a mut [u32],
    vacant: u64,
    found: &'a [u8],
    keys: &'a mut Keys,
}

impl Work for Emptying<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, lanes: impl Lanes) {
        let Emptying { layout, lines, tags, before, vacant, found, keys: Keys { ids, starts, index } } = self;
        let unique: usize = tags.iter().map(|tag| tag.count()).sum();
        // A line is written as a whole, and what it does not have is written over by the next one.
        ids.resize(unique + LINE, 0);
        let mut next = 0;
        for ((line, tag), before) in lines.iter_mut().zip(tags).zip(&mut *before) {
            *before = next as u32;
            ids[next..next + LINE].copy_from_slice(&line.0);
            *line = Line([vacant; LINE]);
            next += std::mem::take(tag).count();
        }
        ids.truncate(unique);
        starts.clear();
        starts.extend((0..layout.partitions).map(|p| before[(p * layout.each) as usize] as usize));
        starts.push(unique);
        for (homes, found) in index.as_chunks_mut::<ROW>().0.iter_mut().zip(found.as_chunks::<ROW>().0) {
            lanes.places(homes, found, before);
        }
    }
}
