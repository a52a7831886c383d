//! The levels portable and sm80, and the second order:
//! `kernels/linear_attention/{portable,totals,sm80,portable_second_order}.cu`.

use super::SIDE;
use super::args::LinearArgs;
use super::prepared::{Needs, Steps};
use crate::options::Level;
use crate::tensor_args::TensorArgs;
use crate::variant::{Variant, width};
use etalon_problem::{Error, Pass};

/// The level that computes, and what its kernels do with numbers that are not finite: `linear_attention/problem.cuh`.
#[derive(Debug, Clone, Copy)]
struct LevelChoice {
    level: Level,
    mode: i32,
}

const CLEANSE: i32 = 1;
const MERGE: i32 = 2;
const AFRESH: i32 = 3;

/// The portable kernels alone.
const PORTABLE: LevelChoice = LevelChoice { level: Level::Portable, mode: 0 };

/// The portable kernels after those of tensor cores, which leave nothing to them but results.
const FALLBACK: LevelChoice = LevelChoice { level: Level::Portable, mode: MERGE };

impl LevelChoice {
    fn is_tensor(self) -> bool {
        self.level == Level::Sm80
    }

    /// The arguments of its kernels.
    fn args(self, args: &LinearArgs) -> LinearArgs {
        let narrow = if self.is_tensor() { args.narrow } else { 0.into() };
        LinearArgs { mode: self.mode, narrow, ..*args }
    }
}

