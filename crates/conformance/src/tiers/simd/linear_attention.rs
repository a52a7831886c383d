//! linear_attention by name.

use super::{Stored, named, needed, tensor, view};
use crate::tensor::Tensors;
use etalon_problem::{Error, LinearAttention, Pass};
use etalon_simd::{Options, linear_attention};
use ndarray::{ArrayView0, arr0};

/// The outputs of a pass.
pub(super) fn pass<T: Stored>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors,
    options: &Options,
) -> Result<Tensors, Error> {
    if pass == Pass::Step {
        return step::<T>(problem, x, options);
    }
    let inputs = linear_attention::Inputs::<T> {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        g_gamma: view(x, "g_gamma")?,
        g: view(x, "g")?,
        initial_state: view(x, "initial_state")?,
    };
    if pass == Pass::Forward {
        let out = linear_attention::forward(problem, &inputs, options)?;
        return Ok(named([
            ("o", tensor(out.o)),
            ("final_state", out.final_state.and_then(tensor)),
        ]));
    }
    let cotangents = linear_attention::Cotangents::<T> {
        dout: needed(x, "dout")?,
        dfinal_state: view(x, "dfinal_state")?,
    };
    if pass == Pass::DoubleBackward {
        return double_backward(problem, x, &inputs, &cotangents, options);
    }
    let grads = linear_attention::backward(problem, &inputs, &cotangents, options)?;
    Ok(named([
        ("dq", tensor(grads.dq)),
        ("dk", tensor(grads.dk)),
        ("dv", tensor(grads.dv)),
        ("dg_gamma", grads.dg_gamma.and_then(tensor)),
        ("dg", grads.dg.and_then(tensor)),
        ("dinitial_state", grads.dinitial_state.and_then(tensor)),
        ("dscale", tensor(arr0(grads.dscale))),
    ]))
}

fn double_backward<T: Stored>(
    problem: &LinearAttention,
    x: &Tensors,
    inputs: &linear_attention::Inputs<'_, T>,
    cotangents: &linear_attention::Cotangents<'_, T>,
    options: &Options,
) -> Result<Tensors, Error> {
    let ddscale: Option<ArrayView0<'_, f32>> = view(x, "ddscale")?;
    let second = linear_attention::SecondCotangents::<T> {
        ddq: view(x, "ddq")?,
        ddk: view(x, "ddk")?,
        ddv: view(x, "ddv")?,
        ddg_gamma: view(x, "ddg_gamma")?,
        ddg: view(x, "ddg")?,
        ddinitial_state: view(x, "ddinitial_state")?,
        ddscale: ddscale.map(|x| x[()]),
        cot_o: view(x, "cot_o")?,
        cot_final_state: view(x, "cot_final_state")?,
    };
    let grads = linear_attention::double_backward(problem, inputs, cotangents, &second, options)?;
    Ok(named([
        ("gq", tensor(grads.gq)),
        ("gk", tensor(grads.gk)),
        ("gv", tensor(grads.gv)),
        ("gg_gamma", grads.gg_gamma.and_then(tensor)),
        ("gg", grads.gg.and_then(tensor)),
        ("ginitial_state", grads.ginitial_state.and_then(tensor)),
        ("gscale", tensor(arr0(grads.gscale))),
        ("gdout", tensor(grads.gdout)),
        ("gdfinal_state", grads.gdfinal_state.and_then(tensor)),
    ]))
}

fn step<T: Stored>(
    problem: &LinearAttention,
    x: &Tensors,
    options: &Options,
) -> Result<Tensors, Error> {
    let inputs = linear_attention::StepInputs::<T> {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        g_gamma: view(x, "g_gamma")?,
        g: view(x, "g")?,
    };
    let out = linear_attention::step(problem, &inputs, needed(x, "initial_state")?, options)?;
    Ok(named([("o", tensor(out.o)), ("final_state", tensor(out.final_state))]))
}
