//! The cut of tokens and classes that fits a sweep into its budget. No result depends on it.

pub use etalon_problem::linear_cross_entropy::shard::TILE;

use super::logits::SLICE;
use super::matrix;
use super::sums::Sums;
use super::tree::{Node, Stack};
use crate::lanes::matrix::{BLOCK as SQUARE, Pieces};
use crate::pack::Form;
use crate::tile::{BAND, STRIDE};
use crate::workspace::Parts;
use crate::{Buffer, Level};
use etalon_problem::LinearCrossEntropy;

/// Elements that a filter keeps of a band in a tile: whether it is left out, and what it then adds to the
/// bounds of tokens and of classes.
pub const MEASURE: usize = 1 + BAND + TILE;

/// Tokens that share what is read of w, at most: their logits in a tile take 1.1 MB, half of an L2 cache.
pub const RANGE: usize = 11 * BAND;

/// The most tokens of a task of dh: with the lower nodes of the tree it stays in the L2 cache.
const BLOCK: usize = 4 * BAND;

/// Elements of dh of a task over tiles of bf16, which copies the columns of w that they are made of.
const NARROW: usize = 128;

/// Tasks for each thread, where there is enough to share out.
const BUSY: usize = 4;

/// Results of a sweep, and its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SweepSpec {
    /// The partials of tokens.
    pub totals: bool,
    pub dh: bool,
    pub dw: bool,
    pub dbias: bool,
    /// True if sums of dw are kept beside the result, which rounds them or has strides of its own.
    pub dw_apart: bool,
    /// True in the second order: each logit has a motion, and dh stands for gh.
    pub second: bool,
    /// True if h moves, and if w does.
    pub ddh: bool,
    pub ddw: bool,
    /// True if tiles may be left out of dh and dw.
    pub filter: bool,
    /// True if operands are multiplied in tiles of bf16.
    pub bf16: bool,
    /// Numbers of bf16 as whose sum a gradient of a logit is multiplied then.
    pub pieces: usize,
}

impl SweepSpec {
    /// `part` alone, of the order and with the motions and the filter of `self`.
    pub fn only(self, part: SweepSpec) -> SweepSpec {
        let SweepSpec { totals, dh, dw, dbias, dw_apart, .. } = part;
        SweepSpec { totals, dh, dw, dbias, dw_apart, ..self }
    }

    /// True if logits are kept.
    pub fn gradients(&self) -> bool {
        self.dh || self.dw || self.dbias || self.filter
    }
}

/// A sweep over all tokens and classes: some tokens by some classes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub spec: SweepSpec,
    pub level: Level,
    /// Rows and columns of a block of sums.
    pub rows: usize,
    pub cols: usize,
    /// T, D, and the classes of the sweep: V, or those of a node of a shard.
    pub tokens: usize,
    pub dim: usize,
    pub vocab: usize,
    /// The number of the first of its classes.
    pub first: usize,
    /// Tiles of all classes, and rows of a band: those of a tile in whole register blocks.
    pub tiles: usize,
    pub padded: usize,
    /// Tokens that are packed at a time, and of a task; multiples of [`BAND`].
    pub chunk: usize,
    pub range: usize,
    /// Tiles whose logits are kept at a time, and of a task: nodes of the tree.
    pub span: usize,
    pub node: usize,
    /// Elements of a task of dh, and tokens: some bands, or all where they are fewer than one.
    pub slice: usize,
    pub block: usize,
    /// True if all tokens meet some classes before the next classes come; else the other way round.
    pub classes_outside: bool,
    pub threads: usize,
}

/// The memory of a sweep, beside that of its threads.
pub struct Shared<'m> {
    /// h across, and along; in bf16 along with ddh, of every 32 tokens in turn.
    pub across: &'m mut [f32],
    pub along: &'m mut [f32],
    /// ddh across, and along.
    pub ddh_across: &'m mut [f32],
    pub ddh_along: &'m mut [f32],
    /// Partials of nodes.
    pub nodes: &'m mut [f32],
    /// Logits, and then their gradients: `[range][tile][piece][band][order][padded][BAND]`.
    pub store: &'m mut [f32],
    /// In the second order the motions of logits, and then gradients of the first order, as `store` lies; in bf16
    /// `store` has them behind the logits of each band, and then [`matrix::Rounded`].
    pub motion: &'m mut [f32],
    /// Sums of dh: `[block][slice]`.
    pub dh: &'m mut [f32],
    pub dw: &'m mut [f32],
    pub dbias: &'m mut [f32],
    /// Measures of a filter: `[range][tile][band]`, each [`MEASURE`].
    pub measures: &'m mut [f32],
}

