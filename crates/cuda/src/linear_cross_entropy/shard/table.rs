//! The tensors of the passes of a shard.

use super::super::shard_pass::Step;
use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, Shard};
use etalon_problem::{LinearCrossEntropy, Operand, Pass, Precision, Role, Table};

/// True if a step reads an input at all, if it is given.
fn is_read(step: Step, name: &str) -> bool {
    step != Step::Output || !["h", "w", "bias"].contains(&name)
}

/// The tensors of a step that it reads or writes.
pub(super) fn used(mut table: Table, step: Step) -> Table {
    table.operands.retain(|operand| is_read(step, operand.name));
    table
}

/// A tensor that only shards have.
fn tensor(name: &'static str, shape: Vec<usize>, role: Role, precision: Precision) -> Operand {
    let (axes, option, becomes) = (Vec::new(), None, None);
    Operand { name, primal: name, axes, shape, role, precision, option, becomes }
}

/// The tensors of a step of a shard.
pub(super) fn of_step(shard: &Shard<'_>, step: Step) -> Table {
    let (problem, nodes) = (shard.problem(), shard.nodes().count());
    let mut table = shard.table(step.pass());
    let words = Partial::WORDS;
    let totals = tensor("totals", vec![problem.tokens, words], Role::Input, Precision::Wide);
    match step {
        Step::Forward => {
            table.operands.retain(|operand| operand.role == Role::Input);
            let shape = vec![nodes, problem.tokens, words];
            table.operands.push(tensor("partials", shape, Role::Output, Precision::Wide));
        }
        Step::Output => {
            let unread = |x: &&mut Operand| !is_read(step, x.name);
            let unread = table.operands.iter_mut().filter(unread);
            unread.for_each(|operand| operand.role = Role::OptionalSaved);
            table.operands.push(totals);
        }
        Step::Backward { summed } => {
            table.operands.push(totals);
            let dh = if summed { Dh::Sum } else { Dh::Nodes };
            let shape = vec![dh.matrices(shard), problem.tokens, problem.dim];
            table.operands.retain(|operand| operand.name != "dh");
            table.operands.push(tensor("dh", shape, Role::Output, Precision::Wide));
        }
    }
    table
}

/// The tensors of [`combine`](super::combine), of so many nodes.
pub(super) fn of_combine(problem: &LinearCrossEntropy, nodes: usize) -> Table {
    let (tokens, wide) = (problem.tokens, Precision::Wide);
    let mut table = problem.table(Pass::Forward);
    table.operands = vec![
        tensor("partials", vec![nodes, tokens, Partial::WORDS], Role::Input, wide),
        tensor("totals", vec![tokens, Partial::WORDS], Role::Output, wide),
    ];
    table
}

/// The tensors of [`combine_dh`](super::combine_dh), of so many parts and tokens.
pub(super) fn of_combine_dh(problem: &LinearCrossEntropy, [parts, tokens]: [usize; 2]) -> Table {
    let mut table = problem.table(Pass::Forward);
    table.operands = vec![
        tensor("parts", vec![parts, tokens, problem.dim], Role::Input, Precision::Wide),
        tensor("dh", vec![tokens, problem.dim], Role::Output, Precision::Storage),
    ];
    table
}
