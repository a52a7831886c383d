//! The figures of `docs/errata.md` on attention and its log-sum-exp: what each mistake costs on a
//! stated problem. The mistakes are mutants of the zoo; the truth is the reference's.

use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::{ask, oracle};
use etalon_conformance::zoo::{Host, Mutant, mutant};
use etalon_problem::{Attention, AttentionLse, Dtype, Extents, Mask, Pass, Precision, Problem};
use ndarray::{ArrayD, IxDyn};

/// One head of `rows` queries and keys.
fn extents(rows: usize, dim: usize) -> Extents {
    Extents { batch: 1, query_heads: 1, key_heads: 1, queries: rows, keys: rows, dim }
}

/// Normal numbers of deviation `scale(name)` for every operand that is handed in.
fn inputs(problem: &Problem, pass: Pass, dtype: Dtype, scale: impl Fn(&str) -> f64) -> Tensors {
    let mut tensors = Tensors::new();
    for operand in problem.operands(pass).iter().filter(|x| x.role.is_given()) {
        let stream = Stream::new(0, operand.name);
        let mut at = 0;
        let values = ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            scale(operand.name) * stream.normal(at)
        });
        let stored = match operand.precision {
            Precision::Storage => Stored::Float(dtype),
            _ => Stored::Float(Dtype::F32),
        };
        tensors.insert(operand.name.to_string(), Tensor::store(&values, stored));
    }
    tensors
}

/// The root mean square of the difference over that of the truth.
fn error(got: &ArrayD<f64>, exact: &ArrayD<f64>) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(exact).map(|(a, b)| square(a - b)).sum();
    (difference / exact.iter().map(|&x| square(x)).sum::<f64>()).sqrt()
}

/// Results of a mutant for an output, and the right ones.
fn outputs(
    mutant: Mutant,
    problem: &Problem,
    pass: Pass,
    (dtype, inputs): (Dtype, &Tensors),
    name: &str,
) -> (ArrayD<f64>, ArrayD<f64>) {
    let request = Request { problem, pass, dtype, inputs, hints: Hints::default() };
    let host: &dyn Tier = &Host::mutant(mutant);
    let got = ask(host, &request).unwrap()[name].to_f64(name).unwrap();
    let exact = oracle(&request).unwrap()[name].to_f64(name).unwrap();
    (got, exact)
}

/// Fails unless a figure, in per cent, is the one in the document, to the digits shown there.
#[track_caller]
fn figure(found: f64, documented: f64, digits: i32) {
    let shown = (100.0 * found * 10f64.powi(digits)).round() / 10f64.powi(digits);
    assert_eq!(shown, documented, "found {} %", 100.0 * found);
}

/// 256 rows, D = 64, causal: the softcap's derivative left out of dq.
#[test]
fn the_softcap_has_a_derivative() {
    let cost = |cap: f64, deviation: f64| {
        let problem: Problem =
            AttentionLse::new(extents(256, 64)).mask(Mask::causal()).softcap(cap).into();
        // σ q·k of two normal vectors has deviation 1.
        let scale = |name: &str| if name == "dlse" { 1.0 } else { deviation.sqrt() };
        let inputs = inputs(&problem, Pass::Backward, Dtype::F32, scale);
        let mutant = mutant("no-softcap-derivative").unwrap();
        let (got, exact) = outputs(mutant, &problem, Pass::Backward, (Dtype::F32, &inputs), "dq");
        error(&got, &exact)
    };
    figure(cost(30.0, 1.0), 0.5, 1);
    figure(cost(50.0, 10.0), 32.0, 0);
    figure(cost(1.0, 1.0), 99.0, 0);
}

/// The gradient of the sinks is 0 where none is computed; rounded to bf16 term by term it is that
/// much off. 1024 rows, not causal, D = 64, dlse of both signs.
#[test]
fn the_sink_has_a_gradient() {
    let problem: Problem = AttentionLse::new(extents(1024, 64)).sinks().into();
    let scale = |name: &str| if name == "sinks" { 4.0 } else { 1.0 };
    let inputs = inputs(&problem, Pass::Backward, Dtype::F32, scale);
    let cost = |mutant| {
        let given = (Dtype::F32, &inputs);
        let (got, exact) = outputs(mutant, &problem, Pass::Backward, given, "dsinks");
        error(&got, &exact)
    };
    figure(cost(mutant("no-gradient-of-sinks").unwrap()), 100.0, 0);
    figure(cost(mutant("sink-terms-in-bf16").unwrap()), 0.3, 1);
}

