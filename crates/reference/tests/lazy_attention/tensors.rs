//! Operands and results by name.

use etalon_problem::{Error, LazyAttention, Operand, Pass, Role};
use etalon_reference::lazy_attention::{self, Cotangents, Gradients, Inputs, SecondCotangents};
use etalon_reference::scalar::{Dual, Real};
use ndarray::{Array, ArrayD, ArrayView, Dimension, IxDyn};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

/// The passes of lazy attention.
pub const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];

/// The inputs; their gradients are `d…`, the cotangents of those `dd…`, and second gradients `g…`.
pub const INPUTS: [&str; 5] = ["q", "k", "v", "bias", "tau"];

/// Each output with its cotangent and its second cotangent.
pub const OUTPUTS: [[&str; 3]; 2] = [["o", "dout", "cot_o"], ["lse", "dlse", "cot_lse"]];

/// Numbers that look random and are the same everywhere: the output function of SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [−1.5, 1.5): as large as the usual activations, without outliers.
    pub fn number(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64 * 3.0 - 1.5
    }

    /// Below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    pub fn tensor(&mut self, shape: &[usize]) -> ArrayD<f64> {
        ArrayD::from_shape_simple_fn(IxDyn(shape), || self.number())
    }
}

/// τ of the heads, in turn: as trained ones are, and the other signs and regimes. With −1 the rows
/// that see one key lie on the kink; with −2.5 those that see two are dead.
pub const TAU: [f64; 6] = [-0.9, -0.3, -1.0, 0.4, -2.5, 0.0];

/// Every operand that the pass reads, the optional ones too. A tensor depends on its name and on
/// the seed, not on the pass.
pub fn operands(problem: &LazyAttention, pass: Pass, seed: u64) -> Tensors<f64> {
    let read = problem.operands(pass).into_iter().filter(|operand| operand.role != Role::Output);
    read.map(|Operand { name, shape, .. }| {
        let hash = name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(257) + u64::from(byte));
        let tensor = match name {
            "tau" => ArrayD::from_shape_fn(IxDyn(&shape), |at| TAU[at[0] % TAU.len()]),
            // Scores of the size of 2, so that weights differ by more than τ/n.
            "q" => Random(hash).tensor(&shape) * 2.0,
            _ => Random(hash).tensor(&shape),
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

/// `point + ε·direction`.
pub fn dual(point: &Tensors<f64>, direction: &Tensors<f64>) -> Tensors<Dual<f64>> {
    let moved = |(name, x): (&String, &ArrayD<f64>)| {
        let mut dual = x.mapv(Dual::constant);
        if let Some(direction) = direction.get(name) {
            dual.zip_mut_with(direction, |x, &tangent| x.tangent = tangent);
        }
        (name.clone(), dual)
    };
    point.iter().map(moved).collect()
}

/// Every element through `f`.
pub fn convert<T: Clone, U>(tensors: &Tensors<T>, f: impl Fn(T) -> U) -> Tensors<U> {
    tensors.iter().map(|(name, x)| (name.clone(), x.mapv(&f))).collect()
}

fn typed<'a, T, D: Dimension>(x: &'a Tensors<T>, name: &str) -> Option<ArrayView<'a, T, D>> {
    let view = x.get(name)?.view();
    Some(view.into_dimensionality().expect("the operand has as many axes as the problem says"))
}

fn need<'a, T, D: Dimension>(x: &'a Tensors<T>, name: &str) -> ArrayView<'a, T, D> {
    typed(x, name).unwrap_or_else(|| panic!("the law gives no {name}"))
}

pub fn inputs<T>(x: &Tensors<T>) -> Inputs<'_, T> {
    Inputs {
        q: need(x, "q"),
        k: need(x, "k"),
        v: need(x, "v"),
        bias: typed(x, "bias"),
        tau: need(x, "tau"),
    }
}

pub fn cotangents<T>(x: &Tensors<T>) -> Cotangents<'_, T> {
    Cotangents { dout: need(x, "dout"), dlse: typed(x, "dlse") }
}

/// A result under its name.
fn named<T, D: Dimension>(name: &str, array: Array<T, D>) -> Option<(String, ArrayD<T>)> {
    Some((name.to_string(), array.into_dyn()))
}

fn collect<T, const N: usize>(results: [Option<(String, ArrayD<T>)>; N]) -> Tensors<T> {
    results.into_iter().flatten().collect()
}

/// The results of a backward pass by their names.
pub fn gradients<T>(y: Gradients<T>) -> Tensors<T> {
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
        Pass::Jvp | Pass::Step => panic!("lazy attention has no {pass}"),
    }
}

/// A sum and the sum of its absolute terms: the scale of its rounding errors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum {
    pub value: f64,
    pub magnitude: f64,
}

impl Sum {
    pub fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
    }

    /// Adds Σ x y, if both are there.
    pub fn add_product(&mut self, x: Option<&ArrayD<f64>>, y: Option<&ArrayD<f64>>) {
        if let (Some(x), Some(y)) = (x, y) {
            assert_eq!(x.shape(), y.shape());
            x.iter().zip(y).for_each(|(x, y)| self.add(x * y));
        }
    }

    /// Fails unless both are the same number up to `tolerance` of their absolute terms.
    pub fn assert_equals(&self, other: &Sum, tolerance: f64, what: &str) {
        let (error, scale) = ((self.value - other.value).abs(), self.magnitude + other.magnitude);
        assert!(error <= tolerance * scale, "{what}: {self:?} against {other:?}");
    }
}

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`, or of 1:
/// operands are of the size of 1. −∞ and NaN must stand at the same places.
pub fn assert_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1.0f64, |scale, x| scale.max(x.abs()));
    for ((place, &found), &expected) in found.indexed_iter().zip(expected) {
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(
            same || (found - expected).abs() <= tolerance * scale,
            "{what} at {place:?}: {found:e}, expected {expected:e} (scale {scale:e})"
        );
    }
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
