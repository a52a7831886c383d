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
//! A visible pair is active where P_ij + τ/n_i > 0; n_i counts the visible keys. A NaN counts as
//! active, so that it shows.

use super::Inputs;
use crate::heads::{Query, each_query};
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{self, Bias, ScoreOperands};
use crate::tensor::Rows;
use etalon_problem::{Error, LazyAttention, Pass, Sequence};
use ndarray::{ArrayView1, ArrayView4};

/// The operands of the forward pass.
pub(super) struct Operands<'a, T: Real> {
    problem: &'a LazyAttention,
    pub scores: ScoreOperands<'a, T>,
    tau: ArrayView1<'a, T>,
    pub v: Rows<'a, T>,
    /// Pairs that are to count as active, if not those that are.
    activity: Option<ArrayView4<'a, bool>>,
}

/// A row of weights, over its visible keys alone.
pub(super) struct Row<'a, T> {
    /// The visible j, P and lse.
    pub softmax: scores::Row<'a, T>,
    /// n_i
    pub n: T,
    /// τ/n_i, where n_i > 0.
    pub offset: T,
    /// e_ij
    pub e: Vec<T>,
    /// a_ij of the active pairs.
    pub active: Vec<Option<T>>,
}

impl<T: Real> Row<'_, T> {
    /// The active j with their places among the visible ones, and a_ij.
    pub fn active_keys(&self) -> impl Iterator<Item = (usize, usize, T)> + '_ {
        let keys = self.softmax.keys.iter().copied().enumerate();
        keys.zip(&self.active).filter_map(|((t, j), &active)| Some((t, j, active?)))
    }
}

impl<'a, T: Real> Operands<'a, T> {
    /// The operands of a forward pass, checked.
    pub fn checked(problem: &'a LazyAttention, inputs: &'a Inputs<'_, T>) -> Result<Self, Error> {
        problem.check()?;
        check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
        Operands::new(problem, inputs, None)
    }

    pub fn new(
        problem: &'a LazyAttention,
        inputs: &'a Inputs<'_, T>,
        activity: Option<&'a ArrayView4<'_, bool>>,
    ) -> Result<Self, Error> {
        let Inputs { q, k, v, bias, tau } = inputs;
        let bias = match (problem.bias, bias) {
            (Some(reach), Some(bias)) => Bias::ByDistance(reach, bias.view()),
            _ => Bias::ByPair(None),
        };
        let scores = ScoreOperands::new(&problem.scores, q, k, &None, bias)?;
        let v = Rows::new("v", v.view())?;
        let activity = activity.map(|activity| activity.view());
        Ok(Operands { problem, scores, tau: tau.view(), v, activity })
    }

    /// The row of a query.
    pub fn row<'q>(&self, query: &Query<'q>) -> Row<'q, T> {
        let softmax = self.scores.row(query); // (E1)–(E4)
        let n = T::from_f64(softmax.keys.len() as f64);
        let offset = self.tau[query.head] / n;
        let &Sequence { batch, query_start, key_start, .. } = query.sequence;
        let active = |(&j, &p): (&usize, &T)| match self.activity {
            Some(activity) => {
                let at = [batch, query.head, query_start + query.i, key_start + j];
                activity[at].then_some(T::ONE)
            }
            None => (p + offset).step(),
        };
        let active: Vec<_> = softmax.keys.iter().zip(&softmax.p).map(active).collect();
        let e = |(&p, a): (&T, &Option<T>)| a.map_or(T::ZERO, |a| a * (p + offset));
        let e = softmax.p.iter().zip(&active).map(e).collect(); // (E5)
        Row { softmax, n, offset, e, active }
    }

    /// Visits the row of every query; `start` and what is returned are as in [`each_query`].
    pub fn each_row<R: Send>(
        &self,
        start: impl Fn(&Sequence, usize) -> R + Sync,
        visit: impl Fn(&mut R, &Row<'_, T>) + Sync,
    ) -> Vec<R> {
        each_query::<T, _, 0, 0>(&self.problem.scores, [], [], start, |gathered, query, [], []| {
            visit(gathered, &self.row(query));
        })
    }
}