/// Calls `compute` with each of the choices that together compute a pass.
fn each_choice(steps: &Steps<'_>, compute: impl Fn(LevelChoice) -> Result<(), Error>) -> Result<(), Error> {
    let prepared = steps.prepared;
    if prepared.level == Level::Portable {
        return compute(PORTABLE);
    }
    if let Some(found) = prepared.ranges.found {
        steps.clear(found);
    }
    compute(LevelChoice { level: Level::Sm80, mode: 0 })?;
    if prepared.watches {
        compute(LevelChoice { level: Level::Sm80, mode: CLEANSE })?;
        compute(FALLBACK)?;
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

/// Width of accumulators: that of D, or that of E.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Columns {
    Dim,
    Value,
}

impl Columns {
    fn of(self, args: &LinearArgs) -> usize {
        match self {
            Columns::Dim => args.dim as usize,
            Columns::Value => args.value_dim as usize,
        }
    }

    fn other(self) -> Columns {
        match self {
            Columns::Dim => Columns::Value,
            Columns::Value => Columns::Dim,
        }
    }
}

impl Target {
    /// The arguments of `attend` that computes it, into nothing so far.
    pub fn args(self, steps: &Steps<'_>) -> LinearArgs {
        let (c, prepared) = (LinearArgs::new(steps), steps.prepared);
        let ranges = &prepared.ranges;
        let (dim, value_dim) = (c.dim, c.value_dim);
        let back = matches!(self, Target::K | Target::V);
        let [states, states1, narrow] = match back {
            false => [ranges.before, ranges.before_tangent, ranges.before_narrow],
            true => [ranges.behind, ranges.behind_tangent, ranges.behind_narrow],
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
        LinearArgs {
            y,
            y1,
            b,
            b1,
            x,
            x1,
            states: steps.range(states).into(),
            states1: steps.range(states1).into(),
            narrow: steps.range(narrow).into(),
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

/// Launches a portable kernel, of accumulators with so many columns; with the threads of its module unless others are
/// given.
pub(super) fn launch(
    steps: &Steps<'_>,
    (name, columns): (&'static str, Columns),
    (blocks, threads): (usize, Option<u32>),
    args: &LinearArgs,
) -> Result<(), Error> {
    let (storage, columns) = (steps.prepared.storage, columns.of(args));
    let second = Variant::linear(storage, columns, true);
    let is_second = second.kernels().contains(&name);
    let variant = if is_second { second } else { Variant::linear(storage, columns, false) };
    let threads = threads.unwrap_or_else(|| variant.threads());
    // More blocks than a launch can have are refused when it is pushed.
    let args = LinearArgs { blocks: i32::try_from(blocks).unwrap_or(i32::MAX), ..*args };
    let (name, waits) = waits(name, args.mode);
    let blocks = if waits { blocks.min(IDLE) } else { blocks };
    steps.launch((&variant, name), (blocks, threads), &args)
}

/// Blocks of a launch that may have nothing to do: enough for any device, and few that say so.
const IDLE: usize = 256;

/// The kernel to launch, and whether it may find nothing to do and has the work of many blocks done by few:
/// `each_block`.
fn waits(name: &'static str, mode: i32) -> (&'static str, bool) {
    match name {
        _ if mode == 0 => (name, false),
        "sums" => ("mend_sums", true),
        "attend" => ("mend", true),
        _ => (name, ["fill_gates", "scan", "flow"].contains(&name)),
    }
}

/// Launches a portable kernel once for each part of its columns.
fn launch_wide(
    steps: &Steps<'_>,
    kernel: (&'static str, Columns),
    blocks: usize,
    args: &LinearArgs,
) -> Result<(), Error> {
    let all = kernel.1.of(args);
    let mut parts = (0..all).step_by(width(all));
    parts.try_for_each(|first| launch(steps, kernel, (blocks, None), &args.at(first)))
}

/// Launches a kernel of the level sm80.
fn launch_tensor(
    steps: &Steps<'_>,
    (name, columns): (&'static str, Columns),
    blocks: usize,
    args: &LinearArgs,
) -> Result<(), Error> {
    let prepared = steps.prepared;
    let whole = prepared.have_whole_rows(&["q", "k", "v", "dout"]);
    let both = [columns.other().of(args), columns.of(args)];
    let variant = Variant::linear_tensor(prepared.storage, both, whole);
    steps.launch((&variant, name), (blocks, variant.threads()), args)
}

fn attend_second(steps: &Steps<'_>, target: Target, args: &LinearArgs) -> Result<(), Error> {
    launch_wide(steps, ("attend_second", target.columns()), by_strip(steps, args), args)
}

fn attend(steps: &Steps<'_>, choice: LevelChoice, target: Target, args: &LinearArgs) -> Result<(), Error> {
    let (kernel, blocks) = (("attend", target.columns()), by_strip(steps, args));
    let args = choice.args(args);
    match choice.is_tensor() {
        true => launch_tensor(steps, kernel, blocks, &args),
        false => launch_wide(steps, kernel, blocks, &args),
    }
}

/// A block for each micro-chunk of the heads whose rows are computed.
fn by_strip(steps: &Steps<'_>, args: &LinearArgs) -> usize {
    let heads = if args.back != 0 { args.key_heads } else { args.heads };
    steps.prepared.tables.strips.rows.len() * heads as usize
}

/// A block for each chunk and key head, or for each piece of so many.
pub(super) fn by_chunk(steps: &Steps<'_>, pieces: usize) -> usize {
    steps.prepared.tables.chunks.rows.len() * steps.prepared.problem.extents.key_heads * pieces
}

/// The sums of log-decays within the chunks.
fn fill_gates(steps: &Steps<'_>, args: &LinearArgs) -> Result<(), Error> {
    if args.gates.0 == 0 && args.slopes.0 == 0 {
        return Ok(());
    }
    let work = (by_chunk(steps, 1), Some(super::CHUNK as u32));
    launch(steps, ("fill_gates", Columns::Dim), work, args)
}

/// The arguments of `sums` for S before every chunk, or D behind it.
fn states(steps: &Steps<'_>, back: bool) -> LinearArgs {
    let c = if back { Target::V } else { Target::O }.args(steps);
    match back {
        false => LinearArgs { y: c.k, y1: c.k1, x: c.v, x1: c.v1, scale: 1.0, ..c },
        true => LinearArgs { y: c.q, y1: c.q1, x: c.dout, x1: c.dout1, ..c },
    }
}

/// Blocks of `scan`, a thread for each element of every state.
fn by_element(steps: &Steps<'_>) -> usize {
    let (problem, lines) = (&steps.prepared.problem, &steps.prepared.tables.lines);
    let pieces = (problem.extents.dim * problem.value_dim).div_ceil(256);
    lines.rows.len() * problem.extents.key_heads * pieces
}

/// S before every chunk, or D behind it, from the state of one end to that of the other.
fn sum_states(steps: &Steps<'_>, choice: LevelChoice, back: bool, ends: [&str; 2]) -> Result<(), Error> {
    let [begin, end] = ends.map(|name| steps.tensor(name));
    let args = choice.args(&LinearArgs { begin, end, ..states(steps, back) });
    let sums = ("sums", Columns::Value);
    if choice.is_tensor() {
        launch_tensor(steps, sums, by_chunk(steps, 1), &args)?;
    } else {
        let pieces = steps.prepared.problem.extents.dim.div_ceil(SIDE);
        launch_wide(steps, sums, by_chunk(steps, pieces), &args)?;
    }
    launch(steps, ("scan", Columns::Dim), (by_element(steps), Some(256)), &args)
}

/// Results of a pass, by the kernels of a choice.
type Results = fn(&Steps<'_>, LevelChoice) -> Result<(), Error>;

/// The results of a pass that have places; where kernels of sm90a have computed them, those that are not finite, if
/// somebody looks for these.
pub(super) fn compute(steps: &Steps<'_>) -> Result<(), Error> {
    let prepared = steps.prepared;
    let results: Results = match prepared.pass {
        Pass::Forward => attend_states,
        Pass::Backward => gradients,
        Pass::Step => return step(steps),
        _ => return double_backward(steps),
    };
    let args = LinearArgs::new(steps);
    match prepared.level {
        Level::Sm90a if !prepared.watches => Ok(()),
        Level::Sm90a => {
            fill_gates(steps, &FALLBACK.args(&args))?;
            results(steps, FALLBACK)
        }
        _ => {
            fill_gates(steps, &args)?;
            each_choice(steps, |choice| results(steps, choice))
        }
    }
}

/// o and the final states.
fn attend_states(steps: &Steps<'_>, choice: LevelChoice) -> Result<(), Error> {
    sum_states(steps, choice, false, ["initial_state", "final_state"])?;
    let args = Target::O.args(steps);
    let args = LinearArgs { out: steps.tensor("o"), store_scale: args.scale, scale: 1.0, ..args };
    if args.out.is_there() { attend(steps, choice, Target::O, &args) } else { Ok(()) }
}

fn gradients(steps: &Steps<'_>, choice: LevelChoice) -> Result<(), Error> {
    let needs = steps.prepared.needs();
    if needs.before {
        sum_states(steps, choice, false, ["initial_state", ""])?;
        by_queries(steps, choice, &needs)?;
    }
    if needs.behind {
        sum_states(steps, choice, true, ["dfinal_state", "dinitial_state"])?;
    }
    by_keys(steps, choice, &needs)?;
    totals(steps, choice, &needs, ["dg", "dg_gamma", "dscale"])
}

/// dq, x and the parts of dσ.
fn by_queries(steps: &Steps<'_>, choice: LevelChoice, needs: &Needs) -> Result<(), Error> {
    let (args, ranges) = (Target::Q.args(steps), &steps.prepared.ranges);
    let args = LinearArgs {
        out: steps.tensor("dq"),
        dot: args.q,
        state_dots: steps.range(ranges.x).into(),
        dots: steps.range(ranges.by_scale).into(),
        store_scale: args.scale,
        dot_scale: args.scale,
        scale: 1.0,
        ..args
    };
    let args = pairs_if(args.out.is_there() || needs.scale, args);
    attend(steps, choice, Target::Q, &args)
}

/// dk, dv and y.
fn by_keys(steps: &Steps<'_>, choice: LevelChoice, needs: &Needs) -> Result<(), Error> {
    let (out, state_dots) = (steps.tensor("dk"), steps.range(steps.prepared.ranges.y).into());
    if out.is_there() || needs.gates {
        let args = Target::K.args(steps);
        let args = pairs_if(out.is_there(), LinearArgs { out, dot: args.k, state_dots, ..args });
        attend(steps, choice, Target::K, &args)?;
    }
    let out = steps.tensor("dv");
    if !out.is_there() {
        return Ok(());
    }
    attend(steps, choice, Target::V, &LinearArgs { out, ..Target::V.args(steps) })
}

/// Arguments without pairs unless they are wanted.
fn pairs_if(wanted: bool, args: LinearArgs) -> LinearArgs {
    if wanted { args } else { LinearArgs { x: TensorArgs::default(), ..args } }
}

/// The gradients of the log-decays and of the scale, from what other kernels left.
fn totals(
    steps: &Steps<'_>,
    choice: LevelChoice,
    needs: &Needs,
    [by_token, by_head, scale]: [&str; 3],
) -> Result<(), Error> {
    let (prepared, ranges) = (steps.prepared, &steps.prepared.ranges);
    let (args, behind) = (Target::Q.args(steps), Target::K.args(steps));
    let args = LinearArgs {
        other: behind.states,
        other1: behind.states1,
        x_dots: steps.range(ranges.x).into(),
        y_dots: steps.range(ranges.y).into(),
        other_narrow: behind.narrow.0.into(),
        ..choice.args(&args)
    };
    if needs.gates {
        let summed = prepared.wants(&[by_head]);
        let dg = if summed { steps.range(ranges.by_gate) } else { steps.address(by_token) };
        let total = steps.address(by_head).into();
        let args = LinearArgs { dg: dg.into(), numbers: dg.into(), total, ..args };
        // The kernels of sm90a leave no gradient of every gate to merge with.
        let afresh = summed && prepared.level == Level::Sm90a;
        let flow = LinearArgs { mode: if afresh { AFRESH } else { args.mode }, ..args };
        let blocks = by_chunk(steps, 1);
        if choice.is_tensor() {
            launch_tensor(steps, ("flow", Columns::Value), blocks, &flow)?;
        } else {
            let second = prepared.pass == Pass::DoubleBackward;
            let name = if second { "flow_second" } else { "flow" };
            launch(steps, (name, Columns::Dim), (blocks, None), &flow)?;
        }
        if summed {
            let blocks = prepared.problem.extents.key_heads;
            launch(steps, ("sum_heads", Columns::Dim), (blocks, Some(256)), &args)?;
        }
    }
    if needs.scale {
        let numbers = steps.range(ranges.by_scale).into();
        let args = LinearArgs { numbers, total: steps.address(scale).into(), ..args };
        launch(steps, ("sum_all", Columns::Dim), (1, Some(256)), &args)?;
    }
    Ok(())
}

/// The new states, and o if it has a place.
fn step(steps: &Steps<'_>) -> Result<(), Error> {
    let problem = &steps.prepared.problem;
    let end = steps.tensor("final_state");
    let given = steps.tensor("initial_state");
    let begin = if given.is_there() { given } else { end };
    let args = LinearArgs { begin, end, out: steps.tensor("o"), ..LinearArgs::new(steps) };
    let states = problem.extents.batch * problem.extents.key_heads;
    let blocks = states * problem.value_dim.div_ceil(32);
    launch(steps, ("step", Columns::Dim), (blocks, Some(256)), &args)
}

/// S before every chunk, or D behind it, with its tangent. Of the ends: where both begin, and where the
/// tangent ends.
fn sum_states_second(steps: &Steps<'_>, back: bool, [begin, begin1, end1]: [&str; 3]) -> Result<(), Error> {
    let [begin, begin1, end1] = [begin, begin1, end1].map(|name| steps.tensor(name));
    let args = LinearArgs { begin, begin1, end1, ..states(steps, back) };
    let blocks = by_chunk(steps, steps.prepared.problem.extents.dim.div_ceil(SIDE));
    launch_wide(steps, ("sums", Columns::Value), blocks, &args)?;
    launch_wide(steps, ("tangent_sums", Columns::Value), blocks, &args)?;
    let work = (by_element(steps), Some(256));
    launch(steps, ("scan_second", Columns::Dim), work, &args)
}

/// The outputs of double_backward that have places.
fn double_backward(steps: &Steps<'_>) -> Result<(), Error> {
    let needs = steps.prepared.needs();
    fill_gates(steps, &LinearArgs::new(steps))?;
    if needs.before {
        sum_states_second(steps, false, ["initial_state", "ddinitial_state", "gdfinal_state"])?;
    }
    if needs.behind {
        sum_states_second(steps, true, ["dfinal_state", "cot_final_state", "ginitial_state"])?;
    }
    second_by_queries(steps, needs.gates)?;
    second_by_keys(steps, needs.gates)?;
    if needs.scale {
        of_scale(steps)?;
    }
    totals(steps, PORTABLE, &needs, ["gg", "gg_gamma", "gscale"])
}

/// gdout and gq, and the tangent of x: of q·(u Sᵀ), in which q and the rest have one each.
fn second_by_queries(steps: &Steps<'_>, gates: bool) -> Result<(), Error> {
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
fn second_by_keys(steps: &Steps<'_>, gates: bool) -> Result<(), Error> {
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
