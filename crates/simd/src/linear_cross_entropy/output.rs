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
use super::tokens::{Token, Tokens, weighted};
use etalon_problem::Reduction;
use ndarray::{ArrayViewMut1, ArrayViewMutD};

/// `argmax` of an ignored token.
const NO_CLASS: i64 = -1;

/// Writes the outputs that have a place.
pub fn write(tokens: &Tokens<'_>, totals: &[Partial], outputs: Outputs<'_>) {
    let terms =
        |(token, total)| tokens.terms(token, cross_entropy(tokens, token, total), total.lse());
    write_loss(tokens, outputs.loss, tokens.counted.iter().zip(totals).map(terms));
    let of_all = |of: fn(&Partial) -> f64| totals.iter().map(move |total| of(total) as f32);
    write_rows(tokens, outputs.lse, 0.0, of_all(Partial::lse));
    write_rows(tokens, outputs.logprob, 0.0, of_all(Partial::logprob));
    write_rows(tokens, outputs.entropy, 0.0, of_all(Partial::entropy));
    let argmax = totals.iter().map(|total| i64::from(total.argmax));
    write_rows(tokens, outputs.argmax, NO_CLASS, argmax);
    outputs.n_valid.into_iter().for_each(|x| *x = tokens.counted.len() as i64);
    outputs.normaliser.into_iter().for_each(|x| *x = tokens.z as f32);
}

/// Writes (C9), or how it moves, from both terms of every token that counts.
pub fn write_loss(
    tokens: &Tokens<'_>,
    place: Option<ArrayViewMutD<'_, f32>>,
    terms: impl Iterator<Item = [f64; 2]>,
) {
    let Some(mut loss) = place else { return };
    if tokens.problem.reduction == Reduction::None {
        loss.fill(0.0);
        for (token, terms) in tokens.counted.iter().zip(terms) {
            loss[[token.index]] = terms.iter().sum::<f64>() as f32;
        }
    } else {
        let sums = terms.fold([0.0; 2], |x, y| [x[0] + y[0], x[1] + y[1]]);
        loss.fill(tokens.loss(sums) as f32);
    }
}

/// Writes a number for every token that counts, and `ignored` for the others.
pub fn write_rows<N: Clone>(
    tokens: &Tokens<'_>,
    place: Option<ArrayViewMut1<'_, N>>,
    ignored: N,
    numbers: impl Iterator<Item = N>,
) {
    let Some(mut place) = place else { return };
    place.fill(ignored);
    tokens.counted.iter().zip(numbers).for_each(|(token, x)| place[token.index] = x);
}

/// (C7). A part of weight 0 is left out.
fn cross_entropy(tokens: &Tokens<'_>, token: &Token, total: &Partial) -> f64 {
    let (alpha, mut sum) = (tokens.problem.label_smoothing, 0.0);
    if alpha < 1.0 {
        sum += (1.0 - alpha) * weighted(f64::from(token.class_weight), -total.logprob());
    }
    if alpha > 0.0 {
        // Σ cw_v (lse − z_v)
        let spread = tokens.class_weights * total.ln_l() - f64::from(total.s);
        sum += alpha / tokens.problem.vocab as f64 * spread;
    }
    sum
}
