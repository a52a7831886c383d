//! Extents in which bugs do not hide: the lattice around register and tile widths, both orders of
//! N and M, tails of one key, values wider and narrower than keys, groups that are no square.

use crate::cases::axes::axis;
use crate::generate::Stream;
use etalon_problem::{Blocking, Extents};

/// Lengths around the widths at which kernels change their path: registers (16, 32), tiles
/// (64, 128), and primes that divide none of them.
pub const LATTICE: [usize; 16] = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 71, 97];

/// Head dimensions in use, at the edges of registers, and odd ones.
pub const DIMS: [usize; 16] = [1, 2, 8, 20, 23, 33, 40, 47, 64, 72, 80, 96, 128, 192, 256, 512];

/// Query and key heads: groups of 1, 2, 3, 4, 5, 7, 8 and 16, and several key heads, so that
/// `h / group` and `h % Hk` differ.
pub const HEADS: [(usize, usize); 12] = [
    (1, 1),
    (2, 2),
    (4, 2),
    (6, 3),
    (3, 1),
    (7, 1),
    (8, 1),
    (6, 2),
    (8, 2),
    (5, 1),
    (10, 2),
    (16, 1),
];

axis! {
    "shape",
    /// A class of extents; the seed draws one of it.
    ShapeClass fn change(e: &mut Extents, value_dim: &mut usize, stream: &Stream) -> () {
        /// Lengths 0 to 3, batch 1 or 2.
        Tiny = "tiny" => {
            e.batch = stream.pick(2, &[1, 2]);
            (e.queries, e.keys) = (stream.below(3, 4), stream.below(4, 4));
        },
        /// Some extent is 0: queries, keys, batch or heads.
        Nothing = "nothing" => match stream.below(2, 4) {
            0 => e.queries = 0,
            1 => e.keys = 0,
            2 => e.batch = 0,
            _ => e.query_heads = 0,
        },
        /// One query, as in decoding.
        Row = "row" => (e.queries, e.keys) = (1, stream.pick(3, &LATTICE)),
        /// As many queries as keys.
        Square = "square" => {
            e.queries = stream.pick(3, &LATTICE);
            e.keys = e.queries;
        },
        /// More keys than queries.
        Wide = "wide" => {
            e.queries = stream.pick(3, &LATTICE);
            e.keys = e.queries + stream.pick(4, &LATTICE);
        },
        /// More queries than keys.
        Tall = "tall" => {
            e.keys = stream.pick(3, &LATTICE);
            e.queries = e.keys + stream.pick(4, &LATTICE);
        },
        /// One key beyond a multiple of 32.
        TailOne = "tail_one" => {
            e.queries = stream.pick(3, &LATTICE);
            e.keys = stream.pick(4, &[33, 65, 97, 129]);
        },
        /// Values wider than keys.
        ValueWide = "value_wide" => *value_dim = stream.pick(2, &[41, 64, 72, 80, 96]),
        /// Values narrower than keys.
        ValueNarrow = "value_narrow" => {
            e.dim = stream.pick(2, &[40, 64, 72]);
            *value_dim = stream.pick(3, &[1, 8, 17]);
        },
        /// Several key heads, each with a group.
        Groups = "groups" => {
            (e.query_heads, e.key_heads) = stream.pick(2, &HEADS[2..]);
            e.batch = 2;
            e.queries = stream.pick(3, &LATTICE).min(33);
            e.keys = stream.pick(4, &LATTICE).min(33);
        },
        /// A batch of 3 to 5.
        Batch = "batch" => {
            e.batch = stream.pick(2, &[3, 4, 5]);
            e.queries = stream.pick(3, &LATTICE).min(33);
            e.keys = stream.pick(4, &LATTICE).min(47);
        },
        /// Any head dimension of [`DIMS`].
        Dims = "dims" => {
            e.dim = stream.pick(2, &DIMS);
            *value_dim = e.dim;
        },
        /// Several tiles of any size up to 128.
        Long = "long" => {
            e.queries = stream.pick(2, &[127, 129, 150, 257]);
            e.keys = stream.pick(3, &[127, 129, 161, 257, 300]);
            (e.query_heads, e.key_heads) = (2, 1);
            (e.dim, *value_dim) = (16, 16);
        },
        /// Large: three tiles of 192 in both directions, and the last of them ragged.
        Tiles = "tiles" => {
            e.queries = stream.pick(2, &[385, 401, 450]);
            e.keys = stream.pick(3, &[385, 411, 460]);
            (e.query_heads, e.key_heads) = (2, 1);
            (e.dim, *value_dim) = stream.pick(4, &[(8, 8), (23, 16), (16, 47)]);
        },
        /// Large: wide rows of so many sequences and heads that they are packed in several waves of
        /// 4 MiB.
        Waves = "waves" => {
            e.batch = stream.pick(2, &[29, 31]);
            (e.query_heads, e.key_heads) = stream.pick(3, &[(2, 2), (4, 2)]);
            (e.queries, e.keys) = (stream.pick(4, &[5, 7]), stream.pick(5, &[40, 47]));
            (e.dim, *value_dim) = (256, 256);
        },
        /// Large: more keys than are packed as one piece.
        KeyPack = "key_pack" => {
            e.queries = stream.pick(2, &[3, 9]);
            e.keys = stream.pick(3, &[2049, 2100, 2305]);
            (e.dim, *value_dim) = stream.pick(4, &[(8, 16), (23, 8)]);
        },
        /// Large: more queries than are packed as one piece.
        QueryPack = "query_pack" => {
            e.queries = stream.pick(2, &[2049, 2100, 2305]);
            e.keys = stream.pick(3, &[3, 9]);
            (e.dim, *value_dim) = stream.pick(4, &[(8, 16), (23, 8)]);
        },
        /// Large: wide heads and odd ones, over two tiles of keys.
        WideHeads = "wide_heads" => {
            (e.dim, *value_dim) =
                stream.pick(2, &[(256, 147), (23, 256), (192, 128), (47, 160), (256, 256)]);
            (e.query_heads, e.key_heads) = (1, 1);
            e.queries = stream.pick(3, &[33, 47]);
            // Ten or eleven keys beyond a tile of 192: scores that climb by half a unit per key grow
            // by 5 in the mean, as much as a sum may before it is rescaled, so that some rows are.
            e.keys = stream.pick(4, &[202, 203]);
        },
        /// Large: more than 4096 queries, each with few keys.
        ManyQueries = "many_queries" => {
            (e.query_heads, e.key_heads) = (1, 1);
            (e.queries, e.keys) = (stream.pick(2, &[4200, 4321]), stream.pick(3, &[7, 9]));
            (e.dim, *value_dim) = stream.pick(4, &[(5, 3), (4, 4)]);
        },
        /// Large: more than eighty tiles of 192 keys, for few queries.
        ManyKeys = "many_keys" => {
            (e.query_heads, e.key_heads) = (1, 1);
            (e.queries, e.keys) = (stream.pick(2, &[1, 2]), stream.pick(3, &[15_500, 16_001]));
            (e.dim, *value_dim) = stream.pick(4, &[(5, 3), (4, 4)]);
        },
        /// Large: at least two more tiles of keys than weights are kept of, as tiles have 1024 queries and at least 32
        /// keys.
        KeptTiles = "kept_tiles" => {
            (e.query_heads, e.key_heads) = (1, 1);
            (e.queries, e.keys) = (stream.pick(2, &[1025, 1040]), stream.pick(3, &[130, 135]));
            (e.dim, *value_dim) = stream.pick(4, &[(5, 3), (4, 4)]);
        },
        /// Large: rows of more elements than are read at a time.
        Widest = "widest" => {
            (e.query_heads, e.key_heads) = (1, 1);
            (e.queries, e.keys) = (stream.pick(2, &[2, 3]), stream.pick(3, &[3, 5]));
            (e.dim, *value_dim) = stream.pick(4, &[(2060, 2050), (2051, 2080)]);
        },
    }
}

