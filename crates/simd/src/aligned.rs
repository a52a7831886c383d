//! Vectors of f32 that begin at a cache line.

use crate::memory::zeroed;
use etalon_problem::Error;
use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Elements that may have to be skipped to reach one.
const SKIPPED: usize = LINE / size_of::<f32>() - 1;

/// A vector of f32 whose first element begins a cache line. A load of a whole register from a
/// multiple of its width then never touches two lines; from memory as it comes, every load of
/// AVX-512 would. It lies in a plain vector, a few elements longer: allocators give back large
/// blocks of an alignment of their own at once, and every page is then cleared again at its next use.
#[derive(Debug, Default)]
pub struct Aligned {
    elements: Vec<f32>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Zeros, or the error that there is no memory for them. Large ones come from the operating
    /// system as they are first touched, by whichever thread does.
    pub fn zeros(len: usize, what: &str) -> Result<Self, Error> {
        let elements: Vec<f32> = zeroed(len.saturating_add(SKIPPED), what)?;
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
    fn memory_that_cannot_be_had_is_an_error() {
        assert!(matches!(Aligned::zeros(usize::MAX / 8, "test"), Err(Error::Memory { .. })));
    }
}
