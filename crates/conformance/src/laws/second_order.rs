//! Laws of the second derivative and of the tangents: directions along which they are known, and
//! products that they share with the gradients.

use super::compare::close;
use super::flaw::{Flaw, Judgement, worst};
use super::identities::has_v;
use super::law::laws;
use super::sums::{Known, Sum, input};
use super::tensors::map;
use super::trial::Trial;
use crate::bounds::Bounds;
use crate::cases::Case;
use crate::tensor::Tensors;
use etalon_problem::{LinearCrossEntropy, NothingLeft, Pass};
use ndarray::ArrayD;
use std::collections::BTreeMap;

laws! {
    SCORES;
    /// Along (q, −k) the scores are constant: gq = −dq, gk = dk, the rest is 0.
    Meaning along_q_and_k on DoubleBackward;
    /// Along v, without dlse: gq = dq, gk = dk, gv = 0, gdout = o.
    Meaning along_v on DoubleBackward if |case, _| has_v(case);
    /// Along (h, −w) the logits are constant: gh = −dh, gw = dw, the rest is 0.
    Meaning along_h_and_w of LINEAR_CROSS_ENTROPY on DoubleBackward if |case, _| passes_on(case);
    /// Gradients are linear in the cotangents: along these, gh = dh, gw = dw, gbias = dbias, the rest is 0.
    Meaning along_cotangents of LINEAR_CROSS_ENTROPY on DoubleBackward if |case, _| passes_on(case);
    /// ⟨dout, gdout⟩ + … equals the sum of ⟨ddq, dq⟩, ⟨ddk, dk⟩, …, over all inputs.
    Meaning contraction of SOFTMAX on DoubleBackward;
    /// ⟨dout, to⟩ + ⟨dlse, tlse⟩ equals the sum of ⟨dq, tq⟩, ⟨dk, tk⟩, …, over all inputs.
    Meaning adjoint on Jvp;
}

/// Compares the second gradients with multiples of exact results; what is not named must be 0.
fn second_is(
    trial: &Trial<'_>,
    inputs: &Tensors,
    expected: &[(&str, f64, &ArrayD<f64>)],
) -> Judgement {
    let (outputs, bounds) = (trial.ask_with(inputs)?, trial.bounds_for(trial.pass, inputs)?);
    worst(outputs.iter().map(|(name, tensor)| {
        let Known { bound, .. } = Known::exact(&bounds.outputs[name]);
        let named = expected.iter().find(|(other, ..)| other == name);
        let values = match named {
            Some((_, factor, values)) => *values * *factor,
            None => ArrayD::zeros(bound.raw_dim()),
        };
        let largest = bounds.outputs[name].largest;
        let limit = ndarray::Zip::from(&bound).and(&values).map_collect(|bound, x| {
            // The two exact values took different ways through f64: 2⁻⁴⁰ is far above that.
            let limit = bound + x.abs() * 0.5f64.powi(40);
            let overflows = x.is_finite() && x.abs() + limit > largest;
            if overflows { f64::INFINITY } else { limit }
        });
        close(name, &tensor.to_f64(name)?, &values, &limit)
    }))
}

fn along_q_and_k(trial: &Trial<'_>) -> Judgement {
    let mut inputs = trial.case.inputs.clone();
    inputs.insert("ddq".to_string(), inputs["q"].clone());
    inputs.insert("ddk".to_string(), map(&inputs["k"], |_, x| -x)?);
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let (dq, dk) = (&exact["dq"], &exact["dk"]);
    second_is(trial, &inputs, &[("gq", -1.0, &dq.value), ("gk", 1.0, &dk.value)])
}

fn along_v(trial: &Trial<'_>) -> Judgement {
    let mut inputs = trial.case.inputs.clone();
    inputs.insert("ddv".to_string(), inputs["v"].clone());
    inputs.remove("dlse");
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let forward = trial.bounds_for(Pass::Forward, &inputs)?.outputs;
    let (dq, dk, o) = (&exact["dq"], &exact["dk"], &forward["o"]);
    let mut expected =
        vec![("gq", 1.0, &dq.value), ("gk", 1.0, &dk.value), ("gdout", 1.0, &o.value)];
    // The gradients of sinks, bias and τ are linear in v, too.
    for (name, of) in [("gsinks", "dsinks"), ("gbias", "dbias"), ("gtau", "dtau")] {
        expected.extend(exact.get(of).map(|x| (name, 1.0, &x.value)));
    }
    second_is(trial, &inputs, &expected)
}

