//! The first order on the tensor cores of compute capability 9.0: `kernels/linear_attention/sm90a_walk.cu`.

use super::CHUNK;
use super::args::{LinearArgs, WalkArgs};
use super::passes::{Columns, Target, by_chunk, launch as launch_portable};
use super::prepared::{Prepared, Steps, WalkRanges};
use crate::args::filled;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::strided::StridedTensor;
use crate::tensor_args::TensorArgs;
use crate::tensor_map::TensorMap;
use crate::variant::Variant;
use etalon_problem::{Decay, Dtype, Error, Pass};

/// Threads of a block, and the columns of a result that it owns.
const THREADS: u32 = 384;
const COLUMNS: usize = 64;

/// Warps of a block that multiply.
const WARPS: usize = 8;

/// Numbers that a thread keeps of a state, in words, and how many threads do.
const KEPT: usize = 256 * COLUMNS / 4;

/// Elements of a state that a block of `scan` takes from segment to segment.
const SCANNED: usize = 128;

/// Tokens of a segment of a sequence of so many: a block walks it for each head. Up to 8192 tokens are not cut; longer
/// sequences have 64 segments of at least 2048 tokens, or more of 8192. It depends on nothing else, since bits depend
/// on it.
fn segment(tokens: usize) -> usize {
    let of_many = tokens.div_ceil(64).checked_next_power_of_two().map_or(8192, |n| n.clamp(2048, 8192));
    if tokens <= 8192 { tokens } else { of_many }
}

/// The same where short sequences are cut as long ones are: into four segments of at least 128 tokens.
fn short_segment(tokens: usize) -> usize {
    tokens.div_ceil(4).checked_next_power_of_two().map_or(tokens, |n| n.max(CHUNK))
}

/// Cuts of sequences, by level.
pub(super) fn cut(level: Level) -> fn(usize) -> usize {
    if level == Level::Sm90aSegments { short_segment } else { segment }
}

