//! Which rows of a table change, and what they were before: how a checkpoint is cut at one moment and written later.
//!
//! A *cut* stands for the table as it was at one moment, and is taken away piece by piece while rows go on changing. A
//! row of it has a bit while it is still due. Whoever is about to change such a row puts a copy of it aside first, and
//! so the cut is the same whatever happens meanwhile. Which rows have changed since earlier cuts is noted in the same
//! place, so that the next checkpoint may hold only those.
//!
//! Rows are known by their numbers. Births need no note: numbers only grow, and a cut knows how many there were. A row
//! that makes room for another one in a table with a bound has changed: its number is that of another id then.

use super::index::{Index, Place, entries};
use super::prefetch;
use super::slabs::Slabs;
use super::work::copy;

/// So many buckets of the index are looked at in one piece of a cut, at most. In tests small tables have many pieces.
const PIECE_BUCKETS: usize = if cfg!(test) { 4 } else { 1 << 15 };
/// Floats of rows that are copied in one piece of a cut, about: a millisecond or less.
const PIECE_FLOATS: usize = if cfg!(test) { 16 } else { 1 << 18 };
/// So many rows are asked for before they are copied.
const AHEAD: usize = 16;

/// What is noted of a table's rows.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Earlier cuts that a later one may add to, oldest first; each with the rows that changed until the next one.
    since: Vec<Since>,
    cut: Option<Cut>,
}

/// What changed after a cut.
#[derive(Debug)]
struct Since {
    checkpoint: u64,
    /// Among the rows that there were.
    changed: Bits,
}

/// A cut that is being taken away.
#[derive(Debug)]
struct Cut {
    checkpoint: u64,
    /// Rows that were neither taken away nor put aside.
    due: Bits,
    left: usize,
    /// How far the index was gone through, or the numbers where the table has a bound.
    place: Place,
    next: usize,
    /// Rows as they were at the cut, which have changed since.
    aside: Rows,
    /// Whether the numbers of rows come with them.
    numbered: bool,
}

/// Rows with their ids; all weights are of one length, all slots too.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// Their ids.
    pub ids: Vec<u64>,
    /// Their numbers, if those count: in a table that has a bound in bytes.
    pub numbers: Vec<u32>,
    /// Their weights, one after the other.
    pub weights: Vec<f32>,
    /// Their slots, one after the other.
    pub slots: Vec<f32>,
}

/// A set of rows, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bits {
    words: Vec<u64>,
    len: usize,
}

/// Where the ids of rows are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Names<'a> {
    /// In the index alone.
    Index(&'a Index),
    /// By number, in a table that has a bound in bytes.
    Numbers(&'a [u64]),
}

/// What a cut is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The checkpoint's number.
    pub checkpoint: u64,
    /// The committed checkpoint that its files may add to.
    pub base: Option<u64>,
    /// Whether a later one may add to this one.
    pub is_basis: bool,
}

impl Changes {
    /// These rows are about to change. The one place through which every change of a row comes.
    #[inline(always)]
    pub(super) fn before(&mut self, ids: &[u64], numbers: &[u32], rows: &Slabs, width: usize) {
        if let Some(since) = self.since.last_mut() {
            since.changed.insert_all(numbers);
        }
        if let Some(cut) = &mut self.cut {
            cut.put_aside(ids, numbers, rows, width);
        }
    }

    /// A checkpoint holds the table as it is now, with so many rows.
    pub(super) fn begin_from(&mut self, checkpoint: u64, rows: usize) {
        self.since = vec![Since { checkpoint, changed: Bits::none(rows) }];
    }

    /// The rows that the cut of `checkpoint` does not have as they are now, of so many. `None`: it is not known here.
    pub(super) fn since(&self, checkpoint: u64, rows: usize) -> Option<Bits> {
        let first = self.since.iter().position(|since| since.checkpoint == checkpoint)?;
        let mut changed = Bits::from(self.since[first].changed.len, rows);
        self.since[first..].iter().for_each(|since| changed.merge(&since.changed));
        Some(changed)
    }

    /// Cuts a table of so many rows, of which some are due. What was not taken away of an earlier cut is dropped.
    pub(super) fn cut(&mut self, order: Order, rows: usize, due: Bits, numbered: bool) {
        self.keep_only(order.base);
        if order.is_basis {
            self.since.push(Since { checkpoint: order.checkpoint, changed: Bits::none(rows) });
        }
        let left = due.count();
        let (place, next, aside) = (Place::default(), 0, Rows::default());
        let checkpoint = order.checkpoint;
        self.cut = (left > 0).then_some(Cut { checkpoint, due, left, place, next, aside, numbered });
    }

