//! What a table may hold: who gets a row, and who makes room.
//!
//! A table with a bound changes where a push is applied and nowhere else. A pull gives an id without a row what its row
//! would be born as, and stores nothing. A push counts an id without a row ([`Sketch`]), drops its gradient until it was
//! named often enough, and then gives it a row; where the table is full another one goes ([`Clock`]), and the newcomer
//! takes its number. Numbers stay dense that way, and "row 17 is that of id 4 now" tells all there is to tell of an
//! eviction: checkpoints and copies of such a table go by numbers, and know of no removals.

use elasticdl_spec::TableSpec;
use pulp::NullaryFnOnce;
use serde::{Deserialize, Serialize};

use super::clock::Clock;
use super::index::Index;
use super::sketch::Sketch;
use super::slabs::Slabs;
use super::words::Words;
use super::work::Work;
use super::{AHEAD, Table};
use crate::optimizer::{Optimizer, Rule};

/// A bound leaves room for so many rows in each partition at least: with fewer, rows would go before they are trained a
/// second time.
pub const ROWS_MIN: u64 = 64;
/// The sketch takes such a part of a partition's memory, and no more than this: it is copied whole where a checkpoint is
/// cut, under the partition's lock.
const SKETCH_PART: u64 = 32;
const SKETCH_BYTES_MAX: u64 = 1 << 20;
/// Its size where the table has no bound in bytes.
const SKETCH_BYTES: u64 = 1 << 18;

/// Bytes of one partition's share of a table's memory, if that is bounded.
pub(super) fn share(spec: &TableSpec, partitions: u32) -> Option<u64> {
    spec.memory_max.map(|bytes| bytes / u64::from(partitions))
}

/// The least `memory_max` of a table whose rows have so many weights.
pub fn memory_min(width: usize, optimizer: &Optimizer, spec: &TableSpec, partitions: u32) -> u64 {
    let floats = width + optimizer.slots(width);
    let row = |rows: u64| needed(floats, rows as usize);
    let fits = |share: u64| row(ROWS_MIN) + sketch_bytes(spec, share) <= share;
    let mut share = row(ROWS_MIN);
    while !fits(share) {
        share += 64;
    }
    share * u64::from(partitions)
}

/// Rows of so many floats that fit into a partition's share.
fn rows_max(floats: usize, spec: &TableSpec, share: u64) -> usize {
    let room = share.saturating_sub(sketch_bytes(spec, share));
    let (mut fits, mut above) = (0, usize::try_from(room / 4).unwrap_or(usize::MAX).min(u32::MAX as usize));
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        if needed(floats, middle) <= room { fits = middle } else { above = middle }
    }
    fits.max(1)
}

/// Bytes of so many rows with all that belongs to them: all memory that is got for them, when there is most of it.
fn needed(floats: usize, rows: usize) -> u64 {
    Slabs::bytes_bounded(floats, rows) + Clock::bytes_of(rows) + Index::bytes_bounded(rows)
}

fn sketch_bytes(spec: &TableSpec, share: u64) -> u64 {
    if spec.admit_after <= 1 { 0 } else { Sketch::bytes_of((share / SKETCH_PART).min(SKETCH_BYTES_MAX)) }
}

/// The bound of a table.
#[derive(Debug)]
pub(super) struct Bound {
    admit_after: u8,
    /// How often ids without a row were named; `None`: once is enough.
    sketch: Option<Sketch>,
    /// Whose turn it is to go; `None`: there is room for all.
    pub(super) clock: Option<Clock>,
    /// Bytes that the table may take here.
    limit: Option<u64>,
    counts: Counts,
    /// Rows that were put by number, of those up to the highest one.
    placed: usize,
    /// Rows came without their numbers and have others here than in the files that they came from.
    renumbered: bool,
}

/// What a bound has done in all lives of a partition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Gradients that were dropped because their ids had no row.
    pub refused: u64,
    /// Rows that made room for others.
    pub evicted: u64,
}

/// What a checkpoint, or another server, is told of a table's bound beside its rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// What it has done.
    #[serde(flatten)]
    pub counts: Counts,
    /// The row that is looked at next by who looks for one that may go.
    #[serde(default)]
    pub hand: u64,
    /// The counts of ids without a row. A checkpoint file has them beside its rows.
    #[serde(default, skip_serializing_if = "Words::is_empty")]
    pub strangers: Words,
    /// The bits of rows that were trained since the hand came by. A checkpoint file has them beside its rows, too.
    #[serde(default, skip_serializing_if = "Words::is_empty")]
    pub used: Words,
}

