//! ```text
//! (R21) o_i = σ (Σ_{j ≤ i} P_ij (q_i·k_j) v_j + α_i q_i S)
//! (R22) S′  = α_L S + Σ_j ω_j k_jᵀ v_j                        after its last use
//! ```

use super::{Seen, check_chunk, chunks};
use crate::linear_attention::forward::forward_by;
use crate::linear_attention::heads::Head;
use crate::linear_attention::state::State;
use crate::linear_attention::{Inputs, Output};
use crate::scalar::Real;
use crate::tensor::{add_scaled, dot};
use etalon_problem::{Error, LinearAttention};
use std::ops::Range;

/// As [`forward`](crate::linear_attention::forward()), in chunks of `chunk` tokens.
pub fn forward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    chunk: usize,
) -> Result<Output<T>, Error> {
    check_chunk(chunk)?;
    forward_by(problem, T::from_f64(problem.scale), inputs, |head, s, o| {
        let mut read = vec![T::ZERO; problem.value_dim];
        for chunk in chunks(head, chunk) {
            for i in chunk.clone() {
                let seen = Seen::new(head, chunk.start, i);
                for (member, [o]) in o.iter_mut().enumerate() {
                    let q = head.q(member, i);
                    let mut sum = vec![T::ZERO; o.row(i).len()];
                    for (j, p) in seen.pairs() {
                        add_scaled(&mut sum, p * dot(q, head.k(j)), head.v(j));
                    }
                    if let Some(alpha) = seen.state {
                        s.apply(q, &mut read);
                        add_scaled(&mut sum, alpha, &read);
                    }
                    add_scaled(o.row(i), head.scale, &sum); // (R21)
                }
            }
            advance(head, &chunk, s);
        }
    })
}

/// (R22)
pub(super) fn advance<T: Real>(head: &Head<'_, T>, chunk: &Range<usize>, s: &mut State<T>) {
    let last = Seen::new(head, chunk.start, chunk.end - 1);
    s.decay(last.state);
    for (j, omega) in last.pairs() {
        s.add_outer(omega, head.k(j), head.v(j));
    }
}
