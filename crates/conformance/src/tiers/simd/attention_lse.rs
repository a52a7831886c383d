//! attention_lse by name.

use super::{Stored, named, needed, tensor, view};
use crate::tensor::Tensors;
use etalon_problem::{AttentionLse, Error, Pass};
use etalon_simd::{Options, attention_lse};

/// The outputs of a pass.
pub(super) fn pass<T: Stored>(
    problem: &AttentionLse,
    pass: Pass,
    x: &Tensors,
    options: &Options,
) -> Result<Tensors, Error> {
    let inputs = attention_lse::Inputs::<T> {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        sinks: view(x, "sinks")?,
        bias: view(x, "bias")?,
    };
    let out = attention_lse::forward(problem, &inputs, options)?;
    match pass {
        Pass::Forward => return Ok(named([("lse", tensor(out.lse))])),
        Pass::Jvp => {
            let tangents = attention_lse::Tangents::<T> {
                tq: view(x, "tq")?,
                tk: view(x, "tk")?,
                tsinks: view(x, "tsinks")?,
                tbias: view(x, "tbias")?,
            };
            let moved = attention_lse::jvp(problem, &inputs, &out, &tangents, options)?;
            return Ok(named([("tlse", tensor(moved.tlse))]));
        }
        _ => {}
    }
    let cotangents = attention_lse::Cotangents { dlse: needed(x, "dlse")? };
    if pass == Pass::Backward {
        let grads = attention_lse::backward(problem, &inputs, &out, &cotangents, options)?;
        return Ok(named([
            ("dq", tensor(grads.dq)),
            ("dk", tensor(grads.dk)),
            ("dsinks", grads.dsinks.and_then(tensor)),
            ("dbias", grads.dbias.and_then(tensor)),
        ]));
    }
    let second = attention_lse::SecondCotangents::<T> {
        ddq: view(x, "ddq")?,
        ddk: view(x, "ddk")?,
        ddsinks: view(x, "ddsinks")?,
        ddbias: view(x, "ddbias")?,
        cot_lse: view(x, "cot_lse")?,
    };
    let grads =
        attention_lse::double_backward(problem, &inputs, &out, &cotangents, &second, options)?;
    Ok(named([
        ("gq", tensor(grads.gq)),
        ("gk", tensor(grads.gk)),
        ("gdlse", tensor(grads.gdlse)),
        ("gsinks", grads.gsinks.and_then(tensor)),
        ("gbias", grads.gbias.and_then(tensor)),
    ]))
}
