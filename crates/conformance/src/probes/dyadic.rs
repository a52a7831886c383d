//! The dyadic probe. With q = 0 or k = 0 every score is 0 and P = 1/n. Rows whose n is a power of
//! two and whose o the storage type holds exactly get integer cotangents, the others zeros; v and
//! the one of q and k that is not 0 are small integers. Then δ, dS and all sums are binary
//! fractions of few bits, and only the rounding of lse = ln n, which P inherits, is left to allow
//! for. Sums of low precision stand out by factors of hundreds.

use super::inputs::{fill, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::tensors::exceeds;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{Dtype, Pass, Problem, Scores};
use ndarray::{Array4, ArrayD, IxDyn};

/// σ of the skeleton.
const SCALE: f64 = 0.125;

pub(super) fn check(trial: &Trial<'_>) -> Judgement {
    let mut margin = 0f64;
    for zero in ["q", "k"] {
        let (problem, scores, inputs, visible) = inputs(trial, zero)?;
        let outputs = trial.ask(&problem, &inputs, Hints::default())?;
        let expected = gradients(&scores, &inputs, &visible)?;
        for (name, sums) in expected {
            let tensor = &outputs[name];
            let u = tensor.dtype().unwrap_or(Dtype::F32).unit_roundoff();
            for ((index, got), sum) in tensor.to_f64(name)?.indexed_iter().zip(&sums) {
                // P errs by the rounding of lse (up to ln 512 = 6.2), of exp and of its argument.
                let slack = 32.0 * Dtype::F32.unit_roundoff() * sum.size + u * sum.value.abs();
                let error = (got - sum.value).abs();
                if error != 0.0 && exceeds(error, slack) {
                    let at = ndarray::Dimension::slice(&index);
                    let text = format!("{name}{at:?} = {got:e}, expected {:e}", sum.value);
                    return Err(Flaw::Fail(text));
                }
                margin = margin.max(if error == 0.0 { 0.0 } else { error / slack });
            }
        }
    }
    Ok(Some(margin))
}

/// A sum and the sum of its terms' sizes.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    value: f64,
    size: f64,
}

impl Sum {
    fn add(&mut self, term: Sum, factor: f64) {
        self.value += term.value * factor;
        self.size += term.size * factor.abs();
    }
}

fn inputs(trial: &Trial<'_>, zero: &str) -> Result<(Problem, Scores, Tensors, Visible), Flaw> {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    let stream = Stream::new(case.spec.seed, "dyadic_probe");
    let place = |at: &[usize]| place(7, at);
    let small = |at: &[usize]| stream.integer(place(at), -2, 2) as f64;
    let odd = |at: &[usize]| (2 * stream.integer(place(at), -2, 1) + 1) as f64;
    let visible = Visible::new(&scores, &Tensors::new());
    let counts = visible.counts();
    // v first: which rows count depends on it.
    let v =
        fill(case, &problem, Pass::Backward, |name, at| if name == "v" { small(at) } else { 0.0 });
    let o = match v.get("v") {
        Some(v) => means(&v.to_f64("v")?, &visible),
        None => Array4::zeros((counts.dim().0, counts.dim().1, counts.dim().2, 0)),
    };
    let exact = |row: &[usize]| {
        let n = counts[[row[0], row[1], row[2]]];
        let o = o.slice(ndarray::s![row[0], row[1], row[2], ..]);
        n.is_power_of_two() && o.iter().all(|x| case.dtype.round(*x) == *x)
    };
    let inputs = fill(case, &problem, Pass::Backward, |name, at| match name {
        "q" | "k" if name == zero => 0.0,
        "q" | "k" => odd(at),
        "v" => small(at),
        // The sums stay exact with few columns, whatever E.
        "dout" if at[3] < 8 && exact(at) => small(at),
        "dlse" if exact(at) => odd(at),
        _ => 0.0,
    });
    Ok((problem, scores, inputs, visible))
}

/// The means of the visible values.
fn means(v: &ArrayD<f64>, visible: &Visible) -> Array4<f64> {
    let (batch, heads, queries, _) = visible.pairs.dim();
    Array4::from_shape_fn((batch, heads, queries, v.shape()[3]), |(b, h, i, c)| {
        let row = visible.pairs.slice(ndarray::s![b, h, i, ..]);
        let seen = row.iter().enumerate().filter(|(_, seen)| **seen).map(|(j, _)| j);
        let (sum, n) =
            seen.fold((0.0, 0), |(sum, n), j| (sum + v[[b, h / visible.group(), j, c]], n + 1));
        if n == 0 { 0.0 } else { sum / f64::from(n) }
    })
}

/// (B1) to (B7) with P = 1/n, pair by pair.
fn gradients(
    scores: &Scores,
    inputs: &Tensors,
    visible: &Visible,
) -> Result<Vec<(&'static str, ArrayD<Sum>)>, Flaw> {
    let e = scores.extents;
    let array = |name: &str| inputs[name].to_f64(name);
    let (q, k) = (array("q")?, array("k")?);
    let values = match inputs.contains_key("v") {
        true => Some((array("v")?, array("dout")?)),
        false => None,
    };
    let dlse = if inputs.contains_key("dlse") { Some(array("dlse")?) } else { None };
    let width = values.as_ref().map_or(0, |(v, _)| v.shape()[3]);
    let sums = |shape: &[usize]| ArrayD::from_elem(IxDyn(shape), Sum::default());
    let mut dq = sums(&scores.q_shape());
    let mut dk = sums(&scores.k_shape());
    let mut dv = sums(&[e.batch, e.key_heads, e.keys, width]);
    for ((b, h, i), &n) in visible.counts().indexed_iter().filter(|(_, n)| **n > 0) {
        let (g, p) = (h / visible.group(), 1.0 / n as f64);
        let seen: Vec<usize> = (0..e.keys).filter(|&j| visible.pairs[[b, h, i, j]]).collect();
        let dp = |j: usize| -> Sum {
            let mut sum = Sum::default();
            if let Some((v, dout)) = &values {
                for c in 0..width {
                    let one = Sum { value: v[[b, g, j, c]], size: v[[b, g, j, c]].abs() };
                    sum.add(one, dout[[b, h, i, c]]);
                }
            }
            sum
        };
        let mut delta = Sum::default();
        seen.iter().for_each(|&j| delta.add(dp(j), p));
        let direct = dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i]]);
        delta.add(Sum { value: direct, size: direct.abs() }, -1.0);
        for j in seen {
            let mut ds = Sum::default();
            ds.add(dp(j), p * SCALE);
            ds.add(delta, -p * SCALE);
            for c in 0..e.dim {
                dq[[b, h, i, c]].add(ds, k[[b, g, j, c]]);
                dk[[b, g, j, c]].add(ds, q[[b, h, i, c]]);
            }
            if let Some((_, dout)) = &values {
                let weight = Sum { value: p, size: p };
                (0..width).for_each(|c| dv[[b, g, j, c]].add(weight, dout[[b, h, i, c]]));
            }
        }
    }
    let mut list = vec![("dq", dq), ("dk", dk)];
    list.extend((width > 0).then_some(("dv", dv)));
    Ok(list)
}
