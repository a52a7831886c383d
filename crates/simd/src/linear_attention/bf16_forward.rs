//! The chunks of the forward pass in bf16: of [`super::forward`] what is multiplied, 32 queries at a time. Weights
//! P_ij (q_i·k_j), rows ω_j v_j and the state are rounded once each.

use super::bf16_state::{Rounded, multiply_state, scale_rows};
use super::cut::Cut;
use super::decays::Decays;
use super::schedule::Uses;
use super::state::Shape;
use super::words::{Forms, Words};
use crate::Level;
use crate::element::{Tensor, TensorMut};
use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::pack::Form;
use crate::tile::STRIDE;
use crate::workspace::Parts;
use ndarray::{Ix2, s};

/// The memory of one thread.
pub struct TileScratch<'m> {
    q: Words<'m>,
    pub k: Words<'m>,
    pub v: Words<'m>,
    /// Scores of 32 queries, P of one, and weights of the 32.
    s: &'m mut [f32],
    p: &'m mut [f32],
    weights: &'m mut [f32],
    /// S.
    state: Rounded<'m>,
    pieces: usize,
}

impl<'m> TileScratch<'m> {
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, shape: Shape) -> Self {
        let Shape { dim, width, .. } = shape;
        let room = |len: usize| if cut.bf16 { len } else { 0 };
        TileScratch {
            q: Words::new(parts, cut, dim, [true, false, false, false, false]),
            k: Words::new(parts, cut, dim, [true, true, true, false, true]),
            v: Words::new(parts, cut, width, [true, false, true, true, false]),
            s: parts.room(room(BLOCK * STRIDE)),
            p: parts.room(room(STRIDE)),
            weights: parts.room(room(cut.pieces * Form::len(BLOCK, cut.chunk))),
            state: Rounded::new(parts, shape, cut.pieces, [cut.bf16, false]),
            pieces: cut.pieces,
        }
    }
}

impl TileScratch<'_> {
    /// Packs keys and values.
    pub fn read_keys(
        &mut self,
        level: Level,
        decays: &Decays<'_>,
        [k, v]: [Option<Tensor<'_, Ix2>>; 2],
        len: usize,
        Uses { results, state }: Uses,
    ) {
        let tokens = decays.first..len;
        let of_k = Forms { across: results, along: state, columns: state, weights: None };
        self.k.pack(level, k, of_k, tokens.clone());
        let weights = (state && !decays.none).then_some(&*decays.omega);
        self.v.pack(level, v, Forms { along: true, weights, ..Forms::default() }, tokens);
    }

    /// Rounds S.
    pub fn round(&mut self, level: Level, shape: Shape, state: &[f32]) {
        self.state.round(level, shape, state);
    }

    /// Reads the queries of a head.
    pub fn read_queries(&mut self, level: Level, q: Option<Tensor<'_, Ix2>>) {
        self.q.pack(level, q, Forms::default(), 0..0);
    }
}

/// (R21), for one query head.
pub struct Outputs<'a, 'm> {
    pub len: usize,
    /// True if S is 0.
    pub blank: bool,
    pub decays: &'a mut Decays<'m>,
    /// o / σ of 32 queries, rows `stride` apart.
    pub o: &'a mut [f32],
    pub stride: usize,
    pub scratch: &'a mut TileScratch<'m>,
    /// o, and σ.
    pub to: TensorMut<'a, Ix2>,
    pub scale: f32,
}

impl MatrixKernel for Outputs<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(mut self, by: M) {
        for block in 0..self.len.div_ceil(BLOCK) {
            self.block(by, block);
        }
    }
}

impl Outputs<'_, '_> {
    /// o of 32 queries.
    #[inline(always)]
    fn block<M: Matrix>(&mut self, by: M, block: usize) {
        let Outputs { len, blank, decays, o, stride, scratch, to, scale } = self;
        let TileScratch { q, k, v, s: scores, p, weights, state, pieces } = &mut **scratch;
        let (first, stride) = (block * BLOCK, *stride);
        let rows = first..(*len).min(first + BLOCK);
        let o = &mut o[..BLOCK * stride];
        let cols = first + BLOCK;
        q.scores(by, block, k, (scores, cols), true);
        match blank {
            true => o.fill(0.0),
            false => {
                let [along, _] = state.factors();
                multiply_state(by, (q, block), along, v.tiles(), (o, stride), true);
                if !decays.none {
                    scale_rows(
                        by.isa(),
                        &mut o[..rows.len() * stride],
                        stride,
                        &decays.alpha[first..],
                    );
                }
            }
        }
        for r in 0..BLOCK {
            let row = &mut scores[r * STRIDE..][..cols];
            let none = decays.none;
            let p = weigh(by, decays, first + r, p, row, (weights, *pieces));
            if !v.finite && rows.contains(&(first + r)) {
                let sum = &mut o[r * stride..][..stride];
                for j in seen(none, p, first + r) {
                    v.add(if none { row[j] } else { row[j] * p[j] }, j, sum);
                }
            }
        }
        if v.finite {
            let (cols, depth, b) = (v.tiles(), cols / BLOCK, v.summed(0));
            for words in Pieces::new(weights, *pieces).each() {
                let (c, a) = (&mut *o, Tiles { words, steps: [depth, 1] });
                by.multiply(Product { c, stride, fresh: false, a, b, rows: 2, cols, depth });
            }
        }
        to.view_mut().slice(s![rows, ..]).write_rows(o, stride, *scale);
    }
}

/// Scores of query `i` and of the keys from the chunk's first on become weights, in the words of a row of a left
/// factor: times P, and 0 where P is, or without decays where j > i. Returns P, unless nothing decays.
#[inline(always)]
fn weigh<'p, M: Matrix>(
    by: M,
    decays: &'p mut Decays<'_>,
    i: usize,
    p: &'p mut [f32],
    row: &mut [f32],
    (weights, pieces): (&mut [f32], usize),
) -> &'p [f32] {
    let (isa, lanes, r, depth) = (by.isa(), F32::<M>::N, i % BLOCK, row.len() / BLOCK);
    let line = r / SIDE * depth * WORDS + r % SIDE * SIDE;
    let lines = (line..).step_by(WORDS).take(depth);
    if decays.none {
        row[i + 1..].fill(0.0);
        for (col, line) in (0..).step_by(BLOCK).zip(lines) {
            for part in (0..SIDE).step_by(lanes) {
                let col = col + 2 * part;
                let low = F32::<M>::load(isa, &row[col..]);
                let high = F32::<M>::load(isa, &row[col + lanes..]);
                Pairing::Neighbours.store(by, [low, high], (weights, line + part), pieces);
            }
        }
        return p;
    }
    let (p, zero) = (decays.of_row(isa, i, 0..row.len(), p), F32::<M>::splat(isa, 0.0));
    for (col, line) in (0..).step_by(BLOCK).zip(lines) {
        for part in (0..SIDE).step_by(lanes) {
            let col = col + 2 * part;
            let mut pair = [zero; 2];
            for (n, weight) in pair.iter_mut().enumerate() {
                let p = F32::<M>::load(isa, &p[col + n * lanes..]);
                let score = F32::<M>::load(isa, &row[col + n * lanes..]);
                *weight = zero.select_less(p, score * p, zero);
            }
            Pairing::Neighbours.store(by, pair, (weights, line + part), pieces);
        }
    }
    p
}

/// The keys that query `i` sees.
pub fn seen(none: bool, p: &[f32], i: usize) -> impl Iterator<Item = usize> + use<'_> {
    (0..=i).filter(move |&j| none || p[j] > 0.0)
}
