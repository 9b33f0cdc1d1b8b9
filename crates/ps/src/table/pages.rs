//! Memory for numbers: begins at a cache line, and lies on huge pages where there is much of it.
//!
//! A table of gigabytes on pages of 4 KiB waits for the processor's page tables longer than for the rows themselves.
//! So much memory comes straight from the kernel: what an allocator has in stock was touched before, and lies on small
//! pages for good. Where the kernel has no huge page to give, it gives small ones: nothing depends on it.
//!
//! How much memory a table takes is known to the page: what the kernel has given it, as far as it was touched, on pages
//! of a known size. What is behind the last whole huge page lies on small ones, so that nothing is got and not used.

#![allow(
    unsafe_code,
    reason = "memory of a chosen alignment that is zero without being touched has no safe form for any number type"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap};

/// Bytes of a huge page.
pub(super) const HUGE: usize = 2 << 20;
/// A multiple of the bytes of a small page, whatever the machine.
pub(super) const SMALL: usize = 64 << 10;
/// From so many bytes on memory is the kernel's: an allocator takes some more for itself, keeps what it gets back, and
/// copies what grows. Less is little.
pub(super) const LITTLE: usize = 2 * SMALL;
/// Bytes that the processor moves at once.
const LINE: usize = 64;

/// Numbers, zero at first. What was never touched takes no memory.
#[derive(Debug)]
pub struct Pages<T> {
    start: NonNull<T>,
    len: usize,
    origin: Origin,
}

/// Where the memory comes from, and goes back to.
#[derive(Debug, Clone, Copy)]
enum Origin {
    Allocator(Layout),
    /// So many bytes of the kernel's, on pages of that size.
    Kernel {
        bytes: usize,
        page: usize,
    },
}

/// Of what every pattern of bits is a number, zero among them.
pub trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u64 {}

// SAFETY: it owns its memory, as a vector does.
unsafe impl<T: Send> Send for Pages<T> {}
// SAFETY: likewise.
unsafe impl<T: Sync> Sync for Pages<T> {}

impl<T: Number> Pages<T> {
    /// For few of them.
    pub fn small(len: usize) -> Self {
        assert!(len > 0, "there is at least one number");
        if Self::lines(len) >= LITTLE {
            return Pages::mapped(len, SMALL);
        }
        let layout = Layout::from_size_align(Self::lines(len), LINE).expect("lines are few and whole");
        // SAFETY: the layout is not empty.
        let start =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Pages { start: start.cast(), len, origin: Origin::Allocator(layout) }.counted()
    }

    /// For many of them.
    pub fn huge(len: usize) -> Self {
        Pages::mapped(len, HUGE)
    }

    fn mapped(len: usize, page: usize) -> Self {
        let bytes = Self::lines(len).next_multiple_of(SMALL);
        let Some(start) = map(bytes, page) else {
            handle_alloc_error(Layout::from_size_align(bytes, HUGE).expect("fewer bytes than addresses"))
        };
        Pages { start: start.cast(), len, origin: Origin::Kernel { bytes, page } }.counted()
    }

    /// Makes them more; those that come are zero. What the kernel gave for few of them it moves to where there is room,
    /// so that there are never two of it. All else is copied.
    pub fn grow(&mut self, len: usize) {
        assert!(len >= self.len, "numbers only become more");
        if len == self.len {
            return;
        }
        let page = match self.origin {
            Origin::Allocator(_) => SMALL,
            Origin::Kernel { page, .. } => page,
        };
        if let Origin::Kernel { bytes, page: SMALL } = self.origin {
            let more = Self::lines(len).next_multiple_of(SMALL);
            if let Some(start) = remap(self.start.cast(), bytes, more) {
                count(bytes, more);
                (self.start, self.len) = (start.cast(), len);
                self.origin = Origin::Kernel { bytes: more, page };
                return;
            }
        }
        let mut grown = if page == HUGE { Pages::huge(len) } else { Pages::small(len) };
        grown[..self.len].copy_from_slice(self);
        *self = grown;
    }

    /// Bytes that they take where the first `len` were touched, and no others.
    pub fn bytes_of_first(&self, len: usize) -> u64 {
        match self.origin {
            Origin::Allocator(layout) => layout.size() as u64,
            Origin::Kernel { bytes, page } => Self::lines(len).next_multiple_of(page).min(bytes) as u64,
        }
    }

    /// Bytes that they take where all were touched.
    pub fn bytes(&self) -> u64 {
        self.bytes_of_first(self.len)
    }

    /// The same for so many from [`Pages::small`].
    pub fn bytes_small(len: usize) -> u64 {
        let lines = Self::lines(len);
        if lines < LITTLE { lines as u64 } else { Self::bytes_huge(len) }
    }

    /// The same for so many from [`Pages::huge`].
    pub fn bytes_huge(len: usize) -> u64 {
        Self::lines(len).next_multiple_of(SMALL) as u64
    }

    /// Bytes of the cache lines that so many need.
    fn lines(len: usize) -> usize {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize - 2 * HUGE);
        bytes.expect("fewer bytes than there are addresses").next_multiple_of(LINE)
    }

    fn counted(self) -> Self {
        count(0, self.origin.bytes());
        self
    }

    /// Those from there on.
    #[inline(always)]
    pub fn from(&self, from: usize) -> &[T] {
        &self[from..]
    }

    /// The same, to be changed.
    #[inline(always)]
    pub fn from_mut(&mut self, from: usize) -> &mut [T] {
        &mut self[from..]
    }
}

impl Origin {
    fn bytes(self) -> usize {
        match self {
            Origin::Allocator(layout) => layout.size(),
            Origin::Kernel { bytes, .. } => bytes,
        }
    }
}

