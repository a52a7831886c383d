//! The memory of one thread for the sweeps of first and second order.

use super::cut::Cut;
use super::inputs::Inputs;
use super::schedule::Schedule;
use super::scores::Strip;
use crate::aligned::Aligned;
use crate::tile::{MAX_KEYS, STRIDE};
use etalon_problem::Error;

/// The memory of one thread.
pub struct Scratch {
    pub cut: Cut,
    pub tiles: TileMemory,
    pub sums: Sums,
}

/// The weights of a tile: rows lie [`STRIDE`] apart, and a pass has those that it needs.
pub struct TileMemory {
    /// S, then P.
    pub p: Aligned,
    /// U, then P ⊙ U or Ṗ.
    pub p_dot: Aligned,
    /// T, then x or X.
    pub x: Aligned,
    /// tanh(s/c) of a register block.
    pub tanh: Aligned,
    /// u⁰ of a register block.
    pub u0: Aligned,
    /// The shares of dq that wait for their turn, and room for the next; of the second order one.
    pub shares: Vec<Share>,
}

/// What a tile of keys and queries has for dq.
pub struct Share {
    /// dP, then dS or ds of a tile.
    pub ds: Aligned,
    /// Which pairs of a tile are visible, rows [`MAX_KEYS`] apart.
    pub visible: Vec<bool>,
    /// The columns of each register block of a tile that were computed.
    pub strips: Vec<Option<Strip>>,
}

/// The sums that tiles of weights grow.
pub struct Sums {
    /// dq or gq of a tile of queries, dk or gk of a tile of keys; without σ.
    pub wide: Aligned,
    /// gdout of a tile of queries, dv or gv of a tile of keys.
    pub values: Aligned,
    /// o of a tile of queries, where it is computed anew.
    pub o: Aligned,
    /// Σ P U of every row of a tile.
    pub u: Aligned,
    /// dbias or gbias of a tile, rows [`STRIDE`] apart.
    pub bias: Aligned,
}

/// One of the weights of a tile.
#[derive(Debug, Clone, Copy)]
pub enum Weight {
    P,
    PDot,
    Ds,
    X,
}

/// One of the sums with rows as wide as operands.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    Wide,
    Values,
    O,
}

impl Scratch {
    /// Zeros for a pass.
    pub fn new(schedule: &Schedule, inputs: &Inputs<'_>) -> Result<Self, Error> {
        let Schedule { cut, second, .. } = *schedule;
        let zeros = |len| Aligned::zeros(len, "the scratch of a thread");
        let tile = |there: bool| zeros(if there { cut.queries * STRIDE } else { 0 });
        let block = |there: bool| zeros(if there { cut.rows * STRIDE } else { 0 });
        let rows = cut.queries.max(cut.keys.next_multiple_of(cut.rows));
        let sum = |rows: usize, dim: usize| zeros(cut.stride(dim).saturating_mul(rows));
        let share = |_| {
            let visible = vec![false; cut.queries * MAX_KEYS];
            Ok(Share { ds: tile(true)?, visible, strips: vec![None; cut.queries / cut.rows] })
        };
        let tiles = TileMemory {
            p: tile(true)?,
            p_dot: tile(second)?,
            x: tile(second)?,
            tanh: block(true)?,
            u0: block(second)?,
            shares: (0..schedule.shares()).map(share).collect::<Result<_, Error>>()?,
        };
        let sums = Sums {
            wide: sum(rows, inputs.scores.extents.dim)?,
            values: sum(rows, inputs.value_dim())?,
            o: sum(if schedule.o_anew { cut.queries } else { 0 }, inputs.value_dim())?,
            u: zeros(if second { cut.queries } else { 0 })?,
            bias: tile(schedule.bias)?,
        };
        Ok(Scratch { cut, tiles, sums })
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        let TileMemory { p, p_dot, x, tanh, u0, shares } = &self.tiles;
        let Sums { wide, values, o, u, bias } = &self.sums;
        let share = |Share { ds, visible, strips }: &Share| {
            ds.bytes() + visible.len() + size_of_val(&strips[..])
        };
        let parts = [p, p_dot, x, tanh, u0, wide, values, o, u, bias].map(Aligned::bytes);
        parts.iter().sum::<usize>() + shares.iter().map(share).sum::<usize>()
    }
}

impl TileMemory {
    /// Weights; ds of the given share.
    #[inline(always)]
    pub fn weights(&self, weight: Weight, share: usize) -> &[f32] {
        match weight {
            Weight::P => &self.p,
            Weight::PDot => &self.p_dot,
            Weight::Ds => &self.shares[share].ds,
            Weight::X => &self.x,
        }
    }
}

impl Sums {
    /// A sum.
    #[inline(always)]
    pub fn of(&mut self, target: Target) -> &mut [f32] {
        match target {
            Target::Wide => &mut self.wide,
            Target::Values => &mut self.values,
            Target::O => &mut self.o,
        }
    }
}
