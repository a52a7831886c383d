//! The passes of shards by name, for callers that know types only when they run.
//!
//! Partials are plain tensors of f32, [`Partial::words`] on their last axis. Ranks send tensors of one size to each
//! other: behind the partials of its nodes a shard may have others, which add nothing.
//!
//! | function | reads | writes |
//! |---|---|---|
//! | [`forward`] | the inputs of the forward pass, w and bias of the shard | `partials` `[parts][T][10]` |
//! | [`combine`](combine()) | `partials` `[shards][parts][T][10]` | `totals` `[T][10]` |
//! | [`output`] | the inputs of [`forward`], `totals` | loss, lse … |
//! | [`backward`] | as [`output`], cotangents | `dw`, `dbias`; `dh`, f32 `[1][T][D]` or `[nodes][T][D]` |
//! | [`combine_dh`] | `parts`, f32 `[shards][matrices][tokens][D]` | `dh` `[tokens][D]`, rounded |
//!
//! A result without a place is not computed. Errors name the tensor; on an error nothing has been written.

use super::{Dh, Partial, Shard, combine as combine_partials, combine_dh_into, identities, passes};
use crate::element::TensorMut;
use crate::linear_cross_entropy::operands::{Gradients as Head, Outputs};
use crate::memory::reserved;
use crate::named::{Inputs, float_place, place};
use crate::{Options, Workspace};
use etalon_problem::linear_cross_entropy::shard::{check_shards, nodes};
use etalon_problem::{
    Error, LinearCrossEntropy, Operand, Pass, Precision, Role, Table, Views, ViewsMut,
};
use ndarray::{Array1, Array2, ArrayView, ArrayViewMut1, Axis, Dimension, Ix2, Ix3, Ix4, s};
use std::ops::Range;

/// Writes what the classes of a shard add to every token, as [`forward_shard`](super::forward_shard) returns it:
/// `partials`, a part for each of [`Shard::nodes`] and, in any further ones, [`Partial::identity`].
pub fn forward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let (count, tokens) = (shard.nodes().count(), shard.problem().tokens);
    let parts = outputs.get("partials").and_then(|x| x.shape().first().copied());
    let shape = [parts.unwrap_or(count).max(count), tokens, Partial::WORDS];
    let mut table = shard.table(Pass::Forward);
    table.operands.retain(|operand| operand.role == Role::Input);
    table.operands.push(wide("partials", shape, Role::Output));
    table.check_call(inputs, outputs, false)?.refuse_f64()?;
    let Some(mut words) = float_place::<Ix3>(outputs, "partials")? else { return Ok(()) };
    let mut partials = identities(count, tokens)?;
    passes::forward(workspace, shard, inputs, partials.view_mut(), options)?;
    let of_nodes = partials.iter().copied();
    let all = of_nodes.chain(std::iter::repeat(Partial::identity()));
    words.rows_mut().into_iter().zip(all).for_each(put);
    Ok(())
}

