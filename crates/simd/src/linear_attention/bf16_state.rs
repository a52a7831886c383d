//! States of a chunk in tiles of bf16, and what lies between its tokens and an end of it.
//!
//! States and their sums are f32. What is rounded, once: a state where rows read it.

use super::state::Shape;
use super::words::Words;
use crate::Level;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::lanes::{Isa, Lanes};
use crate::pack::Form;
use crate::workspace::Parts;
use std::ops::Range;

/// Rounds a state, `[D][E]`, into pieces, for products with rows of D elements (`along`) and of E (`across`).
pub struct Round<'a> {
    pub shape: Shape,
    pub state: &'a [f32],
    pub along: Option<&'a mut [f32]>,
    pub across: Option<&'a mut [f32]>,
    pub pieces: usize,
}

impl MatrixKernel for Round<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Round { shape, state, along, across, pieces } = self;
        let [tall, wide] = [shape.dim, shape.width].map(|len| 2 * len.div_ceil(BLOCK));
        let lanes = F32::<M>::N;
        if let Some(along) = along {
            for (line, panel) in
                (0..tall * SIDE / 2).flat_map(|d| (0..wide / 2).map(move |p| (d, p)))
            {
                let at = (line / SIDE * wide + 2 * panel) * WORDS + line % SIDE * SIDE;
                for c in (0..BLOCK).step_by(lanes) {
                    let even = part(by, shape, state, 2 * line, panel, c);
                    let odd = part(by, shape, state, 2 * line + 1, panel, c);
                    let to = at + c / SIDE * WORDS + c % SIDE;
                    Pairing::Stacked.store(by, [even, odd], (along, to), pieces);
                }
            }
        }
        if let Some(across) = across {
            for (tile, panel) in (0..tall).flat_map(|d| (0..wide / 2).map(move |p| (d, p))) {
                let mut rows = [0.0; 2 * WORDS];
                for r in 0..SIDE {
                    for c in (0..SIDE).step_by(lanes) {
                        let d = tile * SIDE + r;
                        let low = part(by, shape, state, d, panel, 2 * c);
                        let high = part(by, shape, state, d, panel, 2 * c + lanes);
                        let to = (&mut rows[..pieces * WORDS], r * SIDE + c);
                        Pairing::Neighbours.store(by, [low, high], to, pieces);
                    }
                }
                let apart = across.len() / pieces;
                let places = across.chunks_exact_mut(apart);
                for (rows, across) in rows.chunks_exact(WORDS).zip(places) {
                    by.turn(rows, &mut across[(panel * tall + tile) * WORDS..][..WORDS]);
                }
            }
        }
    }
}

/// A register of row `d` of a state, from element `c` of a panel on; 0 where there is none, whatever fills its blocks.
#[inline(always)]
fn part<M: Matrix>(by: M, shape: Shape, state: &[f32], d: usize, panel: usize, c: usize) -> F32<M> {
    let (isa, lanes) = (by.isa(), F32::<M>::N);
    let there = shape.width.saturating_sub(panel * BLOCK + c);
    if d >= shape.dim || there == 0 {
        return F32::<M>::splat(isa, 0.0);
    }
    let row = &state[panel * shape.panel() + d * BLOCK + c..][..lanes];
    if there >= lanes {
        return F32::<M>::load(isa, row);
    }
    let mut some = [0.0; SIDE];
    some[..there].copy_from_slice(&row[..there]);
    F32::<M>::load(isa, &some)
}

/// state ← decay · state + leftᵀ · right over some blocks of tokens, with `left` in columns and the pieces of `right`
/// along. Where the decay is 0 what the state held is absent.
struct Grow<'a> {
    shape: Shape,
    state: &'a mut [f32],
    decay: f32,
    left: &'a [f32],
    right: Pieces<'a>,
    blocks: Range<usize>,
}

