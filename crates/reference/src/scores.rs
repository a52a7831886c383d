//! What attention, attention_lse and lazy attention share: the scores of a row, and the way back
//! through them. (Lazy attention's bias is one by distance, (E2), and stands for that of (F2).)
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
//! (D1)  u⁰_ij  = σ (ddq_i·k_j + q_i·ddk_j)
//! (D2)  U_ij   = S'_ij u⁰_ij + ddbias_ij
//! (D4)  u_i    = Σ_j P_ij U_ij + π_i ddsink
//! (D9)  x_ij   = S'_ij X_ij + S''_ij u⁰_ij dS_ij
//! (D10) gq_i   = σ Σ_j (x_ij k_j + ds_ij ddk_j)
//! (D11) gk_j   = σ Σ_i (x_ij q_i + ds_ij ddq_i)
//! ```
//!
//! A pair is visible if it lies in one sequence, the mask allows it and its score is not −∞. Only
//! visible pairs are ever read: what a masked key holds cannot leak, be it NaN.

use crate::scalar::Real;
use crate::tensor::{Matrix, MatrixMut, Rows, add_scaled, dot};
use etalon_problem::{DistanceBias, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView2, ArrayView4, Axis};

/// The operands that make the scores.
pub(crate) struct ScoreOperands<'a, T: Real> {
    problem: &'a Scores,
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    sinks: Option<ArrayView1<'a, T>>,
    bias: Option<ArrayView4<'a, T>>,
}

impl<'a, T: Real> ScoreOperands<'a, T> {
    pub fn new(
        problem: &'a Scores,
        q: &'a ArrayView4<'_, T>,
        k: &'a ArrayView4<'_, T>,
        sinks: &'a Option<ArrayView1<'_, T>>,
        bias: &'a Option<ArrayView4<'_, T>>,
    ) -> Result<Self, Error> {
        let (q, k) = (Rows::new("q", q.view())?, Rows::new("k", k.view())?);
        let sinks = sinks.as_ref().map(|sinks| sinks.view());
        let bias = bias.as_ref().map(|bias| bias.view());
        Ok(ScoreOperands { problem, q, k, sinks, bias })
    }

    /// The scores of one query head in one sequence.
    pub fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadScores<'b, T> {
        let key_head = head / self.problem.group();
        HeadScores {
            problem: self.problem,
            sequence,
            head,
            scale: T::from_f64(self.problem.scale()),
            cap: self.problem.softcap.map(T::from_f64),
            q: self.q.matrix(sequence.batch, head, sequence.query_start),
            k: self.k.matrix(sequence.batch, key_head, sequence.key_start),
            // A sink of −∞ weighs nothing: as if there were none.
            sink: self
                .sinks
                .as_ref()
                .map(|sinks| sinks[head])
                .filter(|sink| sink.to_f64() != f64::NEG_INFINITY),
            bias: Bias::ByPair(Plane::new(&self.bias, sequence, head)),
        }
    }
}

/// A direction in the space of q, k, sinks and bias: tangents, or cotangents of their gradients.
/// What is absent is zero.
pub(crate) struct Direction<'a, T: Real> {
    ddq: Rows<'a, T>,
    ddk: Rows<'a, T>,
    ddsinks: Option<ArrayView1<'a, T>>,
    ddbias: Option<ArrayView4<'a, T>>,
}

impl<'a, T: Real> Direction<'a, T> {
    pub fn new(
        problem: &Scores,
        ddq: &'a Option<ArrayView4<'_, T>>,
        ddk: &'a Option<ArrayView4<'_, T>>,
        ddsinks: &'a Option<ArrayView1<'_, T>>,
        ddbias: &'a Option<ArrayView4<'_, T>>,
    ) -> Result<Self, Error> {
        let dim = problem.extents.dim;
        let ddq = Rows::or_zero("the direction of q", ddq, dim)?;
        let ddk = Rows::or_zero("the direction of k", ddk, dim)?;
        let ddsinks = ddsinks.as_ref().map(|sinks| sinks.view());
        let ddbias = ddbias.as_ref().map(|bias| bias.view());
        Ok(Direction { ddq, ddk, ddsinks, ddbias })
    }

