//! The cut of sequences into spans, chunks and micro-chunks.

use crate::Options;
use crate::lanes::matrix::BLOCK;
use crate::tile::MAX_KEYS;
use etalon_problem::{Blocking, Error, LinearAttention, TokenSequence};
use std::ops::Range;

/// Sizes of the pieces into which sequences are cut.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Rows of a register block.
    pub rows: usize,
    /// Columns of a register block.
    pub cols: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Tokens of a micro-chunk.
    pub micro: usize,
    /// True if operands are bf16 and multiplied as they are: in blocks of tiles, and micro-chunks are chunks.
    pub bf16: bool,
    /// Numbers of bf16 as whose sum is multiplied what is rounded.
    pub pieces: usize,
    /// Bytes of a state.
    state: usize,
    /// Bytes of states that a backward pass may keep of a sequence.
    kept: usize,
}

/// The chunk and micro-chunk that were measured to be best.
const DEFAULT: Blocking = Blocking { queries: 64, keys: 64 };

/// The same of products of tiles: a state is rounded for every chunk, weights are for every pair of tokens in one.
const OF_TILES: Blocking = Blocking { queries: 128, keys: 128 };

impl Cut {
    /// Chunks of `blocking.queries` tokens and micro-chunks of `blocking.keys`, clamped to the tokens.
    pub fn new(
        problem: &LinearAttention,
        sequences: &[TokenSequence],
        options: &Options,
        bf16: bool,
    ) -> Result<Self, Error> {
        let usual = if bf16 { OF_TILES } else { DEFAULT };
        let blocking = options.blocking.unwrap_or(usual);
        blocking.check()?;
        let (rows, cols) = if bf16 { (BLOCK, BLOCK) } else { options.level.short_block() };
        let longest = sequences.iter().map(|s| s.tokens).max().unwrap_or(0);
        let chunk = blocking.queries.min(MAX_KEYS).min(longest.max(1));
        let micro = if bf16 { chunk } else { blocking.keys };
        let micro = micro.min(chunk).next_multiple_of(rows).min(chunk);
        let state = problem.extents.dim.saturating_mul(problem.value_dim);
        let state = state.saturating_mul(size_of::<f32>());
        let (pieces, kept) = (options.precision.pieces(), options.kept_states);
        Ok(Cut { rows, cols, chunk, micro, bf16, pieces, state, kept })
    }

    /// Tokens of a span of a sequence: whole chunks. The cut of a sequence is the same whatever runs
    /// beside it, and so are results.
    pub fn span(&self, tokens: usize) -> usize {
        self.chunk * self.interval(tokens.div_ceil(self.chunk))
    }

    /// Spans of a sequence.
    pub fn spans(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.span(tokens))
    }

    /// The spans of a sequence; or, not by span, all of it at once.
    pub fn parts(
        &self,
        tokens: usize,
        by_span: bool,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
        let size = if by_span { self.span(tokens) } else { tokens };
        let count = if by_span { self.spans(tokens) } else { 1 };
        (0..count).map(move |part| part * size..tokens.min((part + 1) * size))
    }

    /// Chunks of a span, of so many chunks. The states before spans are kept and those within one
    /// computed again: c/m + m states for spans of m chunks, least for √c. The fewer chunks, the less
    /// is computed again, and the more threads find work: as few as keep no more than [`Options::kept_states`].
    fn interval(&self, chunks: usize) -> usize {
        let least = chunks.isqrt().max(1);
        let kept = |m: usize| (chunks.div_ceil(m) + m).saturating_mul(self.state);
        // Below √c each chunk more in a span saves at least one state: what is kept only shrinks.
        let (mut few, mut enough) = (1, least);
        while few < enough {
            let m = few + (enough - few) / 2;
            if kept(m) <= self.kept { enough = m } else { few = m + 1 }
        }
        enough
    }
}
