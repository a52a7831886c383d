//! lazy_attention by name.

use super::{Arrays, named, needed, no_pass, some, view};
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};
use etalon_reference::lazy_attention::{self, Cotangents, Inputs, SecondCotangents};
use etalon_reference::scalar::Real;

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    let inputs = Inputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        bias: view(x, "bias")?,
        tau: needed(x, "tau")?,
    };
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
        Pass::DoubleBackward => {
            let second = SecondCotangents {
                ddq: view(x, "ddq")?,
                ddk: view(x, "ddk")?,
                ddv: view(x, "ddv")?,
                ddbias: view(x, "ddbias")?,
                ddtau: view(x, "ddtau")?,
                cot_o: view(x, "cot_o")?,
                cot_lse: view(x, "cot_lse")?,
            };
            let out = lazy_attention::double_backward(problem, &inputs, &cotangents()?, &second)?;
            named([
                ("gq", some(out.gq)),
                ("gk", some(out.gk)),
                ("gv", some(out.gv)),
                ("gbias", out.gbias.and_then(some)),
                ("gtau", some(out.gtau)),
                ("gdout", some(out.gdout)),
                ("gdlse", some(out.gdlse)),
            ])
        }
        Pass::Jvp | Pass::Step => return Err(no_pass(Algorithm::LazyAttention, pass)),
    })
}
