//! The gradients: (N71) to (N75).

use super::chunks::Chunks;
use super::operands::{Normaliser, Operands};
use super::row::{Logit, Row};
use crate::bounds::inputs::Errors;
use crate::bounds::model::{Model, divided, spread};
use etalon_problem::LinearCrossEntropy;
use ndarray::Array2;
use rayon::prelude::*;

/// da of a token and a class: itself, its error, |da|, and the absolute terms that it is the sum of.
#[derive(Clone, Copy)]
struct Term {
    value: f64,
    error: f64,
    size: f64,
    parts: f64,
}

pub(super) fn errors(operands: &Operands<'_>) -> Errors {
    let LinearCrossEntropy { tokens, dim, vocab, .. } = *operands.problem;
    let (model, counted) = (operands.model, &operands.counted);
    let rows = rows(operands);
    let chain = |n: usize| model.gamma(n + 2 * model.profile.rescales(n) + 3);
    let (over_classes, over_tokens) = (chain(vocab), chain(counted.len()));
    let (mut dh, mut dw) = (vec![0.0; tokens * dim], vec![0.0; vocab * dim]);
    let mut dbias = vec![0.0; vocab];
    let mut chunks = Chunks::new(operands);
    for (&(i, _), row) in counted.iter().zip(&rows) {
        for (v, term) in row.iter().enumerate() {
            if let Some(chunks) = &mut chunks {
                chunks.add(operands, i, v, term.value);
            }
            let to_h = term.error + spread(over_classes, term.parts + term.error);
            let to_w = term.error + spread(over_tokens, term.size + term.error);
            for c in 0..dim {
                let (h, w) = (operands.h[i * dim + c], operands.w[v * dim + c]);
                let unread = [h, w].map(|x| spread(model.unread(x), term.size));
                dh[i * dim + c] += to_h * w.abs() + unread[1] + model.eta; // (N74)
                dw[v * dim + c] += to_w * h.abs() + unread[0] + model.eta; // (N75)
            }
            dbias[v] += to_w;
        }
    }
    if let Some(chunks) = chunks {
        chunks.finish(operands, [&mut dh, &mut dw, &mut dbias]);
    }
    Errors::of([("dh", dh), ("dw", dw), ("dbias", dbias)])
}

/// |da| of every token and class, and how far it may be off (N73), `[T][V]`; of ignored tokens 0.
pub(super) fn logit_gradients(operands: &Operands<'_>) -> [Array2<f64>; 2] {
    let LinearCrossEntropy { tokens, vocab, .. } = *operands.problem;
    let mut all = [(); 2].map(|()| Array2::zeros([tokens, vocab]));
    for (&(i, _), row) in operands.counted.iter().zip(rows(operands)) {
        for (v, term) in row.iter().enumerate() {
            all[0][[i, v]] = term.size;
            all[1][[i, v]] = operands.model.widened(term.error);
        }
    }
    all
}

/// Terms of the tokens that count.
fn rows(operands: &Operands<'_>) -> Vec<Vec<Term>> {
    let normaliser = Normaliser::new(operands);
    let rows = operands.counted.par_iter().map(|&(i, y)| terms(operands, &normaliser, i, y));
    rows.collect()
}

fn terms(operands: &Operands<'_>, normaliser: &Normaliser, i: usize, y: usize) -> Vec<Term> {
    let row = Row::new(operands, i);
    let pull = Pull::new(operands, normaliser, &row, i, y);
    let term = |(v, x): (usize, &Logit)| {
        pull.term(x, if v == y { 1.0 } else { 0.0 }, operands.class_weight(v))
    };
    row.logits.iter().enumerate().map(term).collect()
}

/// A number with its error.
#[derive(Clone, Copy)]
struct Near {
    value: f64,
    error: f64,
}

/// (C12)–(C14) of a token.
struct Pull<'a> {
    model: &'a Model,
    row: &'a Row,
    beta: Near,
    lambda: Near,
    /// g α/V
    eta: Near,
    dentropy: f64,
    /// Of lse and of the entropy as a kernel finds them again.
    lse_error: f64,
    entropy_error: f64,
    /// Steps from dz to da whose results are stored.
    steps: f64,
}

/// dz and, where every step to a logit is stored, those back through temperature, cap and scale.
fn steps_back(problem: &LinearCrossEntropy, model: &Model) -> f64 {
    let further = [
        (problem.temperature != 1.0, 1.0),
        (problem.softcap.is_some(), 3.0),
        (problem.logit_scale != 1.0, 1.0),
    ];
    let further = further.into_iter().filter(|(is, _)| *is && model.score.u > 0.0);
    1.0 + further.map(|(_, steps)| steps).sum::<f64>()
}

