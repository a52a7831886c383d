//! Masks: which query may see which key.
//!
//! [`Mask::allows`] is the definition. [`Mask::cover`] says the same of a whole tile and serves
//! kernels that skip tiles; `tests/cover.rs` holds the two against each other.

use crate::{Error, Sequence};
use std::ops::Range;
use std::sync::Arc;

/// How the diagonal of a mask lies when a sequence has n queries and m ≠ n keys.
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

/// An array inside a problem. In a problem file only its name stands; its elements are the tensor
/// of that name beside the file, joined by [`crate::Problem::bind`].
#[derive(Debug, Clone, PartialEq)]
pub struct NamedArray<T> {
    /// The tensor's name in files.
    pub name: String,
    /// Its shape; empty until the array is bound.
    pub shape: Vec<usize>,
    /// Its elements in row-major order.
    pub data: Arc<[T]>,
}

impl<T> NamedArray<T> {
    /// An array with its elements in row-major order.
    pub fn new(name: impl Into<String>, shape: &[usize], data: impl Into<Arc<[T]>>) -> Self {
        NamedArray { name: name.into(), shape: shape.to_vec(), data: data.into() }
    }

    /// Only a name, as it stands in a problem file.
    pub fn unbound(name: impl Into<String>) -> Self {
        NamedArray { name: name.into(), shape: Vec::new(), data: Vec::new().into() }
    }

    fn check(&self, expected: &[usize]) -> Result<(), Error> {
        if self.shape.is_empty() {
            return Err(Error::Missing {
                operand: self.name.clone(),
                reason: "the mask names it".to_string(),
            });
        }
        Error::expect_shape(&self.name, expected, &self.shape)?;
        if self.shape.iter().try_fold(1usize, |n, &e| n.checked_mul(e)) != Some(self.data.len()) {
            return Err(Error::value(
                self.name.as_str(),
                format!("an array with the elements of shape {:?}", self.shape),
                format!("{} elements", self.data.len()),
            ));
        }
        Ok(())
    }
}

impl NamedArray<i64> {
    /// The ids of one batch element. The problem must have passed its check.
    pub fn ids(&self, batch: usize) -> &[i64] {
        let length = self.shape[1];
        &self.data[batch * length..(batch + 1) * length]
    }
}

impl NamedArray<bool> {
    /// What query `i` of `sequence` may see of the keys of the arrays, in query head `head`. The
    /// problem must have passed its check.
    pub fn row(&self, sequence: &Sequence, head: usize, i: usize) -> &[bool] {
        let [batches, heads, queries, keys] = [0, 1, 2, 3].map(|axis| self.shape[axis]);
        let batch = if batches == 1 { 0 } else { sequence.batch };
        let head = if heads == 1 { 0 } else { head };
        let start = ((batch * heads + head) * queries + sequence.query_start + i) * keys;
        &self.data[start..start + keys]
    }

    /// What [`Mask::Array`] allows of the tile `rows` × `cols` of a sequence and head. The problem must
    /// have passed its check.
    pub fn cover(
        &self,
        sequence: &Sequence,
        head: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Cover {
        let cols = sequence.key_start + cols.start..sequence.key_start + cols.end;
        Cover::of_parts(rows.map(|i| of(&self.row(sequence, head, i)[cols.clone()])))
    }
}

/// Which query may see which key. One value, a tree.
///
/// With i the query and j the key, both counted within their sequence of n queries and m keys,
/// and i′ the query aligned by [`Align`]:
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
        /// Where the diagonal lies.
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
        /// Where the diagonal lies.
        #[cfg_attr(feature = "serde", serde(default))]
        align: Align,
    },
    /// j ≤ i′, and i′ and j lie in the same chunk: ⌊i′/chunk⌋ = ⌊j/chunk⌋.
    ChunkedCausal {
        /// Keys in a chunk, at least 1.
        chunk: usize,
        /// Where the diagonal lies.
        #[cfg_attr(feature = "serde", serde(default))]
        align: Align,
    },
    /// Equal ids see each other; a negative id is padding and sees nothing. The ids lie as the
    /// rows of q and k do: `[batch, queries]` and `[batch, keys]`.
    Segments {
        /// The id of every query.
        query: NamedArray<i64>,
        /// The id of every key.
        key: NamedArray<i64>,
    },
    /// True where the pair is allowed; `[batch or 1, query_heads or 1, queries, keys]`, laid as
    /// the rows of q and k are.
    Array(NamedArray<bool>),
    /// Allowed by every one of these (by an empty list: always).
    And(Vec<Mask>),
    /// Allowed by at least one of these (by an empty list: never).
    Or(Vec<Mask>),
}

/// What a mask allows of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cover {
    /// No pair of the tile is allowed.
    None,
    /// Some pairs may be allowed and some forbidden.
    Some,
    /// Every pair of the tile is allowed.
    All,
}

impl Cover {
    /// What masks allow of a tile together, as far as it follows from what each allows: of none, all.
    pub fn all(covers: impl IntoIterator<Item = Cover>) -> Cover {
        let mut all = Cover::All;
        for cover in covers {
            match cover {
                Cover::None => return Cover::None,
                Cover::Some => all = Cover::Some,
                Cover::All => {}
            }
        }
        all
    }

