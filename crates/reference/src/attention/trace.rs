//! After the tile t of a walk over keys, and after the tile r of a walk over queries, with P, δ and dS of the whole
//! row:
//!
//! ```text
//! (W1)  lse_i^t = ln Σ_j e^{S_ij}             over the visible j of the tiles so far
//! (W2)  o_i^t   = Σ_j e^{S_ij − lse_i^t} v_j  likewise
//! (W3)  dq_i^t  = σ Σ_j ds_ij k_j             likewise
//! (W4)  dk_j^r  = σ Σ_i ds_ij q_i             over the queries of the tiles so far, of one query head
//! (W5)  dv_j^r  = Σ_i P_ij dout_i             likewise
//! ```

use super::backward::{BackwardOperands, First};
use super::forward::Operands;
use crate::heads::Query;
use crate::named::ByName;
use crate::parallel::map;
use crate::scalar::Real;
use crate::scores::Visible;
use crate::tensor::add_scaled;
use crate::traced::{Piece, Pieces};
use etalon_problem::{Attention, Error, Operand, Pass, Sequence, SinkPlace, Walk};
use std::ops::Range;

/// The pieces of the tensors that are wanted.
pub(crate) fn pieces<T: Real>(
    problem: &Attention,
    pass: Pass,
    x: &ByName<'_, T>,
    walk: &Walk,
    wanted: &[Operand],
) -> Result<Vec<Piece<T>>, Error> {
    let inputs = x.get()?;
    let cotangents = if pass == Pass::Backward { Some(x.get()?) } else { None };
    let backward = cotangents.as_ref();
    let backward = backward.map(|x| BackwardOperands::new(problem, &inputs, x)).transpose()?;
    let own = Operands::new(problem, &inputs)?;
    let forward = backward.as_ref().map_or(&own, |x| &x.forward);
    let whole = problem.clone().into();
    let (heads, rows) = (walk.heads(&whole), walk.rows(&whole));
    let sequences = problem.scores.sequences();
    let place = |sequence| heads.iter().enumerate().map(move |(at, &head)| (sequence, head, at));
    let places: Vec<(&Sequence, usize, usize)> = sequences.iter().flat_map(place).collect();
    let tracer = Tracer { problem, forward, backward: backward.as_ref(), walk, wanted, rows };
    let parts = map(places, |(sequence, head, at)| tracer.head(sequence, head, at));
    Ok(parts.into_iter().flatten().collect())
}

struct Tracer<'a, T: Real> {
    problem: &'a Attention,
    forward: &'a Operands<'a, T>,
    backward: Option<&'a BackwardOperands<'a, T>>,
    walk: &'a Walk,
    wanted: &'a [Operand],
    rows: Range<usize>,
}

/// The place of a head of a sequence.
struct Place<'a> {
    sequence: &'a Sequence,
    /// Its number among those that the trace holds.
    head: usize,
    /// For each tile of keys whether the tile of queries at hand sees one of them.
    visited: Vec<bool>,
    /// Keys of a tile.
    tile: usize,
}

impl Place<'_> {
    /// The tiles that are visited, each with its keys.
    fn tiles(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let keys = |t: usize| t * self.tile..self.sequence.keys.min((t + 1) * self.tile);
        let visited = self.visited.iter().enumerate().filter(|(_, visited)| **visited);
        visited.map(move |(t, _)| (t, keys(t)))
    }
}

