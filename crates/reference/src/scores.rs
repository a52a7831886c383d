//! Code that attention, attention_lse and lazy attention share: the scores of a row, and the way back through
//! them. (Lazy attention's bias is one by distance, (E2), and stands for that of (F2).)
//!
//! ```text
//! (F1)  s_ij   = σ q_i·k_j
//! (F2)  S_ij   = c·tanh(s_ij/c) + bias_ij            (without softcap: s_ij + bias_ij)
//! (F3)  lse_i  = ln(Σ_j e^{S_ij} + e^{sink})         over the visible j
//! (F4)  P_ij   = e^{S_ij − lse_i},  π_i = e^{sink − lse_i}
//!       S'_ij  = 1 − tanh²(s_ij/c)                   (without softcap: 1)
//!       S''_ij = −2 tanh(s_ij/c) S'_ij / c           (without softcap: 0)
//! (B4)  ds_ij  = S'_ij dS_ij
//! (B5)  dq_i   = σ Σ_j ds_ij k_j
//! (B6)  dk_j   = σ Σ_i ds_ij q_i
//! ```
//!
//! A pair is visible if it lies in one sequence, the mask allows it and its score is not −∞. Only
//! visible pairs are ever read: what a masked key holds cannot leak, be it NaN.

use crate::heads::Query;
use crate::scalar::Real;
use crate::tensor::{MatrixMut, Rows, add_scaled, dot};
use etalon_problem::{DistanceBias, Error, Scores};
use ndarray::{ArrayView1, ArrayView2, ArrayView4, Axis};

/// The operands that make the scores.
pub(crate) struct ScoreOperands<'a, T: Real> {
    problem: &'a Scores,
    /// σ
    pub scale: T,
    cap: Option<T>,
    pub q: Rows<'a, T>,
    pub k: Rows<'a, T>,
    sinks: Option<ArrayView1<'a, T>>,
    bias: Bias<'a, T>,
}

/// The bias that is added to scores.
pub(crate) enum Bias<'a, T> {
    /// A number of each pair's own, or nothing: (F2).
    ByPair(Option<ArrayView4<'a, T>>),
    /// A number of each head for each distance in reach, `[Hq, W]`, and 0 beyond: (E2).
    ByDistance(DistanceBias, ArrayView2<'a, T>),
}

/// A row of scores, over its visible keys alone: every vector holds one number for each of `keys`.
pub(crate) struct Row<'a, T> {
    pub query: Query<'a>,
    /// The visible j, ascending.
    pub keys: Vec<usize>,
    /// s_ij
    pub s: Vec<T>,
    /// P_ij
    pub p: Vec<T>,
    /// lse_i: −∞ for a row that sees neither a key nor a sink.
    pub lse: T,
    /// π_i, if there is a sink.
    pub pi: Option<T>,
}

/// Keys, each with its s and S.
pub(crate) type Visible<T> = (Vec<usize>, Vec<T>, Vec<T>);

impl<T: Real> Row<'_, T> {
    /// The visible j, each with its P_ij.
    pub fn weights(&self) -> impl Iterator<Item = (usize, T)> {
        self.keys.iter().copied().zip(self.p.iter().copied())
    }
}

/// The row that a query sees of a tensor that is shaped as the bias, by the keys of its sequence; zero if
/// absent.
pub(crate) fn bias_row<'a, T: Real>(
    tensor: &'a Option<ArrayView4<'_, T>>,
    query: &Query<'_>,
) -> impl Fn(usize) -> T + use<'a, T> {
    let &Query { sequence, head, i, .. } = query;
    let row = tensor.as_ref().map(|tensor| {
        let batch = if tensor.dim().0 == 1 { 0 } else { sequence.batch };
        let head = if tensor.dim().1 == 1 { 0 } else { head };
        let head = tensor.index_axis(Axis(0), batch).index_axis_move(Axis(0), head);
        head.index_axis_move(Axis(0), sequence.query_start + i)
    });
    let first_key = sequence.key_start;
    move |j| row.map_or(T::ZERO, |row| row[first_key + j])
}

impl<'a, T: Real> ScoreOperands<'a, T> {
    pub fn new(
        problem: &'a Scores,
        q: &'a ArrayView4<'_, T>,
        k: &'a ArrayView4<'_, T>,
        sinks: &'a Option<ArrayView1<'_, T>>,
        bias: Bias<'a, T>,
    ) -> Result<Self, Error> {
        let sinks = sinks.as_ref().map(|sinks| sinks.view());
        let (scale, cap) = (T::from_f64(problem.scale()), problem.softcap.map(T::from_f64));
        let (q, k) = (Rows::new("q", q.view())?, Rows::new("k", k.view())?);
        Ok(ScoreOperands { problem, scale, cap, q, k, sinks, bias })
    }

