//! States, as panels: the factor that a product reads by whole registers.

use super::Cut;
use super::operand::Rows;
use crate::aligned::Aligned;
use crate::lanes::{Isa, Kernel};
use crate::level::compiled_here;
use crate::pack::{Packed, transpose};
use crate::tile::MAX_ROWS;
use crate::tile::Tile;
use etalon_problem::Error;
use ndarray::{ArrayView2, ArrayViewMut2};
use std::ops::Range;

/// One matrix of `dim` × `width` or, in the second order, two, one behind the other: a state and how
/// it moves. Each lies along: groups of a register block's columns, `[width/cols][dim][cols]`, with
/// rows and columns that only fill register blocks.
#[derive(Debug)]
pub struct State {
    pub elements: Aligned,
    shape: Shape,
}

/// How states lie in memory.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Rows.
    pub dim: usize,
    /// Columns.
    pub width: usize,
    /// Rows, filled up to register blocks.
    rows: usize,
    /// Columns of a register block.
    cols: usize,
}

impl Shape {
    /// States of `dim` × `width`.
    pub fn new(cut: &Cut, dim: usize, width: usize) -> Self {
        // Also whole blocks of a transposition.
        let rows = dim.next_multiple_of(cut.rows).max(dim.next_multiple_of(cut.cols));
        Shape { dim, width, rows, cols: cut.cols }
    }

    /// The transposed states.
    pub fn transposed(&self, cut: &Cut) -> Self {
        Shape::new(cut, self.width, self.dim)
    }

    /// Elements of a state.
    pub fn len(&self) -> usize {
        self.panel().saturating_mul(self.width.div_ceil(self.cols))
    }

    /// Elements of a panel.
    #[inline(always)]
    pub fn panel(&self) -> usize {
        self.rows.saturating_mul(self.cols)
    }

    fn at(&self, d: usize, e: usize) -> usize {
        e / self.cols * self.panel() + d * self.cols + e % self.cols
    }
}

impl State {
    /// `order` matrices that hold 0.
    pub fn zero(shape: Shape, order: usize) -> Result<Self, Error> {
        let elements = Aligned::zeros(shape.len().saturating_mul(order), "a state")?;
        Ok(State { elements, shape })
    }

    /// Matrix `which` becomes what a tensor holds.
    pub fn read(&mut self, which: usize, source: ArrayView2<'_, f32>) {
        let start = which * self.shape.len();
        for ((d, e), &x) in source.indexed_iter() {
            let at = start + self.shape.at(d, e);
            self.elements[at] = x;
        }
    }

    /// Writes matrix `which` into a tensor.
    pub fn write(&self, which: usize, mut target: ArrayViewMut2<'_, f32>) {
        let start = which * self.shape.len();
        for ((d, e), x) in target.indexed_iter_mut() {
            *x = self.elements[start + self.shape.at(d, e)];
        }
    }
}

/// The matrices of a state, transposed.
#[inline(always)]
pub fn transpose_states<I: Isa>(
    _: I,
    from: &[f32],
    shape: Shape,
    to: &mut [f32],
    transposed: Shape,
) {
    let cols = I::Tile::COLS;
    let matrices = from.chunks_exact(shape.len()).zip(to.chunks_exact_mut(transposed.len()));
    for (from, to) in matrices {
        for (e, panel) in from.chunks_exact(shape.panel()).enumerate() {
            for (d, to) in to.chunks_exact_mut(transposed.panel()).enumerate() {
                let block = &panel[d * cols * cols..];
                transpose(block, cols, cols, &mut to[e * cols * cols..], cols);
            }
        }
    }
}

/// state ← decay · state + leftᵀ · right over some tokens of a chunk: (R22), (R28), and the same for
/// transposed states. Where the decay is 0 what the state held is absent.
pub struct Advance<'a> {
    pub shape: Shape,
    pub state: &'a mut [f32],
    pub decay: f32,
    pub left: &'a Rows,
    pub right: &'a Packed,
    pub tokens: Range<usize>,
}

compiled_here!(Advance<'_>);

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Advance { shape, state, decay, left, right, tokens } = self;
        let (height, width) = (I::Tile::ROWS, I::Tile::COLS);
        let factors = [decay; MAX_ROWS];
        for (number, panel) in state.chunks_exact_mut(shape.panel()).enumerate() {
            for d in (0..shape.dim).step_by(height) {
                let block = &mut panel[d * width..];
                let mut tile = I::Tile::zero(isa);
                if decay != 0.0 {
                    tile = I::Tile::load(isa, block, width);
                    if decay != 1.0 {
                        tile = tile.scale_rows(isa, &factors);
                    }
                }
                left.add_columns(isa, &mut tile, d, tokens.clone(), right.from(number));
                tile.store(block, width);
            }
        }
    }
}
