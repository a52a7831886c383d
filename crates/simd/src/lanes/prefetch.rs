//! A hint that memory will be read soon.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the cache line of an address, which may be any. No result depends on it.
#[inline(always)]
pub fn prefetch_line<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every CPU of x86-64 has SSE, and a hint neither faults nor changes memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    let _ = at;
}

/// Asks for the cache lines of a slice.
#[inline(always)]
pub fn prefetch<T>(x: &[T]) {
    let line = (LINE / size_of::<T>().max(1)).max(1);
    x.chunks(line).for_each(|line| prefetch_line(line.as_ptr()));
}
