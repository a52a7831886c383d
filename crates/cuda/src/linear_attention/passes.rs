//! The first order: `kernels/linear.cu` and `kernels/linear_totals.cu`.

use super::Job;
use super::SIDE;
use super::call::{Call, Tensor, tensor};
use super::prepared::{Modules, Needs, TensorModules};
use crate::variant::{shared_bytes, width};
use etalon_problem::Error;

/// Whose kernels compute, and what they do with numbers that are not finite: `linear.cuh`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    tensor: Option<&'a TensorModules>,
    mode: i32,
}

/// The portable kernels alone.
pub(super) const PORTABLE: Way<'static> = Way { tensor: None, mode: 0 };

const CLEANSE: i32 = 1;
const MERGE: i32 = 2;
const AFRESH: i32 = 3;

/// The portable kernels after those of sm90a, which leave nothing to them but results.
pub(super) const FALLBACK: Way<'static> = Way { tensor: None, mode: MERGE };

impl Way<'_> {
    /// What its kernels are told.
    fn tell(&self, call: &Call) -> Call {
        let narrow = if self.tensor.is_some() { call.narrow } else { 0 };
        Call { mode: self.mode, narrow, ..*call }
    }
}

/// Calls `compute` with each of the ways that together compute a pass.
fn each_way(job: &Job<'_>, compute: impl Fn(Way<'_>) -> Result<(), Error>) -> Result<(), Error> {
    let tensor = job.prepared.tensor.as_ref();
    if tensor.is_none() {
        return compute(PORTABLE);
    }
    if let Some(found) = job.prepared.rooms.found {
        job.queue.fill(job.at(found), found.bytes, 0)?;
    }
    compute(Way { tensor, mode: 0 })?;
    if job.prepared.watches {
        compute(Way { tensor, mode: CLEANSE })?;
        compute(Way { tensor: None, mode: MERGE })?;
    }
    Ok(())
}

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
        let [states, states1, narrow] = match back {
            false => [rooms.before, rooms.before_tangent, rooms.before_narrow],
            true => [rooms.behind, rooms.behind_tangent, rooms.behind_narrow],
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
            narrow: job.room(narrow),
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
    // The queue refuses what a launch cannot have.
    let call = Call { blocks: i32::try_from(blocks).unwrap_or(i32::MAX), ..*call };
    let (name, waits) = waits(name, &call);
    let blocks = if waits { blocks.min(IDLE) } else { blocks };
    job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)
}

/// Blocks of a launch that may have nothing to do: enough for any device, and few that say so.
const IDLE: usize = 256;

