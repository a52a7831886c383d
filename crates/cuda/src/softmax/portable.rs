//! The kernels of attention and attention_lse of the levels portable and sm80: `kernels/attention/`.

use super::Steps;
use super::dq_partials::DqPartials;
use super::fallback::{self, writes};
use super::pair_args::{FusedArgs, PairArgs, wanted};
use crate::step::Work;
use crate::variant::width;
use etalon_problem::Result;

/// The first columns of the launches that together cover so many.
pub(crate) fn parts(columns: usize) -> impl Iterator<Item = usize> {
    (0..columns).step_by(width(columns))
}

/// The columns of the launch that begins at a column, of so many.
pub(crate) fn part(columns: usize, first: usize) -> usize {
    columns.saturating_sub(first).min(width(columns))
}

fn launch(steps: &Steps<'_>, name: &'static str, blocks: usize, args: &PairArgs, terms: usize) -> Result<()> {
    let (args, variant) = (PairArgs { blocks: blocks as i32, ..*args }, steps.prepared.portable());
    steps.launch_terms((&variant, name), (blocks, variant.threads()), &args, terms)
}

/// Adds a launch, of the level sm80 where it computes the pass.
fn walk(steps: &Steps<'_>, name: &'static str, blocks: usize, args: &PairArgs, terms: usize) -> Result<()> {
    match steps.prepared.tensor_with(name) {
        None => launch(steps, name, blocks, args, terms),
        Some(variant) => steps.launch_terms((&variant, name), (blocks, variant.threads()), args, terms),
    }
}

/// o, if it has a place, and lse.
pub(crate) fn forward(steps: &Steps<'_>) -> Result<()> {
    let prepared = steps.prepared;
    let args = PairArgs::new(steps);
    let values = wanted(args.o, steps.values());
    let columns = prepared.spec.value_dim.filter(|_| args.o.is_there()).unwrap_or(1);
    let most = if prepared.is_sm80() { 128 } else { usize::MAX };
    let at_once = width(columns).min(most);
    let has_fallback = fallback::has_forward(prepared);
    if has_fallback {
        steps.clear_flags();
    }
    for first in (0..columns).step_by(at_once) {
        let terms = steps.extents().dim + values.saturating_sub(first).min(at_once);
        walk(steps, "forward", steps.query_blocks(), &args.at([0, first]), terms)?;
    }
    if has_fallback { fallback::forward(steps) } else { Ok(()) }
}

/// ∂lse/∂q of attention_lse, from the lse that the forward pass has just written: dq of a dlse of 1.
pub(crate) fn gradient_of_lse(steps: &Steps<'_>) -> Result<()> {
    let dq = steps.tensor("gradient");
    dq_by(launch, steps, &PairArgs { dq, delta: 0.into(), wide: 1, ..PairArgs::new(steps) })
}

/// Adds a launch of a kernel over so many blocks that computes so many terms of each pair.
type Launch = fn(&Steps<'_>, &'static str, usize, &PairArgs, usize) -> Result<()>;

fn dq_by(launch: Launch, steps: &Steps<'_>, args: &PairArgs) -> Result<()> {
    let dim = steps.extents().dim;
    parts(dim).try_for_each(|first| {
        let terms = dim + steps.values() + part(dim, first);
        launch(steps, "queries", steps.query_blocks(), &args.at([first, 0]), terms)
    })
}

/// The gradients that have places.
pub(crate) fn backward(steps: &Steps<'_>) -> Result<()> {
    let args = PairArgs::new(steps);
    let has_fallback = steps.prepared.flags.is_some() && ["dq", "dk", "dv"].into_iter().any(|name| writes(steps, name));
    if has_fallback {
        steps.clear_flags();
    }
    // δ of every row, if something needs it.
    if args.delta.0 != 0 {
        launch(steps, "delta", row_blocks(steps), &args, 0)?;
    }
    match &steps.prepared.partials {
        Some(partials) => fused(steps, partials, &args)?,
        None => {
            if args.dq.is_there() && steps.prepared.has_gradient() {
                scale(steps, &args)?;
            } else if args.dq.is_there() {
                dq_by(walk, steps, &args)?;
            }
            dk_and_dv(steps, &args)?;
        }
    }
    if has_fallback {
        fallback::backward(steps)?;
    }
    sinks(steps, &args)?;
    bias(steps, &args, false)
}

