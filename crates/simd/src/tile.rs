//! A block of registers, and the layout of a tile of scores in memory.

use crate::lanes::prefetch::Ask;
use crate::lanes::product::product;
use crate::lanes::{Isa, Lanes};

pub use crate::lanes::Tile;

/// The distance between two rows of a tile of scores in memory: room for [`MAX_KEYS`] keys and one
/// block more, and an odd number of cache lines, so that the rows of a block do not compete for
/// the same sets of the L1 cache.
pub const STRIDE: usize = 272;

/// The tokens of a band of logits, which lie side by side: whole register blocks of rows and of columns
/// at every level.
pub const BAND: usize = 96;

/// The most keys in a tile of scores.
pub const MAX_KEYS: usize = 256;

/// The most rows of a register block, over all instruction sets.
pub const MAX_ROWS: usize = 16;

/// MR rows of NV registers.
#[derive(Clone, Copy)]
pub struct Registers<F, const MR: usize, const NV: usize>([[F; NV]; MR]);

impl<I: Isa, const MR: usize, const NV: usize> Tile<I> for Registers<I::F32, MR, NV> {
    const ROWS: usize = MR;
    const COLS: usize = NV * I::F32::N;

    #[inline(always)]
    fn zero(isa: I) -> Self {
        Self([[I::F32::splat(isa, 0.0); NV]; MR])
    }

    #[inline(always)]
    fn load(isa: I, c: &[f32], stride: usize) -> Self {
        let mut tile = Self::zero(isa);
        for (r, row) in tile.0.iter_mut().enumerate() {
            let c = &c[r * stride..][..NV * I::F32::N];
            for (n, register) in row.iter_mut().enumerate() {
                *register = I::F32::load(isa, &c[n * I::F32::N..]);
            }
        }
        tile
    }

    #[inline(always)]
    fn store(self, c: &mut [f32], stride: usize) {
        for (r, row) in self.0.iter().enumerate() {
            let c = &mut c[r * stride..][..NV * I::F32::N];
            for (n, register) in row.iter().enumerate() {
                register.store(&mut c[n * I::F32::N..]);
            }
        }
    }

    #[inline(always)]
    fn add_panel(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize) {
        product::<I, MR, NV, 1, MR>(isa, &mut self.0, a, (b, NV * I::F32::N), depth, &mut ());
    }

    #[inline(always)]
    fn add_rows_then(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize, then: &mut impl Ask) {
        product::<I, MR, NV, STRIDE, 1>(isa, &mut self.0, a, (b, NV * I::F32::N), depth, then);
    }

    #[inline(always)]
    fn add_band_rows(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize, then: &mut impl Ask) {
        product::<I, MR, NV, BAND, 1>(isa, &mut self.0, a, (b, NV * I::F32::N), depth, then);
    }

    #[inline(always)]
    fn add_columns_apart(
        &mut self,
        isa: I,
        a: &[f32],
        b: (&[f32], usize),
        depth: usize,
        then: &mut impl Ask,
    ) {
        product::<I, MR, NV, 1, STRIDE>(isa, &mut self.0, a, b, depth, then);
    }

    #[inline(always)]
    fn map(mut self, mut f: impl FnMut(I::F32) -> I::F32) -> Self {
        for row in &mut self.0 {
            for register in row {
                *register = f(*register);
            }
        }
        self
    }

    #[inline(always)]
    fn scale_rows(mut self, isa: I, factors: &[f32]) -> Self {
        for (row, &factor) in self.0.iter_mut().zip(&factors[..MR]) {
            let factors = I::F32::splat(isa, factor);
            for register in row {
                *register =
                    if factor == 0.0 { I::F32::splat(isa, 0.0) } else { *register * factors };
            }
        }
        self
    }

    #[inline(always)]
    fn raise<'a>(mut self, isa: I, rows: impl Fn(usize) -> &'a [f32]) -> Self {
        for (r, row) in self.0.iter_mut().enumerate() {
            let more = &rows(r)[..NV * I::F32::N];
            for (n, register) in row.iter_mut().enumerate() {
                *register = *register + I::F32::load(isa, &more[n * I::F32::N..]);
            }
        }
        self
    }

    #[inline(always)]
    fn row_max(&self, m: &mut [I::F32]) {
        for (m, row) in m[..MR].iter_mut().zip(&self.0) {
            for &register in row {
                *m = register.max(*m);
            }
        }
    }
}
