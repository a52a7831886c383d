//! Linear cross-entropy with its classes in shards: each rank holds the rows of w and the biases of some
//! classes, and the other inputs whole.
//!
//! [`forward_shard`] returns what the classes of a rank add to each row: a [`Partial`] for each node of the
//! [tree](super#shards-of-classes) that they hold. [`combine`] makes the totals of those of all ranks, and
//! [`output`] the outputs of the totals. With the totals [`backward_shard`] returns the rank's rows of dw
//! and dbias, and its part of dh in f32; [`combine_dh`] adds up the parts and rounds the sum. The caller
//! moves partials and parts between ranks: [`Partial::to_bytes`] and arrays of f32, or plain tensors of one
//! size on every rank ([`by_name`]). An example of the crate, `shards`, has a process for each rank.
//!
//! With shards that begin at multiples of [`TILE`], everything has the bits of the unsharded passes, at the
//! same [`Level`](crate::Level): dh too, if shards are nodes or return sums of nodes ([`Dh::Nodes`]). With
//! other cuts everything agrees within the bounds. A shard may have no classes, or all.
//!
//! ```
//! use etalon_problem::LinearCrossEntropy;
//! use etalon_simd::linear_cross_entropy::shard::{Dh, Shard, backward_shard, combine, combine_dh};
//! use etalon_simd::linear_cross_entropy::shard::{forward_shard, output};
//! use etalon_simd::linear_cross_entropy::{Cotangents, Inputs, backward, forward};
//! use etalon_simd::Options;
//! use ndarray::{Array2, arr0, array, s};
//!
//! let problem = LinearCrossEntropy::new(2, 1, 600); // tokens, elements, classes
//! let (h, targets) = (array![[1f32], [2.0]], array![2, 599]);
//! let w = Array2::from_shape_fn((600, 1), |(v, _)| (v as f32).sin());
//! let (upper, lower) = (w.slice(s![..512, ..]), w.slice(s![512.., ..]));
//! let inputs = |w| Inputs::new(h.view(), w, targets.view());
//! let options = Options::default();
//!
//! // What each rank does with its rows of w: two nodes of the tree. Then every rank gets the partials of all.
//! let ranks = [Shard::new(&problem, 0..512)?, Shard::new(&problem, 512..600)?];
//! let a = forward_shard(&ranks[0], &inputs(upper), &options)?;
//! let b = forward_shard(&ranks[1], &inputs(lower), &options)?;
//! let totals = combine(&problem, &[(0..512, a.view()), (512..600, b.view())])?;
//! let loss = output(&ranks[0], &inputs(upper), totals.view())?.loss;
//! assert_eq!(loss, forward(&problem, &inputs(w.view()), &options)?.loss);
//!
//! let dloss = arr0(1.0).into_dyn();
//! let cotangents = Cotangents::default().dloss(dloss.view());
//! let gradients = |rank, w| {
//!     backward_shard(rank, &inputs(w), totals.view(), &cotangents, Dh::Sum, &options)
//! };
//! let (a, b) = (gradients(&ranks[0], upper)?, gradients(&ranks[1], lower)?);
//! let dh = combine_dh(&problem, &[(0..512, a.dh.view()), (512..600, b.dh.view())])?;
//! let expected = backward(&problem, &inputs(w.view()), &cotangents, &options)?;
//! assert_eq!(Some(dh), expected.dh);
//! assert_eq!(b.dw, expected.dw.unwrap().slice(s![512.., ..]));
//! # Ok::<(), etalon_problem::Error>(())
//! ```

pub mod by_name;
mod combine;
mod partial;
mod passes;

pub use combine::{combine, combine_dh, combine_dh_into};
pub use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, Shard, TILE};
pub use partial::Combine;

use super::operands::{Gradients as Head, Outputs};
use crate::element::{Element, TensorMut};
use crate::memory::{reserved, zeros};
use crate::run::{add, add_operands, named_places, places_of, zero_results};
use crate::{Options, Workspace};
use etalon_problem::linear_cross_entropy::{Cotangents, Inputs, Output, OutputMut};
use etalon_problem::tensors::Place;
use etalon_problem::{Error, LinearCrossEntropy, Pass, Table, Views, ViewsMut};
use ndarray::{
    Array1, Array2, Array3, ArrayView1, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, Axis,
};
use std::ops::Range;

