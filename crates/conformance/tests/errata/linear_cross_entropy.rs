//! The figures of `docs/errata.md` on linear cross-entropy: each mistake's formula against the oracle, on one
//! fixed problem of 64 tokens, 16 elements and 1000 classes.

use etalon_problem::{LinearCrossEntropy, Reduction};
use etalon_reference::linear_cross_entropy::{Cotangents, Inputs, Wanted, backward, forward};
use ndarray::{Array1, Array2, ArrayD, Axis, arr0};

const TOKENS: usize = 64;
const DIM: usize = 16;
const VOCAB: usize = 1000;

/// ((n² + s n) mod 10007)/10007 − ½: numbers without a pattern that any language makes.
fn tensor(rows: usize, s: usize, scale: f64) -> Array2<f64> {
    Array2::from_shape_fn((rows, DIM), |(i, c)| {
        let n = i * DIM + c;
        scale * (((n * n + s * n) % 10007) as f64 / 10007.0 - 0.5)
    })
}

fn h() -> Array2<f64> {
    tensor(TOKENS, 3, 4.0)
}

fn w() -> Array2<f64> {
    tensor(VOCAB, 7, 2.0)
}

fn target(i: usize) -> usize {
    (37 * i + 11) % VOCAB
}

fn problem() -> LinearCrossEntropy {
    LinearCrossEntropy::new(TOKENS, DIM, VOCAB).reduction(Reduction::Sum)
}

/// The loss, dh and dw of the oracle; every token of `ignored` is.
fn exact(
    problem: &LinearCrossEntropy,
    ignored: fn(usize) -> bool,
) -> (f64, ArrayD<f64>, ArrayD<f64>) {
    let (h, w) = (h(), w());
    let targets =
        Array1::from_shape_fn(TOKENS, |i| if ignored(i) { -100 } else { target(i) as i64 });
    let inputs = Inputs {
        h: h.view(),
        w: w.view(),
        bias: None,
        targets: targets.view(),
        class_weights: None,
        token_weights: None,
    };
    let loss = forward(problem, &inputs).expect("forward").loss[[]];
    let one = arr0(1.0);
    let dloss = Some(one.view().into_dyn());
    let cotangents = Cotangents { dloss, dlse: None, dlogprob: None, dentropy: None };
    let gradients = backward(problem, &inputs, &cotangents, Wanted::ALL).expect("backward");
    let [dh, dw] = [gradients.dh, gradients.dw].map(|x| x.expect("a gradient").into_dyn());
    (loss, dh, dw)
}

fn lse(z: &Array2<f64>) -> Array1<f64> {
    z.map_axis(Axis(1), |z| z.iter().map(|z| z.exp()).sum::<f64>().ln())
}

/// The seed's gradient of the logits: p − [v = y].
fn seed_logit_gradient(z: &Array2<f64>) -> Array2<f64> {
    let mut dz = (z - &lse(z).insert_axis(Axis(1))).mapv(f64::exp);
    (0..TOKENS).for_each(|i| dz[[i, target(i)]] -= 1.0);
    dz
}

fn rms<'a>(x: impl IntoIterator<Item = &'a f64>) -> f64 {
    let (mut sum, mut n) = (0.0, 0.0);
    x.into_iter().for_each(|x| (sum, n) = (sum + x * x, n + 1.0));
    f64::sqrt(sum / n)
}

/// ‖found − exact‖ / ‖exact‖
fn error(found: &Array2<f64>, exact: &ArrayD<f64>) -> f64 {
    rms(&(found.clone().into_dyn() - exact)) / rms(exact)
}

fn printed(value: f64, digits: usize, expected: &str) {
    assert_eq!(format!("{value:.digits$}"), expected);
}

#[test]
fn a_temperature_outside_the_softmax() {
    let a = h().dot(&w().t());
    let (loss, dh, _) = exact(&problem().temperature(0.5), |_| false);
    let logprob = (0..TOKENS).map(|i| (a[[i, target(i)]] - lse(&a)[i]) / 0.5).sum::<f64>();
    printed(loss / TOKENS as f64, 2, "23.92");
    printed(-logprob / TOKENS as f64, 2, "25.43");
    printed(error(&(seed_logit_gradient(&a) / 0.5).dot(&w()), &dh), 3, "0.113");
}

#[test]
fn an_ignored_row_without_a_target_still_pulls() {
    let ignored = |i: usize| i % 4 == 3;
    let (_, dh, dw) = exact(&problem(), ignored);
    let mut dz = seed_logit_gradient(&h().dot(&w().t()));
    (0..TOKENS).filter(|&i| ignored(i)).for_each(|i| dz[[i, target(i)]] += 1.0);
    printed(error(&dz.t().dot(&h()), &dw), 3, "0.264");
    let pulled = dz.dot(&w());
    let rows = |ignoring: bool| (0..TOKENS).filter(move |&i| ignored(i) == ignoring);
    let of_ignored: Vec<f64> = rows(true).flat_map(|i| pulled.row(i).to_vec()).collect();
    let of_counted: Vec<f64> =
        rows(false).flat_map(|i| (0..DIM).map(|c| dh[[i, c]]).collect::<Vec<_>>()).collect();
    printed(rms(&of_ignored) / rms(&of_counted), 2, "0.68");
}

#[test]
fn no_derivative_of_the_cap() {
    let cap = 2.0;
    let z = h().dot(&w().t()).mapv(|a| cap * (a / cap).tanh());
    let (_, dh, _) = exact(&problem().softcap(cap), |_| false);
    printed(error(&seed_logit_gradient(&z).dot(&w()), &dh), 2, "0.93");
}

#[test]
fn a_difference_as_the_residual_serves_one_cotangent() {
    let a = h().dot(&w().t());
    let (_, dh, _) = exact(&problem().lse_square_scale(0.01), |_| false);
    printed(error(&seed_logit_gradient(&a).dot(&w()), &dh), 3, "0.197");
}

#[test]
fn classes_that_fill_up_a_tile() {
    // Equal logits of 0, and 1000 classes of −8 filled up to 1024.
    printed((153_600f64 / 151_936.0).ln(), 4, "0.0109");
    let own = 1000.0 * f64::exp(-8.0);
    printed(((own + 24.0) / own).ln(), 2, "4.28");
}
