//! The definition without states: every token looks at every earlier one.

use super::tensors::Tensors;
use etalon_problem::{Decay, LinearAttention, TokenSequence};
use ndarray::ArrayD;

/// The factor left at token `i` of the part that came in with token `j`, or of the initial state for
/// `j` = −1: e to the sum of the log-decays between, one after the other.
fn left(problem: &LinearAttention, x: &Tensors<f64>, place: [usize; 2], j: i64, i: i64) -> f64 {
    let [batch, head] = place;
    let factor = |t: i64| match problem.decay {
        Decay::None => 1.0,
        Decay::PerHead => x["g_gamma"][[head]].exp(),
        Decay::PerToken => x["g"][[batch, head, t as usize]].exp(),
    };
    (j + 1..=i).map(factor).product()
}

/// o_i = σ Σ_j e^{g_{j+1} + … + g_i} (q_i·k_j) v_j + σ e^{g_1 + … + g_i} q_i H_0, and the same sum
/// of k_jᵀ v_j as the final state. Operands must be finite, except for resets.
pub fn forward(problem: &LinearAttention, x: &Tensors<f64>) -> Tensors<f64> {
    let mut o = ArrayD::zeros(problem.o_shape().to_vec());
    let mut state = ArrayD::zeros(problem.state_shape().to_vec());
    let (q, k, v) = (&x["q"], &x["k"], &x["v"]);
    let [_, query_heads, _, dim] = problem.q_shape();
    for TokenSequence { index, batch, start, tokens } in problem.list_sequences() {
        let (first, end) = (start as i64, (start + tokens) as i64);
        let initial = |h: usize, d: usize, e: usize| {
            x.get("initial_state").map_or(0.0, |state| state[[index, h, d, e]])
        };
        let decay = |h: usize, j: i64, i: i64| match j {
            j if j < first => left(problem, x, [batch, h], first - 1, i),
            j => left(problem, x, [batch, h], j, i),
        };
        for e in 0..problem.value_dim {
            for head in 0..query_heads {
                let h = head / problem.group();
                for i in first..end {
                    let query = |d: usize| q[[batch, head, i as usize, d]];
                    let mut sum = 0.0;
                    for j in first..=i {
                        let key = |d: usize| k[[batch, h, j as usize, d]];
                        let score: f64 = (0..dim).map(|d| query(d) * key(d)).sum();
                        sum += decay(h, j, i) * score * v[[batch, h, j as usize, e]];
                    }
                    let of_state: f64 = (0..dim).map(|d| query(d) * initial(h, d, e)).sum();
                    sum += decay(h, first - 1, i) * of_state;
                    o[[batch, head, i as usize, e]] = problem.scale * sum;
                }
            }
            for h in 0..problem.extents.key_heads {
                for d in 0..dim {
                    let mut sum = decay(h, first - 1, end - 1) * initial(h, d, e);
                    for j in first..end {
                        let product = k[[batch, h, j as usize, d]] * v[[batch, h, j as usize, e]];
                        sum += decay(h, j, end - 1) * product;
                    }
                    state[[index, h, d, e]] = sum;
                }
            }
        }
    }
    let mut results = Tensors::from([("o".to_string(), o)]);
    if problem.final_state {
        results.insert("final_state".to_string(), state);
    }
    results
}