/// Scratch of a thread that makes logits.
pub struct LogitScratch<'m> {
    /// A slice of w; in bf16 also of ddw.
    pub w: &'m mut [f32],
    /// The logits of a tile, where they are not kept; in bf16, of a band where that is enough.
    pub z: &'m mut [f32],
    /// Their motions.
    pub motion: &'m mut [f32],
    pub bias: &'m mut [f32],
    pub ddbias: &'m mut [f32],
    pub weights: &'m mut [f32],
    pub stack: Stack<'m>,
}

impl<'m> LogitScratch<'m> {
    pub fn cut(parts: &mut Parts<'m>, cut: &Cut) -> Self {
        let SweepSpec { totals, second, ddw, bf16, .. } = cut.spec;
        let kept = cut.spec.gradients();
        let (w, band) = match bf16 {
            true => (cut.copy_len() * if ddw { 2 } else { 1 }, cut.padded * BAND),
            false => (cut.padded * STRIDE, 0),
        };
        let z = if kept || cut.by_band() { band } else { cut.plane_len() };
        LogitScratch {
            w: parts.room(w),
            z: parts.room(z),
            motion: parts.room(if second { z } else { 0 }),
            bias: parts.room(TILE),
            ddbias: parts.room(if second { TILE } else { 0 }),
            weights: parts.room(TILE),
            stack: Stack::cut(parts, cut.node, if totals { cut.range } else { 0 }, second),
        }
    }
}

/// Scratch of a thread that sums up dh, or dw.
pub struct GradientScratch<'m> {
    /// Some elements of the rows of w in a tile, or of dw.
    pub rows: &'m mut [f32],
    pub sums: Sums<'m>,
}

impl<'m> GradientScratch<'m> {
    pub fn cut(parts: &mut Parts<'m>, cut: &Cut) -> Self {
        let len = if cut.spec.dh { cut.leaf_len() } else { 0 };
        GradientScratch {
            rows: parts.room(cut.padded * STRIDE),
            sums: Sums::cut(parts, cut.span, len),
        }
    }
}

impl Cut {
    /// Of so many tokens and tiles at a time.
    pub fn new(
        problem: &LinearCrossEntropy,
        level: Level,
        spec: SweepSpec,
        (chunk, span): (usize, usize),
        threads: usize,
    ) -> Self {
        let (rows, cols) = if spec.bf16 { (SQUARE, SQUARE) } else { level.block() };
        let slice = if spec.bf16 { NARROW } else { SLICE };
        let tiles = problem.vocab.div_ceil(TILE);
        // As equal as bands allow.
        let chunks = problem.tokens.div_ceil(chunk).max(1);
        let chunk = problem.tokens.div_ceil(chunks).next_multiple_of(BAND).max(BAND);
        let span = span.min(tiles);
        let each = (span / (BUSY * threads)).max(1);
        let node = 1 << each.ilog2();
        // With few tiles there is a share of the tokens for each thread.
        let shares = (BUSY * threads).div_ceil(span).min(chunk / BAND);
        let ranges = chunk.div_ceil(RANGE).max(if span >= 2 * threads { 1 } else { shares });
        let range = chunk.div_ceil(ranges).next_multiple_of(BAND);
        let slices = problem.dim.div_ceil(slice);
        let mut block = BLOCK;
        while block > BAND && chunk.div_ceil(block) * slices < 2 * threads {
            block -= BAND;
        }
        // As equal as bands allow: each reads and copies w anew.
        let block = range.div_ceil(range.div_ceil(block)).next_multiple_of(BAND);
        Cut {
            spec,
            level,
            rows,
            cols,
            tokens: problem.tokens,
            dim: problem.dim,
            vocab: problem.vocab,
            first: 0,
            tiles,
            padded: TILE.next_multiple_of(rows),
            chunk,
            range,
            span,
            node,
            slice,
            block: block.min(problem.tokens.next_multiple_of(cols).max(cols)),
            classes_outside: false,
            threads,
        }
    }

