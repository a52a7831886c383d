//! Laws of lazy_attention.

use super::flaw::{Flaw, Judgement, refute};
use super::forms::small;
use super::identities::{Arrays, Sum, equal, groups};
use super::law::{FIRST_ORDER, Kind, LAZY_ATTENTION, Law};
use super::select::with_scores;
use super::tensors::{Equality, difference, map, take, wide};
use super::trial::Trial;
use super::values::{close, larger};
use super::visible::Visible;
use crate::bounds;
use crate::cases::Case;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use crate::tiers::decisions;
use etalon_problem::{
    Attention, BiasExtents, DistanceBias, Dtype, Error, LazyAttention, Mask, NamedArray, Pass,
    Problem, Scores,
};
use ndarray::{Array4, ArrayD, IxDyn};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "softmax_at_zero",
        statement: "With τ = 0 every result equals softmax attention's.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| small(case),
        check: softmax_at_zero,
    },
    Law {
        name: "mean_above_zero",
        statement: "τ > 0 adds τ times the mean of the visible values to o.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: &[Pass::Forward],
        applies: |case: &Case, _: Pass| small(case),
        check: mean_above_zero,
    },
    Law {
        name: "left_of_weights",
        statement: "Σ_j e_ij is 1 + τ for τ ≥ 0, and between 0 and 1 below.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: &[Pass::Forward],
        applies: |case: &Case, _: Pass| small(case),
        check: left_of_weights,
    },
    Law {
        name: "sum_dv_left",
        statement: "Σ_j dv_j = Σ_i (Σ_j e_ij) dout_i.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: &[Pass::Backward],
        applies: |case: &Case, _: Pass| small(case),
        check: sum_dv_left,
    },
    Law {
        name: "sum_distances",
        statement: "If W covers every visible distance, Σ_d dbias_d = Σ_i dlse_i.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: &[Pass::Backward],
        applies: |case: &Case, _: Pass| lazy(case).is_ok_and(reaches_all),
        check: sum_distances,
    },
    Law {
        name: "dead_rows",
        statement: "If τ filters every pair, o, dv and dtau are 0, and v and dout are not read.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: dead_rows,
    },
    Law {
        name: "idle_values",
        statement: "NaN in a value that no row attends to changes nothing.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            small(case) && idle(case).is_ok_and(|idle| !idle.is_empty())
        },
        check: idle_values,
    },
    Law {
        name: "lse_without_tau",
        statement: "lse does not depend on τ or the values.",
        kind: Kind::Contract,
        of: LAZY_ATTENTION,
        passes: &[Pass::Forward],
        applies: |_, _| true,
        check: lse_without_tau,
    },
    Law {
        name: "scores_without_tau",
        statement: "Without dout no gradient depends on τ and v.",
        kind: Kind::Contract,
        of: LAZY_ATTENTION,
        passes: &[Pass::Backward],
        applies: |_, _| true,
        check: scores_without_tau,
    },
    Law {
        name: "shifted_bias",
        statement: "A constant added to a bias that covers every visible pair changes lse alone.",
        kind: Kind::Meaning,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| small(case) && lazy(case).is_ok_and(reaches_all),
        check: shifted_bias,
    },
    Law {
        name: "wider_bias",
        statement: "A bias that is 0 for three further distances gives the same numbers.",
        kind: Kind::Contract,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| lazy(case).is_ok_and(|problem| problem.bias.is_some()),
        check: wider_bias,
    },
    Law {
        name: "hidden_distance",
        statement: "A bias of −∞ hides the pairs at its distance: they count nowhere.",
        kind: Kind::Contract,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| lazy(case).is_ok_and(|problem| problem.bias.is_some()),
        check: hidden_distance,
    },
];

/// The problem of a case of lazy_attention.
fn lazy(case: &Case) -> Result<&LazyAttention, Error> {
    match &case.problem {
        Problem::LazyAttention(problem) => Ok(problem),
        other => Err(Error::value("algorithm", "lazy_attention", other.algorithm())),
    }
}

