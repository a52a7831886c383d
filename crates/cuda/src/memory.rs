//! Ranges of the memory of a call.

use etalon_problem::{Error, Result};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryRange {
    at: usize,
    pub bytes: usize,
}

impl MemoryRange {
    pub fn address(self, base: u64) -> u64 {
        base + self.at as u64
    }
}

/// Ranges of a call before there is memory.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    bytes: usize,
    buffers: Vec<(&'static str, usize)>,
}

/// Ranges begin at multiples of as many bytes: enough for any vector and for the copy engine.
pub(crate) const ALIGNMENT: usize = 256;

impl Layout {
    pub fn range(&mut self, bytes: usize) -> Result<MemoryRange> {
        let at = self.bytes;
        let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|all| at.checked_add(all));
        self.bytes = end.ok_or_else(|| memory(usize::MAX))?;
        Ok(MemoryRange { at, bytes })
    }

    /// A range for an array of elements of so many bytes.
    pub fn array(&mut self, bytes: usize, shape: &[usize]) -> Result<MemoryRange> {
        let all = shape.iter().try_fold(bytes, |n, &extent| n.checked_mul(extent));
        self.range(all.unwrap_or(usize::MAX))
    }

    pub fn array_if(&mut self, wanted: bool, bytes: usize, shape: &[usize]) -> Result<Option<MemoryRange>> {
        wanted.then(|| self.array(bytes, shape)).transpose()
    }

    /// A range that plans name; those of one name count together.
    pub fn named(&mut self, name: &'static str, bytes: usize) -> Result<MemoryRange> {
        let before = self.bytes;
        let range = self.range(bytes)?;
        let bytes = self.bytes - before;
        match self.buffers.iter_mut().find(|buffer| buffer.0 == name) {
            Some(buffer) => buffer.1 += bytes,
            None if bytes > 0 => self.buffers.push((name, bytes)),
            None => {}
        }
        Ok(range)
    }

    pub fn into_buffers(self) -> Vec<(&'static str, usize)> {
        self.buffers
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

pub(crate) fn memory(bytes: usize) -> Error {
    Error::memory("device memory of a pass", bytes)
}

pub(crate) fn beyond_32_bits(what: String) -> Error {
    Error::unsupported(what, "the cuda tier counts in 32 bits")
}

pub(crate) fn check_extents(extents: &[usize]) -> Result<()> {
    let large = extents.iter().find(|&&extent| extent > i32::MAX as usize);
    large.map_or(Ok(()), |extent| Err(beyond_32_bits(format!("an extent of {extent}"))))
}

/// A list of one value for each element of a shape.
pub(crate) fn filled<T: Clone>(value: T, shape: &[usize], what: &str) -> Result<Vec<T>> {
    let count = shape.iter().fold(1usize, |n, &extent| n.saturating_mul(extent));
    let mut list = reserved(count, what)?;
    list.resize(count, value);
    Ok(list)
}

pub(crate) fn reserved<T>(count: usize, what: &str) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| Error::memory(what, count.saturating_mul(size_of::<T>())))?;
    Ok(list)
}
