//! Laws of lazy_attention.

use super::compare::{TWICE, agree, close};
use super::flaw::{Flaw, Judgement, worst};
use super::forms::{has_distance_bias, small};
use super::identities::{dlse_of_seeing_rows, sums_over_keys};
use super::law::laws;
use super::part::with_scores;
use super::sums::{Known, Sum};
use super::tensors::{Equality, change, everywhere, map, returned, same, take};
use super::trial::Trial;
use super::visible::{Visible, all_keys};
use crate::cases::Case;
use crate::tensor::{Tensor, Tensors};
use crate::tiers::decisions;
use etalon_problem::{
    Attention, BiasExtents, DistanceBias, Dtype, Error, LazyAttention, Pass, Scores,
};
use ndarray::{Array4, ArrayD, Dimension, IxDyn};

laws! {
    LAZY_ATTENTION;
    /// With τ = 0 every result equals softmax attention's.
    Meaning softmax_at_zero if |case, _| small(case);
    /// τ > 0 adds τ times the mean of the visible values to o.
    Meaning mean_above_zero on Forward if |case, _| small(case);
    /// Σ_j e_ij is 1 + τ for τ ≥ 0, and between 0 and 1 below.
    Meaning left_of_weights on Forward if |case, _| small(case);
    /// Σ_j dv_j = Σ_i (Σ_j e_ij) dout_i.
    Meaning sum_dv_left on Backward if |case, _| small(case);
    /// If W covers every visible distance, Σ_d dbias_d = Σ_i dlse_i.
    Meaning sum_distances on Backward if |case, _| lazy(case).is_ok_and(reaches_all);
    /// If τ filters every pair, o, dv and dtau are 0, and v and dout are not read. Where kernels compute groups again,
    /// results stay within both bounds.
    Meaning dead_rows;
    /// NaN in a value that no row attends to changes nothing.
    Meaning idle_values if |case, _| small(case) && idle(case).is_ok_and(|idle| !idle.is_empty());
    /// lse does not depend on τ or the values.
    Contract lse_without_tau on Forward;
    /// Without dout no gradient depends on τ and v.
    Contract scores_without_tau on Backward;
    /// A constant added to a bias that covers every visible pair changes lse alone.
    Meaning shifted_bias if |case, _| small(case) && lazy(case).is_ok_and(reaches_all);
    /// A bias that is 0 for three further distances gives the same numbers.
    Contract wider_bias if |case, _| has_distance_bias(case);
    /// A bias of −∞ hides the pairs at its distance: they count nowhere. Where kernels compute groups again, results
    /// stay within both bounds.
    Contract hidden_distance if |case, _| has_distance_bias(case);
}

/// The problem of a case of lazy_attention.
fn lazy(case: &Case) -> Result<&LazyAttention, Error> {
    (&case.problem).try_into()
}

/// True if there is a bias, for every pair that sequences and mask allow.
fn reaches_all(problem: &LazyAttention) -> bool {
    let mut allowed = Visible::new(&problem.scores, &Tensors::new()).pairs;
    at_distances(problem).into_iter().for_each(|(place, _)| allowed[place] = false);
    problem.bias.is_some() && !allowed.iter().any(|allowed| *allowed)
}

/// The inputs with other elements of one operand.
fn changed(
    inputs: &Tensors,
    name: &str,
    mut element: impl FnMut(&[usize], f64) -> f64,
) -> Result<Tensors, Error> {
    change(inputs, |other, at, x| if other == name { element(at, x) } else { x })
}

/// The inputs with one τ for every head.
fn with_tau(inputs: &Tensors, tau: f64) -> Result<Tensors, Error> {
    changed(inputs, "tau", |_, _| tau)
}

/// Every pair of a sequence within reach of the bias, by its places in the arrays.
pub(crate) fn at_distances(problem: &LazyAttention) -> Vec<([usize; 4], usize)> {
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
    let (outputs, own) = (trial.ask_with(&inputs)?, trial.bounds_of(&case.problem, &inputs)?);
    let e = problem.scores.extents;
    let mut attention = Attention { scores: problem.scores.clone(), value_dim: problem.value_dim };
    let mut operands = inputs.clone();
    if let Some(bias) = inputs.get("bias") {
        attention.scores.bias = Some(BiasExtents { batch: e.batch, heads: e.query_heads });
        let (bias, mut pairs) =
            (bias.to_f64("bias")?, Array4::zeros((e.batch, e.query_heads, e.queries, e.keys)));
        at_distances(problem).into_iter().for_each(|(at, d)| pairs[at] = bias[[at[1], d]]);
        // In f64: between these bounds only what the tier computes is rounded.
        operands.insert("bias".to_string(), Tensor::round(&pairs.into_dyn(), Dtype::F64));
    }
    let expected = trial.bounds_of(&attention.into(), &operands)?.outputs;
    worst(expected.iter().map(|(name, expected)| {
        let (got, bound) = (outputs[name].to_f64(name)?, &own.outputs[name].bound);
        if name != "dbias" {
            return close(name, &got, &expected.value, bound);
        }
        let mut sums = ArrayD::zeros(got.raw_dim());
        for (at, d) in at_distances(problem) {
            sums[[at[1], d]] += expected.value[IxDyn(&at)];
        }
        close(name, &got, &sums, bound)
    }))
}

