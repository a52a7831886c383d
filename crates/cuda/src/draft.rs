//! Drafts the steps of a pass of any algorithm.

use crate::linear_attention;
use crate::linear_cross_entropy;
use crate::options::Options;
use crate::parts::Holds;
use crate::pass::PassPlan;
use crate::softmax::{self, GivenArray};
use crate::target::Target;
use etalon_problem::{Dtype, Error, Pass, Problem, Table, Views};

/// The memory in which the operands of a pass lie.
#[derive(Clone, Copy)]
pub(crate) enum Operands<'a, 'v> {
    /// The host's, as these inputs do.
    Host(&'a Views<'v>),
    /// The device's, with these arrays of the problem.
    Device(&'a [GivenArray]),
}

/// Drafts a pass that has passed [`Table::check_call`], for a device like `target`.
pub(crate) fn draft<'a>(
    target: Target,
    problem: &'a Problem,
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    operands: Operands<'_, '_>,
    options: &Options,
) -> Result<PassPlan<'a>, Error> {
    options.blocking.map_or(Ok(()), |blocking| blocking.check())?;
    let (inputs, given) = match operands {
        Operands::Host(inputs) => (Some(inputs), &[][..]),
        Operands::Device(given) => (None, given),
    };
    match problem {
        Problem::LinearAttention(problem) => {
            linear_attention::draft(target, problem, call, table, holds, options)
        }
        Problem::LinearCrossEntropy(problem) => {
            linear_cross_entropy::draft(target, problem, call, table, holds, inputs, options)
        }
        Problem::LazyAttention(lazy) => {
            let problem = (problem, lazy.bias);
            softmax::draft_lazy(target, problem, call, table, (holds, given), options)
        }
        _ => softmax::draft(target, problem, call, table, (holds, given), options),
    }
}
