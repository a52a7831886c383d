//! Masks: which query may see which key.
//!
//! [`Mask::allows`] is the definition, written from the formulas of `docs/attention.md`; the
//! reference uses nothing else. Kernels use four functions that must agree with it:
//!
//! * [`Mask::row_span`]: the range of keys that a query sees, for the *interval masks*, those whose
//!   rows are one range each (`Full`, `Causal`, `Window`, `ChunkedCausal` and every `And` of them);
//! * [`Mask::row_spans`]: those of a whole sequence, also where the data decide (`Segments`);
//! * [`Mask::nodes`]: the mask as a list, which a device evaluates;
//! * [`Mask::cover`]: whether a tile may be skipped, or computed without looking at the mask. For
//!   interval masks it follows from the spans.
//!
//! `tests/all/spans.rs` compares spans with `allows` for all small extents, `tests/all/cover.rs` compares
//! covers.

mod array;
mod cover;
mod nodes;
mod others;
mod spans;

use crate::{Error, Sequence};
use std::ops::Range;

pub use array::NamedArray;
pub use cover::Cover;
pub use nodes::{MaskNode, NodeArrays, NodeKind};
pub(crate) use others::others;

/// Alignment of the diagonal of a mask in a sequence of n queries and m ≠ n keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Align {
    /// The first query is aligned with the first key: i′ = i.
    TopLeft,
    /// The last query is aligned with the last key: i′ = i + m − n.
    #[default]
    BottomRight,
}

/// Rule by which a query may see a key. One value, a tree.
///
/// In the formulas, i is the query and j the key, both counted within their sequence of n queries
/// and m keys; i′ is the key with which [`Align`] aligns the query.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Mask {
    /// Every pair.
    #[default]
    Full,
    /// j ≤ i′.
    Causal {
        /// Alignment of the diagonal.
        #[cfg_attr(feature = "serde", serde(default))]
        align: Align,
    },
    /// i′ − left ≤ j ≤ i′ + right, both ends inclusive; a missing end is open.
    Window {
        /// Keys to the left that are seen.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        left: Option<usize>,
        /// Keys to the right that are seen.
        #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
        right: Option<usize>,
        /// Alignment of the diagonal.
        #[cfg_attr(feature = "serde", serde(default))]
        align: Align,
    },
    /// j ≤ i′, and i′ and j lie in the same chunk: ⌊i′/chunk⌋ = ⌊j/chunk⌋.
    ChunkedCausal {
        /// Keys in a chunk, at least 1.
        chunk: usize,
        /// Alignment of the diagonal.
        #[cfg_attr(feature = "serde", serde(default))]
        align: Align,
    },
    /// The ids of query and key are equal and not negative: a negative id marks padding. The arrays
    /// have one id for each row of q, `[batch, queries]`, and of k, `[batch, keys]`.
    Segments {
        /// The id of every query.
        query: NamedArray<i64>,
        /// The id of every key.
        key: NamedArray<i64>,
    },
    /// The array is true: `[batch or 1, query_heads or 1, queries, keys]`, in the order of the rows
    /// of q and k.
    Array(NamedArray<bool>),
    /// Allowed by every one of these (by an empty list: always).
    And(Vec<Mask>),
    /// Allowed by at least one of these (by an empty list: never).
    Or(Vec<Mask>),
}

/// Masks nested deeper than this are refused, so that no walk over one can exhaust the stack.
const MAX_DEPTH: usize = 32;

impl Mask {
    /// Causal, aligned at the bottom right: the last query sees every key.
    pub fn causal() -> Self {
        Mask::Causal { align: Align::BottomRight }
    }

    /// A window of `left` keys before and `right` keys after the aligned query, and that key
    /// itself.
    pub fn window(left: impl Into<Option<usize>>, right: impl Into<Option<usize>>) -> Self {
        Mask::Window { left: left.into(), right: right.into(), align: Align::BottomRight }
    }

    /// Every primitive interval mask whose reaches and chunks are among `lengths`, in both
    /// alignments: tests run through them.
    pub fn intervals(lengths: Range<usize>) -> Vec<Mask> {
        let reaches = || std::iter::once(None).chain(lengths.clone().map(Some));
        let mut masks = vec![Mask::Full];
        for align in [Align::TopLeft, Align::BottomRight] {
            masks.push(Mask::Causal { align });
            for left in reaches() {
                masks.extend(reaches().map(|right| Mask::Window { left, right, align }));
            }
            let chunks = lengths.clone().filter(|&chunk| chunk > 0);
            masks.extend(chunks.map(|chunk| Mask::ChunkedCausal { chunk, align }));
        }
        masks
    }

