//! The memory of one thread for the sweeps of first and second order.

use super::cut::Cut;
use super::operands::Operands;
use super::schedule::{AHEAD, Schedule};
use crate::lanes::matrix::BLOCK;
use crate::pack::Form;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::workspace::Parts;
use std::ops::Range;

/// The most panels of keys in a tile: of the narrowest register block.
const MAX_PANELS: usize = MAX_KEYS / 4;

/// The memory of one thread.
pub struct Scratch<'m> {
    pub cut: Cut,
    pub tiles: TileMemory<'m>,
    pub sums: Sums<'m>,
    pub words: Words<'m>,
    /// A row of o, and one of dout or cot_o.
    pub rows: [&'m mut [f32]; 2],
}

/// Memory for the words of weights, which [`super::engine`] rounds.
pub struct Words<'m> {
    /// Of a block of queries, or of a tile; of each piece.
    pub memory: &'m mut [f32],
    /// Numbers of bf16 as whose sum a weight is multiplied.
    pub pieces: usize,
}

/// The weights of a tile: rows lie [`STRIDE`] apart, and a pass has those that it needs.
pub struct TileMemory<'m> {
    /// S, then P; of attention's first order in bf16 S of a block of queries.
    pub p: &'m mut [f32],
    /// U, then P ⊙ U or Ṗ.
    pub p_dot: &'m mut [f32],
    /// T, then x or X; of attention's first order in bf16 dP of a block of queries.
    pub x: &'m mut [f32],
    /// tanh(s/c) of a register block.
    pub tanh: &'m mut [f32],
    /// u⁰ of a register block.
    pub u0: &'m mut [f32],
    /// Of lazy attention sums over each row of a register block: those of [`Sums::numbers`].
    pub row_sums: [[f32; BLOCK]; 3],
    /// Of lazy attention (1/n) Σ a g, or of the second order (1/n) Σ a T, of the tiles since it was last 0.
    pub tau: f64,
    /// Of lazy attention the rows of a tile from the first to the last with an active pair in each panel
    /// of keys.
    pub active: [Range<usize>; MAX_PANELS],
    /// Of attention's first order in bf16 P and ds of a tile in pairs of queries, of each piece.
    pub pairs: [&'m mut [f32]; 2],
    /// Numbers of bf16 as whose sum a weight is multiplied.
    pub pieces: usize,
    /// The shares of dq that wait for their turn, and room for the next; of the second order one.
    pub shares: [Share<'m>; AHEAD],
}

/// The weights of a tile of keys and queries from which its share of dq follows.
pub struct Share<'m> {
    /// dP, then dS or ds of a tile; of attention's first order in bf16 ds in pairs of keys, of each piece.
    pub ds: &'m mut [f32],
    /// 1 for the pairs of a tile that are visible, and otherwise 0, rows [`MAX_KEYS`] apart.
    pub visible: &'m mut [u8],
    /// The first column of each register block of a tile that was computed, and the one behind the last.
    pub strips: &'m mut [[u32; 2]],
}

/// The sums that tiles of weights grow.
pub struct Sums<'m> {
    /// dq or gq of a tile of queries, dk or gk of a tile of keys; without σ.
    pub wide: &'m mut [f32],
    /// gdout of a tile of queries, dv or gv of a tile of keys.
    pub values: &'m mut [f32],
    /// o of a tile of queries, where it is computed anew.
    pub o: &'m mut [f32],
    /// Σ P U of every row of a tile; of lazy attention Δ; of its second order Σ P U, Δ and
    /// Σ a P (U g + T), each of all rows.
    pub numbers: &'m mut [f32],
    /// dbias or gbias of a tile, rows [`STRIDE`] apart.
    pub bias: &'m mut [f32],
    /// Of bf16, where the sums of a tile of keys are transposed: the rows of one of them.
    pub turned: &'m mut [f32],
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

