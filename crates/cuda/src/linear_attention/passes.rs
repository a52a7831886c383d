//! The levels portable and sm80, and the second order:
//! `kernels/linear_attention/{portable,totals,sm80,portable_second_order}.cu`.

use super::args::LinearArgs;
use super::prepared::Steps;
use super::{CHUNK, SIDE};
use crate::args::{filled, int};
use crate::options::Level;
use crate::strided::TensorArgs;
use crate::variant::{Variant, width};
use etalon_problem::{Pass, Result};
use std::convert::identity;

/// Kernels by their level and their mode for non-finite numbers: `linear_attention/problem.cuh`.
#[derive(Clone, Copy)]
struct Kernels {
    tensor: bool,
    mode: i32,
}

const PORTABLE: Kernels = Kernels { tensor: false, mode: 0 };
const TENSOR: Kernels = Kernels { tensor: true, mode: 0 };
const CLEANSE: Kernels = Kernels { tensor: true, mode: 1 };

/// The portable kernels after those of tensor cores, which leave nothing to them but results.
const MERGE: Kernels = Kernels { tensor: false, mode: 2 };

/// The mode of `flow` after kernels that leave no gradient of every gate to merge with.
const AFRESH: i32 = 3;

impl Kernels {
    fn args(self, args: &LinearArgs) -> LinearArgs {
        let narrow = if self.tensor { args.narrow } else { 0.into() };
        LinearArgs { mode: self.mode, narrow, ..*args }
    }
}

impl LinearArgs {
    pub fn new(steps: &Steps<'_>) -> LinearArgs {
        let prepared = steps.prepared;
        let (e, memory) = (&prepared.problem.extents, &prepared.memory);
        let (tables, tensor) = (&prepared.tables, |name| steps.tensor(name));
        LinearArgs {
            q1: tensor("ddq"),
            k1: tensor("ddk"),
            v1: tensor("ddv"),
            dout1: tensor("cot_o"),
            // One of each pair is 0.
            logs: steps.address("g").max(steps.address("g_gamma")).into(),
            log_tangents: steps.address("ddg").max(steps.address("ddg_gamma")).into(),
            by_head: i32::from(prepared.has("g_gamma")),
            ddscale: steps.address("ddscale").into(),
            chunks: steps.table(tables.chunks.range).into(),
            strips: steps.table(tables.strips.range).into(),
            lines: steps.table(tables.lines.range).into(),
            heads: int(e.query_heads),
            value_dim: int(prepared.problem.value_dim),
            scale: prepared.problem.scale as f32,
            state_scale: 1.0,
            store_scale: 1.0,
            dot_scale: 1.0,
            ..filled!(LinearArgs:
                names(tensor) [q k v dout]
                fields(memory, identity) [gates slopes found]
                fields(e, int) [batch key_heads tokens dim]
            )
        }
    }
}

/// A gradient, as o of another problem: docs/linear_attention.md, Closure.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Target {
    O,
    Q,
    K,
    V,
}

impl Target {
    /// True if rows see later tokens, and the state behind them.
    pub fn is_back(self) -> bool {
        matches!(self, Target::K | Target::V)
    }

    /// The operands that are q, k and v of the other problem, each with its tangent.
    pub fn operands(self) -> [(&'static str, &'static str); 3] {
        let [q, k, v, dout] = [("q", "ddq"), ("k", "ddk"), ("v", "ddv"), ("dout", "cot_o")];
        match self {
            Target::O => [q, k, v],
            Target::Q => [dout, v, k],
            Target::K => [v, dout, q],
            Target::V => [k, q, dout],
        }
    }

    /// The arguments of `attend` that computes it, into nothing so far.
    pub fn args(self, steps: &Steps<'_>) -> LinearArgs {
        let (c, memory, back) = (LinearArgs::new(steps), &steps.prepared.memory, self.is_back());
        let (states, states1, narrow) = match back {
            false => (memory.states, memory.states1, memory.narrow),
            true => (memory.other, memory.other1, memory.other_narrow.0.into()),
        };
        let [(y, y1), (b, b1), (x, x1)] =
            self.operands().map(|(name, tangent)| (steps.tensor(name), steps.tensor(tangent)));
        let turned = matches!(self, Target::Q | Target::K);
        let (inner, outer) = if turned { (c.value_dim, c.dim) } else { (c.dim, c.value_dim) };
        LinearArgs {
            y,
            y1,
            b,
            b1,
            x,
            x1,
            states,
            states1,
            narrow,
            inner,
            outer,
            back: i32::from(back),
            turned: i32::from(turned),
            blank: i32::from(!steps.prepared.has(begin_of(back))),
            ..c
        }
    }
}

