//! The dyadic probe. With q = 0 or k = 0 every score is 0 and P = 1/n. Rows whose n is a power of
//! two and whose o the storage type holds exactly get integer cotangents, the others zeros; v and
//! the one of q and k that is not 0 are small integers. Then δ, dS and all sums are binary
//! fractions of few bits, and only the rounding of lse = ln n, which P inherits, is left to allow
//! for. Sums of low precision stand out by factors of hundreds.

use super::arrays::Arrays;
use super::inputs::{fill, place, skeleton};
use crate::generate::Stream;
use crate::laws::compare::close;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Pass, Problem};
use ndarray::Array3;

/// σ of the skeleton.
const SCALE: f64 = 0.125;

pub(super) fn dyadic_probe(trial: &Trial<'_>) -> Judgement {
    worst(["q", "k"].map(|zero| one_way(trial, zero)))
}

fn one_way(trial: &Trial<'_>, zero: &str) -> Judgement {
    let (problem, inputs, visible) = inputs(trial, zero)?;
    let outputs = trial.ask(&problem, &inputs)?;
    let x = Arrays::of(&inputs)?;
    let sums = gradients(&problem, &x, &visible, -1.0);
    let sizes = gradients(&problem, &x.sizes(), &visible, 1.0);
    // A profile may round P and dS once more before they are multiplied, or as they are.
    let profile = trial.profile();
    let stored =
        [profile.p_store, profile.ds_store].into_iter().filter(|x| *x != profile.accumulator);
    let stored = stored.map(Dtype::unit_roundoff).fold(2.0 * profile.factor, f64::max);
    // What it stores besides is rounded by itself: dP, the normalised P, and σ dS.
    let besides = [profile.dp_store, profile.weight_store, profile.score_store].into_iter();
    let besides = besides.filter(|x| *x != profile.accumulator).map(Dtype::unit_roundoff);
    let stored = stored + besides.sum::<f64>();
    worst(sums.iter().zip(sizes.iter()).map(|((name, sums), (_, sizes))| {
        let u = outputs[name].dtype().unwrap_or(Dtype::F32).unit_roundoff();
        // P errs by the rounding of lse (up to ln 512 = 6.2), of exp and of its argument.
        let terms = 32.0 * Dtype::F32.unit_roundoff() + stored;
        let limit = sizes * terms + sums.mapv(|x| u * x.abs());
        close(name, &outputs[name].to_f64(name)?, sums, &limit)
    }))
}

fn inputs(trial: &Trial<'_>, zero: &str) -> Result<(Problem, Tensors, Visible), Flaw> {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    let stream = Stream::new(case.spec.seed, "dyadic_probe");
    let small = |at: &[usize]| stream.integer(place(7, at), -2, 2) as f64;
    let odd = |at: &[usize]| (2 * stream.integer(place(7, at), -2, 1) + 1) as f64;
    let visible = Visible::new(&scores, &Tensors::new());
    let width = case.inputs.get("v").map_or(0, |v| v.shape[3]);
    let (batch, heads, queries, _) = visible.pairs.dim();
    let exact = Array3::from_shape_fn((batch, heads, queries), |(b, h, i)| {
        let keys: Vec<usize> = visible.keys([b, h, i]).collect();
        let mean = |c| {
            let values = keys.iter().map(|&j| small(&[b, h / visible.group(), j, c]));
            values.sum::<f64>() / keys.len() as f64
        };
        keys.len().is_power_of_two() && (0..width).map(mean).all(|o| case.dtype.round(o) == o)
    });
    let exact = |at: &[usize]| exact[[at[0], at[1], at[2]]];
    let inputs = fill(case, &problem, Pass::Backward, |x, at| match x.name {
        "q" | "k" if x.name == zero => 0.0,
        "q" | "k" => odd(at),
        "v" => small(at),
        // The sums stay exact with few columns, whatever E.
        "dout" if at[3] < 8 && exact(at) => small(at),
        "dlse" if exact(at) => odd(at),
        _ => 0.0,
    });
    Ok((problem, inputs, visible))
}

/// (B1) to (B7) with P = 1/n, pair by pair. Of inputs without signs, and with `minus` 1 for −1: the
/// sums of the sizes of all terms.
fn gradients(problem: &Problem, x: &Arrays, visible: &Visible, minus: f64) -> Arrays {
    let mut sums = Arrays::results(problem, Pass::Backward);
    for ((b, h, i), &n) in visible.counts().indexed_iter() {
        let (row, p) = ([b, h, i], 1.0 / n as f64);
        let key = |j| [b, h / visible.group(), j];
        let dp = |j| x.product(("v", key(j)), ("dout", row));
        let dps: Vec<(usize, f64)> = visible.keys(row).map(|j| (j, dp(j))).collect();
        let delta = dps.iter().map(|(_, dp)| p * dp).sum::<f64>() + minus * x.at("dlse", &row);
        for (j, dp) in dps {
            sums.add_score(x, row, key(j), p * SCALE * (dp + minus * delta));
            sums.add_value(x, row, key(j), p);
        }
    }
    sums
}
