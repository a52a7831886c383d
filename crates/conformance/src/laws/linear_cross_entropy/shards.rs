//! Shards of the classes, each computed by itself, put together.

use super::problem;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::gate::within;
use crate::laws::tensors::{Equality, same};
use crate::laws::trial::Trial;
use crate::tensor::{Tensor, Tensors};
use crate::tier::{Cuts, Hints};
use etalon_problem::{LinearCrossEntropy, Problem};
use ndarray::ArrayD;

pub(super) fn shards_of_nodes(trial: &Trial<'_>) -> Judgement {
    let along_the_tree = trial.tier.sums_dh_along_the_tree();
    for cuts in [Cuts::Quarters, Cuts::Nodes, Cuts::Several] {
        let outputs = trial.ask_hinted(in_shards(cuts))?;
        let dh_too = along_the_tree || cuts == Cuts::Quarters;
        let counts = |name: &str, _: &[usize]| dh_too || name != "dh";
        same(&outputs, trial.clean()?, Equality::Bits, counts)
            .map_err(|flaw| flaw.of(cuts.name()))?;
        if !dh_too {
            within(trial, &outputs).map_err(|flaw| flaw.of(cuts.name()))?;
        }
    }
    Ok(None)
}

pub(super) fn shards(trial: &Trial<'_>) -> Judgement {
    within(trial, &trial.ask_hinted(in_shards(Cuts::Anywhere))?)
}

fn in_shards(cuts: Cuts) -> Hints {
    Hints { shards: Some(cuts), ..Hints::default() }
}

/// A bias of −∞ for all classes of every other shard that has some: of the first, or of the others.
pub(super) fn impossible_shards(trial: &Trial<'_>) -> Judgement {
    let plain = problem(trial.case)?;
    let biased: Problem = LinearCrossEntropy { bias: true, ..plain.clone() }.into();
    let along_the_tree = trial.tier.sums_dh_along_the_tree();
    for odd in [0, 1] {
        let inputs = without_every_other(trial, plain, odd)?;
        let whole = trial.ask(&biased, &inputs)?;
        let outputs = trial.ask_hinted_of(&biased, &inputs, in_shards(Cuts::Several))?;
        let counts = |name: &str, _: &[usize]| along_the_tree || name != "dh";
        let which = if odd == 0 { "the first shard" } else { "the second shard" };
        same(&outputs, &whole, Equality::Bits, counts)
            .map_err(|flaw| flaw.of(&format!("{which} and every other are −∞")))?;
    }
    Ok(None)
}

/// The inputs of a case, with a bias of −∞ for the classes of every second of the shards that have some.
fn without_every_other(
    trial: &Trial<'_>,
    problem: &LinearCrossEntropy,
    odd: usize,
) -> Result<Tensors, Flaw> {
    let mut bias = match trial.inputs().get("bias") {
        Some(bias) => bias.to_f64("bias")?,
        None => ArrayD::zeros(vec![problem.vocab]),
    };
    let shards = Cuts::Several.ranges(problem.vocab).into_iter().filter(|x| !x.is_empty());
    for classes in shards.skip(odd).step_by(2) {
        classes.for_each(|v| bias[[v]] = f64::NEG_INFINITY);
    }
    let mut inputs = trial.inputs().clone();
    inputs.insert("bias".to_string(), Tensor::round(&bias, trial.case.dtype));
    Ok(inputs)
}
