//! The outputs of the forward pass: (N67) to (N70).

use super::operands::{Normaliser, Operands};
use super::row::{Logit, Row};
use crate::bounds::inputs::Errors;
use crate::bounds::model::Model;
use crate::bounds::model::{divided, spread};
use crate::bounds::sum::Sum;
use etalon_problem::Reduction;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Contribution of one token that counts: errors, and its shares of the loss before they are divided.
struct Token {
    i: usize,
    lse: f64,
    logprob: f64,
    entropy: f64,
    /// The classes that a kernel may take for the largest, where there are several.
    argmax: Vec<usize>,
    cross_entropy: Sum,
    square: Sum,
}

pub(super) fn errors(operands: &Operands<'_>) -> Errors {
    let normaliser = Normaliser::new(operands);
    let tokens = operands.counted.par_iter().map(|&(i, y)| token(operands, i, y));
    let tokens: Vec<Token> = tokens.collect();
    let per_token = |of: &dyn Fn(&Token) -> f64| {
        let mut list = vec![0.0; operands.problem.tokens];
        tokens.iter().for_each(|token| list[token.i] = of(token));
        list
    };
    let loss = if operands.problem.reduction == Reduction::None {
        per_token(&|Token { cross_entropy, square, .. }| {
            let rounded = 3.0 * operands.model.u * (cross_entropy.absolute + square.absolute);
            cross_entropy.error + square.error + rounded
        })
    } else {
        vec![reduced(operands, &normaliser, &tokens)]
    };
    // No distance tells which of several classes it is.
    let argmax = per_token(&|token| if token.argmax.is_empty() { 0.0 } else { f64::INFINITY });
    let lists = BTreeMap::from([
        ("loss", loss),
        ("lse", per_token(&|token| token.lse)),
        ("logprob", per_token(&|token| token.logprob)),
        ("entropy", per_token(&|token| token.entropy)),
        ("argmax", argmax),
        ("n_valid", vec![0.0]),
        ("normaliser", vec![normaliser.error]), // (N65)
    ]);
    let several = tokens.into_iter().filter(|token| !token.argmax.is_empty());
    let as_right = several.map(|token| (token.i, token.argmax)).collect();
    Errors { lists, power: None, as_right: BTreeMap::from([("argmax", as_right)]) }
}

/// (N70)
fn reduced(operands: &Operands<'_>, normaliser: &Normaliser, tokens: &[Token]) -> f64 {
    let (model, n) = (operands.model, tokens.len());
    if n == 0 {
        return 0.0;
    }
    let gamma = model.gamma_of_sum(n + 2 * model.profile.rescales(n) + 6);
    let part = |of: fn(&Token) -> Sum, z: f64, relative: f64| {
        let mut sum = Sum::default();
        tokens.iter().for_each(|token| sum.add(of(token)));
        if z == 0.0 && relative == 0.0 {
            return 0.0; // nothing is left to average: the problem says what the loss is
        }
        let (size, error) = match z.abs() {
            z if z > 0.0 => (sum.absolute / z, sum.error / z),
            _ => (sum.absolute, sum.error), // its own error says that there is no bound
        };
        let divided = divided(relative);
        error + spread(gamma + divided + spread(gamma, divided), size + error)
    };
    let &Normaliser { z, z_lse, relative, .. } = normaliser;
    let of_square = if z == z_lse { relative } else { 0.0 };
    part(|token| token.cross_entropy, z, relative) + part(|token| token.square, z_lse, of_square)
}

fn token(operands: &Operands<'_>, i: usize, y: usize) -> Token {
    let (problem, model) = (operands.problem, operands.model);
    let row = Row::new(operands, i);
    let target = &row.logits[y];
    let logprob = row.lse_error + target.error + 2.0 * model.u * (target.z.abs() + row.lse.abs()); // (N67)

    let alpha = problem.label_smoothing;
    let share = alpha / problem.vocab as f64;
    let gamma = model.gamma(model.profile.chain(problem.vocab) + 4);
    let own = (1.0 - alpha) * operands.class_weight(y).abs();
    let (mut size, mut error) = (0.0, 0.0);
    if own > 0.0 {
        size += own * (row.lse - target.z).abs();
        error += own * logprob;
    }
    for (v, x) in row.logits.iter().enumerate().filter(|_| alpha > 0.0) {
        let weight = share * operands.class_weight(v).abs();
        if weight > 0.0 {
            let terms = row.lse.abs() + x.z.abs() + row.m.abs() + row.lag;
            let own = row.lse_error + x.error;
            error += weight * (own + spread(gamma, terms + own));
            size += weight * (row.lse - x.z).abs();
        }
    }
    let error = error + 6.0 * model.u * size; // (N68)
    let kappa = operands.token_weight(i).abs();
    // 0·∞ = 0 here, in every kernel.
    let cross_entropy = Sum::term(spread(error, kappa), spread(size, kappa));

    let scale = operands.lse_square(i, y).abs();
    let size = scale * row.lse * row.lse;
    let error = scale * (2.0 * row.lse.abs() + row.lse_error) * row.lse_error; // (N69)
    let error = if scale > 0.0 { error + 6.0 * model.u * size } else { 0.0 };
    Token {
        i,
        lse: row.lse_error,
        logprob,
        entropy: row.entropy_error,
        argmax: argmax(model, &row),
        cross_entropy,
        square: Sum::term(error, size),
    }
}

/// The classes whose logits come within both errors of the largest, where there are several. Of logits that are
/// exact and equal the first counts.
fn argmax(model: &Model, row: &Row) -> Vec<usize> {
    let best = row.logits.iter().position(|x| x.z == row.m);
    // The largest that is certain: another class must reach it. As errors reach in an output (N4).
    let least = |x: &Logit| x.z - model.widened(x.error);
    let certain = row.logits.iter().map(least).fold(f64::NEG_INFINITY, f64::max);
    let reaches = |(v, x): &(usize, &Logit)| {
        let most = x.z + model.widened(x.error);
        let tied = x.error == 0.0 && x.z == certain;
        Some(*v) == best || (x.z > f64::NEG_INFINITY && !(most < certain || tied))
    };
    let classes: Vec<usize> =
        row.logits.iter().enumerate().filter(reaches).map(|(v, _)| v).collect();
    // The exact result is that of sums in another order: it may be any of several, but not another than one.
    if classes.len() > 1 { classes } else { Vec::new() }
}