/// The state that sequences begin with, or `back` that behind their ends.
pub(super) fn begin_of(back: bool) -> &'static str {
    if back { "dfinal_state" } else { "initial_state" }
}

/// Launches a portable kernel for so many columns, with the threads of its module unless others are given.
pub(super) fn launch(
    steps: &Steps<'_>,
    (name, columns): (&'static str, i32),
    (blocks, threads): (usize, Option<u32>),
    args: &LinearArgs,
) -> Result<()> {
    let of = |second| Variant::linear(steps.prepared.storage, columns as usize, second);
    let second = of(true);
    let variant = if second.kernels().contains(&name) { second } else { of(false) };
    let threads = threads.unwrap_or_else(|| variant.threads());
    // More blocks than a launch can have are refused when it is pushed.
    let args = LinearArgs { blocks: i32::try_from(blocks).unwrap_or(i32::MAX), ..*args };
    let (name, waits) = waits(name, args.mode);
    let blocks = if waits { blocks.min(IDLE) } else { blocks };
    steps.launch((&variant, name), (blocks, threads), &args)
}

/// Blocks of a launch that may have nothing to do: enough for any device, and few that say so.
const IDLE: usize = 256;

/// The kernel to launch, and whether it may find nothing to do: few blocks then do the work of many (`each_block`).
fn waits(name: &'static str, mode: i32) -> (&'static str, bool) {
    match name {
        _ if mode == 0 => (name, false),
        "sums" => ("mend_sums", true),
        "attend" => ("mend", true),
        _ => (name, ["fill_gates", "scan", "flow"].contains(&name)),
    }
}

fn launch_wide(steps: &Steps<'_>, name: &'static str, blocks: usize, args: &LinearArgs) -> Result<()> {
    let all = args.outer as usize;
    (0..all).step_by(width(all)).try_for_each(|first| {
        let args = LinearArgs { first: first as i32, ..*args };
        launch(steps, (name, args.outer), (blocks, None), &args)
    })
}

/// Launches a kernel of sm80, of factors and results with so many columns.
fn launch_tensor(
    steps: &Steps<'_>,
    (name, columns): (&'static str, [i32; 2]),
    blocks: usize,
    args: &LinearArgs,
) -> Result<()> {
    let prepared = steps.prepared;
    let whole = prepared.have_whole_rows(&["q", "k", "v", "dout"]);
    let variant = Variant::linear_tensor(prepared.storage, columns.map(|x| x as usize), whole);
    steps.launch((&variant, name), (blocks, variant.threads()), args)
}

fn attend_second(steps: &Steps<'_>, args: &LinearArgs) -> Result<()> {
    launch_wide(steps, "attend_second", by_strip(steps, args), args)
}

fn attend(steps: &Steps<'_>, kernels: Kernels, args: &LinearArgs) -> Result<()> {
    let (args, blocks) = (kernels.args(args), by_strip(steps, args));
    match kernels.tensor {
        true => launch_tensor(steps, ("attend", [args.inner, args.outer]), blocks, &args),
        false => launch_wide(steps, "attend", blocks, &args),
    }
}

/// A block for each micro-chunk of the heads whose rows are computed; none where these have no result.
fn by_strip(steps: &Steps<'_>, args: &LinearArgs) -> usize {
    if !args.out.is_there() && args.dots.0 == 0 && args.state_dots.0 == 0 {
        return 0;
    }
    let heads = if args.back != 0 { args.key_heads } else { args.heads };
    steps.prepared.tables.strips.rows.len() * heads as usize
}

/// A block for each chunk and key head, or for each piece of so many.
pub(super) fn by_chunk(steps: &Steps<'_>, pieces: usize) -> usize {
    steps.prepared.tables.chunks.rows.len() * steps.prepared.problem.extents.key_heads * pieces
}

/// The sums of log-decays within the chunks.
fn fill_gates(steps: &Steps<'_>, args: &LinearArgs) -> Result<()> {
    if args.gates.0 == 0 && args.slopes.0 == 0 {
        return Ok(());
    }
    launch(steps, ("fill_gates", args.dim), (by_chunk(steps, 1), Some(CHUNK as u32)), args)
}

/// S before every chunk, or D behind it, from the state of one end to that of the other, which is left at `end`; in
/// the second order with its tangent.
fn sum_states(steps: &Steps<'_>, kernels: Kernels, back: bool, end: &str) -> Result<()> {
    let (prepared, is_second) = (steps.prepared, steps.prepared.pass == Pass::DoubleBackward);
    let c = if back { Target::V } else { Target::O }.args(steps);
    let tangents = if back { ["cot_final_state", "ginitial_state"] } else { ["ddinitial_state", "gdfinal_state"] };
    let [begin, end, begin1, end1] = [begin_of(back), end, tangents[0], tangents[1]].map(|name| steps.tensor(name));
    let c = LinearArgs { begin, end, begin1, end1, ..kernels.args(&c) };
    let args = match back {
        false => LinearArgs { y: c.k, y1: c.k1, x: c.v, x1: c.v1, scale: 1.0, ..c },
        true => LinearArgs { y: c.q, y1: c.q1, x: c.dout, x1: c.dout1, ..c },
    };
    // A thread for each element of every state.
    let elements = prepared.problem.extents.dim * prepared.problem.value_dim;
    let states = prepared.tables.lines.rows.len() * prepared.problem.extents.key_heads;
    let grid = (states * elements.div_ceil(256), Some(256));
    if kernels.tensor {
        launch_tensor(steps, ("sums", [args.inner, args.outer]), by_chunk(steps, 1), &args)?;
    } else {
        let pieces = prepared.problem.extents.dim.div_ceil(SIDE);
        launch_wide(steps, "sums", by_chunk(steps, pieces), &args)?;
        if is_second {
            launch_wide(steps, "tangent_sums", by_chunk(steps, pieces), &args)?;
        }
    }
    launch(steps, (if is_second { "scan_second" } else { "scan" }, args.dim), grid, &args)
}

/// The results that have places; after kernels of sm90a those that are not finite, if somebody looks for these.
pub(super) fn compute(steps: &Steps<'_>) -> Result<()> {
    let prepared = steps.prepared;
    let results = match prepared.pass {
        Pass::Forward => attend_states,
        Pass::Backward => gradients,
        Pass::Step => return step(steps),
        _ => return double_backward(steps),
    };
    let rounds: &[Kernels] = match (prepared.level, prepared.watches) {
        (Level::Sm90a, false) => return Ok(()),
        (Level::Sm90a, true) => &[MERGE],
        (Level::Sm80, true) => &[TENSOR, CLEANSE, MERGE],
        (Level::Sm80, false) => &[TENSOR],
        _ => &[PORTABLE],
    };
    fill_gates(steps, &rounds[0].args(&LinearArgs::new(steps)))?;
    if prepared.level != Level::Sm90a {
        clear_found(steps);
    }
    rounds.iter().try_for_each(|&kernels| results(steps, kernels))
}

pub(super) fn clear_found(steps: &Steps<'_>) {
    let found = steps.prepared.memory.found.0;
    if found != 0 {
        steps.fill(found, 4, 0);
    }
}

/// o and the final states.
fn attend_states(steps: &Steps<'_>, kernels: Kernels) -> Result<()> {
    sum_states(steps, kernels, false, "final_state")?;
    let args = Target::O.args(steps);
    attend(steps, kernels, &LinearArgs { out: steps.tensor("o"), store_scale: args.scale, scale: 1.0, ..args })
}

fn gradients(steps: &Steps<'_>, kernels: Kernels) -> Result<()> {
    let needs = &steps.prepared.needs;
    if needs.before {
        sum_states(steps, kernels, false, "")?;
        // dq, x and the parts of dσ.
        let args = rows(steps, Target::Q, "dq");
        let (dots, scale) = (steps.prepared.memory.dots, args.scale);
        let args = LinearArgs { dots, store_scale: scale, dot_scale: scale, scale: 1.0, ..args };
        attend(steps, kernels, &pairs_if(args.out.is_there() || needs.scale, args))?;
    }
    if needs.behind {
        sum_states(steps, kernels, true, "dinitial_state")?;
    }
    // dk, y and dv.
    let args = rows(steps, Target::K, "dk");
    attend(steps, kernels, &pairs_if(args.out.is_there(), args))?;
    attend(steps, kernels, &LinearArgs { out: steps.tensor("dv"), ..Target::V.args(steps) })?;
    totals(steps, kernels, ["dg", "dg_gamma", "dscale"])
}

/// The arguments of `attend` for a gradient of q, with x; or for one of k, with y.
fn rows(steps: &Steps<'_>, target: Target, out: &str) -> LinearArgs {
    let (args, memory) = (target.args(steps), &steps.prepared.memory);
    let (dot, dots) = if target == Target::Q { (args.q, memory.x_dots) } else { (args.k, memory.y_dots) };
    LinearArgs { out: steps.tensor(out), dot, state_dots: dots.0.into(), ..args }
}

/// Arguments without pairs unless they are wanted.
fn pairs_if(wanted: bool, args: LinearArgs) -> LinearArgs {
    if wanted { args } else { LinearArgs { x: TensorArgs::default(), ..args } }
}

/// The gradients of the log-decays and of the scale, from what other kernels left.
fn totals(steps: &Steps<'_>, kernels: Kernels, [by_token, by_head, scale]: [&str; 3]) -> Result<()> {
    let (prepared, needs) = (steps.prepared, &steps.prepared.needs);
    let LinearArgs { other, other1, x_dots, y_dots, other_narrow, dots, dg, .. } = prepared.memory;
    let args = kernels.args(&Target::Q.args(steps));
    let args = LinearArgs { other, other1, x_dots, y_dots, other_narrow, ..args };
    if needs.gates {
        let summed = prepared.wants(by_head);
        let dg = if summed { dg } else { steps.address(by_token).into() };
        let args = LinearArgs { dg, numbers: dg.0.into(), total: steps.address(by_head).into(), ..args };
        let afresh = summed && prepared.level == Level::Sm90a;
        let flow = LinearArgs { mode: if afresh { AFRESH } else { args.mode }, ..args };
        let blocks = by_chunk(steps, 1);
        match (kernels.tensor, prepared.pass) {
            (true, _) => launch_tensor(steps, ("flow", [args.dim, args.value_dim]), blocks, &flow)?,
            (_, Pass::DoubleBackward) => launch(steps, ("flow_second", args.dim), (blocks, None), &flow)?,
            _ => launch(steps, ("flow", args.dim), (blocks, None), &flow)?,
        }
        if summed {
            launch(steps, ("sum_heads", args.dim), (prepared.problem.extents.key_heads, Some(256)), &args)?;
        }
    }
    if needs.scale {
        let args = LinearArgs { numbers: dots.0.into(), total: steps.address(scale).into(), ..args };
        launch(steps, ("sum_all", args.dim), (1, Some(256)), &args)?;
    }
    Ok(())
}

/// The new states, and o if it has a place.
fn step(steps: &Steps<'_>) -> Result<()> {
    let problem = &steps.prepared.problem;
    let (given, end) = (steps.tensor("initial_state"), steps.tensor("final_state"));
    let begin = if given.is_there() { given } else { end };
    let args = LinearArgs { begin, end, out: steps.tensor("o"), ..LinearArgs::new(steps) };
    let states = problem.extents.batch * problem.extents.key_heads;
    launch(steps, ("step", args.dim), (states * problem.value_dim.div_ceil(32), Some(256)), &args)
}

/// The outputs of double_backward that have places.
fn double_backward(steps: &Steps<'_>) -> Result<()> {
    let needs = &steps.prepared.needs;
    fill_gates(steps, &LinearArgs::new(steps))?;
    if needs.before {
        sum_states(steps, PORTABLE, false, "")?;
    }
    if needs.behind {
        sum_states(steps, PORTABLE, true, "")?;
    }
    let args = Target::O.args(steps);
    attend_second(steps, &LinearArgs { out: steps.tensor("gdout"), state_scale: args.scale, ..args })?;
    by_rows_second(steps, Target::Q, "gq")?;
    by_rows_second(steps, Target::K, "gk")?;
    attend_second(steps, &LinearArgs { out: steps.tensor("gv"), ..Target::V.args(steps) })?;
    if needs.scale {
        of_scale(steps)?;
    }
    totals(steps, PORTABLE, ["gg", "gg_gamma", "gscale"])
}

/// gq, and the tangent of x: of q·(u Sᵀ), in which q and the rest have one each; or gk, and that of y: of k·(v Dᵀ).
fn by_rows_second(steps: &Steps<'_>, target: Target, out: &str) -> Result<()> {
    let args = rows(steps, target, out);
    let (dot, scale) = if target == Target::Q { (args.q1, args.scale) } else { (args.k1, 1.0) };
    attend_second(steps, &pairs_if(args.out.is_there(), LinearArgs { state_scale: scale, ..args }))?;
    if !dot.is_there() {
        return Ok(());
    }
    let args = LinearArgs { out: TensorArgs::default(), dot, dot_scale: scale, add: 1, ..args };
    attend(steps, PORTABLE, &pairs_if(false, args))
}

/// The parts of gσ (R19): of each token q·ṫ + ddq·t, where t is dq / σ and ṫ its tangent.
fn of_scale(steps: &Steps<'_>) -> Result<()> {
    let args = Target::Q.args(steps);
    let dots = steps.prepared.memory.dots;
    let args = LinearArgs { dot: args.q, dots, scale: 1.0, ddscale: 0.into(), ..args };
    attend_second(steps, &args)?;
    if args.q1.is_there() {
        attend(steps, PORTABLE, &LinearArgs { dot: args.q1, add: 1, ..args })?;
    }
    Ok(())
}
