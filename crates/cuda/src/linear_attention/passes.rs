//! The first order: `kernels/linear.cu` and `kernels/linear_totals.cu`.

use super::Job;
use super::SIDE;
use super::call::{Call, Tensor, tensor};
use super::prepared::{Modules, Needs};
use crate::variant::width;
use etalon_problem::Error;

/// A gradient, as o of another problem: docs/linear_attention.md, Closure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    O,
    Q,
    K,
    V,
}

/// Whether accumulators are as wide as D or as E.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Columns {
    Dim,
    Value,
}

impl Target {
    /// The call of `attend` that computes it, into nothing so far.
    pub fn call(self, job: &Job<'_>) -> Call {
        let (c, prepared) = (Call::new(job), job.prepared);
        let rooms = &prepared.rooms;
        let (dim, value_dim) = (c.dim, c.value_dim);
        let back = matches!(self, Target::K | Target::V);
        let [states, states1] = match back {
            false => [rooms.before, rooms.before_tangent],
            true => [rooms.behind, rooms.behind_tangent],
        };
        let begins = if back { "dfinal_state" } else { "initial_state" };
        let turned = matches!(self, Target::Q | Target::K);
        let [q, k, v, dout] = [(c.q, c.q1), (c.k, c.k1), (c.v, c.v1), (c.dout, c.dout1)];
        let [(y, y1), (b, b1), (x, x1)] = match self {
            Target::O => [q, k, v],
            Target::Q => [dout, v, k],
            Target::K => [v, dout, q],
            Target::V => [k, q, dout],
        };
        Call {
            y,
            y1,
            b,
            b1,
            x,
            x1,
            states: job.room(states),
            states1: job.room(states1),
            inner: if turned { value_dim } else { dim },
            outer: if turned { dim } else { value_dim },
            back: i32::from(back),
            turned: i32::from(turned),
            blank: i32::from(!prepared.has(begins)),
            ..c
        }
    }

    fn columns(self) -> Columns {
        if matches!(self, Target::Q | Target::K) { Columns::Dim } else { Columns::Value }
    }
}

/// Runs a kernel of these modules.
pub(super) fn launch(
    job: &Job<'_>,
    modules: &Modules,
    (name, columns): (&str, Columns),
    (blocks, threads): (usize, Option<u32>),
    call: &Call,
) -> Result<(), Error> {
    let (kernels, own) = match columns {
        Columns::Dim => (&modules.by_dim, modules.threads[0]),
        Columns::Value => (&modules.by_value, modules.threads[1]),
    };
    let block = (threads.unwrap_or(own), 0);
    job.queue.launch(kernels.get(name)?, blocks as u64, block, call)
}

/// Runs a kernel once for each part of its columns.
pub(super) fn launch_wide(
    job: &Job<'_>,
    modules: &Modules,
    (name, columns): (&str, Columns),
    blocks: usize,
    call: &Call,
) -> Result<(), Error> {
    let all = match columns {
        Columns::Dim => call.dim,
        Columns::Value => call.value_dim,
    } as usize;
    let parts = (0..all).step_by(width(all));
    let mut launches = parts.map(|first| call.at(first));
    launches.try_for_each(|call| launch(job, modules, (name, columns), (blocks, None), &call))
}

/// Computes a result, as `call` says, by `attend` or its counterpart of the second order.
pub(super) fn attend(
    job: &Job<'_>,
    modules: &Modules,
    (name, result): (&str, Target),
    call: &Call,
) -> Result<(), Error> {
    let heads = if call.back != 0 { call.key_heads } else { call.heads };
    let blocks = job.prepared.tables.strips.len() * heads as usize;
    launch_wide(job, modules, (name, result.columns()), blocks, call)
}

/// A block for each chunk and key head, or for each piece of so many.
pub(super) fn by_chunk(job: &Job<'_>, pieces: usize) -> usize {
    job.prepared.tables.chunks.len() * job.prepared.problem.extents.key_heads * pieces
}

/// The sums of log-decays within the chunks.
pub(super) fn fill_gates(job: &Job<'_>, call: &Call) -> Result<(), Error> {
    if call.gates == 0 && call.slopes == 0 {
        return Ok(());
    }
    let work = (by_chunk(job, 1), Some(super::CHUNK as u32));
    launch(job, &job.prepared.first, ("fill_gates", Columns::Dim), work, call)
}

/// The call that sums S before every chunk, or D behind it.
pub(super) fn states(job: &Job<'_>, back: bool) -> Call {
    let c = if back { Target::V } else { Target::O }.call(job);
    match back {
        false => Call { y: c.k, y1: c.k1, x: c.v, x1: c.v1, scale: 1.0, ..c },
        true => Call { y: c.q, y1: c.q1, x: c.dout, x1: c.dout1, ..c },
    }
}

/// Blocks of `scan`, a thread for each element of every state.
pub(super) fn by_element(job: &Job<'_>) -> usize {
    let (problem, lines) = (&job.prepared.problem, &job.prepared.tables.lines);
    let pieces = (problem.extents.dim * problem.value_dim).div_ceil(256);
    lines.len() * problem.extents.key_heads * pieces
}

