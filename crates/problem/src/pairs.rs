//! Number of pairs that a mask allows.

use crate::{Cover, Error, Extents, Mask, Scores, Sequence, Sequences};
use std::collections::BTreeMap;
use std::ops::Range;

/// The most steps that are taken to count pairs: about a second.
const MOST: u64 = 1 << 28;

/// Queries and keys of a tile that is looked at as a whole.
const TILE: usize = 64;

/// Cost of a tile that is looked at as a whole, in steps: a row, or a single pair, is one.
const WHOLE: u64 = 16;

/// As many flags of an array are looked at in a step.
const FLAGS: u64 = 4;

/// The steps that are left.
struct Steps(u64);

impl Steps {
    /// Takes some; fails where there are no more.
    fn take(&mut self, steps: u64) -> Result<(), Error> {
        let left = self.0.checked_sub(steps);
        let what = || "counting the visible pairs".to_string();
        self.0 = left.ok_or_else(|| Error::Work { what: what(), steps: MOST })?;
        Ok(())
    }
}

impl Scores {
    /// The number of pairs that the mask allows, over all sequences and query heads: an ideal kernel
    /// computes only these. The problem must have passed its check.
    ///
    /// Masks without arrays are counted row by row, others tile by tile; heads and sequences that see
    /// the same are counted once. Fails where that is too much work, or the number too large.
    pub fn visible_pairs(&self) -> Result<u64, Error> {
        let too_many = || {
            let found = format!("those of {:?}", self.extents);
            Error::value("number of visible pairs", "below 2⁶⁴", found)
        };
        let (by_rows, mut steps) = (!self.mask.has_arrays(), Steps(MOST));
        let heads = self.extents.query_heads;
        if heads == 0 {
            return Ok(0); // of however many sequences
        }
        let (distinct, times) = if self.mask.differs_by_head() { (heads, 1) } else { (1, heads) };
        let mut pairs = 0u64;
        for (sequence, alike) in self.alike(by_rows) {
            for head in 0..distinct {
                let seen = match by_rows {
                    true => self.count_by_rows(&sequence, &mut steps)?,
                    false => self.count_by_tiles(&sequence, head, &mut steps)?,
                };
                let seen = u128::from(seen) * u128::from(alike) * times as u128;
                let seen = u64::try_from(seen).ok().and_then(|seen| pairs.checked_add(seen));
                pairs = seen.ok_or_else(too_many)?;
            }
        }
        Ok(pairs)
    }