/// Fails unless inputs and places are those of a pass of the shard.
fn check(
    workspace: &Workspace,
    shard: &Shard<'_>,
    pass: Pass,
    inputs: &Views<'_>,
    places: &ViewsMut<'_>,
) -> Result<(), Error> {
    let (problem, classes) = (shard.problem(), shard.classes());
    let fits =
        |known: &Known| known.pass == pass && known.classes == classes && known.problem == *problem;
    let known = workspace.remember(fits, || {
        let (problem, classes) = (problem.clone(), classes.clone());
        Ok(Known { table: shard.table(pass), problem, pass, classes })
    })?;
    known.table.check_call(inputs, places, false).map(|_| ())
}

/// Facts that a workspace remembers of a shard and a pass.
struct Known {
    problem: LinearCrossEntropy,
    classes: Range<usize>,
    pass: Pass,
    table: Table,
}

/// Results of [`backward_shard`].
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// The contribution of the shard's classes to (C17), `[1][T][D]` or `[nodes][T][D]`; not rounded to `T`.
    pub dh: Array3<f32>,
    /// (C18) of its classes, `[classes][D]`.
    pub dw: Array2<T>,
    /// (C19) of its classes, `[classes]`.
    pub dbias: Option<Array1<T>>,
}

/// Places of the results of [`backward_shard_into`]; a result without a place is not computed.
#[derive(Debug)]
pub struct GradientsMut<'a, T> {
    /// `[1][T][D]` for the sum over all classes of the shard, `[nodes][T][D]` for those over its nodes.
    pub dh: Option<ArrayViewMut3<'a, f32>>,
    /// `[classes][D]`
    pub dw: Option<ArrayViewMut2<'a, T>>,
    /// `[classes]`
    pub dbias: Option<ArrayViewMut1<'a, T>>,
}

impl<T> Default for GradientsMut<'_, T> {
    fn default() -> Self {
        GradientsMut { dh: None, dw: None, dbias: None }
    }
}

