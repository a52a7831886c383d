//! Words of two bf16 each, and instruction sets that multiply them.
//!
//! A word lies where an f32 would, the even element of a pair in its low half: so panels of pairs are moved,
//! transposed and read as those of f32 are, and a product of half the depth multiplies as many elements.

use super::prefetch::Ask;
use super::product::Multiply;
use super::{Isa, Tile};

/// An instruction that multiplies pairs, proven present, beside the registers of an instruction set.
pub trait Pairs: Multiply<Self::Isa> + Send + Sync + 'static {
    /// The instruction set of its registers.
    type Isa: Isa<Tile = Self::Block>;
    /// Their block.
    type Block: PairTile<Self>;

    /// The token of the registers.
    fn isa(self) -> Self::Isa;
}

/// The products of a block over pairs: depths and strides are of words.
pub trait PairTile<P: Pairs>: Tile<P::Isa> {
    /// As [`Tile::add_rows_then`].
    fn add_pair_rows(&mut self, by: P, a: &[f32], b: &[f32], depth: usize, then: &mut impl Ask);

    /// As [`Tile::add_band_rows`], with the rows of a band of pairs of tokens.
    fn add_pair_band_rows(
        &mut self,
        by: P,
        a: &[f32],
        b: &[f32],
        depth: usize,
        then: &mut impl Ask,
    );

    /// As [`Tile::add_columns_band`], with the rows of a band of pairs of classes.
    fn add_pair_columns_band(
        &mut self,
        by: P,
        a: &[f32],
        b: &[f32],
        depth: usize,
        then: &mut impl Ask,
    );
}

/// A computation over pairs that returns a `T`. `run` is `#[inline(always)]`, always.
pub trait PairKernel<T = ()> {
    /// Runs inside the gate of `pairs`.
    fn run<P: Pairs>(self, pairs: P) -> T;
}

/// A word of the bits of two numbers of bf16.
#[inline(always)]
pub fn word(even: u32, odd: u32) -> f32 {
    f32::from_bits(even | odd << 16)
}

/// The bits of x in bf16, rounded to the nearest even; a NaN is quiet.
#[inline(always)]
pub fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let size = (bits & 0x7fff_ffff) + 0x7fff + (bits >> 16 & 1);
    let rounded = size | bits & 0x8000_0000;
    (if x.is_nan() { bits | 0x0040_0000 } else { rounded }) >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn floats_are_rounded_to_the_nearest_even() {
        let edges =
            [0.0, 1.0, 1.003_906_3, 1.011_718_8, 3.39e38, f32::MAX, f32::INFINITY, f32::NAN];
        let many = (0..1 << 16).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b9)));
        for x in edges.into_iter().flat_map(|x| [x, -x]).chain(many) {
            assert_eq!(rounded(x), u32::from(bf16::from_f32(x).to_bits()), "{x:e}");
        }
    }
}
