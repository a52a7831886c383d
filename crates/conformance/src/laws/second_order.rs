//! Laws of the second derivative and of the tangents: directions along which they are known, and
//! products that they share with the gradients.

use super::flaw::{Flaw, Judgement};
use super::identities::{Sum, equal};
use super::law::{ATTENTION, Kind, Law, SOFTMAX};
use super::tensors::map;
use super::trial::Trial;
use super::values::{close, larger};
use crate::bounds::Bounds;
use crate::cases::Case;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Dtype, Error, Pass, Problem};
use ndarray::ArrayD;

const DOUBLE_BACKWARD: &[Pass] = &[Pass::DoubleBackward];
const JVP: &[Pass] = &[Pass::Jvp];

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "along_q_and_k",
        statement: "Along (q, −k) the scores are constant: gq = −dq, gk = dk, the rest is 0.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: DOUBLE_BACKWARD,
        applies: |_, _| true,
        check: along_q_and_k,
    },
    Law {
        name: "along_v",
        statement: "Along v, without dlse: gq = dq, gk = dk, gv = 0, gdout = o.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: DOUBLE_BACKWARD,
        applies: |case, _| case.inputs.contains_key("v"),
        check: along_v,
    },
    Law {
        name: "contraction",
        statement: "⟨dout, gdout⟩ + … equals the sum of ⟨ddq, dq⟩, ⟨ddk, dk⟩, …, over all inputs.",
        kind: Kind::Meaning,
        of: SOFTMAX,
        passes: DOUBLE_BACKWARD,
        applies: |case, _| !has_impossible_classes(case),
        check: contraction,
    },
    Law {
        name: "adjoint",
        statement: "⟨dout, to⟩ + ⟨dlse, tlse⟩ equals the sum of ⟨dq, tq⟩, ⟨dk, tk⟩, …, over all inputs.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: JVP,
        applies: |_, _| true,
        check: adjoint,
    },
];

/// A class of logit −∞ may be a target: the logit stands still then, but its row of w has the
/// gradient of any other target.
fn has_impossible_classes(case: &Case) -> bool {
    let bias = case.inputs.get("bias").and_then(|bias| bias.to_f64("bias").ok());
    matches!(case.problem, Problem::LinearCrossEntropy(_))
        && bias.is_some_and(|bias| bias.iter().any(|&x| x == f64::NEG_INFINITY))
}

/// The inputs and first cotangents of the case, with further ones in place of its own.
fn with(trial: &Trial<'_>, further: &[(&str, Tensor)], drop: &[&str]) -> Tensors {
    let operands = trial.case.problem.operands(Pass::Backward);
    let first = |name: &str| operands.iter().any(|operand| operand.name == name);
    let kept = trial.inputs().iter().filter(|(name, _)| first(name) && !drop.contains(&&***name));
    let mut inputs: Tensors = kept.map(|(name, x)| (name.clone(), x.clone())).collect();
    inputs.extend(further.iter().map(|(name, x)| (name.to_string(), x.clone())));
    inputs
}

/// What a pass gives beside its bounds, for inputs of the law's own.
fn first(trial: &Trial<'_>, pass: Pass, inputs: &Tensors) -> Result<(Tensors, Bounds), Flaw> {
    let outputs = trial.ask_pass(&trial.case.problem, pass, inputs, Hints::default())?;
    Ok((outputs, trial.bounds_for(pass, inputs)?))
}

/// Compares the second gradients with multiples of exact results; what is not named must be 0.
fn second_is(
    trial: &Trial<'_>,
    inputs: &Tensors,
    expected: &[(&str, f64, &ArrayD<f64>)],
) -> Judgement {
    let outputs = trial.ask(&trial.case.problem, inputs, Hints::default())?;
    let bounds = trial.bounds_for(trial.pass, inputs)?;
    let mut margin = None;
    for (name, tensor) in &outputs {
        let bound = &bounds.outputs[name].bound;
        let named = expected.iter().find(|(other, ..)| other == name);
        let values = match named {
            Some((_, factor, values)) => *values * *factor,
            None => ArrayD::zeros(bound.raw_dim()),
        };
        // The two exact values took different ways through f64: 2⁻⁴⁰ is far above that.
        let limit = bound + values.mapv(|x| x.abs() * 0.5f64.powi(40));
        let exact = Tensor::round(&values, Dtype::F64);
        margin = larger(margin, close(name, tensor, &exact, &limit)?);
    }
    Ok(margin)
}

fn along_q_and_k(trial: &Trial<'_>) -> Judgement {
    let inputs = trial.inputs();
    let minus_k = map(&inputs["k"], |_, x| -x)?;
    let inputs = with(trial, &[("ddq", inputs["q"].clone()), ("ddk", minus_k)], &[]);
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let (dq, dk) = (&exact["dq"], &exact["dk"]);
    let expected = [("gq", -1.0, &dq.value), ("gk", 1.0, &dk.value)];
    second_is(trial, &inputs, &expected)
}

