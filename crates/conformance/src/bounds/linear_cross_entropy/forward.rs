//! The outputs of the forward pass: (N67) to (N70).

use super::super::model::{Model, growth};
use super::row::Row;
use super::{Lists, Operands};
use etalon_problem::{LinearCrossEntropy, Reduction};
use rayon::prelude::*;

/// What one token that counts adds.
struct Token {
    i: usize,
    lse: f64,
    logprob: f64,
    entropy: f64,
    argmax: f64,
    /// Of its share of the loss before it is divided, with the size of that.
    cross_entropy: (f64, f64),
    square: (f64, f64),
}

pub(super) fn errors(operands: &Operands<'_>, model: &Model) -> Lists {
    let LinearCrossEntropy { tokens, reduction, .. } = *operands.problem;
    let counted: Vec<(usize, usize)> = operands.counted().collect();
    let rows: Vec<Token> = counted.par_iter().map(|&(i, y)| token(operands, model, i, y)).collect();
    let per_token = |of: fn(&Token) -> f64| {
        let mut list = vec![0.0; tokens];
        rows.iter().for_each(|token| list[token.i] = of(token));
        list
    };
    let normaliser = operands.normaliser(|n| model.gamma(n));
    let loss = if reduction == Reduction::None {
        let round = 3.0 * model.u;
        let mut list = vec![0.0; tokens];
        for Token { i, cross_entropy: (size, error), square: (square, square_error), .. } in &rows {
            list[*i] = error + square_error + round * (size + square);
        }
        list
    } else {
        let n = normaliser.n;
        let gamma = model.gamma(n + 2 * model.rescales(n) + 6);
        let sum = |of: fn(&Token) -> (f64, f64), z: f64, relative: f64| {
            let (size, error) =
                rows.iter().map(of).fold((0.0, 0.0), |(s, e), x| (s + x.0, e + x.1));
            let (size, error) = (size / z.abs(), error / z.abs());
            error + (gamma + growth(relative)) * (size + error)
        };
        let relative = if normaliser.z == normaliser.z_lse { normaliser.relative } else { 0.0 };
        let loss = sum(|token| token.cross_entropy, normaliser.z, normaliser.relative)
            + sum(|token| token.square, normaliser.z_lse, relative);
        vec![if n == 0 { 0.0 } else { loss }] // (N70)
    };
    Lists::from([
        ("loss", loss),
        ("lse", per_token(|token| token.lse)),
        ("logprob", per_token(|token| token.logprob)),
        ("entropy", per_token(|token| token.entropy)),
        ("argmax", per_token(|token| token.argmax)),
        ("n_valid", vec![0.0]),
        ("normaliser", vec![normaliser.error]), // (N65)
    ])
}

fn token(operands: &Operands<'_>, model: &Model, i: usize, y: usize) -> Token {
    let row = Row::new(operands, model, i);
    let (problem, u) = (operands.problem, model.u);
    let logprob = row.logprob_error(model, y);
    let lost = |error: f64| if row.lost { f64::INFINITY } else { error };

    let alpha = problem.label_smoothing;
    let share = alpha / problem.vocab as f64;
    let gamma = model.gamma(model.chain(problem.vocab) + 4);
    let own = (1.0 - alpha) * operands.class_weight(y).abs();
    let (mut size, mut error) = (0.0, 0.0);
    if own > 0.0 {
        size += own * (row.lse - row.logits[y].z).abs();
        error += own * logprob;
    }
    if alpha > 0.0 {
        for (v, x) in row.logits.iter().enumerate() {
            let weight = share * operands.class_weight(v).abs();
            if weight > 0.0 {
                let terms = row.lse.abs() + x.z.abs() + row.m.abs() + model.profile.rescale_lag;
                error += weight * (row.lse_error + x.error + gamma * terms);
                size += weight * (row.lse - x.z).abs();
            }
        }
    }
    let error = error + 6.0 * u * size; // (N68)
    let kappa = operands.token_weight(i).abs();
    let square = operands.lse_square(i, y).abs();
    let square_size = square * row.lse * row.lse;
    let square_error =
        square * (2.0 * row.lse.abs() + row.lse_error) * row.lse_error + 6.0 * u * square_size; // (N69)
    Token {
        i,
        lse: lost(row.lse_error),
        logprob: lost(logprob),
        entropy: lost(row.entropy_error),
        argmax: argmax(&row),
        cross_entropy: (kappa * size, lost(kappa * error)),
        square: (square_size, if square > 0.0 { lost(square_error) } else { 0.0 }),
    }
}

/// 0, or ∞ where rounding decides.
fn argmax(row: &Row) -> f64 {
    let best = row.logits.iter().position(|x| x.z == row.m);
    let Some(best) = best else { return 0.0 };
    let close = |v: usize, error: f64| {
        v != best && row.logits[v].z + error + row.logits[best].error >= row.m
    };
    let near = row.logits.iter().enumerate().any(|(v, x)| close(v, x.error));
    if near { f64::INFINITY } else { 0.0 }
}
