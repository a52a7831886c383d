//! Laws of linear_cross_entropy.

use super::flaw::{Flaw, Judgement, refute};
use super::law::{FIRST_ORDER, Kind, LINEAR_CROSS_ENTROPY, Law};
use super::tensors::{Equality, difference, map, take};
use super::trial::Trial;
use super::values::{close, larger};
use crate::cases::Case;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Problem, Reduction};
use ndarray::{ArrayD, Axis};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "ignored_poison",
        statement: "NaN in the tensors of an ignored token changes nothing.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| !ignored(case).is_empty(),
        check: ignored_poison,
    },
    Law {
        name: "class_sums",
        statement: "Without a cap the rows of dw add up to the part that comes through lse alone.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            let plain = |p: &LinearCrossEntropy| p.softcap.is_none() && p.lse_square_scale == 0.0;
            pass == Pass::Backward && problem(case).is_some_and(plain)
        },
        check: class_sums,
    },
    Law {
        name: "class_order",
        statement: "The order of the classes changes nothing beyond the bound.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| problem(case).is_some_and(|p| p.vocab > 1),
        check: class_order,
    },
    Law {
        name: "token_order",
        statement: "The results of a token have the same bits in any order of the tokens.",
        kind: Kind::Contract,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            problem(case).is_some_and(|p| p.tokens > 1 && p.reduction == Reduction::None)
        },
        check: token_order,
    },
    Law {
        name: "losses_add_up",
        statement: "Unreduced losses add up to their sum, and to their mean times Z.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Forward && problem(case).is_some_and(|p| p.reduction == Reduction::None)
        },
        check: losses_add_up,
    },
    Law {
        name: "h_and_w_exchange",
        statement: "Twice h with half of w changes nothing but dh, which halves, and dw.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| case.dtype != Dtype::F16,
        check: h_and_w_exchange,
    },
    Law {
        name: "impossible_class",
        statement: "A class of logit −∞ gives the results of a problem without it.",
        kind: Kind::Meaning,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| problem(case).is_some_and(|p| p.vocab > 1),
        check: impossible_class,
    },
    Law {
        name: "equal_logits",
        statement: "V equal logits have the entropy ln V, and the first class is their argmax.",
        kind: Kind::Probe,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Forward && problem(case).is_some_and(|p| p.outputs.argmax)
        },
        check: equal_logits,
    },
    Law {
        name: "one_class",
        statement: "A single class has a loss of exactly 0, and no gradients.",
        kind: Kind::Probe,
        of: LINEAR_CROSS_ENTROPY,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: one_class,
    },
];

fn problem(case: &Case) -> Option<&LinearCrossEntropy> {
    match &case.problem {
        Problem::LinearCrossEntropy(problem) => Some(problem),
        _ => None,
    }
}

fn needed(case: &Case) -> Result<&LinearCrossEntropy, Flaw> {
    problem(case).ok_or_else(|| Flaw::Vacuous("no problem of linear_cross_entropy".to_string()))
}

fn targets(case: &Case) -> Vec<i64> {
    let numbers = case.inputs.get("targets").and_then(|x| x.numbers("targets").ok());
    numbers.map_or(Vec::new(), |x| x.iter().map(|&y| y as i64).collect())
}

/// The ignored tokens.
fn ignored(case: &Case) -> Vec<usize> {
    let index = problem(case).map_or(0, |problem| problem.ignore_index);
    let targets = targets(case).into_iter().enumerate();
    targets.filter(|&(_, y)| y == index).map(|(i, _)| i).collect()
}

/// Whether axis 0 of a tensor counts tokens.
fn by_token(problem: &LinearCrossEntropy, name: &str) -> bool {
    match name {
        "h" | "dh" | "targets" | "token_weights" | "lse" | "logprob" | "entropy" | "argmax"
        | "dlse" | "dlogprob" | "dentropy" => true,
        "loss" | "dloss" => problem.reduction == Reduction::None,
        _ => false,
    }
}

