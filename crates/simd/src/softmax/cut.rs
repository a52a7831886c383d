//! The sizes of tiles.

use crate::Options;
use crate::lanes::matrix::BLOCK;
use crate::tile::MAX_KEYS;
use etalon_problem::{Blocking, Error, Scores};

/// The most queries in a tile: more would only push its scores out of the cache.
const MAX_QUERIES: usize = 1024;

/// The sizes of tiles and register blocks.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Rows of a register block.
    pub rows: usize,
    /// Columns of a register block.
    pub cols: usize,
    /// Queries of a tile, a multiple of `rows`.
    pub queries: usize,
    /// Keys of a tile, a multiple of `cols`.
    pub keys: usize,
    /// True if operands are of bf16 and packed in tiles of pairs.
    pub bf16: bool,
    /// Numbers of bf16 as whose sum a weight is multiplied.
    pub pieces: usize,
}

impl Cut {
    /// The blocking of the options, or else `default`, rounded up to register blocks and clamped to
    /// the lengths.
    pub fn new(scores: &Scores, options: &Options, default: Blocking) -> Result<Cut, Error> {
        Cut::of_blocks(scores, options, default, options.level.block())
    }

    /// The same with blocks of tiles of bf16.
    pub fn of_bf16(scores: &Scores, options: &Options, default: Blocking) -> Result<Cut, Error> {
        let cut = Cut::of_blocks(scores, options, default, (BLOCK, BLOCK))?;
        Ok(Cut { bf16: true, pieces: options.precision.pieces(), ..cut })
    }

    fn of_blocks(
        scores: &Scores,
        options: &Options,
        default: Blocking,
        (rows, cols): (usize, usize),
    ) -> Result<Cut, Error> {
        let blocking = options.blocking.unwrap_or(default);
        blocking.check()?;
        let e = &scores.extents;
        let queries = blocking.queries.min(MAX_QUERIES).min(e.queries.max(1));
        let keys = blocking.keys.min(MAX_KEYS).min(e.keys.max(1));
        Ok(Cut {
            rows,
            cols,
            queries: queries.next_multiple_of(rows),
            keys: keys.next_multiple_of(cols).min(MAX_KEYS),
            bf16: false,
            pieces: 1,
        })
    }

    /// Elements of a packed row are a multiple of this.
    pub fn depth(&self) -> usize {
        if self.bf16 { BLOCK } else { 1 }
    }

    /// The distance between two rows of `dim` elements in a sum.
    pub fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.cols)
    }
}
