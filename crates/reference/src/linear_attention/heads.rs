//! Who computes what: the query heads of one key head and sequence together, because they share
//! its state; everything else side by side.
//!
//! Key heads and sequences do not meet except in the gradients of what they share, and those are
//! summed in an order that the problem alone decides. So the result has the same bits for any
//! number of threads.

use super::Inputs;
use super::gates::{Gates, check_log_decay};
use super::state::State;
use crate::parallel::try_map;
use crate::scalar::Real;
use crate::tensor::{Matrix, MatrixMut, Output, Rows};
use etalon_problem::{Decay, Error, LinearAttention, TokenSequence};
use ndarray::ArrayView1;

/// The operands of the forward pass.
pub(super) struct Operands<'a, T: Real> {
    problem: &'a LinearAttention,
    scale: T,
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    v: Rows<'a, T>,
    g_gamma: Option<ArrayView1<'a, T>>,
    g: Rows<'a, T>,
    initial_state: Rows<'a, T>,
}

/// One key head in one sequence, with the query heads that share its state.
pub(super) struct Head<'a, T: Real> {
    /// σ
    pub scale: T,
    /// n: the number of tokens.
    pub tokens: usize,
    /// g_t
    pub gates: Gates<'a, T>,
    /// q_t, for each query head.
    pub q: Vec<Matrix<'a, T>>,
    /// k_t
    pub k: Matrix<'a, T>,
    /// v_t
    pub v: Matrix<'a, T>,
    initial_state: Matrix<'a, T>,
    dim: usize,
    value_dim: usize,
}

impl<'a, T: Real> Operands<'a, T> {
    /// `scale` is that of the problem, as a number of the type that is computed with.
    pub fn new(
        problem: &'a LinearAttention,
        scale: T,
        inputs: &'a Inputs<'_, T>,
    ) -> Result<Self, Error> {
        let Inputs { q, k, v, g_gamma, g, initial_state } = inputs;
        Ok(Operands {
            problem,
            scale,
            q: Rows::new("q", q.view())?,
            k: Rows::new("k", k.view())?,
            v: Rows::new("v", v.view())?,
            g_gamma: g_gamma.as_ref().map(|x| x.view()),
            g: Rows::scalars("g", g)?,
            initial_state: Rows::or_zero("initial_state", initial_state, problem.value_dim)?,
        })
    }

    /// One key head in one sequence. Fails where one of its log-decays is positive or NaN.
    pub fn head<'b>(
        &'b self,
        sequence: &TokenSequence,
        key_head: usize,
    ) -> Result<Head<'b, T>, Error> {
        let &TokenSequence { index, batch, start, tokens } = sequence;
        Ok(Head {
            scale: self.scale,
            tokens,
            gates: self.gates(sequence, key_head)?,
            q: grouped(self.problem, &self.q, sequence, key_head),
            k: self.k.matrix(batch, key_head, start),
            v: self.v.matrix(batch, key_head, start),
            initial_state: self.initial_state.matrix(index, key_head, 0),
            dim: self.problem.extents.dim,
            value_dim: self.problem.value_dim,
        })
    }

    fn gates(&self, sequence: &TokenSequence, key_head: usize) -> Result<Gates<'_, T>, Error> {
        let &TokenSequence { batch, start, tokens, .. } = sequence;
        match self.problem.decay {
            Decay::PerToken => {
                let g = self.g.matrix(batch, key_head, start);
                for t in 0..tokens {
                    check_log_decay("g", &[batch, key_head, start + t], g.scalar(t))?;
                }
                Ok(Gates::PerToken(g))
            }
            _ => Ok(Gates::Constant(self.g_gamma.map_or(T::ZERO, |g_gamma| g_gamma[key_head]))),
        }
    }
}

/// The rows of the query heads that share a key head.
pub(super) fn grouped<'a, T: Real>(
    problem: &LinearAttention,
    rows: &'a Rows<'_, T>,
    sequence: &TokenSequence,
    key_head: usize,
) -> Vec<Matrix<'a, T>> {
    let heads = (0..problem.group()).map(|h| key_head * problem.group() + h);
    heads.map(|head| rows.matrix(sequence.batch, head, sequence.start)).collect()
}

impl<T: Real> Head<'_, T> {
    /// H_0
    pub fn initial_state(&self) -> Result<State<T>, Error> {
        self.state(self.initial_state)
    }

    /// What a tensor `[S, Hk, D, E]` holds for this head.
    pub fn state(&self, source: Matrix<'_, T>) -> Result<State<T>, Error> {
        State::read(source, self.dim, self.value_dim)
    }
}

/// The rows of the results that one key head in one sequence writes.
pub(super) struct Written<'a, T, const Q: usize, const K: usize> {
    /// Of results that lie as q does: those of each query head of the group.
    pub by_query: Vec<[MatrixMut<'a, T>; Q]>,
    /// Of results that lie as k does.
    pub by_key: [MatrixMut<'a, T>; K],
    /// Of a result that lies as the states do, if there is one.
    pub state: Option<MatrixMut<'a, T>>,
}

/// Calls `work` for every key head of every sequence, and returns what it returns in this order:
/// by sequence, then by head.
pub(super) fn for_each_head<T: Real, R: Send, const Q: usize, const K: usize>(
    problem: &LinearAttention,
    by_query: [&mut Output<T>; Q],
    by_key: [&mut Output<T>; K],
    state: Option<&mut Output<T>>,
    work: impl Fn(&TokenSequence, usize, Written<'_, T, Q, K>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let mut outputs = by_query.iter().chain(&by_key).chain(&state);
    if outputs.all(|output| output.is_empty()) {
        return Ok(Vec::new()); // a problem without tokens may count sequences without end
    }
    let sequences = problem.list_sequences();
    let tokens: Vec<_> = sequences.iter().map(|s| (s.batch, s.start, s.tokens)).collect();
    let states: Vec<_> = sequences.iter().map(|s| (s.index, 0, problem.extents.dim)).collect();
    let mut by_query = by_query.map(|output| output.split(&tokens));
    let mut by_key = by_key.map(|output| output.split(&tokens));
    let mut state = state.map(|output| output.split(&states));
    let mut take_query = || by_query.each_mut().map(|rows| rows.next().expect("one per head"));
    let mut take_key = || by_key.each_mut().map(|rows| rows.next().expect("one per head"));

    let mut units = Vec::new();
    for sequence in &sequences {
        for key_head in 0..problem.extents.key_heads {
            let by_query = (0..problem.group()).map(|_| take_query()).collect();
            let state = state.as_mut().and_then(Iterator::next);
            units.push((sequence, key_head, Written { by_query, by_key: take_key(), state }));
        }
    }
    try_map(units, |(sequence, key_head, written)| work(sequence, key_head, written))
}
