//! Linear_cross_entropy with its classes in shards, in the tiers that have them.

use super::typed::{Held, numbers, operands, stored};
use crate::tensor::{Stored, Tensor, Tensors, Values, views_mut};
use crate::tier::{Cuts, Request};
use etalon_cuda::linear_cross_entropy::shard as device;
use etalon_problem::tensors::Operands;
use etalon_problem::{
    Dtype, Error, LinearCrossEntropy, Operand, Pass, Problem, Role, Scalar, Views, ViewsMut,
};
use etalon_reference::linear_cross_entropy::shard as plain;
use etalon_reference::linear_cross_entropy::shard::TILE;
use etalon_reference::linear_cross_entropy::{Cotangents, Gradients, Inputs, Wanted};
use etalon_reference::scalar::{Quad, Real};
use etalon_reference::{Arithmetic, Named};
use etalon_simd::linear_cross_entropy::shard;
use etalon_simd::{Element, Options, Workspace};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Array3, ArrayView1, Axis, concatenate, s};
use std::ops::Range;

/// The classes of each shard that a request wants, of a pass that has shards.
pub(super) fn of<'r>(request: &Request<'r>) -> Option<(&'r LinearCrossEntropy, Vec<Range<usize>>)> {
    let cuts = request.hints.shards?;
    let Problem::LinearCrossEntropy(problem) = request.problem else { return None };
    matches!(request.pass, Pass::Forward | Pass::Backward)
        .then(|| (problem, ranges(cuts, problem.vocab)))
}

/// All classes in shards.
fn ranges(cuts: Cuts, vocab: usize) -> Vec<Range<usize>> {
    let mut borders: Vec<usize> = match cuts {
        // 1, 1, 2, 4, 8 … tiles.
        Cuts::Nodes => {
            let tiles = (0..vocab.div_ceil(TILE)).filter(|&x| x == 0 || x.is_power_of_two());
            tiles.map(|tile| tile * TILE).collect()
        }
        // Of the tree that has all classes.
        Cuts::Quarters => {
            let quarter = (vocab.div_ceil(TILE).next_power_of_two() / 4).max(1) * TILE;
            (0..vocab).step_by(quarter).collect()
        }
        // Three that have classes: the bounds allow any two rescales.
        Cuts::Anywhere => {
            let third = (vocab + 1) / 3;
            vec![third, third, 2 * third]
        }
    };
    borders.extend([0, 0, vocab, vocab]);
    borders.sort_unstable();
    borders.windows(2).map(|b| b[0].min(vocab)..b[1].min(vocab)).collect()
}

/// The inputs of a shard.
fn part<'a, T: Scalar>(inputs: &'a Inputs<'_, T>, classes: &Range<usize>) -> Inputs<'a, T> {
    Inputs {
        h: inputs.h.view(),
        w: inputs.w.slice(s![classes.clone(), ..]),
        bias: inputs.bias.as_ref().map(|bias| bias.slice(s![classes.clone()])),
        targets: inputs.targets.view(),
        class_weights: inputs.class_weights.as_ref().map(|x| x.view()),
        token_weights: inputs.token_weights.as_ref().map(|x| x.view()),
    }
}

/// What all classes have, of what those of each shard have, in their order.
fn together<T: Scalar>(
    dh: Array2<T>,
    dw: &[Array2<T>],
    dbias: &[Option<Array1<T>>],
) -> Result<Gradients<T>, Error> {
    let misshapen = |error| Error::value("shards", "rows of one length", error);
    let dw: Vec<_> = dw.iter().map(|x| x.view()).collect();
    let dbias: Option<Vec<_>> = dbias.iter().map(|x| Some(x.as_ref()?.view())).collect();
    let dbias = dbias.map(|dbias| concatenate(Axis(0), &dbias).map_err(misshapen));
    Ok(Gradients {
        dh: Some(dh),
        dw: Some(concatenate(Axis(0), &dw).map_err(misshapen)?),
        dbias: dbias.transpose()?,
    })
}

/// What the simd tier returns.
pub(super) fn simd(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    options: &Options,
) -> Result<Tensors, Error> {
    let Request { pass, inputs, .. } = *request;
    match request.dtype {
        Dtype::F32 => simd_of::<f32>(problem, pass, inputs, shards, options),
        Dtype::Bf16 => simd_of::<bf16>(problem, pass, inputs, shards, options),
        Dtype::F16 => simd_of::<f16>(problem, pass, inputs, shards, options),
        Dtype::F64 => Err(Error::value("dtype", "f32, bf16 or f16", request.dtype)),
    }
}

