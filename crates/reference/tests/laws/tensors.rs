//! Operands and results by name, so that one law serves both algorithms.

use etalon_problem::{Error, Operand, Pass, Problem, Role};
use etalon_reference::scalar::{Dual, Real};
use etalon_reference::{attention, attention_lse};
use ndarray::{ArrayBase, ArrayD, ArrayView, Data, Dimension, IxDyn, RawData};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

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

/// Every operand that the pass reads, the optional ones too. A tensor depends on its name and on
/// the seed, not on the pass.
pub fn operands(problem: &Problem, pass: Pass, seed: u64) -> Tensors<f64> {
    let read = problem.operands(pass).into_iter().filter(|operand| operand.role != Role::Output);
    read.map(|Operand { name, shape, .. }| {
        let hash = name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(257) + u64::from(byte));
        (name.to_string(), Random(hash).tensor(&shape))
    })
    .collect()
}

/// A direction in which everything that `pass` reads moves, named as the operands are.
pub fn direction(problem: &Problem, pass: Pass, seed: u64) -> Tensors<f64> {
    operands(problem, pass, seed ^ 0xd1ec)
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
    let need = |name| typed(x, name).unwrap_or_else(|| panic!("the law gives no {name}"));
    let inputs = Inputs {
        q: need("q"),
        k: need("k"),
        v: need("v"),
        sinks: typed(x, "sinks"),
        bias: typed(x, "bias"),
    };
    let cotangents = || Cotangents { dout: need("dout"), dlse: typed(x, "dlse") };
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
        Pass::Step => unreachable!("attention takes no steps"),
    };
    Ok(results.into_iter().flatten().collect())
}

fn run_attention_lse<T: Real>(
    problem: &etalon_problem::AttentionLse,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    use attention_lse::{Cotangents, Inputs, SecondCotangents, Tangents};
    let need = |name| typed(x, name).unwrap_or_else(|| panic!("the law gives no {name}"));
    let inputs =
        Inputs { q: need("q"), k: need("k"), sinks: typed(x, "sinks"), bias: typed(x, "bias") };
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
        Pass::Step => unreachable!("attention_lse takes no steps"),
    };
    Ok(results.into_iter().flatten().collect())
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

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`; −∞ and
/// NaN must stand at the same places.
pub fn assert_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(0.0f64, |scale, x| scale.max(x.abs()));
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
