//! Motions of the outputs of the forward pass, from the motions of the totals of tokens: (C22), (C24), (C31)
//! and (C32).

use super::super::operands::SecondOutputs;
use super::super::output::{write_loss, write_rows};
use super::super::partial::Partial;
use super::super::tokens::{Token, Tokens, weighted_motion};
use super::motion::Motion;

/// Writes the outputs that have a place.
pub fn write(
    tokens: &Tokens<'_>,
    totals: &[Partial],
    motions: &[Motion],
    outputs: SecondOutputs<'_>,
) {
    let rows = || totals.iter().zip(motions);
    let terms = |(token, (total, motion)): (&Token, (&Partial, &Motion))| {
        let lse = [total.lse(), motion.lse(total)];
        tokens.term_motions(token, cross_entropy(tokens, token, total, motion), lse)
    };
    write_loss(tokens, outputs.gdloss, tokens.counted.iter().zip(rows()).map(terms));
    let of_all = |of: fn(&Motion, &Partial) -> f64| {
        rows().map(move |(total, motion)| of(motion, total) as f32)
    };
    write_rows(tokens, outputs.gdlse, 0.0, of_all(Motion::lse));
    write_rows(tokens, outputs.gdlogprob, 0.0, of_all(Motion::logprob));
    write_rows(tokens, outputs.gdentropy, 0.0, of_all(Motion::entropy));
}

/// (C7), and how it moves. A part of weight 0 is left out.
fn cross_entropy(tokens: &Tokens<'_>, token: &Token, total: &Partial, motion: &Motion) -> [f64; 2] {
    let (alpha, mut sum) = (tokens.problem.label_smoothing, [0.0; 2]);
    if alpha < 1.0 {
        let own = [-total.logprob(), -motion.logprob(total)];
        let weight = f64::from(token.class_weight);
        sum = weighted_motion(weight, own).map(|x| (1.0 - alpha) * x);
    }
    if alpha > 0.0 {
        // Σ cw_v (lse − z_v), relative to m and to ṁ
        let spread = [
            tokens.class_weights * total.ln_l() - f64::from(total.s),
            tokens.class_weights * motion.mean(total) - f64::from(motion.s),
        ];
        let part = alpha / tokens.problem.vocab as f64;
        sum = [sum[0] + part * spread[0], sum[1] + part * spread[1]];
    }
    sum
}
