//! Meanings of the values of the axes of attention and its relatives, except shapes and families.

use crate::generate::Stream;
use etalon_problem::{Align, BiasExtents, Extents, Mask, NamedArray, Scores};

/// Reach of a window to one side: over several tiles, as far as a tile of 96 or 192 or one key less or more.
pub(super) fn reach(e: &Extents, stream: &Stream, side: usize) -> usize {
    match e.queries.min(e.keys) > 300 {
        true => stream.pick(side, &[0, 31, 95, 96, 97, 191, 192, 193]),
        false => stream.pick(side, &[0, 1, 2, 5, 16, 31]),
    }
}

pub(super) fn window(e: &Extents, stream: &Stream, align: Align) -> Mask {
    Mask::Window { left: Some(reach(e, stream, 0)), right: Some(reach(e, stream, 1)), align }
}

/// The keys of a chunk: few, or over several tiles.
pub(super) fn chunk(e: &Extents, stream: &Stream) -> usize {
    match e.queries.min(e.keys) > 300 {
        true => stream.pick(2, &[29, 128, 200, 260]),
        false => stream.pick(2, &[1, 3, 8, 16, 29]),
    }
}

/// Ids 0, 1, 2 in runs of 9 and back to 0, where every 11th row is padding; or ids that lie side by side, in runs of a
/// quarter of the rows, before padding.
pub(super) fn segments(e: &Extents, stream: &Stream) -> Mask {
    let (shift, apart) = (stream.below(6, 9), stream.pick(9, &[false, true]));
    let ids = |length: usize| -> Vec<i64> {
        let id = |b: usize, i: usize| match (i + b) % 11 {
            _ if !apart && i >= length - length / 8 => -1,
            _ if !apart => ((i + shift + 2 * b) / length.div_ceil(4)) as i64,
            10 => -1,
            _ => ((i + shift + 2 * b) / 9 % 3) as i64,
        };
        (0..e.batch).flat_map(|b| (0..length).map(move |i| id(b, i))).collect()
    };
    Mask::Segments {
        query: NamedArray::new("query_segments", &[e.batch, e.queries], ids(e.queries)),
        key: NamedArray::new("key_segments", &[e.batch, e.keys], ids(e.keys)),
    }
}

/// Pattern of the flags of an array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Flags {
    /// So many of them; every 13th row is empty, in each head another one.
    Some(f64),
    /// Nearly all: of most blocks of pairs all but one or two.
    Most,
    /// Blocks of pairs, each as a whole; now and then a pair is otherwise.
    Blocks,
}

/// Random flags.
pub(super) fn array(
    e: &Extents,
    [batch, heads]: [usize; 2],
    flags: Flags,
    stream: &Stream,
) -> Mask {
    let side = stream.pick(7, &[8, 16, 48]);
    let flag = |at: usize| {
        let (matrix, row, col) = (at / e.keys / e.queries, at / e.keys % e.queries, at % e.keys);
        let rare = stream.uniform(100 + at) >= 0.995;
        match flags {
            Flags::Some(density) => {
                (row + 5 * matrix) % 13 != 1 && stream.uniform(100 + at) < density
            }
            Flags::Most => !rare,
            Flags::Blocks => {
                let block = (matrix * 4096 + row / side) * 4096 + col / side;
                (stream.below(usize::MAX / 2 + block, 2) == 0) != rare
            }
        }
    };
    let flags: Vec<bool> = (0..batch * heads * e.queries * e.keys).map(flag).collect();
    Mask::Array(NamedArray::new("mask", &[batch, heads, e.queries, e.keys], flags))
}

/// Adds a bias of these extents of batch and heads.
pub(super) fn add_bias(scores: &mut Scores, extents: fn(&Extents) -> [usize; 2]) {
    let [batch, heads] = extents(&scores.extents);
    scores.bias = Some(BiasExtents { batch, heads });
}

/// Lengths of sequences: one is whole, not always the first, the next one row short, the others
/// anything that `draw` returns for a batch element.
pub(crate) fn lengths(batch: usize, rows: usize, draw: impl Fn(usize) -> usize) -> Vec<usize> {
    let whole = draw(batch) % batch.max(1);
    let length = |b: usize| match (b + batch - whole) % batch {
        _ if batch == 1 => draw(b),
        0 => rows,
        1 => rows.saturating_sub(1),
        _ => draw(b),
    };
    (0..batch).map(length).collect()
}

/// Bounds of five sequences, of which one is empty; the numbers of `stream` from `first` on decide. A row is left
/// over.
pub(crate) fn cuts(rows: usize, empty: usize, stream: &Stream, first: usize) -> Vec<usize> {
    let last = rows - usize::from(rows > 4);
    let mut cuts: Vec<usize> = (first..first + 4).map(|i| stream.below(i, last + 1)).collect();
    cuts.extend([0, last]);
    cuts.sort_unstable();
    cuts[empty + 1] = cuts[empty];
    cuts
}
