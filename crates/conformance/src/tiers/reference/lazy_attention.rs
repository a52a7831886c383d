//! lazy_attention by name.

use super::{Arrays, named, needed, no_pass, some, view};
use crate::tensor::{Tensors, values};
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};
use etalon_reference::lazy_attention::{self, Cotangents, Inputs, SecondCotangents};
use etalon_reference::scalar::Real;
use ndarray::Array4;

fn inputs_of<T>(x: &Arrays<T>) -> Result<Inputs<'_, T>, Error> {
    Ok(Inputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        bias: view(x, "bias")?,
        tau: needed(x, "tau")?,
    })
}

/// The outputs of the forward and backward pass.
pub(super) fn first_order<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    let inputs = inputs_of(x)?;
    let cotangents =
        || Ok::<_, Error>(Cotangents { dout: needed(x, "dout")?, dlse: view(x, "dlse")? });
    Ok(match pass {
        Pass::Forward => {
            let out = lazy_attention::forward(problem, &inputs)?;
            named([("o", some(out.o)), ("lse", some(out.lse))])
        }
        Pass::Backward => {
            let out = lazy_attention::backward(problem, &inputs, &cotangents()?)?;
            named([
                ("dq", some(out.dq)),
                ("dk", some(out.dk)),
                ("dv", some(out.dv)),
                ("dbias", out.dbias.and_then(some)),
                ("dtau", some(out.dtau)),
            ])
        }
        _ => return Err(no_pass(Algorithm::LazyAttention, pass)),
    })
}

/// The outputs of a pass.
pub(super) fn pass(
    problem: &LazyAttention,
    pass: Pass,
    x: &Arrays<f64>,
) -> Result<Arrays<f64>, Error> {
    if pass != Pass::DoubleBackward {
        return first_order(problem, pass, x);
    }
    let inputs = inputs_of(x)?;
    let cotangents = Cotangents { dout: needed(x, "dout")?, dlse: view(x, "dlse")? };
    let second = SecondCotangents {
        ddq: view(x, "ddq")?,
        ddk: view(x, "ddk")?,
        ddv: view(x, "ddv")?,
        ddbias: view(x, "ddbias")?,
        ddtau: view(x, "ddtau")?,
        cot_o: view(x, "cot_o")?,
        cot_lse: view(x, "cot_lse")?,
    };
    let out = lazy_attention::double_backward(problem, &inputs, &cotangents, &second)?;
    Ok(named([
        ("gq", some(out.gq)),
        ("gk", some(out.gk)),
        ("gv", some(out.gv)),
        ("gbias", out.gbias.and_then(some)),
        ("gtau", some(out.gtau)),
        ("gdout", some(out.gdout)),
        ("gdlse", some(out.gdlse)),
    ]))
}

/// Which pairs are active, or so near to it that |P + τ/n| ≤ margin · (P + |τ/n|).
pub(crate) fn decisions(
    problem: &LazyAttention,
    inputs: &Tensors,
    margin: f64,
) -> Result<Array4<bool>, Error> {
    let x = values(&problem.clone().into(), Pass::Forward, inputs)?;
    let inputs = inputs_of(&x)?;
    let mut decisions = lazy_attention::active_pairs(problem, &inputs)?;
    let bound = |pair: &lazy_attention::Pair<f64>| margin * (pair.weight + pair.offset.abs());
    for pair in lazy_attention::ambiguous(problem, &inputs, bound)? {
        decisions[[pair.batch, pair.head, pair.query, pair.key]] = true;
    }
    Ok(decisions)
}
