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

use crate::lanes::pairs::{PairKernel, PairTile, Pairs, rounded, word};
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
        self.blocks(
            isa,
            1,
            #[inline(always)]
            |tile: &mut I::Tile, w, da, depth, then| {
                tile.add_columns_band(isa, w, da, depth, then);
            },
        );
    }
}

impl PairKernel for HiddenLeaf<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, by: P) {
        self.blocks(
            by.isa(),
            2,
            #[inline(always)]
            |tile: &mut P::Block, w, da, depth, then| {
                tile.add_pair_columns_band(by, w, da, depth, then);
            },
        );
    }
}

impl HiddenLeaf<'_> {
    /// Every register block, to which `add` adds a product over words of `each` classes.
    #[inline(always)]
    fn blocks<I: Isa>(
        self,
        isa: I,
        each: usize,
        add: impl Fn(&mut I::Tile, &[f32], &[f32], usize, &mut Lines),
    ) {
        let HiddenLeaf { da, padded, classes, tokens, w, elements, sums, stride, fresh, mut then } =
            self;
        for part in tiles(0..classes.div_ceil(each), SHALLOW) {
            let w = &w[part.start * STRIDE..];
            for first in (0..tokens).step_by(I::Tile::COLS) {
                let da = &da[(first / BAND * padded + each * part.start) * BAND + first % BAND..];
                for row in (0..elements).step_by(I::Tile::ROWS) {
                    let sums = &mut sums[row * stride + first..];
                    let mut tile = match fresh && part.start == 0 {
                        true => I::Tile::zero(isa),
                        false => I::Tile::load(isa, sums, stride),
                    };
                    add(&mut tile, &w[row..], da, part.len(), &mut then);
                    tile.store(sums, stride);
                }
            }
        }
    }
}

/// Layout of the bands of a tile: those of some ranges of tokens, each behind those of other tiles.
#[derive(Clone, Copy)]
pub struct Bands<'a> {
    /// `[range][tile][per_range][padded][BAND]`
    pub store: &'a [f32],
    pub tiles: usize,
    pub tile: usize,
    pub per_range: usize,
    pub padded: usize,
}

impl<'a> Bands<'a> {
    /// The band of this number, from one of its rows on.
    #[inline(always)]
    pub fn from(&self, number: usize, row: usize) -> &'a [f32] {
        let (range, band) = (number / self.per_range, number % self.per_range);
        let place = (range * self.tiles + self.tile) * self.per_range + band;
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
        self.blocks(
            isa,
            (1, 0),
            #[inline(always)]
            |tile: &mut I::Tile, da, h, depth, then| tile.add_band_rows(isa, da, h, depth, then),
        );
    }
}

impl PairKernel for HeadRows<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, by: P) {
        self.blocks(
            by.isa(),
            (2, BAND),
            #[inline(always)]
            |tile: &mut P::Block, da, h, depth, then| {
                tile.add_pair_band_rows(by, da, h, depth, then);
            },
        );
    }
}

impl HeadRows<'_> {
    /// Every register block, to which `add` adds a product over words of `each` tokens, which in a band lie
    /// `skip` words behind its rows.
    #[inline(always)]
    fn blocks<I: Isa>(
        self,
        isa: I,
        (each, skip): (usize, usize),
        add: impl Fn(&mut I::Tile, &[f32], &[f32], usize, &mut Lines),
    ) {
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
                        let (da, start) = (&bands.from(band, first + row)[skip..], band * BAND);
                        let depth = BAND.min(tokens.end - start).div_ceil(each);
                        let at = start / each * cols;
                        add(&mut tile, da, &h[at..], depth, &mut then);
                        if let Some((bands, ddh)) = motion {
                            let da = &bands.from(band, first + row)[skip..];
                            add(&mut tile, da, &ddh[at..], depth, &mut then);
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

/// A band of gradients of logits as pairs of bf16, in its place. Of two classes that follow each other the first
/// row becomes their pairs, token by token; the second row pairs of tokens, of the one class and then of the other.
pub struct BandPairs<'a> {
    pub band: &'a mut [f32],
    pub classes: usize,
    pub tokens: usize,
}

impl PairKernel for BandPairs<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, _: P) {
        let classes = self.classes.next_multiple_of(2);
        for (pair, rows) in self.band[..classes * BAND].chunks_exact_mut(2 * BAND).enumerate() {
            let mut bits = [[0; BAND]; 2];
            let there = 2.min(self.classes - 2 * pair);
            for (bits, row) in bits.iter_mut().zip(rows.chunks_exact(BAND)).take(there) {
                bits.iter_mut().zip(row).for_each(|(bits, &x)| *bits = rounded(x));
                bits[self.tokens..].fill(0);
            }
            let (by_class, by_token) = rows.split_at_mut(BAND);
            for (t, to) in by_class.iter_mut().enumerate() {
                *to = word(bits[0][t], bits[1][t]);
            }
            for (bits, to) in bits.iter().zip(by_token.chunks_exact_mut(BAND / 2)) {
                for (to, pair) in to.iter_mut().zip(bits.as_chunks::<2>().0) {
                    *to = word(pair[0], pair[1]);
                }
            }
        }
    }
}

/// [`BiasRows`] of a band of pairs, from a class of even number on.
pub struct PairBiasRows<'a> {
    pub band: &'a [f32],
    pub sums: &'a mut [f32],
}

impl PairKernel for PairBiasRows<'_> {
    #[inline(always)]
    fn run<P: Pairs>(self, by: P) {
        let (isa, one) = (by.isa(), 0x3f80);
        let ones = <P::Isa as Isa>::F32::splat(isa, word(one, one));
        let pairs = self.band.chunks_exact(2 * BAND);
        for (sums, pair) in self.sums.chunks_mut(2).zip(pairs) {
            for (sum, row) in sums.iter_mut().zip(pair[BAND..].chunks_exact(BAND / 2)) {
                let mut all = <P::Isa as Isa>::F32::splat(isa, 0.0);
                for words in row.chunks_exact(<P::Isa as Isa>::F32::N) {
                    all = by.add(<P::Isa as Isa>::F32::load(isa, words), ones, all);
                }
                *sum += all.reduce_add();
            }
        }
    }
}
