//! Plans of the passes.

use super::operands::Operands;
use super::{backward, double_backward, forward, lazy_backward, lazy_double_backward};
use crate::element::Tensor;
use crate::known::Known;
use crate::named::Inputs;
use crate::plan::{Buffer, Plan};
use crate::{Mode, Options, Workspace};
use etalon_problem::{Error, Pass, Precision, Problem, Role, Scores, Views};
use ndarray::{Ix0, arr0};

/// The plan of a pass in rayon's current pool, every gradient being asked for and every cotangent given, with
/// tensors of the type of `zero`.
pub fn plan(
    problem: &Problem,
    scores: &Scores,
    zero: &Tensor<'_, Ix0>,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    let known = Known::of(&Workspace::new(), problem, pass)?;
    let number = arr0(0.0f32);
    let number = Tensor::from(number.view());
    let mut views = Views::new();
    for operand in &known.table.operands {
        if !matches!(operand.role, Role::Output | Role::OptionalOutput) {
            let element = if operand.precision == Precision::Storage { zero } else { &number };
            views.push(operand.name, element.unwritten(&operand.shape, operand.name)?);
        }
    }
    let operands = Operands::of(&known, scores, Inputs(&views))?;
    // Under this mode the forward pass of attention_lse has all that dq needs, and that of lazy attention
    // all that Δ needs.
    let (lazy, further) = (operands.tau.is_some(), options.mode == Mode::ForwardGradient);
    let gradient = operands.v.is_none() && further;
    let mut plan = match pass {
        Pass::Forward => forward::plan(&operands, further && (gradient || lazy), options)?,
        Pass::Backward if lazy => lazy_backward::plan(&operands, further, options)?,
        Pass::Backward => backward::plan(&operands, !gradient, options)?,
        _ if lazy => lazy_double_backward::plan(&operands, options)?,
        _ => double_backward::plan(&operands, pass == Pass::Jvp, options)?,
    };
    if gradient && pass == Pass::Backward {
        plan.mode = Some(Mode::ForwardGradient);
    }
    plan.buffers.push(Buffer::parts("tensors and sequences", 1, known.bytes()));
    Ok(plan)
}
