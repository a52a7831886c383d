//! States, as panels: the factor that a product reads by whole registers.
//!
//! A state is one matrix of `dim` × `width` or, in the second order, two, one behind the other: the
//! matrix and its tangent. Each lies along: groups of a register block's columns,
//! `[width/cols][dim][cols]`, with rows and columns that only fill register blocks.

use super::cut::Cut;
use super::rows::Rows;
use crate::Level;
use crate::lanes::prefetch::{Ask, Queue};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::pack::{Packed, transpose};
use crate::tile::{MAX_ROWS, Tile};
use ndarray::{ArrayView2, ArrayViewMut2};
use std::ops::Range;

/// Layout of states in memory.
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
    /// True for the transpose of what tensors hold.
    turned: bool,
}

impl Shape {
    /// States of `dim` × `width`.
    pub fn new(cut: &Cut, dim: usize, width: usize) -> Self {
        // Also whole blocks of a transposition.
        let rows = dim.next_multiple_of(cut.rows).max(dim.next_multiple_of(cut.cols));
        Shape { dim, width, rows, cols: cut.cols, turned: false }
    }

    /// The transposed states.
    pub fn transposed(&self, cut: &Cut) -> Self {
        Shape { turned: !self.turned, ..Shape::new(cut, self.width, self.dim) }
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
        let source = if self.turned { source.reversed_axes() } else { source };
        for ((d, e), &x) in source.indexed_iter() {
            state[self.at(d, e)] = x;
        }
    }

    /// Writes `state` into a tensor.
    pub fn write(&self, state: &[f32], target: ArrayViewMut2<'_, f32>) {
        let mut target = if self.turned { target.reversed_axes() } else { target };
        for ((d, e), x) in target.indexed_iter_mut() {
            *x = state[self.at(d, e)];
        }
    }

    /// `to`, of the shape `transposed`, becomes the matrices of a state, transposed.
    #[inline(always)]
    pub fn turn<I: Isa>(&self, _: I, from: &[f32], to: &mut [f32], transposed: Shape) {
        let cols = I::Short::COLS;
        let matrices = from.chunks_exact(self.len()).zip(to.chunks_exact_mut(transposed.len()));
        for (from, to) in matrices {
            for (e, panel) in from.chunks_exact(self.panel()).enumerate() {
                for (d, to) in to.chunks_exact_mut(transposed.panel()).enumerate() {
                    let block = &panel[d * cols * cols..];
                    transpose(block, cols, cols, &mut to[e * cols * cols..], cols);
                }
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
    pub right: &'a Packed<'a>,
    pub tokens: Range<usize>,
    /// Lines that are read next, prefetched meanwhile.
    pub then: &'a mut Queue,
}

impl Kernel for Advance<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Advance { shape, state, decay, left, right, tokens, then } = self;
        let (height, width) = (I::Short::ROWS, I::Short::COLS);
        let factors = [decay; MAX_ROWS];
        for (number, panel) in state.chunks_exact_mut(shape.panel()).enumerate() {
            for d in (0..shape.dim).step_by(height) {
                let block = &mut panel[d * width..];
                let mut tile = I::Short::zero(isa);
                if decay != 0.0 {
                    tile = I::Short::load(isa, block, width);
                    if decay != 1.0 {
                        tile = tile.scale_rows(isa, &factors);
                    }
                }
                left.add_columns(isa, &mut tile, d, tokens.clone(), right.from(number), then);
                tile.store(block, width);
            }
        }
    }
}

/// Rows of a chunk times the state at an end of it.
pub struct Reading<'a> {
    pub len: usize,
    /// The rows and their tangents.
    pub rows: &'a [Rows<'a>; 2],
    /// The state and, in the second order, its tangent.
    pub states: &'a [f32],
    pub shape: Shape,
    /// The weights of the rows; where one is 0, the state is absent.
    pub weights: &'a [f32],
    /// The tangents of their logarithms, unless all are 0.
    pub log_tangents: Option<&'a [f32]>,
}

impl Reading<'_> {
    /// value_i = w_i x_i S and tangent_i = w_i (d_i x_i S + ẋ_i S + x_i Ṡ), with d the tangents of the
    /// logarithms of the weights w, as far as they are wanted: into rows `stride` apart.
    #[inline(always)]
    pub fn write<I: Isa>(
        &self,
        isa: I,
        mut value: Option<&mut [f32]>,
        mut tangent: Option<&mut [f32]>,
        stride: usize,
        then: &mut impl Ask,
    ) {
        let Reading { len, rows, states, shape, weights, log_tangents } = self;
        let (state, state_tangent) = states.split_at(shape.len());
        for first in (0..*len).step_by(I::Short::ROWS) {
            for (number, panel) in state.chunks_exact(shape.panel()).enumerate() {
                let at = first * stride + number * I::Short::COLS;
                let mut tile = I::Short::zero(isa);
                if log_tangents.is_some() || value.is_some() {
                    rows[0].add_rows(isa, &mut tile, first, panel, then);
                }
                if let Some(value) = &mut value {
                    tile.scale_rows(isa, &weights[first..]).store(&mut value[at..], stride);
                }
                let Some(tangent) = &mut tangent else { continue };
                tile = match log_tangents {
                    Some(log_tangents) => tile.scale_rows(isa, &log_tangents[first..]),
                    None => I::Short::zero(isa),
                };
                rows[1].add_rows(isa, &mut tile, first, panel, then);
                let panel = &state_tangent[number * shape.panel()..];
                rows[0].add_rows(isa, &mut tile, first, panel, then);
                tile.scale_rows(isa, &weights[first..]).store(&mut tangent[at..], stride);
            }
        }
    }
}