    /// Bytes that the sweep holds.
    pub fn bytes(&self) -> usize {
        self.shared_bytes().saturating_add(self.scratch_bytes())
    }

    /// Of those what its threads share.
    pub fn shared_bytes(&self) -> usize {
        Parts::count(|parts| self.shared(parts)).saturating_mul(size_of::<f32>())
    }

    /// And what they have for themselves.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch().saturating_mul(self.threads).saturating_mul(size_of::<f32>())
    }

    /// The same by what it is for.
    pub fn buffers(&self) -> Vec<Buffer> {
        let shared = Parts::list(|parts| self.shared(parts));
        let mut buffers: Vec<Buffer> =
            shared.into_iter().map(|(name, bytes)| Buffer::parts(name, 1, bytes)).collect();
        let each = self.scratch().saturating_mul(size_of::<f32>());
        buffers.push(Buffer::parts("the scratch of threads", self.threads, each));
        buffers
    }

    pub fn shared<'m>(&self, parts: &mut Parts<'m>) -> Shared<'m> {
        let SweepSpec { totals, dh, dw, dbias, ddh, filter, bf16, .. } = self.spec;
        let when = |wanted: bool, len: usize| if wanted { len } else { 0 };
        let chunks = self.tokens.div_ceil(self.chunk).max(1);
        let dim = self.dim.next_multiple_of(self.cols);
        let ranges = self.chunk.div_ceil(self.range);
        let nodes = self.span.div_ceil(self.node).saturating_mul(ranges);
        let store = self.tile_len().saturating_mul(self.span).saturating_mul(ranges);
        let bands = ranges.saturating_mul(self.range / BAND);
        let measures = bands.saturating_mul(self.span).saturating_mul(MEASURE);
        let blocks = ranges.saturating_mul(self.blocks());
        let blocks = blocks.saturating_mul(if self.classes_outside { chunks } else { 1 });
        let slabs = blocks.saturating_mul(self.slices()).saturating_mul(self.slab());
        let classes =
            if self.classes_outside { self.span.saturating_mul(TILE) } else { self.vocab };
        Shared {
            across: parts.group("h across").room(self.chunk.saturating_mul(self.words())),
            along: parts
                .group("h along")
                .room(when(dw, (self.along_len() / self.each()).saturating_mul(dim))),
            ddh_across: parts
                .group("ddh across")
                .room(when(ddh, self.chunk.saturating_mul(self.words()))),
            ddh_along: parts
                .group("ddh along")
                .room(when(ddh && dw && !bf16, self.chunk.saturating_mul(dim))),
            nodes: parts
                .group("partials of nodes")
                .room(when(totals, nodes.saturating_mul(self.node_len()))),
            store: parts.group("logits").room(when(self.spec.gradients(), store)),
            motion: parts.group("motions of logits").room(when(self.motions_apart(), store)),
            dh: parts.group("sums of dh").room(when(dh, slabs)),
            dw: parts
                .group("sums of dw")
                .room(when(dw && self.dw_apart(), classes.min(self.vocab).saturating_mul(dim))),
            dbias: parts.group("sums of dbias").room(when(dbias, self.vocab)),
            measures: parts.group("sums of the filter").room(when(filter, measures)),
        }
    }

    /// Elements of a word.
    pub fn each(&self) -> usize {
        if self.spec.bf16 { 2 } else { 1 }
    }

    /// Words of a row of h or w.
    pub fn words(&self) -> usize {
        if self.spec.bf16 { Form::len(1, self.dim) / SQUARE } else { self.dim }
    }

    /// Words of a copy of a slice of w, or of ddw: in bf16.
    pub fn copy_len(&self) -> usize {
        self.padded * self.words().min(matrix::SLICE)
    }

    /// Rows of h, and in bf16 of ddh, that lie along together.
    pub fn along_len(&self) -> usize {
        self.chunk.saturating_mul(self.along())
    }

    /// 2 where ddh lies along with h: in bf16.
    pub fn along(&self) -> usize {
        if self.spec.bf16 && self.spec.ddh { 2 } else { 1 }
    }

    /// True if a band of logits is complete as soon as one slice of w has been multiplied: in bf16.
    pub fn by_band(&self) -> bool {
        self.spec.bf16 && self.words() <= matrix::SLICE
    }

    /// True if all tokens are in one chunk: what is summed over them is complete then.
    pub fn at_once(&self) -> bool {
        self.tokens <= self.chunk
    }

    /// True if sums of dw are kept beside the result.
    pub fn dw_apart(&self) -> bool {
        self.spec.dw_apart && !self.at_once()
    }

    /// Elements of the partials of a node and a range of tokens, and of their motions.
    pub fn node_len(&self) -> usize {
        Node::elements(self.range, self.spec.second)
    }

    /// Elements of the logits of a tile and a range of tokens, or of a piece of their gradients; with those of their
    /// motions where both lie together.
    pub fn plane_len(&self) -> usize {
        self.range.saturating_mul(self.padded_rows())
    }

    /// Rows of a band: those of a tile, of each order.
    pub fn padded_rows(&self) -> usize {
        self.padded * self.orders()
    }

    /// 2 where logits that are kept lie together with their motions: in the second order in bf16.
    pub fn orders(&self) -> usize {
        let SweepSpec { bf16, second, .. } = self.spec;
        if bf16 && second && self.spec.gradients() { 2 } else { 1 }
    }

    /// True if the motions of logits that are kept have memory of their own: in the second order in f32.
    pub fn motions_apart(&self) -> bool {
        let SweepSpec { bf16, second, .. } = self.spec;
        second && self.spec.gradients() && !bf16
    }

    /// Elements of the gradients, in all pieces.
    pub fn tile_len(&self) -> usize {
        self.plane_len().saturating_mul(self.pieces())
    }

    /// Numbers of bf16 as whose sum a gradient of a logit is multiplied; 1 in f32.
    pub fn pieces(&self) -> usize {
        if self.spec.bf16 && self.spec.gradients() { self.spec.pieces } else { 1 }
    }

    /// Rounded gradients of a tile, from some words of the first piece on.
    pub fn gradients<'a>(&self, words: &'a [f32]) -> matrix::Rounded<'a> {
        let pieces = Pieces { words, apart: self.plane_len(), count: self.pieces() };
        matrix::Rounded { pieces, orders: self.orders() }
    }

    /// The memory of a band of a tile, and of its second piece, if there are two.
    pub fn places<'m>(&self, tile: &'m mut [f32], band: usize) -> [&'m mut [f32]; 2] {
        let len = self.padded_rows() * BAND;
        let here = band * len..(band + 1) * len;
        let (first, rest) = tile.split_at_mut(self.plane_len());
        [&mut first[here.clone()], rest.get_mut(here).unwrap_or_default()]
    }

    /// Blocks of a range.
    pub fn blocks(&self) -> usize {
        self.range.div_ceil(self.block)
    }

    /// Spans of all classes.
    pub fn spans(&self) -> usize {
        self.tiles.div_ceil(self.span)
    }

    /// Slices of D.
    pub fn slices(&self) -> usize {
        self.dim.div_ceil(self.slice)
    }

    /// Elements of a matrix of dh, transposed: of a block and a slice.
    pub fn leaf_len(&self) -> usize {
        self.slice.next_multiple_of(self.rows) * self.block
    }

    /// Elements of the sums of dh of a block and a slice.
    pub fn slab(&self) -> usize {
        match self.spans() {
            1 => self.leaf_len(),
            spans => Parts::count(|parts| Sums::cut(parts, spans, self.leaf_len())),
        }
    }

    /// Elements of the scratch of a thread: in every phase other ones.
    pub fn scratch(&self) -> usize {
        let logits = Parts::count(|parts| LogitScratch::cut(parts, self));
        let gradients = Parts::count(|parts| GradientScratch::cut(parts, self));
        logits.max(if self.spec.gradients() { gradients } else { 0 })
    }

    /// The number of the first class of a tile, among all classes of the problem.
    pub fn first_class(&self, tile: usize) -> usize {
        self.first + tile * TILE
    }

    /// The classes of a tile, counted from the first of the sweep.
    pub fn classes(&self, tile: usize) -> std::ops::Range<usize> {
        tile * TILE..self.vocab.min((tile + 1) * TILE)
    }
}
