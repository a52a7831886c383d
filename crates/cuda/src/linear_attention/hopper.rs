//! The first order on the tensor cores of compute capability 9.0: `kernels/sm90a_linear.cu`.

use super::call::{Call, Tensor, tensor};
use super::hopper_modules::Hopper;
use super::maps::{map, takes};
use super::passes::{
    Columns, FALLBACK, Target, backward_on, by_chunk, forward_on, launch as launch_portable,
};
use super::prepared::Prepared;
use super::{CHUNK, Job};
use crate::gpu::{Device, Kernels};
use crate::old_map::EncodedMap;
use crate::options::Level;
use crate::room::{Layout, Room, memory};
use crate::variant::{Variant, shared_bytes};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Decay, Dtype, Error, LinearAttention, Pass};
use std::sync::Arc;

/// Threads of a block, and the columns of a result that it owns.
const THREADS: u32 = 384;
const COLUMNS: usize = 64;

/// Warps of a block that multiply.
const WARPS: usize = 8;

/// Numbers that a thread keeps of a state, in words, and how many threads do.
const KEPT: usize = 256 * COLUMNS / 4;

/// Elements of a state that a block of `scan` takes from segment to segment.
const SCANNED: usize = 128;

/// Tokens of a segment of a sequence of so many: a block walks it for each head. Up to 8192 tokens are not cut; longer sequences
/// have 64 segments of at least 2048 tokens, or more of 8192. It depends on nothing else, since bits depend on it.
fn segment(tokens: usize) -> usize {
    let of_many =
        tokens.div_ceil(64).checked_next_power_of_two().map_or(8192, |n| n.clamp(2048, 8192));
    if tokens <= 8192 { tokens } else { of_many }
}

/// The same where short sequences are cut as long ones are: into four segments of at least 128 tokens.
fn short_segment(tokens: usize) -> usize {
    tokens.div_ceil(4).checked_next_power_of_two().map_or(tokens, |n| n.max(CHUNK))
}

/// How a level cuts sequences.
pub(super) fn cut(level: Level) -> fn(usize) -> usize {
    if level == Level::Sm90aSegments { short_segment } else { segment }
}

/// `Walk` of `sm90a_linear.cuh`, field by field.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
struct Walk {
    y: EncodedMap,
    b: EncodedMap,
    x: EncodedMap,
    out: EncodedMap,
    dots: EncodedMap,
    rows: Tensor,
    dot: Tensor,
    begin: Tensor,
    end: Tensor,
    between: Tensor,
    logs: u64,
    states: u64,
    gammas: u64,
    scales: u64,
    decays: u64,
    x_dots: u64,
    y_dots: u64,
    z_dots: u64,
    dg: u64,
    found: u64,
    chunks: u64,
    segments: u64,
    runs: u64,
    heads: i32,
    key_heads: i32,
    tokens: i32,
    inner: i32,
    outer: i32,
    items: i32,
    turned: i32,
    parts: i32,
    first_part: i32,
    back: i32,
    scale: f32,
    store_scale: f32,
}

// SAFETY: the fields, their types and their order are those of `Walk` in `sm90a_linear.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Walk {}

/// Why these kernels cannot compute a pass, if so.
pub(super) fn refuses(
    device: &Device,
    problem: &LinearAttention,
    (pass, storage): (Pass, Dtype),
) -> Option<&'static str> {
    let (e, value_dim) = (&problem.extents, problem.value_dim);
    match pass {
        _ if !device.is_hopper() => Some("the device is not of compute capability 9.0"),
        _ if storage == Dtype::F32 => Some("its tensor cores multiply bf16 and f16"),
        Pass::DoubleBackward => Some("the second order is not written yet for sm90a"),
        Pass::Step => Some("a step has no product of matrices"),
        _ if e.dim.max(value_dim) > 128 => {
            Some("dim and value_dim must be at most 128 for linear_attention of sm90a")
        }
        _ if e.dim % 8 + value_dim % 8 > 0 => {
            Some("dim and value_dim must be multiples of 8 for linear_attention of sm90a")
        }
        _ if [e.batch, e.query_heads, e.tokens, e.dim, value_dim].contains(&0) => {
            Some("there is nothing for sm90a to compute")
        }
        _ => None,
    }
}

