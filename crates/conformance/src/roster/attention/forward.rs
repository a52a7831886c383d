//! The host's forward pass: each row streams over the key tiles.

use super::bugs;
use super::scores::{Heads, Query, Score};
use crate::zoo::job::Softmax;
use crate::zoo::rows::{Results, Rows, add, larger, off_by};

/// The running state of a row: o = acc / l, with weights relative to e^m.
struct State {
    m: f32,
    l: f32,
    acc: Vec<f32>,
}

pub(super) fn forward(heads: &Heads<'_>) -> Results {
    let [b, h, n] = heads.scores.row_shape();
    let mut o = Rows::filled(&[b, h, n, heads.v.shape[3]], 0.0);
    let mut lse = Rows::filled(&[b, h, n], f32::NEG_INFINITY);
    for query in heads.queries() {
        let scores = heads.row(query, |j| heads.bias(query, j));
        let row = o.row_mut(query.at());
        lse.row_mut(query.at())[0] = stream(heads, query, &scores, row);
    }
    Results::from([("o", o), ("lse", lse)])
}

/// Writes o of a row, which may be empty where nobody asks for it, and returns lse.
pub(crate) fn stream(heads: &Heads<'_>, query: Query, scores: &[Score], o: &mut [f32]) -> f32 {
    let job = heads.job;
    let lowest = if job.is(bugs::FINITE_SENTINEL) { -1e4 } else { f32::NEG_INFINITY };
    let mut state = State { m: lowest, l: 0.0, acc: vec![0.0; o.len()] };
    if job.style.softmax == Softmax::TwoPass {
        state.m = maximum(scores);
    }
    if job.is(bugs::CONSTANT_MAXIMUM) {
        state.m = 10.0;
    }
    let sink = job.given("sinks").map(|sinks| sinks.data[query.h]);
    if sink == Some(f32::INFINITY) && !scores.iter().any(|score| score.seen) {
        return f32::INFINITY;
    }
    if let Some(sink) = sink.filter(|_| !job.is(bugs::SINK_NOT_IN_MAXIMUM)) {
        state.m = if state.m.is_nan() { state.m } else { state.m.max(sink) };
        state.l = job.exp(sink, state.m);
    }
    for tile in job.tiles(scores.len()) {
        let last = tile.end == scores.len();
        raise(heads, &mut state, &scores[tile.clone()], last);
        for j in tile.filter(|&j| scores[j].seen || job.is(bugs::TIMES_ZERO)) {
            let p = if scores[j].seen { job.exp(scores[j].s, state.m) } else { 0.0 };
            let off = job.is(bugs::EXP_OFF) && scores[j].s < state.m;
            let p = if off { p * off_by(16.0) } else { p };
            state.l += p;
            add(&mut state.acc, p, heads.v.row(heads.key(query, j)));
        }
    }
    if let Some(sink) = sink.filter(|_| job.is(bugs::SINK_NOT_IN_MAXIMUM)) {
        state.l += job.exp(sink, state.m);
    }
    // A row without weight keeps o = 0.
    if state.l != 0.0 {
        o.iter_mut().zip(&state.acc).for_each(|(o, acc)| *o = acc / state.l);
    }
    let left_out = sink.filter(|_| job.is(bugs::SINK_NOT_IN_LSE));
    let l = state.l - left_out.map_or(0.0, |sink| job.exp(sink, state.m));
    match l {
        0.0 => f32::NEG_INFINITY,
        l if job.is(bugs::LOG_OFF) => state.m + l.ln() * off_by(16.0),
        l => job.lse(state.m, l), // (F3)
    }
}

/// Raises the maximum to that of a tile, and rescales.
fn raise(heads: &Heads<'_>, state: &mut State, tile: &[Score], last: bool) {
    let job = heads.job;
    let fixed = job.style.softmax == Softmax::TwoPass || job.is(bugs::CONSTANT_MAXIMUM);
    let found = if fixed { state.m } else { maximum(tile) };
    let (m, factor) = job.raise(state.m, found);
    state.m = m;
    let skipped = job.is(bugs::NO_RESCALE_IN_LAST_TILE) && last;
    if !job.is(bugs::NO_RESCALE_OF_L) && !skipped {
        state.l *= factor;
    }
    if !job.is(bugs::NO_RESCALE_OF_O) && !skipped {
        state.acc.iter_mut().for_each(|x| *x *= factor);
    }
    if job.is(bugs::EMPTY_TILE_IS_NAN) && m == f32::NEG_INFINITY {
        state.l = f32::NAN; // e^(−∞ − −∞)
    }
}

/// The largest score; NaN if one is.
pub(crate) fn maximum(scores: &[Score]) -> f32 {
    scores.iter().fold(f32::NEG_INFINITY, |m, score| larger(m, score.s))
}
