//! The returns of shards of the classes, put together along the tree: `combine` and `sum` of
//! `kernels/linear_cross_entropy/shards.cu`.

use super::args::{FoldArgs, NODE};
use crate::args::filled;
use crate::call::PassCall;
use crate::memory::Layout;
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage};
use crate::step::{Steps, Work};
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::shard::{Partial, depth, merges};
use etalon_problem::{Error, LinearCrossEntropy};
use std::ops::Range;

/// Prepares the totals of partials, or dh of its parts. Parts hold these classes: `partials` and `totals` of a table,
/// or `parts` and `dh`.
pub(crate) fn draft_sums(
    problem: &LinearCrossEntropy,
    classes: &[Range<usize>],
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'static>, Error> {
    let mut layout = Layout::default();
    let parts = Parts::new(call, |_| false, &mut layout)?;
    let merges = merges(classes);
    let bytes = bytemuck::cast_slice(&merges);
    let range = Layout::default().range(bytes.len())?;
    let mut tables = TableImage::new(bytes.len());
    tables.put(range, bytes);
    let own = &parts;
    let steps = Steps::new(&own)?;
    let at = steps.table(range).into();
    let args = FoldArgs { merges: at, parts: classes.len() as i32, ..arguments(&steps, problem) };
    fold(&steps, &args, depth(&merges).max(1))?;
    let steps = steps.finish()?;
    let (mode, refusals, blockings) = (None, Vec::new(), Vec::new());
    let choice = Choice { level: Level::Portable, refusals, mode, blockings };
    let tables = Box::new(move || Ok(tables));
    Ok(PassPlan { parts, tables, scratch: layout, steps, choice })
}

/// The arguments that do not depend on the tree.
fn arguments(steps: &Steps<'_, &Parts>, problem: &LinearCrossEntropy) -> FoldArgs {
    let parts = steps.prepared;
    let of = |name: &str| parts.part(name).map_or(0, |part| part.operand.len());
    let count = if parts.has("dh") { of("dh") } else { of("totals") / Partial::WORDS };
    let address = |name| steps.address(name);
    FoldArgs {
        sums: address("parts").into(),
        count: count as i64,
        whole: i32::from(count.is_multiple_of(4) && parts.begin_aligned(&["parts"])),
        wide: i32::from(parts.part("dh").is_some_and(|part| part.bytes == 4)),
        entropy: i32::from(problem.outputs.entropy),
        smoothing: i32::from(problem.label_smoothing > 0.0),
        argmax: i32::from(problem.outputs.argmax),
        ..filled!(FoldArgs: names(address) [partials totals dh])
    }
}

/// Adds the kernel, of which each thread keeps so many nodes or vectors in shared memory.
fn fold(steps: &Steps<'_, &Parts>, args: &FoldArgs, depth: usize) -> Result<(), Error> {
    let is_dh = steps.prepared.has("dh");
    let (name, threads, each, bytes) = if is_dh { ("sum", 64, 4, 16) } else { ("combine", 32, 1, NODE[0]) };
    let blocks = (args.count as usize).div_ceil(each * threads);
    let grid = (blocks, threads as u32, (threads * bytes * depth) as u32);
    let variant = Variant::cross_entropy_shards(steps.prepared.storage);
    steps.push((&variant, name), grid, args, Work::NONE)
}