    /// The row of a query.
    pub fn row<'q>(&self, query: &Query<'q>) -> Row<'q, T> {
        self.weighed(query, self.visible(query), self.sink(query))
    }

    /// The visible keys of a query, ascending, with s and S.
    pub fn visible(&self, query: &Query<'_>) -> Visible<T> {
        match &self.bias {
            Bias::ByPair(bias) => self.visible_scores(query, bias_row(bias, query)),
            Bias::ByDistance(reach, bias) => self.visible_scores(query, |j| {
                let distance = reach.distance(query.sequence, query.i, j);
                distance.map_or(T::ZERO, |d| bias[[query.head, d]])
            }),
        }
    }

    /// The sink of a query's head. One of −∞ weighs nothing: as if there were none.
    pub fn sink(&self, query: &Query<'_>) -> Option<T> {
        let sink = self.sinks.map(|sinks| sinks[query.head]);
        sink.filter(|sink| sink.to_f64() != f64::NEG_INFINITY)
    }

    /// The row of a query that sees these keys, and this sink beside them.
    pub fn weighed<'q>(
        &self,
        query: &Query<'q>,
        (keys, s, mut p): Visible<T>,
        sink: Option<T>,
    ) -> Row<'q, T> {
        // The maximum is subtracted as a constant: it cancels, so that it needs no derivative.
        let logits = p.iter().chain(&sink).map(|logit| logit.to_f64());
        let max =
            T::from_f64(logits.fold(f64::NEG_INFINITY, |max, x| if x > max { x } else { max }));
        let mut sum = T::ZERO;
        for p in &mut p {
            *p = (*p - max).exp();
            sum += *p;
        }
        let mut pi = sink.map(|sink| (sink - max).exp());
        if let Some(pi) = pi {
            sum += pi;
        }
        let lse = if keys.is_empty() && pi.is_none() {
            T::from_f64(f64::NEG_INFINITY)
        } else {
            max + sum.ln() // (F3)
        };
        p.iter_mut().chain(&mut pi).for_each(|p| *p = *p / sum); // (F4)
        match sink {
            // Nothing is subtracted from an infinite sink that counts alone.
            Some(sink) if keys.is_empty() && sink.to_f64() == f64::INFINITY => {
                Row { query: *query, keys, s, p, lse: sink, pi: Some(T::ONE) }
            }
            _ => Row { query: *query, keys, s, p, lse, pi },
        }
    }

    fn visible_scores(&self, query: &Query<'_>, bias: impl Fn(usize) -> T) -> Visible<T> {
        let most = query.sequence.keys;
        let (mut keys, mut s) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let mut scores = Vec::with_capacity(most);
        let q = self.q.row(query.row);
        for j in 0..query.sequence.keys {
            if !self.problem.mask.allows(query.sequence, query.head, query.i, j) {
                continue;
            }
            let s_ij = self.scale * dot(q, self.k.row(query.key(j))); // (F1)
            let score = self.cap.map_or(s_ij, |c| c * (s_ij / c).tanh()) + bias(j); // (F2)
            if score.to_f64() == f64::NEG_INFINITY {
                continue;
            }
            keys.push(j);
            s.push(s_ij);
            scores.push(score);
        }
        (keys, s, scores)
    }

    /// S′
    pub fn slope(&self, s: T) -> T {
        self.cap.map_or(T::ONE, |c| (s / c).tanh_slope())
    }

    /// S″
    pub fn curvature(&self, s: T) -> T {
        self.cap.map_or(T::ZERO, |c| T::from_f64(-2.0) * (s / c).tanh() * (s / c).tanh_slope() / c)
    }

    /// From the dS of a row to its dq, and to what it adds to dk.
    pub fn pull_back(
        &self,
        row: &Row<'_, T>,
        d_scores: &[T],
        dq: &mut [T],
        dk: &mut MatrixMut<'_, T>,
    ) {
        for (t, &j) in row.keys.iter().enumerate() {
            let ds = (self.slope(row.s[t]) * d_scores[t]).stored(); // (B4)
            add_scaled(dq, self.scale * ds, self.k.row(row.query.key(j))); // (B5)
            add_scaled(dk.row(j), self.scale * ds, self.q.row(row.query.row)); // (B6)
        }
    }
}
