//! The outputs of the forward pass, from the totals of tokens:
//!
//! ```text
//! (C3)  lse_i     = ln Σ_v e^{z_iv}
//! (C5)  logprob_i = z_{i,y_i} − lse_i
//! (C6)  entropy_i = −Σ_v p_iv ln p_iv
//! (C7)  ce_i      = (1 − α) cw_{y_i} (lse_i − z_{i,y_i}) + (α/V) Σ_v cw_v (lse_i − z_iv)
//! (C9)  loss      = Σ_i κ_i ce_i / Z + ζ Σ_i κ_i ω_i lse_i² / Z_z
//! ```

use super::operands::Outputs;
use super::partial::Partial;
use super::tokens::{Token, Tokens, weigh};
use etalon_problem::Reduction;
use ndarray::ArrayViewMut1;

/// `argmax` of an ignored token.
const NO_CLASS: i64 = -1;

/// Writes the outputs that have a place.
pub fn write(tokens: &Tokens<'_>, totals: &[Partial], outputs: Outputs<'_>) {
    let rows = || tokens.counted.iter().zip(totals);
    let terms =
        |(token, total)| tokens.terms(token, cross_entropy(tokens, token, total), total.lse());
    if let Some(mut loss) = outputs.loss {
        loss.fill(0.0);
        if tokens.problem.reduction == Reduction::None {
            for row in rows() {
                loss[[row.0.index]] = terms(row).iter().sum::<f64>() as f32;
            }
        } else {
            let sums = rows().map(terms).fold([0.0; 2], |x, y| [x[0] + y[0], x[1] + y[1]]);
            loss.fill(tokens.loss(sums) as f32);
        }
    }
    let spread = |place: Option<ArrayViewMut1<'_, f32>>, of: fn(&Partial) -> f64| {
        let Some(mut place) = place else { return };
        place.fill(0.0);
        rows().for_each(|(token, total)| place[token.index] = of(total) as f32);
    };
    spread(outputs.lse, Partial::lse);
    spread(outputs.logprob, Partial::logprob);
    spread(outputs.entropy, Partial::entropy);
    if let Some(mut argmax) = outputs.argmax {
        argmax.fill(NO_CLASS);
        rows().for_each(|(token, total)| argmax[token.index] = i64::from(total.argmax));
    }
    outputs.n_valid.into_iter().for_each(|x| *x = tokens.counted.len() as i64);
    outputs.normaliser.into_iter().for_each(|x| *x = tokens.z as f32);
}

/// (C7). A part of weight 0 is left out.
fn cross_entropy(tokens: &Tokens<'_>, token: &Token, total: &Partial) -> f64 {
    let (alpha, mut sum) = (tokens.problem.label_smoothing, 0.0);
    if alpha < 1.0 {
        sum += (1.0 - alpha) * weigh(f64::from(token.class_weight), -total.logprob());
    }
    if alpha > 0.0 {
        // Σ cw_v (lse − z_v)
        let spread = tokens.class_weights * total.ln_l() - f64::from(total.s);
        sum += alpha / tokens.problem.vocab as f64 * spread;
    }
    sum
}
