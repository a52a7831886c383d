//! Where the exact result moves, the tier's must move.

use super::flaw::{Flaw, Judgement};
use super::forms::small;
use super::law::{ANY_PASS, EVERY, Kind, Law};
use super::tensors::{map, nudged};
use super::trial::Trial;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tier::Hints;
use etalon_problem::Pass;

pub(super) const LAWS: &[Law] = &[Law {
    name: "sensitivity",
    statement: "Every output changes with every input that it depends on.",
    kind: Kind::Meaning,
    of: EVERY,
    passes: ANY_PASS,
    applies: |case: &Case, _: Pass| case.is_smooth() && small(case),
    check: sensitivity,
}];

/// Moves every element of one input by an eighth at random, and asks the reference which elements
/// of the outputs that moves by more than four bounds. Those the tier must move too, in the same
/// direction. An element that may overflow its type cannot be asked to.
fn sensitivity(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (clean, before) = (trial.clean()?, trial.bounds()?);
    let wanted: Vec<String> =
        case.problem.operands(trial.pass).iter().map(|x| x.name.to_string()).collect();
    for (input, tensor) in trial.inputs().iter().filter(|(name, _)| wanted.contains(name)) {
        let Some(dtype) = tensor.dtype() else { continue }; // whole numbers do not move a little
        let stream = Stream::new(case.spec.seed, input);
        let mut at = 0;
        let moved = map(tensor, |_, x| {
            at += 1;
            if stream.uniform(at) < 0.5 { nudged(x, dtype) } else { x }
        })?;
        let mut inputs = trial.inputs().clone();
        inputs.insert(input.clone(), moved);
        let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
        let after = trial.bounds_of(&case.problem, &inputs)?;
        for (name, tensor) in clean {
            let (old, new) = (tensor.numbers(name)?, outputs[name].numbers(name)?);
            let (from, to) = (&before.outputs[name], &after.outputs[name]);
            for ((index, old), new) in old.indexed_iter().zip(&new) {
                let may_overflow =
                    [from, to].iter().any(|x| x.value[&index].abs() + x.bound[&index] > x.largest);
                if may_overflow {
                    continue;
                }
                let exact = to.value[&index] - from.value[&index];
                let slack = from.bound[&index] + to.bound[&index];
                let follows = (new - old) * exact.signum() > 0.0;
                if exact.abs() > 4.0 * slack && !follows {
                    let at = ndarray::Dimension::slice(&index);
                    let text = format!(
                        "{name}{at:?} moves by {:e}, not {exact:e}, with {input}",
                        new - old
                    );
                    return Err(Flaw::Fail(text));
                }
            }
        }
    }
    Ok(None)
}
