//! Visible pairs of a query and a key, and the terms that are added to their scores.

use super::distances::{Distances, Near, Reach, Table};
use super::operands::Operands;
use crate::element::Tensor;
use crate::mask::{PreparedMask, QueryHead};
use crate::tiles::{key_rows, query_rows};
use crate::workspace::Lists;
use etalon_problem::{Cover, Error, Scores};
use ndarray::{Ix2, Ix4, s};
use std::ops::Range;

/// Terms that are added to scores.
#[derive(Clone, Copy)]
pub enum Raise<'a> {
    /// A number for each pair, `[n, m]`, (F2).
    Pairs(Tensor<'a, Ix2>),
    /// A number for each distance, (E2).
    Distances(Distances<'a>),
}

impl Raise<'_> {
    /// True if a score of a tile may be raised.
    fn touches(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        match self {
            Raise::Pairs(_) => true,
            Raise::Distances(bias) => bias.reach.touches(rows, cols),
        }
    }

    /// The terms added to some queries and the keys `cols`, in blocks of `height` rows.
    #[inline(always)]
    pub fn near(&self, rows: &Range<usize>, height: usize, cols: &Range<usize>) -> Near<'_> {
        match self {
            Raise::Pairs(_) => Near::Some,
            Raise::Distances(bias) => bias.near(rows, height, cols),
        }
    }

    /// Adds what belongs to query `i` and the keys `cols`.
    #[inline(always)]
    pub fn add_row(&self, i: usize, cols: Range<usize>, row: &mut [f32]) {
        match self {
            Raise::Pairs(bias) => bias.add_row(i, cols, row),
            Raise::Distances(bias) => bias.add_row(i, cols, row),
        }
    }
}

/// The mask and the bias by distance, as kernels read them.
pub struct Prepared<'l> {
    pub mask: PreparedMask<'l>,
    distances: Option<Table<'l>>,
    dd_distances: Option<Table<'l>>,
}

impl<'l> Prepared<'l> {
    /// In memory for [`Prepared::bytes`].
    pub fn new(operands: &Operands<'l>, lists: &'l Lists) -> Result<Self, Error> {
        let mask = PreparedMask::new(&operands.scores.mask, lists)?;
        let table = |numbers| Table::new(operands, numbers, lists);
        let [distances, dd_distances] = [operands.distances, operands.dd_distances].map(table);
        Ok(Prepared { mask, distances: distances?, dd_distances: dd_distances? })
    }

    /// Bytes of its lists.
    pub fn bytes(operands: &Operands<'_>) -> usize {
        let tables = [operands.distances, operands.dd_distances];
        let tables = tables.map(|numbers| Table::bytes(operands, numbers));
        let mask = PreparedMask::bytes(&operands.scores.mask);
        mask.saturating_add(tables[0]).saturating_add(tables[1])
    }

    /// The direction in which what is added to the scores moves.
    pub fn direction<'a>(
        &'a self,
        ddbias: Option<Tensor<'a, Ix4>>,
        of: QueryHead<'a>,
    ) -> Option<Raise<'a>> {
        raise(ddbias, self.dd_distances, of)
    }
}

/// The visible pairs of one sequence and query head, and the scale, softcap and bias of their scores.
#[derive(Clone, Copy)]
pub struct ScoreRule<'a> {
    /// σ.
    pub scale: f32,
    /// c.
    pub softcap: Option<f32>,
    /// The mask.
    mask: &'a PreparedMask<'a>,
    /// The bias of this sequence and head.
    bias: Option<Raise<'a>>,
    /// The sequence and the query head.
    pub of: QueryHead<'a>,
}

impl<'a> ScoreRule<'a> {
    /// The rule of a sequence and head.
    pub fn new(
        scores: &'a Scores,
        prepared: &'a Prepared<'a>,
        bias: Option<Tensor<'a, Ix4>>,
        of: QueryHead<'a>,
    ) -> Self {
        ScoreRule {
            scale: scores.scale() as f32,
            softcap: scores.softcap.map(|cap| cap as f32),
            mask: &prepared.mask,
            bias: raise(bias, prepared.distances, of),
            of,
        }
    }

    /// The bias that is added to the scores of a tile, if it touches any.
    pub fn bias(&self, rows: &Range<usize>, cols: &Range<usize>) -> Option<Raise<'a>> {
        self.bias.filter(|bias| bias.touches(rows, cols))
    }

    /// The pairs within reach of a bias by distance, if there is one.
    pub fn reach(&self) -> Option<Reach> {
        match self.bias {
            Some(Raise::Distances(bias)) => Some(bias.reach),
            _ => None,
        }
    }

    /// True if a bias by distance may hide pairs that the mask allows: then visible pairs are known only pair
    /// by pair.
    pub fn hides(&self) -> bool {
        matches!(self.bias, Some(Raise::Distances(bias)) if bias.hides)
    }

    /// The mask's cover of a tile.
    pub fn cover(&self, rows: Range<usize>, cols: Range<usize>) -> Cover {
        self.mask.cover(self.of, rows, cols)
    }

    /// 1 for each key of `cols` that query `i` sees, and otherwise 0.
    pub fn visible_row(&self, i: usize, cols: Range<usize>, row: &mut [u8]) {
        self.mask.visible_row(self.of, i, cols, row);
    }
}

/// Numbers of one sequence and head, by pair or by distance.
fn raise<'a>(
    pairs: Option<Tensor<'a, Ix4>>,
    distances: Option<Table<'a>>,
    of: QueryHead<'_>,
) -> Option<Raise<'a>> {
    let distances = distances.map(|table| Raise::Distances(table.of(of)));
    pairs.map(|pairs| Raise::Pairs(pairs_of(pairs, of))).or(distances)
}

/// The pairs of one sequence and head, `[n, m]`, of a tensor with the outer axes of a bias.
fn pairs_of<'a>(bias: Tensor<'a, Ix4>, of: QueryHead<'_>) -> Tensor<'a, Ix2> {
    let QueryHead { sequence, head } = of;
    let pick = |axis: usize, index: usize| if bias.shape()[axis] == 1 { 0 } else { index };
    let (batch, head) = (pick(0, sequence.batch), pick(1, head));
    bias.slice(s![batch, head, query_rows(sequence), key_rows(sequence)])
}
