//! Vectors of f32 that begin at a cache line.

use crate::memory::zeroed;
use etalon_problem::Error;
use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Elements that may have to be skipped to reach one.
const SKIPPED: usize = LINE / size_of::<f32>() - 1;

/// Bytes from which on memory lies in huge pages, where the system has them: below, the allocator may hold it back for
/// the next caller.
#[cfg(target_os = "linux")]
const HUGE: usize = 32 << 20;

/// A vector of f32 whose first element begins a cache line. A load of a whole register from a
/// multiple of its width then never touches two lines; from memory as it comes, every load of
/// AVX-512 would. It lies in a plain vector, a few elements longer: allocators give back large
/// blocks of an alignment of their own at once, and every page is then cleared again at its next use.
#[derive(Debug, Default)]
pub struct Aligned {
    elements: Memory,
    start: usize,
    len: usize,
}

/// Elements of f32 that are 0 at first.
#[derive(Debug)]
enum Memory {
    Vector(Vec<f32>),
    /// Pages of the system, huge ones if it has them to spare.
    #[cfg(target_os = "linux")]
    Pages(memmap2::MmapMut),
}

impl Default for Memory {
    fn default() -> Self {
        Memory::Vector(Vec::new())
    }
}

impl Memory {
    fn zeros(len: usize, what: &str) -> Result<Self, Error> {
        #[cfg(target_os = "linux")]
        if let Some(bytes) = len.checked_mul(size_of::<f32>()).filter(|&bytes| bytes >= HUGE) {
            let short = |_| Error::Memory { what: what.to_string(), bytes };
            let pages = memmap2::MmapMut::map_anon(bytes).map_err(short)?;
            // A system without huge pages refuses the advice, and has pages nevertheless.
            let _ = pages.advise(memmap2::Advice::HugePage);
            return Ok(Memory::Pages(pages));
        }
        Ok(Memory::Vector(zeroed(len, what)?))
    }
}

impl Deref for Memory {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            Memory::Vector(elements) => elements,
            #[cfg(target_os = "linux")]
            Memory::Pages(pages) => bytemuck::cast_slice(pages),
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Memory::Vector(elements) => elements,
            #[cfg(target_os = "linux")]
            Memory::Pages(pages) => bytemuck::cast_slice_mut(pages),
        }
    }
}

impl Aligned {
    /// Zeros, or the error that there is no memory for them. Large ones come from the operating
    /// system as they are first touched, by whichever thread does.
    pub fn zeros(len: usize, what: &str) -> Result<Self, Error> {
        let elements = Memory::zeros(len.saturating_add(SKIPPED), what)?;
        let start = elements.as_ptr().align_offset(LINE).min(SKIPPED);
        Ok(Aligned { elements, start, len })
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        self.elements.len() * size_of::<f32>()
    }

    /// Elements for which it has room.
    pub fn capacity(&self) -> usize {
        self.elements.len() - self.start
    }

    /// Sets all elements for which it has room.
    pub fn fill_all(&mut self, value: f32) {
        self.elements.fill(value);
    }

    /// Makes it `len` elements long, for which it has room; what they hold is left from before, or 0.
    pub fn resize(&mut self, len: usize) {
        debug_assert!(len <= self.capacity(), "there is room");
        self.len = len;
    }
}

impl Deref for Aligned {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.elements[self.start..][..self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.elements[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_a_line_and_is_as_long_as_it_should() {
        let mut aligned = Aligned::zeros(100, "test").unwrap();
        for len in [17, 5, 0, 16, 100, 33] {
            aligned.resize(len);
            assert_eq!(aligned.len(), len);
            assert_eq!(aligned.as_ptr().align_offset(64), 0);
            aligned.fill(1.0);
        }
        assert_eq!(&*Aligned::zeros(17, "test").unwrap(), &[0.0; 17]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn huge_ones_are_zeros_and_may_be_written() {
        let mut aligned = Aligned::zeros(HUGE / size_of::<f32>() + 3, "test").unwrap();
        aligned.resize(aligned.capacity());
        assert_eq!(aligned.as_ptr().align_offset(LINE), 0);
        assert!(aligned.len() * size_of::<f32>() >= HUGE && aligned.iter().all(|&x| x == 0.0));
        aligned.fill_all(1.0);
        assert_eq!(aligned.last(), Some(&1.0));
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        assert!(matches!(Aligned::zeros(usize::MAX / 8, "test"), Err(Error::Memory { .. })));
    }
}