impl<T: Real> Tracer<'_, T> {
    fn head(&self, sequence: &Sequence, head: usize, at: usize) -> Vec<Piece<T>> {
        let Some(tile) = self.walk.tile else { return Vec::new() };
        let (dim, width) = (self.problem.scores.extents.dim, self.problem.value_dim);
        let mut sums = [dim, width].map(|width| vec![T::ZERO; sequence.keys * width]);
        let mut pieces = Pieces::new(self.wanted);
        for r in self.walk.queries.tiles(sequence.queries.div_ceil(tile.queries)) {
            let queries = r * tile.queries..sequence.queries.min((r + 1) * tile.queries);
            let held = |i: &usize| self.rows.contains(&(sequence.query_start + i));
            if !queries.clone().any(|i| held(&i)) {
                continue;
            }
            let mut visited = vec![false; sequence.keys.div_ceil(tile.keys)];
            let mut rows: Vec<(Query<'_>, Visible<T>)> = Vec::new();
            for i in queries {
                let query = Query::new(&self.problem.scores, sequence, head, i);
                let visible = self.forward.scores.visible(&query);
                visible.0.iter().for_each(|j| visited[j / tile.keys] = true);
                rows.push((query, visible));
            }
            let place = Place { sequence, head: at, visited, tile: tile.keys };
            for (query, visible) in rows.iter().filter(|(query, _)| held(&query.i)) {
                self.row(&place, query, visible, &mut pieces, &mut sums);
            }
            for (t, keys) in place.tiles() {
                let [b, first] = [sequence.batch, sequence.key_start + t * tile.keys];
                for (name, sums, width) in [("dk", &sums[0], dim), ("dv", &sums[1], width)] {
                    let elements = || sums[keys.start * width..keys.end * width].to_vec();
                    pieces.push(name, &[r, b, at, first], elements);
                }
            }
        }
        pieces.finish()
    }

    fn row(
        &self,
        place: &Place<'_>,
        query: &Query<'_>,
        visible: &Visible<T>,
        pieces: &mut Pieces<'_, T>,
        sums: &mut [Vec<T>; 2],
    ) {
        let (scores, sequence) = (&self.forward.scores, place.sequence);
        let [b, h, i] =
            [sequence.batch, place.head, sequence.query_start + query.i - self.rows.start];
        let first = self.backward.map(|backward| backward.row(query));
        let whole = scores.weighed(query, visible.clone(), scores.sink(query));
        let early = scores.sink(query).filter(|_| self.walk.sinks == SinkPlace::First);
        for (t, keys) in place.tiles() {
            let seen = |j: &usize| self.walk.keys.has_seen(j / place.tile, t);
            let so_far = chosen(visible, seen);
            if !so_far.0.is_empty() {
                let row = scores.weighed(query, so_far, early); // (W1)
                pieces.push("lse", &[t, b, h, i], || vec![row.lse]);
                pieces.push("o", &[t, b, h, i], || self.forward.output(&row)); // (W2)
            }
            if !visible.0.is_empty() {
                let at = [b, h, i, sequence.key_start + keys.start];
                pieces.push("p", &at, || spread(&whole.keys, &whole.p, keys.clone()));
                if let Some(first) = &first {
                    let spread = || spread(&first.row.keys, &first.d_scores, keys.clone());
                    pieces.push("dS", &at, spread);
                }
            }
            if let Some(first) = &first {
                pieces.push("dq", &[t, b, h, i], || self.gradient(first, seen)); // (W3)
            }
        }
        if let (Some(first), Some(backward)) = (first, self.backward) {
            let [dk, dv] = sums;
            let [q, dout] = [scores.q.row(query.row), backward.dout.row(query.row)];
            for (n, (j, p)) in first.row.weights().enumerate() {
                let ds = scores.slope(first.row.s[n]) * first.d_scores[n];
                add_scaled(&mut dk[j * q.len()..][..q.len()], scores.scale * ds, q); // (W4)
                add_scaled(&mut dv[j * dout.len()..][..dout.len()], p, dout); // (W5)
            }
        }
    }

    /// (W3)
    fn gradient(&self, first: &First<'_, T>, seen: impl Fn(&usize) -> bool) -> Vec<T> {
        let (scores, row) = (&self.forward.scores, &first.row);
        let mut dq = vec![T::ZERO; self.problem.scores.extents.dim];
        for (n, j) in row.keys.iter().enumerate().filter(|(_, j)| seen(j)) {
            let ds = scores.slope(row.s[n]) * first.d_scores[n]; // (B4)
            add_scaled(&mut dq, scores.scale * ds, scores.k.row(row.query.key(*j)));
        }
        dq
    }
}

/// Some of the keys of a row.
fn chosen<T: Real>((keys, s, scores): &Visible<T>, seen: impl Fn(&usize) -> bool) -> Visible<T> {
    let of = |x: &[T]| -> Vec<T> {
        keys.iter().zip(x).filter(|(j, _)| seen(j)).map(|(_, &x)| x).collect()
    };
    (keys.iter().copied().filter(&seen).collect(), of(s), of(scores))
}

/// The numbers of the keys of a tile: 0 of those that are not visible.
fn spread<T: Real>(visible: &[usize], numbers: &[T], keys: Range<usize>) -> Vec<T> {
    let mut elements = vec![T::ZERO; keys.len()];
    for (j, &x) in visible.iter().zip(numbers).filter(|(j, _)| keys.contains(j)) {
        elements[j - keys.start] = x;
    }
    elements
}
