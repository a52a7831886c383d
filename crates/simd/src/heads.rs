//! How a problem is cut into tiles and heads.

use crate::element::Matrix;
use crate::lanes::{Isa, Kernel};
use crate::mask::visible_row;
use crate::pack::{NonFinite, Packed, Source};
use crate::tile::{MAX_KEYS, Tile};
use crate::{Element, Options};
use etalon_problem::{Blocking, Cover, Error, Mask, Scores, Sequence};
use ndarray::{
    ArrayView2, ArrayView4, ArrayViewMut, ArrayViewMut2, ArrayViewMut4, Axis, Dimension,
    RemoveAxis, s,
};
use rayon::prelude::*;
use std::ops::Range;

/// The most queries in a tile: more would only push its scores out of the cache.
const MAX_QUERIES: usize = 1024;

/// The blocking that was measured to be best, or within 3 % of it, for the forward pass and for the
/// backward pass with partials at D = 64 and 128 on AVX-512: a tile of keys and values stays in the
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
        struct Block;
        impl Kernel for Block {
            type Output = (usize, usize);
            #[inline(always)]
            fn run<I: Isa>(self, _: I) -> (usize, usize) {
                (I::Tile::ROWS, I::Tile::COLS)
            }
        }
        let blocking = options.blocking.unwrap_or(DEFAULT);
        blocking.check()?;
        let (rows, cols) = options.level.run(Block);
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

    /// `range` in tiles of `size`.
    pub fn tiles(
        range: Range<usize>,
        size: usize,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let tiles = range.len().div_ceil(size);
        (0..tiles).map(move |t| {
            let start = range.start + t * size;
            start..range.end.min(start + size)
        })
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
    pub mask: &'a Mask,
    /// The bias of this sequence and head, `[n, m]`.
    pub bias: Option<Matrix<'a>>,
    /// The sequence.
    pub sequence: &'a Sequence,
    /// The query head.
    pub head: usize,
}

impl<'a> Rule<'a> {
    /// The rule of a sequence and head.
    pub fn new<T: Element>(
        scores: &'a Scores,
        bias: Option<&ArrayView4<'a, T>>,
        sequence: &'a Sequence,
        head: usize,
    ) -> Self {
        Rule {
            scale: scores.scale() as f32,
            softcap: scores.softcap.map(|cap| cap as f32),
            mask: &scores.mask,
            bias: bias.map(|bias| pairs_of(bias, sequence, head)),
            sequence,
            head,
        }
    }

    /// What the mask allows of a tile.
    pub fn cover(&self, rows: Range<usize>, cols: Range<usize>) -> Cover {
        self.mask.cover(self.sequence, self.head, rows, cols)
    }

    /// Whether query `i` sees each key of `cols`.
    pub fn visible_row(&self, i: usize, cols: Range<usize>, row: &mut [bool]) {
        visible_row(self.mask, self.sequence, self.head, i, cols, row);
    }
}

/// The pairs of one sequence and head, `[n, m]`, of a tensor with the outer axes of a bias.
pub fn pairs_of<'a, T: Element>(
    bias: &ArrayView4<'a, T>,
    sequence: &Sequence,
    head: usize,
) -> Matrix<'a> {
    let pick = |axis: usize, index: usize| if bias.len_of(Axis(axis)) == 1 { 0 } else { index };
    let (batch, head) = (pick(0, sequence.batch), pick(1, head));
    T::matrix((*bias).slice_move(s![batch, head, query_rows(sequence), key_rows(sequence)]))
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

/// The queries of all sequences.
pub fn all_queries(sequences: &[Sequence]) -> usize {
    sequences.iter().map(|sequence| sequence.queries).sum()
}

/// The keys of a sequence in the rows of the arrays.
pub fn key_rows(sequence: &Sequence) -> Range<usize> {
    sequence.key_start..sequence.key_start + sequence.keys
}

/// The queries of a sequence in the rows of the arrays.
pub fn query_rows(sequence: &Sequence) -> Range<usize> {
    sequence.query_start..sequence.query_start + sequence.queries
}

/// Keys and values of one sequence and key head, packed once for all query heads and tiles.
#[derive(Debug, Default)]
pub struct Keys {
    /// k across: the second factor of the scores.
    pub k_across: Packed,
    /// k along: the second factor of dq (and of ∂lse/∂q).
    pub k_along: Packed,
    /// v across: the second factor of dP.
    pub v_across: Packed,
    /// v along: the second factor of o.
    pub v_along: Packed,
    /// Keys that are not finite in k or v.
    pub non_finite: NonFinite,
}

/// Which packings of keys and values a pass needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// [`Keys::k_along`].
    pub k_along: bool,
    /// [`Keys::v_across`].
    pub v_across: bool,
    /// [`Keys::v_along`].
    pub v_along: bool,
}

