//! ```text
//! (R1)  H_t = e^{g_t} H_{t−1} + k_tᵀ v_t
//! (R2)  o_t = σ q_t H_t                    for every query head of the group
//! ```

use super::heads::{Head, Operands, each_head};
use super::state::State;
use super::{Inputs, Output, checked};
use crate::scalar::Real;
use crate::tensor::{HeadsMut, MatrixMut, add_scaled};
use etalon_problem::{Error, LinearAttention, Pass};

/// o, and the final state where the problem asks for it.
pub fn forward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    forward_scaled(problem, T::from_f64(problem.scale), inputs)
}

/// The forward pass with a scale that may carry a derivative.
pub(super) fn forward_scaled<T: Real>(
    problem: &LinearAttention,
    scale: T,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    forward_by(problem, scale, inputs, |head, h, o| {
        let mut read = vec![T::ZERO; problem.value_dim];
        for t in 0..head.tokens {
            head.advance(t, h); // (R1)
            for (member, [o]) in o.iter_mut().enumerate() {
                h.apply(head.q(member, t), &mut read);
                add_scaled(o.row(t), head.scale, &read); // (R2)
            }
        }
    })
}

/// The rows of o of each query head of a group.
pub(super) type OutputRows<'a, T> = [[MatrixMut<'a, T>; 1]];

/// A forward pass whose work on one head is `sweep(head, H, o)`, which turns the initial state into
/// the final one and writes o.
pub(super) fn forward_by<T: Real>(
    problem: &LinearAttention,
    scale: T,
    inputs: &Inputs<'_, T>,
    sweep: impl Fn(&Head<'_, T>, &mut State<T>, &mut OutputRows<'_, T>) + Sync,
) -> Result<Output<T>, Error> {
    let mut output: Output<T> = checked(problem, Pass::Forward, inputs, Vec::new())?;
    let operands = Operands::new(problem, scale, inputs)?;
    let (first, last) = (&operands.initial_state, output.final_state.as_mut().map(HeadsMut::new));
    let o = HeadsMut::new(&mut output.o);
    each_head(&operands, first, [o], [], last, |head, h, mut written| {
        sweep(head, h, &mut written.by_query);
        Ok(())
    })?;
    Ok(output)
}
