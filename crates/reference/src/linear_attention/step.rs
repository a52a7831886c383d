//! One more token, for decoding.

use super::forward::forward_scaled;
use super::{Inputs, StepInputs, StepOutput, check_g_gamma, check_log_decay};
use crate::named::{Named, check};
use crate::scalar::Real;
use etalon_problem::{Error, LinearAttention, LinearExtents, Pass, TokenSequences};
use ndarray::Axis;

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
        initial_state,
    };
    let one = LinearAttention {
        extents: LinearExtents { tokens: 1, ..problem.extents },
        sequences: TokenSequences::Dense,
        initial_state: true,
        final_state: true,
        ..problem.clone()
    };
    let output = forward_scaled(&one, T::from_f64(problem.scale), &inputs)?;
    let final_state = output.final_state.ok_or_else(|| Error::missing("final_state", None))?;
    Ok(StepOutput { o: output.o.index_axis_move(token, 0), final_state })
}
