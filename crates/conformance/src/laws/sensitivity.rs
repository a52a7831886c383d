//! Where the exact result moves, the tier's must move.

use super::flaw::{Flaw, Judgement};
use super::forms::small;
use super::law::laws;
use super::tensors::map;
use super::trial::Trial;
use crate::generate::Stream;
use ndarray::Dimension;

laws! {
    EVERY;
    /// Every output changes with every input that it depends on.
    Meaning sensitivity on Any if |case, _| case.is_smooth() && small(case);
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
            for ((index, old), new) in old.indexed_iter().zip(&new) {
                let may_overflow =
                    [from, to].iter().any(|x| x.value[&index].abs() + x.bound[&index] > x.largest);
                let exact = to.value[&index] - from.value[&index];
                let slack = from.bound[&index] + to.bound[&index];
                let follows = (new - old) * exact.signum() > 0.0;
                if !may_overflow && exact.abs() > 4.0 * slack && !follows {
                    let (at, moves) = (index.slice(), new - old);
                    let moves = format!("{name}{at:?} moves by {moves:e}, not {exact:e}");
                    return Err(Flaw::Fail(format!("{moves}, with {input}")));
                }
            }
        }
    }
    Ok(None)
}
