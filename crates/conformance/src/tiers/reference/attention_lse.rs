//! attention_lse by name.

use super::{Arrays, named, needed, no_pass, some, view};
use etalon_problem::{Algorithm, AttentionLse, Error, Pass};
use etalon_reference::attention_lse;
use etalon_reference::scalar::Real;

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    problem: &AttentionLse,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    let inputs = attention_lse::Inputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        sinks: view(x, "sinks")?,
        bias: view(x, "bias")?,
    };
    let cotangents = || Ok(attention_lse::Cotangents { dlse: needed(x, "dlse")? });
    Ok(match pass {
        Pass::Forward => named([("lse", some(attention_lse::forward(problem, &inputs)?.lse))]),
        Pass::Backward => {
            let out = attention_lse::backward(problem, &inputs, &cotangents()?)?;
            named([
                ("dq", some(out.dq)),
                ("dk", some(out.dk)),
                ("dsinks", out.dsinks.and_then(some)),
                ("dbias", out.dbias.and_then(some)),
            ])
        }
        Pass::DoubleBackward => {
            let second = attention_lse::SecondCotangents {
                ddq: view(x, "ddq")?,
                ddk: view(x, "ddk")?,
                ddsinks: view(x, "ddsinks")?,
                ddbias: view(x, "ddbias")?,
                cot_lse: view(x, "cot_lse")?,
            };
            let out = attention_lse::double_backward(problem, &inputs, &cotangents()?, &second)?;
            named([
                ("gq", some(out.gq)),
                ("gk", some(out.gk)),
                ("gdlse", some(out.gdlse)),
                ("gsinks", out.gsinks.and_then(some)),
                ("gbias", out.gbias.and_then(some)),
            ])
        }
        Pass::Jvp => {
            let tangents = attention_lse::Tangents {
                tq: view(x, "tq")?,
                tk: view(x, "tk")?,
                tsinks: view(x, "tsinks")?,
                tbias: view(x, "tbias")?,
            };
            named([("tlse", some(attention_lse::jvp(problem, &inputs, &tangents)?.tlse))])
        }
        Pass::Step => return Err(no_pass(Algorithm::AttentionLse, pass)),
    })
}