    /// Appends the next rows of a cut to `out`, or none if it is better to empty `out` first. `false`: there are no
    /// more.
    pub(super) fn take(
        &mut self,
        checkpoint: u64,
        names: Names<'_>,
        rows: &Slabs,
        width: usize,
        out: &mut Rows,
    ) -> bool {
        let Some(cut) = self.cut.as_mut().filter(|cut| cut.checkpoint == checkpoint) else { return false };
        cut.take(names, rows, width, out);
        if cut.left == 0 && cut.aside.is_empty() {
            self.cut = None;
        }
        self.cut.is_some()
    }

    /// The checkpoint will not be there: what changed before it was cut is still due for the next one.
    pub(super) fn abandon(&mut self, checkpoint: u64) {
        self.cut.take_if(|cut| cut.checkpoint == checkpoint);
        let last = self.since.pop_if(|since| since.checkpoint == checkpoint);
        if let (Some(last), Some(before)) = (last, self.since.last_mut()) {
            before.changed.merge(&last.changed);
        }
    }

    /// Forgets the earlier cuts but this one. What changed since those after it has changed since it.
    fn keep_only(&mut self, base: Option<u64>) {
        let at = base.and_then(|base| self.since.iter().position(|since| since.checkpoint == base));
        let Some(at) = at else { return self.since.clear() };
        let after = self.since.split_off(at + 1);
        self.since.drain(..at);
        after.iter().for_each(|since| self.since[0].changed.merge(&since.changed));
    }
}

impl Cut {
    #[cold]
    fn put_aside(&mut self, ids: &[u64], numbers: &[u32], rows: &Slabs, width: usize) {
        let found = self.due.remove_all(ids, numbers);
        self.left -= found.len();
        self.aside.copy(&found, rows, width, self.numbered);
    }

    /// Whatever was put aside, and the next of those that were not. Where much was put aside, nothing else: into an
    /// empty `out` it comes without a copy, and to another one it does not come yet.
    fn take(&mut self, names: Names<'_>, rows: &Slabs, width: usize, out: &mut Rows) {
        let most = (PIECE_FLOATS / rows.stride()).max(1);
        if self.aside.len() > most {
            if out.is_empty() {
                std::mem::swap(out, &mut self.aside);
            }
            return;
        }
        out.append(&mut self.aside);
        let found = match names {
            Names::Index(index) => self.next_of(index, most),
            Names::Numbers(ids) => self.next_by_number(ids, most),
        };
        self.left -= found.len();
        out.copy(&found, rows, width, self.numbered);
    }

    /// At most about so many rows that are due, as they come in the index.
    fn next_of(&mut self, index: &Index, most: usize) -> Vec<(u64, u32)> {
        let mut found = Vec::with_capacity(most);
        let mut looked_at = 0;
        while found.len() < most.min(self.left) && looked_at < PIECE_BUCKETS {
            let buckets = index.next_buckets(&mut self.place);
            assert!(!buckets.is_empty(), "every row that is due is in the index");
            looked_at += buckets.len();
            let entries = buckets.iter().flat_map(entries);
            found.extend(entries.filter(|(_, number)| self.due.remove(*number)));
        }
        found
    }

    /// At most so many rows that are due, in the order of their numbers.
    fn next_by_number(&mut self, ids: &[u64], most: usize) -> Vec<(u64, u32)> {
        let mut found = Vec::with_capacity(most);
        let end = ids.len().min(self.next + PIECE_BUCKETS);
        while found.len() < most && self.next < end {
            let number = self.next as u32;
            found.extend(self.due.remove(number).then(|| (ids[self.next], number)));
            self.next += 1;
        }
        found
    }
}

impl Rows {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Adds rows by id and number, of which the first `width` floats are weights. They lie anywhere, so that they are
    /// asked for some time before they are copied.
    fn copy(&mut self, found: &[(u64, u32)], rows: &Slabs, width: usize, numbered: bool) {
        let slots = rows.stride() - width;
        self.ids.extend(found.iter().map(|(id, _)| id));
        self.numbers.extend(found.iter().filter(|_| numbered).map(|(_, number)| number));
        let (old_weights, old_slots) = (self.weights.len(), self.slots.len());
        self.weights.resize(old_weights + found.len() * width, 0.0);
        self.slots.resize(old_slots + found.len() * slots, 0.0);
        let (weights_out, slots_out) = (&mut self.weights[old_weights..], &mut self.slots[old_slots..]);
        found.iter().take(AHEAD).for_each(|(_, number)| rows.ask_for(*number, rows.stride()));
        for (place, (_, number)) in found.iter().enumerate() {
            if let Some((_, ahead)) = found.get(place + AHEAD) {
                rows.ask_for(*ahead, rows.stride());
            }
            let row = rows.row(*number);
            copy(&row[..width], &mut weights_out[place * width..][..width]);
            copy(&row[width..], &mut slots_out[place * slots..][..slots]);
        }
    }

