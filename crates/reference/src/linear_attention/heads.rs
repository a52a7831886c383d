//! Shares of the work: the query heads of one key head and sequence together, because they share
//! its state; everything else side by side.
//!
//! Key heads and sequences do not meet except in the gradients of what they share, and those are
//! summed in an order that the problem alone decides. So the result has the same bits for any
//! number of threads.

use super::state::State;
use super::{Inputs, check_log_decay};
use crate::heads::{Written, units};
use crate::parallel::try_map;
use crate::scalar::Real;
use crate::tensor::{HeadsMut, Rows};
use etalon_problem::{Decay, Error, LinearAttention, TokenSequence};
use ndarray::Axis;

/// E, or 0 where there is no state: then no tensor vouches for E, and a row of zeros might be of any
/// size.
pub(super) fn width_of_states(problem: &LinearAttention) -> usize {
    if problem.sequence_count() == 0 { 0 } else { problem.value_dim }
}

/// The operands of the forward pass.
pub(super) struct Operands<'a, T: Real> {
    problem: &'a LinearAttention,
    scale: T,
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    v: Rows<'a, T>,
    /// g_gamma of every head, or g of every token.
    log_decays: Rows<'a, T>,
    pub initial_state: Rows<'a, T>,
}

impl<'a, T: Real> Operands<'a, T> {
    /// `scale` is that of the problem, as a number of the type that is computed with.
    pub fn new(
        problem: &'a LinearAttention,
        scale: T,
        inputs: &'a Inputs<'_, T>,
    ) -> Result<Self, Error> {
        let Inputs { q, k, v, g_gamma, g, initial_state } = inputs;
        let log_decays = match g {
            Some(g) => Rows::new("g", g.view().insert_axis(Axis(3)))?,
            None => Rows::or_zero("g_gamma", g_gamma, 1)?,
        };
        Ok(Operands {
            problem,
            scale,
            q: Rows::new("q", q.view())?,
            k: Rows::new("k", k.view())?,
            v: Rows::new("v", v.view())?,
            log_decays,
            initial_state: Rows::or_zero("initial_state", initial_state, width_of_states(problem))?,
        })
    }
}

/// One key head in one sequence, with the query heads that share its state.
pub(super) struct Head<'a, T: Real> {
    operands: &'a Operands<'a, T>,
    sequence: &'a TokenSequence,
    /// The number of the key head.
    pub key_head: usize,
    /// σ
    pub scale: T,
    /// n: the number of tokens.
    pub tokens: usize,
}

impl<'a, T: Real> Head<'a, T> {
    /// Fails where one of its log-decays is positive or NaN.
    fn new(
        operands: &'a Operands<'a, T>,
        sequence: &'a TokenSequence,
        key_head: usize,
    ) -> Result<Self, Error> {
        let &TokenSequence { batch, start, tokens, .. } = sequence;
        let head = Head { operands, sequence, key_head, scale: operands.scale, tokens };
        if operands.problem.decay == Decay::PerToken {
            for t in 0..tokens {
                check_log_decay("g", &[batch, key_head, start + t], head.g(t))?;
            }
        }
        Ok(head)
    }

    /// The number of the sequence.
    pub fn index(&self) -> usize {
        self.sequence.index
    }

    /// The row of token `t` in everything that lies as k does.
    fn key(&self, t: usize) -> usize {
        let &LinearAttention { extents, .. } = self.operands.problem;
        let head = self.sequence.batch * extents.key_heads + self.key_head;
        head * extents.tokens + self.sequence.start + t
    }

    /// The row of token `t` in everything that lies as q does, of a query head of the group.
    pub fn query(&self, member: usize, t: usize) -> usize {
        let problem = self.operands.problem;
        let head = self.key_head * problem.group() + member;
        let head = self.sequence.batch * problem.extents.query_heads + head;
        head * problem.extents.tokens + self.sequence.start + t
    }

    /// q_t of a query head of the group.
    pub fn q(&self, member: usize, t: usize) -> &'a [T] {
        self.operands.q.row(self.query(member, t))
    }

    /// k_t
    pub fn k(&self, t: usize) -> &'a [T] {
        self.operands.k.row(self.key(t))
    }

    /// v_t
    pub fn v(&self, t: usize) -> &'a [T] {
        self.operands.v.row(self.key(t))
    }

    fn g(&self, t: usize) -> T {
        let per_token = self.operands.problem.decay == Decay::PerToken;
        self.operands.log_decays.scalar(if per_token { self.key(t) } else { self.key_head })
    }

    /// g_t, or nothing where it is −∞: a reset. A forgotten state must be left out, not
    /// multiplied by e^{−∞}, because 0·∞ is not 0.
    pub fn log_decay(&self, t: usize) -> Option<T> {
        Some(self.g(t)).filter(|g| g.to_f64() != f64::NEG_INFINITY)
    }

    /// e^{g_t}, or nothing at a reset.
    pub fn decay(&self, t: usize) -> Option<T> {
        self.log_decay(t).map(T::exp)
    }

    /// (R1): from H_{t−1} to H_t.
    pub fn advance(&self, t: usize, h: &mut State<T>) {
        h.decay(self.decay(t));
        h.add_outer(T::ONE, self.k(t), self.v(t));
    }

    /// H_0
    pub fn initial_state(&self) -> Result<State<T>, Error> {
        self.state(&self.operands.initial_state)
    }

    /// The state of this head in a tensor `[S, Hk, D, E]`.
    fn state(&self, source: &Rows<'_, T>) -> Result<State<T>, Error> {
        let &LinearAttention { extents, value_dim, .. } = self.operands.problem;
        let first = (self.sequence.index * extents.key_heads + self.key_head) * extents.dim;
        let rows = (first..first + extents.dim).map(|row| source.row(row));
        State::new(extents.dim.saturating_mul(value_dim), value_dim, rows)
    }
}

/// Computes every key head of every sequence: `sweep` turns the state that `first` holds for the head
/// into the one that `last` gets, if it is there, and writes the rows of the other results. Its
/// return values come by sequence, then by head.
pub(super) fn each_head<T: Real, R: Send, const Q: usize, const K: usize>(
    operands: &Operands<'_, T>,
    first: &Rows<'_, T>,
    by_query: [HeadsMut<'_, T>; Q],
    by_key: [HeadsMut<'_, T>; K],
    last: Option<HeadsMut<'_, T>>,
    sweep: impl Fn(&Head<'_, T>, &mut State<T>, Written<'_, T, Q, K>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let mut results = by_query.iter().chain(&by_key).chain(&last);
    if results.all(HeadsMut::is_empty) {
        return Ok(Vec::new()); // a problem without tokens may count sequences without end
    }
    let problem = operands.problem;
    let sequences = problem.list_sequences();
    let tokens: Vec<_> = sequences.iter().map(|s| (s.batch, s.start, s.tokens)).collect();
    let states: Vec<_> = sequences.iter().map(|s| (s.index, 0, problem.extents.dim)).collect();
    let by_query = by_query.map(|result| result.split(&tokens));
    let by_key = by_key.map(|result| result.split(&tokens));
    let mut last = last.map(|result| result.split(&states));
    let units = units(&sequences, problem.extents.key_heads, problem.group(), by_query, by_key);
    let units = units.into_iter().map(|unit| (unit, last.as_mut().and_then(Iterator::next)));
    try_map(units.collect(), |((sequence, key_head, written), last)| {
        let head = Head::new(operands, sequence, key_head)?;
        let mut state = head.state(first)?;
        let result = sweep(&head, &mut state, written)?;
        if let Some(mut last) = last {
            state.write(&mut last);
        }
        Ok(result)
    })
}