impl<'a> Pull<'a> {
    fn new(
        operands: &Operands<'a>,
        normaliser: &Normaliser,
        row: &'a Row,
        i: usize,
        y: usize,
    ) -> Self {
        let (problem, model, u) = (operands.problem, operands.model, operands.model.u);
        let dloss = operands.cotangent("dloss", i);
        // Nothing passes through a loss without anything to average, where its gradients are no NaN.
        let share = |x: f64, z: f64| if z == 0.0 { 0.0 } else { x / z };
        let (g, gamma) = (
            share(dloss * operands.token_weight(i), normaliser.z),
            share(dloss * operands.lse_square(i, y), normaliser.z_lse),
        );
        let relative = divided(normaliser.relative) + 5.0 * u; // (N71)
        let (alpha, classes) = (problem.label_smoothing, problem.vocab);
        let (dlse, dlogprob) = (operands.cotangent("dlse", i), operands.cotangent("dlogprob", i));
        let target = g * (1.0 - alpha) * operands.class_weight(y);
        let eta = g * alpha / classes as f64;
        let weights: f64 = (0..classes).map(|v| operands.class_weight(v)).sum();
        let absolute: f64 = (0..classes).map(|v| operands.class_weight(v).abs()).sum();
        let square = 2.0 * gamma * row.lse;
        let lse_error = row.lse_error + model.store(row.lse.abs(), model.lse);
        let beta_error = target.abs() * (relative + 2.0 * u) + u * (target.abs() + dlogprob.abs());
        let lambda_error = spread(eta.abs() * absolute, relative + model.gamma_of_sum(classes + 4))
            + square.abs() * (relative + 3.0 * u)
            + spread(spread(2.0 * gamma.abs(), lse_error), 1.0 + relative)
            + 3.0 * u * ((eta * weights).abs() + square.abs() + dlse.abs());
        Pull {
            model,
            row,
            beta: Near { value: target - dlogprob, error: beta_error },
            lambda: Near { value: eta * weights + square + dlse, error: lambda_error },
            eta: Near { value: eta, error: eta.abs() * (relative + 2.0 * u) },
            dentropy: operands.cotangent("dentropy", i),
            lse_error,
            steps: steps_back(problem, model),
            entropy_error: row.entropy_error + model.store(row.entropy.abs(), model.entropy),
        }
    }

    /// (N72), (N73); `own` is 1 for the target.
    fn term(&self, x: &Logit, own: f64, weight: f64) -> Term {
        let &Pull { model, row, beta, lambda, eta, dentropy, lse_error, entropy_error, steps } =
            self;
        let (u, p) = (model.u, x.p);
        // A weight that is made anew, or one that is kept from the forward pass.
        let anew = x.error + model.exp((x.z - row.lse).abs()) + model.base_2(row.lse);
        let exponent = anew.max(x.exponent) + lse_error;
        let visible = x.z > f64::NEG_INFINITY;
        let p_error =
            if visible { model.weight_error(x.z - row.lse, exponent) + model.eta } else { 0.0 };
        let p_error = p_error + model.weight.error(p + p_error);
        let both = beta.value + lambda.value;
        let mut value = (p - own) * beta.value + p * lambda.value - eta.value * weight;
        let mut parts = (p * both).abs() + own * beta.value.abs() + (eta.value * weight).abs();
        let mut error = spread(p_error, both.abs())
            + spread((own - p).abs() + p_error, beta.error)
            + spread(p + p_error, lambda.error)
            + spread(eta.error, weight.abs())
            + spread(model.residual.error((own - p).abs() + p_error), beta.value.abs()); // (N94)
        if dentropy != 0.0 && p > 0.0 {
            let surprise = x.z - row.lse + row.entropy;
            let surprise_error = x.error
                + lse_error
                + entropy_error
                + 3.0 * u * (x.z.abs() + row.lse.abs() + row.entropy.abs());
            value -= dentropy * p * surprise;
            parts += (dentropy * p * surprise).abs();
            let moved = spread(p_error, surprise.abs()) + spread(p + p_error, surprise_error);
            error += spread(dentropy.abs(), moved);
        }
        let error = error + 5.0 * u * parts + model.eta; // (N72)
        let size = (x.slope * value).abs();
        let error = spread(x.slope.abs(), error)
            + spread(x.slope_error, value.abs() + error)
            + (u + steps * model.u_ds) * size
            + steps * model.eta_ds; // (N73)
        Term { value: x.slope * value, error, size, parts: x.slope.abs() * parts }
    }
}
