//! The tensors of the passes of a shard.

use super::super::shard_pass::{Step, draft_shard};
use crate::call::PassCall;
use crate::pass::PassPlan;
use etalon_problem::linear_cross_entropy::shard::{Partial, Shard};
use etalon_problem::{LinearCrossEntropy, Operand, Pass, Precision, Result, Role, Table};

pub(super) fn draft_step(shard: &Shard<'_>, step: Step, call: &PassCall<'_, '_>) -> Result<PassPlan<'static>> {
    let mut used = call.table.clone();
    used.operands.retain(|operand| is_read(step, operand.name));
    let call = PassCall { pass: step.pass(), table: &used, ..*call };
    draft_shard((shard.problem(), shard.classes()), step, &call)
}

/// True if a step reads an input at all, if it is given.
fn is_read(step: Step, name: &str) -> bool {
    step != Step::Output || !["h", "w", "bias"].contains(&name)
}

/// A tensor that only shards have, of f32.
fn tensor(name: &'static str, shape: impl Into<Vec<usize>>, role: Role) -> Operand {
    let (axes, shape, option, becomes) = (Vec::new(), shape.into(), None, None);
    Operand { name, primal: name, axes, shape, role, precision: Precision::Wide, option, becomes }
}

pub(super) fn of_step(shard: &Shard<'_>, step: Step) -> Table {
    let (problem, words) = (shard.problem(), Partial::WORDS);
    let mut table = shard.table(step.pass());
    let totals = tensor("totals", [problem.tokens, words], Role::Input);
    match step {
        Step::Forward => {
            table.operands.retain(|operand| operand.role == Role::Input);
            let shape = [shard.nodes().count(), problem.tokens, words];
            table.operands.push(tensor("partials", shape, Role::Output));
        }
        Step::Output => {
            let unread = table.operands.iter_mut().filter(|x| !is_read(step, x.name));
            unread.for_each(|operand| operand.role = Role::OptionalSaved);
            table.operands.push(totals);
        }
        Step::Backward(dh) => {
            table.operands.push(totals);
            let shape = [dh.matrices(shard), problem.tokens, problem.dim];
            table.operands.retain(|operand| operand.name != "dh");
            table.operands.push(tensor("dh", shape, Role::Output));
        }
    }
    table
}

/// The tensors of [`combine`](super::combine).
pub(super) fn of_combine(problem: &LinearCrossEntropy, nodes: usize) -> Table {
    let partials = tensor("partials", [nodes, problem.tokens, Partial::WORDS], Role::Input);
    let totals = tensor("totals", [problem.tokens, Partial::WORDS], Role::Output);
    of_sums(problem, [partials, totals])
}

/// The tensors of [`combine_dh`](super::combine_dh).
pub(super) fn of_combine_dh(problem: &LinearCrossEntropy, [parts, tokens]: [usize; 2]) -> Table {
    let parts = tensor("parts", [parts, tokens, problem.dim], Role::Input);
    let dh = tensor("dh", [tokens, problem.dim], Role::Output);
    let dh = Operand { precision: Precision::Storage, ..dh };
    of_sums(problem, [parts, dh])
}

fn of_sums(problem: &LinearCrossEntropy, operands: [Operand; 2]) -> Table {
    let mut table = problem.table(Pass::Forward);
    table.operands = operands.into();
    table
}
