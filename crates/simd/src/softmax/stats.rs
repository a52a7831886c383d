//! The numbers of a row that one sweep over the scores leaves for the next.

use super::packs::Packing;
use crate::aligned::Aligned;
use etalon_problem::Error;
use std::ops::Deref;

/// Numbers of the rows of one query head, from row `first` on.
#[derive(Debug, Clone, Copy)]
pub struct RowStats<N = Aligned> {
    /// The row of the first numbers.
    pub first: usize,
    /// (B1)
    pub delta: N,
    /// (D4), of the second order alone.
    pub u: N,
    /// (D6), of the second order alone.
    pub z: N,
}

/// Row statistics that may be read.
pub type Stats<'a> = RowStats<&'a [f32]>;

impl RowStats {
    /// Memory for the rows of any head, in whole tiles of queries; with `second` for u and z too.
    pub fn zeros(packing: &Packing<'_>, second: bool) -> Result<Self, Error> {
        let rows = packing.longest_padded();
        let zeros = |rows| Aligned::zeros(rows, "row statistics");
        let further = if second { rows } else { 0 };
        Ok(RowStats { first: 0, delta: zeros(rows)?, u: zeros(further)?, z: zeros(further)? })
    }

    /// Bytes of those of a slot.
    pub fn bytes(packing: &Packing<'_>, second: bool) -> usize {
        let numbers = if second { 3 } else { 1 };
        let head = Aligned::elements(packing.longest_padded()).saturating_mul(numbers);
        head.saturating_mul(packing.scores.group() * size_of::<f32>())
    }

    /// The parts of the tiles of `size` queries; of the second order.
    pub fn tiles(&mut self, size: usize) -> impl Iterator<Item = RowStats<&mut [f32]>> {
        let RowStats { delta, u, z, .. } = self;
        let parts = delta.chunks_mut(size).zip(u.chunks_mut(size)).zip(z.chunks_mut(size));
        let tile = move |(tile, ((delta, u), z))| RowStats { first: tile * size, delta, u, z };
        parts.enumerate().map(tile)
    }
}

impl<N: Deref<Target = [f32]>> RowStats<N> {
    /// The numbers, to be read.
    pub fn view(&self) -> Stats<'_> {
        RowStats { first: self.first, delta: &self.delta, u: &self.u, z: &self.z }
    }
}

impl Stats<'_> {
    /// Of rows of which nothing is known yet.
    pub const NONE: Stats<'static> = RowStats { first: 0, delta: &[], u: &[], z: &[] };
}

impl RowStats<&mut [f32]> {
    /// Forgets what other heads left in the same memory: a row that sees no key keeps zeros.
    pub fn clear(&mut self) {
        for numbers in [&mut *self.delta, self.u, self.z] {
            numbers.fill(0.0);
        }
    }
}
