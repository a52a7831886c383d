//! Passes of shards on operands of the host.

use super::super::shard_pass::{Step, draft_shard};
use super::super::sums::draft_sums;
use super::check_vocab;
use super::device::check;
use super::table;
use crate::call::{Operands, PassCall, storage_of};
use crate::host::Placed;
use crate::memory::{filled, reserved};
use crate::options::Options;
use crate::workspace::Workspace;
use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, Shard, check_partials, check_parts, check_shards};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, View, ViewMut, Views, ViewsMut};
use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut1, Axis};
use std::ops::Range;

/// Sums of the classes of a shard for every token: `[nodes][T]`, for each of [`Shard::nodes`]; to ignored tokens
/// [`Partial::identity`]. `inputs` are those of the forward pass by name, `w` and `bias` of the shard's classes. Fails
/// at a target that is neither a class of the problem nor ignored, and as [`run_in`](crate::run_in) does.
pub fn forward_shard(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    options: &Options,
) -> Result<Array2<Partial>, Error> {
    let shape = [shard.nodes().count(), shard.problem().tokens];
    let mut words = words_for(shape)?;
    let mut places = ViewsMut::new().with("partials", &mut words);
    run(workspace, shard, Step::Forward, inputs, &mut places, options)?;
    drop(places);
    shaped(shape, partials_of(&words)?)
}

/// The totals of all tokens `[T]`, from what all shards returned, `[nodes][T]` each, in the order of their classes.
/// Fails unless these are all classes, each once; unless each partial has the classes of its node or, of an ignored
/// token, none; and where two own a target, whose token it names.
pub fn combine(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView2<'_, Partial>)],
    options: &Options,
) -> Result<Array1<Partial>, Error> {
    let tokens = problem.tokens;
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    check_vocab(problem)?;
    let shapes = shards.iter().map(|(classes, rows)| (classes, Dh::Nodes, rows.shape()));
    let nodes = check_parts(problem, shapes, &[tokens])?;
    let partials: Vec<_> = shards.iter().flat_map(|(_, rows)| rows.outer_iter()).collect();
    check_partials(&nodes, tokens, |node, token| partials[node][token])?;
    let mut words = words_for([nodes.len(), tokens])?;
    let all = partials.iter().flatten();
    words.rows_mut().into_iter().zip(all).for_each(|(row, partial)| write(row, *partial));
    let mut totals = words_for([1, tokens])?.index_axis_move(Axis(0), 0);
    let inputs = Views::new().with("partials", &words);
    let mut places = ViewsMut::new().with("totals", &mut totals);
    let table = table::of_combine(problem, nodes.len());
    sums(workspace, problem, (&nodes, Dtype::F32), &table, (&inputs, &mut places), options)?;
    drop(places);
    Ok(Array1::from_vec(partials_of(&totals.insert_axis(Axis(0)))?))
}

/// Writes those outputs of the forward pass that have a place in `outputs`, from the totals `[T]` of all classes: on
/// every rank the same. Of the `inputs` of [`forward_shard`] it reads `targets` and weights; the others may be absent.
/// Fails where a total is not of all classes, or has no target.
pub fn output(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let words = checked(shard.problem(), inputs, totals)?;
    let inputs = with_totals(inputs, &words);
    run(workspace, shard, Step::Output, &inputs, outputs, options)
}

/// Writes those gradients of a shard that have a place in `outputs`, from the totals `[T]` of all classes: `dw` and
/// `dbias` of its classes, and what these add to `dh`, f32 `[1][T][D]` or `[nodes][T][D]`. `inputs` are those of
/// [`forward_shard`] with the cotangents of the outputs. Fails as [`output`] does.
pub fn backward_shard(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
    outputs: &mut ViewsMut<'_>,
    dh: Dh,
    options: &Options,
) -> Result<(), Error> {
    let words = checked(shard.problem(), inputs, totals)?;
    let inputs = with_totals(inputs, &words);
    let step = Step::Backward { summed: dh == Dh::Sum };
    run(workspace, shard, step, &inputs, outputs, options)
}