impl MatrixKernel for Grow<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Grow { shape, state, decay, left, right, blocks } = self;
        let [tall, wide] = [shape.dim, shape.width].map(|len| 2 * len.div_ceil(BLOCK));
        if decay != 0.0 && decay != 1.0 {
            let factor = F32::<M>::splat(by.isa(), decay);
            for x in state.chunks_exact_mut(F32::<M>::N) {
                (F32::<M>::load(by.isa(), x) * factor).store(x);
            }
        }
        let first = if blocks.is_empty() { 0 } else { blocks.start };
        for (number, panel) in state.chunks_exact_mut(shape.panel()).enumerate() {
            // Without tokens there may be no rows either.
            let at = if blocks.is_empty() { 0 } else { (first * wide + 2 * number) * WORDS };
            let right = right.from(at);
            for (piece, words) in right.each().enumerate() {
                by.multiply(Product {
                    c: &mut *panel,
                    stride: BLOCK,
                    fresh: decay == 0.0 && piece == 0,
                    a: Tiles { words: &left[first * tall * WORDS..], steps: [1, tall] },
                    b: Tiles { words, steps: [1, wide] },
                    rows: tall,
                    cols: 2,
                    depth: blocks.len(),
                });
            }
        }
    }
}

/// (R22), (R28), (R30) and (R31): state ← decay · state + leftᵀ · right over some tokens of a chunk, with the rows on
/// the right weighted unless they are `plain`. Absent ones add nothing.
pub fn grow(
    level: Level,
    shape: Shape,
    (state, decay): (&mut [f32], f32),
    left: &Words<'_>,
    (right, plain): (&Words<'_>, bool),
    tokens: Range<usize>,
) {
    let right = right.summed_rows(plain);
    let blocks = match right.words.is_empty() {
        true => 0..0,
        false => tokens.start / BLOCK..tokens.end.div_ceil(BLOCK),
    };
    level
        .run_tiles(Grow { shape, state, decay, left: left.columns, right, blocks })
        .unwrap_or_default();
}

/// C (+)= rows of a block of tokens times a rounded state: of `wide` tiles, rows `stride` apart.
#[inline(always)]
pub fn multiply_state<M: Matrix>(
    by: M,
    (rows, block): (&Words<'_>, usize),
    state: Pieces<'_>,
    wide: usize,
    (c, stride): (&mut [f32], usize),
    fresh: bool,
) {
    let (a, depth) = (rows.left(block), rows.depth());
    for (piece, words) in state.each().enumerate() {
        let (b, fresh) = (Tiles { words, steps: [1, wide] }, fresh && piece == 0);
        by.multiply(Product { c: &mut *c, stride, fresh, a, b, rows: 2, cols: wide, depth });
    }
}

/// Rows `stride` apart times their weights; 0 where the weight is.
#[inline(always)]
pub fn scale_rows<I: Isa>(isa: I, rows: &mut [f32], stride: usize, weights: &[f32]) {
    for (row, &weight) in rows.chunks_exact_mut(stride).zip(weights) {
        let factor = I::F32::splat(isa, weight);
        if weight == 0.0 {
            row.fill(0.0);
            continue;
        }
        for x in row.chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, x) * factor).store(x);
        }
    }
}

/// A state in pieces, as the right factor of rows of D elements (`along`) and of E (`across`); in forms that nothing
/// reads it has no words.
pub struct Rounded<'m> {
    along: &'m mut [f32],
    across: &'m mut [f32],
    pieces: usize,
}

impl<'m> Rounded<'m> {
    /// For states of a shape.
    pub fn new(
        parts: &mut Parts<'m>,
        shape: Shape,
        pieces: usize,
        [along, across]: [bool; 2],
    ) -> Self {
        let len = Form::len(shape.dim, shape.width).saturating_mul(pieces);
        let mut room = |wanted: bool| parts.room(if wanted { len } else { 0 });
        Rounded { along: room(along), across: room(across), pieces }
    }
}

impl Rounded<'_> {
    /// Becomes a state, rounded.
    pub fn round(&mut self, level: Level, shape: Shape, state: &[f32]) {
        let Rounded { along, across, pieces } = self;
        let [along, across] =
            [along, across].map(|words| (!words.is_empty()).then_some(&mut **words));
        level.run_tiles(Round { shape, state, along, across, pieces: *pieces }).unwrap_or_default();
    }

    /// The right factor of rows of D elements, and of E.
    #[inline(always)]
    pub fn factors(&self) -> [Pieces<'_>; 2] {
        [&*self.along, &*self.across].map(|words| Pieces::new(words, self.pieces))
    }
}