/// Whether axis 0 of a tensor counts classes.
fn by_class(name: &str) -> bool {
    ["w", "bias", "class_weights", "dw", "dbias"].contains(&name)
}

fn ignored_poison(trial: &Trial<'_>) -> Judgement {
    let (case, tokens) = (trial.case, ignored(trial.case));
    let problem = needed(case)?;
    let mut inputs = case.inputs.clone();
    for (name, tensor) in &case.inputs {
        if by_token(problem, name) && name != "targets" {
            let poison = |at: &[usize], x: f64| if tokens.contains(&at[0]) { f64::NAN } else { x };
            inputs.insert(name.clone(), map(tensor, poison)?);
        }
    }
    let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
    for (name, tensor) in trial.clean()? {
        refute(difference(name, &outputs[name], tensor, Equality::Numbers, |_| true))?;
    }
    Ok(None)
}

/// Σ_v dw_v = r Σ_i dlse_i h_i: probabilities add up to 1.
fn class_sums(trial: &Trial<'_>) -> Judgement {
    let problem = needed(trial.case)?;
    let (got, bounds) = (trial.clean()?["dw"].to_f64("dw")?, &trial.bounds()?.outputs["dw"]);
    let h = trial.case.inputs["h"].to_f64("h")?;
    let dlse = trial.case.inputs.get("dlse").map(|x| x.to_f64("dlse")).transpose()?;
    let slope = problem.logit_scale / problem.temperature;
    let ignored = ignored(trial.case);
    let mut expected = ArrayD::zeros(got.index_axis(Axis(0), 0).raw_dim());
    if let Some(dlse) = dlse {
        for i in (0..problem.tokens).filter(|i| !ignored.contains(i)) {
            expected = expected + h.index_axis(Axis(0), i).mapv(|h| slope * dlse[[i]] * h);
        }
    }
    // Twice: f64 kernels round in the sum of the check, too.
    let limit = bounds.bound.sum_axis(Axis(0)) * 2.0;
    let wide = |x: &ArrayD<f64>| Tensor::round(x, Dtype::F64);
    close("Σ dw", &wide(&got.sum_axis(Axis(0))), &wide(&expected), &limit)
}

/// The inputs with axis 0 of some tensors in another order.
fn picked(inputs: &Tensors, order: &[usize], of: impl Fn(&str) -> bool) -> Tensors {
    let pick = |(name, tensor): (&String, &Tensor)| {
        let tensor = if of(name) { take(tensor, 0, order) } else { tensor.clone() };
        (name.clone(), tensor)
    };
    inputs.iter().map(pick).collect()
}

fn class_order(trial: &Trial<'_>) -> Judgement {
    let (case, bounds) = (trial.case, trial.bounds()?);
    let problem = needed(case)?;
    let last = problem.vocab - 1;
    let order: Vec<usize> = (0..=last).rev().collect();
    let mut inputs = picked(&case.inputs, &order, by_class);
    let turned = |y: f64| if y < 0.0 { y } else { last as f64 - y };
    inputs.insert("targets".to_string(), map(&case.inputs["targets"], |_, y| turned(y))?);
    let mut other = problem.clone();
    other.ignore_index = turned(problem.ignore_index as f64) as i64;
    let outputs = trial.ask(&other.into(), &inputs, Hints::default())?;
    let mut margin = None;
    for (name, tensor) in trial.clean()? {
        let bound = &bounds.outputs[name].bound;
        let got = match name.as_str() {
            "argmax" => map(&outputs[name], |_, v| turned(v))?,
            name if by_class(name) => take(&outputs[name], 0, &order),
            name => outputs[name].clone(),
        };
        margin = larger(margin, close(name, &got, tensor, &(bound * 2.0))?);
    }
    Ok(margin)
}