/// Whether the copy engine takes every operand where kernels find it.
pub(super) fn takes_all(prepared: &Prepared<'_>) -> bool {
    let names = ["q", "k", "v", "o", "dout", "dq", "dk", "dv"];
    prepared.have_whole_rows(&names)
        && names.iter().filter_map(|name| prepared.part(name)).all(|part| takes(&part.place(0)))
}

/// The reason where it does not.
pub(super) const APART: &str =
    "rows must begin and end at multiples of 16 bytes for linear_attention of sm90a";

/// Takes rooms for what the kernels hand to one another.
pub(super) fn reserve(
    hopper: &mut Hopper,
    prepared: &Prepared<'_>,
    layout: &mut Layout,
) -> Result<(), Error> {
    let (e, needs) = (&prepared.problem.extents, prepared.needs());
    let (segments, cut) = (segments(prepared), cut_segments(prepared));
    let halves = e.dim.div_ceil(COLUMNS);
    let mut room = |wanted: bool, shape: [usize; 4]| {
        let bytes = shape.iter().try_fold(4usize, |n, &extent| n.checked_mul(extent));
        let bytes = bytes.ok_or_else(|| memory(usize::MAX))?;
        wanted.then(|| layout.room(bytes)).transpose()
    };
    let chunks = prepared.tables.chunks.len();
    let value_dim = prepared.problem.value_dim;
    hopper.between = room(cut > 0, [cut, e.key_heads, e.dim, value_dim])?;
    let by_token = prepared.problem.decay == Decay::PerToken;
    hopper.decays = room(cut > 0 && by_token, [cut, e.key_heads, 1, 1])?;
    hopper.states = room(needs.gates, [chunks, e.key_heads, halves, KEPT])?;
    let [of_tokens, of_heads] = [by_token, !by_token].map(|x| x && needs.gates);
    hopper.x_dots = room(of_tokens, [e.batch, e.query_heads, e.tokens, halves])?;
    hopper.y_dots = room(of_tokens, [e.batch, e.key_heads, e.tokens, halves])?;
    hopper.z_dots = room(of_tokens, [chunks, e.key_heads, halves, WARPS])?;
    hopper.gammas = room(of_heads, [e.key_heads, parts(prepared), 1, 1])?;
    hopper.scales = room(needs.scale, [segments, e.query_heads, halves, 1])?;
    Ok(())
}

fn module(hopper: &Hopper, target: Target) -> &(Arc<Kernels>, Variant) {
    if matches!(target, Target::Q | Target::K) { &hopper.by_value } else { &hopper.by_dim }
}

fn segments(prepared: &Prepared<'_>) -> usize {
    prepared.tables.segments.len()
}

/// Segments of sequences that have several: the first ones.
fn cut_segments(prepared: &Prepared<'_>) -> usize {
    prepared.tables.runs.iter().map(|run| run[1] as usize).sum()
}

/// The parts of dg_gamma of a key head: those of every query head, then those of dk.
fn parts(prepared: &Prepared<'_>) -> usize {
    let e = &prepared.problem.extents;
    segments(prepared) * e.dim.div_ceil(COLUMNS) * (e.query_heads / e.key_heads + 1)
}

/// A result, the state where its walk ends, and whether it adds to dg_gamma and dσ.
struct Course<'a> {
    target: Target,
    out: &'a str,
    begin: &'a str,
    end: &'a str,
    dots: bool,
}