/// Partials of every row over the classes of a shard: `[nodes][T]`, for each of [`Shard::nodes`]; of ignored
/// tokens [`Partial::identity`]. Fails at a target that is neither a class of the problem nor ignored.
pub fn forward_shard<T: Element>(
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Array2<Partial>, Error> {
    let workspace = Workspace::new();
    // Errors of the operands are reported before memory is asked for.
    check(&workspace, shard, Pass::Forward, &views(inputs), &ViewsMut::new())?;
    let mut partials = identities(shard.nodes().count(), shard.problem().tokens)?;
    forward_shard_into(&workspace, shard, inputs, partials.view_mut(), options)?;
    Ok(partials)
}

/// Memory for the partials of so many nodes, [`Partial::identity`] at first.
fn identities(nodes: usize, tokens: usize) -> Result<Array2<Partial>, Error> {
    let len = nodes.saturating_mul(tokens);
    let mut partials = reserved(len, "partials")?;
    partials.resize(len, Partial::identity());
    let shaped = Array2::from_shape_vec((nodes, tokens), partials);
    shaped.map_err(|error| Error::value("partials", "an addressable array", error))
}

/// As [`forward_shard`], into an array of the caller, with memory of a workspace; on an error nothing has
/// been written.
pub fn forward_shard_into<T: Element>(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    partials: ArrayViewMut2<'_, Partial>,
    options: &Options,
) -> Result<(), Error> {
    let inputs = views(inputs);
    check(workspace, shard, Pass::Forward, &inputs, &ViewsMut::new())?;
    let shape = [shard.nodes().count(), shard.problem().tokens];
    Error::expect_shape("partials", &shape, partials.shape())?;
    passes::forward(workspace, shard, &inputs, partials, options)
}

/// The outputs, from the totals `[T]` of all classes: on every rank the same. Of the inputs it reads
/// `targets` and weights alone. Fails where a total is not of all classes, or has no target.
pub fn output<T: Element>(
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    totals: ArrayView1<'_, Partial>,
) -> Result<Output<T>, Error> {
    let (workspace, table) = (Workspace::new(), shard.table(Pass::Forward));
    let inputs = views(inputs);
    check(&workspace, shard, Pass::Forward, &inputs, &ViewsMut::new())?;
    let mut output = zero_results(&table, false)?;
    output_views(&workspace, shard, &inputs, totals, &mut places_of(&mut output))?;
    Ok(output)
}

/// As [`output`], into arrays of the caller, with memory of a workspace; on an error nothing has been
/// written.
pub fn output_into<T: Element>(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    totals: ArrayView1<'_, Partial>,
    out: OutputMut<'_, T>,
) -> Result<(), Error> {
    output_views(workspace, shard, &views(inputs), totals, &mut named_places(out))
}

fn output_views(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Views<'_>,
    totals: ArrayView1<'_, Partial>,
    places: &mut ViewsMut<'_>,
) -> Result<(), Error> {
    check(workspace, shard, Pass::Forward, inputs, places)?;
    passes::output(workspace, shard.problem(), inputs, totals, Outputs::new(places)?)
}

/// The gradients of a shard, from the totals `[T]` of all classes: dw and dbias of its classes, and what
/// they add to dh. Fails as [`output`] does.
pub fn backward_shard<T: Element>(
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    totals: ArrayView1<'_, Partial>,
    cotangents: &Cotangents<'_, T>,
    dh: Dh,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    let workspace = Workspace::new();
    let mut operands = views(inputs);
    add_operands(&mut operands, cotangents);
    check(&workspace, shard, Pass::Backward, &operands, &ViewsMut::new())?;
    let (problem, classes) = (shard.problem(), shard.classes().len());
    let LinearCrossEntropy { tokens, dim, .. } = *problem;
    let parts = dh.matrices(shard);
    if parts.checked_mul(4 * tokens * dim).is_none() {
        return Err(Error::Memory { what: "dh".to_string(), bytes: usize::MAX });
    }
    let dbias = problem.bias.then(|| zeros(classes, "dbias"));
    let mut gradients = Gradients {
        dh: zeros((parts, tokens, dim), "dh")?,
        dw: zeros((classes, dim), "dw")?,
        dbias: dbias.transpose()?,
    };
    let Gradients { dh, dw, dbias } = &mut gradients;
    let places = GradientsMut {
        dh: Some(dh.view_mut()),
        dw: Some(dw.view_mut()),
        dbias: dbias.as_mut().map(|dbias| dbias.view_mut()),
    };
    backward_shard_into(&workspace, shard, inputs, totals, cotangents, places, options)?;
    Ok(gradients)
}

/// As [`backward_shard`], into arrays of the caller, and only what is asked for, with memory of a
/// workspace; on an error nothing has been written. With
/// [`wide_gradients`](LinearCrossEntropy::wide_gradients) dw and dbias are of f32, whatever the inputs are.
pub fn backward_shard_into<T: Element, G: Element>(
    workspace: &Workspace,
    shard: &Shard<'_>,
    inputs: &Inputs<'_, T>,
    totals: ArrayView1<'_, Partial>,
    cotangents: &Cotangents<'_, T>,
    places: GradientsMut<'_, G>,
    options: &Options,
) -> Result<(), Error> {
    let GradientsMut { dh, mut dw, mut dbias } = places;
    let mut inputs = views(inputs);
    add_operands(&mut inputs, cotangents);
    let mut head = ViewsMut::new();
    if let Some(dw) = &mut dw {
        add(&mut head, "dw", Place::Storage(dw.view_mut().into_dyn()));
    }
    if let Some(dbias) = &mut dbias {
        add(&mut head, "dbias", Place::Storage(dbias.view_mut().into_dyn()));
    }
    check(workspace, shard, Pass::Backward, &inputs, &head)?;
    drop(head);
    if let Some(dh) = &dh {
        let parts = Dh::of(dh.len_of(Axis(0))).matrices(shard);
        let shape = [parts, shard.problem().tokens, shard.problem().dim];
        Error::expect_shape("dh", &shape, dh.shape())?;
    }
    let (dw, dbias) = (dw.map(TensorMut::from), dbias.map(TensorMut::from));
    let head = Head { dw, dbias, ..Head::default() };
    let places = passes::Places { dh, head };
    passes::backward(workspace, shard, &inputs, totals, places, options)
}

/// The inputs by name.
fn views<'s, T: Element>(inputs: &'s Inputs<'_, T>) -> Views<'s> {
    let mut views = Views::new();
    add_operands(&mut views, inputs);
    views
}