/// True if the loss does not become NaN, whatever the logits, which then do not stand still.
fn passes_on(case: &Case) -> bool {
    let nan = |x: &LinearCrossEntropy| x.nothing_left == NothingLeft::Nan;
    !(&case.problem).try_into().is_ok_and(nan)
}

fn along_h_and_w(trial: &Trial<'_>) -> Judgement {
    let mut inputs = trial.case.inputs.clone();
    inputs.insert("ddh".to_string(), inputs["h"].clone());
    inputs.insert("ddw".to_string(), map(&inputs["w"], |_, x| -x)?);
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let (dh, dw) = (&exact["dh"], &exact["dw"]);
    second_is(trial, &inputs, &[("gh", -1.0, &dh.value), ("gw", 1.0, &dw.value)])
}

fn along_cotangents(trial: &Trial<'_>) -> Judgement {
    let mut inputs = trial.case.inputs.clone();
    for [cotangent, second] in companions(trial, false, [0, 1]) {
        if let Some(x) = inputs.get(cotangent).cloned() {
            inputs.insert(second.to_string(), x);
        }
    }
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let pairs = companions(trial, true, [0, 2]);
    let expected = pairs.iter().filter_map(|[of, name]| Some((*name, 1.0, &exact.get(*of)?.value)));
    second_is(trial, &inputs, &expected.collect::<Vec<_>>())
}

/// Results with their bounds, by name.
type Results = BTreeMap<String, Known>;

fn results(outputs: &Tensors, bounds: &Bounds) -> Result<Results, Flaw> {
    let known = |(name, x): (&String, _)| Ok((name.clone(), Known::new(name, x, bounds)?));
    outputs.iter().map(known).collect()
}

fn exact(bounds: &Bounds) -> Results {
    bounds.outputs.iter().map(|(name, x)| (name.clone(), Known::exact(x))).collect()
}

/// Σ ⟨x, y⟩ over pairs of a result and an input, with the slack of the results.
fn product(results: &Results, inputs: &Tensors, pairs: &[[&str; 2]]) -> Result<Sum, Flaw> {
    let mut sum = Sum::default();
    for [result, name] in pairs {
        let Some((x, y)) = results.get(*result).zip(input(inputs, name)?) else { continue };
        for ((x, y), bound) in x.value.iter().zip(&y).zip(&x.bound) {
            // Rows that see nothing have an lse of −∞, and stand still.
            if *y != 0.0 && !x.is_infinite() {
                sum.add(*x, *y, *bound);
            }
        }
    }
    Ok(sum)
}

/// Two companions of each input, or of each output, that has derivatives.
fn companions(trial: &Trial<'_>, of_inputs: bool, parts: [usize; 2]) -> Vec<[&'static str; 2]> {
    let families = trial.case.problem.families().into_iter().filter(|x| x.input == of_inputs);
    families.filter_map(|x| x.companions.map(|names| parts.map(|part| names[part]))).collect()
}

fn contraction(trial: &Trial<'_>) -> Judgement {
    // Without cotangents of the outputs themselves, which go to the inputs alone.
    let own = companions(trial, false, [0, 1]);
    let mut inputs = trial.inputs().clone();
    inputs.retain(|name, _| !own.iter().any(|[_, cotangent]| name == cotangent));
    let bounds = trial.bounds_for(trial.pass, &inputs)?;
    let seconds = results(&trial.ask_with(&inputs)?, &bounds)?;
    let left = product(&seconds, &inputs, &companions(trial, false, [2, 0]))?;
    let firsts = exact(&trial.bounds_for(Pass::Backward, &inputs)?);
    let right = product(&firsts, &inputs, &companions(trial, true, [0, 1]))?;
    left.meets(right, "⟨dout, gdout⟩ + … and ⟨d…, dd…⟩")
}

fn adjoint(trial: &Trial<'_>) -> Judgement {
    let tangents = results(trial.clean()?, trial.bounds()?)?;
    let left = product(&tangents, &trial.case.inputs, &companions(trial, false, [3, 0]))?;
    // The tier's own gradients where it has them: the identity then ties the two passes together.
    let bounds = trial.bounds_in(Pass::Backward)?;
    let gradients = match trial.clean_in(Pass::Backward) {
        Err(Flaw::Unsupported(_)) => exact(bounds),
        outputs => results(outputs?, bounds)?,
    };
    let right = product(&gradients, trial.inputs(), &companions(trial, true, [0, 3]))?;
    left.meets(right, "⟨dout, to⟩ + ⟨dlse, tlse⟩ and ⟨d…, t…⟩")
}