impl Walk {
    fn new(job: &Job<'_>, hopper: &Hopper, of: &Course<'_>) -> Result<Walk, Error> {
        let (prepared, call) = (job.prepared, of.target.call(job));
        let [y, b, x] = match of.target {
            Target::O => ["q", "k", "v"],
            Target::Q => ["dout", "v", "k"],
            Target::K => ["v", "dout", "q"],
            Target::V => ["k", "q", "dout"],
        };
        let of_rows = |name: &str, height: u32| match job.place(name) {
            place if place.address == 0 => Ok(EncodedMap::default()),
            place => map(job.queue.device, prepared.storage, place, height),
        };
        let (dot, dots) = match of.target {
            Target::Q => (call.q, "q"),
            _ => (call.k, "k"),
        };
        let e = &prepared.problem.extents;
        let of_queries = parts(prepared) - segments(prepared) * e.dim.div_ceil(COLUMNS);
        let back = call.back != 0;
        let [segments, runs] = prepared.tables.cuts(job.tables);
        let (between, value_dim) = (job.room(hopper.between), prepared.problem.value_dim);
        Ok(Walk {
            y: of_rows(y, CHUNK as u32)?,
            b: of_rows(b, CHUNK as u32)?,
            x: of_rows(x, CHUNK as u32)?,
            out: of_rows(of.out, CHUNK as u32 / 2)?,
            dots: if of.dots { of_rows(dots, CHUNK as u32)? } else { EncodedMap::default() },
            rows: tensor(job, of.out),
            dot,
            begin: tensor(job, of.begin),
            end: tensor(job, of.end),
            between: Tensor::states(between, e.key_heads, e.dim, value_dim),
            logs: call.logs,
            states: job.room(hopper.states),
            gammas: job.room(hopper.gammas),
            scales: job.room(hopper.scales),
            decays: job.room(hopper.decays),
            x_dots: job.room(hopper.x_dots),
            y_dots: job.room(hopper.y_dots),
            z_dots: job.room(hopper.z_dots),
            dg: 0,
            found: call.found,
            chunks: call.chunks,
            segments,
            runs,
            heads: call.heads,
            key_heads: call.key_heads,
            tokens: call.tokens,
            inner: call.inner,
            outer: call.outer,
            items: 0,
            turned: call.turned,
            parts: parts(prepared) as i32,
            first_part: if back { of_queries as i32 } else { 0 },
            back: call.back,
            scale: if back { call.scale } else { 1.0 },
            store_scale: if back { 1.0 } else { call.scale },
        })
    }
}

/// Walks every sequence for a result.
fn walk(job: &Job<'_>, hopper: &Hopper, of: &Course<'_>) -> Result<(), Error> {
    let call = Walk::new(job, hopper, of)?;
    let back = matches!(of.target, Target::K | Target::V);
    let name = match (back, of.dots) {
        (true, true) => "attend_back_dots",
        (true, false) => "attend_back",
        (false, true) => "attend_dots",
        (false, false) if call.logs == 0 => "attend_plain",
        (false, false) => "attend",
    };
    let heads = if back { call.key_heads } else { call.heads } as usize;
    let blocks = segments(job.prepared) * heads * (call.outer as usize).div_ceil(COLUMNS);
    let (kernels, variant) = module(hopper, of.target);
    let block = (THREADS, shared_bytes(variant, name));
    job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)
}

/// The states with which segments of long sequences begin: S before them, or D behind.
fn sum_segments(job: &Job<'_>, hopper: &Hopper, back: bool) -> Result<(), Error> {
    let (prepared, key_heads) = (job.prepared, job.prepared.problem.extents.key_heads);
    let (cut, runs) = (cut_segments(prepared), prepared.tables.runs.len());
    if cut == 0 {
        return Ok(());
    }
    let (target, begin, name) = match back {
        false => (Target::O, "initial_state", "sums"),
        true => (Target::V, "dfinal_state", "sums_back"),
    };
    let call = Walk::new(job, hopper, &Course { target, out: "", begin, end: "", dots: false })?;
    // S is that of key heads.
    let heads = if back { call.heads } else { call.key_heads };
    let call = Walk { heads, ..call };
    let (kernels, variant) = module(hopper, target);
    let blocks = cut * key_heads * (call.outer as usize).div_ceil(COLUMNS);
    let block = (THREADS, shared_bytes(variant, name));
    job.queue.launch(kernels.get(name)?, blocks as u64, block, &call)?;
    let elements = prepared.problem.extents.dim * prepared.problem.value_dim;
    let blocks = runs * key_heads * elements.div_ceil(SCANNED);
    job.queue.launch(kernels.get("scan")?, blocks as u64, (SCANNED as u32, 0), &call)
}

/// Nothing is known to be not finite: each block walks once more where its results are, and says so.
fn find_none(job: &Job<'_>) -> Result<(), Error> {
    let found = job.prepared.rooms.found;
    found.map_or(Ok(()), |found| job.queue.fill(job.at(found), found.bytes, 0))
}

/// o and the final states, where they have places.
pub(super) fn forward(job: &Job<'_>, hopper: &Hopper) -> Result<(), Error> {
    let (begin, end) = ("initial_state", "final_state");
    let of = Course { target: Target::O, out: "o", begin, end, dots: false };
    find_none(job)?;
    sum_segments(job, hopper, false)?;
    walk(job, hopper, &of)?;
    if job.prepared.watches { forward_on(job, FALLBACK) } else { Ok(()) }
}

