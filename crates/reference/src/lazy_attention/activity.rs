//! Which pairs are active, which tiles hold one, and where rounding may decide otherwise.

use super::Inputs;
use super::row::{Operands, Row};
use crate::heads::each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::tensor::Output;
use etalon_problem::{Blocking, Error, LazyAttention, Pass, Sequence};
use ndarray::Array4;

/// A visible pair, by its places in the arrays, and what decides whether it is active.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair<T> {
    /// Batch element.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Row of q.
    pub query: usize,
    /// Row of k.
    pub key: usize,
    /// P_ij
    pub weight: T,
    /// τ/n_i
    pub offset: T,
}

/// Whether each pair is active, (E5): `[B, Hq, N, M]`. One that is not visible is
/// not.
pub fn active_pairs<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Array4<bool>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    let [batch, heads, queries] = problem.scores.row_shape();
    let shape = [batch, heads, queries, problem.scores.extents.keys];
    let mut pairs = Output::new("activity", &shape, false)?;
    let operands = Operands::new(problem, inputs, None)?;
    each_head(&problem.scores, [&mut pairs], [], |sequence, head, [mut pairs], []| {
        let (head, mut row) = (operands.head(sequence, head), Row::default());
        for i in 0..sequence.queries {
            head.row(i, &mut row);
            for (_, j) in row.active_keys() {
                pairs.row(i)[sequence.key_start + j] = true;
            }
        }
    });
    pairs.finish()
}

/// Whether each tile holds an active pair: `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`. Tiles lie on the
/// arrays, those of packed sequences across the sequences.
pub fn activity<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    tile: Blocking,
) -> Result<Array4<bool>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    let mut tiles = TileMap::new(problem, tile)?;
    let operands = Operands::new(problem, inputs, None)?;
    let start = |sequence: &Sequence, head| TilesOfHead::new(tile, sequence, head);
    let parts = operands.walk(start, |tiles, i, row| tiles.add(i, row));
    parts.iter().for_each(|part| tiles.add(part));
    tiles.active()
}

/// What is known of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tile {
    /// It has no visible pair.
    Unseen,
    /// It has a visible pair, and none that is active.
    Idle,
    /// It has an active pair.
    Active,
}

/// The tiles of a problem.
pub(super) struct TileMap {
    shape: [usize; 4],
    tiles: Output<Tile>,
}

impl TileMap {
    pub fn new(problem: &LazyAttention, tile: Blocking) -> Result<Self, Error> {
        tile.check()?;
        let [batch, heads, queries] = problem.scores.row_shape();
        let keys = problem.scores.extents.keys;
        let shape = [batch, heads, queries.div_ceil(tile.queries), keys.div_ceil(tile.keys)];
        Ok(TileMap { shape, tiles: Output::new("tile activity", &shape, Tile::Unseen)? })
    }

    pub fn add(&mut self, part: &TilesOfHead) {
        let [_, heads, rows, cols] = self.shape;
        for &(row, col, found) in &part.seen {
            let at = ((part.batch * heads + part.head) * rows + row) * cols + col;
            let tile = &mut self.tiles.elements()[at];
            *tile = found.max(*tile);
        }
    }

    /// How many tiles have an active pair, and how many a visible one.
    pub fn count(&mut self) -> (usize, usize) {
        let tiles = self.tiles.elements();
        let count = |least| tiles.iter().filter(|&&tile| tile >= least).count();
        (count(Tile::Active), count(Tile::Idle))
    }

    fn active(mut self) -> Result<Array4<bool>, Error> {
        let mut active = Output::new("activity", &self.shape, false)?;
        let tiles = active.elements().iter_mut().zip(self.tiles.elements());
        tiles.for_each(|(active, tile)| *active = *tile == Tile::Active);
        active.finish()
    }
}

/// The tiles that one query head sees in one sequence.
pub(super) struct TilesOfHead {
    tile: Blocking,
    batch: usize,
    head: usize,
    query_start: usize,
    key_start: usize,
    /// Row and column of each tile with a visible pair, and what it is; ascending.
    seen: Vec<(usize, usize, Tile)>,
    /// Where the present row of tiles begins in `seen`.
    row_start: usize,
}

impl TilesOfHead {
    pub fn new(tile: Blocking, sequence: &Sequence, head: usize) -> Self {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        TilesOfHead { tile, batch, head, query_start, key_start, seen: Vec::new(), row_start: 0 }
    }

    /// Adds row `i`; rows come in their order.
    pub fn add<T: Real>(&mut self, i: usize, row: &Row<T>) {
        let tile_row = (self.query_start + i) / self.tile.queries;
        if self.seen.last().is_some_and(|last| last.0 != tile_row) {
            self.row_start = self.seen.len();
        }
        for (&j, &active) in row.softmax.keys.iter().zip(&row.active) {
            let tile_col = (self.key_start + j) / self.tile.keys;
            let found = if active { Tile::Active } else { Tile::Idle };
            let present = &mut self.seen[self.row_start..];
            match present.binary_search_by_key(&tile_col, |tile| tile.1) {
                Ok(at) => present[at].2 = found.max(present[at].2),
                Err(at) => self.seen.insert(self.row_start + at, (tile_row, tile_col, found)),
            }
        }
    }
}

/// The visible pairs whose activity an error of P_ij + τ/n_i up to `bound` may change:
/// |P_ij + τ/n_i| ≤ bound, or not comparable. They come in the order of the arrays of each
/// sequence.
///
/// A relative error c of both terms is `|pair| c * (pair.weight + pair.offset.abs())`.
pub fn ambiguous<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    bound: impl Fn(&Pair<T>) -> T + Sync,
) -> Result<Vec<Pair<T>>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    let operands = Operands::new(problem, inputs, None)?;
    let start = |sequence: &Sequence, head| (*sequence, head, Vec::new());
    let parts = operands.walk(start, |(sequence, head, pairs), i, row| {
        for (&j, &weight) in row.softmax.keys.iter().zip(&row.softmax.p) {
            let pair = Pair {
                batch: sequence.batch,
                head: *head,
                query: sequence.query_start + i,
                key: sequence.key_start + j,
                weight,
                offset: row.offset,
            };
            let (raised, bound) = (weight + row.offset, bound(&pair));
            if !(raised > bound || raised < -bound) {
                pairs.push(pair);
            }
        }
    });
    Ok(parts.into_iter().flat_map(|(_, _, pairs)| pairs).collect())
}