/// An end of a chunk: the decays between it and each token, α or ω, as weights of rows that are summed into the state
/// there or read from it.
pub struct End<'m> {
    decays: &'m mut [f32],
    /// Tangents of their logarithms, a or b.
    logs: &'m mut [f32],
    /// A factor times the decays, and its tangent: w = f α and ẇ = α (f a + ḟ), of which rows x and ẋ take w x and
    /// w ẋ + ẇ x. What a decay of 0 would multiply is absent.
    pub weights: [&'m mut [f32]; 2],
    /// True if no weight has a tangent, and every weight is 1; if some may have one; if some decay has.
    pub plain: bool,
    pub bent: bool,
    decays_bend: bool,
}

impl<'m> End<'m> {
    /// For chunks of so many tokens.
    pub fn new(parts: &mut Parts<'m>, len: usize, second: bool) -> Self {
        let tangents = if second { len } else { 0 };
        End {
            decays: parts.room(len),
            logs: parts.room(tangents),
            weights: [len, tangents].map(|len| parts.room(len)),
            plain: false,
            bent: false,
            decays_bend: false,
        }
    }
}

impl End<'_> {
    /// Of so many tokens: the decays, tangents of their logarithms unless all are 0, and a factor with its tangent.
    pub fn prepare(
        &mut self,
        (decays, none): (&[f32], bool),
        logs: Option<&[f32]>,
        [factor, tangent]: [f32; 2],
        len: usize,
    ) {
        self.decays_bend = logs.is_some();
        self.bent = self.decays_bend || tangent != 0.0;
        self.plain = none && factor == 1.0 && !self.bent;
        self.decays[..len].copy_from_slice(&decays[..len]);
        let [weights, of_tangent] = &mut self.weights;
        for (weight, decay) in weights.iter_mut().zip(decays).take(len) {
            *weight = factor * decay;
        }
        let lists = of_tangent.iter_mut().zip(&mut *self.logs).zip(decays);
        for (i, ((of_tangent, to), &decay)) in lists.enumerate().take(len) {
            let log = logs.map_or(0.0, |logs| if decay == 0.0 { 0.0 } else { logs[i] });
            (*to, *of_tangent) = (log, decay * (factor * log + tangent));
        }
    }

    /// The weights of rows that enter the sum of a tangent beside its own: none where all are 0.
    pub fn tangents(&self) -> &[f32] {
        if self.bent { self.weights[1] } else { &[] }
    }

    /// The number that passes this end at token `i`, of products d and their tangents ḋ with what is read from the
    /// state: ẇ d + w ḋ.
    #[inline(always)]
    pub fn passed(&self, i: usize, [d, tangent]: [f32; 2]) -> f32 {
        let [weights, tangents] = &self.weights;
        match self.decays[i] {
            0.0 => 0.0,
            _ if self.bent => tangents[i] * d + weights[i] * tangent,
            _ => weights[i] * tangent,
        }
    }

    /// The derivative of this by the factor: α (a d + ḋ).
    #[inline(always)]
    pub fn by_factor(&self, i: usize, [d, tangent]: [f32; 2]) -> f32 {
        match self.decays[i] {
            0.0 => 0.0,
            decay if self.decays_bend => decay * (self.logs[i] * d + tangent),
            decay => decay * tangent,
        }
    }
}

/// Rows of 32 tokens that read the state at an end of the chunk, each with its tangent.
pub struct Reading<'a, 'm> {
    pub end: &'a End<'m>,
    pub rows: &'a [Words<'m>; 2],
    pub tokens: Range<usize>,
    /// The state and its tangent; tiles of a row of it.
    pub states: [Pieces<'a>; 2],
    pub wide: usize,
    pub second: bool,
    /// Distance of the rows that are read.
    pub stride: usize,
}

