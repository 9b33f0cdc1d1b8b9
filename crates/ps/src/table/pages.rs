//! Memory for numbers: begins at a cache line, and lies on huge pages where there is much of it.
//!
//! A table of gigabytes on pages of 4 KiB waits for the processor's page tables longer than for the rows themselves.
//! So much memory comes straight from the kernel: what an allocator has in stock was touched before, and lies on small
//! pages for good. Where the kernel has no huge page to give, it gives small ones: nothing depends on it.

#![allow(
    unsafe_code,
    reason = "memory of a chosen alignment that is zero without being touched has no safe form for any number type"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
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
    /// So many bytes of the kernel's.
    Kernel(usize),
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
        let layout = Layout::array::<T>(len).and_then(|layout| layout.align_to(LINE));
        let layout = layout.expect("fewer bytes than there are addresses");
        // SAFETY: the layout is not empty.
        let start =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Pages { start: start.cast(), len, origin: Origin::Allocator(layout) }
    }

    /// For many of them.
    pub fn huge(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).map(|bytes| bytes.next_multiple_of(HUGE));
        let bytes = bytes.filter(|bytes| *bytes > 0).expect("fewer bytes than there are addresses, and some");
        let Some(start) = map(bytes) else {
            handle_alloc_error(
                Layout::from_size_align(bytes, HUGE).expect("a huge page's alignment is valid"),
            )
        };
        Pages { start: start.cast(), len, origin: Origin::Kernel(bytes) }
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

/// Bytes of the kernel's, on huge pages if possible. `None`: it has none to give.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel picks a place that nothing else has.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes + HUGE, protection, flags) }.ok()?;
    let mapped: *mut u8 = mapped.cast();
    let before = mapped.align_offset(HUGE);
    let start = mapped.wrapping_add(before);
    // SAFETY: all of it lies in what was just mapped and is known to nobody else yet. What is before and behind the
    // aligned part is given back; where that or the advice fails, some addresses are lost, or some speed.
    unsafe {
        if before > 0 {
            let _ = munmap(mapped.cast(), before);
        }
        let _ = munmap(start.wrapping_add(bytes).cast(), HUGE - before);
        let _ = madvise(start.cast(), bytes, Advice::LinuxHugepage);
    }
    NonNull::new(start)
}

impl<T> Drop for Pages<T> {
    fn drop(&mut self) {
        let start = self.start.as_ptr();
        // SAFETY: it came from there with this size, and nobody borrows it any more.
        unsafe {
            match self.origin {
                Origin::Allocator(layout) => dealloc(start.cast(), layout),
                Origin::Kernel(bytes) => {
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
    fn what_is_written_is_read() {
        let mut pages = Pages::huge(1000);
        for (n, float) in pages.iter_mut().enumerate() {
            *float = n as f32;
        }
        pages.from_mut(500)[..2].copy_from_slice(&[-1.0, -2.0]);
        assert_eq!(pages.from(499)[..4], [499.0, -1.0, -2.0, 502.0]);
    }
}
