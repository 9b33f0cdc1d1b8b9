//! Rows of one length, many to an allocation.
//!
//! A row is found by its number, which it keeps for life. Growing appends a slab and moves nothing but the first slab,
//! which grows itself until it is as large as the others. What was not appended yet takes no memory.

use super::pages::{HUGE, Pages};
use super::prefetch;

/// About how many floats a slab holds, at least: 4 MiB.
const SLAB_FLOATS: usize = 1 << 20;
/// At most such a part of a slab is behind its last huge page, and so on small ones.
const BEHIND_PART: usize = 16;
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
    /// How many rows are planned. Up to there no slab is larger than needed, and never is there more memory than in the
    /// end; more rows may come all the same.
    planned: usize,
}

impl Slabs {
    pub(super) fn new(stride: usize) -> Self {
        Slabs::bounded(stride, usize::MAX)
    }

    /// For so many rows, which then take [`Slabs::bytes_bounded`].
    pub(super) fn bounded(stride: usize, rows: usize) -> Self {
        assert!(stride > 0, "a row has at least one float");
        Slabs { slabs: Vec::new(), stride, shift: shift(stride), len: 0, planned: rows }
    }

    /// The bytes of so many rows, where no more are planned.
    pub(super) fn bytes_bounded(stride: usize, rows: usize) -> u64 {
        let each = 1 << shift(stride);
        let (full, rest) = ((rows / each) as u64, rows % each);
        let full_bytes = full * Pages::<f32>::bytes_huge(each * stride);
        match (full, rest) {
            (_, 0) => full_bytes,
            (0, _) => Pages::<f32>::bytes_small(rest * stride),
            (_, _) => full_bytes + Pages::<f32>::bytes_huge(rest * stride),
        }
    }

    /// How many rows there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Floats per row.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of memory: rows in use, and what else lies on the same pages.
    pub(super) fn bytes(&self) -> u64 {
        let rows = self.len as usize;
        let starts = (0..).step_by(1 << self.shift);
        let bytes = self.slabs.iter().zip(starts).map(|(slab, start): (_, usize)| {
            let floats = rows.saturating_sub(start).saturating_mul(self.stride);
            slab.bytes_of_first(floats.min(slab.len()))
        });
        bytes.sum()
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
    /// huge ones when it has so many rows as the smallest slab has. Both are there for a moment: where fewer are planned
    /// than both have, it stays where it is.
    #[cold]
    fn grow(&mut self) {
        let (len, each, first) = (self.len as usize, 1 << self.shift, 1 << least_shift(self.stride));
        let number = len >> self.shift;
        // Where more rows come than were planned, slabs are as large as others.
        let end = if len < self.planned { self.planned } else { usize::MAX };
        let moves = end >= 3 * first;
        let floats = |number: usize| self.stride * each.min(end - number * each);
        if moves && len == first {
            let mut huge = Pages::huge(floats(0));
            huge[..first * self.stride].copy_from_slice(&self.slabs[0]);
            self.slabs[0] = huge;
        }
        let most = if moves && len < first { self.stride * first } else { floats(number) };
        match self.slabs.get_mut(number) {
            Some(slab) if slab.len() < most => slab.grow((slab.len() * FIRST_GROWTH).min(most)),
            Some(_) => {}
            None if number == 0 => {
                let rows = (FIRST_FLOATS / self.stride).max(1);
                self.slabs.push(Pages::small((rows * self.stride).min(most)));
            }
            None => self.slabs.push(Pages::huge(most)),
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

/// A slab of rows of so many floats holds two to the power of this.
fn shift(stride: usize) -> u32 {
    let least = least_shift(stride);
    let fits = |shift: &u32| {
        let bytes = (stride << shift) * size_of::<f32>();
        bytes % HUGE <= bytes / BEHIND_PART
    };
    (least..).find(fits).expect("a slab of many huge pages fits")
}

/// The same for the smallest one.
fn least_shift(stride: usize) -> u32 {
    (SLAB_FLOATS / stride).max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::super::pages::{LITTLE, SMALL, counted};
    use super::*;

    #[test]
    fn rows_keep_their_number_and_place_while_slabs_are_added() {
        let stride = SLAB_FLOATS / 4 + 128; // three rows would fit a slab, two are used
        let mut slabs = Slabs::new(stride);
        for number in 0..7 {
            assert_eq!(slabs.append(), number);
            slabs.row_mut(number).fill(number as f32);
        }
        for number in 0..7 {
            assert!(slabs.row(number).iter().all(|x| *x == number as f32));
            assert_eq!(slabs.row(number).len(), stride);
        }
        // Four slabs of two rows, of which the last one is touched in its first half only.
        assert_eq!(slabs.slabs.len(), 4);
        let (row, slab) = (4 * stride, Pages::<f32>::bytes_huge(2 * stride));
        assert_eq!(slabs.bytes(), 3 * slab + row.next_multiple_of(HUGE) as u64);
    }

    /// Goal: of memory that was planned there is never more than was planned, and in the end all of it. What an allocator
    /// gave is copied when it grows, and is little; so is the first slab, where more than both of it are planned.
    #[test]
    fn planned_rows_take_the_memory_that_was_planned() {
        for stride in [7, 18, 34, 1000, SLAB_FLOATS / 3, 2 * SLAB_FLOATS] {
            let (first, each) = (1 << least_shift(stride), 1 << shift(stride));
            for rows in
                [1, 5, first / 3, first, first + 1, 3 * first - 1, 3 * first, each, each + 1, 5 * each / 2]
            {
                let rows = rows.max(1);
                let planned = Slabs::bytes_bounded(stride, rows);
                let (before, _) = (counted::now(), counted::most());
                let mut slabs = Slabs::bounded(stride, rows);
                for row in 0..rows {
                    slabs.append();
                    let told = slabs.bytes();
                    assert!(
                        told <= planned && told >= 4 * (row as u64 + 1) * stride as u64,
                        "{row} of {rows}"
                    );
                }
                assert_eq!(slabs.bytes(), planned, "{rows} rows of {stride}");
                assert_eq!(counted::now() - before, planned as i64);
                let copied = if rows < 3 * first { LITTLE } else { 4 * stride * first + SMALL };
                let most = counted::most() - before;
                assert!(
                    most <= planned as i64 + copied as i64,
                    "{most} of {planned} for {rows} rows of {stride}"
                );
                // More come than were planned.
                (0..each + 3).for_each(|_| assert_eq!(slabs.append() + 1, slabs.len()));
                assert!(slabs.row(slabs.len() - 1).iter().chain(slabs.row(0)).all(|x| *x == 0.0));
            }
        }
    }

    /// Goal: nearly all rows of a large table lie on huge pages, and it has no other memory than theirs.
    #[test]
    fn slabs_are_almost_whole_huge_pages() {
        for stride in (1..3000).chain([SLAB_FLOATS - 1, SLAB_FLOATS + 1, 3 * SLAB_FLOATS + 5]) {
            let bytes = 4 * (stride << shift(stride));
            assert!(
                bytes > HUGE && bytes <= (16 * stride).max(16 * SLAB_FLOATS) * 4,
                "{bytes} bytes for {stride}"
            );
            assert!(16 * (bytes % HUGE) <= bytes, "{bytes} bytes for {stride}");
            assert!(Pages::<f32>::bytes_huge(bytes / 4) < bytes as u64 + SMALL as u64);
        }
        let rows = [8, 16, 18, 32, 34, 49].map(|stride| (4 * (stride << shift(stride))) as f64 / HUGE as f64);
        assert_eq!(rows, [2.0, 2.0, 9.0, 2.0, 1.0625, 3.0625]);
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