/// Not causal, D = 64, operands in bf16, tiles of 16 keys: dq of partials that are rounded to bf16,
/// and the rounding of dq itself.
#[test]
fn partials_are_kept_wide() {
    let cost = |rows: usize, mutant| {
        let problem: Problem = Attention::new(extents(rows, 64)).into();
        let inputs = inputs(&problem, Pass::Backward, Dtype::Bf16, |_| 1.0);
        let given = (Dtype::Bf16, &inputs);
        let (got, exact) = outputs(mutant, &problem, Pass::Backward, given, "dq");
        let rounded = exact.mapv(|x| Dtype::Bf16.round(x));
        (error(&got, &exact), error(&rounded, &exact))
    };
    let (partials, once) = cost(128, mutant("partials-in-bf16").unwrap());
    figure(partials, 0.24, 2);
    figure(once, 0.17, 2);
}

/// The plan's example: 64 key blocks × 32 heads × 8192 queries × 128 elements of four bytes.
#[test]
fn the_partials_of_the_example_have_eight_gib() {
    let bytes = 64u64 * 32 * 8192 * 128 * 4;
    assert_eq!(bytes, 8_589_934_592);
    assert_eq!(bytes, 8 << 30);
    assert_eq!(16u64 * 8 * 2048 * 128 * 4, 134_217_728);
}

/// Causal, random cotangents of dq, dk and dv alone: P taken for a constant in the second order.
#[test]
fn weights_are_no_constants() {
    let cost = |rows: usize, dim: usize, name: &str| {
        let problem: Problem = Attention::new(extents(rows, dim)).mask(Mask::causal()).into();
        let mut inputs = inputs(&problem, Pass::DoubleBackward, Dtype::F32, |_| 1.0);
        for name in ["dlse", "cot_o", "cot_lse"] {
            inputs.remove(name);
        }
        let (mutant, given) = (mutant("constant-weights").unwrap(), (Dtype::F32, &inputs));
        let (got, exact) = outputs(mutant, &problem, Pass::DoubleBackward, given, name);
        error(&got, &exact)
    };
    figure(cost(6, 4, "gq"), 43.0, 0);
    figure(cost(64, 64, "gq"), 82.0, 0);
    figure(cost(64, 64, "gk"), 83.0, 0);
}

/// Without the scale the gradients are 1/σ = 8 times too large at D = 64: an error of 700 %.
#[test]
fn the_scale_belongs_to_the_gradients() {
    let problem: Problem = Attention::new(extents(64, 64)).mask(Mask::causal()).into();
    let inputs = inputs(&problem, Pass::Backward, Dtype::F32, |_| 1.0);
    let (mutant, given) = (mutant("gradients-unscaled").unwrap(), (Dtype::F32, &inputs));
    let (got, exact) = outputs(mutant, &problem, Pass::Backward, given, "dq");
    figure(error(&got, &exact), 700.0, 0);
}

/// A window of 8 keys over 64, in tiles of 16: every row whose window begins after the first tile
/// meets a tile without a visible key first, and is NaN from then on.
#[test]
fn an_empty_tile_subtracts_infinities() {
    let problem: Problem = Attention::new(extents(64, 8)).mask(Mask::window(7, 0)).into();
    let inputs = inputs(&problem, Pass::Forward, Dtype::F32, |_| 1.0);
    let (mutant, given) = (mutant("empty-tile-is-nan").unwrap(), (Dtype::F32, &inputs));
    let (got, _) = outputs(mutant, &problem, Pass::Forward, given, "lse");
    let lost = got.iter().filter(|x| x.is_nan()).count();
    assert_eq!(lost, 64 - 23, "rows 23 to 63 begin at key 16 or later");
}
