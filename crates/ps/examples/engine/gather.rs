//! What is to be compared with: rows of a dense array, found by their number, and boxed rows in a hash map.

use elasticdl_ps::table::{Pages, prefetch};
use hashbrown::HashMap;

use crate::table::id;

/// Rows asked for ahead of their use.
const BLOCK: usize = 64;
/// The same where one more is asked for with each that is copied: more than this made it no faster.
const AHEAD: usize = 96;

/// Rows in one array, on pages of the same kind as a table's.
pub struct Dense {
    floats: Pages<f32>,
    stride: usize,
}

impl Dense {
    pub fn new(rows: usize, stride: usize) -> Dense {
        let mut floats = Pages::huge(rows * stride);
        for (row, floats) in floats.chunks_exact_mut(stride).enumerate() {
            floats.fill(row as f32);
        }
        Dense { floats, stride }
    }

    /// Copies the first `dim` floats of each row; asks for a row some time before, and so never waits for a block.
    pub fn gather_on(&self, rows: &[u64], dim: usize, out: &mut [f32]) {
        let row = |row: u64| &self.floats[row as usize * self.stride..][..dim];
        let (first, ahead) = rows.split_at(rows.len().min(AHEAD));
        first.iter().for_each(|first| prefetch::floats(row(*first)));
        let mut copies = rows.iter().zip(out.chunks_exact_mut(dim));
        for (next, (each, out)) in ahead.iter().zip(&mut copies) {
            prefetch::floats(row(*next));
            out.copy_from_slice(row(*each));
        }
        copies.for_each(|(each, out)| out.copy_from_slice(row(*each)));
    }

    /// Copies the first `dim` floats of each row, a block of which is asked for before.
    pub fn gather(&self, rows: &[u64], dim: usize, out: &mut [f32]) {
        for (rows, out) in rows.chunks(BLOCK).zip(out.chunks_mut(BLOCK * dim)) {
            for row in rows {
                prefetch::floats(&self.floats[*row as usize * self.stride..][..dim]);
            }
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(dim)) {
                out.copy_from_slice(&self.floats[*row as usize * self.stride..][..dim]);
            }
        }
    }
}

/// Boxed rows by id.
pub struct Boxed(HashMap<u64, Box<[f32]>>);

impl Boxed {
    pub fn new(rows: usize, stride: usize) -> Boxed {
        let row = |row: u64| (id(row), vec![row as f32; stride].into_boxed_slice());
        Boxed((0..rows as u64).map(row).collect())
    }

    pub fn pull(&self, ids: &[u64], dim: usize, out: &mut [f32]) {
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(dim)) {
            if let Some(row) = self.0.get(id) {
                out.copy_from_slice(&row[..dim]);
            }
        }
    }
}
