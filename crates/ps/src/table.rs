//! Rows of one table that live in one partition: weights and slots side by side.
//!
//! Everything is done for a batch of ids at once, in blocks: entries are asked for some time before they are looked at,
//! and rows a burst at a time, so that memory is waited for once and not row by row. A row is born
//! from (job seed, table, id) alone, whoever asks first and in whatever order. No lock, no IO: the
//! partition's owner sees to it that one caller at a time is here.

mod bound;
mod changes;
mod clock;
mod copying;
mod ids;
mod index;
mod pages;
pub mod prefetch;
mod sketch;
mod slabs;
mod unsent;
mod words;
mod work;

use std::ops::Range;

use elasticdl_spec::{TableShape, TableSpec};
use pulp::{Arch, NullaryFnOnce};

use crate::optimizer::{Optimizer, Rule, with_rule};
use bound::{Bound, BoundedPush};
pub use bound::{Bounds, Counts, ROWS_MIN, memory_min};
pub(crate) use changes::Bits;
use changes::{Changes, Names};
pub use changes::{Order, Rows};
pub(crate) use ids::Ids;
use index::Index;
pub use pages::Pages;
use slabs::Slabs;
use unsent::Unsent;
pub use words::Words;
use work::{Copying, Decaying, Moving, Work, copy};

/// Ids looked up together: enough that it does not matter how they begin and end, and few enough that what is known of
/// them meanwhile stays in a near cache.
const BLOCK: usize = 2048;
/// So many entries, or cache lines of rows, are asked for before they are used: enough to keep the memory busy, few
/// enough to be in the cache still.
const AHEAD: usize = 256;

/// The rows of a table.
///
/// Invariant: every row in the slabs has one entry in the index and the other way round.
#[derive(Debug)]
pub struct Table {
    shape: TableShape,
    /// The table's part of the job's seed.
    row_seed: u64,
    width: usize,
    /// So much of a weight is added to its gradient.
    l2: f32,
    /// What the slots of a new row hold.
    slots_born: Box<[f32]>,
    index: Index,
    rows: Slabs,
    /// Who gets a row and who makes room; `None`: whoever is asked for has a row.
    bound: Option<Bound>,
    /// Set while another server copies the table.
    unsent: Option<Unsent>,
    changes: Changes,
    /// Whether files that it was restored from may know rows by numbers that it does not have.
    differs: bool,
}

impl Table {
    /// An empty table of this shape; `seed` is the job's.
    pub fn new(shape: TableShape, seed: u64, optimizer: &Optimizer) -> Self {
        let width = shape.width();
        let mut slots_born = vec![0.0; optimizer.slots(width)].into_boxed_slice();
        optimizer.begin(&mut slots_born);
        Table {
            row_seed: shape.row_seed(seed),
            width,
            l2: 0.0,
            index: Index::new(1),
            rows: Slabs::new(width + slots_born.len()),
            bound: None,
            unsent: None,
            changes: Changes::default(),
            differs: false,
            slots_born,
            shape,
        }
    }

    /// The same with what a job of so many partitions says of this table.
    pub fn with(mut self, spec: TableSpec, partitions: u32) -> Self {
        self.l2 = spec.l2;
        self.bound = Bound::new(&spec, self.rows.stride(), partitions);
        (self.index, self.rows) = Table::empty(self.bound.as_ref(), self.rows.stride(), partitions);
        self
    }

    /// Its shape.
    pub fn shape(&self) -> &TableShape {
        &self.shape
    }

    /// Slots per row.
    pub fn slots(&self) -> usize {
        self.slots_born.len()
    }

    /// How many rows are born.
    pub fn len(&self) -> usize {
        self.rows.len() as usize
    }

    /// Whether no row is born.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that it takes: rows, slots, index, and what its bound needs.
    pub fn bytes(&self) -> u64 {
        self.rows.bytes() + self.index.bytes() + self.bound.as_ref().map_or(0, Bound::bytes)
    }

    /// How many rows the index has places for; it grows before they are full.
    pub fn places(&self) -> u64 {
        self.index.places()
    }

