//! attention by name.

use super::{Arrays, named, needed, no_pass, some, view};
use etalon_problem::{Algorithm, Attention, Error, Pass};
use etalon_reference::attention;
use etalon_reference::scalar::Real;

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    problem: &Attention,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    let inputs = attention::Inputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        sinks: view(x, "sinks")?,
        bias: view(x, "bias")?,
    };
    let cotangents =
        || Ok(attention::Cotangents { dout: needed(x, "dout")?, dlse: view(x, "dlse")? });
    Ok(match pass {
        Pass::Forward => {
            let out = attention::forward(problem, &inputs)?;
            named([("o", some(out.o)), ("lse", some(out.lse))])
        }
        Pass::Backward => {
            let out = attention::backward(problem, &inputs, &cotangents()?)?;
            named([
                ("dq", some(out.dq)),
                ("dk", some(out.dk)),
                ("dv", some(out.dv)),
                ("dsinks", out.dsinks.and_then(some)),
                ("dbias", out.dbias.and_then(some)),
            ])
        }
        Pass::DoubleBackward => {
            let second = attention::SecondCotangents {
                ddq: view(x, "ddq")?,
                ddk: view(x, "ddk")?,
                ddv: view(x, "ddv")?,
                ddsinks: view(x, "ddsinks")?,
                ddbias: view(x, "ddbias")?,
                cot_o: view(x, "cot_o")?,
                cot_lse: view(x, "cot_lse")?,
            };
            let out = attention::double_backward(problem, &inputs, &cotangents()?, &second)?;
            named([
                ("gq", some(out.gq)),
                ("gk", some(out.gk)),
                ("gv", some(out.gv)),
                ("gdout", some(out.gdout)),
                ("gdlse", some(out.gdlse)),
                ("gsinks", out.gsinks.and_then(some)),
                ("gbias", out.gbias.and_then(some)),
            ])
        }
        Pass::Jvp => {
            let tangents = attention::Tangents {
                tq: view(x, "tq")?,
                tk: view(x, "tk")?,
                tv: view(x, "tv")?,
                tsinks: view(x, "tsinks")?,
                tbias: view(x, "tbias")?,
            };
            let out = attention::jvp(problem, &inputs, &tangents)?;
            named([("to", some(out.to)), ("tlse", some(out.tlse))])
        }
        Pass::Step => return Err(no_pass(Algorithm::Attention, pass)),
    })
}
