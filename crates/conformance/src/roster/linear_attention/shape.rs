//! Extents: tokens around the edges of chunks, states that are no squares, groups of heads.

use super::cases::TokenShape;
use crate::generate::Stream;
use crate::shapes::{HEADS, LATTICE};
use etalon_problem::LinearExtents;

impl TokenShape {
    /// One shape of the class, and E.
    pub fn draw(self, seed: u64) -> (LinearExtents, usize) {
        let stream = Stream::new(seed, "shape");
        let (query_heads, key_heads) = stream.pick(0, &[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
        let dim = stream.pick(1, &[4, 8, 11, 16, 20]);
        let lattice = stream.pick(2, &LATTICE);
        let mut extents = LinearExtents { batch: 1, query_heads, key_heads, tokens: 33, dim };
        let mut value_dim = stream.pick(3, &[dim, dim, 9]);
        match self {
            TokenShape::Tiny => {
                extents.batch = stream.pick(4, &[1, 2]);
                extents.tokens = stream.below(5, 4);
            }
            TokenShape::Nothing => match stream.below(4, 3) {
                0 => extents.tokens = 0,
                1 => extents.batch = 0,
                _ => extents.query_heads = 0,
            },
            TokenShape::Single => (extents.batch, extents.tokens) = (2, 1),
            TokenShape::Lattice => extents.tokens = lattice,
            TokenShape::TailOne => extents.tokens = stream.pick(4, &[17, 33, 65, 97, 129]),
            TokenShape::Long => {
                extents.tokens = stream.pick(4, &[127, 129, 150, 257]);
                (extents.query_heads, extents.key_heads) = (2, 1);
                (extents.dim, value_dim) = (8, 8);
            }
            TokenShape::ValueWide => value_dim = stream.pick(4, &[41, 64, 72]),
            TokenShape::ValueNarrow => {
                (extents.dim, value_dim) =
                    (stream.pick(4, &[40, 64, 72]), stream.pick(5, &[1, 8, 17]));
            }
            TokenShape::Dims => {
                extents.dim = stream.pick(4, &[1, 2, 32, 33, 48, 64]);
                (extents.tokens, value_dim) = (lattice.min(33), extents.dim);
            }
            TokenShape::Groups => {
                (extents.query_heads, extents.key_heads) = stream.pick(4, &HEADS[2..]);
                (extents.batch, extents.tokens) = (2, lattice.min(33));
            }
            TokenShape::Batch => {
                extents.batch = stream.pick(4, &[3, 4, 5]);
                extents.tokens = lattice.min(33);
            }
        }
        (extents, value_dim)
    }
}
