//! One row of weights, which every pass and every question about them begins with:
//!
//! ```text
//! (E1)  s_ij  = σ q_i·k_j
//! (E2)  S_ij  = s_ij + bias_d        d = i′ − j, where 0 ≤ d < W; else s_ij
//! (E3)  lse_i = ln Σ_j e^{S_ij}      over the visible j
//! (E4)  P_ij  = e^{S_ij − lse_i}
//! (E5)  e_ij  = max(P_ij + τ/n_i, 0)
//! ```
//!
//! A visible pair is active where P_ij + τ/n_i > 0; n_i counts the visible keys. What is NaN counts
//! as active, so that it shows.

use super::Inputs;
use crate::heads::each_head;
use crate::scalar::Real;
use crate::scores::{self, HeadScores, ScoreOperands};
use crate::tensor::{Matrix, Rows};
use etalon_problem::{Error, LazyAttention, Sequence};
use ndarray::{ArrayView1, ArrayView2, ArrayView4, Axis};

/// The operands of the forward pass.
pub(super) struct Operands<'a, T: Real> {
    problem: &'a LazyAttention,
    scores: ScoreOperands<'a, T>,
    bias: Option<ArrayView2<'a, T>>,
    tau: ArrayView1<'a, T>,
    v: Rows<'a, T>,
    /// Which pairs are to count as active, if not those that are.
    activity: Option<ArrayView4<'a, bool>>,
}

impl<'a, T: Real> Operands<'a, T> {
    pub fn new(
        problem: &'a LazyAttention,
        inputs: &'a Inputs<'_, T>,
        activity: Option<&'a ArrayView4<'_, bool>>,
    ) -> Result<Self, Error> {
        let Inputs { q, k, v, bias, tau } = inputs;
        Ok(Operands {
            problem,
            scores: ScoreOperands::new(&problem.scores, q, k, &None, &None)?,
            bias: bias.as_ref().map(|bias| bias.view()),
            tau: tau.view(),
            v: Rows::new("v", v.view())?,
            activity: activity.map(|activity| activity.view()),
        })
    }

    /// What one query head sees in one sequence.
    pub fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> Head<'b, T> {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let mut scores = self.scores.head(sequence, head);
        if let (Some(reach), Some(bias)) = (self.problem.bias, &self.bias) {
            scores = scores.biased_by_distance(reach, bias.index_axis(Axis(0), head));
        }
        let activity = self
            .activity
            .as_ref()
            .map(|activity| activity.index_axis(Axis(0), batch).index_axis_move(Axis(0), head));
        Head {
            scores,
            tau: self.tau[head],
            v: self.v.matrix(batch, head / self.problem.scores.group(), key_start),
            activity,
            query_start,
            key_start,
        }
    }

    /// Walks through the rows of every query head of every sequence. `start` begins what `visit`
    /// gathers of one head, row by row; they are returned sequence by sequence, head by head.
    pub fn walk<R: Send>(
        &self,
        start: impl Fn(&Sequence, usize) -> R + Sync,
        visit: impl Fn(&mut R, usize, &Row<T>) + Sync,
    ) -> Vec<R> {
        each_head::<T, _, 0, 0>(&self.problem.scores, [], [], |sequence, head, [], []| {
            let mut gathered = start(sequence, head);
            let (head, mut row) = (self.head(sequence, head), Row::default());
            for i in 0..sequence.queries {
                head.row(i, &mut row);
                visit(&mut gathered, i, &row);
            }
            gathered
        })
    }
}

/// What one query head sees in one sequence.
pub(super) struct Head<'a, T> {
    pub scores: HeadScores<'a, T>,
    pub tau: T,
    pub v: Matrix<'a, T>,
    activity: Option<ArrayView2<'a, bool>>,
    query_start: usize,
    key_start: usize,
}

/// A row of weights, over its visible keys alone.
pub(super) struct Row<T> {
    /// The visible j, P and lse.
    pub softmax: scores::Row<T>,
    /// n_i
    pub n: T,
    /// τ/n_i, where n_i > 0.
    pub offset: T,
    /// P_ij + τ/n_i, of active pairs: e_ij.
    pub e: Vec<T>,
    /// Whether each pair is active.
    pub active: Vec<bool>,
}

impl<T: Real> Default for Row<T> {
    fn default() -> Self {
        Row {
            softmax: scores::Row::default(),
            n: T::ZERO,
            offset: T::ZERO,
            e: Vec::new(),
            active: Vec::new(),
        }
    }
}

impl<T: Real> Head<'_, T> {
    /// Computes row `i`.
    pub fn row(&self, i: usize, row: &mut Row<T>) {
        let Row { softmax, n, offset, e, active } = row;
        self.scores.row(i, softmax); // (E1)–(E4)
        *n = T::from_f64(softmax.keys.len() as f64);
        *offset = self.tau / *n;
        e.clear();
        active.clear();
        for (&j, &p) in softmax.keys.iter().zip(&softmax.p) {
            let raised = p + *offset;
            e.push(raised);
            active.push(match &self.activity {
                Some(activity) => activity[[self.query_start + i, self.key_start + j]],
                None => raised.is_nan() || raised > T::ZERO,
            });
        }
    }
}

impl<T: Real> Row<T> {
    /// The active j with their places among the visible ones.
    pub fn active_keys(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let keys = self.softmax.keys.iter().copied().enumerate();
        keys.zip(&self.active).filter_map(|(key, &active)| active.then_some(key))
    }
}
