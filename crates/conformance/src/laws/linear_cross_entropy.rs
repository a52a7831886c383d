//! Laws of linear_cross_entropy.

mod budgets;
mod filter;
mod shards;

use super::compare::{Strict, TWICE, agree, close, exchange};
use super::flaw::{Flaw, Judgement, worst};
use super::law::laws;
use super::part::Part;
use super::sums::input;
use super::tensors::{Equality, change, each_element, everywhere, map, poison, result, same};
use super::trial::Trial;
use crate::cases::Case;
use crate::tensor::{Tensor, Tensors};
use budgets::{budgets, several_blocks};
use etalon_problem::{
    Axis, Dtype, Error, LinearCrossEntropy, NothingLeft, Pass, Problem, Reduction, find,
};
use etalon_reference::linear_cross_entropy::shard::TILE;
use filter::{filter, filter_of_nothing};
use ndarray::ArrayD;
use shards::{impossible_shards, shards, shards_of_nodes};

laws! {
    LINEAR_CROSS_ENTROPY;
    /// NaN in the tensors of an ignored token changes nothing.
    Meaning ignored_poison on Any if |case, _| !ignored(case).is_empty();
    /// A target that is no class is refused, or shows as a result that is not finite.
    Meaning no_such_class if |case, _| first_counted(case).is_some();
    /// Without a cap the rows of dw add up to the part that comes through lse alone.
    Meaning class_sums on Backward
        if |case, _| problem_is(case, |p| p.softcap.is_none() && p.lse_square_scale == 0.0);
    /// The order of the classes changes nothing beyond the bound.
    Meaning class_order on Any if |case, _| problem_is(case, |p| p.vocab > 1);
    /// The results of a token have the same bits in any order of the tokens.
    Contract token_order on Any
        if |case, _| problem_is(case, |p| p.tokens > 1 && p.reduction == Reduction::None);
    /// Unreduced losses add up to their sum, and to their mean times Z.
    Meaning losses_add_up on Forward
        if |case, _| problem_is(case, |p| p.reduction == Reduction::None);
    /// Twice h with half of w changes nothing but dh, which halves, and dw.
    Meaning h_and_w_exchange(Strict::Bound) if |case, _| case.dtype != Dtype::F16;
    /// The same, bit by bit.
    Contract exact_exchange = h_and_w_exchange(Strict::Bits) if |case, _| case.dtype != Dtype::F16;
    /// A class of logit −∞ gives the results of a problem without it.
    Meaning impossible_class if |case, _| problem_is(case, |p| p.vocab > 1);
    /// V equal logits have the entropy ln V, and the first class is their argmax.
    Probe equal_logits on Forward if |case, _| case.is_given() || problem_is(case, |p| p.outputs.argmax);
    /// A single class has a loss of 0, and no gradients.
    Probe one_class;
    /// Shards of the classes that begin and end between tiles give the bits of the whole; dh, where a tier does
    /// not sum along all of the tree, results within the bound, unless nodes are quarters.
    Contract shards_of_nodes asks Shards, favour several_tiles;
    /// The same where all logits of some shards are −∞.
    Contract impossible_shards asks Shards if |case, _| problem_is(case, |p| p.vocab > TILE);
    /// Shards of the classes, cut anywhere, give results within the bound.
    Gate shards asks Shards, favour several_tiles;
    /// Any budget of memory gives results within the bound, and on a tier that promises it the same bits.
    Gate budgets on Any asks Budget, favour several_blocks;
    /// A filter leaves out what is small, says how much that is, and errs by no more.
    Gate filter on Backward asks Filter, favour several_tiles;
    /// A filter with a threshold of 0 gives the bits of the backward pass.
    Contract filter_of_nothing on Backward asks Filter, favour several_tiles;
}

/// The problem of a case of linear_cross_entropy.
fn problem(case: &Case) -> Result<&LinearCrossEntropy, Error> {
    (&case.problem).try_into()
}

fn problem_is(case: &Case, so: impl Fn(&LinearCrossEntropy) -> bool) -> bool {
    problem(case).is_ok_and(so)
}

/// More classes than a tile has.
fn several_tiles(case: &Case, _: Pass) -> bool {
    problem_is(case, |p| p.vocab > TILE)
}

/// The ignored tokens.
fn ignored(case: &Case) -> Vec<usize> {
    let index = problem(case).map_or(0, |problem| problem.ignore_index);
    let targets = case.inputs.get("targets").and_then(|x| x.numbers("targets").ok());
    let targets = targets.unwrap_or_default().into_iter().enumerate();
    targets.filter(|&(_, y)| y as i64 == index).map(|(i, _)| i).collect()
}