/// Takes ranges for the kernels.
pub(super) fn reserve(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<WalkRanges, Error> {
    if prepared.level != Level::Sm90a {
        return Ok(WalkRanges::default());
    }
    let (e, needs) = (&prepared.problem.extents, prepared.needs());
    let (segments, cut) = (segments(prepared), cut_segments(prepared));
    let halves = e.dim.div_ceil(COLUMNS);
    let mut range = |wanted, shape: [usize; 4]| layout.array_if(wanted, 4, &shape);
    let chunks = prepared.tables.chunks.rows.len();
    let (of_tokens, of_heads) = (needs.gates && by_token(prepared), needs.gates && !by_token(prepared));
    Ok(WalkRanges {
        between: range(cut > 0, [cut, e.key_heads, e.dim, prepared.problem.value_dim])?,
        decays: range(cut > 0 && by_token(prepared), [cut, e.key_heads, 1, 1])?,
        states: range(needs.gates, [chunks, e.key_heads, halves, KEPT])?,
        x_dots: range(of_tokens, [e.batch, e.query_heads, e.tokens, halves])?,
        y_dots: range(of_tokens, [e.batch, e.key_heads, e.tokens, halves])?,
        z_dots: range(of_tokens, [chunks, e.key_heads, halves, WARPS])?,
        gammas: range(of_heads, [e.key_heads, parts(prepared), 1, 1])?,
        scales: range(needs.scale, [segments, e.query_heads, halves, 1])?,
    })
}

/// True if the copy engine takes every operand where kernels find it.
pub(super) fn takes_all(parts: &Parts) -> bool {
    let names = ["q", "k", "v", "o", "dout", "dq", "dk", "dv"];
    parts.have_whole_rows(&names) && names.iter().filter_map(|name| parts.part(name)).all(|part| takes(&part.place(0)))
}

/// True if it takes a tensor of 16-bit elements that begins at a multiple of 16 bytes.
fn takes(place: &StridedTensor) -> bool {
    place.extents[3].is_multiple_of(8) && place.elements() > 0 && place.has_boxes()
}

/// A tensor in boxes of 64 columns and `height` rows; none where it is not there.
fn map(storage: Dtype, place: StridedTensor, height: u32) -> TensorMap {
    if place.address == 0 {
        return TensorMap::default();
    }
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    let [of_rows, of_heads, of_batch] = place.box_strides();
    let extents = [columns, rows, heads, batch];
    let strides = [of_rows, of_heads, of_batch, 0];
    TensorMap::new(storage, place.address, extents, strides, [64, height, 1, 1])
}

fn by_token(prepared: &Prepared<'_>) -> bool {
    prepared.problem.decay == Decay::PerToken
}

fn segments(prepared: &Prepared<'_>) -> usize {
    prepared.tables.segments.rows.len()
}

/// Segments of sequences that have several: the first ones.
fn cut_segments(prepared: &Prepared<'_>) -> usize {
    prepared.tables.runs.rows.iter().map(|run| run.segments as usize).sum()
}

/// The parts of dg_gamma of a key head: those of every query head, then those of dk.
fn parts(prepared: &Prepared<'_>) -> usize {
    let e = &prepared.problem.extents;
    segments(prepared) * e.dim.div_ceil(COLUMNS) * (e.query_heads / e.key_heads + 1)
}

/// Launches a kernel of the module for so many columns of y and b.
fn launch(
    steps: &Steps<'_>,
    (name, columns): (&'static str, usize),
    grid: (usize, u32),
    args: &WalkArgs,
) -> Result<(), Error> {
    let prepared = steps.prepared;
    let variant = Variant::hopper_linear(prepared.storage, columns, by_token(prepared));
    steps.launch((&variant, name), grid, args)
}

/// A result, the state where its walk ends, and whether it adds to dg_gamma and dσ.
struct Course<'a> {
    target: Target,
    out: &'a str,
    begin: &'a str,
    end: &'a str,
    dots: bool,
}

impl WalkArgs {
    fn new(steps: &Steps<'_>, of: &Course<'_>) -> WalkArgs {
        let (prepared, args, ranges) = (steps.prepared, of.target.args(steps), &steps.prepared.walks);
        let [y, b, x] = match of.target {
            Target::O => ["q", "k", "v"],
            Target::Q => ["dout", "v", "k"],
            Target::K => ["v", "dout", "q"],
            Target::V => ["k", "q", "dout"],
        };
        let boxes = |name, height| map(prepared.storage, steps.place(name), height);
        let (dot, dots) = match of.target {
            Target::Q => (args.q, "q"),
            _ => (args.k, "k"),
        };
        let e = &prepared.problem.extents;
        let of_queries = parts(prepared) - segments(prepared) * e.dim.div_ceil(COLUMNS);
        let back = args.back != 0;
        let (address, same) = (|range| steps.range(range), |x: i32| x);
        let states = [cut_segments(prepared), e.key_heads, e.dim, prepared.problem.value_dim];
        WalkArgs {
            y: boxes(y, CHUNK as u32),
            b: boxes(b, CHUNK as u32),
            x: boxes(x, CHUNK as u32),
            out: boxes(of.out, CHUNK as u32 / 2),
            dots: if of.dots { boxes(dots, CHUNK as u32) } else { TensorMap::default() },
            rows: steps.tensor(of.out),
            dot,
            begin: steps.tensor(of.begin),
            end: steps.tensor(of.end),
            between: TensorArgs::dense(address(ranges.between), states),
            logs: args.logs,
            found: args.found,
            chunks: args.chunks,
            segments: steps.table(prepared.tables.segments.range).into(),
            runs: steps.table(prepared.tables.runs.range).into(),
            parts: parts(prepared) as i32,
            first_part: if back { of_queries as i32 } else { 0 },
            scale: if back { args.scale } else { 1.0 },
            store_scale: if back { 1.0 } else { args.scale },
            ..filled!(WalkArgs:
                fields(ranges, address) [states gammas scales decays x_dots y_dots z_dots]
                fields(args, same) [heads key_heads tokens inner outer turned back]
            )
        }
    }
}

/// Walks every sequence for a result.
fn walk(steps: &Steps<'_>, of: &Course<'_>) -> Result<(), Error> {
    let args = WalkArgs::new(steps, of);
    let back = matches!(of.target, Target::K | Target::V);
    let name = match (back, of.dots) {
        (true, true) => "attend_back_dots",
        (true, false) => "attend_back",
        (false, true) => "attend_dots",
        (false, false) if args.logs.0 == 0 => "attend_plain",
        (false, false) => "attend",
    };
    let heads = if back { args.key_heads } else { args.heads } as usize;
    let blocks = segments(steps.prepared) * heads * (args.outer as usize).div_ceil(COLUMNS);
    launch(steps, (name, args.inner as usize), (blocks, THREADS), &args)
}

/// The states with which segments of long sequences begin: S before them, or D behind.
fn sum_segments(steps: &Steps<'_>, back: bool) -> Result<(), Error> {
    let (prepared, key_heads) = (steps.prepared, steps.prepared.problem.extents.key_heads);
    let (cut, runs) = (cut_segments(prepared), prepared.tables.runs.rows.len());
    if cut == 0 {
        return Ok(());
    }
    let (target, begin, name) = match back {
        false => (Target::O, "initial_state", "sums"),
        true => (Target::V, "dfinal_state", "sums_back"),
    };
    let args = WalkArgs::new(steps, &Course { target, out: "", begin, end: "", dots: false });
    // S is that of key heads.
    let heads = if back { args.heads } else { args.key_heads };
    let (args, columns) = (WalkArgs { heads, ..args }, args.inner as usize);
    let blocks = cut * key_heads * (args.outer as usize).div_ceil(COLUMNS);
    launch(steps, (name, columns), (blocks, THREADS), &args)?;
    let elements = prepared.problem.extents.dim * prepared.problem.value_dim;
    let blocks = runs * key_heads * elements.div_ceil(SCANNED);
    launch(steps, ("scan", columns), (blocks, SCANNED as u32), &args)
}

/// The results of a pass. Each block walks once more where its results are not finite, and says so.
pub(super) fn compute(steps: &Steps<'_>) -> Result<(), Error> {
    if let Some(found) = steps.prepared.ranges.found {
        steps.clear(found);
    }
    if steps.prepared.pass == Pass::Forward { forward(steps) } else { backward(steps) }
}

/// o and the final states, where they have places.
fn forward(steps: &Steps<'_>) -> Result<(), Error> {
    let (begin, end) = ("initial_state", "final_state");
    sum_segments(steps, false)?;
    walk(steps, &Course { target: Target::O, out: "o", begin, end, dots: false })
}

/// The gradients that have places.
fn backward(steps: &Steps<'_>) -> Result<(), Error> {
    let needs = steps.prepared.needs();
    let wants = |name: &str| steps.prepared.wants(&[name]);
    let (front, behind) = ("initial_state", "dfinal_state");
    let dots = needs.gates || needs.scale;
    if dots || wants("dq") {
        sum_segments(steps, false)?;
        walk(steps, &Course { target: Target::Q, out: "dq", begin: front, end: "", dots })?;
    }
    let end = "dinitial_state";
    if needs.gates || wants("dk") || wants(end) || wants("dv") {
        sum_segments(steps, true)?;
    }
    if needs.gates || wants("dk") {
        let dots = needs.gates;
        walk(steps, &Course { target: Target::K, out: "dk", begin: behind, end: "", dots })?;
    }
    if wants(end) || wants("dv") {
        walk(steps, &Course { target: Target::V, out: "dv", begin: behind, end, dots: false })?;
    }
    flow(steps)?;
    totals(steps)
}

/// dg, from what the walks for dq and dk leave: a multiprocessor has a block, which takes chunks of key heads in
/// turns.
fn flow(steps: &Steps<'_>) -> Result<(), Error> {
    let prepared = steps.prepared;
    if prepared.walks.x_dots.is_none() {
        return Ok(());
    }
    let of = Course { target: Target::Q, out: "", begin: "", end: "", dots: false };
    let args = WalkArgs::new(steps, &of);
    let [y, b] = ["q", "k"].map(|x| map(prepared.storage, steps.place(x), CHUNK as u32));
    let (items, scale) = (by_chunk(steps, 1), args.store_scale);
    let (dg, [x, dots]) = (steps.address("dg").into(), [args.y, args.b]);
    let args = WalkArgs { y, b, x, dots, dg, scale, items: items as i32, ..args };
    let columns = prepared.problem.extents.dim.max(prepared.problem.value_dim);
    let blocks = items.min(steps.multiprocessors());
    launch(steps, ("flow", columns), (blocks, THREADS), &args)
}

/// dg_gamma and dσ, the sums of their parts.
fn totals(steps: &Steps<'_>) -> Result<(), Error> {
    let prepared = steps.prepared;
    let sum = |name: &str, range: Option<MemoryRange>, kernel, heads: usize, numbers: usize| {
        let Some(range) = range else { return Ok(()) };
        let args = LinearArgs {
            numbers: steps.at(range).into(),
            total: steps.address(name).into(),
            batch: 1,
            heads: 1,
            key_heads: heads as i32,
            tokens: numbers as i32,
            ..LinearArgs::new(steps)
        };
        launch_portable(steps, (kernel, Columns::Dim), (heads, Some(256)), &args)
    };
    let key_heads = prepared.problem.extents.key_heads;
    let WalkRanges { gammas, scales, .. } = prepared.walks;
    sum("dg_gamma", gammas, "sum_heads", key_heads, parts(prepared))?;
    let numbers = scales.map_or(0, |range| range.bytes / 4);
    sum("dscale", scales, "sum_all", 1, numbers)
}

#[cfg(test)]
#[path = "../../tests/units/linear_attention/hopper.rs"]
mod tests;