    /// The sequences, each with the number of those that see as many pairs. Of a dense batch, which may
    /// be of any size, no list is made.
    fn alike(&self, by_rows: bool) -> Box<dyn Iterator<Item = (Sequence, u64)> + '_> {
        let Extents { batch, queries, keys, .. } = self.extents;
        if self.sequences == Sequences::Dense {
            let (distinct, alike) = if by_rows { (batch.min(1), batch as u64) } else { (batch, 1) };
            let distinct = if queries == 0 { 0 } else { distinct };
            let dense =
                move |batch| Sequence { batch, query_start: 0, queries, key_start: 0, keys };
            return Box::new((0..distinct).map(move |batch| (dense(batch), alike)));
        }
        if !by_rows {
            return Box::new(self.sequences().into_iter().map(|sequence| (sequence, 1)));
        }
        let mut groups = BTreeMap::new();
        for sequence in self.sequences() {
            let lengths = (sequence.queries, sequence.keys);
            groups.entry(lengths).or_insert((sequence, 0)).1 += 1;
        }
        Box::new(groups.into_values())
    }

    /// The pairs of one sequence and head under a mask without arrays.
    fn count_by_rows(&self, sequence: &Sequence, steps: &mut Steps) -> Result<u64, Error> {
        steps.take((sequence.queries as u64).saturating_mul(self.mask.node_count()))?;
        // Most masks have one span in a row, which needs no list.
        let seen = |i| match self.mask.row_span(sequence, i) {
            Some(span) => span.len(),
            None => self.mask.spans_of_row(sequence, i).iter().map(Range::len).sum(),
        };
        let all = (0..sequence.queries).map(|i| seen(i) as u128).sum::<u128>();
        u64::try_from(all).map_err(|_| Error::value("number of visible pairs", "below 2⁶⁴", all))
    }

    /// The pairs of one sequence and head. Looks at single pairs only in tiles of which the mask allows
    /// a part.
    fn count_by_tiles(
        &self,
        sequence: &Sequence,
        head: usize,
        steps: &mut Steps,
    ) -> Result<u64, Error> {
        let tiles = |len: usize| (0..len).step_by(TILE).map(move |at| at..len.min(at + TILE));
        let (mut pairs, nodes, arrays) = (0, self.mask.node_count(), self.mask.arrays());
        steps.take(1)?;
        for rows in tiles(sequence.queries) {
            steps.take(1)?;
            for cols in tiles(sequence.keys) {
                let all = (rows.len() * cols.len()) as u64;
                steps.take(nodes * WHOLE + arrays * all / FLAGS)?;
                pairs += match self.mask.cover(sequence, head, rows.clone(), cols.clone()) {
                    Cover::None => 0,
                    Cover::All => all,
                    Cover::Some => {
                        steps.take(nodes * all)?;
                        let seen = |i| {
                            let allowed = |&j: &usize| self.mask.allows(sequence, head, i, j);
                            cols.clone().filter(allowed).count() as u64
                        };
                        rows.clone().map(seen).sum()
                    }
                };
            }
        }
        Ok(pairs)
    }
}

impl Mask {
    /// The masks of the tree.
    fn node_count(&self) -> u64 {
        match self {
            Mask::And(masks) | Mask::Or(masks) => {
                1 + masks.iter().map(Mask::node_count).sum::<u64>()
            }
            _ => 1,
        }
    }

    /// The arrays of flags of the tree.
    fn arrays(&self) -> u64 {
        match self {
            Mask::And(masks) | Mask::Or(masks) => masks.iter().map(Mask::arrays).sum(),
            mask => u64::from(matches!(mask, Mask::Array(_))),
        }
    }

    /// True where an array is part of it.
    fn has_arrays(&self) -> bool {
        match self {
            Mask::Segments { .. } | Mask::Array(_) => true,
            Mask::And(masks) | Mask::Or(masks) => masks.iter().any(Mask::has_arrays),
            _ => false,
        }
    }

    /// True where it may allow one head a pair that it forbids another.
    fn differs_by_head(&self) -> bool {
        match self {
            Mask::Array(array) => array.shape.get(1) != Some(&1),
            Mask::And(masks) | Mask::Or(masks) => masks.iter().any(Mask::differs_by_head),
            _ => false,
        }
    }

    /// The keys that a query sees under a mask without arrays, as ranges that ascend and do not overlap.
    fn spans_of_row(&self, sequence: &Sequence, i: usize) -> Vec<Range<usize>> {
        match self {
            Mask::And(masks) => masks.iter().fold(all(sequence), |spans, mask| {
                overlaps(&spans, &mask.spans_of_row(sequence, i))
            }),
            Mask::Or(masks) => {
                let mut spans: Vec<Range<usize>> =
                    masks.iter().flat_map(|mask| mask.spans_of_row(sequence, i)).collect();
                spans.sort_unstable_by_key(|span| span.start);
                let mut merged: Vec<Range<usize>> = Vec::new();
                for span in spans {
                    match merged.last_mut().filter(|last| span.start <= last.end) {
                        Some(last) => last.end = last.end.max(span.end),
                        None => merged.push(span),
                    }
                }
                merged
            }
            mask => {
                mask.row_span(sequence, i).into_iter().filter(|span| !span.is_empty()).collect()
            }
        }
    }
}

/// Every key of a sequence.
fn all(sequence: &Sequence) -> Vec<Range<usize>> {
    std::iter::once(0..sequence.keys).filter(|span| !span.is_empty()).collect()
}

