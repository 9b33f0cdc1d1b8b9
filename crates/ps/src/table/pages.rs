//! Memory for numbers: begins at a cache line, and lies on huge pages where there is much of it.
//!
//! A table of gigabytes on pages of 4 KiB waits for the processor's page tables as long as for the rows themselves.
//! Where the kernel has no huge page to give, it gives small ones: this is a hint, and nothing depends on it.

#![allow(
    unsafe_code,
    reason = "the hint to the kernel has no safe form; it changes no content and concerns memory of our own"
)]

use std::ops::{Deref, DerefMut};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes that the processor moves at once.
const LINE: usize = 64;

/// Numbers, zero at first. What was never touched takes no memory.
#[derive(Debug)]
pub struct Pages<T> {
    items: Box<[T]>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Pages<T> {
    /// For few of them.
    pub fn small(len: usize) -> Self {
        Pages::aligned(len, LINE)
    }

    /// For many of them.
    pub fn huge(len: usize) -> Self {
        // The last page is whole too: what lies behind the numbers is touched by nobody else.
        let whole = (len * size_of::<T>()).next_multiple_of(HUGE) / size_of::<T>();
        let mut pages = Self::aligned(whole, HUGE);
        let (from, bytes) = (pages.items[pages.start..].as_mut_ptr(), whole * size_of::<T>());
        // SAFETY: the range is inside an allocation of ours, and the advice changes nothing that can be seen.
        let advised = unsafe { rustix::mm::madvise(from.cast(), bytes, rustix::mm::Advice::LinuxHugepage) };
        // A kernel without huge pages is as good, and slower.
        let _ = advised;
        pages.len = len;
        pages
    }

    fn aligned(len: usize, bytes: usize) -> Self {
        let more = bytes / size_of::<T>();
        let items = vec![T::default(); len + more].into_boxed_slice();
        let start = items.as_ptr().align_offset(bytes).min(more);
        Pages { items, start, len }
    }

    /// Those from there on, and more that nobody uses.
    #[inline(always)]
    pub fn from(&self, from: usize) -> &[T] {
        &self.items[self.start + from..]
    }

    /// The same, to be changed.
    #[inline(always)]
    pub fn from_mut(&mut self, from: usize) -> &mut [T] {
        &mut self.items[self.start + from..]
    }
}

impl<T: Copy + Default> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.from(0)[..self.len]
    }
}

impl<T: Copy + Default> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len;
        &mut self.from_mut(0)[..len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_zero_and_begin_where_pages_and_lines_do() {
        for len in [1, 15, 16, 100_000, 1 << 20] {
            let (small, huge) = (Pages::<f32>::small(len), Pages::<f32>::huge(len));
            assert_eq!((small.len(), huge.len()), (len, len));
            assert_eq!((small.as_ptr().align_offset(LINE), huge.as_ptr().align_offset(HUGE)), (0, 0));
            assert!(small.iter().chain(huge.iter()).all(|float| *float == 0.0));
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut pages = Pages::huge(1000);
        for (n, float) in pages.iter_mut().enumerate() {
            *float = n as f32;
        }
        pages.from_mut(500)[..2].copy_from_slice(&[-1.0, -2.0]);
        assert_eq!(pages.from(499)[..4], [499.0, -1.0, -2.0, 502.0]);
    }
}
