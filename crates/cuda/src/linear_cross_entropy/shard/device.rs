//! Passes of shards on operands that lie on a device.

use super::super::shard_pass::{Step, draft_sums};
use super::check_vocab;
use super::table::{self, draft_step};
use crate::call::storage_of;
use crate::device_pass::DevicePass;
use crate::device_tensor::{DeviceTensors, check as check_tensors};
use crate::levels;
use crate::options::Options;
use crate::workspace::Workspace;
use etalon_problem::linear_cross_entropy::shard::{Dh, Shard, check_shards};
use etalon_problem::{Algorithm, Dtype, Error, LinearCrossEntropy, Pass, Result, Stored};
use std::ops::Range;

/// Prepares the forward pass of a shard: reads the inputs of the forward pass, `w` and `bias` of the shard's classes,
/// and writes `partials`, f32 `[nodes][T][10]`, for each of [`Shard::nodes`]. See [`DevicePass::new`].
pub fn prepare_forward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    options: &Options,
) -> Result<DevicePass> {
    of_step(workspace, shard, Step::Forward, (inputs, outputs), options)
}

/// Prepares what makes `totals`, f32 `[T][10]`, of the `partials` of all shards, `[nodes of all][T][10]`, those of
/// each shard behind those of the shard before. Fails unless these are all classes, each once. Two owners of a target,
/// and partials of other classes, show as NaN in what follows from the totals.
pub fn prepare_combine(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    options: &Options,
) -> Result<DevicePass> {
    let nodes = parts(problem, shards, Dh::Nodes)?;
    let table = table::of_combine(problem, nodes.len());
    check_tensors(&table, inputs, outputs, false)?;
    let call = (Pass::Forward, Dtype::F32, &table);
    DevicePass::of(workspace, call, (inputs, outputs), options, |call| draft_sums(problem, &nodes, call))
}

/// Prepares what makes outputs of the forward pass of `totals`, `[T][10]`: on every device the same. Of the inputs of
/// [`prepare_forward`] it reads `targets` and weights; the others may be absent.
pub fn prepare_output(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    options: &Options,
) -> Result<DevicePass> {
    of_step(workspace, shard, Step::Output, (inputs, outputs), options)
}

/// Prepares the backward pass of a shard: reads the inputs of the backward pass, `w` and `bias` of the shard's
/// classes, and `totals`, `[T][10]`; writes `dw` and `dbias` of the shard's classes, and what these add to `dh`, f32
/// `[1][T][D]` or `[nodes][T][D]`, whatever the type of the inputs.
pub fn prepare_backward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    dh: Dh,
    options: &Options,
) -> Result<DevicePass> {
    of_step(workspace, shard, Step::Backward(dh), (inputs, outputs), options)
}

/// Prepares what adds up the parts of dh that all shards have returned: reads `parts`, f32 `[parts][tokens][D]`, those
/// of each shard behind those of the shard before, and writes `dh`, `[tokens][D]`, of any type. Of [`Dh::Sum`] a
/// shard without classes has no part. The tokens may be some of the problem's: devices may share the sum out.
pub fn prepare_combine_dh(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    (shards, dh): (&[Range<usize>], Dh),
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    options: &Options,
) -> Result<DevicePass> {
    let parts = parts(problem, shards, dh)?;
    let (reads, writes) = (inputs.operands()?, outputs.operands()?);
    let place = writes.iter().find(|(name, ..)| *name == "dh");
    let &(_, shape, stored) = place.ok_or_else(|| Error::missing("dh", None))?;
    let storage = storage_of(stored)?;
    let tokens = shape.first().copied().unwrap_or(0);
    let table = table::of_combine_dh(problem, [parts.len(), tokens]);
    // The type of dh is the caller's: it is checked as if it were that of the parts.
    let same = |&(name, shape, _)| (name, shape, Stored::Float(Dtype::F32));
    table.check_tensors(reads.iter().copied(), writes.iter().map(same), false)?;
    let call = (Pass::Forward, storage, &table);
    DevicePass::of(workspace, call, (inputs, outputs), options, |call| draft_sums(problem, &parts, call))
}

/// The classes of what all shards return.
fn parts(problem: &LinearCrossEntropy, shards: &[Range<usize>], dh: Dh) -> Result<Vec<Range<usize>>> {
    check_shards(problem, shards)?;
    check_vocab(problem)?;
    let of = |classes: &Range<usize>| Ok(dh.parts(&Shard::new(problem, classes.clone())?));
    Ok(shards.iter().map(of).collect::<Result<Vec<_>>>()?.concat())
}

fn of_step(
    workspace: &Workspace,
    shard: &Shard<'_>,
    step: Step,
    (inputs, outputs): (&DeviceTensors<'_>, &DeviceTensors<'_>),
    options: &Options,
) -> Result<DevicePass> {
    check_vocab(shard.problem())?;
    let table = table::of_step(shard, step);
    let storage = check_tensors(&table, inputs, outputs, false)?;
    check(step, storage, options)?;
    let call = (Pass::Forward, storage, &table);
    DevicePass::of(workspace, call, (inputs, outputs), options, |call| draft_step(shard, step, call))
}

/// Fails where the level has no kernel for a step.
pub(super) fn check(step: Step, storage: Dtype, options: &Options) -> Result<()> {
    match step {
        Step::Output => storage.refuse_f64(),
        _ => levels::check(options, Algorithm::LinearCrossEntropy, step.pass(), storage),
    }
}