/// Whether there is a bias, for every pair that sequences and mask allow.
fn reaches_all(problem: &LazyAttention) -> bool {
    let Some(reach) = problem.bias else { return false };
    let scores = &problem.scores;
    scores.sequences().iter().all(|s| {
        (0..scores.extents.query_heads).all(|h| {
            (0..s.queries).all(|i| {
                let mut allowed = (0..s.keys).filter(|&j| scores.mask.allows(s, h, i, j));
                allowed.all(|j| reach.distance(s, i, j).is_some())
            })
        })
    })
}

/// The inputs with another τ for each head.
fn with_tau(inputs: &Tensors, tau: f64) -> Result<Tensors, Error> {
    changed(inputs, "tau", |_, _| tau)
}

/// The inputs with other elements of one operand.
fn changed(
    inputs: &Tensors,
    name: &str,
    element: impl FnMut(&[usize], f64) -> f64,
) -> Result<Tensors, Error> {
    let mut changed = inputs.clone();
    if let Some(tensor) = inputs.get(name) {
        changed.insert(name.to_string(), map(tensor, element)?);
    }
    Ok(changed)
}

fn ask(trial: &Trial<'_>, inputs: &Tensors) -> Result<Tensors, Flaw> {
    trial.ask(&trial.case.problem, inputs, Hints::default())
}

/// The bias of every pair `[B, Hq, N, M]`, 0 where it does not reach.
fn by_pair(problem: &LazyAttention, bias: &ArrayD<f64>) -> Array4<f64> {
    let e = problem.scores.extents;
    let mut pairs = Array4::zeros((e.batch, e.query_heads, e.queries, e.keys));
    for (place, d) in at_distances(problem) {
        pairs[place] = bias[[place[1], d]];
    }
    pairs
}

/// Every pair of a sequence within reach of the bias, by its places in the arrays.
fn at_distances(problem: &LazyAttention) -> Vec<([usize; 4], usize)> {
    let mut found = Vec::new();
    let Some(reach) = problem.bias else { return found };
    for s in problem.scores.sequences() {
        for (i, j) in (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j))) {
            if let Some(d) = reach.distance(&s, i, j) {
                let place = |h| [s.batch, h, s.query_start + i, s.key_start + j];
                found.extend((0..problem.scores.extents.query_heads).map(|h| (place(h), d)));
            }
        }
    }
    found
}

fn softmax_at_zero(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, lazy(trial.case)?);
    let inputs = with_tau(&case.inputs, 0.0)?;
    let outputs = ask(trial, &inputs)?;
    let own = trial.bounds_of(&case.problem, &inputs)?;

    let e = problem.scores.extents;
    let mut attention = Attention { scores: problem.scores.clone(), value_dim: problem.value_dim };
    let mut operands = inputs.clone();
    if let Some(bias) = inputs.get("bias") {
        // In f64: between these bounds only what the tier computes is rounded.
        attention.scores.bias = Some(BiasExtents { batch: e.batch, heads: e.query_heads });
        let pairs = by_pair(problem, &bias.to_f64("bias")?).into_dyn();
        operands.insert("bias".to_string(), Tensor::round(&pairs, Dtype::F64));
    }
    let profile = crate::profile::Profile::strict(case.dtype);
    let expected = bounds::bounds(&attention.into(), trial.pass, case.dtype, &profile, &operands)?;
    let mut margin = None;
    for name in ["o", "lse", "dq", "dk", "dv"].into_iter().filter(|x| outputs.contains_key(*x)) {
        let exact = Tensor::round(&expected.outputs[name].value, Dtype::F64);
        let found = close(name, &outputs[name], &exact, &own.outputs[name].bound)?;
        margin = larger(margin, found);
    }
    if let (Some(dbias), Some(pairs)) = (outputs.get("dbias"), expected.outputs.get("dbias")) {
        let mut sums = ArrayD::zeros(IxDyn(&dbias.shape));
        for (place, d) in at_distances(problem) {
            sums[[place[1], d]] += pairs.value[IxDyn(&place)];
        }
        let exact = Tensor::round(&sums, Dtype::F64);
        margin = larger(margin, close("dbias", dbias, &exact, &own.outputs["dbias"].bound)?);
    }
    Ok(margin)
}

