//! With the states S of the forward pass, computed again, and D the gradient of the loss by the
//! state after the chunk, from the last chunk to the first:
//!
//! ```text
//! (R23) A_ij = P_ij (q_i·k_j),  B_ij = P_ij (dout_i·v_j)
//! (R24) dq_i = σ (Σ_{j ≤ i} B_ij k_j + α_i dout_i Sᵀ)
//! (R25) dk_j = σ Σ_{i ≥ j} B_ij q_i + ω_j v_j Dᵀ
//! (R26) dv_j = σ Σ_{i ≥ j} A_ij dout_i + ω_j k_j D
//! (R27) dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z
//!              w_ij = σ A_ij (dout_i·v_j),  x_i = σ α_i q_i·(dout_i Sᵀ),
//!              y_j  = ω_j k_j·(v_j Dᵀ),     z = α_L <S, D>
//! (R28) D′   = α_L D + σ Σ_i α_i q_iᵀ dout_i                  after its last use
//! ```
//!
//! i, and the sums over i, run over the query heads of the group too.

use super::forward::advance;
use super::{Seen, check_chunk, chunks};
use crate::heads::Written;
use crate::linear_attention::backward::{Rest, backward_by};
use crate::linear_attention::heads::Head;
use crate::linear_attention::state::{State, States};
use crate::linear_attention::{Cotangents, Gradients, Inputs};
use crate::scalar::Real;
use crate::tensor::{MatrixMut, Rows, add_scaled, dot};
use etalon_problem::{Error, LinearAttention};
use std::ops::Range;

/// As [`backward`](crate::linear_attention::backward()), in chunks of `chunk` tokens.
pub fn backward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    chunk: usize,
) -> Result<Gradients<T>, Error> {
    check_chunk(chunk)?;
    let scale = T::from_f64(problem.scale);
    backward_by(problem, scale, inputs, cotangents, |head, dout, d, gradients| {
        let chunks = chunks(head, chunk);
        let step = |n, s: &mut State<T>| advance(head, &chunks[n], s); // (R22)
        let mut states = States::new(head.initial_state()?, chunks.len(), step)?;
        let mut dscale = T::ZERO;
        for (n, tokens) in chunks.iter().enumerate().rev() {
            let (s, _) = states.around(n);
            let chunk = Chunk { head, dout, tokens };
            for i in tokens.clone() {
                dscale += chunk.token(i, s, gradients);
            }
            chunk.pass_back(s, d, gradients);
        }
        Ok(dscale)
    })
}

struct Chunk<'a, T: Real> {
    head: &'a Head<'a, T>,
    dout: &'a Rows<'a, T>,
    tokens: &'a Range<usize>,
}

impl<T: Real> Chunk<'_, T> {
    /// Adds the contribution of the outputs of token `i`, also to dσ, which is returned.
    fn token(&self, i: usize, s: &State<T>, gradients: &mut Rest<'_, T>) -> T {
        let &Chunk { head, dout, tokens } = self;
        let scale = head.scale;
        let Written { by_query, by_key: [dk, dv, dg] } = gradients;
        let seen = Seen::new(head, tokens.start, i);
        let mut dscale = T::ZERO;
        for (member, [dq]) in by_query.iter_mut().enumerate() {
            let (q, dout) = (head.q(member, i), dout.row(head.query(member, i)));
            let (mut sum, mut w) = (vec![T::ZERO; q.len()], Vec::new());
            for (j, p) in seen.pairs() {
                let (qk, dov) = (dot(q, head.k(j)), dot(dout, head.v(j)));
                let (a, b) = (p * qk, p * dov); // (R23)
                add_scaled(&mut sum, b, head.k(j));
                add_scaled(dk.row(j), scale * b, q); // (R25)
                add_scaled(dv.row(j), scale * a, dout); // (R26)
                w.push(scale * a * dov);
            }
            let x = seen.state.map(|alpha| {
                let mut of_state = vec![T::ZERO; q.len()];
                s.apply_transposed(dout, &mut of_state);
                add_scaled(&mut sum, alpha, &of_state);
                scale * alpha * dot(q, &of_state)
            });
            add_scaled(dq.row(i), scale, &sum); // (R24)
            dscale += dot(q, &sum); // (R9)
            add_to_gates(&seen, x, &w, dg);
        }
        dscale
    }

    /// Adds the contribution of the state after the chunk; `d` becomes the gradient by the state before.
    fn pass_back(&self, s: &State<T>, d: &mut State<T>, gradients: &mut Rest<'_, T>) {
        let &Chunk { head, dout, tokens } = self;
        let Written { by_query, by_key: [dk, dv, dg] } = gradients;
        let seen = |i| Seen::new(head, tokens.start, i);
        let last = seen(tokens.end - 1);
        let mut y = Vec::new();
        for (j, omega) in last.pairs() {
            let (k, v) = (head.k(j), head.v(j));
            let (mut of_value, mut of_key) = (vec![T::ZERO; k.len()], vec![T::ZERO; v.len()]);
            d.apply_transposed(v, &mut of_value);
            add_scaled(dk.row(j), omega, &of_value); // (R25)
            y.push(omega * dot(k, &of_value));
            d.apply(k, &mut of_key);
            add_scaled(dv.row(j), omega, &of_key); // (R26)
        }
        add_to_gates(&last, last.state.map(|alpha| alpha * s.inner(d)), &y, dg);
        d.decay(last.state); // (R28)
        for i in tokens.clone() {
            if let Some(alpha) = seen(i).state {
                for member in 0..by_query.len() {
                    let dout = dout.row(head.query(member, i));
                    d.add_outer(head.scale * alpha, head.q(member, i), dout);
                }
            }
        }
    }
}

/// (R27) for one i, or for the state after the chunk: whatever decays by g_t on its way to there
/// adds to dg_t. That is what comes from S, if anything does, and from the tokens before t.
fn add_to_gates<T: Real>(
    seen: &Seen<T>,
    from_state: Option<T>,
    from_tokens: &[T],
    dg: &mut MatrixMut<'_, T>,
) {
    let mut sum = from_state.unwrap_or(T::ZERO);
    for (t, &from_token) in seen.tokens.clone().zip(from_tokens) {
        dg.row(t)[0] += sum;
        sum += from_token;
    }
}
