//! Results cut into tiles, for every element type: linear_attention still imports these. `tiles.rs` has
//! them for tensors of any element type.

use etalon_problem::Sequence;
use ndarray::{ArrayView2, ArrayView4, ArrayViewMut, Axis, Dimension, RemoveAxis, s};
use std::ops::Range;

pub use crate::tiles::{all_queries, check_counts, key_rows, places, query_rows};

/// [`crate::tiles::tiles`].
pub struct Cut;

impl Cut {
    /// `range` in tiles of `size`.
    pub fn tiles(
        range: Range<usize>,
        size: usize,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
        crate::tiles::tiles(range, size)
    }
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
