//! Operands and results by name.

pub use crate::common::tensors::{Random, Sum, Tensors, convert, dual};
use crate::common::tensors::{need, present, typed};
use etalon_problem::{Error, LinearAttention, Pass, Scalar};
use etalon_reference::linear_attention::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, StepInputs, backward,
    chunked, double_backward, forward, step,
};
use etalon_reference::scalar::Real;
use ndarray::{Array, ArrayD, Dimension, IxDyn, arr0};

/// The differentiable inputs; their gradients are `d…`, the cotangents of those `dd…`, and second
/// gradients `g…`. The scale is not a tensor of the problem, but has gradients all the same.
pub const INPUTS: [&str; 6] = ["q", "k", "v", "g_gamma", "g", "initial_state"];

/// The outputs with their cotangents, and the cotangents of the second loss; the second gradient
/// of a cotangent is `g…`.
pub const OUTPUTS: [[&str; 3]; 2] =
    [["o", "dout", "cot_o"], ["final_state", "dfinal_state", "cot_final_state"]];

/// The passes.
pub const PASSES: [Pass; 4] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Step];

pub fn inputs<T: Scalar<Wide = T>>(x: &Tensors<T>) -> Inputs<'_, T> {
    Inputs {
        q: need(x, "q"),
        k: need(x, "k"),
        v: need(x, "v"),
        g_gamma: typed(x, "g_gamma"),
        g: typed(x, "g"),
        initial_state: typed(x, "initial_state"),
    }
}

pub fn cotangents<T: Scalar<Wide = T>>(x: &Tensors<T>) -> Cotangents<'_, T> {
    Cotangents { dout: need(x, "dout"), dfinal_state: typed(x, "dfinal_state") }
}

/// A result under its name.
fn named<T, D: Dimension>(
    name: &str,
    array: impl Into<Option<Array<T, D>>>,
) -> Option<(String, ArrayD<T>)> {
    array.into().map(|array| (name.to_string(), array.into_dyn()))
}

fn outputs<T: Scalar<Wide = T>>(y: Output<T>) -> Tensors<T> {
    present([named("o", y.o), named("final_state", y.final_state)])
}

fn gradients<T: Scalar<Wide = T>>(y: Gradients<T>) -> Tensors<T> {
    let list = [
        named("dq", y.dq),
        named("dk", y.dk),
        named("dv", y.dv),
        named("dg_gamma", y.dg_gamma),
        named("dg", y.dg),
        named("dinitial_state", y.dinitial_state),
        named("dscale", arr0(y.dscale)),
    ];
    present(list)
}

fn second_gradients<T: Scalar<Wide = T>>(y: SecondGradients<T>) -> Tensors<T> {
    let list = [
        named("gq", y.gq),
        named("gk", y.gk),
        named("gv", y.gv),
        named("gg_gamma", y.gg_gamma),
        named("gg", y.gg),
        named("ginitial_state", y.ginitial_state),
        named("gscale", arr0(y.gscale)),
        named("gdout", y.gdout),
        named("gdfinal_state", y.gdfinal_state),
    ];
    present(list)
}

/// Runs a pass.
pub fn run<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    match pass {
        Pass::Forward => forward(problem, &inputs(x)).map(outputs),
        Pass::Backward => backward(problem, &inputs(x), &cotangents(x)).map(gradients),
        Pass::DoubleBackward => {
            let second = SecondCotangents {
                ddq: typed(x, "ddq"),
                ddk: typed(x, "ddk"),
                ddv: typed(x, "ddv"),
                ddg_gamma: typed(x, "ddg_gamma"),
                ddg: typed(x, "ddg"),
                ddinitial_state: typed(x, "ddinitial_state"),
                ddscale: x.get("ddscale").map(|x| x[IxDyn(&[])]),
                cot_o: typed(x, "cot_o"),
                cot_final_state: typed(x, "cot_final_state"),
            };
            double_backward(problem, &inputs(x), &cotangents(x), &second).map(second_gradients)
        }
        Pass::Step => {
            let inputs = StepInputs {
                q: need(x, "q"),
                k: need(x, "k"),
                v: need(x, "v"),
                g_gamma: typed(x, "g_gamma"),
                g: typed(x, "g"),
                initial_state: typed(x, "initial_state"),
            };
            let y = step(problem, &inputs)?;
            let list = [named("o", y.o), named("final_state", y.final_state)];
            Ok(present(list))
        }
        Pass::Jvp | Pass::ForwardBackward => panic!("linear attention has no such pass"),
    }
}

/// Runs the forward or the backward pass in chunks.
pub fn run_chunked<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
    chunk: usize,
) -> Result<Tensors<T>, Error> {
    match pass {
        Pass::Forward => chunked::forward(problem, &inputs(x), chunk).map(outputs),
        _ => chunked::backward(problem, &inputs(x), &cotangents(x), chunk).map(gradients),
    }
}

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`.
pub fn assert_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, tolerance: f64, what: &str) {
    let scale = expected.iter().fold(0.0f64, |scale, x| scale.max(x.abs()));
    assert_absolutely_close(found, expected, tolerance * scale, what);
}

/// Fails unless the tensors agree up to `error`.
pub fn assert_absolutely_close(
    found: &ArrayD<f64>,
    expected: &ArrayD<f64>,
    error: f64,
    what: &str,
) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    for ((place, &found), &expected) in found.indexed_iter().zip(expected) {
        assert!(
            (found - expected).abs() <= error,
            "{what} at {place:?}: {found:e}, expected {expected:e} within {error:e}"
        );
    }
}

/// Fails unless the tensors are equal (0 and −0 are).
pub fn assert_same(found: &ArrayD<f64>, expected: &ArrayD<f64>, what: &str) {
    assert_absolutely_close(found, expected, 0.0, what);
}

/// Fails unless all results of `expected` are found again, equal.
pub fn assert_all_same(found: &Tensors<f64>, expected: &Tensors<f64>, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (result, expected) in expected {
        assert_same(&found[result], expected, &format!("{what}: {result}"));
    }
}
