//! Operands and results by name, so that one law serves both algorithms.

pub use crate::common::tensors::{Random, Sum, Tensors, convert, dual};
use crate::common::tensors::{assert_near, need, present, typed};
use etalon_problem::{Error, Operand, Pass, Problem};
use etalon_reference::scalar::Real;
use etalon_reference::{attention, attention_lse};
use ndarray::{ArrayBase, ArrayD, Data, Dimension, RawData};

/// The differentiable inputs; their gradients are `d…`, the cotangents of those `dd…`, tangents
/// `t…` and second gradients `g…`.
pub const INPUTS: [&str; 5] = ["q", "k", "v", "sinks", "bias"];

/// An output and what belongs to it.
pub struct OutputNames {
    pub value: &'static str,
    pub cotangent: &'static str,
    pub second_cotangent: &'static str,
    pub tangent: &'static str,
}

/// The outputs; the second gradient of a cotangent is `g…`.
pub const OUTPUTS: [OutputNames; 2] = [
    OutputNames { value: "o", cotangent: "dout", second_cotangent: "cot_o", tangent: "to" },
    OutputNames { value: "lse", cotangent: "dlse", second_cotangent: "cot_lse", tangent: "tlse" },
];

/// Every operand that the pass reads, the optional ones too. A tensor depends on its name and on
/// the seed, not on the pass.
pub fn operands(problem: &Problem, pass: Pass, seed: u64) -> Tensors<f64> {
    let read = problem.operands(pass).into_iter().filter(|operand| operand.role.is_given());
    read.map(|Operand { name, shape, .. }| {
        (name.to_string(), Random::of(name, seed).tensor(&shape))
    })
    .collect()
}

/// A direction in which everything that `pass` reads moves, named as the operands are.
pub fn direction(problem: &Problem, pass: Pass, seed: u64) -> Tensors<f64> {
    operands(problem, pass, seed ^ 0xd1ec)
}

/// A result under its name.
fn named<T, S, D>(name: &str, array: ArrayBase<S, D>) -> Option<(String, ArrayD<T>)>
where
    T: Clone,
    S: Data<Elem = T> + RawData,
    D: Dimension,
{
    Some((name.to_string(), array.to_owned().into_dyn()))
}

/// Runs a pass of either algorithm.
pub fn run<T: Real>(problem: &Problem, pass: Pass, x: &Tensors<T>) -> Result<Tensors<T>, Error> {
    match problem {
        Problem::Attention(problem) => run_attention(problem, pass, x),
        Problem::AttentionLse(problem) => run_attention_lse(problem, pass, x),
        other => unreachable!("{} has tests of its own", other.algorithm()),
    }
}

fn run_attention<T: Real>(
    problem: &etalon_problem::Attention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    use attention::{Cotangents, Inputs, SecondCotangents, Tangents};
    let inputs = Inputs {
        q: need(x, "q"),
        k: need(x, "k"),
        v: need(x, "v"),
        sinks: typed(x, "sinks"),
        bias: typed(x, "bias"),
    };
    let cotangents = || Cotangents { dout: need(x, "dout"), dlse: typed(x, "dlse") };
    let results = match pass {
        Pass::Forward => {
            let y = attention::forward(problem, &inputs)?;
            vec![named("o", y.o), named("lse", y.lse)]
        }
        Pass::Backward => {
            let y = attention::backward(problem, &inputs, &cotangents())?;
            vec![
                named("dq", y.dq),
                named("dk", y.dk),
                named("dv", y.dv),
                y.dsinks.and_then(|y| named("dsinks", y)),
                y.dbias.and_then(|y| named("dbias", y)),
            ]
        }
        Pass::DoubleBackward => {
            let second = SecondCotangents {
                ddq: typed(x, "ddq"),
                ddk: typed(x, "ddk"),
                ddv: typed(x, "ddv"),
                ddsinks: typed(x, "ddsinks"),
                ddbias: typed(x, "ddbias"),
                cot_o: typed(x, "cot_o"),
                cot_lse: typed(x, "cot_lse"),
            };
            let y = attention::double_backward(problem, &inputs, &cotangents(), &second)?;
            vec![
                named("gq", y.gq),
                named("gk", y.gk),
                named("gv", y.gv),
                named("gdout", y.gdout),
                named("gdlse", y.gdlse),
                y.gsinks.and_then(|y| named("gsinks", y)),
                y.gbias.and_then(|y| named("gbias", y)),
            ]
        }
        Pass::Jvp => {
            let tangents = Tangents {
                tq: typed(x, "tq"),
                tk: typed(x, "tk"),
                tv: typed(x, "tv"),
                tsinks: typed(x, "tsinks"),
                tbias: typed(x, "tbias"),
            };
            let y = attention::jvp(problem, &inputs, &tangents)?;
            vec![named("to", y.to), named("tlse", y.tlse)]
        }
        Pass::Step | Pass::ForwardBackward => unreachable!("attention has no {pass}"),
    };
    Ok(present(results))
}

fn run_attention_lse<T: Real>(
    problem: &etalon_problem::AttentionLse,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    use attention_lse::{Cotangents, Inputs, SecondCotangents, Tangents};
    let inputs = Inputs {
        q: need(x, "q"),
        k: need(x, "k"),
        sinks: typed(x, "sinks"),
        bias: typed(x, "bias"),
    };
    let cotangents = || Cotangents { dlse: typed(x, "dlse").expect("the law gives dlse") };
    let results = match pass {
        Pass::Forward => vec![named("lse", attention_lse::forward(problem, &inputs)?.lse)],
        Pass::Backward => {
            let y = attention_lse::backward(problem, &inputs, &cotangents())?;
            vec![
                named("dq", y.dq),
                named("dk", y.dk),
                y.dsinks.and_then(|y| named("dsinks", y)),
                y.dbias.and_then(|y| named("dbias", y)),
            ]
        }
        Pass::DoubleBackward => {
            let second = SecondCotangents {
                ddq: typed(x, "ddq"),
                ddk: typed(x, "ddk"),
                ddsinks: typed(x, "ddsinks"),
                ddbias: typed(x, "ddbias"),
                cot_lse: typed(x, "cot_lse"),
            };
            let y = attention_lse::double_backward(problem, &inputs, &cotangents(), &second)?;
            vec![
                named("gq", y.gq),
                named("gk", y.gk),
                named("gdlse", y.gdlse),
                y.gsinks.and_then(|y| named("gsinks", y)),
                y.gbias.and_then(|y| named("gbias", y)),
            ]
        }
        Pass::Jvp => {
            let tangents = Tangents {
                tq: typed(x, "tq"),
                tk: typed(x, "tk"),
                tsinks: typed(x, "tsinks"),
                tbias: typed(x, "tbias"),
            };
            vec![named("tlse", attention_lse::jvp(problem, &inputs, &tangents)?.tlse)]
        }
        Pass::Step | Pass::ForwardBackward => unreachable!("attention_lse has no {pass}"),
    };
    Ok(present(results))
}

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`; −∞ and
/// NaN must stand at the same places.
pub fn assert_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, tolerance: f64, what: &str) {
    assert_near(found, expected, tolerance, 0.0, what);
}

/// Fails unless the tensors have the same bits. Of NaN only that it is one counts, of zero not
/// the sign.
pub fn assert_same(found: &ArrayD<f64>, expected: &ArrayD<f64>, what: &str) {
    assert_close(found, expected, 0.0, what);
}