/// The kernel to launch, and whether it may find nothing to do and has the work of many blocks done by few: `each_block`.
fn waits<'a>(name: &'a str, call: &Call) -> (&'a str, bool) {
    match name {
        _ if call.mode == 0 => (name, false),
        "sums" => ("mend_sums", true),
        "attend" => ("mend", true),
        _ => (name, ["fill_gates", "scan", "flow"].contains(&name)),
    }
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

/// Runs a kernel on tensor cores.
fn launch_tensor(
    job: &Job<'_>,
    modules: &TensorModules,
    (name, columns): (&str, Columns),
    blocks: usize,
    call: &Call,
) -> Result<(), Error> {
    let (kernels, variant) = match columns {
        Columns::Dim => &modules.by_dim,
        Columns::Value => &modules.by_value,
    };
    let block = (TENSOR_THREADS, shared_bytes(variant, name));
    job.queue.launch(kernels.get(name)?, blocks as u64, block, call)
}

/// Threads of a block of the level sm80.
const TENSOR_THREADS: u32 = 128;

/// Computes a result, as `call` says, by `attend_second`.
pub(super) fn attend_second(
    job: &Job<'_>,
    modules: &Modules,
    target: Target,
    call: &Call,
) -> Result<(), Error> {
    launch_wide(job, modules, ("attend_second", target.columns()), by_strip(job, call), call)
}

/// Computes a result, as `call` says.
pub(super) fn attend(
    job: &Job<'_>,
    way: Way<'_>,
    target: Target,
    call: &Call,
) -> Result<(), Error> {
    let (blocks, call) = (by_strip(job, call), way.tell(call));
    match way.tensor {
        Some(modules) => launch_tensor(job, modules, ("attend", target.columns()), blocks, &call),
        None => {
            let what = ("attend", target.columns());
            launch_wide(job, &job.prepared.first, what, blocks, &call)
        }
    }
}

/// A block for each micro-chunk of the heads whose rows a call computes.
fn by_strip(job: &Job<'_>, call: &Call) -> usize {
    let heads = if call.back != 0 { call.key_heads } else { call.heads };
    job.prepared.tables.strips.len() * heads as usize
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
fn sum_states(job: &Job<'_>, way: Way<'_>, back: bool, ends: [&str; 2]) -> Result<(), Error> {
    let [begin, end] = ends.map(|name| tensor(job, name));
    let call = way.tell(&Call { begin, end, ..states(job, back) });
    let (first, sums) = (&job.prepared.first, ("sums", Columns::Value));
    match way.tensor {
        Some(modules) => launch_tensor(job, modules, sums, by_chunk(job, 1), &call)?,
        None => {
            let blocks = by_chunk(job, job.prepared.problem.extents.dim.div_ceil(SIDE));
            launch_wide(job, first, sums, blocks, &call)?;
        }
    }
    launch(job, first, ("scan", Columns::Dim), (by_element(job), Some(256)), &call)
}

/// o and the final states, where they have places.
pub(super) fn forward(job: &Job<'_>) -> Result<(), Error> {
    fill_gates(job, &Call::new(job))?;
    each_way(job, |way| attend_states(job, way))
}

/// The same by kernels that are told what others computed.
pub(super) fn forward_on(job: &Job<'_>, way: Way<'_>) -> Result<(), Error> {
    fill_gates(job, &way.tell(&Call::new(job)))?;
    attend_states(job, way)
}

fn attend_states(job: &Job<'_>, way: Way<'_>) -> Result<(), Error> {
    sum_states(job, way, false, ["initial_state", "final_state"])?;
    let call = Target::O.call(job);
    let call = Call { out: tensor(job, "o"), store_scale: call.scale, scale: 1.0, ..call };
    if call.out.is_there() { attend(job, way, Target::O, &call) } else { Ok(()) }
}

/// The gradients that have places.
pub(super) fn backward(job: &Job<'_>) -> Result<(), Error> {
    fill_gates(job, &Call::new(job))?;
    each_way(job, |way| gradients(job, way))
}

/// The same by kernels that are told what others computed.
pub(super) fn backward_on(job: &Job<'_>, way: Way<'_>) -> Result<(), Error> {
    fill_gates(job, &way.tell(&Call::new(job)))?;
    gradients(job, way)
}

fn gradients(job: &Job<'_>, way: Way<'_>) -> Result<(), Error> {
    let needs = job.prepared.needs();
    if needs.before {
        sum_states(job, way, false, ["initial_state", ""])?;
        by_queries(job, way, &needs)?;
    }
    if needs.behind {
        sum_states(job, way, true, ["dfinal_state", "dinitial_state"])?;
    }
    by_keys(job, way, &needs)?;
    totals(job, &job.prepared.first, way, &needs, ["dg", "dg_gamma", "dscale"])
}

/// dq, x and the parts of dσ.
fn by_queries(job: &Job<'_>, way: Way<'_>, needs: &Needs) -> Result<(), Error> {
    let (call, rooms) = (Target::Q.call(job), &job.prepared.rooms);
    let call = Call {
        out: tensor(job, "dq"),
        dot: call.q,
        state_dots: job.room(rooms.x),
        dots: job.room(rooms.by_scale),
        store_scale: call.scale,
        dot_scale: call.scale,
        scale: 1.0,
        ..call
    };
    let call = pairs_if(call.out.is_there() || needs.scale, call);
    attend(job, way, Target::Q, &call)
}

/// dk, dv and y.
fn by_keys(job: &Job<'_>, way: Way<'_>, needs: &Needs) -> Result<(), Error> {
    let (out, state_dots) = (tensor(job, "dk"), job.room(job.prepared.rooms.y));
    if out.is_there() || needs.gates {
        let call = Target::K.call(job);
        let call = pairs_if(out.is_there(), Call { out, dot: call.k, state_dots, ..call });
        attend(job, way, Target::K, &call)?;
    }
    let out = tensor(job, "dv");
    if !out.is_there() {
        return Ok(());
    }
    attend(job, way, Target::V, &Call { out, ..Target::V.call(job) })
}

/// A call without pairs unless they are wanted.
pub(super) fn pairs_if(wanted: bool, call: Call) -> Call {
    if wanted { call } else { Call { x: Tensor::default(), ..call } }
}

/// The gradients of the log-decays and of the scale, from what other kernels left.
pub(super) fn totals(
    job: &Job<'_>,
    modules: &Modules,
    way: Way<'_>,
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
        other_narrow: behind.narrow,
        ..way.tell(&call)
    };
    if needs.gates {
        let summed = prepared.wants(&[by_head]);
        let dg = if summed { job.room(rooms.by_gate) } else { job.address(by_token) };
        let call = Call { dg, numbers: dg, total: job.address(by_head), ..call };
        // The kernels of sm90a leave no gradient of every gate to merge with.
        let afresh = summed && prepared.hopper.is_some();
        let flow = Call { mode: if afresh { AFRESH } else { call.mode }, ..call };
        match way.tensor {
            Some(modules) => {
                let what = ("flow", Columns::Value);
                launch_tensor(job, modules, what, by_chunk(job, 1), &flow)?;
            }
            None => {
                let name = if prepared.second.is_some() { "flow_second" } else { "flow" };
                launch(job, modules, (name, Columns::Dim), (by_chunk(job, 1), None), &flow)?;
            }
        }
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
