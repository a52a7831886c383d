//! The products with the gradients of logits, which lie in bands:
//!
//! ```text
//! (C17) dh_i    = Σ_v da_iv w_v                    leaf by leaf: 256 classes at most
//! (C18) dw_v    = Σ_i da_iv h_i                    token by token
//! (C19) dbias_v = Σ_i da_iv                        band by band
//! (C28) gh_i    = Σ_v (x_iv w_v + da_iv ddw_v)     leaf by leaf, the second sum behind the first
//! (C29) gw_v    = Σ_i (x_iv h_i + da_iv ddh_i)     band by band, the second sum behind the first
//! (C30) gbias_v = Σ_i x_iv                         band by band
//! ```

use crate::lanes::prefetch::Lines;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::{BAND, STRIDE, Tile};
use crate::tiles::tiles;
use std::ops::Range;

/// The most bands whose tokens a product reads at a time: their columns of h stay in the L1 cache.
const DEEP: usize = 3;

/// Classes that a product reads at a time: their gradients for some tokens stay in the L1 cache.
const SHALLOW: usize = 128;

/// Some elements of dh of some tokens, transposed, from one tile of classes.
pub struct HiddenLeaf<'a> {
    /// da: bands `[…][padded][BAND]`.
    pub da: &'a [f32],
    pub padded: usize,
    pub classes: usize,
    pub tokens: usize,
    /// These elements of the rows of w, [`STRIDE`] apart.
    pub w: &'a [f32],
    pub elements: usize,
    /// A row for every element, and more up to whole register blocks; `stride` tokens, a multiple of COLS.
    pub sums: &'a mut [f32],
    pub stride: usize,
    /// True if the sums begin with 0.
    pub fresh: bool,
    /// Lines of w that are read next, prefetched meanwhile.
    pub then: Lines,
}

impl Kernel for HiddenLeaf<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let HiddenLeaf { da, padded, classes, tokens, w, elements, sums, stride, fresh, mut then } =
            self;
        for part in tiles(0..classes, SHALLOW) {
            let w = &w[part.start * STRIDE..];
            for first in (0..tokens).step_by(I::Tile::COLS) {
                let da = &da[(first / BAND * padded + part.start) * BAND + first % BAND..];
                for row in (0..elements).step_by(I::Tile::ROWS) {
                    let sums = &mut sums[row * stride + first..];
                    let mut tile = match fresh && part.start == 0 {
                        true => I::Tile::zero(isa),
                        false => I::Tile::load(isa, sums, stride),
                    };
                    tile.add_columns_apart(isa, &w[row..], (da, BAND), part.len(), &mut then);
                    tile.store(sums, stride);
                }
            }
        }
    }
}

/// Layout of the bands of a tile: those of some ranges of tokens, each behind those of other tiles.
#[derive(Clone, Copy)]
pub struct Bands<'a> {
    /// `[range][tile][piece][per_range][padded][BAND]`
    pub store: &'a [f32],
    pub pieces: usize,
    pub tiles: usize,
    pub tile: usize,
    pub per_range: usize,
    pub padded: usize,
}

impl<'a> Bands<'a> {
    /// The band of this number, from one of its rows on; of the first piece.
    #[inline(always)]
    pub fn from(&self, number: usize, row: usize) -> &'a [f32] {
        let (range, band) = (number / self.per_range, number % self.per_range);
        let place = (range * self.tiles + self.tile) * self.pieces * self.per_range + band;
        &self.store[(place * self.padded + row) * BAND..]
    }
}

/// Some elements of dw of some classes of a tile, from the tokens of some bands of a chunk.
pub struct HeadRows<'a> {
    /// da of the tile, and the first of its classes.
    pub bands: Bands<'a>,
    pub first: usize,
    pub classes: usize,
    pub tokens: Range<usize>,
    /// These elements of the rows of h along: `[⌈elements/COLS⌉][chunk][COLS]`.
    pub h: &'a [f32],
    /// In the second order da and ddh, which lie likewise: band by band their product follows.
    pub motion: Option<(Bands<'a>, &'a [f32])>,
    /// Elements of a panel of h.
    pub panel: usize,
    pub elements: usize,
    /// Rows [`STRIDE`] apart, up to whole register blocks, and whether they begin with 0.
    pub sums: &'a mut [f32],
    pub fresh: bool,
    /// Lines of dw that are read next, prefetched meanwhile.
    pub then: Lines,
}

impl Kernel for HeadRows<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let HeadRows { bands, first, classes, tokens, h, motion, panel, elements, .. } = self;
        let HeadRows { sums, fresh, mut then, .. } = self;
        let (rows, cols) = (I::Tile::ROWS, I::Tile::COLS);
        let bands_of = tokens.start / BAND..tokens.end.div_ceil(BAND);
        let reads = bands_of.len().div_ceil(DEEP).max(1);
        for deep in tiles(bands_of.clone(), bands_of.len().div_ceil(reads).max(1)) {
            let fresh = fresh && deep.start == bands_of.start;
            for col in (0..elements).step_by(cols) {
                let h = &h[col / cols * panel..];
                let motion = motion.map(|(bands, ddh)| (bands, &ddh[col / cols * panel..]));
                for row in (0..classes).step_by(rows) {
                    let sums = &mut sums[row * STRIDE + col..];
                    let mut tile = match fresh {
                        true => I::Tile::zero(isa),
                        false => I::Tile::load(isa, sums, STRIDE),
                    };
                    for band in deep.clone() {
                        let (da, start) = (bands.from(band, first + row), band * BAND);
                        let (depth, at) = (BAND.min(tokens.end - start), start * cols);
                        tile.add_band_rows(isa, da, &h[at..], depth, &mut then);
                        if let Some((bands, ddh)) = motion {
                            let da = bands.from(band, first + row);
                            tile.add_band_rows(isa, da, &ddh[at..], depth, &mut then);
                        }
                    }
                    tile.store(sums, STRIDE);
                }
            }
        }
    }
}

/// (C19) of the rows of one band, added to `sums`.
pub struct BiasRows<'a> {
    pub band: &'a [f32],
    pub sums: &'a mut [f32],
    /// Number of the band's tokens; the rest of the last register holds 0.
    pub tokens: usize,
}

impl Kernel for BiasRows<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for (sum, row) in self.sums.iter_mut().zip(self.band.chunks_exact(BAND)) {
            let mut all = I::F32::splat(isa, 0.0);
            for first in (0..self.tokens).step_by(I::F32::N) {
                all = all + I::F32::load(isa, &row[first..]);
            }
            *sum += all.reduce_add();
        }
    }
}