fn mean_above_zero(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let tau = 0.5; // exact in every type
    let visible = Visible::new(case.scores()?, &case.inputs);
    let v = case.inputs["v"].to_f64("v")?;
    let [base, above] = [0.0, tau].map(|tau| -> Result<_, Flaw> {
        let inputs = with_tau(&case.inputs, tau)?;
        let bounds = trial.bounds_of(&case.problem, &inputs)?;
        Known::new("o", returned(&trial.ask_with(&inputs)?, "o")?, &bounds)
    });
    let (base, above) = (base?, above?);
    let means = ArrayD::from_shape_fn(above.value.raw_dim(), |at| {
        let [b, h, i, c] = [at[0], at[1], at[2], at[3]];
        let seen = visible.keys([b, h, i]);
        let sum: f64 = seen.map(|j| v[[b, h / visible.group(), j, c]]).sum();
        tau * sum / visible.keys([b, h, i]).count().max(1) as f64
    });
    // The mean itself is rounded here in f64.
    let limit = base.bound + above.bound + means.mapv(|x| x.abs() * 0.5f64.powi(40));
    close("o", &(above.value - base.value), &means, &limit)
}

/// Σ_j e_ij of every row, with its bound: what a value of 1 returns.
fn left(trial: &Trial<'_>) -> Result<Known, Flaw> {
    let problem = &trial.case.problem;
    let ones = changed(&trial.case.inputs, "v", |_, _| 1.0)?;
    let outputs = trial.ask_pass(problem, Pass::Forward, &ones)?;
    Known::new("o", returned(&outputs, "o")?, &trial.bounds_for(Pass::Forward, &ones)?)
}