impl Bound {
    /// `None`: the table has none.
    pub(super) fn new(spec: &TableSpec, floats: usize, partitions: u32) -> Option<Self> {
        let limit = share(spec, partitions);
        if limit.is_none() && spec.admit_after <= 1 {
            return None;
        }
        let bytes = limit.map_or(SKETCH_BYTES, |share| (share / SKETCH_PART).min(SKETCH_BYTES_MAX));
        let clock = |share| Clock::new(rows_max(floats, spec, share), spec.evict);
        Some(Bound {
            admit_after: spec.admit_after,
            sketch: (spec.admit_after > 1).then(|| Sketch::new(bytes)),
            clock: limit.map(clock),
            limit,
            counts: Counts::default(),
            placed: 0,
            renumbered: false,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.sketch.as_ref().map_or(0, Sketch::bytes) + self.clock.as_ref().map_or(0, Clock::bytes)
    }

    /// An id without a row is named: whether it gets one.
    fn admits(&mut self, id: u64) -> bool {
        let admitted = self.sketch.as_mut().is_none_or(|sketch| sketch.count(id) >= self.admit_after);
        self.counts.refused += u64::from(!admitted);
        admitted
    }

    fn is_full(&self) -> bool {
        self.clock.as_ref().is_some_and(Clock::is_full)
    }
}

impl Table {
    /// An index and room for rows that fit the table's bound.
    pub(super) fn empty(bound: Option<&Bound>, stride: usize, partitions: u32) -> (Index, Slabs) {
        match bound.and_then(|bound| bound.clock.as_ref()).map(Clock::rows_max) {
            None => (Index::new(partitions), Slabs::new(stride)),
            Some(rows) => (Index::bounded(partitions, rows), Slabs::bounded(stride, rows)),
        }
    }

    /// Bytes that it may take in this partition, if they are bounded.
    pub fn limit(&self) -> Option<u64> {
        self.bound.as_ref()?.limit
    }

    /// What its bound has done; `None`: it has none.
    pub fn counts(&self) -> Option<Counts> {
        self.bound.as_ref().map(|bound| bound.counts)
    }

    /// Whether checkpoints and copies go by the numbers of its rows.
    pub(crate) fn is_numbered(&self) -> bool {
        self.clock().is_some()
    }

    pub(super) fn clock(&self) -> Option<&Clock> {
        self.bound.as_ref()?.clock.as_ref()
    }

    /// Whether its rows have other numbers than in the files that they came from.
    pub(super) fn is_renumbered(&self) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.renumbered)
    }

    /// What there is to tell of its bound beside rows, strangers and bits.
    pub(crate) fn bounds(&self) -> Bounds {
        let hand = self.clock().map_or(0, Clock::hand) as u64;
        Bounds { counts: self.counts().unwrap_or_default(), hand, ..Bounds::default() }
    }

    /// All there is to tell of its bound beside rows: whoever has both goes on as this table does.
    pub(crate) fn whole_bounds(&self) -> Bounds {
        Bounds { strangers: self.strangers(), used: self.used(), ..self.bounds() }
    }

    /// The bits of rows that were trained since the hand came by; none where rows never go.
    pub(crate) fn used(&self) -> Words {
        Words(self.clock().map_or_else(Vec::new, |clock| clock.used().to_vec()))
    }

    /// The counts of ids without a row; none where the table needs none.
    pub(crate) fn strangers(&self) -> Words {
        let sketch = self.bound.as_ref().and_then(|bound| bound.sketch.as_ref());
        Words(sketch.map_or_else(Vec::new, Sketch::words))
    }

    /// All rows are in place: the bound becomes what it was. A sketch of another size is begun anew, and without bits
    /// every row counts as trained. `false`: rows are missing, or bits of some.
    pub(crate) fn restore_bound(&mut self, bounds: &Bounds) -> bool {
        let rows = self.len();
        let Some(bound) = &mut self.bound else { return true };
        bound.counts = bounds.counts;
        if let Some(sketch) = &mut bound.sketch {
            let _ = sketch.restore(&bounds.strangers.0);
        }
        let Some(clock) = &mut bound.clock else { return true };
        let fits = clock.restore(usize::try_from(bounds.hand).unwrap_or(0), &bounds.used.0);
        fits && bound.placed == rows
    }

