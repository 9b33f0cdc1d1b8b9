//! Rows of one table that live in one partition: weights and slots side by side.
//!
//! Everything is done for a batch of ids at once, in blocks: first all entries of a block are asked for,
//! then all rows, then they are used, so that memory is waited for once and not row by row. A row is born
//! from (job seed, table, id) alone, whoever asks first and in whatever order. No lock, no IO: the
//! partition's owner sees to it that one caller at a time is here.

mod index;
mod pages;
pub mod prefetch;
mod slabs;

use std::ops::Range;

use elasticdl_spec::{TableShape, TableSpec};

use crate::optimizer::{Optimizer, Rule, with_rule};
use index::Index;
pub use pages::Pages;
use slabs::Slabs;

/// Ids worked on together: enough to keep the memory busy, few enough for their rows to stay in cache.
const BLOCK: usize = 64;

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
            index: Index::new(),
            rows: Slabs::new(width + slots_born.len()),
            slots_born,
            shape,
        }
    }

    /// The same with what a job says of this table.
    pub fn with(mut self, spec: TableSpec) -> Self {
        self.l2 = spec.l2;
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

    /// Bytes in use: rows, slots and index.
    pub fn bytes(&self) -> u64 {
        self.rows.bytes() + self.index.bytes()
    }

    /// Copies the weights of `ids` to `out`, one after the other; unknown rows are born.
    pub fn pull(&mut self, ids: &[u64], out: &mut [f32]) {
        assert_eq!(out.len(), ids.len() * self.width, "there is room for every row");
        let mut numbers = [0; BLOCK];
        for (ids, out) in ids.chunks(BLOCK).zip(out.chunks_mut(BLOCK * self.width)) {
            self.locate(ids, &mut numbers, 0..self.width);
            for (number, out) in numbers.iter().zip(out.chunks_exact_mut(self.width)) {
                copy(&self.rows.row(*number)[..self.width], out);
            }
        }
    }

    /// Copies the weights of `ids` to `out`; unknown rows come as zeros and stay unborn.
    pub fn read(&self, ids: &[u64], out: &mut [f32]) {
        assert_eq!(out.len(), ids.len() * self.width, "there is room for every row");
        let mut numbers = [None; BLOCK];
        for (ids, out) in ids.chunks(BLOCK).zip(out.chunks_mut(BLOCK * self.width)) {
            let hashes = self.ask_for_entries(ids);
            for ((id, hash), number) in ids.iter().zip(hashes).zip(&mut numbers) {
                *number = self.index.find(hash, *id);
                if let Some(number) = *number {
                    prefetch::floats(&self.rows.row(number)[..self.width]);
                }
            }
            for (number, out) in numbers.iter().zip(out.chunks_exact_mut(self.width)) {
                match number {
                    Some(number) => copy(&self.rows.row(*number)[..self.width], out),
                    None => out.fill(0.0),
                }
            }
        }
    }

    /// Applies a gradient to the row of each id, in order, with `factor` times the learning rate; unknown rows
    /// are born first.
    ///
    /// An id that comes twice gets both its gradients, one after the other.
    pub fn push(&mut self, ids: &[u64], gradients: &[f32], optimizer: &Optimizer, factor: f32) {
        assert_eq!(gradients.len(), ids.len() * self.width, "there is a gradient for every row");
        if self.l2 == 0.0 {
            return with_rule!(optimizer, rule => self.push_by(ids, gradients, |weights, slots, gradient| {
                rule.apply(weights, slots, gradient, factor);
            }));
        }
        let (l2, mut sum) = (self.l2, vec![0.0; self.width]);
        with_rule!(optimizer, rule => self.push_by(ids, gradients, |weights, slots, gradient| {
            for ((sum, w), g) in sum.iter_mut().zip(&*weights).zip(gradient) {
                *sum = g + l2 * w;
            }
            rule.apply(weights, slots, &sum, factor);
        }))
    }

    /// Finds the row of each id and has it moved: weights, slots, gradient.
    #[inline(always)]
    fn push_by(
        &mut self,
        ids: &[u64],
        gradients: &[f32],
        mut apply: impl FnMut(&mut [f32], &mut [f32], &[f32]),
    ) {
        let mut numbers = [0; BLOCK];
        let stride = self.width + self.slots_born.len();
        for (ids, gradients) in ids.chunks(BLOCK).zip(gradients.chunks(BLOCK * self.width)) {
            self.locate(ids, &mut numbers, 0..stride);
            for (number, gradient) in numbers.iter().zip(gradients.chunks_exact(self.width)) {
                let (weights, slots) = self.rows.row_mut(*number).split_at_mut(self.width);
                apply(weights, slots, gradient);
            }
        }
    }

    /// Adds a row as a checkpoint holds it. `false`: the id is there already; nothing changed.
    pub fn restore(&mut self, id: u64, weights: &[f32], slots: &[f32]) -> bool {
        let fresh = self.rows.len();
        if self.index.find_or_insert(index::hash(id), id, fresh) != fresh {
            return false;
        }
        let number = self.rows.append();
        let (w, s) = self.rows.row_mut(number).split_at_mut(self.width);
        w.copy_from_slice(weights);
        s.copy_from_slice(slots);
        true
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

    /// Finds the rows of a block of ids, bears the unknown ones, and asks for a part of each.
    #[inline(always)]
    fn locate(&mut self, ids: &[u64], numbers: &mut [u32; BLOCK], columns: Range<usize>) {
        let hashes = self.ask_for_entries(ids);
        for ((id, hash), number) in ids.iter().zip(hashes).zip(numbers) {
            let fresh = self.rows.len();
            *number = self.index.find_or_insert(hash, *id, fresh);
            if *number == fresh {
                self.bear(*id);
            } else {
                prefetch::floats(&self.rows.row(*number)[columns.clone()]);
            }
        }
    }

    #[inline(always)]
    fn ask_for_entries(&self, ids: &[u64]) -> [u64; BLOCK] {
        let mut hashes = [0; BLOCK];
        for (id, hash) in ids.iter().zip(&mut hashes) {
            *hash = index::hash(*id);
            self.index.prefetch(*hash);
        }
        hashes
    }

    fn bear(&mut self, id: u64) {
        let number = self.rows.append();
        let (weights, slots) = self.rows.row_mut(number).split_at_mut(self.width);
        self.shape.init_row_from(self.row_seed, id, weights);
        slots.copy_from_slice(&self.slots_born);
    }
}

/// Copies a short row: a loop that is laid out in place beats a call for so few bytes.
#[inline(always)]
fn copy(from: &[f32], to: &mut [f32]) {
    let (mut from8, mut to8) = (from.chunks_exact(8), to.chunks_exact_mut(8));
    for (from, to) in (&mut from8).zip(&mut to8) {
        to.copy_from_slice(from);
    }
    for (from, to) in from8.remainder().iter().zip(to8.into_remainder()) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests;
