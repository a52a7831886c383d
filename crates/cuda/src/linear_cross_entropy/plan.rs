//! The tokens and classes of a chunk, within a budget of memory.

use super::args::NODE;
use crate::memory::memory;
use etalon_problem::Result;

/// Rows and columns of a tile of a product: `SIDE` of `tile/gemm.cuh`.
pub(crate) const SIDE: usize = 128;

/// Classes of a leaf of the tree: `TILE` of `linear_cross_entropy/problem.cuh`.
pub(crate) const TILE: usize = etalon_problem::linear_cross_entropy::shard::TILE;

/// Classes that a chunk should have, so that products have enough tiles; on tensor cores where fewer tokens at a time
/// would cost dw a sweep of its own.
const WIDE: usize = 4096;
const LEAST_WIDE: usize = 2048;

/// Classes that dh is summed over one after the other on tensor cores, of so many: a quarter of the tree, so that up
/// to four shards give the bits of one device, whatever chunks these have.
pub(crate) fn block(vocab: usize) -> usize {
    (vocab.div_ceil(TILE).next_power_of_two() / 4).max(1) * TILE
}

/// The most sums of blocks at a time, of so many classes: those that wait, and the one that is added to.
fn sums(classes: usize, block: usize) -> usize {
    let blocks = classes.div_ceil(block).max(1);
    (0..blocks).map(|before| before.count_ones() as usize + 1).max().unwrap_or(1)
}

/// The classes of a shard, as a pass walks them.
#[derive(Clone, Copy)]
pub(crate) struct Walked {
    /// All of them, and the most that are walked at a time.
    pub classes: usize,
    pub widest: usize,
    /// They are nodes of the tree, in which dh has blocks; else all are one block.
    pub nodes: bool,
}

#[derive(Clone, Copy)]
pub(crate) struct PassSpec {
    pub dh: bool,
    pub dw: bool,
    pub dbias: bool,
    /// Gradients are stored in f32, where they may be summed.
    pub wide: bool,
    pub second: bool,
    pub tokens: usize,
    pub dim: usize,
    pub vocab: usize,
    /// Bytes that chunks may take.
    pub budget: usize,
    /// Tensor cores multiply: gradients of logits are stored in 16 bits, and sums of dh beside the tree.
    pub tensor: bool,
    /// Tiles of 256 rows that the device computes at a time on them.
    pub side_by_side: usize,
}

impl PassSpec {
    pub fn gradients(self) -> bool {
        self.dh || self.dw || self.dbias
    }

    /// The time of so many tiles, of so many columns and of so many steps.
    fn rounds(self, tiles: usize, columns: usize, steps: usize) -> u128 {
        tiles.div_ceil(self.side_by_side.max(1)) as u128 * columns as u128 * steps as u128
    }

    /// Columns of the tiles of dh on tensor cores: 192 where the last tiles to be computed are then more.
    pub fn columns_of_hidden(self, rows: usize) -> usize {
        let time = |columns| self.rounds(rows.div_ceil(TILE) * self.dim.div_ceil(columns), columns, 1);
        if time(192) < time(TILE) { 192 } else { TILE }
    }

