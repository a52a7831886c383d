//! Results of the tier move where the exact result moves.

use super::flaw::{Flaw, Judgement};
use super::forms::small;
use super::law::{DEAREST, laws};
use super::tensors::{index, map};
use super::trial::Trial;
use crate::bounds::Bound;
use crate::generate::Stream;

laws! {
    EVERY;
    /// Every output changes with every input that it depends on.
    Meaning sensitivity on Any if |case, _| case.is_smooth() && small(case), core DEAREST;
}

/// Moves every element of one input by an eighth at random, and asks the reference which elements
/// of the outputs that moves by more than four bounds. Those the tier must move too, in the same
/// direction. An element that may overflow its type cannot be asked to.
fn sensitivity(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (clean, before) = (trial.clean()?, trial.bounds()?);
    let operands = case.problem.operands(trial.pass);
    let wanted = |name: &str| operands.iter().any(|operand| operand.name == name);
    for (input, tensor) in trial.inputs().iter().filter(|(name, _)| wanted(name)) {
        let Some(dtype) = tensor.dtype() else { continue }; // whole numbers do not move a little
        let stream = Stream::new(case.spec.seed, input);
        let mut at = 0;
        let moved = map(tensor, |_, x| {
            at += 1;
            let eighth = 0.125 * if x == 0.0 { 1.0 } else { x.abs() };
            if stream.uniform(at) < 0.5 { dtype.round(x + eighth) } else { x }
        })?;
        let mut inputs = trial.inputs().clone();
        inputs.insert(input.clone(), moved);
        let outputs = trial.ask_with(&inputs)?;
        let after = trial.bounds_of(&case.problem, &inputs)?;
        for (name, tensor) in clean {
            let (old, new) = (tensor.numbers(name)?, outputs[name].numbers(name)?);
            let (from, to) = (&before.outputs[name], &after.outputs[name]);
            let results = old.iter().zip(&new).zip(exacts(from).zip(exacts(to)));
            for (number, ((old, new), ((before, slack), (after, other)))) in results.enumerate() {
                let may_overflow = [(before, slack, from), (after, other, to)]
                    .iter()
                    .any(|(x, bound, of)| x.abs() + bound > of.largest);
                let exact = after - before;
                let follows = (new - old) * exact.signum() > 0.0;
                if !may_overflow && exact.abs() > 4.0 * (slack + other) && !follows {
                    let (at, moves) = (index(&tensor.shape, number), new - old);
                    let moves = format!("{name}{at:?} moves by {moves:e}, not {exact:e}");
                    return Err(Flaw::Fail(format!("{moves}, with {input}")));
                }
            }
        }
    }
    Ok(None)
}

/// The exact elements of an output with their bounds.
fn exacts(of: &Bound) -> impl Iterator<Item = (f64, f64)> + '_ {
    of.value.iter().copied().zip(of.bound.iter().copied())
}
