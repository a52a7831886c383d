//! The first order on the tensor cores of compute capability 9.0: `kernels/linear_attention/sm90a_*.cu`.

use super::CHUNK;
use super::args::{LinearArgs, WalkArgs};
use super::passes::{Target, begin_of, by_chunk, clear_found, launch as launch_portable};
use super::prepared::{Prepared, Steps, range_if};
use crate::args::{Ptr, filled};
use crate::memory::Layout;
use crate::options::Level;
use crate::parts::Parts;
use crate::strided::{StridedTensor, TensorArgs};
use crate::tensor_map::TensorMap;
use crate::variant::{Variant, width};
use etalon_problem::{Decay, Pass, Result};
use std::convert::identity;

/// Threads of a block, and the columns of o that it owns.
const THREADS: u32 = 384;
const COLUMNS: usize = 64;

/// Warps of a block that multiply.
const WARPS: usize = 8;

/// Elements of a state that a block of `scan` takes from segment to segment.
const SCANNED: usize = 128;

/// Tokens of a segment of a sequence of so many: up to 8192 are not cut; longer sequences have 64 segments of at least
/// 2048, or more of 8192. It depends on nothing else, since bits depend on it.
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

/// Takes ranges for the kernels: the addresses of scratch memory in their arguments.
pub(super) fn reserve(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<WalkArgs> {
    if prepared.level != Level::Sm90a {
        return Ok(WalkArgs::default());
    }
    let (e, needs) = (&prepared.problem.extents, &prepared.needs);
    let (cut, chunks) = (cut_segments(prepared), prepared.tables.chunks.rows.len());
    let between = [cut, e.key_heads, e.dim, prepared.problem.value_dim];
    let (backward, cuts) = (prepared.pass == Pass::Backward, cut > 0);
    // Two elements in a word; threads of a block have the state of 128 rows, for either end.
    let states = [chunks, e.key_heads, columns(prepared).pow(2) / 2];
    let middle = [segments(prepared), e.key_heads, 2, 128 * columns(prepared)];
    let parts = [e.key_heads, chunks, WARPS];
    let (of_tokens, of_heads) = (needs.gates && by_token(prepared), needs.gates && !by_token(prepared));
    let mut range = |wanted, shape: &[usize]| range_if(layout, wanted, shape);
    Ok(WalkArgs {
        between: TensorArgs::dense(range(cuts && (backward || needs.before), &between)?, between),
        between_back: TensorArgs::dense(range(cuts && backward, &between)?, between),
        decays: range(cuts && by_token(prepared), &[cut, e.key_heads])?.into(),
        states: range(backward, &states)?.into(),
        middle: range(backward, &middle)?.into(),
        x_dots: range(of_tokens, &[e.batch, e.query_heads, e.tokens])?.into(),
        y_dots: range(of_tokens, &[e.batch, e.key_heads, e.tokens])?.into(),
        z_dots: range(of_tokens, &[chunks, e.key_heads, WARPS])?.into(),
        gammas: range(of_heads, &parts)?.into(),
        scales: range(needs.scale, &parts)?.into(),
        ..WalkArgs::default()
    })
}

/// True if the copy engine takes every operand where kernels find it.
pub(super) fn takes_all(parts: &Parts) -> bool {
    let names = ["q", "k", "v", "o", "dout", "dq", "dk", "dv"];
    let mut places = names.iter().filter_map(|name| parts.part(name)).map(|part| part.place(0));
    let takes = |place: StridedTensor| place.extents[3].is_multiple_of(8) && place.elements() > 0 && place.has_boxes();
    parts.have_whole_rows(&names) && places.all(takes)
}

/// An operand or a result in boxes of 64 columns and `height` rows; none where it is not there.
fn boxes(steps: &Steps<'_>, name: &str, height: usize) -> TensorMap {
    let place = steps.place(name);
    if place.address == 0 {
        return TensorMap::default();
    }
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    let [of_rows, of_heads, of_batch] = place.box_strides();
    let (extents, strides) = ([columns, rows, heads, batch], [of_rows, of_heads, of_batch, 0]);
    TensorMap::new(steps.prepared.storage, place.address, extents, strides, [64, height as u32, 1, 1])
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

/// The columns that kernels of the backward pass are compiled for, of all operands.
fn columns(prepared: &Prepared<'_>) -> usize {
    width(prepared.problem.extents.dim.max(prepared.problem.value_dim))
}

fn launch(steps: &Steps<'_>, name: &'static str, grid: (usize, u32), args: &WalkArgs) -> Result<()> {
    let prepared = steps.prepared;
    let columns = if prepared.pass == Pass::Backward { columns(prepared) } else { args.inner as usize };
    let variant = Variant::hopper_linear(prepared.storage, columns, by_token(prepared));
    steps.launch((&variant, name), grid, args)
}

impl WalkArgs {
    /// Arguments for o, or for what takes its place, without places so far.
    fn new(steps: &Steps<'_>, target: Target) -> WalkArgs {
        let (prepared, args, memory) = (steps.prepared, target.args(steps), &steps.prepared.walks);
        let [y, b, x] = target.operands().map(|(name, _)| boxes(steps, name, CHUNK));
        let back = target.is_back();
        WalkArgs {
            y,
            b,
            x,
            begin: steps.tensor(begin_of(back)),
            segments: steps.table(prepared.tables.segments.range).into(),
            runs: steps.table(prepared.tables.runs.range).into(),
            scale: if back { args.scale } else { 1.0 },
            store_scale: if back { 1.0 } else { args.scale },
            ..filled!(WalkArgs:
                fields(memory, identity) [between between_back states middle gammas scales decays x_dots y_dots z_dots]
                fields(args, identity) [logs found chunks heads key_heads tokens inner outer back]
            )
        }
    }
}

/// o, and the state where a sequence ends.
fn walk(steps: &Steps<'_>) -> Result<()> {
    let args = WalkArgs {
        out: boxes(steps, "o", CHUNK / 2),
        rows: steps.tensor("o"),
        end: steps.tensor("final_state"),
        ..WalkArgs::new(steps, Target::O)
    };
    let name = if args.logs.0 == 0 { "attend_plain" } else { "attend" };
    let blocks = segments(steps.prepared) * args.heads as usize * (args.outer as usize).div_ceil(COLUMNS);
    launch(steps, name, (blocks, THREADS), &args)
}

/// The states with which segments of long sequences begin: S before them, or D behind.
fn sum_segments(steps: &Steps<'_>, back: bool) -> Result<()> {
    let (prepared, key_heads) = (steps.prepared, steps.prepared.problem.extents.key_heads);
    let (cut, runs) = (cut_segments(prepared), prepared.tables.runs.rows.len());
    if cut == 0 {
        return Ok(());
    }
    let (target, name) = if back { (Target::V, "sums_back") } else { (Target::O, "sums") };
    let mut args = WalkArgs::new(steps, target);
    if back {
        args.between = args.between_back;
    } else {
        args.heads = args.key_heads; // S is that of key heads
    }
    let blocks = cut * key_heads * (args.outer as usize).div_ceil(COLUMNS);
    launch(steps, name, (blocks, THREADS), &args)?;
    let elements = prepared.problem.extents.dim * prepared.problem.value_dim;
    let blocks = runs * key_heads * elements.div_ceil(SCANNED);
    launch(steps, "scan", (blocks, SCANNED as u32), &args)
}

/// The results of a pass that have places. Each block walks once more where its results are not finite, and says so.
pub(super) fn compute(steps: &Steps<'_>) -> Result<()> {
    clear_found(steps);
    if steps.prepared.pass == Pass::Forward {
        if steps.prepared.needs.before {
            sum_segments(steps, false)?;
        }
        return walk(steps);
    }
    [false, true].into_iter().try_for_each(|back| sum_segments(steps, back))?;
    gradients(steps)?;
    flow(steps)?;
    totals(steps)
}

/// Both walks of all segments to their middles, then from there on with the gradients of each chunk.
fn gradients(steps: &Steps<'_>) -> Result<()> {
    let (prepared, needs) = (steps.prepared, &steps.prepared.needs);
    let map = |name| boxes(steps, name, CHUNK / 2);
    let args = WalkArgs {
        dots: boxes(steps, "dout", CHUNK),
        out: map("dq"),
        out_dk: map("dk"),
        out_dv: map("dv"),
        rows: steps.tensor("dq"),
        dk: steps.tensor("dk"),
        dv: steps.tensor("dv"),
        begin_back: steps.tensor(begin_of(true)),
        end: steps.tensor("dinitial_state"),
        items: by_chunk(steps, 1) as i32,
        ..WalkArgs::new(steps, Target::O)
    };
    let name = match args.heads > args.key_heads {
        true => "gradients_grouped",
        false if needs.gates || needs.scale => "gradients_dots",
        false => "gradients",
    };
    let blocks = 2 * segments(prepared) * args.key_heads as usize;
    ["states", name].into_iter().try_for_each(|name| launch(steps, name, (blocks, THREADS), &args))
}

/// dg, from what `gradients_dots` leaves: a multiprocessor has a block, which takes chunks of key heads in turns.
fn flow(steps: &Steps<'_>) -> Result<()> {
    if steps.prepared.walks.x_dots.0 == 0 {
        return Ok(());
    }
    let args = WalkArgs::new(steps, Target::O);
    let items = by_chunk(steps, 1);
    let args = WalkArgs {
        x: boxes(steps, "dout", CHUNK),
        dots: args.x,
        dg: steps.address("dg").into(),
        scale: args.store_scale,
        items: items as i32,
        ..args
    };
    launch(steps, "flow", (items.min(steps.multiprocessors()), THREADS), &args)
}

/// dg_gamma and dσ, the sums of their parts.
fn totals(steps: &Steps<'_>) -> Result<()> {
    let prepared = steps.prepared;
    let sum = |name: &str, numbers: Ptr<f32>, kernel, heads: usize, tokens: i32| {
        if numbers.0 == 0 {
            return Ok(());
        }
        let args = LinearArgs {
            numbers: numbers.0.into(),
            total: steps.address(name).into(),
            batch: 1,
            heads: 1,
            key_heads: heads as i32,
            tokens,
            ..LinearArgs::new(steps)
        };
        launch_portable(steps, (kernel, args.dim), (heads, Some(256)), &args)
    };
    let (WalkArgs { gammas, scales, .. }, key_heads) = (&prepared.walks, prepared.problem.extents.key_heads);
    let parts = WARPS * prepared.tables.chunks.rows.len();
    sum("dg_gamma", *gammas, "sum_heads", key_heads, parts as i32)?;
    sum("dscale", *scales, "sum_all", 1, (key_heads * parts) as i32)
}

#[cfg(test)]
#[path = "../../tests/units/linear_attention/hopper.rs"]
mod tests;
