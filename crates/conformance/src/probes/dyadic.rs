//! The dyadic probe. With q = 0 or k = 0 every score is 0 and P = 1/n. Rows whose n is a power of
//! two and whose o the storage type holds exactly get integer cotangents, the others zeros; v and
//! the one of q and k that is not 0 are small integers. Then δ, dS and all sums are binary
//! fractions of few bits, and only the rounding of lse = ln n, which P inherits, is left to allow
//! for. Sums of low precision stand out by factors of hundreds.
//!
//! A profile that stores dS in 16 bits rounds it there, which hides sums that are kept in 16 bits. A problem that
//! somebody brings is therefore also asked with values that are opposite in pairs of keys, in rows that see whole
//! pairs: o and δ are 0, and dS is a whole number of 2^−m below 36, which every type holds. With the other values
//! the sinks and the bias of such a problem add to the keys of a row, and take from them.

use super::arrays::Arrays;
use super::equal::{Equal, Row, beside};
use super::inputs::{fill, fill_beside, is_dyadic, place, skeleton, value_columns};
use crate::generate::Stream;
use crate::laws::compare::close;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Operand, Pass, Problem};
use ndarray::Array3;

/// A question: the one of q and k that is 0, and whether values are opposite in pairs.
#[derive(Clone, Copy)]
struct Way {
    zero: &'static str,
    paired: bool,
}

pub(super) fn dyadic_probe(trial: &Trial<'_>) -> Judgement {
    let (problem, scores) = skeleton(trial.case)?;
    // σ dS may be stored as well: where σ is no power of two, it rounds whatever dS is.
    let pairs = trial.case.is_given() && value_columns(&problem) > 0 && is_dyadic(scores.scale());
    let paired = [false, true].into_iter().filter(|paired| !paired || pairs);
    let ways = paired.flat_map(|paired| ["q", "k"].map(|zero| Way { zero, paired }));
    worst(ways.map(|way| one_way(trial, way)))
}

fn one_way(trial: &Trial<'_>, way: Way) -> Judgement {
    let (problem, sigma, inputs, visible) = inputs(trial, way)?;
    let equal = Equal::of(&inputs)?;
    let rows = (&visible, &equal);
    let outputs = trial.ask(&problem, &inputs)?;
    let x = Arrays::of(&inputs)?;
    let sums = gradients(&problem, &x, rows, (sigma, -1.0));
    let sizes = gradients(&problem, &x.sizes(), rows, (sigma.abs(), 1.0));
    let most = visible.counts().iter().copied().max().unwrap_or(1).max(1) as f64;
    let profile = trial.profile();
    let narrow = |x: &Dtype| *x != profile.accumulator;
    let of_group = profile.group_store;
    let of_group =
        if visible.group() > 1 && narrow(&of_group) { of_group.unit_roundoff() } else { 0.0 };
    // A profile may round P and dS once more before they are multiplied, or as they are.
    let stored = profile.weight_roundoff().max(2.0 * profile.factor);
    // Each of its other stored tensors is rounded by itself: dP, the normalised P, and σ dS.
    let besides = [profile.dp_store, profile.weight_store, profile.score_store].into_iter();
    let besides = besides.filter(narrow).map(Dtype::unit_roundoff).sum::<f64>();
    let stored = |name: &str| match (way.paired, name) {
        (false, _) => stored + besides,
        (true, "dk" | "dv") => of_group + besides,
        (true, _) => besides,
    };
    let there = sums.iter().zip(sizes.iter()).filter(|((name, _), _)| outputs.contains_key(*name));
    worst(there.map(|((name, sums), (_, sizes))| {
        let u = outputs[name].dtype().unwrap_or(Dtype::F32).unit_roundoff();
        // P errs by the rounding of lse = ln n, of exp and of its argument: 32 roundings up to ln 512 = 6.2.
        let terms = (20.0 + 2.0 * most.ln()).max(32.0) * Dtype::F32.unit_roundoff() + stored(name);
        let limit = sizes * terms + sums.mapv(|x| u * x.abs());
        close(name, &outputs[name].to_f64(name)?, sums, &limit)
    }))
}

