//! With the states H of the forward pass, computed again, and D_t the gradient of the loss by H_t,
//! from the last token to the first:
//!
//! ```text
//! (R3)  D_t      = e^{g_{t+1}} D_{t+1} + σ Σ_h q_tᵀ dout_t     beyond the last token: dH_n
//! (R4)  dq_t     = σ dout_t H_tᵀ
//! (R5)  dk_t     = v_t D_tᵀ
//! (R6)  dv_t     = k_t D_t
//! (R7)  dg_t     = e^{g_t} <D_t, H_{t−1}>
//! (R8)  dH_0     = e^{g_1} D_1
//! (R9)  dσ       = Σ_t q_t H_t · dout_t
//! ```

use super::heads::{Head, Operands, each_head, width_of_states};
use super::state::{State, States};
use super::{Cotangents, Gradients, Inputs, checked};
use crate::heads::Written;
use crate::named::Named;
use crate::scalar::Real;
use crate::tensor::{HeadsMut, Rows, add_scaled, dot, full};
use etalon_problem::{Error, LinearAttention, Pass};

/// The gradients of <dout, o> + <dfinal_state, final_state> by the inputs and by the scale.
pub fn backward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    backward_scaled(problem, T::from_f64(problem.scale), inputs, cotangents)
}

/// The backward pass with a scale that may carry a derivative.
pub(super) fn backward_scaled<T: Real>(
    problem: &LinearAttention,
    scale: T,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    backward_by(problem, scale, inputs, cotangents, sweep)
}

fn sweep<T: Real>(
    head: &Head<'_, T>,
    dout: &Rows<'_, T>,
    d: &mut State<T>,
    gradients: &mut Rest<'_, T>,
) -> Result<T, Error> {
    let Written { by_query, by_key: [dk, dv, dg] } = gradients;
    let advance = |t, h: &mut State<T>| head.advance(t, h); // (R1)
    let mut states = States::new(head.initial_state()?, head.tokens, advance)?;
    let mut dscale = T::ZERO;
    for t in (0..head.tokens).rev() {
        let (before, after) = states.around(t);
        for (member, [dq]) in by_query.iter_mut().enumerate() {
            let (q, dout) = (head.q(member, t), dout.row(head.query(member, t)));
            d.add_outer(head.scale, q, dout); // (R3)
            let mut product = vec![T::ZERO; q.len()];
            after.apply_transposed(dout, &mut product);
            add_scaled(dq.row(t), head.scale, &product); // (R4)
            dscale += dot(q, &product); // (R9)
        }
        d.apply_transposed(head.v(t), dk.row(t)); // (R5)
        d.apply(head.k(t), dv.row(t)); // (R6)
        let decay = head.decay(t);
        if let Some(decay) = decay {
            dg.row(t)[0] = decay * d.inner(before); // (R7); at a reset it is 0
        }
        d.decay(decay); // (R3) of the token before, or (R8)
    }
    Ok(dscale)
}

/// The rows of the gradients that one key head in one sequence writes, but for the state's: dq of each
/// query head of the group; dk, dv and dg.
pub(super) type Rest<'a, T> = Written<'a, T, 1, 3>;

/// A backward pass whose work on one head is `sweep(head, dout, D, gradients)`, which turns the
/// gradient by the final state into that by the initial one, writes the other gradients, which
/// hold 0, and returns (R9).
pub(super) fn backward_by<T: Real>(
    problem: &LinearAttention,
    scale: T,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    sweep: impl Fn(&Head<'_, T>, &Rows<'_, T>, &mut State<T>, &mut Rest<'_, T>) -> Result<T, Error>
    + Sync,
) -> Result<Gradients<T>, Error> {
    let mut gradients: Gradients<T> =
        checked(problem, Pass::Backward, inputs, cotangents.shapes())?;
    let Gradients { dq, dk, dv, dg_gamma, dinitial_state, dscale, .. } = &mut gradients;
    let mut dg = full("dg", problem.g_shape(), T::ZERO)?;
    let operands = Operands::new(problem, scale, inputs)?;
    let dout = Rows::new("dout", cotangents.dout.view())?;
    let parts = each_head(
        &operands,
        &Rows::or_zero("dfinal_state", &cotangents.dfinal_state, width_of_states(problem))?,
        [HeadsMut::new(dq)],
        [HeadsMut::new(dk), HeadsMut::new(dv), HeadsMut::new(&mut dg)],
        dinitial_state.as_mut().map(HeadsMut::new),
        |head, d, mut gradients| sweep(head, &dout, d, &mut gradients),
    )?;
    parts.into_iter().for_each(|part| *dscale += part);
    // (R7), summed over everything but the heads
    if let Some(dg_gamma) = dg_gamma {
        dg.indexed_iter().for_each(|((_, head, _), &dg)| dg_gamma[head] += dg);
    }
    Ok(Gradients { dg: gradients.dg.map(|_| dg), ..gradients })
}