    /// Copies the weights of `ids` to `out`, one after the other; unknown rows are born. A table with a bound does not
    /// change: unknown rows come as what they would be born as.
    pub fn pull(&mut self, ids: &[u64], out: &mut [f32]) {
        assert_eq!(out.len(), ids.len() * self.width, "there is room for every row");
        if self.bound.is_some() {
            return self.read_or(ids, out, |id, out| self.shape.init_row_from(self.row_seed, id, out));
        }
        let width = self.width;
        match width {
            8 => self.visit(ids, width, Copying::<8> { width, out }),
            9 => self.visit(ids, width, Copying::<9> { width, out }),
            16 => self.visit(ids, width, Copying::<16> { width, out }),
            17 => self.visit(ids, width, Copying::<17> { width, out }),
            32 => self.visit(ids, width, Copying::<32> { width, out }),
            33 => self.visit(ids, width, Copying::<33> { width, out }),
            _ => self.visit(ids, width, Copying::<0> { width, out }),
        }
    }

    /// Copies the weights of `ids` to `out`; unknown rows come as zeros and stay unborn.
    pub fn read(&self, ids: &[u64], out: &mut [f32]) {
        assert_eq!(out.len(), ids.len() * self.width, "there is room for every row");
        self.read_or(ids, out, |_, out| out.fill(0.0));
    }

    /// Copies the weights of `ids` to `out`; unknown rows come as `unknown` has them.
    fn read_or(&self, ids: &[u64], out: &mut [f32], unknown: impl Fn(u64, &mut [f32])) {
        for (ids, out) in ids.chunks(AHEAD).zip(out.chunks_mut(AHEAD * self.width)) {
            ids.iter().for_each(|id| self.index.ask_for(*id));
            let mut numbers = [None; AHEAD];
            for (id, number) in ids.iter().zip(&mut numbers) {
                *number = self.index.find(*id);
                number.iter().for_each(|number| self.rows.ask_for(*number, self.width));
            }
            for ((id, number), out) in ids.iter().zip(&numbers).zip(out.chunks_exact_mut(self.width)) {
                match number {
                    Some(number) => copy(&self.rows.row(*number)[..self.width], out),
                    None => unknown(*id, out),
                }
            }
        }
    }

    /// Applies a gradient to the row of each id, in order, with `factor` times the learning rate; unknown rows
    /// are born first, where a bound does not refuse them.
    ///
    /// An id that comes twice gets both its gradients, one after the other.
    pub fn push(&mut self, ids: &[u64], gradients: &[f32], optimizer: &Optimizer, factor: f32) {
        assert_eq!(gradients.len(), ids.len() * self.width, "there is a gradient for every row");
        let (width, l2, floats) = (self.width, self.l2, self.width + self.slots_born.len());
        with_rule!(optimizer, rule => {
            let moving = Moving { width, rule, factor, gradients };
            match l2 == 0.0 {
                true => self.train(ids, floats, moving),
                false => self.train(ids, floats, Decaying { moving, l2, sum: vec![0.0; width] }),
            }
        });
    }

    /// Makes room for the rows of a checkpoint, in a table that has none.
    pub(crate) fn make_room(&mut self, rows: usize) {
        assert!(self.is_empty(), "only an empty table is made ready");
        if !self.is_numbered() {
            self.index = self.index.emptied(rows);
        }
    }

    /// Puts a row in place as a checkpoint holds it. `false`: the id was there already, and its row is now this one.
    pub fn restore(&mut self, id: u64, weights: &[f32], slots: &[f32]) -> bool {
        let fresh = self.rows.len();
        let number = match self.is_numbered() {
            true => self.place_next(id),
            false => self.index.find_or_insert(id, fresh),
        };
        if number == self.rows.len() {
            self.rows.append();
        }
        let (w, s) = self.rows.row_mut(number).split_at_mut(self.width);
        w.copy_from_slice(weights);
        s.copy_from_slice(slots);
        number == fresh
    }

    /// The ids of all rows, in the order of their birth.
    pub fn ids(&self) -> Vec<u64> {
        // The index alone knows the ids: eight bytes less per row, and a scatter when they are needed.
        let mut ids = vec![0; self.len()];
        self.index.for_each(|id, row| ids[row as usize] = id);
        ids
    }

