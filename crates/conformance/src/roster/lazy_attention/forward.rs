//! The host's forward pass: lse as in attention, then o.

use super::bugs;
use super::pairs::Lazy;
use crate::roster::attention::{Query, Score, maximum, stream};
use crate::zoo::rows::{Results, Rows, add};

pub(super) fn forward(lazy: &Lazy<'_>) -> Results {
    let unwritten = if lazy.job.is(bugs::PADDING_UNWRITTEN) { 1e30 } else { 0.0 };
    let mut o = Rows::filled(&lazy.problem.o_shape(), unwritten);
    let mut lse = Rows::filled(&lazy.problem.scores.row_shape(), f32::NEG_INFINITY);
    for query in lazy.heads.queries() {
        let scores = lazy.scores(query);
        let sum = stream(&lazy.heads, query, &scores, &mut []); // (E3)
        lse.row_mut(query.at())[0] = sum;
        output(lazy, query, &scores, sum, o.row_mut(query.at()));
    }
    Results::from([("o", o), ("lse", lse)])
}

/// (E4) to (E6), tile by tile; tiles that their largest score shows to be inactive are left out.
fn output(lazy: &Lazy<'_>, query: Query, scores: &[Score], lse: f32, o: &mut [f32]) {
    let job = lazy.job;
    let count = scores.iter().filter(|score| score.seen).count();
    o.fill(0.0);
    let mut left = 0.0;
    for tile in job.tiles(scores.len()) {
        if skips(lazy, query, count, lse, maximum(&scores[tile.clone()])) {
            continue;
        }
        for j in tile.filter(|&j| scores[j].seen || job.is(bugs::OFFSET_OF_INVISIBLE)) {
            let p = if scores[j].seen { job.exp(scores[j].s, lse) } else { 0.0 };
            let (raised, active) = lazy.raised(query, j, count, p);
            if active || job.is(bugs::IDLE_TIMES_ZERO) {
                let e = if active { raised } else { 0.0 };
                left += e;
                add(o, e, lazy.heads.v.row(lazy.heads.key(query, j)));
            }
        }
    }
    if job.is(bugs::RENORMALISED) && left > 0.0 {
        o.iter_mut().for_each(|o| *o /= left);
    }
}

/// (E18), with a guard of 2⁻¹⁰: far more than the roundings of scores of ordinary size.
fn skips(lazy: &Lazy<'_>, query: Query, count: usize, lse: f32, maximum: f32) -> bool {
    let n = if lazy.job.is(bugs::SKIP_WITHOUT_COUNT) { 1 } else { count };
    if lazy.job.is(bugs::OFFSET_OF_INVISIBLE) || lazy.tau(query) >= 0.0 || n == 0 {
        return false;
    }
    let threshold = lse + (-lazy.tau(query) / n as f32).ln();
    let guard = 1e-3 * (1.0 + lse.abs() + maximum.abs());
    maximum < threshold - guard
}
