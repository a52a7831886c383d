//! How the passes will work.

use super::operands::Operands;
use super::{backward, double_backward, forward};
use crate::element::Tensor;
use crate::named::Inputs;
use crate::plan::{Buffer, Plan};
use crate::run::table_bytes;
use crate::tiles::check_counts;
use crate::{Mode, Options};
use etalon_problem::{Error, Pass, Precision, Role, Scores, Table, Views};
use ndarray::{Ix0, arr0};

/// How a pass with the tensors of `table` will work in rayon's current pool, every
/// gradient being asked for and every cotangent given, with tensors of the type of `zero`.
pub fn plan(
    scores: &Scores,
    table: &Table,
    zero: &Tensor<'_, Ix0>,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    check_counts(scores.extents.batch, scores.extents.query_heads)?;
    let number = arr0(0.0f32);
    let number = Tensor::from(number.view());
    let mut views = Views::new();
    for operand in &table.operands {
        if !matches!(operand.role, Role::Output | Role::OptionalOutput) {
            let element = if operand.precision == Precision::Storage { zero } else { &number };
            views.push(operand.name, element.unwritten(&operand.shape, operand.name)?);
        }
    }
    let operands = Operands::of(scores, pass, Inputs(&views))?;
    // Under this mode the forward pass of attention_lse has all that dq needs.
    let gradient = operands.v.is_none() && options.mode == Mode::ForwardGradient;
    let mut plan = match pass {
        Pass::Forward => forward::plan(&operands, gradient, options)?,
        Pass::Backward => backward::plan(&operands, !gradient, options)?,
        _ => double_backward::plan(&operands, pass == Pass::Jvp, options)?,
    };
    if gradient && pass == Pass::Backward {
        plan.mode = Some(Mode::ForwardGradient);
    }
    plan.buffers.push(Buffer::parts("table of tensors", 1, table_bytes(table)));
    Ok(plan)
}