    /// Appends the weights and the slots of a range of rows, numbered by birth.
    pub fn copy_rows(&self, rows: Range<usize>, weights: &mut Vec<f32>, slots: &mut Vec<f32>) {
        assert!(rows.end <= self.len(), "only born rows are copied");
        weights.reserve_exact(rows.len() * self.width);
        slots.reserve_exact(rows.len() * self.slots_born.len());
        for number in rows {
            let (w, s) = self.rows.row(number as u32).split_at(self.width);
            weights.extend_from_slice(w);
            slots.extend_from_slice(s);
        }
    }

    /// Files that it was restored from may know rows by their numbers.
    pub(crate) fn differs_from_files(&mut self) {
        self.differs = self.limit().is_none();
    }

    /// The checkpoint that the table was restored from has all rows as they are now.
    pub(crate) fn is_as_in(&mut self, checkpoint: u64) {
        // What goes by other numbers cannot be added to, nor what goes by ids where files may go by numbers.
        if !self.is_renumbered() && !self.differs {
            self.changes.begin_from(checkpoint, self.len());
        }
    }

    /// All rows.
    pub(crate) fn all(&self) -> Bits {
        Bits::from(0, self.len())
    }

    /// The rows that an earlier checkpoint does not have as they are now. `None`: it is not known which those are.
    pub(crate) fn changed_since(&self, checkpoint: u64) -> Option<Bits> {
        self.changes.since(checkpoint, self.len())
    }

    /// Cuts the table: [`Table::take`] gives the rows that are `due` as they are now, whatever is pushed meanwhile.
    pub(crate) fn cut(&mut self, order: Order, due: Bits) {
        self.changes.cut(order, self.len(), due, self.is_numbered());
    }

    /// Appends the next rows of a cut to `out`, about as many as can be copied in a millisecond; none where many wait
    /// that need no copy once `out` is empty. `false`: there are no more.
    pub fn take(&mut self, checkpoint: u64, out: &mut Rows) -> bool {
        let clock = self.bound.as_ref().and_then(|bound| bound.clock.as_ref());
        let names = clock.map_or(Names::Index(&self.index), |clock| Names::Numbers(clock.ids()));
        self.changes.take(checkpoint, names, &self.rows, self.width, out)
    }

    /// The checkpoint of a cut will not be there.
    pub(crate) fn abandon(&mut self, checkpoint: u64) {
        self.changes.abandon(checkpoint);
    }

    /// Finds the row of each id, bears the unknown ones, and has all worked on in order. Of each the first `floats` are
    /// asked for before.
    fn visit(&mut self, ids: &[u64], floats: usize, work: impl Work) {
        Arch::new().dispatch(Visit { table: self, ids, floats, work });
    }

    /// The same, where the table has no bound that says otherwise.
    fn train(&mut self, ids: &[u64], floats: usize, work: impl Work) {
        match self.bound {
            None => self.visit(ids, floats, work),
            Some(_) => Arch::new().dispatch(BoundedPush { table: self, ids, floats, work }),
        }
    }

    /// Looks up ids and tells which have no row.
    ///
    /// In rounds of short loops, each over all ids: a processor has as many requests under way as it meets among its
    /// next few hundred instructions, and to stop for an id that is not where it is looked for first would hold up all
    /// after it.
    #[inline(always)]
    fn look_up(&self, ids: &[u64], numbers: &mut [u32; BLOCK]) -> Places {
        let index = &self.index;
        // All at once, for vectors do some at a time.
        let mut hashes = [0; BLOCK];
        for (hash, id) in hashes.iter_mut().zip(ids) {
            *hash = index.hash(*id);
        }
        let mut buckets = [&index::NONE; BLOCK];
        for (bucket, hash) in buckets.iter_mut().zip(&hashes[..ids.len()]) {
            *bucket = index.bucket(*hash);
        }
        let (first, ahead) = buckets[..ids.len()].split_at(ids.len().min(AHEAD));
        for bucket in first {
            prefetch::item(*bucket);
        }
        let mut strays = Strays { places: [0; BLOCK], count: 0 };
        let mut found = ids.iter().zip(&mut *numbers).zip(&buckets).zip(0..);
        for (next, (((id, number), bucket), place)) in ahead.iter().zip(&mut found) {
            prefetch::item(*next);
            *number = index::glance(bucket, *id);
            strays.add_if(*number == index::ELSEWHERE, place);
        }
        for (((id, number), bucket), place) in found {
            *number = index::glance(bucket, *id);
            strays.add_if(*number == index::ELSEWHERE, place);
        }
        self.look_further(ids, &hashes, &mut buckets, strays, numbers)
    }