    /// Its part in one query head of one sequence.
    pub fn head(&self, scores: &HeadScores<'_, T>) -> HeadDirection<'_, T> {
        let (sequence, head) = (scores.sequence, scores.head);
        let key_head = head / scores.problem.group();
        HeadDirection {
            ddq: self.ddq.matrix(sequence.batch, head, sequence.query_start),
            ddk: self.ddk.matrix(sequence.batch, key_head, sequence.key_start),
            ddsink: self.ddsinks.as_ref().map_or(T::ZERO, |ddsinks| ddsinks[head]),
            ddbias: Plane::new(&self.ddbias, sequence, head),
        }
    }
}

/// The part of a bias-shaped operand that one query head of one sequence sees; zero if absent.
struct Plane<'a, T> {
    head: Option<ArrayView2<'a, T>>,
    query_start: usize,
    key_start: usize,
}

impl<'a, T: Real> Plane<'a, T> {
    fn new(tensor: &'a Option<ArrayView4<'_, T>>, sequence: &Sequence, head: usize) -> Self {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let head = tensor.as_ref().map(|tensor| {
            let batch = if tensor.dim().0 == 1 { 0 } else { batch };
            let head = if tensor.dim().1 == 1 { 0 } else { head };
            tensor.index_axis(Axis(0), batch).index_axis_move(Axis(0), head)
        });
        Plane { head, query_start, key_start }
    }

    fn at(&self, i: usize, j: usize) -> T {
        let place = [self.query_start + i, self.key_start + j];
        self.head.as_ref().map_or(T::ZERO, |head| head[place])
    }
}

/// What the scores of one query head are raised by.
enum Bias<'a, T> {
    /// A number of each pair's own, or nothing: (F2).
    ByPair(Plane<'a, T>),
    /// A number for each distance in reach, `[W]`, and 0 beyond: (E2).
    ByDistance(DistanceBias, ArrayView1<'a, T>),
}

impl<T: Real> Bias<'_, T> {
    fn at(&self, sequence: &Sequence, i: usize, j: usize) -> T {
        match self {
            Bias::ByPair(plane) => plane.at(i, j),
            Bias::ByDistance(reach, bias) => {
                reach.distance(sequence, i, j).map_or(T::ZERO, |d| bias[d])
            }
        }
    }
}

/// A direction in one query head of one sequence.
pub(crate) struct HeadDirection<'a, T> {
    pub ddq: Matrix<'a, T>,
    pub ddk: Matrix<'a, T>,
    pub ddsink: T,
    ddbias: Plane<'a, T>,
}

/// The scores of one query head in one sequence.
pub(crate) struct HeadScores<'a, T> {
    problem: &'a Scores,
    sequence: &'a Sequence,
    head: usize,
    scale: T,
    cap: Option<T>,
    q: Matrix<'a, T>,
    k: Matrix<'a, T>,
    sink: Option<T>,
    bias: Bias<'a, T>,
}

/// A row of scores, over its visible keys alone: every vector holds one number for each of `keys`.
pub(crate) struct Row<T> {
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

impl<T: Real> Default for Row<T> {
    fn default() -> Self {
        Row { keys: Vec::new(), s: Vec::new(), p: Vec::new(), lse: T::ZERO, pi: None }
    }
}

impl<'a, T: Real> HeadScores<'a, T> {
    /// The same scores with a bias `[W]` by distance instead.
    pub fn biased_by_distance(self, reach: DistanceBias, bias: ArrayView1<'a, T>) -> Self {
        HeadScores { bias: Bias::ByDistance(reach, bias), ..self }
    }

    /// Computes row `i`.
    pub fn row(&self, i: usize, row: &mut Row<T>) {
        self.visible_scores(i, row);
        // The maximum is subtracted as a constant: it cancels, so that it needs no derivative.
        let logits = row.p.iter().chain(&self.sink).map(|logit| logit.to_f64());
        let max =
            T::from_f64(logits.fold(f64::NEG_INFINITY, |max, x| if x > max { x } else { max }));
        let mut sum = T::ZERO;
        for p in &mut row.p {
            *p = (*p - max).exp();
            sum += *p;
        }
        row.pi = self.sink.map(|sink| (sink - max).exp());
        if let Some(pi) = row.pi {
            sum += pi;
        }
        row.lse = if row.keys.is_empty() && row.pi.is_none() {
            T::from_f64(f64::NEG_INFINITY)
        } else {
            max + sum.ln() // (F3)
        };
        row.p.iter_mut().chain(&mut row.pi).for_each(|p| *p = *p / sum); // (F4)
    }

