//! The host's backward pass, row by row.

use super::bugs;
use super::pairs::Lazy;
use crate::roster::attention::{Gradients, Pair, Query};
use crate::zoo::rows::{Results, dot};

/// A visible pair of a row.
struct Visible {
    j: usize,
    p: f32,
    e: f32,
    active: bool,
    /// dout · v of an active pair.
    g: f32,
}

pub(super) fn backward(lazy: &Lazy<'_>) -> Results {
    let bias = lazy.problem.bias_shape().unwrap_or([0; 2]);
    let mut out = Gradients::new(&lazy.heads, &bias);
    for query in lazy.heads.queries() {
        let pairs = row(lazy, query, &mut out);
        out.add(&lazy.heads, query, &pairs);
    }
    out.results("dtau")
}

/// The visible pairs of a row.
fn visible(lazy: &Lazy<'_>, query: Query) -> Vec<Visible> {
    let (job, at) = (lazy.job, query.at());
    let (dout, lse) = (job.input("dout").row(at), job.input("lse").row(at)[0]);
    let scores = lazy.scores(query);
    let seen = || scores.iter().enumerate().filter(|(_, score)| score.seen);
    let count = seen().count();
    // True if values of inactive pairs enter a gradient.
    let reads_idle = job.is(bugs::DTAU_THROUGH_THE_KINK) || job.is(bugs::GRADIENT_OF_IDLE);
    let pair = |j, s| {
        let p = job.exp(s, lse);
        let (e, active) = lazy.raised(query, j, count, p);
        let reads = active || reads_idle;
        let g = if reads { dot(dout, lazy.heads.v.row(lazy.heads.key(query, j))) } else { 0.0 };
        Visible { j, p, e, active, g }
    };
    seen().map(|(j, score)| pair(j, score.s)).collect()
}

/// (E9) to (E14): the pairs of a row; adds to the gradients of the bias and of τ.
fn row(lazy: &Lazy<'_>, query: Query, out: &mut Gradients) -> Vec<Pair> {
    let job = lazy.job;
    let visible = visible(lazy, query);
    let counted = |x: &&Visible| x.active || job.is(bugs::DTAU_THROUGH_THE_KINK);
    let sum: f32 = visible.iter().filter(counted).map(|x| x.g).sum();
    if !visible.is_empty() {
        let count = if job.is(bugs::DTAU_WITHOUT_COUNT) { 1 } else { visible.len() };
        out.of_heads.data[query.h] += sum / count as f32; // (E14)
    }
    let of_row = delta(lazy, query, &visible);
    let mut pairs = Vec::new();
    for tile in job.tiles(query.sequence.keys) {
        let place = |j| visible.partition_point(|x| x.j < j);
        let tile = &visible[place(tile.start)..place(tile.end)];
        if job.is(bugs::INACTIVE_TILE_SKIPPED) && !tile.iter().any(|x| x.active) {
            continue;
        }
        let of_tile = job.is(bugs::DELTA_PER_TILE);
        let delta = if of_tile { delta(lazy, query, tile) } else { of_row };
        pairs.extend(tile.iter().map(|x| pair(lazy, query, x, delta, out)));
    }
    pairs
}

/// (E8): Δ of a row, or in one mutant of a tile.
fn delta(lazy: &Lazy<'_>, query: Query, pairs: &[Visible]) -> f32 {
    let (job, at) = (lazy.job, query.at());
    if job.is(bugs::DELTA_OF_OUTPUT) {
        return dot(job.input("dout").row(at), job.input("o").row(at));
    }
    let counted = |x: &&Visible| x.active || job.is(bugs::GRADIENT_OF_IDLE);
    pairs.iter().filter(counted).map(|x| x.p * x.g).sum()
}

fn pair(lazy: &Lazy<'_>, query: Query, x: &Visible, delta: f32, out: &mut Gradients) -> Pair {
    let job = lazy.job;
    let dlse = job.given("dlse").map_or(0.0, |dlse| dlse.row(query.at())[0]);
    let g = if x.active || job.is(bugs::GRADIENT_OF_IDLE) { x.g } else { 0.0 };
    let dropped = job.is(bugs::INACTIVE_PAIR_SKIPPED) && !x.active;
    let ds = if dropped { 0.0 } else { x.p * (g + dlse - delta) };
    let mut far = lazy.distance(query, x.j);
    if job.is(bugs::FAR_GRADIENT_IN_LAST_COLUMN) {
        far = far.or(lazy.problem.bias.map(|reach| reach.width - 1));
    }
    let skipped = job.is(bugs::DBIAS_OF_ACTIVE_ALONE) && !x.active;
    if let Some(far) = far.filter(|_| !skipped) {
        out.dbias.row_mut([query.h, far, 0])[0] += ds; // (E13)
    }
    Pair { j: x.j, ds: lazy.heads.scale * ds, weight: x.active.then_some(x.e) }
}