fn token_order(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let problem = needed(case)?;
    let order: Vec<usize> = (0..problem.tokens).rev().collect();
    let inputs = picked(&case.inputs, &order, |name| by_token(problem, name));
    let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
    for (name, tensor) in trial.clean()?.iter().filter(|(name, _)| by_token(problem, name)) {
        let got = take(&outputs[name], 0, &order);
        refute(difference(name, &got, tensor, Equality::Bits, |_| true))?;
    }
    Ok(None)
}

fn losses_add_up(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (losses, bound) =
        (trial.clean()?["loss"].to_f64("loss")?, &trial.bounds()?.outputs["loss"].bound);
    let mut margin = None;
    // A mean divides the z-loss by another number, unless there is none.
    let square = needed(case)?.lse_square_scale != 0.0;
    for reduction in [Reduction::Sum, Reduction::Mean] {
        if reduction == Reduction::Mean && (square || ignored(case).len() == losses.len()) {
            continue;
        }
        let other: Problem = needed(case)?.clone().reduction(reduction).into();
        let outputs = trial.ask(&other, &case.inputs, Hints::default())?;
        let bounds = trial.bounds_of(&other, &case.inputs)?;
        let z = outputs["normaliser"].to_f64("normaliser")?;
        let (z_bound, mean) =
            (&bounds.outputs["normaliser"].bound, outputs["loss"].to_f64("loss")?);
        let limit =
            &bounds.outputs["loss"].bound * &z.mapv(f64::abs) + &mean.mapv(f64::abs) * z_bound;
        let limit = limit * 1.01 + bound.sum();
        let sum = ArrayD::from_elem(mean.raw_dim(), losses.sum());
        let wide = |x: &ArrayD<f64>| Tensor::round(x, Dtype::F64);
        margin = larger(margin, close("Σ loss", &wide(&(mean * z)), &wide(&sum), &limit)?);
    }
    Ok(margin)
}

/// 2⁻¹⁰⁰: what underflow may leave behind.
const UNDERFLOW: f64 = 7.888_609_052_210_118e-31;

fn h_and_w_exchange(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let mut inputs = case.inputs.clone();
    for (name, factor) in [("h", 2.0), ("w", 0.5)] {
        inputs.insert(name.to_string(), map(&case.inputs[name], |_, x| factor * x)?);
    }
    let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
    for (name, tensor) in trial.clean()? {
        let factor = match name.as_str() {
            "dh" => 0.5,
            "dw" => 2.0,
            _ => 1.0,
        };
        let expected = map(tensor, |_, x| factor * x)?;
        let (got, exact) = (outputs[name].numbers(name)?, expected.numbers(name)?);
        let counts = |at: &[usize]| {
            let distance = got[ndarray::IxDyn(at)] - exact[ndarray::IxDyn(at)];
            distance.abs() > UNDERFLOW || distance.is_nan()
        };
        refute(difference(name, &outputs[name], &expected, Equality::Numbers, counts))?;
    }
    Ok(None)
}

