//! Passes of shards on operands of the host.

use super::super::shard_pass::{Step, draft_sums};
use super::check_vocab;
use super::device::check;
use super::table::{self, draft_step};
use crate::call::{PassCall, storage_of};
use crate::host::compute;
use crate::memory::{filled, reserved};
use crate::options::Options;
use crate::workspace::Workspace;
use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, Shard, check_partials, check_parts, check_shards};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Result, View, ViewMut, Views, ViewsMut};
use ndarray::{Array, Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, Dimension, IntoDimension};
use std::ops::Range;

/// Sums of the classes of a shard for every token: `[nodes][T]`, for each of [`Shard::nodes`]; to ignored tokens
/// [`Partial::identity`]. `inputs` are those of the forward pass by name, `w` and `bias` of the shard's classes. Fails
/// at a target that is neither a class of the problem nor ignored, and as [`run_in`](crate::run_in) does.
pub fn forward_shard(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    options: &Options,
) -> Result<Array2<Partial>> {
    let shape = [shard.nodes().count(), shard.problem().tokens];
    let mut words: Array3<f32> = words_of([shape[0], shape[1], Partial::WORDS], [])?;
    let mut places = ViewsMut::new().with("partials", &mut words);
    of_step(workspace, (shard, Step::Forward), (inputs, None), &mut places, options)?;
    drop(places);
    shaped("partials", shape, partials_of(&words)?)
}

/// The totals of all tokens `[T]`, from what all shards returned, `[nodes][T]` each, in the order of their classes.
/// Fails unless these are all classes, each once; unless each partial has the classes of its node or, of an ignored
/// token, none; and where two own a target, whose token it names.
pub fn combine(
    workspace: &Workspace,
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView2<'_, Partial>)],
    options: &Options,
) -> Result<Array1<Partial>> {
    let tokens = problem.tokens;
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    check_vocab(problem)?;
    let shapes = shards.iter().map(|(classes, rows)| (classes, Dh::Nodes, rows.shape()));
    let nodes = check_parts(problem, shapes, &[tokens])?;
    let partials: Vec<_> = shards.iter().flat_map(|(_, rows)| rows.outer_iter()).collect();
    check_partials(&nodes, tokens, |node, token| partials[node][token])?;
    let words: Array3<f32> = words_of([nodes.len(), tokens, Partial::WORDS], partials.iter().flatten())?;
    let mut totals: Array2<f32> = words_of([tokens, Partial::WORDS], [])?;
    let inputs = Views::new().with("partials", &words);
    let mut places = ViewsMut::new().with("totals", &mut totals);
    let table = table::of_combine(problem, nodes.len());
    let draft = |call: &PassCall<'_, '_>| draft_sums(problem, &nodes, call);
    compute(workspace, (Pass::Forward, Dtype::F32, &table), (&inputs, &mut places), options, draft)?;
    drop(places);
    Ok(partials_of(&totals)?.into())
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
) -> Result<()> {
    of_step(workspace, (shard, Step::Output), (inputs, Some(totals)), outputs, options)
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
) -> Result<()> {
    of_step(workspace, (shard, Step::Backward(dh)), (inputs, Some(totals)), outputs, options)
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
) -> Result<()> {
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    check_vocab(problem)?;
    Error::expect_shape("dh", &problem.h_shape(), dh.shape())?;
    let storage = storage_of(dh.stored())?;
    let [tokens, dim] = problem.h_shape();
    let shapes = shards.iter().map(|(classes, dh)| (classes, Dh::of(dh.shape()[0]), dh.shape()));
    let classes = check_parts(problem, shapes, &[tokens, dim])?;
    let matrices = shards.iter().filter(|(classes, _)| !classes.is_empty()).flat_map(|(_, dh)| dh.outer_iter());
    let mut list = filled(0.0, &[classes.len(), tokens, dim], "parts of dh")?;
    list.iter_mut().zip(matrices.flatten()).for_each(|(to, &x)| *to = x);
    let parts = shaped("parts", [classes.len(), tokens, dim], list)?;
    let inputs = Views::new().with("parts", &parts);
    let places = &mut ViewsMut::new().with("dh", dh);
    let table = table::of_combine_dh(problem, [classes.len(), tokens]);
    let call = (Pass::Forward, storage, &table);
    compute(workspace, call, (&inputs, places), options, |call| draft_sums(problem, &classes, call))
}

/// Computes a step, from totals if it takes them.
fn of_step(
    workspace: &Workspace,
    (shard, step): (&Shard<'_>, Step),
    (inputs, totals): (&Views<'_>, Option<ArrayView1<'_, Partial>>),
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<()> {
    let words = totals.map(|totals| checked(shard.problem(), inputs, totals)).transpose()?;
    let mut all = words.iter().fold(Views::new(), |all, words| all.with("totals", words));
    inputs.iter().for_each(|(name, view)| all.push(name, view.view()));
    check_vocab(shard.problem())?;
    let table = table::of_step(shard, step);
    let storage = table.check_call(&all, outputs, false)?;
    check(step, storage, options)?;
    let call = (Pass::Forward, storage, &table);
    compute(workspace, call, (&all, outputs), options, |call| draft_step(shard, step, call))
}

/// The totals as they lie on a device. Fails where that of a token that counts is not of all classes, or has no
/// target.
fn checked(problem: &LinearCrossEntropy, inputs: &Views<'_>, totals: ArrayView1<'_, Partial>) -> Result<Array2<f32>> {
    let LinearCrossEntropy { tokens, ignore_index, .. } = *problem;
    Error::expect_shape("totals", &[tokens], totals.shape())?;
    let Some(View::I64(targets)) = inputs.get("targets") else {
        return Err(Error::missing("targets", None));
    };
    Error::expect_shape("targets", &[tokens], targets.shape())?;
    for ((i, total), &target) in totals.iter().enumerate().zip(targets) {
        if target != ignore_index {
            problem.class_of(i, target)?;
            total.check_total(problem, i, target)?;
        }
    }
    words_of([tokens, Partial::WORDS], totals)
}

/// Memory for partials as they lie on a device: at first these, in their order.
fn words_of<'p, const N: usize, D: Dimension>(
    shape: [usize; N],
    partials: impl IntoIterator<Item = &'p Partial>,
) -> Result<Array<f32, D>>
where
    [usize; N]: IntoDimension<Dim = D>,
{
    let mut list = filled(0.0, &shape, "partials")?;
    let words = partials.into_iter().flat_map(|partial| partial.words());
    list.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_bits(word));
    shaped("partials", shape, list)
}

/// The partials of these words, in their order.
fn partials_of(words: &Array<f32, impl Dimension>) -> Result<Vec<Partial>> {
    let mut list = reserved(words.len() / Partial::WORDS, "partials")?;
    for row in words.rows() {
        list.push(Partial::from_words(std::array::from_fn(|at| row[at].to_bits()))?);
    }
    Ok(list)
}

fn shaped<T, const N: usize, D: Dimension>(name: &str, shape: [usize; N], list: Vec<T>) -> Result<Array<T, D>>
where
    [usize; N]: IntoDimension<Dim = D>,
{
    Array::from_shape_vec(shape, list).map_err(|error| Error::value(name, "an addressable array", error))
}