fn mean_above_zero(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let tau = 0.5; // exact in every type
    let visible = Visible::new(case.scores()?, &case.inputs);
    let v = case.inputs["v"].to_f64("v")?;
    let mut expected = ArrayD::zeros(IxDyn(&trial.clean()?["o"].shape));
    let mut limit = ArrayD::zeros(expected.raw_dim());
    for tau in [0.0, tau] {
        let inputs = with_tau(&case.inputs, tau)?;
        limit += &trial.bounds_of(&case.problem, &inputs)?.outputs["o"].bound;
        let o = ask(trial, &inputs)?["o"].to_f64("o")?;
        expected = o - expected; // in the end o(τ) − o(0)
    }
    let counts = visible.counts();
    let means = ArrayD::from_shape_fn(expected.raw_dim(), |at| {
        let row = visible.pairs.slice(ndarray::s![at[0], at[1], at[2], ..]);
        let seen = row.iter().enumerate().filter(|(_, seen)| **seen);
        let sum: f64 = seen.map(|(j, _)| v[[at[0], at[1] / visible.group(), j, at[3]]]).sum();
        tau * sum / counts[[at[0], at[1], at[2]]].max(1) as f64
    });
    // The mean itself is rounded here in f64.
    let limit = limit + means.mapv(|x| x.abs() * 0.5f64.powi(40));
    let round = |x: &ArrayD<f64>| Tensor::round(x, Dtype::F64);
    close("o", &round(&expected), &round(&means), &limit)
}

/// Σ_j e_ij of every row, with its bound: what a value of 1 returns.
fn left(trial: &Trial<'_>) -> Result<(ArrayD<f64>, ArrayD<f64>), Flaw> {
    let case = trial.case;
    let ones = changed(&case.inputs, "v", |_, _| 1.0)?;
    let outputs = trial.ask_pass(&case.problem, Pass::Forward, &ones, Hints::default())?;
    let profile = crate::profile::Profile::strict(case.dtype);
    let mut bounds =
        bounds::bounds(&case.problem, Pass::Forward, case.dtype, &profile, &ones)?.outputs;
    let bound = bounds.remove("o").map(|bound| bound.bound).unwrap_or_default();
    Ok((outputs["o"].to_f64("o")?, bound))
}