impl<'m> Scratch<'m> {
    /// Memory for a pass.
    pub fn new(parts: &mut Parts<'m>, schedule: &Schedule, operands: &Operands<'_>) -> Self {
        let Schedule { cut, second, .. } = *schedule;
        let of = |there: bool, len: usize| if there { len } else { 0 };
        let (tile, block) = (cut.queries * STRIDE, cut.rows * STRIDE);
        let rows = cut.queries.max(cut.keys.next_multiple_of(cut.rows));
        let row = if cut.bf16 { STRIDE } else { rows };
        let sum = |rows: usize, dim: usize| cut.stride(dim).saturating_mul(rows);
        let (dim, value_dim) = (operands.scores.extents.dim, operands.value_dim());
        let words = of(cut.bf16, cut.pieces * Form::len(cut.queries, MAX_KEYS));
        // Of attention's first order in bf16 no more than a block of scores is kept in f32.
        let has_tiles = cut.bf16 && !second && operands.tau.is_none();
        let (scores, of_bias) = (tile, schedule.bias || has_tiles && operands.bias.is_some());
        let (tile, of_ds) = if has_tiles { (block, words) } else { (tile, tile) };
        let pairs = of(has_tiles, words);
        let share = |number| {
            let there = number < schedule.shares();
            let strips = parts.room(of(there, 2 * (cut.queries / cut.rows)));
            Share {
                ds: parts.room(of(there, of_ds)),
                visible: parts.bytes(of(there, cut.queries * MAX_KEYS)),
                strips: bytemuck::cast_slice_mut(strips),
            }
        };
        let shares = std::array::from_fn(share);
        let tiles = TileMemory {
            p: parts.room(tile),
            p_dot: parts.room(of(second, tile)),
            x: parts.room(of(second || has_tiles, tile)),
            tanh: parts.room(block),
            u0: parts.room(of(second, block)),
            row_sums: [[0.0; BLOCK]; 3],
            tau: 0.0,
            active: [const { 0..0 }; MAX_PANELS],
            pairs: [(); 2].map(|()| parts.room(pairs)),
            pieces: cut.pieces,
            shares,
        };
        let numbers = match (second, operands.tau) {
            (true, Some(_)) => 3,
            (false, None) => 0,
            _ => 1,
        };
        let sums = Sums {
            wide: parts.room(sum(row.max(of(cut.bf16, rows)), dim)),
            values: parts.room(sum(row.max(of(cut.bf16 && second, rows)), value_dim)),
            o: parts.room(of(schedule.o_anew, sum(cut.queries, value_dim))),
            numbers: parts.room(cut.queries * numbers),
            bias: parts.room(of(of_bias, scores)),
            turned: parts.room(of(cut.bf16, sum(cut.keys, dim.max(value_dim)))),
        };
        // A block of queries may have two pieces in any case.
        let words = words.max(of(cut.bf16, 2 * Form::len(cut.rows, MAX_KEYS)));
        let words = Words { memory: parts.room(of(!has_tiles, words)), pieces: cut.pieces };
        Scratch { cut, tiles, sums, words, rows: [(); 2].map(|()| parts.room(value_dim)) }
    }
}

impl Words<'_> {
    /// The same for at least so many pieces.
    #[inline(always)]
    pub fn of_pieces(&mut self, least: usize) -> Words<'_> {
        Words { memory: self.memory, pieces: self.pieces.max(least) }
    }
}

impl TileMemory<'_> {
    /// Weights; ds of the given share.
    #[inline(always)]
    pub fn weights(&self, weight: Weight, share: usize) -> &[f32] {
        match weight {
            Weight::P => self.p,
            Weight::PDot => self.p_dot,
            Weight::Ds => self.shares[share].ds,
            Weight::X => self.x,
        }
    }
}

impl Sums<'_> {
    /// A sum.
    #[inline(always)]
    pub fn of(&mut self, target: Target) -> &mut [f32] {
        match target {
            Target::Wide => self.wide,
            Target::Values => self.values,
            Target::O => self.o,
        }
    }
}