    /// Looks for those that are not where they are looked for first, a bucket further in each round; `buckets` is where
    /// each was looked for last.
    #[inline(always)]
    fn look_further<'a>(
        &'a self,
        ids: &[u64],
        hashes: &[u64; BLOCK],
        buckets: &mut [&'a index::Bucket; BLOCK],
        mut strays: Strays,
        numbers: &mut [u32; BLOCK],
    ) -> Places {
        let mut unknown = Places([0; BLOCK / 64]);
        for hops in 1.. {
            if strays.count == 0 {
                break;
            }
            strays.keep_if(|place| match self.index.bucket_after(buckets[place], hashes[place], hops) {
                Some(next) => {
                    prefetch::item(next);
                    buckets[place] = next;
                    true
                }
                None => {
                    unknown.set(place);
                    false
                }
            });
            strays.keep_if(|place| {
                numbers[place] = index::glance(buckets[place], ids[place]);
                numbers[place] == index::ELSEWHERE
            });
        }
        unknown
    }

    /// The row of an id that was not where it is looked for first. Where there is none, it gets one that is to be born.
    #[cold]
    fn find_or_append(&mut self, id: u64) -> u32 {
        let fresh = self.rows.len();
        let number = self.index.find_or_insert(id, fresh);
        if number == fresh {
            self.rows.append();
            if let Some(unsent) = &mut self.unsent {
                unsent.changed(id, number);
            }
        }
        number
    }

    #[inline(always)]
    fn bear(&mut self, id: u64, number: u32) {
        let (weights, slots) = self.rows.row_mut(number).split_at_mut(self.width);
        self.shape.init_row_from(self.row_seed, id, weights);
        copy(&self.slots_born, slots);
    }
}

/// Which ids of a block are not where they were looked for.
struct Strays {
    places: [u16; BLOCK],
    count: usize,
}

impl Strays {
    /// Adds a place, without a branch.
    #[inline(always)]
    fn add_if(&mut self, strays: bool, place: u16) {
        self.places[self.count % BLOCK] = place;
        self.count += usize::from(strays);
    }

    #[inline(always)]
    fn keep_if(&mut self, mut keeps: impl FnMut(usize) -> bool) {
        for i in 0..std::mem::take(&mut self.count) {
            let place = self.places[i];
            let keep = keeps(place.into());
            self.add_if(keep, place);
        }
    }
}

/// Some places of a block.
struct Places([u64; BLOCK / 64]);

impl Places {
    #[inline(always)]
    fn set(&mut self, place: usize) {
        self.0[place / 64] |= 1 << (place % 64);
    }

    /// In ascending order.
    fn ones(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(word, bits)| {
            let mut bits = *bits;
            std::iter::from_fn(move || {
                let place = 64 * word + bits.trailing_zeros() as usize;
                bits &= bits.checked_sub(1)?;
                Some(place)
            })
        })
    }
}

/// A visit of rows, compiled for the vectors that this processor has.
struct Visit<'a, W> {
    table: &'a mut Table,
    ids: &'a [u64],
    floats: usize,
    work: W,
}

impl<W: Work> NullaryFnOnce for Visit<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Visit { table, ids, floats, mut work } = self;
        let mut numbers = [0; BLOCK];
        for (ids, from) in ids.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
            let unknown = table.look_up(ids, &mut numbers);
            let fresh = table.rows.len();
            unknown.ones().for_each(|place| numbers[place] = table.find_or_append(ids[place]));
            if W::NEEDS_BIRTH && fresh < table.rows.len() {
                for (place, number) in numbers[..ids.len()].iter().enumerate() {
                    // One that comes twice is born twice, as the same.
                    if *number >= fresh {
                        table.bear(ids[place], *number);
                    }
                }
            }
            if W::CHANGES {
                table.changes.before(ids, &numbers[..ids.len()], &table.rows, table.width);
            }
            if W::CHANGES && table.unsent.is_some() {
                table.about_to_change(ids, &numbers);
            }
            work.on_all(&mut table.rows, from, &numbers[..ids.len()], floats);
        }
    }
}

#[cfg(test)]
mod tests;
