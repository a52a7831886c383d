//! The filtered backward pass of linear_cross_entropy, in the tiers that have it.

use super::typed::{StoredNumber, numbers, of_types, operands, stored};
use crate::tensor::{Tensors, Values};
use crate::tier::{Filtered, Request};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Problem};
use etalon_reference::linear_cross_entropy::shard as plain_shard;
use etalon_reference::linear_cross_entropy::{Cotangents, Gradients, Inputs, filter as plain};
use etalon_reference::scalar::{Quad, Real};
use etalon_reference::{Arithmetic, Named, convert};
use etalon_simd::linear_cross_entropy::shard::TILE;
use etalon_simd::linear_cross_entropy::{GradientsMut, filter};
use etalon_simd::{Element, Options, Workspace};
use ndarray::{Array1, Array2};

/// The problem of a request that can be filtered.
pub(super) fn of<'r>(request: &Request<'r>) -> Option<&'r LinearCrossEntropy> {
    match request.problem {
        Problem::LinearCrossEntropy(problem) if request.pass == Pass::Backward => Some(problem),
        _ => None,
    }
}

/// Results of the simd tier.
pub(super) fn simd(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    filter: Filter,
    options: &Options,
) -> Result<Filtered, Error> {
    let inputs = request.inputs;
    of_types!(request, problem => simd_of(problem, inputs, filter, options))
}

/// The same of operands of `T` and gradients of `G`.
fn simd_of<T: StoredNumber, G: Element>(
    problem: &LinearCrossEntropy,
    tensors: &Tensors,
    filter: Filter,
    options: &Options,
) -> Result<Filtered, Error> {
    let inputs: Inputs<'_, T> = operands(tensors)?;
    let cotangents: Cotangents<'_, T> = operands(tensors)?;
    // Not 0: what is not written shows.
    let nan = G::from_f32(f32::NAN);
    let mut dh = Array2::from_elem(problem.h_shape(), nan);
    let mut dw = Array2::from_elem(problem.w_shape(), nan);
    let mut dbias = problem.bias.then(|| Array1::from_elem(problem.vocab, nan));
    let places = GradientsMut {
        dh: Some(dh.view_mut()),
        dw: Some(dw.view_mut()),
        dbias: dbias.as_mut().map(|x| x.view_mut()),
    };
    let unwritten = |len| Array1::from_elem(len, f32::NAN);
    let (dh_bounds, dw_bounds) = (unwritten(problem.tokens), unwritten(problem.vocab));
    let mut bounds = filter::Certificate { dh: dh_bounds, dw: dw_bounds, tiles: (0, 0) };
    let (workspace, place) = (Workspace::new(), bounds.view_mut());
    filter::backward_into(
        &workspace,
        problem,
        &inputs,
        &cotangents,
        filter,
        places,
        place,
        options,
    )?;
    Ok(Filtered {
        outputs: stored(Gradients { dh: Some(dh), dw: Some(dw), dbias }),
        dh: bounds.dh.iter().map(|&x| f64::from(x)).collect(),
        dw: bounds.dw.iter().map(|&x| f64::from(x)).collect(),
        tiles: bounds.tiles,
        classes: TILE,
    })
}

/// Results of the reference in some arithmetic: gradients that are not stored yet, and the rest.
pub(super) fn reference(
    arithmetic: Arithmetic,
    problem: &LinearCrossEntropy,
    x: &Values,
    filter: Filter,
) -> Result<(Values, Filtered), Error> {
    match arithmetic {
        Arithmetic::F32 => reference_of::<f32>(problem, x, filter),
        Arithmetic::F64 => reference_of::<f64>(problem, x, filter),
        Arithmetic::DoubleDouble => reference_of::<Quad>(problem, x, filter),
    }
}

fn reference_of<T: Real>(
    problem: &LinearCrossEntropy,
    x: &Values,
    filter: Filter,
) -> Result<(Values, Filtered), Error> {
    let (x, whole) = (convert(x, T::from_f64), convert(x, |x| x as i64));
    let inputs = Inputs::from_named(&x, &whole)?;
    let cotangents = Cotangents::from_named(&x, &whole)?;
    let (gradients, bounds) = plain::backward(problem, &inputs, &cotangents, filter)?;
    let list = |x: Array1<T>| x.iter().map(|x| x.to_f64()).collect();
    let (dh, dw, tiles) = (list(bounds.dh), list(bounds.dw), bounds.tiles);
    Ok((
        numbers(gradients),
        Filtered { outputs: Tensors::new(), dh, dw, tiles, classes: plain_shard::TILE },
    ))
}