fn left_of_weights(trial: &Trial<'_>) -> Judgement {
    let (case, left) = (trial.case, left(trial)?);
    let tau = case.inputs["tau"].to_f64("tau")?;
    let counts = Visible::new(case.scores()?, &case.inputs).counts();
    for ((at, &left), &bound) in left.value.indexed_iter().zip(&left.bound) {
        if counts[[at[0], at[1], at[2]]] == 0 {
            continue;
        }
        let tau = tau[[at[1]]];
        let (low, high) = if tau >= 0.0 { (1.0 + tau, 1.0 + tau) } else { (0.0, 1.0) };
        if !(low - bound <= left && left <= high + bound) {
            let at = at.slice();
            let text = format!("Σ e of {at:?} is {left:e}, expected {low} to {high} (τ = {tau})");
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}

fn sum_dv_left(trial: &Trial<'_>) -> Judgement {
    let left = left(trial)?;
    sums_over_keys(trial, ["dv", "dout"], |at| (left.value[at], left.bound[at]))
}

fn sum_distances(trial: &Trial<'_>) -> Judgement {
    let (dbias, dlse) = (Known::of(trial, "dbias")?, dlse_of_seeing_rows(trial)?);
    worst((0..dbias.value.shape()[0]).map(|h| {
        let mut sums = [Sum::default(); 2];
        for d in 0..dbias.value.shape()[1] {
            sums[0].add(dbias.value[[h, d]], 1.0, dbias.bound[[h, d]]);
        }
        for dlse in dlse.index_axis(ndarray::Axis(1), h) {
            sums[1].add(*dlse, 1.0, 0.0);
        }
        sums[0].meets(sums[1], &format!("Σ dbias of head {h}"))
    }))
}

fn dead_rows(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    // Below −n, whatever n is.
    let dead = with_tau(&case.inputs, -2.0 * case.scores()?.extents.keys as f64 - 2.0)?;
    let poisoned =
        change(&dead, |name, _, x| if matches!(name, "v" | "dout") { f64::NAN } else { x })?;
    let still_inputs = changed(&dead, "dout", |_, _| 0.0)?;
    let still = trial.ask_with(&still_inputs)?;
    let nothing = |name: &str| matches!(name, "o" | "dv" | "dtau");
    let expected = change(&still, |name, _, x| if nothing(name) { 0.0 } else { x })?;
    same_numbers(trial, &poisoned, &expected, &still_inputs)
}

/// Fails unless results of some inputs are those numbers; of a tier that computes groups again, unless they lie within
/// both bounds, of inputs for which these are right.
fn same_numbers(
    trial: &Trial<'_>,
    inputs: &Tensors,
    expected: &Tensors,
    bounded: &Tensors,
) -> Judgement {
    let outputs = trial.ask_with(inputs)?;
    if trial.tier.gives_the_bits_beside_nan() {
        return same(&outputs, expected, Equality::Numbers, everywhere);
    }
    let bounds = trial.bounds_of(&trial.case.problem, bounded)?;
    agree(&outputs, expected, &bounds, TWICE, everywhere)
}

/// Keys (batch, key head, position) that some row sees and none attends to, nor comes near to.
fn idle(case: &Case) -> Result<Vec<[usize; 3]>, Error> {
    // Far more than any bound: 1 % of P + |τ/n|; families with larger errors have none to find.
    let attended = decisions(lazy(case)?, &case.inputs, 0.01)?;
    let scores = case.scores()?;
    let visible = Visible::new(scores, &case.inputs);
    let seen = visible.seen_keys();
    let idle = |&[b, h, j]: &[usize; 3]| {
        let column = attended.slice(ndarray::s![b, visible.heads(h), .., j]);
        seen[[b, h, j]] && !column.iter().any(|attended| *attended)
    };
    Ok(all_keys(scores).filter(idle).collect())
}

fn idle_values(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let idle = idle(case)?;
    let poisoned = changed(&case.inputs, "v", |at, x| {
        if idle.contains(&[at[0], at[1], at[2]]) { f64::NAN } else { x }
    })?;
    let outputs = trial.ask_with(&poisoned)?;
    for (name, tensor) in clean {
        let holds_nan = |x: &Tensor| x.numbers("a result").map(|x| x.iter().any(|x| x.is_nan()));
        if holds_nan(&outputs[name])? && !holds_nan(tensor)? {
            return Err(Flaw::Fail(format!("{name} holds NaN of a value that no row attends to")));
        }
    }
    agree(&outputs, clean, trial.bounds()?, TWICE, everywhere)
}

/// Inputs with another τ, and negated values.
fn other_values(inputs: &Tensors) -> Result<Tensors, Error> {
    changed(&with_tau(inputs, 0.25)?, "v", |_, x| -x)
}

fn lse_without_tau(trial: &Trial<'_>) -> Judgement {
    let outputs = trial.ask_with(&other_values(&trial.case.inputs)?)?;
    same(&outputs, trial.clean()?, Equality::Numbers, |name, _| name == "lse")
}

fn scores_without_tau(trial: &Trial<'_>) -> Judgement {
    let still = changed(&trial.case.inputs, "dout", |_, _| 0.0)?;
    let (clean, outputs) = (trial.ask_with(&still)?, trial.ask_with(&other_values(&still)?)?);
    same(&outputs, &clean, Equality::Numbers, everywhere)
}

fn shifted_bias(trial: &Trial<'_>) -> Judgement {
    // Shifting must not round: the bias is cut to multiples of 2⁻⁸ first.
    let [before, after] = [0.0, 0.5].map(|shift| -> Result<_, Flaw> {
        let cut = |x: f64| (x * 256.0).round() / 256.0;
        let inputs = changed(&trial.case.inputs, "bias", |_, x| cut(x) + shift)?;
        Ok((trial.ask_with(&inputs)?, trial.bounds_of(&trial.case.problem, &inputs)?.outputs))
    });
    let ((before, limits), (after, others)) = (before?, after?);
    worst(before.iter().map(|(name, from)| {
        let shift = if name == "lse" { 0.5 } else { 0.0 };
        let limit = &limits[name].bound + &others[name].bound;
        close(name, &after[name].to_f64(name)?, &(from.to_f64(name)? + shift), &limit)
    }))
}

fn wider_bias(trial: &Trial<'_>) -> Judgement {
    let mut problem = lazy(trial.case)?.clone();
    let Some(reach) = problem.bias else { return Ok(None) };
    problem.bias = Some(DistanceBias { width: reach.width + 3, ..reach });
    // Three more columns, copies of the last, then made 0.
    let columns: Vec<usize> = (0..reach.width + 3).map(|d| d.min(reach.width - 1)).collect();
    let zero = |at: &[usize], x: f64| if at[1] < reach.width { x } else { 0.0 };
    let mut inputs = trial.case.inputs.clone();
    inputs.insert("bias".to_string(), map(&take(&inputs["bias"], 1, &columns), zero)?);
    let mut outputs = trial.ask(&problem.into(), &inputs)?;
    if let Some(dbias) = outputs.get_mut("dbias") {
        *dbias = take(dbias, 1, &columns[..reach.width]);
    }
    same(&outputs, trial.clean()?, Equality::Numbers, everywhere)
}

fn hidden_distance(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, lazy(trial.case)?);
    let hidden = problem.bias.map_or(0, |reach| 1.min(reach.width - 1));
    let gone =
        changed(&case.inputs, "bias", |at, x| if at[1] == hidden { f64::NEG_INFINITY } else { x })?;
    let mut allowed = Visible::new(&problem.scores, &Tensors::new());
    for (place, _) in at_distances(problem).into_iter().filter(|(_, d)| *d == hidden) {
        allowed.pairs[place] = false;
    }
    let scores = Scores { mask: allowed.mask(), ..problem.scores.clone() };
    let expected = trial.ask(&with_scores(&case.problem, scores), &case.inputs)?;
    same_numbers(trial, &gone, &expected, &gone)
}