impl Reading<'_, '_> {
    /// `sum` ← w x S or, in the second order, w (ẋ S + x Ṡ) + ẇ x S. Before the weights, `pass` takes the products of
    /// every row with that of an operand, if there is one, and their tangents: in the first order the second number.
    #[inline(always)]
    pub fn read<M: Matrix>(
        &self,
        by: M,
        [sum, value]: [&mut [f32]; 2],
        with: Option<&[Words<'_>; 2]>,
        mut pass: impl FnMut(usize, [f32; 2]),
    ) {
        self.multiply(by, sum, value, with.is_some());
        if let Some(with) = with {
            for i in self.tokens.clone().step_by(2) {
                let dots = self.dots(by, with, i, [sum, value]);
                for (i, dots) in (i..self.tokens.end).zip(dots) {
                    pass(i, dots);
                }
            }
        }
        self.weigh(by, sum, value);
    }

    /// `sum` ← x S or, in the second order, ẋ S + x Ṡ, and `value` ← x S where that is read.
    #[inline(always)]
    fn multiply<M: Matrix>(&self, by: M, sum: &mut [f32], value: &mut [f32], is_read: bool) {
        let Reading { rows: [x, tangent], states: [state, of_state], .. } = self;
        if !self.second {
            return self.add(by, x, *state, sum, true);
        }
        if is_read || self.end.bent {
            self.add(by, x, *state, value, true);
        }
        self.add(by, x, *of_state, sum, true);
        if !tangent.is_absent() {
            self.add(by, tangent, *state, sum, false);
        }
    }

    #[inline(always)]
    fn add<M: Matrix>(
        &self,
        by: M,
        rows: &Words<'_>,
        state: Pieces<'_>,
        c: &mut [f32],
        fresh: bool,
    ) {
        let block = self.tokens.start / BLOCK;
        multiply_state(by, (rows, block), state, self.wide, (c, self.stride), fresh);
    }

    /// Products of rows `i` and `i + 1` of an operand with what [`Reading::multiply`] gave, and their tangents.
    #[inline(always)]
    fn dots<M: Matrix>(
        &self,
        by: M,
        [x, tangent]: &[Words<'_>; 2],
        i: usize,
        [sum, value]: [&[f32]; 2],
    ) -> [[f32; 2]; 2] {
        let at = i - self.tokens.start;
        let mut dots = [[0.0; 2], x.dots(by, i, two_rows(sum, self.stride, at))];
        if self.second {
            let value = two_rows(value, self.stride, at);
            dots[0] = x.dots(by, i, value);
            if !tangent.is_absent() {
                let more = tangent.dots(by, i, value);
                dots[1] = [dots[1][0] + more[0], dots[1][1] + more[1]];
            }
        }
        [[dots[0][0], dots[1][0]], [dots[0][1], dots[1][1]]]
    }

    /// `sum` ← w sum or, in the second order, w sum + ẇ value.
    #[inline(always)]
    fn weigh<M: Matrix>(&self, by: M, sum: &mut [f32], value: &[f32]) {
        let (isa, lanes, End { decays, weights, bent, plain, .. }) =
            (by.isa(), F32::<M>::N, self.end);
        if *plain {
            return;
        }
        for (r, i) in self.tokens.clone().enumerate() {
            let row = r * self.stride..(r + 1) * self.stride;
            if decays[i] == 0.0 {
                sum[row].fill(0.0);
                continue;
            }
            let weight = F32::<M>::splat(isa, weights[0][i]);
            for at in row.step_by(lanes) {
                let mut x = F32::<M>::load(isa, &sum[at..]) * weight;
                if *bent {
                    let tangent = F32::<M>::splat(isa, weights[1][i]);
                    x = tangent.mul_add(F32::<M>::load(isa, &value[at..]), x);
                }
                x.store(&mut sum[at..]);
            }
        }
    }
}

/// Row `first` of a sum, and the next one.
#[inline(always)]
fn two_rows(sum: &[f32], stride: usize, first: usize) -> [&[f32]; 2] {
    let (row, next) = sum[first * stride..][..2 * stride].split_at(stride);
    [row, next]
}