/// Intersection of two ascending lists of ranges.
fn overlaps(a: &[Range<usize>], b: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut at, mut common) = ([0, 0], Vec::new());
    while let (Some(x), Some(y)) = (a.get(at[0]), b.get(at[1])) {
        let both = x.start.max(y.start)..x.end.min(y.end);
        if !both.is_empty() {
            common.push(both);
        }
        at[usize::from(y.end < x.end)] += 1;
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NamedArray;

    #[test]
    fn visible_pairs_counts_the_pairs_that_the_mask_allows() {
        // 150 and 200 are whole tiles and a rest; two heads, two sequences of their own lengths.
        let extents =
            Extents { batch: 2, query_heads: 2, key_heads: 1, queries: 150, keys: 200, dim: 8 };
        let masks = [
            Mask::Full,
            Mask::causal(),
            Mask::window(70, 3),
            Mask::And(vec![Mask::causal(), Mask::window(70, 3)]),
            Mask::Or(vec![]),
            Mask::Or(vec![Mask::window(5, 0), Mask::Causal { align: crate::Align::TopLeft }]),
        ];
        for mask in masks {
            let mut scores = Scores::new(extents);
            scores.mask = mask;
            scores.sequences = Sequences::Lengths { query: vec![150, 9], key: vec![130, 200] };
            let mut expected = 0;
            for s in scores.sequences() {
                for i in 0..s.queries {
                    let seen = (0..s.keys).filter(|&j| scores.mask.allows(&s, 0, i, j)).count();
                    expected += 2 * seen as u64;
                }
            }
            assert_eq!(scores.visible_pairs(), Ok(expected), "{:?}", scores.mask);
        }
    }

    fn dense(batch: usize, queries: usize, keys: usize, mask: Mask) -> Scores {
        let extents = Extents { batch, query_heads: 32, key_heads: 1, queries, keys, dim: 1 };
        Scores { mask, ..Scores::new(extents) }
    }

    #[test]
    fn long_sequences_and_many_of_them_are_counted_soon() {
        // A million queries and keys of 32 heads, under a mask that has no span of its own.
        let million = 1 << 20;
        let mask = Mask::Or(vec![Mask::window(9, 0), Mask::window(4, 0)]);
        let pairs = 32 * (10 * million as u64 - 45);
        assert_eq!(dense(1, million, million, mask.clone()).visible_pairs(), Ok(pairs));
        // As many batch elements as nobody lists.
        let seen = dense(1 << 40, 1, 3, Mask::Full).visible_pairs();
        assert_eq!(seen, Ok((3 * 32) << 40));
        assert_eq!(dense(1 << 58, 0, 3, mask).visible_pairs(), Ok(0));
        // Without heads nobody looks at their flags, either.
        let flags = NamedArray::new("flags", &[1, 0, 2, 2], vec![]);
        let mut scores = dense(1 << 58, 2, 2, Mask::Array(flags));
        scores.extents.query_heads = 0;
        assert_eq!(scores.visible_pairs(), Ok(0));
    }

    #[test]
    fn flags_that_are_looked_at_are_steps() {
        let flags = NamedArray::new("flags", &[1, 1, 64, 64], vec![true; 4096]);
        let scores = dense(1, 64, 64, Mask::Array(flags));
        let mut steps = Steps(MOST);
        let sequence = scores.sequences()[0];
        assert_eq!(scores.count_by_tiles(&sequence, 0, &mut steps), Ok(4096));
        assert!(MOST - steps.0 >= 4096 / FLAGS);
    }

    #[test]
    fn what_takes_too_long_to_count_is_an_error() {
        let scores = dense(1, 1 << 40, 1, Mask::causal());
        assert!(matches!(scores.visible_pairs(), Err(Error::Work { .. })));
        let scores = dense(1 << 40, 1 << 20, 1 << 20, Mask::Full);
        let error = scores.visible_pairs().unwrap_err().to_string();
        assert!(error.starts_with("`number of visible pairs` must be below 2⁶⁴"), "{error}");
    }
}