fn along_v(trial: &Trial<'_>) -> Judgement {
    let inputs = with(trial, &[("ddv", trial.inputs()["v"].clone())], &["dlse"]);
    let exact = trial.bounds_for(Pass::Backward, &inputs)?.outputs;
    let forward = trial.bounds_for(Pass::Forward, &inputs)?.outputs;
    let (dq, dk, o) = (&exact["dq"], &exact["dk"], &forward["o"]);
    let mut expected =
        vec![("gq", 1.0, &dq.value), ("gk", 1.0, &dk.value), ("gdout", 1.0, &o.value)];
    // The gradients of sinks and bias are linear in v, too.
    for (name, of) in [("gsinks", "dsinks"), ("gbias", "dbias")] {
        expected.extend(exact.get(of).map(|x| (name, 1.0, &x.value)));
    }
    second_is(trial, &inputs, &expected)
}

/// Σ ⟨x, y⟩ over pairs of an output and an input, with the slack of the outputs.
fn product(
    outputs: &Tensors,
    bounds: &Bounds,
    inputs: &Tensors,
    pairs: &[(&str, &str)],
) -> Result<Sum, Error> {
    let mut sum = Sum::default();
    for (output, input) in pairs {
        let (Some(x), Some(y)) = (outputs.get(*output), inputs.get(*input)) else { continue };
        let (x, y) = (x.to_f64(output)?, y.to_f64(input)?);
        for ((x, y), bound) in x.iter().zip(&y).zip(&bounds.outputs[*output].bound) {
            // Rows that see nothing have an lse of −∞, and stand still.
            if *y != 0.0 && x.is_finite() {
                sum.add(*x, *y, *bound);
            }
        }
    }
    Ok(sum)
}

/// The names of a part of each input with derivatives, beside those of its gradients.
fn gradients_and(trial: &Trial<'_>, part: usize) -> Vec<(&'static str, &'static str)> {
    let inputs = trial.case.problem.families().into_iter().filter(|family| family.input);
    inputs.filter_map(|family| Some((family.companions?[0], family.companions?[part]))).collect()
}

/// The names of a part of each output with derivatives, beside those of their cotangents.
fn and_cotangents(trial: &Trial<'_>, part: usize) -> Vec<(&'static str, &'static str)> {
    let outputs = trial.case.problem.families().into_iter().filter(|family| !family.input);
    outputs.filter_map(|family| Some((family.companions?[part], family.companions?[0]))).collect()
}

fn contraction(trial: &Trial<'_>) -> Judgement {
    // Without cotangents of the outputs themselves, which go to the inputs alone.
    let seconds = gradients_and(trial, 1);
    let further: Vec<(&str, Tensor)> = seconds
        .iter()
        .filter_map(|(_, name)| Some((*name, trial.inputs().get(*name)?.clone())))
        .collect();
    let inputs = with(trial, &further, &[]);
    let outputs = trial.ask(&trial.case.problem, &inputs, Hints::default())?;
    let bounds = trial.bounds_for(trial.pass, &inputs)?;
    let left = product(&outputs, &bounds, &inputs, &and_cotangents(trial, 2))?;
    let exact = trial.bounds_for(Pass::Backward, &inputs)?;
    let gradients: Tensors = exact
        .outputs
        .iter()
        .map(|(name, x)| (name.clone(), Tensor::round(&x.value, Dtype::F64)))
        .collect();
    let right = product(&gradients, &exact, &inputs, &seconds)?;
    equal("⟨dout, gdout⟩ + … and ⟨d…, dd…⟩", left, right)
}

fn adjoint(trial: &Trial<'_>) -> Judgement {
    let (outputs, bounds) = (trial.clean()?, trial.bounds()?);
    let cotangents = &trial.case.inputs;
    let left = product(outputs, bounds, cotangents, &and_cotangents(trial, 3))?;
    // The tier's own gradients where it has them: the identity then ties the two passes together.
    let (gradients, bounds) = match first(trial, Pass::Backward, cotangents) {
        Err(Flaw::Unsupported(_)) => {
            let exact = trial.bounds_for(Pass::Backward, cotangents)?;
            let round = |x: &ArrayD<f64>| Tensor::round(x, Dtype::F64);
            let values = exact.outputs.iter().map(|(name, x)| (name.clone(), round(&x.value)));
            (values.collect(), exact)
        }
        other => other?,
    };
    let right = product(&gradients, &bounds, trial.inputs(), &gradients_and(trial, 3))?;
    equal("⟨dout, to⟩ + ⟨dlse, tlse⟩ and ⟨d…, t…⟩", left, right)
}
