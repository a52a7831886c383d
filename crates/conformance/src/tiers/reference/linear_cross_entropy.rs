//! linear_cross_entropy by name.

use super::{Arrays, named, needed, no_pass, some, view};
use etalon_problem::{Algorithm, Error, LinearCrossEntropy, Pass};
use etalon_reference::linear_cross_entropy::{self, Cotangents, Inputs, SecondCotangents, Wanted};
use etalon_reference::scalar::Real;
use ndarray::{Array1, ArrayD, ArrayView1, arr0};

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    let targets = targets_of(x)?;
    let inputs = inputs_of(x, &targets)?;
    Ok(match pass {
        Pass::Forward => {
            let out = linear_cross_entropy::forward(problem, &inputs)?;
            named([
                ("loss", Some(out.loss)),
                ("lse", out.lse.and_then(some)),
                ("logprob", out.logprob.and_then(some)),
                ("entropy", out.entropy.and_then(some)),
                ("argmax", out.argmax.map(|x| numbers(x.into_dyn()))),
                ("n_valid", Some(numbers(arr0(out.n_valid).into_dyn()))),
                ("normaliser", some(arr0(out.normaliser))),
            ])
        }
        Pass::Backward => {
            let cotangents = cotangents_of(x)?;
            let out = linear_cross_entropy::backward(problem, &inputs, &cotangents, Wanted::ALL)?;
            named([
                ("dh", out.dh.and_then(some)),
                ("dw", out.dw.and_then(some)),
                ("dbias", out.dbias.and_then(some)),
            ])
        }
        Pass::DoubleBackward => {
            let (first, second) = (cotangents_of(x)?, second_cotangents_of(x)?);
            let out = linear_cross_entropy::double_backward(problem, &inputs, &first, &second)?;
            named([
                ("gh", some(out.gh)),
                ("gw", some(out.gw)),
                ("gbias", out.gbias.and_then(some)),
                ("gdloss", Some(out.gdloss)),
                ("gdlse", out.gdlse.and_then(some)),
                ("gdlogprob", out.gdlogprob.and_then(some)),
                ("gdentropy", out.gdentropy.and_then(some)),
            ])
        }
        _ => return Err(no_pass(Algorithm::LinearCrossEntropy, pass)),
    })
}

fn targets_of<T: Real>(x: &Arrays<T>) -> Result<Array1<i64>, Error> {
    let targets: ArrayView1<'_, T> = needed(x, "targets")?;
    Ok(targets.mapv(|y| y.to_f64() as i64))
}

fn inputs_of<'a, T: Real>(
    x: &'a Arrays<T>,
    targets: &'a Array1<i64>,
) -> Result<Inputs<'a, T>, Error> {
    Ok(Inputs {
        h: needed(x, "h")?,
        w: needed(x, "w")?,
        bias: view(x, "bias")?,
        targets: targets.view(),
        class_weights: view(x, "class_weights")?,
        token_weights: view(x, "token_weights")?,
    })
}

fn cotangents_of<T: Real>(x: &Arrays<T>) -> Result<Cotangents<'_, T>, Error> {
    Ok(Cotangents {
        dloss: view(x, "dloss")?,
        dlse: view(x, "dlse")?,
        dlogprob: view(x, "dlogprob")?,
        dentropy: view(x, "dentropy")?,
    })
}

fn second_cotangents_of<T: Real>(x: &Arrays<T>) -> Result<SecondCotangents<'_, T>, Error> {
    Ok(SecondCotangents {
        ddh: view(x, "ddh")?,
        ddw: view(x, "ddw")?,
        ddbias: view(x, "ddbias")?,
        cot_loss: view(x, "cot_loss")?,
        cot_lse: view(x, "cot_lse")?,
        cot_logprob: view(x, "cot_logprob")?,
        cot_entropy: view(x, "cot_entropy")?,
    })
}

/// Whole numbers as numbers of the arithmetic: they are small.
fn numbers<T: Real>(integers: ArrayD<i64>) -> ArrayD<T> {
    integers.mapv(|x| T::from_f64(x as f64))
}