/// Writes the words of a partial to a row.
fn put((mut row, partial): (ArrayViewMut1<'_, f32>, Partial)) {
    row.iter_mut().zip(partial.words()).for_each(|(to, word)| *to = f32::from_bits(word));
}

/// Writes the `totals` of all tokens from the `partials` of all shards, in the order of their classes, along the tree:
/// as [`combine`](super::combine()) does, with its errors.
pub fn combine(
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
) -> Result<(), Error> {
    let tokens = problem.tokens;
    let parts = padded(problem, shards, inputs, "partials")?;
    let partials = [shards.len(), parts, tokens, Partial::WORDS];
    let mut table = problem.table(Pass::Forward);
    table.operands = vec![
        wide("partials", partials, Role::Input),
        wide("totals", [tokens, Partial::WORDS], Role::Output),
    ];
    table.check_call(inputs, outputs, false)?;
    let Some(mut words) = float_place::<Ix2>(outputs, "totals")? else { return Ok(()) };
    let all = needed::<Ix4>(inputs, "partials")?;
    let mut lists = Vec::with_capacity(shards.len());
    for (classes, parts) in shards.iter().zip(all.outer_iter()) {
        let shape = (nodes(problem.vocab, classes.clone()).count(), tokens);
        let list = partials_of(parts.slice(s![..shape.0, .., ..]))?;
        lists.push((classes.clone(), Array2::from_shape_vec(shape, list).map_err(too_large)?));
    }
    let views: Vec<_> = lists.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let totals = combine_partials(problem, &views)?;
    words.rows_mut().into_iter().zip(totals).for_each(put);
    Ok(())
}

/// Writes the outputs of the forward pass that have a place, from the `totals` of all tokens: on every rank the same.
/// Fails as [`output`](super::output()) does.
pub fn output(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
) -> Result<(), Error> {
    let table = with_totals(shard, shard.table(Pass::Forward));
    table.check_call(inputs, outputs, false)?.refuse_f64()?;
    let totals = totals_of(inputs)?;
    passes::output(workspace, shard.problem(), inputs, totals.view(), Outputs::new(outputs)?)
}

/// Writes the gradients of a shard that have a place, from the `totals` of all tokens: `dw` and `dbias` of its
/// classes, and `dh`, what these add to the gradient of h: one matrix for their sum, or one for each node ([`Dh`]).
pub fn backward(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let LinearCrossEntropy { tokens, dim, .. } = *shard.problem();
    let found = outputs.get("dh").and_then(|x| x.shape().first().copied());
    let matrices = Dh::of(found.unwrap_or(1)).matrices(shard);
    let mut table = with_totals(shard, shard.table(Pass::Backward));
    table.operands.retain(|operand| operand.name != "dh");
    table.operands.push(wide("dh", [matrices, tokens, dim], Role::Output));
    table.check_call(inputs, outputs, false)?.refuse_f64()?;
    let totals = totals_of(inputs)?;
    let dh = float_place::<Ix3>(outputs, "dh")?;
    let head =
        Head { dw: place(outputs, "dw")?, dbias: place(outputs, "dbias")?, ..Head::default() };
    let places = passes::Places { dh, head };
    passes::backward(workspace, shard, inputs, totals.view(), places, options)
}

/// Writes the gradient of h, `dh`, from the `parts` of all shards, in the order of their classes: of each one matrix
/// for the sum over its classes, or one for each of its nodes and further ones, which are not read. It is added up
/// along the tree in f32 and rounded once, to the type of its place. Both may hold some of the tokens.
pub fn combine_dh(
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
) -> Result<(), Error> {
    let tokens = outputs.get("dh").and_then(|dh| dh.shape().first().copied());
    let problem =
        LinearCrossEntropy { tokens: tokens.unwrap_or(problem.tokens), ..problem.clone() };
    let found = axis_of(inputs, "parts", 1);
    let matrices = match found {
        Some(1) => 1,
        _ => padded(&problem, shards, inputs, "parts")?,
    };
    let mut table = problem.table(Pass::Forward);
    let shape = [shards.len(), matrices, problem.tokens, problem.dim];
    table.operands = vec![wide("parts", shape, Role::Input)];
    table.check_call(inputs, &ViewsMut::new(), false)?;
    if let Some((name, _)) = outputs.iter().find(|(name, _)| *name != "dh") {
        return Err(Error::unexpected(name, None));
    }
    let all = needed::<Ix4>(inputs, "parts")?;
    let parts = shards.iter().zip(all.outer_iter()).map(|(classes, parts)| {
        let own = nodes(problem.vocab, classes.clone()).count();
        let count = if matrices == 1 { 1 } else { own };
        (classes.clone(), parts.slice_move(s![..count, .., ..]))
    });
    let parts: Vec<_> = parts.collect();
    match place::<Ix2>(outputs, "dh")? {
        Some(TensorMut::F32(dh)) => combine_dh_into(&problem, &parts, dh),
        Some(TensorMut::Bf16(dh)) => combine_dh_into(&problem, &parts, dh),
        Some(TensorMut::F16(dh)) => combine_dh_into(&problem, &parts, dh),
        None => Ok(()),
    }
}

/// A tensor that only shards have, of f32.
fn wide(name: &'static str, shape: impl Into<Vec<usize>>, role: Role) -> Operand {
    let (axes, shape, option, becomes) = (Vec::new(), shape.into(), None, None);
    Operand { name, primal: name, axes, shape, role, precision: Precision::Wide, option, becomes }
}

/// A table with the totals as a further input.
fn with_totals(shard: &Shard<'_>, mut table: Table) -> Table {
    let shape = [shard.problem().tokens, Partial::WORDS];
    table.operands.push(wide("totals", shape, Role::Input));
    table
}

/// The extent of an axis of an input, if it is there.
fn axis_of(inputs: &Views<'_>, name: &str, axis: usize) -> Option<usize> {
    inputs.get(name).and_then(|x| x.shape().get(axis).copied())
}

/// Parts of each shard in an input: as many as it has on its second axis, or those of the shard with the most nodes,
/// if these are more. Fails unless the shards are all classes of a sound problem.
fn padded(
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    inputs: &Views<'_>,
    name: &str,
) -> Result<usize, Error> {
    check_shards(problem, shards)?;
    let counts = shards.iter().map(|classes| nodes(problem.vocab, classes.clone()).count());
    Ok(axis_of(inputs, name, 1).into_iter().chain(counts).max().unwrap_or(0))
}

/// An input of f32 that has been checked.
fn needed<'a, D: Dimension>(
    inputs: &'a Views<'_>,
    name: &str,
) -> Result<ArrayView<'a, f32, D>, Error> {
    Inputs(inputs).float(name)?.ok_or_else(|| Error::missing(name, None))
}

fn totals_of(inputs: &Views<'_>) -> Result<Array1<Partial>, Error> {
    Ok(partials_of(needed::<Ix2>(inputs, "totals")?)?.into())
}

/// The partials of these words, in their order.
fn partials_of<D: Dimension>(words: ArrayView<'_, f32, D>) -> Result<Vec<Partial>, Error> {
    let mut list = reserved(words.len() / Partial::WORDS, "partials")?;
    for row in words.lanes(Axis(words.ndim() - 1)) {
        list.push(Partial::from_words(std::array::from_fn(|at| row[at].to_bits()))?);
    }
    Ok(list)
}

fn too_large(error: ndarray::ShapeError) -> Error {
    Error::value("partials", "an addressable array", error)
}
