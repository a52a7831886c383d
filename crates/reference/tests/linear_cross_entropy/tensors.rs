//! Operands and results by name, so that one law serves every pass.

use etalon_problem::{Error, LinearCrossEntropy, Operand, Pass, Precision, Role};
use etalon_reference::linear_cross_entropy::{self, Cotangents, Inputs, SecondCotangents, Wanted};
use etalon_reference::scalar::{Dual, Real};
use ndarray::{Array1, ArrayD, ArrayView, Dimension, IxDyn, arr0};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

/// What a pass reads.
#[derive(Clone)]
pub struct Operands<T> {
    pub floats: Tensors<T>,
    pub targets: Array1<i64>,
}

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
}

fn random(name: &str, seed: u64) -> Random {
    Random(name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(257) + u64::from(byte)))
}

/// Every operand that the pass reads, the optional ones too. Every fourth token is ignored.
/// Weights are of either sign: nothing is taken to be positive.
pub fn operands(problem: &LinearCrossEntropy, pass: Pass, seed: u64) -> Operands<f64> {
    let read = problem.operands(pass).into_iter();
    let read = read.filter(|x| x.role != Role::Output && x.precision != Precision::Integer);
    let floats = read.map(|Operand { name, shape, .. }| {
        let mut random = random(name, seed);
        let mut tensor = ArrayD::from_shape_simple_fn(IxDyn(&shape), || random.number());
        if name.ends_with("weights") {
            tensor += 0.75; // a mean that is not 0, so that Z is not near 0
        }
        (name.to_string(), tensor)
    });
    let mut random = random("targets", seed);
    let targets = Array1::from_shape_fn(problem.tokens, |i| match i % 4 {
        3 => problem.ignore_index,
        _ => loop {
            let class = (random.bits() % problem.vocab as u64) as i64;
            if class != problem.ignore_index {
                break class;
            }
        },
    });
    Operands { floats: floats.collect(), targets }
}

impl<T: Real> Operands<T> {
    /// Every element through `f`.
    pub fn convert<U>(&self, f: impl Fn(T) -> U) -> Operands<U> {
        Operands { floats: convert(&self.floats, f), targets: self.targets.clone() }
    }

    fn view<D: Dimension>(&self, name: &str) -> Option<ArrayView<'_, T, D>> {
        let view = self.floats.get(name)?.view();
        Some(view.into_dimensionality().expect("as many axes as the problem says"))
    }

    pub fn inputs(&self) -> Inputs<'_, T> {
        Inputs {
            h: self.view("h").expect("h"),
            w: self.view("w").expect("w"),
            bias: self.view("bias"),
            targets: self.targets.view(),
            class_weights: self.view("class_weights"),
            token_weights: self.view("token_weights"),
        }
    }

    pub fn cotangents(&self) -> Cotangents<'_, T> {
        Cotangents {
            dloss: self.view("dloss"),
            dlse: self.view("dlse"),
            dlogprob: self.view("dlogprob"),
            dentropy: self.view("dentropy"),
        }
    }

    pub fn second(&self) -> SecondCotangents<'_, T> {
        SecondCotangents {
            ddh: self.view("ddh"),
            ddw: self.view("ddw"),
            ddbias: self.view("ddbias"),
            cot_loss: self.view("cot_loss"),
            cot_lse: self.view("cot_lse"),
            cot_logprob: self.view("cot_logprob"),
            cot_entropy: self.view("cot_entropy"),
        }
    }
}

/// Every element through `f`.
pub fn convert<T: Clone, U>(tensors: &Tensors<T>, f: impl Fn(T) -> U) -> Tensors<U> {
    tensors.iter().map(|(name, x)| (name.clone(), x.mapv(&f))).collect()
}

/// `point + ε·direction`; the weights stand still.
pub fn dual(point: &Operands<f64>, direction: &Operands<f64>) -> Operands<Dual<f64>> {
    let mut moved = point.convert(Dual::constant);
    for (name, x) in &mut moved.floats {
        if !name.ends_with("weights") {
            x.zip_mut_with(&direction.floats[name], |x, &tangent| x.tangent = tangent);
        }
    }
    moved
}

/// The integer results as numbers: they are small.
fn integers<T: Real, D: Dimension>(x: &ndarray::Array<i64, D>) -> ArrayD<T> {
    x.mapv(|x| T::from_f64(x as f64)).into_dyn()
}

/// Runs a pass.
pub fn run<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Operands<T>,
) -> Result<Tensors<T>, Error> {
    let inputs = x.inputs();
    let results = match pass {
        Pass::Forward => {
            let y = linear_cross_entropy::forward(problem, &inputs)?;
            vec![
                ("loss", Some(y.loss)),
                ("lse", y.lse.map(|x| x.into_dyn())),
                ("logprob", y.logprob.map(|x| x.into_dyn())),
                ("entropy", y.entropy.map(|x| x.into_dyn())),
                ("argmax", y.argmax.map(|x| integers(&x))),
                ("n_valid", Some(integers(&arr0(y.n_valid)))),
                ("normaliser", Some(arr0(y.normaliser).into_dyn())),
            ]
        }
        Pass::Backward => {
            let y = linear_cross_entropy::backward(problem, &inputs, &x.cotangents(), Wanted::ALL)?;
            vec![
                ("dh", y.dh.map(|x| x.into_dyn())),
                ("dw", y.dw.map(|x| x.into_dyn())),
                ("dbias", y.dbias.map(|x| x.into_dyn())),
            ]
        }
        Pass::DoubleBackward => {
            let (first, second) = (x.cotangents(), x.second());
            let y = linear_cross_entropy::double_backward(problem, &inputs, &first, &second)?;
            vec![
                ("gh", Some(y.gh.into_dyn())),
                ("gw", Some(y.gw.into_dyn())),
                ("gbias", y.gbias.map(|x| x.into_dyn())),
                ("gdloss", Some(y.gdloss)),
                ("gdlse", y.gdlse.map(|x| x.into_dyn())),
                ("gdlogprob", y.gdlogprob.map(|x| x.into_dyn())),
                ("gdentropy", y.gdentropy.map(|x| x.into_dyn())),
            ]
        }
        Pass::Jvp | Pass::Step => Vec::new(),
    };
    let named = results.into_iter().filter_map(|(name, x)| Some((name.to_string(), x?)));
    Ok(named.collect())
}

/// The passes of the algorithm.
pub const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];

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

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`, which is
/// taken to be at least `least`; what is not finite must stand at the same places.
pub fn assert_near(
    found: &ArrayD<f64>,
    expected: &ArrayD<f64>,
    tolerance: f64,
    least: f64,
    what: &str,
) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(least, |scale, x| scale.max(x.abs()));
    for ((place, &found), &expected) in found.indexed_iter().zip(expected) {
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(
            same || (found - expected).abs() <= tolerance * scale,
            "{what} at {place:?}: {found:e}, expected {expected:e} (scale {scale:e})"
        );
    }
}

/// As [`assert_near`], of every result.
pub fn assert_close(found: &Tensors<f64>, expected: &Tensors<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (result, found) in found {
        assert_near(found, &expected[result], tolerance, 0.0, &format!("{what}: {result}"));
    }
}