    /// So many classes or up to half of them, so that the last tiles of a chunk leave little of the device idle.
    fn whole_rounds(self, rows: usize, columns: usize) -> usize {
        let (pairs, across, wide) = (rows.div_ceil(TILE), self.dim.div_ceil(TILE), self.columns_of_hidden(rows));
        let time = |tiles: usize| {
            let hidden = self.rounds(pairs * self.dim.div_ceil(wide), wide, tiles * TILE);
            let head = self.rounds(tiles * across, TILE, rows);
            self.rounds(pairs * tiles, TILE, self.dim)
                + if self.dh { hidden } else { 0 }
                + if self.dw { head } else { 0 }
        };
        let most = columns / TILE;
        let faster = |x: usize, y: usize| time(x) * (y as u128) < time(y) * (x as u128);
        let best = (most / 2..most).rev().filter(|&x| x > 0);
        best.fold(most, |best, x| if faster(x, best) { x } else { best }) * TILE
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// Tokens of a chunk, a multiple of [`SIDE`].
    pub rows: usize,
    /// Classes of a chunk, a multiple of [`TILE`].
    pub columns: usize,
    /// As [`block`].
    pub block: usize,
    /// A chunk has all classes: its logits then serve its gradients, too.
    pub keeps: bool,
    /// dw and dbias have a sweep of their own, with the classes outside.
    pub apart: bool,
    /// Bytes of a plane of logits, of the nodes that wait in the tree, of the sums of dh that wait there, and
    /// of those of dw and dbias.
    pub plane: usize,
    pub nodes: usize,
    pub hidden: usize,
    pub head: usize,
    pub head_bias: usize,
}

impl Plan {
    /// Of all classes. Chunks are as large as the budget permits, at least one tile.
    pub fn new(spec: PassSpec) -> Result<Plan> {
        let up = |x: usize, to: usize| x.max(1).checked_next_multiple_of(to).ok_or_else(|| memory(usize::MAX));
        let (all_columns, block) = (up(spec.vocab, TILE)?, block(spec.vocab));
        let narrow = spec.tensor && spec.dw && !spec.wide;
        let wide = all_columns.min(if narrow { LEAST_WIDE } else { WIDE });
        let mut rows = up(spec.tokens, SIDE)?;
        loop {
            match Plan::of(rows, (all_columns, block), spec) {
                Some(plan) if plan.columns >= wide || rows == SIDE => return Ok(plan),
                None if rows == SIDE => return Err(memory(usize::MAX)),
                _ => rows = up(rows / 2, SIDE)?,
            }
        }
    }

    /// The same rows, over some classes at a time of a shard: what is summed over tokens has the bits of the pass over
    /// all classes.
    pub fn of_shard(spec: PassSpec, walked: Walked) -> Result<Plan> {
        let whole = Plan::new(spec)?;
        let Walked { classes, widest, nodes } = walked;
        let plan = widest.max(1).checked_next_multiple_of(TILE).and_then(|columns| {
            let block = if nodes { whole.block } else { columns.next_power_of_two() };
            Plan::of(whole.rows, (columns, block), PassSpec { vocab: classes, ..spec })
        });
        // Its logits are computed for the totals in one pass, and for gradients in another.
        plan.map(|plan| Plan { keeps: false, ..plan }).ok_or_else(|| memory(usize::MAX))
    }

    /// With so many rows, and as many columns as the budget leaves; none where numbers overflow.
    fn of(rows: usize, (all_columns, block): (usize, usize), spec: PassSpec) -> Option<Plan> {
        let PassSpec { dim, vocab, tensor, .. } = spec;
        let product = |factors: &[usize]| factors.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        let levels = (usize::BITS - vocab.div_ceil(TILE).leading_zeros()) as usize;
        let several = rows < spec.tokens;
        let apart = several && spec.dw && !spec.wide;
        let nodes = product(&[levels, rows, NODE[usize::from(spec.second)]])?;
        let hidden = match spec.dh {
            true if tensor => {
                // As the threads hold them, in whole tiles.
                let wide = dim.checked_next_multiple_of(spec.columns_of_hidden(rows))?;
                product(&[4, rows.checked_next_multiple_of(TILE)?, wide, sums(all_columns, block)])?
            }
            true => product(&[4, levels, rows, dim.checked_next_multiple_of(SIDE)?])?,
            false => 0,
        };
        let head_bias = if several && spec.dbias && !spec.wide { 4 * vocab } else { 0 };
        let fixed = nodes.checked_add(hidden)?.checked_add(head_bias)?;
        // A column of logits, of their motions, and a row of dw where that is summed apart.
        let element = if tensor { 2 } else { 4 };
        let row = if apart { 4 * dim } else { 0 };
        let column = product(&[element, 1 + usize::from(spec.second), rows])?.checked_add(row)?;
        // A plane also holds the leaves of a group of tiles.
        let least = if tensor { 2 * TILE } else { TILE };
        let columns = spec.budget.saturating_sub(fixed) / column / TILE * TILE;
        let columns = columns.clamp(least.min(all_columns), all_columns);
        let columns = if tensor && columns < all_columns { spec.whole_rounds(rows, columns) } else { columns };
        Some(Plan {
            rows,
            columns,
            block,
            keeps: columns == all_columns && !tensor,
            apart,
            plane: product(&[columns, element, rows])?,
            nodes,
            hidden,
            head: product(&[columns, row])?,
            head_bias,
        })
    }
}

#[cfg(test)]
#[path = "../../tests/units/linear_cross_entropy/plan.rs"]
mod tests;
