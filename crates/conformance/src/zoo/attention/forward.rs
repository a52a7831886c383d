//! The host's forward pass: each row streams over the key tiles.

use super::{Job, Rows};
use crate::zoo::host::{Softmax, through_bf16};
use crate::zoo::mutant::Mutant;
use etalon_problem::{Pass, Sequence};

pub(super) struct Forward {
    pub o: Rows,
    pub lse: Rows,
}

/// The running state of a row: o = acc / l, with weights relative to e^m.
struct State {
    m: f32,
    l: f32,
    acc: Vec<f32>,
}

impl Job {
    pub(super) fn forward(&self) -> Forward {
        let e = self.scores().extents;
        let shape = [e.batch, e.query_heads, e.queries, self.value_dim];
        let mut o = Rows::filled(shape, 0.0);
        let mut lse = Rows::filled([e.batch, e.query_heads, e.queries, 1], f32::NEG_INFINITY);
        for sequence in self.sequences(Pass::Forward) {
            for h in 0..e.query_heads {
                for i in 0..sequence.queries {
                    let row = sequence.query_start + i;
                    let (state, weight) = self.row(&sequence, h, i);
                    lse.row_mut(sequence.batch, h, row)[0] = self.lse(&state, h);
                    for (o, acc) in o.row_mut(sequence.batch, h, row).iter_mut().zip(&state.acc) {
                        *o = if weight { acc / state.l } else { 0.0 };
                    }
                }
            }
        }
        Forward { o, lse }
    }

    /// The state after all keys, and whether any key had weight.
    fn row(&self, sequence: &Sequence, h: usize, i: usize) -> (State, bool) {
        let lowest = if self.is(Mutant::FiniteSentinel) { -1e4 } else { f32::NEG_INFINITY };
        let mut state = State { m: lowest, l: 0.0, acc: vec![0.0; self.value_dim] };
        if self.style.softmax == Softmax::TwoPass {
            (0..sequence.keys).for_each(|j| self.raise(&mut state.m, sequence, h, i, j));
        }
        if self.is(Mutant::ConstantMaximum) {
            state.m = 10.0;
        }
        if let Some(sinks) = self.sinks.as_ref().filter(|_| !self.is(Mutant::SinkNotInMaximum)) {
            let first = state.m;
            state.m = if first.is_nan() { first } else { first.max(sinks[h]) };
            state.l = self.exp(sinks[h] - state.m);
        }
        let mut weight = self.is(Mutant::EmptyRowIsNan);
        let tiles = self.tiles(sequence);
        let last = tiles.len();
        for (number, tile) in tiles.into_iter().enumerate() {
            weight |= self.tile(&mut state, sequence, (h, i), tile, number + 1 == last);
        }
        if let Some(sinks) = self.sinks.as_ref().filter(|_| self.is(Mutant::SinkNotInMaximum)) {
            state.l += self.exp(sinks[h] - state.m);
        }
        (state, weight)
    }

    fn raise(&self, m: &mut f32, sequence: &Sequence, h: usize, i: usize, j: usize) {
        let seen = self.visible(sequence, h, i, j, Pass::Forward);
        if seen || self.is(Mutant::MaximumOfInvisible) {
            let s = self.score(sequence, h, i, j).s;
            // NaN wins: `max` would drop it.
            *m = if s.is_nan() || m.is_nan() { f32::NAN } else { m.max(s) };
        }
    }

    /// One step of the streaming softmax: raise the maximum, rescale, add.
    fn tile(
        &self,
        state: &mut State,
        sequence: &Sequence,
        (h, i): (usize, usize),
        tile: std::ops::Range<usize>,
        last: bool,
    ) -> bool {
        let mut m = state.m;
        let fixed = self.style.softmax == Softmax::TwoPass || self.is(Mutant::ConstantMaximum);
        if !fixed {
            tile.clone().for_each(|j| self.raise(&mut m, sequence, h, i, j));
        }
        let far = m > state.m + 5.0 || state.m == f32::NEG_INFINITY || m.is_nan();
        if m != state.m && (self.style.softmax != Softmax::Lazy || far) {
            let factor = if state.m == f32::NEG_INFINITY { 0.0 } else { self.exp(state.m - m) };
            let skipped = self.is(Mutant::NoRescaleInLastTile) && last;
            if !self.is(Mutant::NoRescaleOfL) && !skipped {
                state.l *= factor;
            }
            if !self.is(Mutant::NoRescaleOfO) && !skipped {
                state.acc.iter_mut().for_each(|x| *x *= factor);
            }
            state.m = m;
        }
        if self.is(Mutant::EmptyTileIsNan) && m == f32::NEG_INFINITY {
            state.l = f32::NAN; // e^(−∞ − −∞)
        }
        let mut weight = false;
        for j in tile {
            let s = self.score(sequence, h, i, j).s;
            let seen = self.visible(sequence, h, i, j, Pass::Forward) && s != f32::NEG_INFINITY;
            if !seen && !self.is(Mutant::TimesZero) {
                continue;
            }
            weight |= seen;
            let p = if seen { self.exp(s - state.m) } else { 0.0 };
            state.l += p;
            if self.value_dim > 0 {
                let v = self.v.row(sequence.batch, self.key_head(h), sequence.key_start + j);
                state.acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += p * v);
            }
        }
        weight
    }

    /// (F3).
    fn lse(&self, state: &State, h: usize) -> f32 {
        let mut l = state.l;
        if let Some(sinks) = self.sinks.as_ref().filter(|_| self.is(Mutant::SinkNotInLse)) {
            l -= self.exp(sinks[h] - state.m);
        }
        let lse = match l {
            0.0 => f32::NEG_INFINITY,
            _ => state.m + l.ln(),
        };
        match self.mutant {
            Some(Mutant::LseInBase2) => lse * std::f32::consts::LOG2_E,
            Some(Mutant::LseInBf16) => through_bf16(lse),
            _ => lse,
        }
    }
}
