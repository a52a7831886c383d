//! One more token, for decoding.

use super::forward::forward_scaled;
use super::{Inputs, check_g_gamma, check_log_decay};
use crate::named::check;
use crate::scalar::Real;
use etalon_problem::{Error, LinearAttention, LinearExtents, Pass, TokenSequences};
use ndarray::{Array3, Array4, ArrayView1, ArrayView2, ArrayView3, ArrayView4, Axis};

/// What the next token of every batch element is computed from.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a, T> {
    /// Queries `[B, Hq, D]`.
    pub q: ArrayView3<'a, T>,
    /// Keys `[B, Hk, D]`.
    pub k: ArrayView3<'a, T>,
    /// Values `[B, Hk, E]`.
    pub v: ArrayView3<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, T>>,
    /// The token's log-decay `[B, Hk]`, where the problem decays per token.
    pub g: Option<ArrayView2<'a, T>>,
    /// H_{t−1}, `[B, Hk, D, E]`.
    pub initial_state: ArrayView4<'a, T>,
}

/// What the token returns.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput<T> {
    /// o of (R2), `[B, Hq, E]`.
    pub o: Array3<T>,
    /// H_t of (R1), `[B, Hk, D, E]`.
    pub final_state: Array4<T>,
}

/// One step of the recurrence, (R1) and (R2), for every batch element: the forward pass over one
/// token. The problem's tokens and sequences do not matter, and the states are always there.
pub fn step<T: Real>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
) -> Result<StepOutput<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Step), &[inputs.shapes()])?;
    check_g_gamma(&inputs.g_gamma)?;
    for ((b, h), &g) in inputs.g.iter().flat_map(|g| g.indexed_iter()) {
        check_log_decay("g", &[b, h], g)?;
    }
    let token = Axis(2);
    let StepInputs { q, k, v, g_gamma, g, initial_state } = *inputs;
    let inputs = Inputs {
        q: q.insert_axis(token),
        k: k.insert_axis(token),
        v: v.insert_axis(token),
        g_gamma,
        g: g.map(|g| g.insert_axis(token)),
        initial_state: Some(initial_state),
    };
    let one = LinearAttention {
        extents: LinearExtents { tokens: 1, ..problem.extents },
        sequences: TokenSequences::Dense,
        initial_state: true,
        final_state: true,
        ..problem.clone()
    };
    let output = forward_scaled(&one, T::from_f64(problem.scale), &inputs)?;
    Ok(StepOutput {
        o: output.o.index_axis_move(token, 0),
        final_state: output.final_state.expect("the problem asks for it"),
    })
}