/// The classes whose extents are large: a budget selects cases of them.
pub const LARGE: &[&str] = &[
    "tiles",
    "waves",
    "key_pack",
    "query_pack",
    "wide_heads",
    "many_queries",
    "many_keys",
    "kept_tiles",
    "widest",
];

/// Large shapes so thin that a run can afford each.
pub const THIN: &[&str] = &["many_queries", "many_keys", "kept_tiles", "widest"];

/// Large shapes so dear that core depth has few cases of them.
pub const ONCE: &[&str] = &["waves", "wide_heads"];

impl ShapeClass {
    /// The tile sizes that make its extents large.
    pub fn blocking(self) -> Option<Blocking> {
        (self == ShapeClass::KeptTiles).then(|| Blocking::new(1024, 32))
    }

    /// Extents of the class: those of q and k, and E.
    pub fn draw(self, seed: u64) -> (Extents, usize) {
        let stream = Stream::new(seed, self.name());
        let (query_heads, key_heads) = stream.pick(0, &[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
        let dim = stream.pick(1, &[8, 16, 20, 23, 33, 40, 47]);
        let mut extents = Extents { batch: 1, query_heads, key_heads, queries: 17, keys: 33, dim };
        let mut value_dim = dim;
        self.change(&mut extents, &mut value_dim, &stream);
        (extents, value_dim)
    }
}