/// Blocks of kernels that have a row for each warp.
fn row_blocks(steps: &Steps<'_>) -> usize {
    let warps = steps.prepared.portable().threads() / 32;
    steps.prepared.spec.rows().div_ceil(warps as usize)
}

/// dq of attention_lse from the `gradient` that is given.
pub(crate) fn scale(steps: &Steps<'_>, args: &PairArgs) -> Result<()> {
    let args = PairArgs { q: steps.tensor("gradient"), ..*args };
    launch(steps, "scale", row_blocks(steps), &args, 0)
}

/// dq beside dk and dv, from partial sums.
fn fused(steps: &Steps<'_>, dq_partials: &DqPartials, args: &PairArgs) -> Result<()> {
    let prepared = steps.prepared;
    let (dim, values) = (steps.extents().dim, steps.values());
    let over = args.over(steps.table(prepared.tables.by_keys));
    let firsts: Vec<_> = columns([dim, wanted(args.dv, values)], [dim, values]).collect();
    let variant = prepared.fused();
    // S and dP in each launch, then what each adds to.
    let terms = firsts.len() * (dim + values) + 2 * dim + values;
    let partials = dim.next_multiple_of(64) as f64 * 4.0 / 64.0;
    let work = Work { partials, ..Work::of(&variant, terms) };
    let with = |slots| firsts.iter().map(|&at| FusedArgs { c: over.at(at), slots }).collect();
    dq_partials.run(steps, (&variant, work), with, *args)
}

/// The gradient of the sinks, if it has a place, from the δ of every row.
pub(crate) fn sinks(steps: &Steps<'_>, args: &PairArgs) -> Result<()> {
    if args.dsinks.0 == 0 { Ok(()) } else { launch(steps, "dsinks", steps.extents().query_heads, args, 0) }
}

/// Gradient of the bias, if it has a place. `flagged`: of groups alone whose flags kernels have raised; each head has
/// then its own bias.
pub(crate) fn bias(steps: &Steps<'_>, args: &PairArgs, flagged: bool) -> Result<()> {
    let prepared = steps.prepared;
    if !args.dbias.is_there() {
        return Ok(());
    }
    let tiles = prepared.spec.counts.by_pairs * args.bias_heads as usize;
    let args = PairArgs { blocks: tiles as i32, ..args.over(steps.table(prepared.tables.by_pairs)) };
    let (all, terms) = (PairArgs { flags: 0.into(), ..args }, steps.extents().dim + steps.values());
    match prepared.by_pairs() {
        Some(variant) if flagged => {
            steps.launch((&variant, "dbias"), (fallback::blocks(steps, tiles), variant.threads()), &args)
        }
        Some(variant) => steps.launch_terms((&variant, "dbias"), (tiles, variant.threads()), &all, terms),
        None => launch(steps, "dbias", tiles, &all, terms),
    }
}

fn dk_and_dv(steps: &Steps<'_>, args: &PairArgs) -> Result<()> {
    let (prepared, all) = (steps.prepared, [steps.extents().dim, steps.values()]);
    let [dims, values] = [wanted(args.dk, all[0]), wanted(args.dv, all[1])];
    let over = args.over(steps.table(prepared.tables.by_keys));
    let walk = |name, args: &PairArgs, terms| walk(steps, name, steps.key_blocks(), args, terms);
    if (prepared.wide().is_some() || dims == 0) && prepared.tensor_with("values").is_some() {
        // Of wide operands each has its own kernel, and dv where dk is not asked for.
        if dims > 0 {
            walk("keys", &over, 2 * all[0] + all[1])?;
        }
        return if values > 0 { walk("values", &over, all[0] + values) } else { Ok(()) };
    }
    columns([dims, values], all).try_for_each(|[dim, value]| {
        walk("keys", &over.at([dim, value]), all[0] + all[1] + part(dims, dim) + part(values, value))
    })
}

/// The first columns of D and of E of the launches that cover those wanted. A part that is not wanted any more begins
/// beyond the last column.
pub(crate) fn columns(wanted: [usize; 2], [dim, value_dim]: [usize; 2]) -> impl Iterator<Item = [usize; 2]> + use<> {
    let (mut dims, mut values) = (parts(wanted[0]), parts(wanted[1]));
    std::iter::from_fn(move || match (dims.next(), values.next()) {
        (None, None) => None,
        (first, value) => Some([first.unwrap_or(dim), value.unwrap_or(value_dim)]),
    })
}