fn simd_of<T: Held>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    tensors: &Tensors,
    shards: &[Range<usize>],
    options: &Options,
) -> Result<Tensors, Error> {
    let inputs: Inputs<'_, T> = operands(tensors)?;
    let ranks = shards.iter().map(|classes| shard::Shard::new(problem, classes.clone()));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let parts = shards.iter().map(|classes| part(&inputs, classes)).collect::<Vec<_>>();
    let partials = ranks.iter().zip(&parts);
    let partials = partials.map(|(rank, part)| shard::forward_shard(rank, part, options));
    let partials = partials.collect::<Result<Vec<_>, _>>()?;
    let partials = shards.iter().cloned().zip(partials.iter().map(|x| x.view()));
    let totals = shard::combine(problem, &partials.collect::<Vec<_>>())?;
    if pass == Pass::Forward {
        let last = ranks.len() - 1;
        return Ok(stored::<T>(shard::output(&ranks[last], &parts[last], totals.view())?));
    }
    let cotangents: Cotangents<'_, T> = operands(tensors)?;
    let ranks: Vec<_> = ranks.iter().zip(&parts).collect();
    Ok(match problem.wide_gradients {
        true => stored(gradients::<T, f32>(problem, &ranks, totals.view(), &cotangents, options)?),
        false => stored(gradients::<T, T>(problem, &ranks, totals.view(), &cotangents, options)?),
    })
}

/// The gradients of all shards, of `G`.
fn gradients<T: Element, G: Element>(
    problem: &LinearCrossEntropy,
    ranks: &[(&shard::Shard<'_>, &Inputs<'_, T>)],
    totals: ArrayView1<'_, shard::Partial>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<G>, Error> {
    let LinearCrossEntropy { tokens, dim, bias, .. } = *problem;
    let (mut dh, mut dw, mut dbias) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, part) in ranks {
        let classes = rank.classes().len();
        let mut own_dh = Array3::zeros((1, tokens, dim));
        let mut own_dw = Array2::from_elem((classes, dim), G::ZERO);
        let mut own_dbias = bias.then(|| Array1::from_elem(classes, G::ZERO));
        let places = shard::GradientsMut {
            dh: Some(own_dh.view_mut()),
            dw: Some(own_dw.view_mut()),
            dbias: own_dbias.as_mut().map(|x| x.view_mut()),
        };
        let workspace = Workspace::new();
        shard::backward_shard_into(&workspace, rank, part, totals, cotangents, places, options)?;
        dh.push((rank.classes(), own_dh));
        dw.push(own_dw);
        dbias.push(own_dbias);
    }
    let dh: Vec<_> = dh.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    let dbias = if bias { dbias } else { vec![None] };
    together(shard::combine_dh(problem, &dh)?, &dw, &dbias)
}

/// What the cuda tier returns.
pub(super) fn cuda(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    workspace: &etalon_cuda::Workspace,
    options: &etalon_cuda::Options,
) -> Result<Tensors, Error> {
    let call = (workspace, options);
    match (request.dtype, problem.wide_gradients) {
        (Dtype::F32, _) => cuda_of::<f32, f32>(request, problem, shards, call),
        (Dtype::Bf16, true) => cuda_of::<bf16, f32>(request, problem, shards, call),
        (Dtype::Bf16, false) => cuda_of::<bf16, bf16>(request, problem, shards, call),
        (Dtype::F16, true) => cuda_of::<f16, f32>(request, problem, shards, call),
        (Dtype::F16, false) => cuda_of::<f16, f16>(request, problem, shards, call),
        (Dtype::F64, _) => Err(Error::value("dtype", "f32, bf16 or f16", request.dtype)),
    }
}

