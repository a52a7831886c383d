//! Sums of weights times packed rows: o, dq, dk and dv all grow this way.

use crate::lanes::{Isa, Lanes};
use crate::pack::Packed;
use crate::tile::Tile;

/// A sum in memory: rows lie `stride` apart, a multiple of the columns of a register block.
pub struct Sum<'a> {
    /// Its rows, from the first that grows.
    pub acc: &'a mut [f32],
    /// The distance between them.
    pub stride: usize,
}

/// Rows of a matrix that is packed along.
#[derive(Clone, Copy)]
pub struct Along<'a> {
    /// The matrix.
    pub packed: &'a Packed<'a>,
    /// The first of the rows.
    pub start: usize,
    /// Number of the rows.
    pub depth: usize,
}

impl<'a> Along<'a> {
    #[inline(always)]
    fn panel(&self, number: usize, cols: usize) -> &'a [f32] {
        &self.packed.from(number)[self.start * cols..]
    }
}

impl Sum<'_> {
    /// += A · B, with A one register block `T` of rows [`crate::tile::STRIDE`] apart.
    #[inline(always)]
    pub fn add_rows<I: Isa, T: Tile<I>>(self, isa: I, a: &[f32], b: Along<'_>) {
        let cols = T::COLS;
        for number in 0..self.stride / cols {
            let acc = &mut self.acc[number * cols..];
            let mut tile = T::load(isa, acc, self.stride);
            tile.add_rows(isa, a, b.panel(number, cols), b.depth);
            tile.store(acc, self.stride);
        }
    }

    /// += Aᵀ · B, with A the first columns, one register block of them, of rows
    /// [`crate::tile::STRIDE`] apart.
    #[inline(always)]
    pub fn add_columns<I: Isa, T: Tile<I>>(self, isa: I, a: &[f32], b: Along<'_>) {
        let cols = T::COLS;
        for number in 0..self.stride / cols {
            let acc = &mut self.acc[number * cols..];
            let mut tile = T::load(isa, acc, self.stride);
            tile.add_columns(isa, a, b.panel(number, cols), b.depth);
            tile.store(acc, self.stride);
        }
    }

    /// += A · B, pair by pair, where `a(r, k)` is `None` for a pair that is not visible and must
    /// add nothing at all: 0 · NaN would be NaN. Slow, and only for operands that are not finite;
    /// for those that are, bit for bit what the other products give.
    #[inline(always)]
    pub fn add_visible<I: Isa, T: Tile<I>>(
        self,
        isa: I,
        rows: usize,
        b: Along<'_>,
        a: impl Fn(usize, usize) -> Option<f32>,
    ) {
        let cols = T::COLS;
        for r in 0..rows {
            let acc = &mut self.acc[r * self.stride..][..self.stride];
            for k in 0..b.depth {
                let Some(factor) = a(r, k) else { continue };
                let factor = I::F32::splat(isa, factor);
                for (number, acc) in acc.chunks_exact_mut(cols).enumerate() {
                    let row = &b.panel(number, cols)[k * cols..][..cols];
                    let row = row.chunks_exact(I::F32::N);
                    for (acc, row) in acc.chunks_exact_mut(I::F32::N).zip(row) {
                        let sum = I::F32::load(isa, acc);
                        factor.mul_add(I::F32::load(isa, row), sum).store(acc);
                    }
                }
            }
        }
    }
}

/// Σ x y, as eight sums side by side: the compiler may not reorder one.
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (x, x_rest) = x.as_chunks::<8>();
    let (y, y_rest) = y.as_chunks::<8>();
    for (x, y) in x.iter().zip(y) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    for ((sum, x), y) in sums.iter_mut().zip(x_rest).zip(y_rest) {
        *sum += x * y;
    }
    crate::lanes::halve(sums, |a, b| a + b)
}
