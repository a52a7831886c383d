//! Operands and results by name.

pub use crate::common::tensors::{Random, Sum, Tensors, convert, dual};
use crate::common::tensors::{assert_near, need, present, typed};
use etalon_problem::{Error, LazyAttention, Operand, Pass, Scalar};
use etalon_reference::lazy_attention::{self, Cotangents, Gradients, Inputs, SecondCotangents};
use etalon_reference::scalar::Real;
use ndarray::{Array, ArrayD, Dimension, IxDyn};

/// The passes of lazy attention.
pub const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];

/// The inputs; their gradients are `d…`, the cotangents of those `dd…`, and second gradients `g…`.
pub const INPUTS: [&str; 5] = ["q", "k", "v", "bias", "tau"];

/// Each output with its cotangent and its second cotangent.
pub const OUTPUTS: [[&str; 3]; 2] = [["o", "dout", "cot_o"], ["lse", "dlse", "cot_lse"]];

/// τ of the heads, in turn: as trained ones are, and the other signs and regimes. With −1 the rows
/// that see one key lie on the kink; with −2.5 those that see two are dead.
pub const TAU: [f64; 6] = [-0.9, -0.3, -1.0, 0.4, -2.5, 0.0];

/// Every operand that the pass reads, the optional ones too. A tensor depends on its name and on
/// the seed, not on the pass.
pub fn operands(problem: &LazyAttention, pass: Pass, seed: u64) -> Tensors<f64> {
    let read = problem.operands(pass).into_iter().filter(|operand| operand.role.is_given());
    read.map(|Operand { name, shape, .. }| {
        let tensor = match name {
            "tau" => ArrayD::from_shape_fn(IxDyn(&shape), |at| TAU[at[0] % TAU.len()]),
            // Scores of the size of 2, so that weights differ by more than τ/n.
            "q" => Random::of(name, seed).tensor(&shape) * 2.0,
            _ => Random::of(name, seed).tensor(&shape),
        };
        (name.to_string(), tensor)
    })
    .collect()
}

/// A direction in which everything that `pass` reads moves, named as the operands are.
pub fn direction(problem: &LazyAttention, pass: Pass, seed: u64) -> Tensors<f64> {
    let mut direction = operands(problem, pass, seed ^ 0xd1ec);
    direction.insert("tau".to_string(), Random(seed).tensor(&[problem.scores.extents.query_heads]));
    direction
}

pub fn inputs<T: Scalar<Wide = T>>(x: &Tensors<T>) -> Inputs<'_, T> {
    Inputs {
        q: need(x, "q"),
        k: need(x, "k"),
        v: need(x, "v"),
        bias: typed(x, "bias"),
        tau: need(x, "tau"),
    }
}

pub fn cotangents<T: Scalar<Wide = T>>(x: &Tensors<T>) -> Cotangents<'_, T> {
    Cotangents { dout: need(x, "dout"), dlse: typed(x, "dlse") }
}

/// A result under its name.
fn named<T, D: Dimension>(name: &str, array: Array<T, D>) -> Option<(String, ArrayD<T>)> {
    Some((name.to_string(), array.into_dyn()))
}

fn collect<T, const N: usize>(results: [Option<(String, ArrayD<T>)>; N]) -> Tensors<T> {
    present(results)
}

/// The results of a backward pass by their names.
pub fn gradients<T: Scalar<Wide = T>>(y: Gradients<T>) -> Tensors<T> {
    collect([
        named("dq", y.dq),
        named("dk", y.dk),
        named("dv", y.dv),
        y.dbias.and_then(|y| named("dbias", y)),
        named("dtau", y.dtau),
    ])
}

/// Runs a pass.
pub fn run<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let inputs = inputs(x);
    match pass {
        Pass::Forward => {
            let y = lazy_attention::forward(problem, &inputs)?;
            Ok(collect([named("o", y.o), named("lse", y.lse)]))
        }
        Pass::Backward => {
            Ok(gradients(lazy_attention::backward(problem, &inputs, &cotangents(x))?))
        }
        Pass::DoubleBackward => {
            let second = SecondCotangents {
                ddq: typed(x, "ddq"),
                ddk: typed(x, "ddk"),
                ddv: typed(x, "ddv"),
                ddbias: typed(x, "ddbias"),
                ddtau: typed(x, "ddtau"),
                cot_o: typed(x, "cot_o"),
                cot_lse: typed(x, "cot_lse"),
            };
            let y = lazy_attention::double_backward(problem, &inputs, &cotangents(x), &second)?;
            Ok(collect([
                named("gq", y.gq),
                named("gk", y.gk),
                named("gv", y.gv),
                y.gbias.and_then(|y| named("gbias", y)),
                named("gtau", y.gtau),
                named("gdout", y.gdout),
                named("gdlse", y.gdlse),
            ]))
        }
        Pass::Jvp | Pass::Step | Pass::ForwardBackward => panic!("lazy attention has no {pass}"),
    }
}

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`, or of 1:
/// operands are of the size of 1. −∞ and NaN must stand at the same places.
pub fn assert_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, tolerance: f64, what: &str) {
    assert_near(found, expected, tolerance, 1.0, what);
}

/// Fails unless the tensors have the same bits. Of NaN only that it is one counts, of zero not
/// the sign.
pub fn assert_same(found: &ArrayD<f64>, expected: &ArrayD<f64>, what: &str) {
    assert_close(found, expected, 0.0, what);
}

/// [`assert_close`] of every result of `expected`.
pub fn assert_all_close(found: &Tensors<f64>, expected: &Tensors<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (result, expected) in expected {
        assert_close(&found[result], expected, tolerance, &format!("{what}: {result}"));
    }
}