fn inputs(trial: &Trial<'_>, way: Way) -> Result<(Problem, f64, Tensors, Visible), Flaw> {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    let stream = Stream::new(case.spec.seed, "dyadic_probe");
    let small = |at: &[usize]| stream.integer(place(7, at), -2, 2) as f64;
    let value = |at: &[usize]| match way.paired {
        true => {
            let sign = if at[2].is_multiple_of(2) { 1.0 } else { -1.0 };
            sign * small(&[at[0], at[1], at[2] / 2, at[3]])
        }
        false => small(at),
    };
    let odd = |at: &[usize]| (2 * stream.integer(place(7, at), -2, 1) + 1) as f64;
    let visible = Visible::new(&scores, &Tensors::new());
    let width = value_columns(&problem);
    let (batch, heads, queries, _) = visible.pairs.dim();
    let fill = |element: &dyn Fn(&Operand, &[usize]) -> f64| match way.paired {
        true => fill(case, &problem, Pass::Backward, element),
        false => fill_beside(case, &problem, Pass::Backward, &beside, element),
    };
    // The exact rows follow from sinks and bias.
    let equal = Equal::of(&fill(&|_, _| 0.0))?;
    let exact = Array3::from_shape_fn((batch, heads, queries), |(b, h, i)| {
        let Row { keys, n, .. } = equal.row(&visible, [b, h, i]);
        let mean = |c| {
            let values = keys.iter().map(|&j| value(&[b, h / visible.group(), j, c]));
            values.sum::<f64>() / n as f64
        };
        let whole = |keys: &[usize]| keys.len() == 2 && keys[0] / 2 == keys[1] / 2;
        let pairs = !way.paired || keys.chunks(2).all(whole);
        pairs && n.is_power_of_two() && (0..width).map(mean).all(|o| case.dtype.round(o) == o)
    });
    let exact = |at: &[usize]| exact[[at[0], at[1], at[2]]];
    let inputs = fill(&|x, at| match x.name {
        "q" | "k" if x.name == way.zero => 0.0,
        "q" | "k" => odd(at),
        "v" => value(at),
        // The sums stay exact with few columns, whatever E.
        "dout" if at[3] < 8 && exact(at) => small(at),
        "dlse" if exact(at) => odd(at),
        _ => 0.0,
    });
    Ok((problem, scores.scale(), inputs, visible))
}

/// (B1) to (B9) with P = 1/n, pair by pair; a sink has the same P. Of inputs without signs, and with `minus` 1 for
/// −1: the sums of the sizes of all terms. A softcap has the slope 1 at 0.
fn gradients(
    problem: &Problem,
    x: &Arrays,
    (visible, equal): (&Visible, &Equal),
    (sigma, minus): (f64, f64),
) -> Arrays {
    let mut sums = Arrays::results(problem, Pass::Backward);
    for ((b, h, i), _) in visible.counts().indexed_iter() {
        let row = [b, h, i];
        let Row { keys, n, .. } = equal.row(visible, row);
        let p = 1.0 / n as f64;
        let key = |j| [b, h / visible.group(), j];
        let dp = |j| x.product(("v", key(j)), ("dout", row));
        let dps: Vec<(usize, f64)> = keys.iter().map(|&j| (j, dp(j))).collect();
        let delta = dps.iter().map(|(_, dp)| p * dp).sum::<f64>() + minus * x.at("dlse", &row);
        if n > keys.len() {
            sums.add("dsinks", &[h], p * minus * delta);
        }
        for (j, dp) in dps {
            sums.add_ds(x, row, key(j), sigma, p * (dp + minus * delta));
            sums.add_value(x, row, key(j), p);
        }
    }
    sums
}
