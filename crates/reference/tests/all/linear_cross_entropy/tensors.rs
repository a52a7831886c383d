//! Operands and results by name, so that one law serves every pass.

use crate::common::tensors::{Random, typed};
pub use crate::common::tensors::{Sum, Tensors, assert_near, convert};
use etalon_problem::{Error, LinearCrossEntropy, Operand, Pass, Precision};
use etalon_reference::linear_cross_entropy::{self, Cotangents, Inputs, SecondCotangents, Wanted};
use etalon_reference::scalar::{Dual, Real};
use ndarray::{Array1, ArrayD, ArrayView, Dimension, IxDyn, arr0};

/// Operands that a pass reads.
#[derive(Clone)]
pub struct Operands<T> {
    pub floats: Tensors<T>,
    pub targets: Array1<i64>,
}

/// Every operand that the pass reads, the optional ones too. Every fourth token is ignored.
/// Weights are of either sign: nothing is taken to be positive.
pub fn operands(problem: &LinearCrossEntropy, pass: Pass, seed: u64) -> Operands<f64> {
    let read = problem.operands(pass).into_iter();
    let read = read.filter(|x| x.role.is_given() && x.precision != Precision::Integer);
    let floats = read.map(|Operand { name, shape, .. }| {
        let mut random = Random::of(name, seed);
        let mut tensor = ArrayD::from_shape_simple_fn(IxDyn(&shape), || random.number());
        if name.ends_with("weights") {
            tensor += 0.75; // a mean that is not 0, so that Z is not near 0
        }
        (name.to_string(), tensor)
    });
    let mut random = Random::of("targets", seed);
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
        typed(&self.floats, name)
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
        Pass::Jvp | Pass::Step | Pass::ForwardBackward => Vec::new(),
    };
    let named = results.into_iter().filter_map(|(name, x)| Some((name.to_string(), x?)));
    Ok(named.collect())
}

/// The passes of the algorithm.
pub const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];

/// As [`assert_near`], of every result.
pub fn assert_close(found: &Tensors<f64>, expected: &Tensors<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (result, found) in found {
        assert_near(found, &expected[result], tolerance, 0.0, &format!("{what}: {result}"));
    }
}
