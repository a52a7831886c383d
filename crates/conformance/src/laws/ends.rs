//! Results at the ends of their type: beyond the largest number of f16, and below the smallest that is normal.

use super::flaw::{Judgement, worst};
use super::gate::judged;
use super::law::laws;
use super::tensors::change;
use super::trial::Trial;
use crate::gates;
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Operand, Pass, Problem, Stored};

laws! {
    EVERY;
    /// Results beyond the largest number of f16 are infinite, and those below the smallest normal one subnormal.
    Gate ends_of_type if |case, pass| {
        case.dtype == Dtype::F16
            && !case.spec.is_large()
            && (pass == Pass::Backward || !linear_in(&case.problem, pass).is_empty())
    }, looks 8;
}

/// The operands that every result of a pass in f16 is proportional to, all together.
fn linear_in(problem: &Problem, pass: Pass) -> Vec<Operand> {
    let operands = problem.operands(pass).into_iter();
    let proportional = |x: &Operand| match pass {
        Pass::Forward => matches!(x.name, "v" | "initial_state"),
        _ => x.role.is_cotangent(),
    };
    operands.filter(proportional).collect()
}

/// Exponents of the largest result: two numbers beyond the largest of f16, 2¹⁶, and four below the smallest normal
/// one, 2⁻¹⁴, and eight above the smallest of all, 2⁻²⁴.
const ENDS: [i32; 2] = [18, -16];

fn ends_of_type(trial: &Trial<'_>) -> Judgement {
    let (problem, pass) = (&trial.case.problem, trial.pass);
    let stored = |name: &str| {
        let operand = problem.operand(name);
        operand.is_some_and(|x| Stored::of(x.precision, Dtype::F16) == Stored::Float(Dtype::F16))
    };
    let results = trial.bounds()?.outputs.iter().filter(|(name, _)| stored(name));
    let largest = results.flat_map(|(_, x)| &x.value).fold(0.0f64, |most, x| most.max(x.abs()));
    if largest == 0.0 || !largest.is_finite() {
        return Ok(None);
    }
    let linear = linear_in(problem, pass);
    let given = |name: &str| linear.iter().any(|x| x.name == name);
    worst(ENDS.map(|end| {
        let mut exponent = end - largest.log2().floor() as i32;
        for (name, tensor) in trial.inputs().iter().filter(|(name, _)| given(name) && stored(name))
        {
            // An operand of f16 must itself be finite.
            let most = tensor.to_f64(name)?.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            if most > 0.0 && most.is_finite() {
                exponent = exponent.min((Dtype::F16.max() / most).log2().floor() as i32);
            }
        }
        let factor = 2f64.powi(exponent);
        let inputs = change(trial.inputs(), |name, _, x| if given(name) { factor * x } else { x })?;
        within(trial, &inputs).map_err(|flaw| flaw.of(&format!("times 2^{exponent}")))
    }))
}

fn within(trial: &Trial<'_>, inputs: &Tensors) -> Judgement {
    let outputs = trial.ask_with(inputs)?;
    judged(gates::g1(&trial.bounds_for(trial.pass, inputs)?, &outputs))
}
