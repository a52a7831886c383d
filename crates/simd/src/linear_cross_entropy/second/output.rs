//! How the outputs of the forward pass move, from the motions of the totals of tokens: (C22), (C24), (C31)
//! and (C32).

use super::super::operands::SecondOutputs;
use super::super::partial::Partial;
use super::super::tokens::{Token, Tokens, weigh_motion};
use super::motion::Motion;
use etalon_problem::Reduction;
use ndarray::ArrayViewMut1;

/// Writes the outputs that have a place.
pub fn write(
    tokens: &Tokens<'_>,
    totals: &[Partial],
    motions: &[Motion],
    outputs: SecondOutputs<'_>,
) {
    let rows = || tokens.counted.iter().zip(totals.iter().zip(motions));
    if let Some(mut loss) = outputs.gdloss {
        loss.fill(0.0);
        let terms = |(token, (total, motion)): (&Token, (&Partial, &Motion))| {
            let lse = [total.lse(), motion.lse(total)];
            tokens.term_motions(token, cross_entropy(tokens, token, total, motion), lse)
        };
        if tokens.problem.reduction == Reduction::None {
            for row in rows() {
                loss[[row.0.index]] = terms(row).iter().sum::<f64>() as f32;
            }
        } else {
            let sums = rows().map(terms).fold([0.0; 2], |x, y| [x[0] + y[0], x[1] + y[1]]);
            loss.fill(tokens.loss(sums) as f32);
        }
    }
    let spread = |place: Option<ArrayViewMut1<'_, f32>>, of: fn(&Motion, &Partial) -> f64| {
        let Some(mut place) = place else { return };
        place.fill(0.0);
        rows().for_each(|(token, (total, motion))| place[token.index] = of(motion, total) as f32);
    };
    spread(outputs.gdlse, Motion::lse);
    spread(outputs.gdlogprob, Motion::logprob);
    spread(outputs.gdentropy, Motion::entropy);
}

/// (C7), and how it moves. A part of weight 0 is left out.
fn cross_entropy(tokens: &Tokens<'_>, token: &Token, total: &Partial, motion: &Motion) -> [f64; 2] {
    let (alpha, mut sum) = (tokens.problem.label_smoothing, [0.0; 2]);
    if alpha < 1.0 {
        let own = [-total.logprob(), -motion.logprob(total)];
        let weight = f64::from(token.class_weight);
        sum = weigh_motion(weight, own).map(|x| (1.0 - alpha) * x);
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
