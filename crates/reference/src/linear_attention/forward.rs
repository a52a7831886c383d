//! ```text
//! (R1)  H_t = e^{g_t} H_{t−1} + k_tᵀ v_t
//! (R2)  o_t = σ q_t H_t                    for every query head of the group
//! ```

use super::heads::{Head, Operands, Written, for_each_head};
use super::state::State;
use super::{Inputs, Output, check_operands};
use crate::scalar::Real;
use crate::tensor;
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
    check_operands(problem, Pass::Forward, inputs, Vec::new())?;
    forward_by(problem, scale, inputs, |head, h, o| {
        let mut read = Vec::new();
        for t in 0..head.tokens {
            head.advance(t, h);
            for (q, [o]) in head.q.iter().zip(&mut *o) {
                h.apply(q.row(t), &mut read);
                tensor::add_scaled(o.row(t), head.scale, &read); // (R2)
            }
        }
    })
}

/// The rows of o of each query head of a group.
pub(super) type OutputRows<'a, T> = [[tensor::MatrixMut<'a, T>; 1]];

/// A forward pass whose work on one head is `sweep(head, H, o)`, which turns the initial state into
/// the final one and writes o.
pub(super) fn forward_by<T: Real>(
    problem: &LinearAttention,
    scale: T,
    inputs: &Inputs<'_, T>,
    sweep: impl Fn(&Head<'_, T>, &mut State<T>, &mut OutputRows<'_, T>) + Sync,
) -> Result<Output<T>, Error> {
    let mut o = tensor::Output::zeros("o", &problem.o_shape())?;
    let mut final_state = problem
        .final_state
        .then(|| tensor::Output::zeros("final_state", &problem.state_shape()))
        .transpose()?;
    let operands = Operands::new(problem, scale, inputs)?;
    for_each_head(
        problem,
        [&mut o],
        [],
        final_state.as_mut(),
        |sequence, key_head, Written { mut by_query, by_key: [], state }| {
            let head = operands.head(sequence, key_head)?;
            let mut h = head.initial_state()?;
            sweep(&head, &mut h, &mut by_query);
            if let Some(mut final_state) = state {
                h.write(&mut final_state);
            }
            Ok(())
        },
    )?;
    let final_state = final_state.map(tensor::Output::finish).transpose()?;
    Ok(Output { o: o.finish()?, final_state })
}

impl<T: Real> Head<'_, T> {
    /// (R1): from H_{t−1} to H_t.
    pub(super) fn advance(&self, t: usize, h: &mut State<T>) {
        h.decay(self.gates.factor(t));
        h.add_outer(T::ONE, self.k.row(t), self.v.row(t));
    }
}
