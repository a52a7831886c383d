//! States, as panels: the factor that a product reads by whole registers.
//!
//! A state is one matrix of `dim` × `width` or, in the second order, two, one behind the other: the
//! matrix and its tangent. Each lies along: groups of a register block's columns,
//! `[width/cols][dim][cols]`, with rows and columns that only fill register blocks.

use super::cut::Cut;
use super::rows::{Panels, Rows};
use crate::Level;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::transpose;
use crate::tile::{MAX_ROWS, Tile};
use ndarray::{ArrayView2, ArrayViewMut2};
use std::ops::Range;

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

    /// `state` becomes what a tensor holds.
    pub fn read(&self, state: &mut [f32], source: ArrayView2<'_, f32>) {
        for ((d, e), &x) in source.indexed_iter() {
            state[self.at(d, e)] = x;
        }
    }

    /// Writes `state` into a tensor.
    pub fn write(&self, state: &[f32], mut target: ArrayViewMut2<'_, f32>) {
        for ((d, e), x) in target.indexed_iter_mut() {
            *x = state[self.at(d, e)];
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
    pub left: &'a Rows<'a>,
    pub right: &'a Panels<'a>,
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

/// What becomes of a state over some tokens that add nothing to it: Λ H.
#[derive(Debug, Clone, Copy)]
pub struct Carry {
    /// Λ; where it is 0 the state is absent.
    pub decay: f32,
    /// Of the second order, the tangent of log Λ: that of the state becomes Λ (Ḣ + log_tangent · H).
    pub log_tangent: Option<f32>,
}

/// S = Λ H + L; without L, S = H.
pub fn combine(level: Level, carry: Carry, state: &[f32], sum: Option<&[f32]>, to: &mut [f32]) {
    to.copy_from_slice(sum.unwrap_or(state));
    if sum.is_some() {
        add_carried(level, carry, state, to);
    }
}

/// L ← Λ H + L.
pub fn add_carried(level: Level, carry: Carry, state: &[f32], sum: &mut [f32]) {
    AddCarried { carry, state, sum }.run_at(level);
}

struct AddCarried<'a> {
    carry: Carry,
    state: &'a [f32],
    sum: &'a mut [f32],
}

compiled_here!(AddCarried<'_>);

impl Kernel for AddCarried<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let AddCarried { carry: Carry { decay, log_tangent }, state, sum } = self;
        if decay == 0.0 {
            return;
        }
        let factor = I::F32::splat(isa, decay);
        let Some(log_tangent) = log_tangent else { return add(isa, factor, state, sum) };
        let (value, tangent) = state.split_at(state.len() / 2);
        let (sum, sum_tangent) = sum.split_at_mut(value.len());
        add(isa, factor, value, sum);
        add(isa, factor, tangent, sum_tangent);
        if log_tangent != 0.0 {
            add(isa, factor * I::F32::splat(isa, log_tangent), value, sum_tangent);
        }
    }
}

/// H ← Λ H + L.
pub fn pass_on(level: Level, carry: Carry, state: &mut [f32], sum: &[f32]) {
    PassOn { carry, state, sum }.run_at(level);
}

struct PassOn<'a> {
    carry: Carry,
    state: &'a mut [f32],
    sum: &'a [f32],
}

compiled_here!(PassOn<'_>);

impl Kernel for PassOn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PassOn { carry: Carry { decay, log_tangent }, state, sum } = self;
        if decay == 0.0 {
            return state.copy_from_slice(sum);
        }
        let factor = I::F32::splat(isa, decay);
        let Some(log_tangent) = log_tangent else { return scale_add(isa, factor, state, sum) };
        let (value, tangent) = state.split_at_mut(sum.len() / 2);
        let (sum, sum_tangent) = sum.split_at(value.len());
        scale_add(isa, factor, tangent, sum_tangent);
        if log_tangent != 0.0 {
            add(isa, factor * I::F32::splat(isa, log_tangent), value, tangent);
        }
        scale_add(isa, factor, value, sum);
    }
}

/// to = factor · to + from.
#[inline(always)]
fn scale_add<I: Isa>(isa: I, factor: I::F32, to: &mut [f32], from: &[f32]) {
    for (to, from) in to.chunks_exact_mut(I::F32::N).zip(from.chunks_exact(I::F32::N)) {
        factor.mul_add(I::F32::load(isa, to), I::F32::load(isa, from)).store(to);
    }
}

/// to += factor · from.
pub fn add_to(level: Level, factor: f32, from: &[f32], to: &mut [f32]) {
    AddTo { factor, from, to }.run_at(level);
}

struct AddTo<'a> {
    factor: f32,
    from: &'a [f32],
    to: &'a mut [f32],
}

compiled_here!(AddTo<'_>);

impl Kernel for AddTo<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        add(isa, I::F32::splat(isa, self.factor), self.from, self.to);
    }
}

/// to += factor · from.
#[inline(always)]
fn add<I: Isa>(isa: I, factor: I::F32, from: &[f32], to: &mut [f32]) {
    for (to, from) in to.chunks_exact_mut(I::F32::N).zip(from.chunks_exact(I::F32::N)) {
        factor.mul_add(I::F32::load(isa, from), I::F32::load(isa, to)).store(to);
    }
}