    /// The visible keys of row `i`, with s in `row.s` and S in `row.p`.
    fn visible_scores(&self, i: usize, row: &mut Row<T>) {
        row.keys.clear();
        row.s.clear();
        row.p.clear();
        for j in 0..self.sequence.keys {
            if !self.problem.mask.allows(self.sequence, self.head, i, j) {
                continue;
            }
            let s = self.scale * dot(self.q.row(i), self.k.row(j)); // (F1)
            // (F2)
            let score =
                self.cap.map_or(s, |c| c * (s / c).tanh()) + self.bias.at(self.sequence, i, j);
            if score.to_f64() == f64::NEG_INFINITY {
                continue;
            }
            row.keys.push(j);
            row.s.push(s);
            row.p.push(score);
        }
    }

    /// S′
    fn slope(&self, s: T) -> T {
        self.cap.map_or(T::ONE, |c| (s / c).tanh_slope())
    }

    /// S″
    fn curvature(&self, s: T) -> T {
        self.cap.map_or(T::ZERO, |c| T::from_f64(-2.0) * (s / c).tanh() * (s / c).tanh_slope() / c)
    }

    /// From the dS of row `i` to its dq, and to what it adds to dk.
    pub fn pull_back(
        &self,
        i: usize,
        row: &Row<T>,
        d_scores: &[T],
        dq: &mut [T],
        dk: &mut MatrixMut<'_, T>,
    ) {
        for (t, &j) in row.keys.iter().enumerate() {
            let ds = self.slope(row.s[t]) * d_scores[t]; // (B4)
            add_scaled(dq, self.scale * ds, self.k.row(j)); // (B5)
            add_scaled(dk.row(j), self.scale * ds, self.q.row(i)); // (B6)
        }
    }

    /// How the scores of row `i` move along a direction: u⁰ and U of every visible key, and u.
    pub fn tangent(
        &self,
        i: usize,
        row: &Row<T>,
        direction: &HeadDirection<'_, T>,
        motion: &mut Motion<T>,
    ) {
        motion.u0.clear();
        motion.big_u.clear();
        motion.u = row.pi.map_or(T::ZERO, |pi| pi * direction.ddsink);
        for (t, &j) in row.keys.iter().enumerate() {
            let u0 = self.scale
                * (dot(direction.ddq.row(i), self.k.row(j))
                    + dot(self.q.row(i), direction.ddk.row(j))); // (D1)
            let big_u = self.slope(row.s[t]) * u0 + direction.ddbias.at(i, j); // (D2)
            motion.u += row.p[t] * big_u; // (D4)
            motion.u0.push(u0);
            motion.big_u.push(big_u);
        }
    }

    /// From the X and dS of row `i` to its gq, and to what it adds to gk.
    pub fn pull_back_twice(
        &self,
        i: usize,
        row: &Row<T>,
        direction: &HeadDirection<'_, T>,
        second: &Second<'_, T>,
        gq: &mut [T],
        gk: &mut MatrixMut<'_, T>,
    ) {
        for (t, &j) in row.keys.iter().enumerate() {
            let (slope, d_score) = (self.slope(row.s[t]), second.d_scores[t]);
            let ds = slope * d_score; // (B4)
            let x = slope * second.x[t] + self.curvature(row.s[t]) * second.u0[t] * d_score; // (D9)
            add_scaled(gq, self.scale * x, self.k.row(j)); // (D10)
            add_scaled(gq, self.scale * ds, direction.ddk.row(j));
            add_scaled(gk.row(j), self.scale * x, self.q.row(i)); // (D11)
            add_scaled(gk.row(j), self.scale * ds, direction.ddq.row(i));
        }
    }
}

/// How a row of scores moves along a direction.
pub(crate) struct Motion<T> {
    /// u⁰_ij
    pub u0: Vec<T>,
    /// U_ij
    pub big_u: Vec<T>,
    /// u_i: how lse_i moves.
    pub u: T,
}

impl<T: Real> Default for Motion<T> {
    fn default() -> Self {
        Motion { u0: Vec::new(), big_u: Vec::new(), u: T::ZERO }
    }
}

/// What the second way back through a row of scores starts from.
pub(crate) struct Second<'a, T> {
    /// dS_ij
    pub d_scores: &'a [T],
    /// X_ij
    pub x: &'a [T],
    /// u⁰_ij
    pub u0: &'a [T],
}