    /// What at least one of these masks allows of a tile, as far as it follows from what each allows:
    /// of none, nothing.
    pub fn any(covers: impl IntoIterator<Item = Cover>) -> Cover {
        let mut any = Cover::None;
        for cover in covers {
            match cover {
                Cover::All => return Cover::All,
                Cover::Some => any = Cover::Some,
                Cover::None => {}
            }
        }
        any
    }

    /// What is allowed of a tile that is made of these parts.
    pub fn of_parts(parts: impl IntoIterator<Item = Cover>) -> Cover {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Cover::None };
        if first != Cover::Some && parts.all(|part| part == first) { first } else { Cover::Some }
    }

    /// What [`Mask::Segments`] allows of a tile whose queries and keys have these ids. An id may be
    /// given more than once, or once for all that have it.
    pub fn of_segments(
        query: impl Iterator<Item = i64>,
        key: impl Iterator<Item = i64> + Clone,
    ) -> Cover {
        let (mut allowed, mut forbidden) = (false, false);
        for query in query {
            for key in key.clone() {
                let same = query >= 0 && query == key;
                allowed |= same;
                forbidden |= !same;
                if allowed && forbidden {
                    return Cover::Some;
                }
            }
        }
        if allowed { Cover::All } else { Cover::None }
    }
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

    /// Whether query `i` of `sequence` may see its key `j` in query head `head`.
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

    /// What the mask allows of the tile `rows` × `cols` (ranges within the sequence). Exact for
    /// the primitive masks; for `And` and `Or` sound: never `None` over an allowed pair, never
    /// `All` over a forbidden one. An empty tile is `None`.
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
        match self {
            Mask::Full => Cover::All,
            Mask::Causal { align } => cover_band(sequence, *align, rows, cols, None, Some(0)),
            Mask::Window { left, right, align } => {
                cover_band(sequence, *align, rows, cols, *left, *right)
            }
            Mask::ChunkedCausal { chunk, align } => {
                cover_chunks(sequence, *align, rows, cols, *chunk)
            }
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
            Mask::And(masks) => Cover::all(
                masks.iter().map(|mask| mask.cover(sequence, head, rows.clone(), cols.clone())),
            ),
            Mask::Or(masks) => Cover::any(
                masks.iter().map(|mask| mask.cover(sequence, head, rows.clone(), cols.clone())),
            ),
        }
    }

    /// Fails unless the mask fits arrays of these extents.
    pub(crate) fn check(
        &self,
        batch: usize,
        query_heads: usize,
        queries: usize,
        keys: usize,
    ) -> Result<(), Error> {
        self.check_depth(0)?;
        self.try_for_each(&mut |mask| match mask {
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
            _ => Ok(()),
        })
    }

    fn check_depth(&self, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::value("mask", format!("nested at most {MAX_DEPTH} deep"), "deeper"));
        }
        match self {
            Mask::And(masks) | Mask::Or(masks) => {
                masks.iter().try_for_each(|mask| mask.check_depth(depth + 1))
            }
            _ => Ok(()),
        }
    }

    fn try_for_each(
        &self,
        visit: &mut impl FnMut(&Mask) -> Result<(), Error>,
    ) -> Result<(), Error> {
        visit(self)?;
        match self {
            Mask::And(masks) | Mask::Or(masks) => {
                masks.iter().try_for_each(|mask| mask.try_for_each(visit))
            }
            _ => Ok(()),
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

/// A window's reach as a signed distance: beyond 2⁶² every reach is the same.
fn reach(distance: usize) -> i64 {
    distance.min(1 << 62) as i64
}

/// The tile of a band left ≤ j − i′ ≤ right: the distances in it run without a gap.
fn cover_band(
    sequence: &Sequence,
    align: Align,
    rows: Range<usize>,
    cols: Range<usize>,
    left: Option<usize>,
    right: Option<usize>,
) -> Cover {
    let nearest = cols.start as i64 - aligned(sequence, align, rows.end - 1);
    let farthest = cols.end as i64 - 1 - aligned(sequence, align, rows.start);
    let low = left.map_or(i64::MIN, |left| -reach(left));
    let high = right.map_or(i64::MAX, reach);
    if farthest < low || nearest > high {
        Cover::None
    } else if nearest >= low && farthest <= high {
        Cover::All
    } else {
        Cover::Some
    }
}

/// In each chunk the last query sees most: it decides whether the tile holds an allowed pair.
fn cover_chunks(
    sequence: &Sequence,
    align: Align,
    rows: Range<usize>,
    cols: Range<usize>,
    chunk: usize,
) -> Cover {
    let chunk = reach(chunk);
    let (first, last) =
        (aligned(sequence, align, rows.start), aligned(sequence, align, rows.end - 1));
    let (left, right) = (cols.start as i64, cols.end as i64 - 1);
    if right <= first && left.div_euclid(chunk) == last.div_euclid(chunk) {
        return Cover::All;
    }
    let chunks = left.div_euclid(chunk).max(first.div_euclid(chunk))
        ..=right.div_euclid(chunk).min(last.div_euclid(chunk));
    for number in chunks {
        let start = number.saturating_mul(chunk);
        let bottom = last.min(start.saturating_add(chunk - 1));
        if left.max(start) <= right.min(bottom) {
            return Cover::Some;
        }
    }
    Cover::None
}

fn of(row: &[bool]) -> Cover {
    match (row.contains(&true), row.contains(&false)) {
        (true, true) => Cover::Some,
        (true, false) => Cover::All,
        (false, _) => Cover::None,
    }
}