/// Writes the gradient of h `[T][D]`, from what all shards returned of it, in the order of their classes: of each the
/// sum over its classes, `[1][T][D]`, or those over its nodes, `[nodes][T][D]`. It is added up in f32 and rounded
/// once. Fails unless the shards are all classes, each once.
pub fn combine_dh(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView3<'_, f32>)],
    dh: ViewMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    check_vocab(problem)?;
    Error::expect_shape("dh", &problem.h_shape(), dh.shape())?;
    let storage = storage_of(dh.stored())?;
    let [tokens, dim] = problem.h_shape();
    let of = |x: &ArrayView3<'_, f32>| Dh::of(x.len_of(Axis(0)));
    let shapes = shards.iter().map(|(classes, dh)| (classes, of(dh), dh.shape()));
    let classes = check_parts(problem, shapes, &[tokens, dim])?;
    let with_classes = shards.iter().filter(|(classes, _)| !classes.is_empty());
    let matrices = with_classes.flat_map(|(_, dh)| dh.outer_iter());
    let mut list = filled(0.0, &[classes.len(), tokens, dim], "parts of dh")?;
    list.iter_mut().zip(matrices.flatten()).for_each(|(to, &x)| *to = x);
    let shape = (classes.len(), tokens, dim);
    let parts = Array3::from_shape_vec(shape, list);
    let parts = parts.map_err(|error| Error::value("parts", "an addressable array", error))?;
    let inputs = Views::new().with("parts", &parts);
    let mut places = ViewsMut::new().with("dh", dh);
    let table = table::of_combine_dh(problem, [classes.len(), tokens]);
    sums(workspace, problem, (&classes, storage), &table, (&inputs, &mut places), options)
}

/// Computes a step.
fn run(
    workspace: &Workspace,
    shard: &Shard<'_>,
    step: Step,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    check_vocab(shard.problem())?;
    let table = table::of_step(shard, step);
    let storage = table.check_call(inputs, outputs, false)?;
    check(step, storage, options)?;
    let state = workspace.device(options.device)?;
    let (used, operands) = (table::used(table, step), Operands::Host(inputs, Some(outputs)));
    let call = PassCall::new(state.device.target, (step.pass(), storage), &used, operands, options);
    let plan = draft_shard((shard.problem(), shard.classes()), step, &call)?;
    Placed::of(&state, plan, inputs, Some(outputs))?.compute(outputs)
}

/// Puts together what all shards returned.
fn sums(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    (classes, storage): (&[Range<usize>], Dtype),
    table: &Table,
    (inputs, outputs): (&Views<'_>, &mut ViewsMut<'_>),
    options: &Options,
) -> Result<(), Error> {
    let state = workspace.device(options.device)?;
    let operands = Operands::Host(inputs, Some(outputs));
    let call = PassCall::new(state.device.target, (Pass::Forward, storage), table, operands, options);
    let plan = draft_sums(problem, classes, &call)?;
    Placed::of(&state, plan, inputs, Some(outputs))?.compute(outputs)
}

/// The totals as they lie on a device. Fails where that of a token that counts is not of all classes, or has no
/// target.
fn checked(
    problem: &LinearCrossEntropy,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
) -> Result<Array2<f32>, Error> {
    let LinearCrossEntropy { tokens, ignore_index, .. } = *problem;
    Error::expect_shape("totals", &[tokens], totals.shape())?;
    let Some(View::I64(targets)) = inputs.get("targets") else {
        return Err(Error::missing("targets", None));
    };
    Error::expect_shape("targets", &[tokens], targets.shape())?;
    let mut words = words_for([1, tokens])?.index_axis_move(Axis(0), 0);
    for ((i, total), (&target, words)) in totals.iter().enumerate().zip(targets.iter().zip(words.rows_mut())) {
        if target != ignore_index {
            problem.class_of(i, target)?;
            total.check_total(problem, i, target)?;
        }
        write(words, *total);
    }
    Ok(words)
}

/// The inputs, and the totals.
fn with_totals<'v>(inputs: &'v Views<'_>, totals: &'v Array2<f32>) -> Views<'v> {
    let mut all = Views::new().with("totals", totals);
    inputs.iter().for_each(|(name, view)| all.push(name, view.view()));
    all
}

/// Writes a partial as it lies on a device.
fn write(mut row: ArrayViewMut1<'_, f32>, partial: Partial) {
    row.iter_mut().zip(partial.words()).for_each(|(to, word)| *to = f32::from_bits(word));
}

/// MemoryRange for partials as they lie on a device.
fn words_for([nodes, tokens]: [usize; 2]) -> Result<Array3<f32>, Error> {
    let list = filled(0.0, &[nodes, tokens, Partial::WORDS], "partials")?;
    let array = Array3::from_shape_vec((nodes, tokens, Partial::WORDS), list);
    array.map_err(|error| Error::value("partials", "an addressable array", error))
}

/// The partials of these words, in their order.
fn partials_of(words: &Array3<f32>) -> Result<Vec<Partial>, Error> {
    let mut list = reserved(words.len() / Partial::WORDS, "partials")?;
    for row in words.rows() {
        list.push(Partial::from_words(std::array::from_fn(|at| row[at].to_bits()))?);
    }
    Ok(list)
}

fn shaped(shape: [usize; 2], partials: Vec<Partial>) -> Result<Array2<Partial>, Error> {
    let array = Array2::from_shape_vec((shape[0], shape[1]), partials);
    array.map_err(|error| Error::value("partials", "an addressable array", error))
}