    /// True where query `i` of `sequence` may see its key `j` in query head `head`.
    pub fn allows(&self, sequence: &Sequence, head: usize, i: usize, j: usize) -> bool {
        let distance = |align| j as i64 - aligned(sequence, align, i);
        match self {
            Mask::Full => true,
            Mask::Causal { align } => distance(*align) <= 0,
            Mask::Window { left, right, align } => {
                let d = distance(*align);
                left.is_none_or(|left| d >= -reach(left))
                    && right.is_none_or(|right| d <= reach(right))
            }
            Mask::ChunkedCausal { chunk, align } => {
                let (i, j, chunk) = (aligned(sequence, *align, i), j as i64, reach(*chunk));
                j <= i && i.div_euclid(chunk) == j.div_euclid(chunk)
            }
            Mask::Segments { query, key } => {
                let id = query.ids(sequence.batch)[sequence.query_start + i];
                id >= 0 && id == key.ids(sequence.batch)[sequence.key_start + j]
            }
            Mask::Array(array) => array.row(sequence, head, i)[sequence.key_start + j],
            Mask::And(masks) => masks.iter().all(|mask| mask.allows(sequence, head, i, j)),
            Mask::Or(masks) => masks.iter().any(|mask| mask.allows(sequence, head, i, j)),
        }
    }

    /// The keys that query `i` of `sequence` sees, in every head the same: a range within the
    /// sequence, empty where the query sees none. `None` unless the mask is an interval mask.
    ///
    /// From one query to the next, neither end of the range decreases. Unless the mask is an `And`,
    /// the range of the next query begins at or before the end of this one, so that no key between
    /// two ranges is left out.
    ///
    /// ```
    /// # use etalon_problem::{Mask, Sequence};
    /// let sequence = Sequence { batch: 0, query_start: 0, queries: 8, key_start: 0, keys: 8 };
    /// assert_eq!(Mask::causal().row_span(&sequence, 5), Some(0..6));
    /// assert_eq!(Mask::window(2, 1).row_span(&sequence, 5), Some(3..7));
    /// ```
    pub fn row_span(&self, sequence: &Sequence, i: usize) -> Option<Range<usize>> {
        // The first and the last key, both inclusive, before they are cut to the sequence.
        let (first, last) = match self {
            Mask::Full => (None, None),
            Mask::Causal { align } => (None, Some(aligned(sequence, *align, i))),
            Mask::Window { left, right, align } => {
                let own = aligned(sequence, *align, i);
                (left.map(|left| own - reach(left)), right.map(|right| own + reach(right)))
            }
            Mask::ChunkedCausal { chunk, align } => {
                let own = aligned(sequence, *align, i);
                (Some(own - own.rem_euclid(reach(*chunk))), Some(own))
            }
            Mask::And(masks) => {
                return masks.iter().try_fold(0..sequence.keys, |span, mask| {
                    Some(overlap(&span, &mask.row_span(sequence, i)?))
                });
            }
            Mask::Segments { .. } | Mask::Array(_) | Mask::Or(_) => return None,
        };
        let cut = |key: i64| key.clamp(0, sequence.keys as i64) as usize;
        let start = first.map_or(0, cut);
        Some(start..last.map_or(sequence.keys, |last| cut(last + 1)).max(start))
    }

    /// The keys that each query of `sequence` sees, in every head the same: ranges within the sequence, empty where a
    /// query sees none. `None` unless each query sees one range: of `Array`, of `Or`, and of `Segments` whose keys of
    /// one id do not lie side by side.
    ///
    /// ```
    /// # use etalon_problem::{Mask, NamedArray, Sequence};
    /// let sequence = Sequence { batch: 0, query_start: 0, queries: 3, key_start: 0, keys: 4 };
    /// let ids = |name: &str, ids: &[i64]| NamedArray::new(name, &[1, ids.len()], ids.to_vec());
    /// let mask = |key: &[i64]| Mask::Segments { query: ids("query", &[0, 1, -1]), key: ids("key", key) };
    /// assert_eq!(mask(&[0, 0, 1, 1]).row_spans(&sequence), Some(vec![0..2, 2..4, 0..0]));
    /// assert_eq!(mask(&[0, 1, 1, 0]).row_spans(&sequence), None);
    /// ```
    pub fn row_spans(&self, sequence: &Sequence) -> Option<Vec<Range<usize>>> {
        match self {
            Mask::Segments { query, key } => {
                let query = &query.ids(sequence.batch)[sequence.query_start..][..sequence.queries];
                let key = &key.ids(sequence.batch)[sequence.key_start..][..sequence.keys];
                spans::of_segments(query, key)
            }
            Mask::And(masks) => {
                let all = vec![0..sequence.keys; sequence.queries];
                masks.iter().try_fold(all, |spans, mask| {
                    let own = mask.row_spans(sequence)?;
                    Some(spans.iter().zip(&own).map(|(a, b)| overlap(a, b)).collect())
                })
            }
            _ => (0..sequence.queries).map(|i| self.row_span(sequence, i)).collect(),
        }
    }

