//! What deduplication does with some ids at a time, as any processor can; `x86` has the same in the words of some.
//!
//! Nothing here decides anything: where ids are put and what comes out is `table`'s business.

use elasticdl_spec::mix::mix64;
use pulp::{Arch, NullaryFnOnce};

#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// Ids of a line.
pub(super) const LINE: usize = 8;
/// Ids that are looked for before any of them is put in.
pub(super) const BLOCK: usize = 256;
/// Places that are told at a time.
pub(super) const ROW: usize = 16;

/// Ids that share a cache line, the first ones taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(align(64))]
pub(super) struct Line(pub [u64; LINE]);

/// Which ids of a block are in no line yet: the first so many of these.
#[derive(Debug)]
pub(super) struct Strangers {
    /// Numbers in the block. What is written at once may reach beyond those that count.
    pub numbers: [u32; BLOCK + ROW],
    pub count: usize,
}

impl Strangers {
    /// None.
    pub(super) fn none() -> Self {
        Strangers { numbers: [0; BLOCK + ROW], count: 0 }
    }

    pub(super) fn as_slice(&self) -> &[u32] {
        &self.numbers[..self.count]
    }
}

/// The words that everything else is said in.
///
/// A place in a line is told as a byte with one bit; a byte without any says that the id is not in the line.
pub(super) trait Lanes: Copy {
    /// Which of so many lines each id belongs to: that share of all lines which its hash is of all hashes. So lines
    /// are in the order of hashes, and those of a partition (`placement::partition_of_row`) beside each other where all
    /// partitions have as many.
    fn homes(self, lines: u32, ids: &[u64; LINE]) -> [u32; LINE];

    /// Whether a word is among some ids.
    fn has(self, ids: &[u64; LINE], word: u64) -> bool;

    /// Where in its line each id is.
    fn look(self, lines: &[Line], ids: &[u64; LINE], homes: &[u32; LINE], found: &mut [u8; LINE]);

    /// Which ids of a block were not found.
    fn strangers(self, found: &[u8; BLOCK], strangers: &mut Strangers);

    /// Turns lines of ids into their places among all ids, where so many are in the lines before each.
    fn places(self, homes: &mut [u32; ROW], found: &[u8; ROW], before: &[u32]);
}

/// Something that is said in such words.
pub(super) trait Work {
    type Output;

    fn run(self, lanes: impl Lanes) -> Self::Output;
}

/// What a processor has. It makes no difference to what comes out.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reach {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Reach {
    /// All that this one has, the fastest last.
    pub(super) fn here() -> Vec<Reach> {
        let mut here = vec![Reach::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            here.extend(Avx2::here().map(Reach::Avx2));
            here.extend(Avx512::here().map(Reach::Avx512));
        }
        here
    }

    /// Has work done with it.
    #[inline]
    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            Reach::Plain => Arch::new().dispatch(With { lanes: Plain, work }),
            #[cfg(target_arch = "x86_64")]
            Reach::Avx2(lanes) => lanes.vectorize(With { lanes, work }),
            #[cfg(target_arch = "x86_64")]
            Reach::Avx512(lanes) => lanes.vectorize(With { lanes, work }),
        }
    }
}

struct With<L, W> {
    lanes: L,
    work: W,
}

impl<L: Lanes, W: Work> NullaryFnOnce for With<L, W> {
    type Output = W::Output;

    #[inline(always)]
    fn call(self) -> W::Output {
        self.work.run(self.lanes)
    }
}

/// For every processor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain;

impl Lanes for Plain {
    #[inline(always)]
    fn homes(self, lines: u32, ids: &[u64; LINE]) -> [u32; LINE] {
        let (lines, low) = (u64::from(lines), u64::from(u32::MAX));
        // By multiplications that vectors have.
        ids.map(|id| {
            let hash = mix64(id);
            (((hash >> 32) * lines + (((hash & low) * lines) >> 32)) >> 32) as u32
        })
    }

    #[inline(always)]
    fn has(self, ids: &[u64; LINE], word: u64) -> bool {
        // Without a way out in the middle, which vectors have not.
        ids.iter().fold(false, |has, id| has | (*id == word))
    }

    #[inline(always)]
    fn look(self, lines: &[Line], ids: &[u64; LINE], homes: &[u32; LINE], found: &mut [u8; LINE]) {
        for ((id, home), found) in ids.iter().zip(homes).zip(found) {
            let held = lines[*home as usize].0.iter().zip(0..);
            *found = held.fold(0, |bits, (held, place)| bits | (u8::from(held == id) << place));
        }
    }

    #[inline(always)]
    fn strangers(self, found: &[u8; BLOCK], strangers: &mut Strangers) {
        let mut count = 0;
        for (found, number) in found.iter().zip(0..) {
            strangers.numbers[count] = number;
            count += usize::from(*found == 0);
        }
        strangers.count = count;
    }

    #[inline(always)]
    fn places(self, homes: &mut [u32; ROW], found: &[u8; ROW], before: &[u32]) {
        for (home, found) in homes.iter_mut().zip(found) {
            *home = before[*home as usize] + found.trailing_zeros();
        }
    }
}
