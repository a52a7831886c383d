//! Linear_cross_entropy with its classes in shards, on the cuda tier.

use crate::tensor::{Tensors, views_mut};
use crate::tier::Request;
use crate::tiers::door;
use crate::tiers::shards::{by_nodes, check_empty, check_ignored, part, unwritten};
use crate::tiers::typed::{StoredNumber, of_types, operands, stored};
use etalon_cuda::linear_cross_entropy::shard as device;
use etalon_cuda::{Options, Workspace};
use etalon_problem::tensors::Operands;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Role, Scalar, Views, ViewsMut};
use etalon_reference::linear_cross_entropy::{Cotangents, Gradients, Inputs};
use etalon_simd::Element;
use ndarray::{Array1, Array2, Array3, s};
use std::ops::Range;

/// Results by name.
pub(super) fn run(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    workspace: &Workspace,
    options: &Options,
) -> Result<Tensors, Error> {
    let call = (workspace, options);
    of_types!(request, problem => run_of(request, problem, shards, call))
}

/// The same of operands of `T` and gradients of `G`.
fn run_of<T: StoredNumber, G: Element>(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    (workspace, options): (&Workspace, &Options),
) -> Result<Tensors, Error> {
    let inputs: Inputs<'_, T> = operands(request.inputs)?;
    let ranks = shards.iter().map(|classes| device::Shard::new(problem, classes.clone()));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let parts = shards.iter().map(|classes| part(&inputs, classes)).collect::<Vec<_>>();
    let mut partials = Vec::new();
    for (rank, part) in ranks.iter().zip(&parts) {
        let own = device::forward_shard(workspace, rank, &by_name(part, Views::new()), options)?;
        partials.push((rank.classes(), own));
    }
    let partials: Vec<_> = partials.iter().map(|(at, x)| (at.clone(), x.view())).collect();
    let totals = device::combine(workspace, problem, &partials, options)?;
    let totals = totals.view();
    check_ignored(problem, &inputs.targets, totals, device::Partial::identity())?;
    if request.pass == Pass::Forward {
        let operands = request.problem.operands(Pass::Forward);
        let mut outputs = door::unwritten(&operands, request.dtype, &|x| x.role == Role::Output);
        let (last, part) = (&ranks[ranks.len() - 1], &parts[parts.len() - 1]);
        let (inputs, mut places) = (by_name(part, Views::new()), views_mut(&mut outputs)?);
        device::output(workspace, last, &inputs, totals, &mut places, options)?;
        drop(places);
        return Ok(outputs);
    }
    let cotangents: Cotangents<'_, T> = operands(request.inputs)?;
    let mut dh: Array2<G> = unwritten(problem.h_shape());
    let mut dw: Array2<G> = unwritten(problem.w_shape());
    let mut dbias: Option<Array1<G>> = problem.bias.then(|| unwritten(problem.vocab));
    let kind = if by_nodes(request) { device::Dh::Nodes } else { device::Dh::Sum };
    let mut sums = Vec::new();
    for (rank, part) in ranks.iter().zip(&parts) {
        let inputs = by_name(&cotangents, by_name(part, Views::new()));
        let (classes, [tokens, dim]) = (rank.classes(), problem.h_shape());
        let parts = if by_nodes(request) { rank.nodes().count() } else { 1 };
        let mut own: Array3<f32> = unwritten((parts, tokens, dim));
        let mut places = ViewsMut::new().with("dh", &mut own);
        let rows = dw.slice_mut(s![classes.clone(), ..]).into_dyn();
        places = places.with_some("dw", Scalar::view_mut(rows));
        if let Some(dbias) = &mut dbias {
            let own = Scalar::view_mut(dbias.slice_mut(s![classes.clone()]).into_dyn());
            places = places.with_some("dbias", own);
        }
        device::backward_shard(workspace, rank, &inputs, totals, &mut places, kind, options)?;
        drop(places);
        check_empty(&classes, &own)?;
        sums.push((classes, own));
    }
    let sums: Vec<_> = sums.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    if let Some(place) = Scalar::view_mut(dh.view_mut().into_dyn()) {
        device::combine_dh(workspace, problem, &sums, place, options)?;
    }
    Ok(stored(Gradients { dh: Some(dh), dw: Some(dw), dbias }))
}

/// Some views, and those of a struct.
fn by_name<'s, T: StoredNumber>(
    operands: &'s impl Operands<'s, T>,
    mut views: Views<'s>,
) -> Views<'s> {
    operands.each(&mut |name, x| {
        let view = x.and_then(|x| x.into_view());
        view.into_iter().for_each(|view| views.push(name, view));
    });
    views
}