/// <G, H>, of what two states hold beside what only fills register blocks.
#[inline(always)]
fn inner<I: Isa>(isa: I, shape: Shape, g: &[f32], h: &[f32]) -> f32 {
    let cols = shape.cols;
    let mut sum = I::F32::splat(isa, 0.0);
    let mut rest = 0.0;
    for (number, (g, h)) in
        g.chunks_exact(shape.panel()).zip(h.chunks_exact(shape.panel())).enumerate()
    {
        let here = cols.min(shape.width - number * cols);
        let whole = here / I::F32::N * I::F32::N;
        for (g, h) in g.chunks_exact(cols).zip(h.chunks_exact(cols)).take(shape.dim) {
            let lists = g[..whole].chunks_exact(I::F32::N).zip(h[..whole].chunks_exact(I::F32::N));
            for (g, h) in lists {
                sum = I::F32::load(isa, g).mul_add(I::F32::load(isa, h), sum);
            }
            for (g, h) in g[whole..here].iter().zip(&h[whole..here]) {
                rest += g * h;
            }
        }
    }
    sum.reduce_add() + rest
}

/// α_L ⟨S, D⟩ or, of states with their tangents, its tangent; `log_tangent` is that of log α_L, unless it is 0. What a
/// decay of 0 would multiply is absent.
#[inline(always)]
pub fn passed<I: Isa>(
    isa: I,
    shape: Shape,
    decay: f32,
    log_tangent: Option<f32>,
    [s, d]: [&[f32]; 2],
) -> f32 {
    if decay == 0.0 {
        return 0.0;
    }
    let ((s, of_s), (d, of_d)) = (s.split_at(shape.len()), d.split_at(shape.len()));
    if of_s.is_empty() {
        return decay * inner(isa, shape, s, d);
    }
    let mut sum = inner(isa, shape, of_s, d) + inner(isa, shape, s, of_d);
    if let Some(log_tangent) = log_tangent {
        sum += log_tangent * inner(isa, shape, s, d);
    }
    decay * sum
}

/// The map of a state over some tokens that add nothing to it: Λ H.
#[derive(Debug, Clone, Copy)]
pub struct Carry {
    /// Λ; where it is 0 the state is absent.
    pub decay: f32,
    /// The tangent of log Λ: in the second order that of the state becomes Λ (Ḣ + log_tangent · H).
    pub log_tangent: f32,
}

/// S = Λ H + L; without L, S = H.
pub fn combine(level: Level, carry: Carry, state: &[f32], sum: Option<&[f32]>, to: &mut [f32]) {
    to.copy_from_slice(sum.unwrap_or(state));
    if sum.is_some() {
        add_carried(level, carry, state, to);
    }
}

/// The same, where H lies if S is H.
pub fn combined<'a>(
    level: Level,
    carry: Carry,
    state: &'a [f32],
    sum: Option<&[f32]>,
    to: &'a mut [f32],
) -> &'a [f32] {
    if sum.is_none() {
        return state;
    }
    combine(level, carry, state, sum, to);
    to
}

/// L ← Λ H + L.
pub fn add_carried(level: Level, carry: Carry, state: &[f32], sum: &mut [f32]) {
    let Carry { decay, log_tangent } = carry;
    if decay == 0.0 {
        return;
    }
    add_to(level, decay, state, sum);
    if log_tangent != 0.0 {
        let half = state.len() / 2;
        add_to(level, decay * log_tangent, &state[..half], &mut sum[half..]);
    }
}

/// H ← Λ H + L.
pub fn pass_on(level: Level, carry: Carry, state: &mut [f32], sum: &[f32]) {
    let Carry { decay: factor, log_tangent } = carry;
    if factor == 0.0 {
        return state.copy_from_slice(sum);
    }
    let decay = |to: &mut [f32], from: &[f32]| {
        level.run(AddScaled { factor, scaled_to: true, to, from });
    };
    if log_tangent == 0.0 {
        return decay(state, sum);
    }
    let (value, tangent) = state.split_at_mut(sum.len() / 2);
    let (sum, sum_tangent) = sum.split_at(value.len());
    decay(tangent, sum_tangent);
    add_to(level, factor * log_tangent, value, tangent);
    decay(value, sum);
}

/// to += factor · from.
pub fn add_to(level: Level, factor: f32, from: &[f32], to: &mut [f32]) {
    level.run(AddScaled { factor, scaled_to: false, to, from });
}

/// to ← to + from, one of which is multiplied by the factor first.
struct AddScaled<'a> {
    factor: f32,
    /// True if `to` is multiplied, false if `from` is.
    scaled_to: bool,
    to: &'a mut [f32],
    from: &'a [f32],
}

impl Kernel for AddScaled<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let factor = I::F32::splat(isa, self.factor);
        let lists = self.to.chunks_exact_mut(I::F32::N).zip(self.from.chunks_exact(I::F32::N));
        if self.scaled_to {
            for (to, from) in lists {
                factor.mul_add(I::F32::load(isa, to), I::F32::load(isa, from)).store(to);
            }
        } else {
            for (to, from) in lists {
                factor.mul_add(I::F32::load(isa, from), I::F32::load(isa, to)).store(to);
            }
        }
    }
}
