//! The second order: `kernels/linear_second.cu`.

use super::Job;
use super::SIDE;
use super::call::{Call, Tensor, tensor};
use super::passes::{
    Columns, PORTABLE, Target, attend, attend_second, by_chunk, by_element, fill_gates, launch,
    launch_wide, pairs_if, states, totals,
};
use super::prepared::Modules;
use crate::parts::absent;
use etalon_problem::Error;

fn modules<'a>(job: &Job<'a>) -> Result<&'a Modules, Error> {
    job.prepared.second.as_ref().ok_or_else(|| absent("the second order"))
}

/// S before every chunk, or D behind it, with its tangent. Of the ends: where both begin, and where the
/// tangent ends.
fn sum_states(job: &Job<'_>, back: bool, [begin, begin1, end1]: [&str; 3]) -> Result<(), Error> {
    let [begin, begin1, end1] = [begin, begin1, end1].map(|name| tensor(job, name));
    let call = Call { begin, begin1, end1, ..states(job, back) };
    let blocks = by_chunk(job, job.prepared.problem.extents.dim.div_ceil(SIDE));
    launch_wide(job, &job.prepared.first, ("sums", Columns::Value), blocks, &call)?;
    launch_wide(job, modules(job)?, ("tangent_sums", Columns::Value), blocks, &call)?;
    let work = (by_element(job), Some(256));
    launch(job, modules(job)?, ("scan_second", Columns::Dim), work, &call)
}

/// The outputs of double_backward that have places.
pub(super) fn double_backward(job: &Job<'_>) -> Result<(), Error> {
    let needs = job.prepared.needs();
    fill_gates(job, &Call::new(job))?;
    if needs.before {
        sum_states(job, false, ["initial_state", "ddinitial_state", "gdfinal_state"])?;
    }
    if needs.behind {
        sum_states(job, true, ["dfinal_state", "cot_final_state", "ginitial_state"])?;
    }
    by_queries(job, needs.gates)?;
    by_keys(job, needs.gates)?;
    if needs.scale {
        of_scale(job)?;
    }
    totals(job, modules(job)?, PORTABLE, &needs, ["gg", "gg_gamma", "gscale"])
}

/// gdout and gq, and the tangent of x: of q·(u Sᵀ), in which q and the rest have one each.
fn by_queries(job: &Job<'_>, gates: bool) -> Result<(), Error> {
    let second = modules(job)?;
    let out = tensor(job, "gdout");
    if out.is_there() {
        let call = Target::O.call(job);
        let call = Call { out, state_scale: call.scale, ..call };
        attend_second(job, second, Target::O, &call)?;
    }
    let (out, call) = (tensor(job, "gq"), Target::Q.call(job));
    let state_dots = job.room(job.prepared.rooms.x);
    if out.is_there() || gates {
        let call = Call { out, dot: call.q, state_dots, state_scale: call.scale, ..call };
        let call = pairs_if(out.is_there(), call);
        attend_second(job, second, Target::Q, &call)?;
    }
    if gates && call.q1.is_there() {
        let call = Call { dot: call.q1, state_dots, dot_scale: call.scale, add: 1, ..call };
        attend(job, PORTABLE, Target::Q, &pairs_if(false, call))?;
    }
    Ok(())
}

/// gk and gv, and the tangent of y: of k·(v Dᵀ).
fn by_keys(job: &Job<'_>, gates: bool) -> Result<(), Error> {
    let second = modules(job)?;
    let (out, call) = (tensor(job, "gk"), Target::K.call(job));
    let state_dots = job.room(job.prepared.rooms.y);
    if out.is_there() || gates {
        let call = pairs_if(out.is_there(), Call { out, dot: call.k, state_dots, ..call });
        attend_second(job, second, Target::K, &call)?;
    }
    if gates && call.k1.is_there() {
        let call = Call { dot: call.k1, state_dots, add: 1, ..call };
        attend(job, PORTABLE, Target::K, &pairs_if(false, call))?;
    }
    let out = tensor(job, "gv");
    if out.is_there() {
        let call = Call { out, ..Target::V.call(job) };
        attend_second(job, second, Target::V, &call)?;
    }
    Ok(())
}

/// The parts of gσ (R19): of each token q·ṫ + ddq·t, where t is dq / σ and ṫ its tangent.
fn of_scale(job: &Job<'_>) -> Result<(), Error> {
    let call = Target::Q.call(job);
    let dots = job.room(job.prepared.rooms.by_scale);
    let one = Call { dots, scale: 1.0, ddscale: 0, out: Tensor::default(), ..call };
    attend_second(job, modules(job)?, Target::Q, &Call { dot: call.q, ..one })?;
    if !call.q1.is_there() {
        return Ok(());
    }
    let call = Call { dot: call.q1, add: 1, ..one };
    attend(job, PORTABLE, Target::Q, &call)
}
