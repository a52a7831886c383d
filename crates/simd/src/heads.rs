//! How a problem is cut into tiles and heads.

use crate::element::Tensor;
use crate::mask::Sight;
use crate::tile::MAX_KEYS;
use crate::{Element, Options};
use etalon_problem::{Blocking, Cover, Error, Scores, Sequence};
use ndarray::{
    ArrayView2, ArrayView4, ArrayViewMut, ArrayViewMut2, ArrayViewMut4, Axis, Dimension, Ix2,
    RemoveAxis, s,
};
use std::ops::Range;

pub use crate::tiles::{Place, all_queries, check_counts, key_rows, places, query_rows};

/// The most queries in a tile: more would only push its scores out of the cache.
const MAX_QUERIES: usize = 1024;

/// Fails if there are more batch elements or heads than lists are made of.
pub fn check_lists(scores: &Scores) -> Result<(), Error> {
    check_counts(scores.extents.batch, scores.extents.query_heads)
}

/// The blocking that was measured to be best, or within 3 % of it, for the forward pass and for the
/// fused backward pass at D = 64 and 128 on AVX-512: a tile of keys and values stays in the
/// L2 cache while the register blocks of the queries pass over it.
const DEFAULT: Blocking = Blocking { queries: 192, keys: 192 };

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
}

impl Cut {
    /// The blocking of the options, rounded up to register blocks and clamped to the lengths.
    pub fn new(scores: &Scores, options: &Options) -> Result<Cut, Error> {
        let blocking = options.blocking.unwrap_or(DEFAULT);
        blocking.check()?;
        let (rows, cols) = options.level.block();
        let e = &scores.extents;
        let queries = blocking.queries.min(MAX_QUERIES).min(e.queries.max(1));
        let keys = blocking.keys.min(MAX_KEYS).min(e.keys.max(1));
        Ok(Cut {
            rows,
            cols,
            queries: queries.next_multiple_of(rows),
            keys: keys.next_multiple_of(cols).min(MAX_KEYS),
        })
    }

    /// Queries and keys of a tile.
    pub fn blocking(&self) -> Blocking {
        Blocking { queries: self.queries, keys: self.keys }
    }

    /// `range` in tiles of `size`.
    pub fn tiles(
        range: Range<usize>,
        size: usize,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
        crate::tiles::tiles(range, size)
    }
}

/// Which pairs of one sequence and query head count, and what is added to their scores.
#[derive(Clone, Copy)]
pub struct Rule<'a> {
    /// σ.
    pub scale: f32,
    /// c.
    pub softcap: Option<f32>,
    /// The mask.
    pub sight: &'a Sight<'a>,
    /// The bias of this sequence and head, `[n, m]`.
    pub bias: Option<Tensor<'a, Ix2>>,
    /// The sequence.
    pub sequence: &'a Sequence,
    /// The query head.
    pub head: usize,
}

impl<'a> Rule<'a> {
    /// The rule of a sequence and head.
    pub fn new<T: Element>(
        scores: &'a Scores,
        sight: &'a Sight<'a>,
        bias: Option<&ArrayView4<'a, T>>,
        sequence: &'a Sequence,
        head: usize,
    ) -> Self {
        Rule {
            scale: scores.scale() as f32,
            softcap: scores.softcap.map(|cap| cap as f32),
            sight,
            bias: bias.map(|bias| pairs_of(bias, sequence, head)),
            sequence,
            head,
        }
    }

    /// What the mask allows of a tile.
    pub fn cover(&self, rows: Range<usize>, cols: Range<usize>) -> Cover {
        self.sight.cover(self.sequence, self.head, rows, cols)
    }

    /// Whether query `i` sees each key of `cols`.
    pub fn visible_row(&self, i: usize, cols: Range<usize>, row: &mut [bool]) {
        self.sight.visible_row(self.sequence, self.head, i, cols, row);
    }
}

/// The pairs of one sequence and head, `[n, m]`, of a tensor with the outer axes of a bias.
pub fn pairs_of<'a, T: Element>(
    bias: &ArrayView4<'a, T>,
    sequence: &Sequence,
    head: usize,
) -> Tensor<'a, Ix2> {
    let pick = |axis: usize, index: usize| if bias.len_of(Axis(axis)) == 1 { 0 } else { index };
    let (batch, head) = (pick(0, sequence.batch), pick(1, head));
    (*bias).slice_move(s![batch, head, query_rows(sequence), key_rows(sequence)]).into()
}

