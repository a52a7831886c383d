//! Active pairs, tiles that hold one, and pairs for which rounding may decide otherwise.

use super::Inputs;
use super::row::{Operands, Row};
use crate::heads::{Query, each_query};
use crate::scalar::Real;
use crate::tensor::{HeadsMut, full};
use etalon_problem::{Blocking, Error, LazyAttention, Sequence};
use ndarray::Array4;
use std::collections::BTreeMap;

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

/// Flags of the active pairs, (E5): `[B, Hq, N, M]`. A pair that is not visible is not active.
pub fn active_pairs<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Array4<bool>, Error> {
    let operands = Operands::checked(problem, inputs)?;
    let mut pairs = full("activity", problem.scores.pair_shape(), false)?;
    each_query(
        &problem.scores,
        [HeadsMut::new(&mut pairs)],
        [],
        |_, _| (),
        |(), query, [pairs], []| {
            for (_, j, _) in operands.row(query).active_keys() {
                pairs[query.sequence.key_start + j] = true;
            }
        },
    );
    Ok(pairs)
}

/// Flags of the tiles that hold an active pair: `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`. Tiles lie on the arrays,
/// those of packed sequences across the sequences.
pub fn activity<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    tile: Blocking,
) -> Result<Array4<bool>, Error> {
    let operands = Operands::checked(problem, inputs)?;
    tile.check()?;
    let [batch, heads, queries, keys] = problem.scores.pair_shape();
    let shape = [batch, heads, queries.div_ceil(tile.queries), keys.div_ceil(tile.keys)];
    let mut map = full("activity", shape, false)?;
    let parts = operands.each_row(|_, _| Tiles::new(), |tiles, row| add_row(tiles, tile, row));
    for (at, active) in parts.into_iter().flatten() {
        map[at] |= active;
    }
    Ok(map)
}

/// Every tile with a visible pair, by its place in the array that [`activity`] returns, and whether
/// it holds an active one.
pub(super) type Tiles = BTreeMap<[usize; 4], bool>;

/// Adds a row to the tiles.
pub(super) fn add_row<T: Real>(tiles: &mut Tiles, tile: Blocking, row: &Row<'_, T>) {
    let query = &row.softmax.query;
    let &Sequence { batch, query_start, key_start, .. } = query.sequence;
    let tile_row = (query_start + query.i) / tile.queries;
    let column = |&j: &usize| (key_start + j) / tile.keys;
    let mut active = row.active.iter();
    for keys in row.softmax.keys.chunk_by(|a, b| column(a) == column(b)) {
        let any = active.by_ref().take(keys.len()).fold(false, |any, a| any | a.is_some());
        *tiles.entry([batch, query.head, tile_row, column(&keys[0])]).or_default() |= any;
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
    let operands = Operands::checked(problem, inputs)?;
    let parts = operands.each_row(
        |_, _| Vec::new(),
        |pairs, row| {
            let Query { sequence, head, i, .. } = row.softmax.query;
            for (j, weight) in row.softmax.weights() {
                let pair = Pair {
                    batch: sequence.batch,
                    head,
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
        },
    );
    Ok(parts.into_iter().flatten().collect())
}
