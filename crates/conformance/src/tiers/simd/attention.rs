//! attention by name.

use super::{Stored, named, needed, tensor, view};
use crate::tensor::Tensors;
use etalon_problem::{Attention, Error, Pass};
use etalon_simd::{Options, attention};

/// The outputs of a pass.
pub(super) fn pass<T: Stored>(
    problem: &Attention,
    pass: Pass,
    x: &Tensors,
    options: &Options,
) -> Result<Tensors, Error> {
    let inputs = attention::Inputs::<T> {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        sinks: view(x, "sinks")?,
        bias: view(x, "bias")?,
    };
    let out = attention::forward(problem, &inputs, options)?;
    match pass {
        Pass::Forward => return Ok(named([("o", tensor(out.o)), ("lse", tensor(out.lse))])),
        Pass::Jvp => {
            let tangents = attention::Tangents::<T> {
                tq: view(x, "tq")?,
                tk: view(x, "tk")?,
                tv: view(x, "tv")?,
                tsinks: view(x, "tsinks")?,
                tbias: view(x, "tbias")?,
            };
            let moved = attention::jvp(problem, &inputs, &out, &tangents, options)?;
            return Ok(named([("to", tensor(moved.to)), ("tlse", tensor(moved.tlse))]));
        }
        _ => {}
    }
    let cotangents =
        attention::Cotangents::<T> { dout: needed(x, "dout")?, dlse: view(x, "dlse")? };
    if pass == Pass::Backward {
        let grads = attention::backward(problem, &inputs, &out, &cotangents, options)?;
        return Ok(named([
            ("dq", tensor(grads.dq)),
            ("dk", tensor(grads.dk)),
            ("dv", tensor(grads.dv)),
            ("dsinks", grads.dsinks.and_then(tensor)),
            ("dbias", grads.dbias.and_then(tensor)),
        ]));
    }
    let second = attention::SecondCotangents::<T> {
        ddq: view(x, "ddq")?,
        ddk: view(x, "ddk")?,
        ddv: view(x, "ddv")?,
        ddsinks: view(x, "ddsinks")?,
        ddbias: view(x, "ddbias")?,
        cot_o: view(x, "cot_o")?,
        cot_lse: view(x, "cot_lse")?,
    };
    let grads = attention::double_backward(problem, &inputs, &out, &cotangents, &second, options)?;
    Ok(named([
        ("gq", tensor(grads.gq)),
        ("gk", tensor(grads.gk)),
        ("gv", tensor(grads.gv)),
        ("gdout", tensor(grads.gdout)),
        ("gdlse", tensor(grads.gdlse)),
        ("gsinks", grads.gsinks.and_then(tensor)),
        ("gbias", grads.gbias.and_then(tensor)),
    ]))
}