/// The gradients that have places.
pub(super) fn backward(job: &Job<'_>, hopper: &Hopper) -> Result<(), Error> {
    let needs = job.prepared.needs();
    let wants = |name: &str| job.prepared.wants(&[name]);
    let (front, behind) = ("initial_state", "dfinal_state");
    find_none(job)?;
    let dots = needs.gates || needs.scale;
    if dots || wants("dq") {
        sum_segments(job, hopper, false)?;
        let of = Course { target: Target::Q, out: "dq", begin: front, end: "", dots };
        walk(job, hopper, &of)?;
    }
    let end = "dinitial_state";
    if needs.gates || wants("dk") || wants(end) || wants("dv") {
        sum_segments(job, hopper, true)?;
    }
    if needs.gates || wants("dk") {
        let dots = needs.gates;
        let of = Course { target: Target::K, out: "dk", begin: behind, end: "", dots };
        walk(job, hopper, &of)?;
    }
    if wants(end) || wants("dv") {
        let of = Course { target: Target::V, out: "dv", begin: behind, end, dots: false };
        walk(job, hopper, &of)?;
    }
    flow(job, hopper)?;
    totals(job, hopper)?;
    if job.prepared.watches { backward_on(job, FALLBACK) } else { Ok(()) }
}

/// dg, from what the walks for dq and dk leave: a multiprocessor has a block, which takes chunks of key heads in turns.
fn flow(job: &Job<'_>, hopper: &Hopper) -> Result<(), Error> {
    if hopper.x_dots.is_none() {
        return Ok(());
    }
    let (prepared, device) = (job.prepared, job.queue.device);
    let of = Course { target: Target::Q, out: "", begin: "", end: "", dots: false };
    let call = Walk::new(job, hopper, &of)?;
    let [y, b] = ["q", "k"].map(|x| map(device, prepared.storage, job.place(x), CHUNK as u32));
    let (items, scale) = (by_chunk(job, 1), call.store_scale);
    let [x, dots] = [call.y, call.b];
    let (y, b, dg) = (y?, b?, job.address("dg"));
    let call = Walk { y, b, x, dots, dg, scale, items: items as i32, ..call };
    let wide = prepared.problem.extents.dim >= prepared.problem.value_dim;
    let (kernels, variant) = if wide { &hopper.by_dim } else { &hopper.by_value };
    let block = (THREADS, shared_bytes(variant, "flow"));
    job.queue.launch(kernels.get("flow")?, items.min(device.multiprocessors) as u64, block, &call)
}

/// dg_gamma and dσ, the sums of their parts.
fn totals(job: &Job<'_>, hopper: &Hopper) -> Result<(), Error> {
    let prepared = job.prepared;
    let sum = |name: &str, room: Option<Room>, kernel: &str, heads: usize, numbers: usize| {
        let Some(room) = room else { return Ok(()) };
        let (numbers_at, total) = (job.at(room), job.address(name));
        let (batch, key_heads) = (1, heads as i32);
        let tokens = numbers as i32;
        let call = Call {
            numbers: numbers_at,
            total,
            batch,
            heads: 1,
            key_heads,
            tokens,
            ..Call::new(job)
        };
        let work = (heads, Some(256));
        launch_portable(job, &prepared.first, (kernel, Columns::Dim), work, &call)
    };
    let key_heads = prepared.problem.extents.key_heads;
    sum("dg_gamma", hopper.gammas, "sum_heads", key_heads, parts(prepared))?;
    let numbers = hopper.scales.map_or(0, |room| room.bytes / 4);
    sum("dscale", hopper.scales, "sum_all", 1, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_depends_on_the_length_of_its_sequence() {
        let of = |n| segment(n);
        assert_eq!([1, 8192, 8193, 131_072].map(of), [1, 8192, 2048, 2048]);
        assert_eq!([131_073, 262_144, 262_145, 1 << 20].map(of), [4096, 4096, 8192, 8192]);
        assert_eq!([0, 128, 513, 1501].map(short_segment), [128, 128, 256, 512]);
        assert_eq!(short_segment(usize::MAX), 1 << (usize::BITS - 2));
    }
}