/// Bytes of the kernel's, on huge pages if they are asked for and it has some. `None`: it has no bytes to give.
fn map(bytes: usize, page: usize) -> Option<NonNull<u8>> {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let (aligned, advice) = match page {
        HUGE => (HUGE, Advice::LinuxHugepage),
        _ => (0, Advice::LinuxNoHugepage),
    };
    // SAFETY: the kernel picks a place that nothing else has.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes + aligned, protection, flags) }.ok()?;
    let mapped: *mut u8 = mapped.cast();
    let before = if aligned > 0 { mapped.align_offset(aligned) } else { 0 };
    let start = mapped.wrapping_add(before);
    // SAFETY: all of it lies in what was just mapped and is known to nobody else yet. What is before and behind the
    // aligned part is given back; where that or the advice fails, some addresses are lost, or some speed.
    unsafe {
        if before > 0 {
            let _ = munmap(mapped.cast(), before);
        }
        if aligned > before {
            let _ = munmap(start.wrapping_add(bytes).cast(), aligned - before);
        }
        let _ = madvise(start.cast(), bytes, advice);
    }
    NonNull::new(start)
}

/// Makes bytes of the kernel's more, wherever they are then. `None`: it has none to give, and they are where they were.
fn remap(start: NonNull<u8>, bytes: usize, more: usize) -> Option<NonNull<u8>> {
    // SAFETY: they are ours and a mapping of their own, or part of one that is alike, and nobody borrows them.
    let moved = unsafe { mremap(start.as_ptr().cast(), bytes, more, MremapFlags::MAYMOVE) }.ok()?;
    NonNull::new(moved.cast())
}

/// Memory was given back, and other memory was got. Tests count it, for each thread of its own.
#[cfg(not(test))]
fn count(_: usize, _: usize) {}

#[cfg(test)]
fn count(back: usize, got: usize) {
    // A thread that ends counts no more.
    let _ = counted::COUNTED.try_with(|counted| {
        let (held, most) = counted.get();
        let held = held + got as i64 - back as i64;
        counted.set((held, most.max(held)));
    });
}

/// How many bytes this thread has got and not given back; what came from another thread is given back all the same.
#[cfg(test)]
pub(super) mod counted {
    use std::cell::Cell;

    thread_local! {
        /// Now, and the most since that was last asked for.
        pub(super) static COUNTED: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
    }

    /// Now.
    pub fn now() -> i64 {
        COUNTED.get().0
    }

    /// The most since this was asked last.
    pub fn most() -> i64 {
        let (held, most) = COUNTED.get();
        COUNTED.set((held, held));
        most
    }
}

impl<T> Drop for Pages<T> {
    fn drop(&mut self) {
        let start = self.start.as_ptr();
        count(self.origin.bytes(), 0);
        // SAFETY: it came from there with this size, and nobody borrows it any more.
        unsafe {
            match self.origin {
                Origin::Allocator(layout) => dealloc(start.cast(), layout),
                Origin::Kernel { bytes, .. } => {
                    // It cannot fail for a mapping of our own; if it did, the memory would be lost, not unsound.
                    let _ = munmap(start.cast(), bytes);
                }
            }
        }
    }
}

impl<T: Number> Deref for Pages<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: so many numbers are there, zero or as they were written, and ours.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Number> DerefMut for Pages<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: likewise, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
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
    fn what_grows_keeps_its_numbers_and_begins_with_zeros_behind_them() {
        for first in [Pages::<u64>::small, Pages::<u64>::huge] {
            let mut pages = first(10);
            for (before, len) in
                [(10, 100), (100, 10_000), (10_000, 40_000), (40_000, 1_000_000), (1_000_000, 1_000_000)]
            {
                pages[before - 1] = before as u64;
                pages.grow(len);
                assert_eq!((pages.len(), pages[before - 1]), (len, before as u64));
                assert!(pages.from(before).iter().all(|number| *number == 0));
            }
            assert_eq!([10, 100, 10_000, 40_000].map(|len| pages[len - 1]), [10, 100, 10_000, 40_000]);
        }
    }

    /// Goal: what is told is what was got, and of the kernel's memory what can have been touched.
    #[test]
    fn bytes_are_those_that_were_got() {
        let before = counted::now();
        let pages =
            [Pages::<f32>::small(1), Pages::small(1000), Pages::small(100_000), Pages::huge(1_000_000)];
        let told: Vec<u64> = pages.iter().map(Pages::bytes).collect();
        assert_eq!(told, [64, 4032, 7 * SMALL as u64, 62 * SMALL as u64]);
        assert_eq!(counted::now() - before, told.iter().sum::<u64>() as i64);
        let lens = [1, 1000, 100_000];
        assert_eq!(told[..3], lens.map(Pages::<f32>::bytes_small));
        assert_eq!(told[3], Pages::<f32>::bytes_huge(1_000_000));
        assert_eq!(pages[1].bytes_of_first(1), 4032);
        assert_eq!(
            [0, 1, 20_000].map(|len| pages[2].bytes_of_first(len)),
            [0, 1, 2].map(|n| n * SMALL as u64)
        );
        assert_eq!(
            [1, HUGE / 4, HUGE / 4 + 1].map(|len| pages[3].bytes_of_first(len)),
            [HUGE as u64, HUGE as u64, told[3]]
        );
        drop(pages);
        assert_eq!(counted::now(), before);
    }

    /// Goal: large memory moves instead of being copied, so that there are never two of it.
    #[test]
    fn what_the_kernel_gave_is_not_held_twice_while_it_grows() {
        let mut pages = Pages::<f32>::small(LITTLE / 4);
        let _ = counted::most();
        pages.grow(8 * LITTLE);
        assert_eq!(counted::most(), counted::now());
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