/// The keys and values of a pass, as they are packed.
#[derive(Clone, Copy)]
pub struct KeyOperands<'a, 'o, T> {
    /// `[B, Hk, M, D]`.
    pub k: &'a ArrayView4<'o, T>,
    /// `[B, Hk, M, E]`, if there are values.
    pub v: Option<&'a ArrayView4<'o, T>>,
    /// Which packings are needed.
    pub needs: Needs,
}

impl<T: Element> KeyOperands<'_, '_, T> {
    /// Memory for sequences of up to `len` keys.
    pub fn room(&self, len: usize, cut: &Cut) -> Result<Keys, Error> {
        let (dim, needs) = (self.k.dim().3, self.needs);
        let value_dim = self.v.map_or(0, |v| v.dim().3);
        let along = |wanted: bool, dim| match wanted {
            true => Packed::room_along(len, dim, cut.cols),
            false => Ok(Packed::default()),
        };
        Ok(Keys {
            k_across: Packed::room_across(len, dim, cut.cols)?,
            k_along: along(needs.k_along, dim)?,
            v_across: match needs.v_across {
                true => Packed::room_across(len, value_dim, cut.cols)?,
                false => Packed::default(),
            },
            v_along: along(needs.v_along, value_dim)?,
            non_finite: None,
        })
    }

    /// Packs the keys of a sequence and key head into memory that has room for them.
    pub fn pack_into(&self, keys: &mut Keys, sequence: &Sequence, head: usize, cut: &Cut) {
        let source = |operand| Source {
            rows: rows_of(operand, sequence.batch, head, key_rows(sequence)),
            dead: None,
        };
        let (k, needs) = (source(self.k), self.needs);
        k.across_into(cut.cols, &mut keys.k_across.panels);
        keys.non_finite = k.non_finite();
        if needs.k_along {
            k.along_into(cut.cols, &mut keys.k_along);
        }
        let Some(v) = self.v.map(source) else { return };
        keys.non_finite = either(keys.non_finite.take(), v.non_finite());
        if needs.v_across {
            v.across_into(cut.cols, &mut keys.v_across.panels);
        }
        if needs.v_along {
            v.along_into(cut.cols, &mut keys.v_along);
        }
    }

    /// Packs every sequence and key head; the keys of sequence s and key head h are at s·Hk + h.
    pub fn pack(
        &self,
        sequences: &[Sequence],
        key_heads: usize,
        cut: &Cut,
    ) -> Result<Vec<Keys>, Error> {
        let heads = sequences.iter().flat_map(|seq| (0..key_heads).map(move |head| (seq, head)));
        let heads: Vec<_> = heads.collect();
        let pack = |(sequence, head): (&Sequence, usize)| {
            let mut keys = self.room(sequence.keys, cut)?;
            self.pack_into(&mut keys, sequence, head, cut);
            Ok(keys)
        };
        heads.into_par_iter().map(pack).collect()
    }
}

/// Rows that either list notes.
pub fn either(a: NonFinite, b: NonFinite) -> NonFinite {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| a | b).collect()),
        (a, b) => a.or(b),
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

/// A tile of queries: of which sequence and head, and which rows within the sequence.
#[derive(Debug, Clone)]
pub struct Place {
    /// The number of the sequence.
    pub number: usize,
    /// The query head.
    pub head: usize,
    /// The rows.
    pub rows: Range<usize>,
}

/// A part of a result within one batch element and head.
type Piece<'o, A, D> = ArrayViewMut<'o, A, <<D as Dimension>::Smaller as Dimension>::Smaller>;

/// The rows of a result `[batch, query heads, queries, …]` in tiles, each with its place. Rows of no
/// sequence are in no tile.
pub fn query_tiles<'o, A, D>(
    result: ArrayViewMut<'o, A, D>,
    sequences: &[Sequence],
    size: usize,
) -> Vec<(Place, Piece<'o, A, D>)>
where
    D: RemoveAxis<Smaller: RemoveAxis>,
{
    let mut tiles = Vec::new();
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here: Vec<(usize, &Sequence, Range<usize>)> = sequences
            .iter()
            .enumerate()
            .filter(|(_, sequence)| sequence.batch == batch)
            .flat_map(|(number, sequence)| {
                Cut::tiles(0..sequence.queries, size).map(move |rows| (number, sequence, rows))
            })
            .collect();
        let spans: Vec<Range<usize>> = here
            .iter()
            .map(|(_, s, rows)| s.query_start + rows.start..s.query_start + rows.end)
            .collect();
        for (head, result) in outer(result).into_iter().enumerate() {
            let pieces = cut_rows(result, &spans);
            tiles.extend(here.iter().zip(pieces).map(|(&(number, _, ref rows), piece)| {
                (Place { number, head, rows: rows.clone() }, piece)
            }));
        }
    }
    tiles
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