    /// Makes the row `number` that of `id`, as it is elsewhere: nobody is counted, refused or evicted. Rows come in any
    /// order, and until all have come an id may have had another number, or a number another id.
    pub(crate) fn place(&mut self, number: u32, id: u64) {
        let bound = self.bound.as_mut().expect("only rows of a bounded table have numbers of their own");
        let clock = bound.clock.as_mut().expect("only rows of a bounded table have numbers of their own");
        let len = number as usize + 1;
        clock.reach(len);
        while (self.rows.len() as usize) < len {
            self.rows.append();
        }
        let before = clock.ids()[number as usize];
        if self.index.find(before) == Some(number) {
            if before == id {
                return;
            }
            self.index.remove(before);
            bound.placed -= 1;
        }
        // Its old number waits for another id, which is on its way.
        if self.index.remove(id).is_some() {
            bound.placed -= 1;
        }
        assert_eq!(self.index.find_or_insert(id, number), number, "it was taken out");
        bound.placed += 1;
        clock.set(number, id);
    }

    /// The number of an id's row in files that have none; unknown ids get the next one.
    pub(super) fn place_next(&mut self, id: u64) -> u32 {
        let known = self.index.find(id);
        known.unwrap_or_else(|| {
            let number = self.rows.len();
            self.place(number, id);
            self.bound.iter_mut().for_each(|bound| bound.renumbered = true);
            number
        })
    }

    /// Gives an id a row that was not there. Where the table is full another one goes.
    #[inline(never)]
    fn admit(&mut self, id: u64) -> u32 {
        let number = match self.bound.as_mut().and_then(|bound| bound.clock.as_mut()) {
            Some(clock) if clock.is_full() => {
                let number = clock.victim();
                let gone = clock.ids()[number as usize];
                clock.set(number, id);
                self.changes.before(&[gone], &[number], &self.rows, self.width);
                self.index.remove(gone);
                self.bound.iter_mut().for_each(|bound| bound.counts.evicted += 1);
                number
            }
            Some(clock) => {
                let number = self.rows.append();
                clock.reach(number as usize + 1);
                clock.set(number, id);
                self.bound.iter_mut().for_each(|bound| bound.placed += 1);
                number
            }
            None => self.rows.append(),
        };
        assert_eq!(self.index.find_or_insert(id, number), number, "it was not there");
        self.bear(id, number);
        number
    }
}

/// A push to a table with a bound, id by id in order.
pub(super) struct BoundedPush<'a, W> {
    pub table: &'a mut Table,
    pub ids: &'a [u64],
    pub floats: usize,
    pub work: W,
}

impl<W: Work> NullaryFnOnce for BoundedPush<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let BoundedPush { table, ids, floats, mut work } = self;
        let mut run = Run { places: [0; AHEAD], ids: [0; AHEAD], numbers: [0; AHEAD], len: 0 };
        for (ids, from) in ids.chunks(AHEAD).zip((0..).step_by(AHEAD)) {
            ids.iter().for_each(|id| table.index.ask_for(*id));
            for (place, id) in (from..).zip(ids) {
                let number = match table.index.find(*id) {
                    Some(number) => number,
                    None => {
                        let bound = table.bound.as_mut().expect("the table has a bound");
                        if !bound.admits(*id) {
                            continue;
                        }
                        if bound.is_full() {
                            // One of the rows that wait may be the one that goes.
                            run.work_on(table, &mut work);
                        }
                        table.admit(*id)
                    }
                };
                if let Some(clock) = table.bound.as_mut().and_then(|bound| bound.clock.as_mut()) {
                    clock.touch(number);
                }
                table.rows.ask_for(number, floats);
                run.push(place, *id, number);
            }
            run.work_on(table, &mut work);
        }
    }
}

/// Rows that were found and wait to be worked on.
struct Run {
    places: [usize; AHEAD],
    ids: [u64; AHEAD],
    numbers: [u32; AHEAD],
    len: usize,
}

impl Run {
    #[inline(always)]
    fn push(&mut self, place: usize, id: u64, number: u32) {
        (self.places[self.len], self.ids[self.len], self.numbers[self.len]) = (place, id, number);
        self.len += 1;
    }

    #[inline(always)]
    fn work_on(&mut self, table: &mut Table, work: &mut impl Work) {
        let (ids, numbers) = (&self.ids[..self.len], &self.numbers[..self.len]);
        table.changes.before(ids, numbers, &table.rows, table.width);
        if table.unsent.is_some() {
            table.about_to_change(ids, numbers);
        }
        for (place, number) in self.places[..self.len].iter().zip(numbers) {
            work.on(&mut table.rows, *place, *number);
        }
        self.len = 0;
    }
}

#[cfg(test)]
mod tests;
