//! Lazy attention's bias by distance, (E2), and the sums of its gradient, (E13): both in reverse, so
//! that along a row they lie as the keys do, and adding is a sweep over contiguous numbers.

use super::operands::{ByDistance, Operands};
use crate::mask::QueryHead;
use crate::workspace::Lists;
use etalon_problem::{Align, DistanceBias, Error, Sequence};
use std::ops::Range;

/// The pairs of a sequence that are within reach of the bias, and their places in a reversed row: distance d
/// at W − 1 − d.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// W, but no more than distances occur.
    pub width: usize,
    /// i′ − i.
    shift: isize,
}

impl Reach {
    /// W, or as many distances as the extents of the problem have.
    pub fn width(operands: &Operands<'_>, bias: DistanceBias) -> usize {
        let e = &operands.scores.extents;
        bias.width.min(e.queries.max(e.keys))
    }

    pub fn new(width: usize, bias: DistanceBias, sequence: &Sequence) -> Self {
        let shift = match bias.align {
            Align::TopLeft => 0,
            Align::BottomRight => sequence.keys as isize - sequence.queries as isize,
        };
        Reach { width, shift }
    }

    /// True if some pair of a tile is within reach.
    pub fn touches(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        let (first, end) = (rows.start as isize + self.shift, rows.end as isize + self.shift);
        // The least distance is that of the first row from the last key, the largest that of the others.
        first - (cols.end as isize - 1) < self.width as isize && end > cols.start as isize
    }

    /// The keys of `cols` that are within reach of query `i`, and where the number of the first of them
    /// lies.
    #[inline(always)]
    pub fn span(&self, i: usize, cols: &Range<usize>) -> (Range<usize>, usize) {
        let aligned = i as isize + self.shift;
        let farthest = aligned + 1 - self.width as isize;
        let start = farthest.max(cols.start as isize);
        let end = (aligned + 1).min(cols.end as isize);
        if start >= end {
            return (cols.start..cols.start, 0);
        }
        (start as usize..end as usize, (start - farthest) as usize)
    }
}

/// Terms that a bias adds to the scores of a block.
pub enum Near<'a> {
    Nothing,
    /// A number for each pair: these numbers end with those of the first row, those of the next row one number
    /// before, and so on.
    Rows(&'a [f32]),
    /// A number for some of the pairs.
    Some,
}

/// The bias of one head.
#[derive(Debug, Clone, Copy)]
pub struct Distances<'a> {
    pub reach: Reach,
    /// bias_d at W − 1 − d.
    reversed: &'a [f32],
    /// True if some bias is −∞: it hides the pairs at its distance.
    pub hides: bool,
}

impl Distances<'_> {
    /// The terms that the bias adds to some queries and the keys `cols`, in blocks of `height` rows.
    #[inline(always)]
    pub fn near(&self, rows: &Range<usize>, height: usize, cols: &Range<usize>) -> Near<'_> {
        let Reach { width, shift } = self.reach;
        if !self.reach.touches(rows, cols) {
            return Near::Nothing;
        }
        let aligned = rows.start as isize + shift;
        // The place of the number of the first pair; those of the next rows lie before it.
        let place = cols.start as isize + width as isize - 1 - aligned;
        if cols.end as isize - 1 <= aligned && place + 1 >= height as isize {
            Near::Rows(&self.reversed[..place as usize + cols.len()])
        } else {
            Near::Some
        }
    }

    /// Adds the bias of query `i` to its scores with the keys `cols`.
    #[inline(always)]
    pub fn add_row(&self, i: usize, cols: Range<usize>, row: &mut [f32]) {
        let (keys, place) = self.reach.span(i, &cols);
        let row = &mut row[keys.start - cols.start..keys.end - cols.start];
        let bias = &self.reversed[place..place + row.len()];
        row.iter_mut().zip(bias).for_each(|(s, bias)| *s += bias); // (E2)
    }
}

/// The bias of all heads.
#[derive(Debug, Clone, Copy)]
pub struct Table<'l> {
    bias: DistanceBias,
    width: usize,
    reversed: &'l [f32],
    hides: bool,
}

impl<'l> Table<'l> {
    /// The table of numbers by distance, if there are such: of the bias, or of its direction.
    pub fn new(
        operands: &Operands<'_>,
        numbers: Option<ByDistance<'_>>,
        lists: &'l Lists,
    ) -> Result<Option<Self>, Error> {
        let Some((bias, values)) = numbers else { return Ok(None) };
        let width = Reach::width(operands, bias);
        let reversed = lists.repeat(values.nrows() * width, 0.0, "the bias by distance")?;
        for (row, values) in reversed.chunks_mut(width.max(1)).zip(values.outer_iter()) {
            row.iter_mut().rev().zip(values).for_each(|(to, x)| *to = *x);
        }
        let hides = reversed.contains(&f32::NEG_INFINITY);
        Ok(Some(Table { bias, width, reversed, hides }))
    }

    /// Bytes of its list.
    pub fn bytes(operands: &Operands<'_>, numbers: Option<ByDistance<'_>>) -> usize {
        let Some((bias, values)) = numbers else { return 0 };
        let len = values.nrows().saturating_mul(Reach::width(operands, bias));
        len.saturating_mul(size_of::<f32>())
    }

    /// The bias of one head in a sequence.
    pub fn of(&self, QueryHead { sequence, head }: QueryHead<'_>) -> Distances<'l> {
        Distances {
            reach: Reach::new(self.width, self.bias, sequence),
            reversed: &self.reversed[head * self.width..][..self.width],
            hides: self.hides,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_hold_the_pairs_within_reach() {
        let sequence =
            |queries, keys| Sequence { batch: 0, query_start: 3, queries, key_start: 1, keys };
        for (sequence, width, align) in [
            (sequence(7, 7), 3, Align::BottomRight),
            (sequence(4, 9), 5, Align::BottomRight),
            (sequence(9, 4), 6, Align::BottomRight),
            (sequence(4, 9), 9, Align::TopLeft),
            (sequence(9, 4), 1, Align::TopLeft),
        ] {
            let bias = DistanceBias { width, align };
            let reach = Reach::new(width, bias, &sequence);
            for start in 0..sequence.keys {
                let cols = start..sequence.keys.min(start + 3);
                let mut touched = false;
                for i in 0..sequence.queries {
                    let (keys, place) = reach.span(i, &cols);
                    for j in cols.clone() {
                        let d = bias.distance(&sequence, i, j);
                        assert_eq!(d.is_some(), keys.contains(&j), "{sequence:?} {bias:?} {i} {j}");
                        if let Some(d) = d {
                            assert_eq!(width - 1 - d, place + j - keys.start);
                        }
                    }
                    assert_eq!(reach.touches(&(i..i + 1), &cols), !keys.is_empty());
                    touched |= !keys.is_empty();
                }
                assert_eq!(reach.touches(&(0..sequence.queries), &cols), touched);
            }
        }
    }
}
