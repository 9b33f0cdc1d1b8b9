//! Rows of one length, many to an allocation.
//!
//! A row is found by its number, which it keeps for life. Growing appends a slab and moves nothing but the first slab,
//! which grows itself until it is as large as the others.

use super::pages::Pages;
use super::prefetch;

/// About how many floats a slab holds: 4 MiB.
const SLAB_FLOATS: usize = 1 << 20;
/// About how many the first one holds at first: a page. Memory comes filled with zeros, which takes its time where
/// another table had it before.
const FIRST_FLOATS: usize = 1 << 10;
/// And how it grows.
const FIRST_GROWTH: usize = 4;

/// Rows by number.
#[derive(Debug)]
pub(super) struct Slabs {
    slabs: Vec<Pages<f32>>,
    /// Floats per row.
    stride: usize,
    /// A slab holds `1 << shift` rows.
    shift: u32,
    /// Rows in use: those with smaller numbers.
    len: u32,
}

impl Slabs {
    pub(super) fn new(stride: usize) -> Self {
        assert!(stride > 0, "a row has at least one float");
        let rows = (SLAB_FLOATS / stride).max(1);
        Slabs { slabs: Vec::new(), stride, shift: rows.ilog2(), len: 0 }
    }

    /// How many rows there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Floats per row.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of the rows in use.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.len) * self.stride as u64 * 4
    }

    /// Appends a row of zeros and tells its number.
    pub(super) fn append(&mut self) -> u32 {
        let row = self.len;
        let (slab, offset) = self.place(row);
        if self.slabs.get(slab).is_none_or(|slab| slab.len() == offset) {
            self.grow();
        }
        self.len = row.checked_add(1).expect("a partition of a table has less than 2^32 rows");
        row
    }

    /// The first slab lies on small pages: most tables of most jobs are small, and there are many of them. It moves to
    /// huge ones when there is a second.
    #[cold]
    fn grow(&mut self) {
        let full = self.stride << self.shift;
        let copied = |first: &Pages<f32>, mut to: Pages<f32>| {
            to[..first.len()].copy_from_slice(first);
            to
        };
        match &mut self.slabs[..] {
            [] => {
                let rows = (FIRST_FLOATS / self.stride).max(1);
                self.slabs.push(Pages::small((rows * self.stride).min(full)));
            }
            [first] if first.len() < full => {
                *first = copied(first, Pages::small((first.len() * FIRST_GROWTH).min(full)));
            }
            slabs => {
                if let [first] = slabs {
                    *first = copied(first, Pages::huge(full));
                }
                self.slabs.push(Pages::huge(full));
            }
        }
    }

    #[inline(always)]
    pub(super) fn row(&self, row: u32) -> &[f32] {
        let (slab, offset) = self.place(row);
        &self.slabs[slab].from(offset)[..self.stride]
    }

    /// Asks for the first floats of a row.
    #[inline(always)]
    pub(super) fn ask_for(&self, row: u32, floats: usize) {
        prefetch::floats(&self.row(row)[..floats]);
    }

    #[inline(always)]
    pub(super) fn row_mut(&mut self, row: u32) -> &mut [f32] {
        let (slab, offset) = self.place(row);
        &mut self.slabs[slab].from_mut(offset)[..self.stride]
    }

    #[inline(always)]
    fn place(&self, row: u32) -> (usize, usize) {
        let within = row & ((1 << self.shift) - 1);
        ((row >> self.shift) as usize, within as usize * self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_their_number_and_place_while_slabs_are_added() {
        let stride = SLAB_FLOATS / 4 + 1; // three rows would fit a slab, two are used
        let mut slabs = Slabs::new(stride);
        for number in 0..7 {
            assert_eq!(slabs.append(), number);
            slabs.row_mut(number).fill(number as f32);
        }
        for number in 0..7 {
            assert!(slabs.row(number).iter().all(|x| *x == number as f32));
            assert_eq!(slabs.row(number).len(), stride);
        }
        assert_eq!(slabs.bytes(), 7 * 4 * stride as u64);
    }

    #[test]
    fn the_first_slab_grows_with_its_rows() {
        for stride in [1, 3, 100, 5000] {
            let mut slabs = Slabs::new(stride);
            for number in 0..3000_u32.min((2 * SLAB_FLOATS / stride) as u32) {
                let row = slabs.append();
                assert!(slabs.row(row).iter().all(|x| *x == 0.0), "new rows are zeros");
                slabs.row_mut(row).fill(number as f32);
            }
            assert!((0..slabs.len()).all(|row| slabs.row(row).iter().all(|x| *x == row as f32)));
        }
        let mut slabs = Slabs::new(16);
        slabs.append();
        assert_eq!(slabs.slabs[0].len(), FIRST_FLOATS);
    }

    #[test]
    fn rows_of_whole_cache_lines_lie_on_cache_lines() {
        let mut slabs = Slabs::new(32);
        for _ in 0..10 {
            let row = slabs.append();
            assert_eq!(slabs.row(row).as_ptr().align_offset(64), 0);
        }
    }
}
