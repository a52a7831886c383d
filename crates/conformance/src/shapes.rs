//! Extents in which bugs do not hide: the lattice around register and tile widths, both orders of
//! N and M, tails of one key, values wider and narrower than keys, groups that are no square.

use crate::cases::axes::{Axis, axis};
use crate::generate::Stream;
use etalon_problem::Extents;

/// Lengths around the widths at which kernels change their path: registers (16, 32), tiles
/// (64, 128), and primes that divide none of them.
pub const LATTICE: [usize; 16] = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 71, 97];

/// Head dimensions in use and at the edges of registers.
pub const DIMS: [usize; 14] = [1, 2, 8, 20, 33, 40, 64, 72, 80, 96, 128, 192, 256, 512];

/// Query and key heads: groups of 1, 2, 3, 7, 8, and several key heads, so that `h / group` and
/// `h % Hk` differ.
pub const HEADS: [(usize, usize); 8] =
    [(1, 1), (2, 2), (4, 2), (6, 3), (3, 1), (7, 1), (8, 1), (6, 2)];

/// The extents of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Those of q and k.
    pub extents: Extents,
    /// E.
    pub value_dim: usize,
}

axis! {
    "shape",
    /// A class of extents; the seed draws one of it.
    ShapeClass {
        /// Lengths 0 to 3, batch 1 or 2.
        Tiny = "tiny",
        /// Some extent is 0: queries, keys, batch or heads.
        Nothing = "nothing",
        /// One query, as in decoding.
        Row = "row",
        /// As many queries as keys.
        Square = "square",
        /// More keys than queries.
        Wide = "wide",
        /// More queries than keys.
        Tall = "tall",
        /// One key beyond a multiple of 32.
        TailOne = "tail_one",
        /// Values wider than keys.
        ValueWide = "value_wide",
        /// Values narrower than keys.
        ValueNarrow = "value_narrow",
        /// Several key heads, each with a group.
        Groups = "groups",
        /// A batch of 3 to 5.
        Batch = "batch",
        /// Any head dimension of [`DIMS`].
        Dims = "dims",
        /// Several tiles of any size up to 128.
        Long = "long",
    }
}

impl ShapeClass {
    /// One shape of the class.
    pub fn draw(self, seed: u64) -> Shape {
        let stream = Stream::new(seed, self.name());
        let lattice = |i| stream.pick(i, &LATTICE);
        let (query_heads, key_heads) = stream.pick(0, &[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
        let dim = stream.pick(1, &[8, 16, 20, 33, 40]);
        let mut extents = Extents { batch: 1, query_heads, key_heads, queries: 17, keys: 33, dim };
        let mut value_dim = dim;
        match self {
            ShapeClass::Tiny => {
                extents.batch = stream.pick(2, &[1, 2]);
                extents.queries = stream.below(3, 4);
                extents.keys = stream.below(4, 4);
            }
            ShapeClass::Nothing => match stream.below(2, 4) {
                0 => extents.queries = 0,
                1 => extents.keys = 0,
                2 => extents.batch = 0,
                _ => extents.query_heads = 0,
            },
            ShapeClass::Row => (extents.queries, extents.keys) = (1, lattice(3)),
            ShapeClass::Square => {
                extents.queries = lattice(3);
                extents.keys = extents.queries;
            }
            ShapeClass::Wide => {
                extents.queries = lattice(3);
                extents.keys = extents.queries + lattice(4);
            }
            ShapeClass::Tall => {
                extents.keys = lattice(3);
                extents.queries = extents.keys + lattice(4);
            }
            ShapeClass::TailOne => {
                extents.queries = lattice(3);
                extents.keys = stream.pick(4, &[33, 65, 97, 129]);
            }
            ShapeClass::ValueWide => value_dim = stream.pick(2, &[41, 64, 72, 80, 96]),
            ShapeClass::ValueNarrow => {
                extents.dim = stream.pick(2, &[40, 64, 72]);
                value_dim = stream.pick(3, &[1, 8, 17]);
            }
            ShapeClass::Groups => {
                (extents.query_heads, extents.key_heads) = stream.pick(2, &HEADS[2..]);
                extents.batch = 2;
                (extents.queries, extents.keys) = (lattice(3).min(33), lattice(4).min(33));
            }
            ShapeClass::Batch => {
                extents.batch = stream.pick(2, &[3, 4, 5]);
                (extents.queries, extents.keys) = (lattice(3).min(33), lattice(4).min(47));
            }
            ShapeClass::Dims => {
                extents.dim = stream.pick(2, &DIMS);
                value_dim = extents.dim;
            }
            ShapeClass::Long => {
                extents.queries = stream.pick(2, &[127, 129, 150, 257]);
                extents.keys = stream.pick(3, &[127, 129, 161, 257, 300]);
                (extents.query_heads, extents.key_heads) = (2, 1);
                extents.dim = 16;
                value_dim = 16;
            }
        }
        Shape { extents, value_dim }
    }
}