/// The last class against none, without a cap, which makes −∞ finite, and without smoothing, which
/// asks for every class.
fn impossible_class(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let problem = needed(case)?;
    let last = problem.vocab - 1;
    let wide = LinearCrossEntropy { bias: true, softcap: None, ..problem.clone() };
    let wide = wide.label_smoothing(0.0);
    let narrow = LinearCrossEntropy { vocab: last, ..wide.clone() };
    let mut inputs = case.inputs.clone();
    let zeros = Tensor::round(&ArrayD::zeros(vec![problem.vocab]), case.dtype);
    let bias = case.inputs.get("bias").unwrap_or(&zeros);
    let impossible = f64::NEG_INFINITY * problem.logit_scale.signum();
    // Those of the case stay impossible, also where its cap is taken off a negative scale.
    let hidden = |at: &[usize], x: f64| {
        if at[0] == last || x == f64::NEG_INFINITY { impossible } else { x }
    };
    inputs.insert("bias".to_string(), map(bias, hidden)?);
    let other = |_: &[usize], y: f64| if y == last as f64 { 0.0 } else { y };
    inputs.insert("targets".to_string(), map(&case.inputs["targets"], other)?);
    let rest: Vec<usize> = (0..last).collect();
    let without = picked(&inputs, &rest, by_class);
    let (wide, narrow) = (Problem::from(wide), Problem::from(narrow));
    let outputs = trial.ask(&wide, &inputs, Hints::default())?;
    let expected = trial.ask(&narrow, &without, Hints::default())?;
    let (some, fewer) = (trial.bounds_of(&wide, &inputs)?, trial.bounds_of(&narrow, &without)?);
    let mut margin = None;
    for (name, expected) in &expected {
        let limit = &fewer.outputs[name].bound;
        let found = if by_class(name) {
            let got = take(&outputs[name], 0, &rest);
            let own = take(&outputs[name], 0, &[last]).numbers(name)?;
            if let Some(x) = own.iter().find(|x| **x != 0.0) {
                return Err(Flaw::Fail(format!("{name} of the class holds {x:e}")));
            }
            // The other classes' bounds are those of the wider problem, or next to them.
            close(name, &got, expected, &(limit * 2.1))?
        } else {
            close(name, &outputs[name], expected, &(limit + &some.outputs[name].bound))?
        };
        margin = larger(margin, found);
    }
    Ok(margin)
}

/// Logits of exactly −8: a class too many, of logit 0, would outweigh them all.
fn equal_logits(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let mut plain = LinearCrossEntropy { bias: false, softcap: None, ..needed(case)?.clone() };
    (plain.logit_scale, plain.temperature) = (1.0, 1.0);
    let mut inputs = case.inputs.clone();
    inputs.remove("bias");
    for (name, value) in [("h", 1.0), ("w", -8.0)] {
        let first = |at: &[usize], _: f64| if at[1] == 0 { value } else { 0.0 };
        inputs.insert(name.to_string(), map(&case.inputs[name], first)?);
    }
    let outputs = trial.ask(&plain.clone().into(), &inputs, Hints::default())?;
    let ignored = ignored(case);
    let roundoff = if case.dtype == Dtype::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let entropy = (plain.vocab as f64).ln();
    for (name, expected) in
        [("argmax", 0.0), ("entropy", entropy), ("lse", entropy - 8.0), ("logprob", -entropy)]
    {
        // The sum of ones is exact; the logarithm, and two additions of numbers below 16, are not.
        let limit = if name == "argmax" { 0.0 } else { 64.0 * roundoff };
        for (i, &got) in outputs[name].numbers(name)?.iter().enumerate() {
            let right = (got - expected).abs() <= limit || ignored.contains(&i);
            if !right {
                return Err(Flaw::Fail(format!("{name}[{i}] = {got:e}, expected {expected:e}")));
            }
        }
    }
    Ok(None)
}

fn one_class(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let ignore_index = LinearCrossEntropy::IGNORE_INDEX;
    let single = LinearCrossEntropy { vocab: 1, ignore_index, ..needed(case)?.clone() };
    let single = single.label_smoothing(0.0).lse_square_scale(0.0);
    let mut inputs = picked(&case.inputs, &[0], by_class);
    inputs.insert("targets".to_string(), map(&case.inputs["targets"], |_, _| 0.0)?);
    inputs.remove("dlse"); // lse is the logit
    let outputs = trial.ask(&single.into(), &inputs, Hints::default())?;
    for name in ["loss", "logprob", "entropy", "argmax", "dh", "dw", "dbias"] {
        let Some(tensor) = outputs.get(name) else { continue };
        if let Some(x) = tensor.numbers(name)?.iter().find(|x| **x != 0.0) {
            return Err(Flaw::Fail(format!("{name} holds {x:e}")));
        }
    }
    Ok(None)
}
