//! Budgets of memory: in how many chunks of tokens and spans of classes logits are computed decides nothing.

use super::{problem, problem_is};
use crate::cases::Case;
use crate::laws::flaw::{Judgement, worst};
use crate::laws::gate::within;
use crate::laws::tensors::{Equality, everywhere, same};
use crate::laws::trial::Trial;
use crate::tensor::Tensors;
use crate::tier::{Choice, Hints};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{LinearCrossEntropy, Pass};
use etalon_reference::linear_cross_entropy::shard::TILE;

/// Tokens that no kernel cuts.
const BLOCK: usize = 96;

/// Several blocks of tokens, or several tiles of classes.
pub(super) fn several_blocks(case: &Case, _: Pass) -> bool {
    problem_is(case, |p| p.tokens > BLOCK || p.vocab > TILE)
}

/// No memory at all, so that a kernel takes the least that it can, and parts of what all logits take: a tenth, a third
/// (37 % for `sweeps`), and so on. A kernel holds other things beside them, or less of each: so chunks
/// and spans are of many sizes, and their numbers no powers of two.
fn parts(problem: &LinearCrossEntropy) -> Vec<usize> {
    let classes = problem.vocab.next_multiple_of(TILE);
    let logits = problem.tokens.next_multiple_of(BLOCK) * classes * size_of::<f32>();
    let shares = [10, 33, 37, 67, 133].map(|percent| logits / 100 * percent);
    let mut budgets = [&[0], &shares[..]].concat();
    // A part that is less than what threads need beside it is the least once more.
    budgets.retain(|&bytes| bytes == 0 || bytes > LEAST);
    budgets
}

/// Bytes that one thread needs.
const LEAST: usize = 1 << 19;

/// Results with all budgets; of the backward pass also those with a filter that leaves nothing out.
pub(super) fn budgets(trial: &Trial<'_>) -> Judgement {
    let the_bits = trial.tier.any_budget_gives_the_bits();
    let judge = |outputs: &Tensors| match the_bits {
        true => same(outputs, trial.clean()?, Equality::Bits, everywhere),
        false => within(trial, outputs),
    };
    worst(parts(problem(trial.case)?).into_iter().map(|bytes| {
        let hints = Hints { memory_budget: Some(bytes), ..Hints::default() };
        let of = |what: &str| format!("{bytes} bytes{what}");
        let judged = judge(&trial.ask_hinted(hints)?).map_err(|flaw| flaw.of(&of("")))?;
        if trial.pass == Pass::Backward && trial.tier.has(Choice::Filter) {
            let found = trial.ask_filtered(Filter::Below { eps: 0.0 }, hints)?;
            judge(&found.outputs).map_err(|flaw| flaw.of(&of(", with a filter")))?;
        }
        Ok(judged)
    }))
}
