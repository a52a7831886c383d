//! The second order: `kernels/linear_attention/portable_second_order.cu`.

use super::SIDE;
use super::args::LinearArgs;
use super::passes::{
    Columns, PORTABLE, Target, attend, attend_second, by_chunk, by_element, fill_gates, launch, launch_wide, pairs_if,
    states, totals,
};
use super::prepared::Steps;
use crate::tensor_args::TensorArgs;
use etalon_problem::Error;

/// S before every chunk, or D behind it, with its tangent. Of the ends: where both begin, and where the
/// tangent ends.
fn sum_states(steps: &Steps<'_>, back: bool, [begin, begin1, end1]: [&str; 3]) -> Result<(), Error> {
    let [begin, begin1, end1] = [begin, begin1, end1].map(|name| steps.tensor(name));
    let args = LinearArgs { begin, begin1, end1, ..states(steps, back) };
    let blocks = by_chunk(steps, steps.prepared.problem.extents.dim.div_ceil(SIDE));
    launch_wide(steps, ("sums", Columns::Value), blocks, &args)?;
    launch_wide(steps, ("tangent_sums", Columns::Value), blocks, &args)?;
    let work = (by_element(steps), Some(256));
    launch(steps, ("scan_second", Columns::Dim), work, &args)
}

/// The outputs of double_backward that have places.
pub(super) fn double_backward(steps: &Steps<'_>) -> Result<(), Error> {
    let needs = steps.prepared.needs();
    fill_gates(steps, &LinearArgs::new(steps))?;
    if needs.before {
        sum_states(steps, false, ["initial_state", "ddinitial_state", "gdfinal_state"])?;
    }
    if needs.behind {
        sum_states(steps, true, ["dfinal_state", "cot_final_state", "ginitial_state"])?;
    }
    by_queries(steps, needs.gates)?;
    by_keys(steps, needs.gates)?;
    if needs.scale {
        of_scale(steps)?;
    }
    totals(steps, PORTABLE, &needs, ["gg", "gg_gamma", "gscale"])
}

/// gdout and gq, and the tangent of x: of q·(u Sᵀ), in which q and the rest have one each.
fn by_queries(steps: &Steps<'_>, gates: bool) -> Result<(), Error> {
    let out = steps.tensor("gdout");
    if out.is_there() {
        let args = Target::O.args(steps);
        let args = LinearArgs { out, state_scale: args.scale, ..args };
        attend_second(steps, Target::O, &args)?;
    }
    let (out, args) = (steps.tensor("gq"), Target::Q.args(steps));
    let state_dots = steps.range(steps.prepared.ranges.x).into();
    if out.is_there() || gates {
        let args = LinearArgs { out, dot: args.q, state_dots, state_scale: args.scale, ..args };
        let args = pairs_if(out.is_there(), args);
        attend_second(steps, Target::Q, &args)?;
    }
    if gates && args.q1.is_there() {
        let args = LinearArgs { dot: args.q1, state_dots, dot_scale: args.scale, add: 1, ..args };
        attend(steps, PORTABLE, Target::Q, &pairs_if(false, args))?;
    }
    Ok(())
}

/// gk and gv, and the tangent of y: of k·(v Dᵀ).
fn by_keys(steps: &Steps<'_>, gates: bool) -> Result<(), Error> {
    let (out, args) = (steps.tensor("gk"), Target::K.args(steps));
    let state_dots = steps.range(steps.prepared.ranges.y).into();
    if out.is_there() || gates {
        let args = pairs_if(out.is_there(), LinearArgs { out, dot: args.k, state_dots, ..args });
        attend_second(steps, Target::K, &args)?;
    }
    if gates && args.k1.is_there() {
        let args = LinearArgs { dot: args.k1, state_dots, add: 1, ..args };
        attend(steps, PORTABLE, Target::K, &pairs_if(false, args))?;
    }
    let out = steps.tensor("gv");
    if out.is_there() {
        let args = LinearArgs { out, ..Target::V.args(steps) };
        attend_second(steps, Target::V, &args)?;
    }
    Ok(())
}

/// The parts of gσ (R19): of each token q·ṫ + ddq·t, where t is dq / σ and ṫ its tangent.
fn of_scale(steps: &Steps<'_>) -> Result<(), Error> {
    let args = Target::Q.args(steps);
    let dots = steps.range(steps.prepared.ranges.by_scale).into();
    let one = LinearArgs { dots, scale: 1.0, ddscale: 0.into(), out: TensorArgs::default(), ..args };
    attend_second(steps, Target::Q, &LinearArgs { dot: args.q, ..one })?;
    if !args.q1.is_there() {
        return Ok(());
    }
    let args = LinearArgs { dot: args.q1, add: 1, ..one };
    attend(steps, PORTABLE, Target::Q, &args)
}
