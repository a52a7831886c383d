//! Identities among results.

use super::linear;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::sums::{Known, Sum, input};
use crate::laws::trial::Trial;
use etalon_problem::Pass;
use ndarray::{ArrayD, Axis};

/// Σ ⟨result, input⟩ over pairs of names; what is absent counts as zero.
fn products(trial: &Trial<'_>, pairs: &[(&str, &str)]) -> Result<Sum, Flaw> {
    let mut sum = Sum::default();
    for (result, x) in pairs {
        let pair = Known::find(trial, result)?.zip(input(&trial.case.inputs, x)?);
        if let Some((result, x)) = pair {
            sum.add_product(result.views(), x.view(), 1.0);
        }
    }
    Ok(sum)
}

pub(super) fn euler_of_outputs(trial: &Trial<'_>) -> Judgement {
    let of_q = products(trial, &[("dq", "q")])?;
    let of_o = products(trial, &[("o", "dout")])?;
    let scale = ndarray::arr0(linear(trial.case)?.scale).into_dyn();
    let mut of_scale = Sum::default();
    of_scale.add_product(Known::of(trial, "dscale")?.views(), scale.view(), 1.0);
    worst([of_q.meets(of_o, "⟨dq, q⟩ and ⟨dout, o⟩"), of_scale.meets(of_o, "σ dσ and ⟨dout, o⟩")])
}

pub(super) fn euler_of_states(trial: &Trial<'_>) -> Judgement {
    let of_outputs = products(trial, &[("o", "dout"), ("final_state", "dfinal_state")])?;
    worst([("dk", "k"), ("dv", "v")].map(|(d, x)| {
        let of_inputs = products(trial, &[(d, x), ("dinitial_state", "initial_state")])?;
        of_inputs.meets(of_outputs, &format!("⟨{d}, {x}⟩ and ⟨dout, o⟩"))
    }))
}

/// Σ ⟨dd…, d…⟩ over some inputs, of the gradients of the tier's own backward pass; with what else is
/// added of its forward pass. Both get what the second order does: a cotangent may be absent.
fn firsts(trial: &Trial<'_>, inputs: &[&str], outputs: &[[&str; 2]]) -> Result<Sum, Flaw> {
    let gradients: Vec<[String; 2]> =
        inputs.iter().map(|x| [format!("d{x}"), format!("dd{x}")]).collect();
    let results: Vec<[String; 2]> = outputs.iter().map(|x| x.map(str::to_string)).collect();
    let mut sum = Sum::default();
    for (pass, pairs) in [(Pass::Backward, gradients), (Pass::Forward, results)] {
        if pairs.is_empty() {
            continue;
        }
        let tensors = trial.ask_pass(&trial.case.problem, pass, trial.inputs())?;
        let bounds = trial.bounds_for(pass, trial.inputs())?;
        for [result, with] in pairs {
            let with = input(trial.inputs(), &with)?;
            if let Some((tensor, with)) = tensors.get(&result).zip(with) {
                let known = Known::new(&result, tensor, &bounds)?;
                sum.add_product(known.views(), with.view(), 1.0);
            }
        }
    }
    Ok(sum)
}

/// Σ ⟨g…, …⟩ over pairs of a second gradient and what it is of; σ is a number of the problem.
fn seconds(trial: &Trial<'_>, pairs: &[[&str; 2]]) -> Result<Sum, Flaw> {
    let scale = ndarray::arr0(linear(trial.case)?.scale).into_dyn();
    let mut sum = Sum::default();
    for [result, of] in pairs {
        let of = if *of == "scale" { Some(scale.clone()) } else { input(trial.inputs(), of)? };
        if let Some((result, of)) = Known::find(trial, result)?.zip(of) {
            sum.add_product(result.views(), of.view(), 1.0);
        }
    }
    Ok(sum)
}

/// Every gradient is linear in dout and dH_n together; all but dq, and o, in q and dH_n; all but dσ, and
/// o, in σ and dH_n.
pub(super) fn second_of_outputs(trial: &Trial<'_>) -> Judgement {
    const LAST: [&str; 2] = ["gdfinal_state", "dfinal_state"];
    let rest = ["k", "v", "g", "g_gamma", "initial_state"];
    let with = |more: &[&'static str]| [&rest[..], more].concat();
    let o = ["o", "cot_o"];
    worst([
        seconds(trial, &[["gdout", "dout"], LAST])?
            .meets(firsts(trial, &with(&["q", "scale"]), &[])?, "⟨gdout, dout⟩ and ⟨d…, dd…⟩"),
        seconds(trial, &[["gq", "q"], LAST])?
            .meets(firsts(trial, &with(&["scale"]), &[o])?, "⟨gq, q⟩ and ⟨d…, dd…⟩"),
        seconds(trial, &[["gscale", "scale"], LAST])?
            .meets(firsts(trial, &with(&["q"]), &[o])?, "σ gσ and ⟨d…, dd…⟩"),
    ])
}

/// With H_0, o, H_n and all gradients but dk and dH_0 are linear in k, and all but dv and dH_0 in v.
pub(super) fn second_of_states(trial: &Trial<'_>) -> Judgement {
    let outputs = [["o", "cot_o"], ["final_state", "cot_final_state"]];
    worst([("k", "v"), ("v", "k")].map(|(own, other)| {
        let gradient = format!("g{own}");
        let left =
            seconds(trial, &[[gradient.as_str(), own], ["ginitial_state", "initial_state"]])?;
        let right = firsts(trial, &["q", other, "g", "g_gamma", "scale"], &outputs)?;
        left.meets(right, &format!("⟨g{own}, {own}⟩ and ⟨d…, dd…⟩"))
    }))
}

/// Adds the product of one row, or one state, of a result and of an input.
fn add_row(sum: &mut Sum, result: &Known, x: &ArrayD<f64>, place: &[usize], factor: f64) {
    let [value, bound, x] = [&result.value, &result.bound, x]
        .map(|x| place.iter().fold(x.view(), |x, &i| x.index_axis_move(Axis(0), i)));
    sum.add_product([value, bound], x, factor);
}

pub(super) fn gradient_of_gates(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (linear(trial.case)?, &trial.case.inputs);
    let (dq, q) = (Known::of(trial, "dq")?, inputs["q"].to_f64("q")?);
    let (dk, k) = (Known::of(trial, "dk")?, inputs["k"].to_f64("k")?);
    let dg = Known::of(trial, "dg")?;
    let last = Known::find(trial, "final_state")?.zip(input(inputs, "dfinal_state")?);
    let (heads, group) = (problem.extents.key_heads, problem.group());
    let states = problem.list_sequences().into_iter();
    worst(states.flat_map(|s| (0..heads).map(move |h| (s, h))).map(|(s, h)| {
        let mut sum = Sum::default();
        if let Some((last, dlast)) = &last {
            add_row(&mut sum, last, dlast, &[s.index, h], 1.0);
        }
        worst((s.start..s.start + s.tokens).rev().map(|t| {
            for head in h * group..(h + 1) * group {
                add_row(&mut sum, &dq, &q, &[s.batch, head, t], 1.0);
            }
            let place = [s.batch, h, t];
            add_row(&mut sum, &dk, &k, &place, -1.0);
            let own = Sum { value: dg.value[&place[..]], slack: dg.bound[&place[..]] };
            own.meets(sum, &format!("dg{place:?}"))
        }))
    }))
}
