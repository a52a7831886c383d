//! The reference as a tier, and as the oracle.

use crate::bounds::{Values, values};
use crate::tensor::{Tensor, Tensors};
use crate::tier::{Answer, Request, Tier};
use etalon_problem::{Algorithm, Attention, AttentionLse, Dtype, Error, Pass, Problem, Role};
use etalon_reference::{attention, attention_lse};
use ndarray::{Array, ArrayD, ArrayView, Dimension};

/// The reference: f64 whatever the storage type of the inputs, rounded once at the end to the
/// type in which the request wants its outputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Tier for Reference {
    fn name(&self) -> String {
        "reference".to_string()
    }

    fn offers(&self, _: Algorithm, _: Pass, _: Dtype) -> Result<(), String> {
        Ok(())
    }

    fn run(&self, request: &Request<'_>) -> Answer {
        let outputs = match oracle(request) {
            Ok(outputs) => outputs,
            Err(error) => return Answer::Error(error.to_string()),
        };
        let operands = request.problem.operands(request.pass);
        let operands = operands.iter().filter(|operand| operand.role == Role::Output);
        let round = |operand: &etalon_problem::Operand| {
            let values = outputs[operand.name].to_f64(operand.name)?;
            let tensor = Tensor::round(&values, super::stored(operand, request.dtype));
            Ok((operand.name.to_string(), tensor))
        };
        match operands.map(round).collect::<Result<Tensors, Error>>() {
            Ok(outputs) => Answer::Outputs(outputs),
            Err(error) => Answer::Error(error.to_string()),
        }
    }
}

/// The exact outputs of a request, in f64: nothing is rounded to the storage type.
pub fn oracle(request: &Request<'_>) -> Result<Tensors, Error> {
    let inputs = values(request.problem, request.pass, request.inputs)?;
    let outputs = match request.problem {
        Problem::Attention(problem) => attention_pass(problem, request.pass, &inputs),
        Problem::AttentionLse(problem) => lse_pass(problem, request.pass, &inputs),
    }?;
    let exact = |(name, values)| (name, Tensor::round(&values, Dtype::F64));
    Ok(outputs.into_iter().map(exact).collect())
}

/// Outputs by name; an absent one belongs to an option that is not set.
fn named<const N: usize>(outputs: [(&str, Option<ArrayD<f64>>); N]) -> Values {
    let present = |(name, values): (&str, Option<ArrayD<f64>>)| Some((name.to_string(), values?));
    outputs.into_iter().filter_map(present).collect()
}

fn some<D: Dimension>(array: Array<f64, D>) -> Option<ArrayD<f64>> {
    Some(array.into_dyn())
}

/// An operand that may be absent.
fn view<'a, D: Dimension>(
    inputs: &'a Values,
    name: &str,
) -> Result<Option<ArrayView<'a, f64, D>>, Error> {
    let Some(array) = inputs.get(name) else { return Ok(None) };
    let axes = || Error::value(format!("axes of `{name}`"), "those of the pass", array.ndim());
    array.view().into_dimensionality().map(Some).map_err(|_| axes())
}

fn needed<'a, D: Dimension>(
    inputs: &'a Values,
    name: &str,
) -> Result<ArrayView<'a, f64, D>, Error> {
    view(inputs, name)?.ok_or_else(|| Error::Missing {
        operand: name.to_string(),
        reason: "the pass needs it".to_string(),
    })
}

fn attention_pass(problem: &Attention, pass: Pass, x: &Values) -> Result<Values, Error> {
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
    })
}

fn lse_pass(problem: &AttentionLse, pass: Pass, x: &Values) -> Result<Values, Error> {
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
    })
}
