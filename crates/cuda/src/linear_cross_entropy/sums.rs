//! The returns of shards of the classes, put together along the tree: `combine` and `sum` of
//! `kernels/linear_cross_entropy/shards.cu`.

use super::args::{FoldArgs, NODE};
use crate::args::filled;
use crate::call::PassCall;
use crate::family::Family;
use crate::memory::Layout;
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage};
use crate::step::{Steps, Work};
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::shard::{Partial, depth, merges};
use etalon_problem::{LinearCrossEntropy, Result};
use std::ops::Range;

/// `totals` of a table from `partials`, or `dh` from `parts`, which hold these classes.
pub(crate) fn draft_sums(
    problem: &LinearCrossEntropy,
    classes: &[Range<usize>],
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'static>> {
    let mut layout = Layout::default();
    let parts = Parts::new(call, |_| false, &mut layout)?;
    let merges = merges(classes);
    let bytes = bytemuck::cast_slice(&merges);
    let range = Layout::default().range(bytes.len())?;
    let mut tables = TableImage::new(bytes.len());
    tables.put(range, bytes);
    let own = &parts;
    let steps = Steps::new(&own)?;
    let length = |name: &str| parts.part(name).map_or(0, |part| part.operand.len());
    let (name, count, [threads, each, bytes]) = match parts.has("dh") {
        true => ("sum", length("dh"), [64, 4, 16]),
        false => ("combine", length("totals") / Partial::WORDS, [32, 1, NODE[0]]),
    };
    let address = |name| steps.address(name);
    let args = FoldArgs {
        sums: address("parts").into(),
        merges: steps.table(range).into(),
        count: count as i64,
        parts: classes.len() as i32,
        whole: i32::from(count.is_multiple_of(4) && parts.begin_aligned(&["parts"])),
        wide: i32::from(parts.part("dh").is_some_and(|part| part.bytes == 4)),
        entropy: i32::from(problem.outputs.entropy),
        smoothing: i32::from(problem.label_smoothing > 0.0),
        argmax: i32::from(problem.outputs.argmax),
        ..filled!(FoldArgs: names(address) [partials totals dh])
    };
    // Each thread keeps a branch of the tree, nodes or vectors, in shared memory.
    let shared = threads * bytes * depth(&merges).max(1);
    let grid = (count.div_ceil(each * threads), threads as u32);
    let variant = Variant::cross_entropy(Family::CrossEntropyShards, parts.storage, false);
    steps.push((&variant, name), grid, shared as u32, &args, Work::NONE)?;
    let steps = steps.finish()?;
    let (mode, refusals, blockings) = (None, Vec::new(), Vec::new());
    let choice = Choice { level: Level::Portable, refusals, mode, blockings };
    Ok(PassPlan { parts, tables: Box::new(move || Ok(tables)), scratch: layout, steps, choice })
}