/// S before every chunk, or D behind it, from the state of one end to that of the other.
fn sum_states(job: &Job<'_>, back: bool, ends: [&str; 2]) -> Result<(), Error> {
    let [begin, end] = ends.map(|name| tensor(job, name));
    let (call, first) = (Call { begin, end, ..states(job, back) }, &job.prepared.first);
    let blocks = by_chunk(job, job.prepared.problem.extents.dim.div_ceil(SIDE));
    launch_wide(job, first, ("sums", Columns::Value), blocks, &call)?;
    launch(job, first, ("scan", Columns::Dim), (by_element(job), Some(256)), &call)
}

/// o and the final states, where they have places.
pub(super) fn forward(job: &Job<'_>) -> Result<(), Error> {
    let call = Target::O.call(job);
    fill_gates(job, &call)?;
    sum_states(job, false, ["initial_state", "final_state"])?;
    let call = Call { out: tensor(job, "o"), store_scale: call.scale, scale: 1.0, ..call };
    if !call.out.is_there() {
        return Ok(());
    }
    attend(job, &job.prepared.first, ("attend", Target::O), &call)
}

/// The gradients that have places.
pub(super) fn backward(job: &Job<'_>) -> Result<(), Error> {
    let (prepared, first) = (job.prepared, &job.prepared.first);
    let (needs, rooms) = (prepared.needs(), &prepared.rooms);
    fill_gates(job, &Call::new(job))?;
    if needs.before {
        sum_states(job, false, ["initial_state", ""])?;
        let call = Target::Q.call(job);
        let (out, dot) = (tensor(job, "dq"), call.q);
        let (state_dots, dots) = (job.room(rooms.x), job.room(rooms.by_scale));
        let sigma = Call { store_scale: call.scale, dot_scale: call.scale, scale: 1.0, ..call };
        let call =
            pairs_if(out.is_there() || needs.scale, Call { out, dot, state_dots, dots, ..sigma });
        attend(job, first, ("attend", Target::Q), &call)?;
    }
    if needs.behind {
        sum_states(job, true, ["dfinal_state", "dinitial_state"])?;
    }
    let (out, state_dots) = (tensor(job, "dk"), job.room(rooms.y));
    if out.is_there() || needs.gates {
        let call = Target::K.call(job);
        let call = pairs_if(out.is_there(), Call { out, dot: call.k, state_dots, ..call });
        attend(job, first, ("attend", Target::K), &call)?;
    }
    let out = tensor(job, "dv");
    if out.is_there() {
        let call = Call { out, ..Target::V.call(job) };
        attend(job, first, ("attend", Target::V), &call)?;
    }
    totals(job, first, "flow", &needs, ["dg", "dg_gamma", "dscale"])
}

/// A call without pairs unless they are wanted.
pub(super) fn pairs_if(wanted: bool, call: Call) -> Call {
    if wanted { call } else { Call { x: Tensor::default(), ..call } }
}

/// The gradients of the log-decays and of the scale, from what other kernels left.
pub(super) fn totals(
    job: &Job<'_>,
    modules: &Modules,
    flow: &str,
    needs: &Needs,
    [by_token, by_head, scale]: [&str; 3],
) -> Result<(), Error> {
    let (prepared, rooms, first) = (job.prepared, &job.prepared.rooms, &job.prepared.first);
    let (call, behind) = (Target::Q.call(job), Target::K.call(job));
    let call = Call {
        other: behind.states,
        other1: behind.states1,
        x_dots: job.room(rooms.x),
        y_dots: job.room(rooms.y),
        ..call
    };
    if needs.gates {
        let summed = prepared.wants(&[by_head]);
        let dg = if summed { job.room(rooms.by_gate) } else { job.address(by_token) };
        let call = Call { dg, numbers: dg, total: job.address(by_head), ..call };
        launch(job, modules, (flow, Columns::Dim), (by_chunk(job, 1), None), &call)?;
        if summed {
            let blocks = prepared.problem.extents.key_heads;
            launch(job, first, ("sum_heads", Columns::Dim), (blocks, Some(256)), &call)?;
        }
    }
    if needs.scale {
        let numbers = job.room(rooms.by_scale);
        let call = Call { numbers, total: job.address(scale), ..call };
        launch(job, first, ("sum_all", Columns::Dim), (1, Some(256)), &call)?;
    }
    Ok(())
}

/// The new states, and o if it has a place.
pub(super) fn step(job: &Job<'_>) -> Result<(), Error> {
    let problem = &job.prepared.problem;
    let end = tensor(job, "final_state");
    let given = tensor(job, "initial_state");
    let begin = if given.is_there() { given } else { end };
    let call = Call { begin, end, out: tensor(job, "o"), ..Call::new(job) };
    let states = problem.extents.batch * problem.extents.key_heads;
    let blocks = states * problem.value_dim.div_ceil(32);
    launch(job, &job.prepared.first, ("step", Columns::Dim), (blocks, Some(256)), &call)
}