/// The same of operands of `T` and gradients of `G`.
fn cuda_of<T: Held, G: Element>(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    (workspace, options): (&etalon_cuda::Workspace, &etalon_cuda::Options),
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
    if request.pass == Pass::Forward {
        let of = |x: &Operand| {
            let stored = Stored::of(x.precision, request.dtype);
            (x.name.to_string(), Tensor::unwritten(&x.shape, stored))
        };
        let operands = request.problem.operands(Pass::Forward);
        let mut outputs: Tensors =
            operands.iter().filter(|x| x.role == Role::Output).map(of).collect();
        let (last, part) = (&ranks[ranks.len() - 1], &parts[parts.len() - 1]);
        let (inputs, mut places) = (by_name(part, Views::new()), views_mut(&mut outputs)?);
        device::output(workspace, last, &inputs, totals, &mut places, options)?;
        drop(places);
        return Ok(outputs);
    }
    let cotangents: Cotangents<'_, T> = operands(request.inputs)?;
    // Not 0: what is not written shows.
    let nan = |shape: [usize; 2]| Array2::from_elem(shape, G::from_f32(f32::NAN));
    let (mut dh, mut dw) = (nan(problem.h_shape()), nan(problem.w_shape()));
    let mut dbias = problem.bias.then(|| Array1::from_elem(problem.vocab, G::from_f32(f32::NAN)));
    let mut sums = Vec::new();
    for (rank, part) in ranks.iter().zip(&parts) {
        let inputs = by_name(&cotangents, by_name(part, Views::new()));
        let (classes, [tokens, dim]) = (rank.classes(), problem.h_shape());
        let mut own = Array3::from_elem((1, tokens, dim), f32::NAN);
        let mut places = ViewsMut::new().with("dh", &mut own);
        let rows = dw.slice_mut(s![classes.clone(), ..]).into_dyn();
        places = places.with_some("dw", Scalar::view_mut(rows));
        if let Some(dbias) = &mut dbias {
            let own = Scalar::view_mut(dbias.slice_mut(s![classes.clone()]).into_dyn());
            places = places.with_some("dbias", own);
        }
        let kind = device::Dh::Sum;
        device::backward_shard(workspace, rank, &inputs, totals, &mut places, kind, options)?;
        drop(places);
        sums.push((classes, own));
    }
    let sums: Vec<_> = sums.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    if let Some(place) = Scalar::view_mut(dh.view_mut().into_dyn()) {
        device::combine_dh(workspace, problem, &sums, place, options)?;
    }
    Ok(stored(Gradients { dh: Some(dh), dw: Some(dw), dbias }))
}

/// Some views, and those of a struct.
fn by_name<'s, T: Held>(operands: &'s impl Operands<'s, T>, mut views: Views<'s>) -> Views<'s> {
    operands.each(&mut |name, x| {
        let view = x.and_then(|x| x.into_view());
        view.into_iter().for_each(|view| views.push(name, view));
    });
    views
}

/// What the reference returns in some arithmetic, by name.
pub(super) fn reference(
    arithmetic: Arithmetic,
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Values,
    shards: &[Range<usize>],
) -> Result<Values, Error> {
    match arithmetic {
        Arithmetic::F32 => reference_of::<f32>(problem, pass, x, shards),
        Arithmetic::F64 => reference_of::<f64>(problem, pass, x, shards),
        Arithmetic::DoubleDouble => reference_of::<Quad>(problem, pass, x, shards),
    }
}

fn reference_of<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Values,
    shards: &[Range<usize>],
) -> Result<Values, Error> {
    let whole = x.iter().map(|(name, x)| (name.clone(), x.mapv(|x| x as i64))).collect();
    let x = x.iter().map(|(name, x)| (name.clone(), x.mapv(T::from_f64))).collect();
    let inputs = Inputs::from_named(&x, &whole)?;
    let parts = shards.iter().map(|classes| part(&inputs, classes)).collect::<Vec<_>>();
    let ranks = shards.iter().zip(&parts);
    let ranks = ranks.map(|(classes, part)| plain::Shard::new(problem, classes.clone(), part));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let partials = shards.iter().cloned().zip(&ranks);
    let partials = partials.map(|(classes, rank)| Ok((classes, rank.partials()?)));
    let totals = plain::combine(partials.collect::<Result<Vec<_>, Error>>()?)?;
    if pass == Pass::Forward {
        return Ok(numbers(ranks[ranks.len() - 1].output(&totals)?));
    }
    let cotangents = Cotangents::from_named(&x, &whole)?;
    let (mut dh, mut dw, mut dbias) = (Vec::new(), Vec::new(), Vec::new());
    for (classes, rank) in shards.iter().zip(&ranks) {
        let own = rank.backward(&totals, &cotangents, Wanted::ALL)?;
        dh.extend(own.dh.map(|dh| (classes.clone(), dh)));
        dw.extend(own.dw);
        dbias.push(own.dbias);
    }
    let dbias = if problem.bias { dbias } else { vec![None] };
    Ok(numbers(together(plain::combine_dh(dh)?, &dw, &dbias)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_all_classes() {
        for cuts in [Cuts::Nodes, Cuts::Quarters, Cuts::Anywhere] {
            for vocab in [1, 2, 5, 256, 257, 20_000] {
                let ranges = ranges(cuts, vocab);
                assert_eq!((ranges[0].clone(), ranges[ranges.len() - 1].end), (0..0, vocab));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
            }
        }
        let nodes = ranges(Cuts::Nodes, 1000);
        assert_eq!(nodes, [0..0, 0..0, 0..256, 256..512, 512..1000, 1000..1000]);
        let quarters = ranges(Cuts::Quarters, 1100);
        assert_eq!(quarters, [0..0, 0..0, 0..512, 512..1024, 1024..1100, 1100..1100]);
    }
}