    /// The mask as a list that a device evaluates from the first node to the last.
    pub fn nodes(&self) -> Vec<MaskNode<'_>> {
        let window = |align: &Align, left: Option<usize>, right: Option<usize>| {
            vec![MaskNode { align: *align, left, right, ..MaskNode::of(NodeKind::Window) }]
        };
        match self {
            Mask::Full => window(&Align::TopLeft, None, None),
            Mask::Causal { align } => window(align, None, Some(0)),
            Mask::Window { left, right, align } => window(align, *left, *right),
            Mask::ChunkedCausal { chunk, align } => {
                let (align, left) = (*align, Some(*chunk));
                vec![MaskNode { align, left, ..MaskNode::of(NodeKind::Chunk) }]
            }
            Mask::Segments { query, key } => {
                let arrays = NodeArrays::Ids { query, key };
                vec![MaskNode { arrays, ..MaskNode::of(NodeKind::Segments) }]
            }
            Mask::Array(array) => {
                let arrays = NodeArrays::Flags(array);
                vec![MaskNode { arrays, ..MaskNode::of(NodeKind::Flags) }]
            }
            Mask::And(masks) => nodes::list(NodeKind::All, masks),
            Mask::Or(masks) => nodes::list(NodeKind::Any, masks),
        }
    }

    /// Part of the tile `rows` × `cols` (ranges within the sequence) that the mask allows. Exact for
    /// the primitive masks and for `And` of interval masks; for other `And` and for `Or` sound:
    /// never `None` over an allowed pair, never `All` over a forbidden one. An empty tile is `None`.
    ///
    /// A primitive interval mask costs the spans of two rows. An `And` of such masks looks at further
    /// rows of the tile until one sees a key of it.
    pub fn cover(
        &self,
        sequence: &Sequence,
        head: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Cover {
        if rows.is_empty() || cols.is_empty() {
            return Cover::None;
        }
        let each = |mask: &Mask| mask.cover(sequence, head, rows.clone(), cols.clone());
        match self {
            Mask::Segments { query, key } => {
                fn at(ids: &[i64], start: usize, range: Range<usize>) -> &[i64] {
                    &ids[start + range.start..start + range.end]
                }
                // Runs of equal ids count once, so that a tile of few segments costs little.
                fn runs(ids: &[i64]) -> impl Iterator<Item = i64> + Clone {
                    ids.chunk_by(|a, b| a == b).map(|run| run[0])
                }
                let query = at(query.ids(sequence.batch), sequence.query_start, rows);
                let key = at(key.ids(sequence.batch), sequence.key_start, cols);
                Cover::of_segments(runs(query), runs(key))
            }
            Mask::Array(array) => array.cover(sequence, head, rows, cols),
            Mask::And(masks) => match Cover::all(masks.iter().map(each)) {
                Cover::Some if self.spans_miss(sequence, &rows, &cols) => Cover::None,
                cover => cover,
            },
            Mask::Or(masks) => Cover::any(masks.iter().map(each)),
            Mask::Full | Mask::Causal { .. } | Mask::Window { .. } | Mask::ChunkedCausal { .. } => {
                self.cover_by_spans(sequence, &rows, &cols)
            }
        }
    }

    /// The cover of a tile by a primitive interval mask, from the spans of its first and last row.
    ///
    /// Let s be the starts and e the ends of the spans; neither decreases from row to row. A key is
    /// seen by every row iff s(i) ≤ j < e(i) for all of them, thus iff s(last) ≤ j < e(first). And
    /// since s(i + 1) ≤ e(i), the spans leave no gap between them: a key is seen by some row iff
    /// s(first) ≤ j < e(last).
    fn cover_by_spans(
        &self,
        sequence: &Sequence,
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Cover {
        let span = |i| self.row_span(sequence, i);
        let (Some(first), Some(last)) = (span(rows.start), span(rows.end - 1)) else {
            return Cover::Some; // sound for every mask
        };
        if last.start <= cols.start && cols.end <= first.end {
            Cover::All
        } else if overlap(&(first.start..last.end), cols).is_empty() {
            Cover::None
        } else {
            Cover::Some
        }
    }

    /// True where the mask has spans, and no span of these rows holds a key of `cols`. Each mask of an
    /// `And` may allow a part of a tile, and their parts still have no pair in common.
    fn spans_miss(&self, sequence: &Sequence, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        let span = |i| self.row_span(sequence, i);
        rows.clone().all(|i| span(i).is_some_and(|span| overlap(&span, cols).is_empty()))
    }

    /// Fails unless the mask, which lies `depth` below the root, fits arrays of these extents: batch
    /// elements, query heads, queries, keys.
    pub(crate) fn check(&self, depth: usize, extents: [usize; 4]) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::value("mask", format!("nested at most {MAX_DEPTH} deep"), "deeper"));
        }
        let [batch, query_heads, queries, keys] = extents;
        match self {
            Mask::ChunkedCausal { chunk: 0, .. } => {
                Err(Error::value("mask.chunk", "at least 1", 0))
            }
            Mask::Segments { query, key } => {
                query.check(&[batch, queries])?;
                key.check(&[batch, keys])
            }
            Mask::Array(array) => {
                let outer = |axis: usize, full: usize| match array.shape.get(axis) {
                    Some(1) => 1,
                    _ => full,
                };
                array.check(&[outer(0, batch), outer(1, query_heads), queries, keys])
            }
            Mask::And(masks) | Mask::Or(masks) => {
                masks.iter().try_for_each(|mask| mask.check(depth + 1, extents))
            }
            _ => Ok(()),
        }
    }

    /// The alignment of this node of the tree, if its kind has one.
    pub fn align_mut(&mut self) -> Option<&mut Align> {
        match self {
            Mask::Causal { align }
            | Mask::Window { align, .. }
            | Mask::ChunkedCausal { align, .. } => Some(align),
            _ => None,
        }
    }

    /// The keys that a query sees, in words: they complete the sentence "a query sees …".
    pub fn describe(&self) -> String {
        let from = |align: &Align| match align {
            Align::TopLeft => "counted from the first query and key",
            Align::BottomRight => "counted from the last query and key",
        };
        let list = |masks: &[Mask]| masks.iter().map(Mask::describe).collect::<Vec<_>>().join("; ");
        match self {
            Mask::Full => "every key".to_string(),
            Mask::Causal { align } => format!("the keys up to its own, {}", from(align)),
            Mask::Window { left, right, align } => {
                let end =
                    |end: &Option<usize>| end.map_or("all".to_string(), |end| end.to_string());
                let (left, right) = (end(left), end(right));
                format!("its own key, {left} before it and {right} after it, {}", from(align))
            }
            Mask::ChunkedCausal { chunk, align } => {
                format!("the keys up to its own in its chunk of {chunk}, {}", from(align))
            }
            Mask::Segments { .. } => "the keys of its own segment".to_string(),
            Mask::Array(_) => "the keys that an array allows".to_string(),
            Mask::And(masks) => format!("the keys that all of these allow: ({})", list(masks)),
            Mask::Or(masks) => format!("the keys that one of these allows: ({})", list(masks)),
        }
    }

    /// Visits every node of the tree, so that its arrays can be bound or listed.
    pub fn visit_mut(&mut self, visit: &mut impl FnMut(&mut Mask)) {
        visit(self);
        if let Mask::And(masks) | Mask::Or(masks) = self {
            masks.iter_mut().for_each(|mask| mask.visit_mut(visit));
        }
    }
}

/// i′: the key with which query `i` is aligned; negative where it lies before the first key.
fn aligned(sequence: &Sequence, align: Align, i: usize) -> i64 {
    match align {
        Align::TopLeft => i as i64,
        Align::BottomRight => i as i64 + sequence.keys as i64 - sequence.queries as i64,
    }
}

/// A window's reach or a chunk's length as a signed distance. No sequence has 2⁶² keys: all greater
/// distances do the same.
fn reach(distance: usize) -> i64 {
    distance.min(1 << 62) as i64
}

/// The keys that both ranges hold; an empty range where there is none.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