fn left_of_weights(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (left, bound) = left(trial)?;
    let tau = case.inputs["tau"].to_f64("tau")?;
    let counts = Visible::new(case.scores()?, &case.inputs).counts();
    for ((at, &left), &bound) in left.indexed_iter().zip(&bound) {
        if counts[[at[0], at[1], at[2]]] == 0 {
            continue;
        }
        let tau = tau[[at[1]]];
        let (low, high) = if tau >= 0.0 { (1.0 + tau, 1.0 + tau) } else { (0.0, 1.0) };
        if !(low - bound <= left && left <= high + bound) {
            let at = ndarray::Dimension::slice(&at).to_vec();
            let text = format!("Σ e of {at:?} is {left:e}, expected {low} to {high} (τ = {tau})");
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}

fn sum_dv_left(trial: &Trial<'_>) -> Judgement {
    let arrays = Arrays::of(trial)?;
    let (left, left_bound) = left(trial)?;
    let dout = arrays.input("dout")?;
    let (dv, bound) = arrays.output("dv")?;
    let counts = Visible::new(trial.case.scores()?, &trial.case.inputs).counts();
    let mut margin = None;
    for (b, h, group) in groups(trial.case)? {
        for c in 0..dv.shape()[3] {
            let mut sums = [Sum::default(); 2];
            for j in 0..dv.shape()[2] {
                sums[0].add(dv[[b, h, j, c]], 1.0, bound[[b, h, j, c]]);
            }
            for head in group.clone() {
                for i in (0..dout.shape()[2]).filter(|&i| counts[[b, head, i]] > 0) {
                    let at = [b, head, i, c];
                    sums[1].add(left[at], dout[at], left_bound[at]);
                }
            }
            let what = format!("Σ dv of [{b}, {h}], column {c}");
            margin = larger(margin, equal(&what, sums[0], sums[1])?);
        }
    }
    Ok(margin)
}

fn sum_distances(trial: &Trial<'_>) -> Judgement {
    let arrays = Arrays::of(trial)?;
    let (dbias, bound) = arrays.output("dbias")?;
    let counts = Visible::new(trial.case.scores()?, &trial.case.inputs).counts();
    let dlse = match arrays.inputs.contains_key("dlse") {
        true => arrays.input("dlse")?,
        false => ArrayD::zeros(IxDyn(counts.shape())),
    };
    let mut margin = None;
    for h in 0..dbias.shape()[0] {
        let mut sums = [Sum::default(); 2];
        for d in 0..dbias.shape()[1] {
            sums[0].add(dbias[[h, d]], 1.0, bound[[h, d]]);
        }
        for ((b, _, i), count) in counts.indexed_iter().filter(|((_, head, _), _)| *head == h) {
            if *count > 0 {
                sums[1].add(dlse[[b, h, i]], 1.0, 0.0);
            }
        }
        margin = larger(margin, equal(&format!("Σ dbias of head {h}"), sums[0], sums[1])?);
    }
    Ok(margin)
}

fn dead_rows(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    // Below −n, whatever n is.
    let dead = with_tau(&case.inputs, -2.0 * case.scores()?.extents.keys as f64 - 2.0)?;
    let poisoned = changed(&changed(&dead, "v", |_, _| f64::NAN)?, "dout", |_, _| f64::NAN)?;
    let outputs = ask(trial, &poisoned)?;
    let still = ask(trial, &changed(&dead, "dout", |_, _| 0.0)?)?;
    for (name, tensor) in &outputs {
        let expected = match name.as_str() {
            "o" | "dv" | "dtau" => map(tensor, |_, _| 0.0)?,
            _ => still[name].clone(),
        };
        refute(difference(name, tensor, &expected, Equality::Numbers, |_| true))?;
    }
    Ok(None)
}

/// Keys (batch, key head, position) that some row sees and none attends to, nor comes near to.
fn idle(case: &Case) -> Result<Vec<[usize; 3]>, Error> {
    // Far more than any bound: 1 % of P + |τ/n|; families with larger errors have none to find.
    let attended = decisions(lazy(case)?, &case.inputs, 0.01)?;
    let visible = Visible::new(case.scores()?, &case.inputs);
    let (e, group) = (case.scores()?.extents, case.scores()?.group());
    let mut idle = Vec::new();
    for (b, h, j) in (0..e.batch)
        .flat_map(|b| (0..e.key_heads).flat_map(move |h| (0..e.keys).map(move |j| (b, h, j))))
    {
        let heads = h * group..(h + 1) * group;
        let column = attended.slice(ndarray::s![b, heads, .., j]);
        if visible.seen(b, h, j) && !column.iter().any(|attended| *attended) {
            idle.push([b, h, j]);
        }
    }
    Ok(idle)
}

fn idle_values(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let idle = idle(case)?;
    let poisoned = changed(&case.inputs, "v", |at, x| {
        if idle.contains(&[at[0], at[1], at[2]]) { f64::NAN } else { x }
    })?;
    let outputs = ask(trial, &poisoned)?;
    let mut margin = None;
    for (name, tensor) in clean {
        // Two results within a bound of the same number are within two of each other.
        let limit = &trial.bounds()?.outputs[name].bound * 2.0;
        if wide(&outputs[name])?.iter().any(|x| x.is_nan())
            && !wide(tensor)?.iter().any(|x| x.is_nan())
        {
            return Err(Flaw::Fail(format!("{name} holds NaN of a value that no row attends to")));
        }
        margin = larger(margin, close(name, &outputs[name], tensor, &limit)?);
    }
    Ok(margin)
}

fn lse_without_tau(trial: &Trial<'_>) -> Judgement {
    let inputs = changed(&with_tau(&trial.case.inputs, 0.25)?, "v", |_, x| -x)?;
    let outputs = ask(trial, &inputs)?;
    let lse = &trial.clean()?["lse"];
    refute(difference("lse", &outputs["lse"], lse, Equality::Numbers, |_| true))?;
    Ok(None)
}

fn scores_without_tau(trial: &Trial<'_>) -> Judgement {
    let still = changed(&trial.case.inputs, "dout", |_, _| 0.0)?;
    let other = changed(&with_tau(&still, 0.25)?, "v", |_, x| -x)?;
    let (clean, outputs) = (ask(trial, &still)?, ask(trial, &other)?);
    for (name, tensor) in &clean {
        refute(difference(name, &outputs[name], tensor, Equality::Numbers, |_| true))?;
    }
    Ok(None)
}

fn shifted_bias(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    // Shifting must not round: the bias is cut to multiples of 2⁻⁸ first.
    let cut = |x: f64| (x * 256.0).round() / 256.0;
    let before = changed(&case.inputs, "bias", |_, x| cut(x))?;
    let after = changed(&case.inputs, "bias", |_, x| cut(x) + 0.5)?;
    let (from, to) = (ask(trial, &before)?, ask(trial, &after)?);
    let limits =
        [trial.bounds_of(&case.problem, &before)?, trial.bounds_of(&case.problem, &after)?];
    let mut margin = None;
    for name in clean.keys() {
        let shift = if name == "lse" { 0.5 } else { 0.0 };
        let expected = Tensor::round(&(wide(&from[name])? + shift), Dtype::F64);
        let limit = &limits[0].outputs[name].bound + &limits[1].outputs[name].bound;
        margin = larger(margin, close(name, &to[name], &expected, &limit)?);
    }
    Ok(margin)
}

fn wider_bias(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let mut problem = lazy(case)?.clone();
    let Some(reach) = problem.bias else { return Ok(None) };
    problem.bias = Some(DistanceBias { width: reach.width + 3, ..reach });
    let bias = &case.inputs["bias"];
    // Three more columns, copies of the last, then made 0.
    let columns: Vec<usize> = (0..reach.width + 3).map(|d| d.min(reach.width - 1)).collect();
    let zero = |at: &[usize], x: f64| if at[1] < reach.width { x } else { 0.0 };
    let mut inputs = case.inputs.clone();
    inputs.insert("bias".to_string(), map(&take(bias, 1, &columns), zero)?);
    let outputs = trial.ask(&problem.into(), &inputs, Hints::default())?;
    for (name, tensor) in clean {
        let found = match name.as_str() {
            "dbias" => take(&outputs[name], 1, &columns[..reach.width]),
            _ => outputs[name].clone(),
        };
        refute(difference(name, &found, tensor, Equality::Numbers, |_| true))?;
    }
    Ok(None)
}

fn hidden_distance(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, lazy(trial.case)?);
    let width = problem.bias.map_or(0, |reach| reach.width);
    let hidden = 1.min(width.saturating_sub(1));
    let gone =
        changed(&case.inputs, "bias", |at, x| if at[1] == hidden { f64::NEG_INFINITY } else { x })?;
    let outputs = ask(trial, &gone)?;

    let mut allowed = Visible::new(&problem.scores, &Tensors::new()).pairs;
    for (place, _) in at_distances(problem).into_iter().filter(|(_, d)| *d == hidden) {
        allowed[place] = false;
    }
    let flags: Vec<bool> = allowed.iter().copied().collect();
    let mask = Mask::Array(NamedArray::new("visible", allowed.shape(), flags));
    let masked = with_scores(&case.problem, Scores { mask, ..problem.scores.clone() });
    let expected = trial.ask(&masked, &case.inputs, Hints::default())?;
    for (name, tensor) in &expected {
        refute(difference(name, &outputs[name], tensor, Equality::Numbers, |_| true))?;
    }
    Ok(None)
}