    fn append(&mut self, others: &mut Rows) {
        self.ids.append(&mut others.ids);
        self.numbers.append(&mut others.numbers);
        self.weights.append(&mut others.weights);
        self.slots.append(&mut others.slots);
    }
}

impl Bits {
    /// None of the first `len` rows.
    fn none(len: usize) -> Self {
        Bits { words: vec![0; len.div_ceil(64)], len }
    }

    /// Those of the first `len` rows whose number is `first` or above.
    pub(crate) fn from(first: usize, len: usize) -> Self {
        let mut bits = Bits::none(len);
        for (word, start) in bits.words.iter_mut().zip((0..).step_by(64)) {
            let (from, to) = (first.clamp(start, start + 64) - start, len.min(start + 64) - start);
            let below = |n: usize| if n == 64 { u64::MAX } else { (1 << n) - 1 };
            *word = below(to) & !below(from.min(to));
        }
        bits
    }

    /// How many rows.
    pub(crate) fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Adds rows. Their words lie anywhere, so that they are asked for some time before.
    #[inline(always)]
    fn insert_all(&mut self, numbers: &[u32]) {
        for (place, number) in numbers.iter().enumerate() {
            self.ask_for(numbers.get(place + 2 * AHEAD));
            self.insert(*number);
        }
    }

    /// Adds a row; one that was born later is in no need of it.
    #[inline(always)]
    fn insert(&mut self, number: u32) {
        if let Some(word) = self.words.get_mut(number as usize / 64) {
            *word |= 1 << (number % 64);
        }
    }

    /// Takes a row out; tells whether it was in.
    #[inline(always)]
    fn remove(&mut self, number: u32) -> bool {
        let Some(word) = self.words.get_mut(number as usize / 64) else { return false };
        let (bit, before) = (1 << (number % 64), *word);
        *word = before & !bit;
        before & bit != 0
    }

    /// Takes these rows out and tells which of them were there, with their ids. Which those are cannot be foretold.
    fn remove_all(&mut self, ids: &[u64], numbers: &[u32]) -> Vec<(u64, u32)> {
        let mut found = vec![(0, 0); ids.len()];
        let mut count = 0;
        for (place, (id, number)) in ids.iter().zip(numbers).enumerate() {
            self.ask_for(numbers.get(place + 2 * AHEAD));
            found[count] = (*id, *number);
            count += usize::from(self.remove(*number));
        }
        found.truncate(count);
        found
    }

    /// Asks for the bit of a row.
    #[inline(always)]
    fn ask_for(&self, number: Option<&u32>) {
        if let Some(word) = number.and_then(|number| self.words.get(*number as usize / 64)) {
            prefetch::item(word);
        }
    }

    /// Adds the rows of `other` that are below this one's end.
    fn merge(&mut self, other: &Bits) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
        self.trim();
    }

    /// A row above the end is noted in the last word at most, and does not count.
    fn trim(&mut self) {
        if let (Some(last), 1..) = (self.words.last_mut(), self.len % 64) {
            *last &= (1 << (self.len % 64)) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_from_a_number_on_are_all_and_only_those() {
        for (first, len) in
            [(0, 0), (0, 1), (0, 64), (0, 65), (3, 64), (64, 64), (70, 130), (64, 200), (9, 4)]
        {
            let mut bits = Bits::from(first, len);
            assert_eq!(bits.count(), len.saturating_sub(first), "{first} to {len}");
            let found: Vec<u32> = (0..300).filter(|number| bits.remove(*number)).collect();
            assert_eq!(found, (first as u32..len as u32).collect::<Vec<_>>());
            assert_eq!(bits.count(), 0);
        }
    }

    /// Goal: rows born after a cut share a word with those before, and belong to neither cut nor changes.
    #[test]
    fn what_is_above_the_end_does_not_count() {
        let mut since = Bits::none(70);
        [1, 69, 70, 100, 500].into_iter().for_each(|number| since.insert(number));
        let mut all = Bits::none(71);
        all.merge(&since);
        assert_eq!(all.count(), 3, "1, 69 and 70");
        let mut fewer = Bits::none(70);
        fewer.merge(&since);
        assert_eq!(fewer.count(), 2);
        assert!(!fewer.remove(70) && !fewer.remove(500) && fewer.remove(69));
    }
}