/// The rows of one sequence and head of an operand.
pub fn rows_of<'a, T>(
    operand: &ArrayView4<'a, T>,
    batch: usize,
    head: usize,
    rows: Range<usize>,
) -> ArrayView2<'a, T> {
    (*operand).slice_move(s![batch, head, rows, ..])
}

/// Fills a result `[batch, heads, rows, …]` with `nothing` if some of its rows belong to no sequence;
/// `covered` rows belong to one, and will be written.
pub fn clear<A: Clone, D: Dimension>(
    result: &mut ArrayViewMut<'_, A, D>,
    covered: usize,
    nothing: A,
) {
    if covered < result.len_of(Axis(0)) * result.len_of(Axis(2)) {
        result.fill(nothing);
    }
}

/// Cuts a view along its first axis into the given spans, which ascend and do not overlap.
pub fn cut_rows<'a, A, D: Dimension>(
    view: ArrayViewMut<'a, A, D>,
    spans: &[Range<usize>],
) -> Vec<ArrayViewMut<'a, A, D>> {
    let mut rest = view;
    let mut start = 0;
    let mut pieces = Vec::with_capacity(spans.len());
    for span in spans {
        let (_, tail) = rest.split_at(Axis(0), span.start - start);
        let (piece, tail) = tail.split_at(Axis(0), span.len());
        pieces.push(piece);
        rest = tail;
        start = span.end;
    }
    pieces
}

/// The views along the first axis.
pub fn outer<A, D: RemoveAxis>(
    view: ArrayViewMut<'_, A, D>,
) -> Vec<ArrayViewMut<'_, A, D::Smaller>> {
    let spans: Vec<Range<usize>> = (0..view.len_of(Axis(0))).map(|i| i..i + 1).collect();
    cut_rows(view, &spans).into_iter().map(|row| row.index_axis_move(Axis(0), 0)).collect()
}

impl Place {
    /// The number of its sequence and key head together.
    pub fn slot(&self, scores: &Scores) -> usize {
        self.number * scores.extents.key_heads + self.head / scores.group()
    }
}

/// A part of a result within one batch element and head.
pub type Piece<'o, A, D> = ArrayViewMut<'o, A, <<D as Dimension>::Smaller as Dimension>::Smaller>;

/// The rows of a result `[batch, query heads, queries, …]` in the tiles of [`places`], in their
/// order. Rows of no sequence are in no tile.
pub fn query_tiles<'o, A, D>(
    result: ArrayViewMut<'o, A, D>,
    sequences: &[Sequence],
    size: impl Fn(&Sequence) -> usize,
) -> Vec<Piece<'o, A, D>>
where
    D: RemoveAxis<Smaller: RemoveAxis>,
{
    let mut pieces = Vec::new();
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().filter(|sequence| sequence.batch == batch);
        let spans = here.flat_map(|sequence| Cut::tiles(query_rows(sequence), size(sequence)));
        let spans: Vec<Range<usize>> = spans.collect();
        for result in outer(result) {
            pieces.extend(cut_rows(result, &spans));
        }
    }
    pieces
}

/// A result with the shape of the keys, cut into tiles: those of sequence s and key head h are at
/// s·Hk + h. Rows of no sequence are cleared. Where there is no result, there are as many places for
/// tiles.
pub fn key_tiles<'o, T: Element>(
    result: Option<ArrayViewMut4<'o, T>>,
    sequences: &[Sequence],
    key_heads: usize,
    size: usize,
) -> Vec<Vec<Option<ArrayViewMut2<'o, T>>>> {
    let tiles = |sequence: &Sequence| sequence.keys.div_ceil(size);
    let places = |sequence| (0..tiles(sequence)).map(|_| None).collect();
    let mut cut: Vec<Vec<Option<ArrayViewMut2<'o, T>>>> = sequences
        .iter()
        .flat_map(|sequence| (0..key_heads).map(move |_| places(sequence)))
        .collect();
    let Some(mut result) = result else { return cut };
    clear(&mut result, sequences.iter().map(|sequence| sequence.keys).sum(), T::ZERO);
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().enumerate().filter(|(_, sequence)| sequence.batch == batch);
        let spans = here.clone().flat_map(|(_, sequence)| Cut::tiles(key_rows(sequence), size));
        let spans: Vec<Range<usize>> = spans.collect();
        for (head, result) in outer(result).into_iter().enumerate() {
            let mut pieces = cut_rows(result, &spans).into_iter();
            for (number, sequence) in here.clone() {
                let tiles = pieces.by_ref().take(tiles(sequence));
                cut[number * key_heads + head] = tiles.map(Some).collect();
            }
        }
    }
    cut
}