/// The first token that is not ignored.
fn first_counted(case: &Case) -> Option<usize> {
    let tokens = problem(case).map_or(0, |problem| problem.tokens);
    let ignored = ignored(case);
    (0..tokens).find(|i| !ignored.contains(i))
}

fn no_such_class(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let Some(token) = first_counted(case) else { return Ok(None) };
    let wrong = [problem.vocab as f64, -1.0, 2f64.powi(31), i64::MIN as f64];
    for target in wrong.into_iter().filter(|&x| x != problem.ignore_index as f64) {
        let inputs = change(&case.inputs, |name, at, x| match name {
            "targets" if at[0] == token => target,
            _ => x,
        })?;
        let outputs = match trial.ask_with(&inputs) {
            Err(Flaw::Fail(_)) => continue, // refused
            outputs => outputs?,
        };
        let mut shows = false;
        for (name, tensor) in &outputs {
            shows |= tensor.numbers(name)?.iter().any(|x| !x.is_finite());
        }
        if !shows {
            let text =
                format!("targets[{token}] = {target} of {} classes shows nowhere", problem.vocab);
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}

fn ignored_poison(trial: &Trial<'_>) -> Judgement {
    let (case, tokens) = (trial.case, ignored(trial.case));
    let mut of_tokens = case.problem.operands(trial.pass);
    of_tokens.retain(|operand| operand.has(Axis::Targets) && operand.name != "targets");
    let hit =
        |name: &str, at: &[usize]| find(&of_tokens, name).is_some() && tokens.contains(&at[0]);
    let outputs = trial.ask_with(&poison(trial.inputs(), hit)?)?;
    same(&outputs, trial.clean()?, Equality::Numbers, everywhere)
}

/// Σ_v dw_v = r Σ_i dlse_i h_i: probabilities add up to 1.
fn class_sums(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let classes = ndarray::Axis(0);
    let sums = result(trial.clean()?, "dw")?.sum_axis(classes);
    let (h, dlse) = (case.inputs["h"].to_f64("h")?, input(&case.inputs, "dlse")?);
    let slope = problem.logit_scale / problem.temperature;
    let ignored = ignored(case);
    let mut expected = ArrayD::zeros(sums.raw_dim());
    if let Some(dlse) = dlse {
        for i in (0..problem.tokens).filter(|i| !ignored.contains(i)) {
            expected = expected + h.index_axis(ndarray::Axis(0), i).mapv(|h| slope * dlse[[i]] * h);
        }
    }
    // Twice: f64 kernels round in the sum of the check, too.
    let limit = trial.bounds()?.outputs["dw"].bound.sum_axis(classes) * 2.0;
    close("Σ dw", &sums, &expected, &limit)
}

fn class_order(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let last = problem.vocab - 1;
    let turned = |y: f64| if y < 0.0 { y } else { last as f64 - y };
    let reversed = |tensors: &Tensors| {
        let tensors = Part::of(Axis::Classes, (0..=last).rev()).tensors(&case.problem, tensors);
        let is_class = |name: &str| matches!(name, "targets" | "argmax");
        change(&tensors, |name, _, x| if is_class(name) { turned(x) } else { x })
    };
    let mut other = problem.clone();
    other.ignore_index = turned(problem.ignore_index as f64) as i64;
    let outputs = reversed(&trial.ask(&other.into(), &reversed(trial.inputs())?)?)?;
    let tied = tied(trial, &outputs)?;
    let counts = |name: &str, at: &[usize]| name != "argmax" || !tied.contains(&at[0]);
    agree(&outputs, trial.clean()?, trial.bounds()?, TWICE, counts)
}

/// Tokens whose argmax is another one than before, with exactly the same logit: of equal logits the first class is the
/// argmax, and which is the first depends on the order.
fn tied(trial: &Trial<'_>, outputs: &Tensors) -> Result<Vec<usize>, Flaw> {
    let given = |name| input(trial.inputs(), name);
    let (Some(h), Some(w), true) = (given("h")?, given("w")?, outputs.contains_key("argmax"))
    else {
        return Ok(Vec::new());
    };
    let bias = given("bias")?;
    let logit = |token: usize, class: f64| {
        let row = |x: &ArrayD<f64>, i: usize| x.index_axis(ndarray::Axis(0), i).to_owned();
        let product = (row(&h, token) * row(&w, class as usize)).sum();
        product + bias.as_ref().map_or(0.0, |bias| bias[[class as usize]])
    };
    let is_class = |y: f64| (0.0..w.shape()[0] as f64).contains(&y);
    let argmax = |all: &Tensors| all["argmax"].numbers("argmax");
    let (before, now) = (argmax(trial.clean()?)?, argmax(outputs)?);
    let differs = |&(_, (a, b)): &(usize, (&f64, &f64))| a != b && is_class(*a) && is_class(*b);
    let pairs = before.iter().zip(&now).enumerate().filter(differs);
    let tied = pairs.filter(|&(token, (&a, &b))| logit(token, a) == logit(token, b));
    Ok(tied.map(|(token, _)| token).collect())
}

fn token_order(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let reversed = Part::of(Axis::Targets, (0..problem.tokens).rev());
    let mut outputs = trial.ask_with(&reversed.tensors(&case.problem, trial.inputs()))?;
    outputs.retain(|name, _| reversed.cuts_along(&case.problem, name, &[Axis::Targets]));
    let outputs = reversed.tensors(&case.problem, &outputs);
    same(&outputs, trial.clean()?, Equality::Bits, everywhere)
}

fn losses_add_up(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let (losses, bounds) = (result(trial.clean()?, "loss")?, trial.bounds()?);
    let slack = bounds.outputs["loss"].bound.sum();
    // A mean divides the z-loss by another number, unless there is none.
    let square = problem.lse_square_scale != 0.0;
    let mean = !square && ignored(case).len() < losses.len();
    let reductions = [Some(Reduction::Sum), mean.then_some(Reduction::Mean)];
    worst(reductions.into_iter().flatten().map(|reduction| {
        let other: Problem = problem.clone().reduction(reduction).into();
        let outputs = trial.ask(&other, &case.inputs)?;
        let bounds = trial.bounds_of(&other, &case.inputs)?.outputs;
        let (z, mean) = (result(&outputs, "normaliser")?, result(&outputs, "loss")?);
        let limit = &bounds["loss"].bound * &z.mapv(f64::abs)
            + &mean.mapv(f64::abs) * &bounds["normaliser"].bound;
        let sum = ArrayD::from_elem(mean.raw_dim(), losses.sum());
        close("Σ loss", &(mean * z), &sum, &(limit * 1.01 + slack))
    }))
}

fn h_and_w_exchange(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let factor = |name: &str| match name {
        "dh" => 0.5,
        "dw" => 2.0,
        _ => 1.0,
    };
    let inputs = [("h", 2.0), ("w", 0.5)];
    exchange(trial, strict, &trial.case.problem, &inputs, &factor, "2 h, w/2")
}

/// The last class against none, without a cap, which makes −∞ finite, and without smoothing, which
/// asks for every class.
fn impossible_class(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, problem(trial.case)?);
    let last = problem.vocab - 1;
    let wide = LinearCrossEntropy { bias: true, softcap: None, ..problem.clone() };
    let wide = wide.label_smoothing(0.0);
    let narrow = LinearCrossEntropy { vocab: last, ..wide.clone() };
    let (wide, narrow) = (Problem::from(wide), Problem::from(narrow));
    let mut inputs = case.inputs.clone();
    let zeros = || Tensor::round(&ArrayD::zeros(vec![problem.vocab]), case.dtype);
    inputs.entry("bias".to_string()).or_insert_with(zeros);
    let impossible = f64::NEG_INFINITY * problem.logit_scale.signum();
    let inputs = change(&inputs, |name, at, x| match name {
        // Impossible classes of the case stay impossible, also where its cap is taken off a negative scale.
        "bias" if at[0] == last || x == f64::NEG_INFINITY => impossible,
        "targets" if x == last as f64 => 0.0,
        _ => x,
    })?;
    let rest = Part::of(Axis::Classes, 0..last);
    let without = rest.tensors(&wide, &inputs);
    let (outputs, expected) = (trial.ask(&wide, &inputs)?, trial.ask(&narrow, &without)?);
    let (some, fewer) = (trial.bounds_of(&wide, &inputs)?, trial.bounds_of(&narrow, &without)?);
    let by_class = |name: &str| rest.cuts_along(&wide, name, &[Axis::Classes]);
    let own = Part::of(Axis::Classes, [last]).tensors(&wide, &outputs);
    are_zero(&own, by_class).map_err(|flaw| flaw.of("the class"))?;
    worst(rest.tensors(&wide, &outputs).iter().map(|(name, got)| {
        let limit = &fewer.outputs[name].bound;
        let limit = match by_class(name) {
            // The other classes' bounds are those of the wider problem, or next to them.
            true => limit * 2.1,
            false => limit + &some.outputs[name].bound,
        };
        close(name, &got.numbers(name)?, &expected[name].numbers(name)?, &limit)
    }))
}

/// Fails unless some tensors hold zeros alone.
fn are_zero(tensors: &Tensors, which: impl Fn(&str) -> bool) -> Judgement {
    for (name, tensor) in tensors.iter().filter(|(name, _)| which(name)) {
        if let Some(x) = tensor.numbers(name)?.iter().find(|x| **x != 0.0) {
            return Err(Flaw::Fail(format!("{name} holds {x:e}")));
        }
    }
    Ok(None)
}

/// Logits of exactly −8: a class too many, of logit 0, would outweigh them all. A problem that somebody brings keeps
/// its options, which bend all logits alike.
fn equal_logits(trial: &Trial<'_>) -> Judgement {
    let (case, ignored) = (trial.case, ignored(trial.case));
    let mut plain = problem(case)?.clone();
    if !case.is_given() {
        (plain.bias, plain.softcap) = (false, None);
        (plain.logit_scale, plain.temperature) = (1.0, 1.0);
    }
    let logit = -8.0 * plain.logit_scale;
    let logit = plain.softcap.map_or(logit, |cap| cap * (logit / cap).tanh()) / plain.temperature;
    let entropy = (plain.vocab as f64).ln();
    let inputs = change(&case.inputs, |name, at, x| match name {
        "h" if at[1] == 0 => 1.0,
        "w" if at[1] == 0 => -8.0,
        "h" | "w" | "bias" => 0.0,
        _ => x,
    })?;
    let outputs = trial.ask(&plain.clone().into(), &inputs)?;
    let roundoff = if case.dtype == Dtype::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let mut judged = 0;
    let of_tokens =
        [("argmax", 0.0), ("entropy", entropy), ("lse", entropy + logit), ("logprob", -entropy)];
    let tokens = plain.tokens as f64;
    let loss = loss_is_plain(case, &plain, &ignored).then_some(("loss", entropy));
    for (name, expected) in of_tokens.into_iter().chain(loss) {
        let Some(tensor) = outputs.get(name) else { continue };
        judged += 1;
        // The sum of ones is exact; the logarithm, and two additions of numbers below 16, are not. Nor is a logit
        // that options bend.
        let most = (logit.abs() / 8.0).max(1.0);
        let limit = match name {
            "argmax" => 0.0,
            // Of each token a rounding when they are added, and that of the type.
            "loss" => {
                let stored = tensor.dtype().map_or(0.0, Dtype::unit_roundoff);
                ((64.0 + tokens) * roundoff + stored) * entropy.max(1.0)
            }
            _ => 64.0 * roundoff * most,
        };
        each_element(name, &tensor.numbers(name)?, |at, got| {
            let left_out = at.first().is_some_and(|token| ignored.contains(token));
            let right = (got - expected).abs() <= limit || left_out;
            (!right).then(|| format!(", expected {expected:e}"))
        })?;
    }
    if judged == 0 {
        let text =
            "the problem returns neither lse, logprob, entropy nor argmax, nor a loss that is ln V";
        return Err(Flaw::NotAsked(text.to_string()));
    }
    Ok(None)
}

/// True if the loss of equal logits is ln V, that of a token or in the mean: of a problem that somebody brings, whose
/// kernel may return nothing else.
fn loss_is_plain(case: &Case, problem: &LinearCrossEntropy, ignored: &[usize]) -> bool {
    let weighted = problem.class_weights || problem.lse_square_scale != 0.0;
    let plain = match problem.reduction {
        Reduction::Mean => ignored.len() < problem.tokens,
        Reduction::None => !problem.token_weights,
        Reduction::Sum | Reduction::By { .. } => false,
    };
    case.is_given() && !weighted && plain
}

fn one_class(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let ignore_index = LinearCrossEntropy::IGNORE_INDEX;
    let single = LinearCrossEntropy { vocab: 1, ignore_index, ..problem(case)?.clone() };
    let single = single.label_smoothing(0.0).lse_square_scale(0.0).nothing_left(NothingLeft::Zero);
    let mut inputs = Part::of(Axis::Classes, [0]).tensors(&case.problem, &case.inputs);
    inputs.insert("targets".to_string(), map(&case.inputs["targets"], |_, _| 0.0)?);
    inputs.remove("dlse"); // lse is the logit
    let zero = ["loss", "logprob", "entropy", "argmax", "dh", "dw", "dbias"];
    let single = single.into();
    let (outputs, bounds) = (trial.ask(&single, &inputs)?, trial.bounds_of(&single, &inputs)?);
    worst(outputs.iter().filter(|(name, _)| zero.contains(&name.as_str())).map(|(name, got)| {
        let limit = &bounds.outputs[name].bound;
        close(name, &got.numbers(name)?, &ArrayD::zeros(limit.raw_dim()), limit)
    }))
}
