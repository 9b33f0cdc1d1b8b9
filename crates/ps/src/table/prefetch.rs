//! Asking the processor for memory before it is needed. A hint: it changes no result.

#![allow(
    unsafe_code,
    reason = "the prefetch instruction has no safe form; it never faults and changes nothing"
)]

/// Bytes that the processor moves at once.
const LINE_BYTES: usize = 64;

/// Asks for the cache line in which `item` begins.
#[inline(always)]
pub fn item<T>(item: &T) {
    line(std::ptr::from_ref(item).cast());
}

/// Asks for all cache lines of `floats`.
#[inline(always)]
pub fn floats(floats: &[f32]) {
    let start: *const i8 = floats.as_ptr().cast();
    let mut offset = 0;
    while offset < size_of_val(floats) {
        line(start.wrapping_add(offset));
        offset += LINE_BYTES;
    }
}

#[inline(always)]
fn line(address: *const i8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is harmless.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
