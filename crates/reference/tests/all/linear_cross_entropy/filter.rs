//! The filter: its certificate holds, and says when it is worth nothing.

use super::cases::{everything, small};
use super::tensors::{Operands, operands, run};
use etalon_problem::{Error, LinearCrossEntropy, Pass, Reduction};
use etalon_reference::linear_cross_entropy::Gradients;
use etalon_reference::linear_cross_entropy::filter::{Certificate, Filter, backward};
use etalon_reference::linear_cross_entropy::shard::TILE;
use ndarray::{Array2, ArrayD, Axis};

/// Rounding of either side, in units of the largest element.
const ROUNDING: f64 = 1e-13;

/// Classes that few tokens think of: logits of a standard deviation of about 4.
fn peaked() -> (LinearCrossEntropy, Operands<f64>) {
    let problem = LinearCrossEntropy { tokens: 100, dim: 8, vocab: 5 * TILE + 3, ..everything() };
    let problem = problem.softcap(50.0).reduction(Reduction::Sum);
    let mut x = operands(&problem, Pass::Backward, 41);
    x.floats.get_mut("w").expect("w").mapv_inplace(|w| 3.0 * w);
    (problem, x)
}

fn filtered(
    problem: &LinearCrossEntropy,
    x: &Operands<f64>,
    filter: Filter,
) -> (Gradients<f64>, Certificate<f64>) {
    backward(problem, &x.inputs(), &x.cotangents(), filter).expect("a result")
}

/// The norms of the rows of found − exact.
fn errors(found: &Option<Array2<f64>>, exact: &ArrayD<f64>) -> Vec<f64> {
    let difference = found.as_ref().expect("a gradient").clone().into_dyn() - exact;
    difference.axis_iter(Axis(0)).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect()
}

fn assert_holds(problem: &LinearCrossEntropy, x: &Operands<f64>, filter: Filter) -> (usize, usize) {
    let exact = run(problem, Pass::Backward, x).expect("backward");
    let (found, certificate) = filtered(problem, x, filter);
    for (name, found, bounds) in
        [("dh", &found.dh, &certificate.dh), ("dw", &found.dw, &certificate.dw)]
    {
        let scale = exact[name].iter().fold(0.0f64, |scale, x| scale.max(x.abs()));
        for (row, (error, bound)) in errors(found, &exact[name]).iter().zip(bounds).enumerate() {
            let rounding = ROUNDING * scale;
            assert!(*error <= bound + rounding, "{filter:?}: {name} of {row}: {error} > {bound}");
            if let Filter::Within { dh, dw } = filter {
                assert!(*bound <= if name == "dh" { dh } else { dw }, "{name}: {bound}");
            }
        }
    }
    let dbias = found.dbias.expect("dbias").into_dyn();
    let dbias_error = (&dbias - &exact["dbias"]).mapv(f64::abs);
    assert!(dbias_error.iter().all(|&x| x <= ROUNDING * dbias.len() as f64), "dbias is never cut");
    certificate.tiles
}

#[test]
fn the_certificate_holds() {
    let (problem, x) = peaked();
    let mut kept = Vec::new();
    for eps in [0.0, 1e-6, 1e-3, 0.1, 1e9] {
        kept.push(assert_holds(&problem, &x, Filter::Below { eps }));
    }
    // Two blocks of tokens (75 count), six tiles of classes: from all to none.
    assert_eq!((kept[0], kept[4]), ((12, 12), (0, 12)));
    assert!(kept.is_sorted_by_key(|(kept, _)| std::cmp::Reverse(*kept)), "{kept:?}");
    let (found, certificate) = filtered(&problem, &x, Filter::Below { eps: 0.0 });
    let exact = run(&problem, Pass::Backward, &x).expect("backward");
    for (name, found) in [("dh", found.dh), ("dw", found.dw)] {
        assert_eq!(found.expect("a gradient").into_dyn(), exact[name], "{name} of no filter");
    }
    assert_eq!(found.dbias.expect("dbias").into_dyn(), exact["dbias"]);
    assert!(certificate.dh.iter().chain(&certificate.dw).all(|&bound| bound == 0.0));
    let mut kept = Vec::new();
    for budget in [0.0, 100.0, 1e9] {
        kept.push(assert_holds(&problem, &x, Filter::Within { dh: budget, dw: budget }).0);
    }
    assert!(kept[0] == 12 && kept[1] < 12 && kept[1] > 0 && kept[2] == 0, "{kept:?}");
    // Either budget alone holds everything back.
    assert_eq!(assert_holds(&problem, &x, Filter::Within { dh: 0.0, dw: 1e9 }).0, 12);
    assert_eq!(assert_holds(&problem, &x, Filter::Within { dh: 1e9, dw: 0.0 }).0, 12);
}

/// Early in a training every probability is 1/V, below any threshold in use: whatever holds no
/// target is dropped, all of it. The certificate says so: its bound is the whole softmax term.
#[test]
fn uniform_probabilities_make_the_certificate_vacuous() {
    let vocab = 20 * TILE;
    let problem = LinearCrossEntropy { tokens: 8, dim: 4, vocab, ..small() };
    let mut x = operands(&problem, Pass::Backward, 42);
    x.floats.retain(|name, _| !["dlse", "dlogprob", "dentropy"].contains(&name.as_str()));
    x.floats.get_mut("h").expect("h").mapv_inplace(|h| 1e-6 * h);
    x.floats.get_mut("dloss").expect("dloss").fill(8.0);
    x.targets.fill(1); // all in the first tile
    // 2⁻¹², which is usual for bfloat16, is above 1/V.
    let (found, certificate) = filtered(&problem, &x, Filter::Below { eps: 2f64.powi(-12) });
    assert_eq!(certificate.tiles, (1, 20));
    let w = &x.floats["w"];
    let widest = w.axis_iter(Axis(0)).map(|w| w.iter().map(|w| w * w).sum::<f64>().sqrt());
    let widest = widest.fold(0.0, f64::max);
    for &bound in &certificate.dh {
        assert!(bound > 0.9 * 0.95 * widest && bound <= widest, "{bound} of {widest}");
    }
    let dw = found.dw.expect("dw");
    let dropped = dw.slice_axis(Axis(0), (TILE..).into());
    assert!(dropped.iter().all(|&dw| dw == 0.0));
    assert!(certificate.dw.iter().skip(TILE).all(|&bound| bound > 0.0));
    assert!(certificate.dw.iter().take(TILE).all(|&bound| bound == 0.0));
}

/// NaN is not small.
#[test]
fn nan_is_never_left_out() {
    let (problem, mut x) = peaked();
    x.floats.get_mut("h").expect("h")[[1, 0]] = f64::NAN;
    for filter in [Filter::Below { eps: 1e9 }, Filter::Within { dh: 1e9, dw: 1e9 }] {
        let (found, certificate) = filtered(&problem, &x, filter);
        // The block of tokens that holds it is kept.
        assert_eq!(certificate.tiles, (6, 12));
        assert!(found.dw.expect("dw").iter().all(|x| x.is_nan()));
    }
}

#[test]
fn thresholds_are_checked() {
    let (problem, x) = peaked();
    for (filter, wrong) in [
        (Filter::Below { eps: f64::NAN }, "filter.eps"),
        (Filter::Below { eps: -1.0 }, "filter.eps"),
        (Filter::Within { dh: f64::INFINITY, dw: 0.0 }, "filter.dh"),
        (Filter::Within { dh: 0.0, dw: -0.5 }, "filter.dw"),
    ] {
        let error = backward(&problem, &x.inputs(), &x.cotangents(), filter).err();
        assert!(matches!(error, Some(Error::Value { name, .. }) if name == wrong));
    }
}

/// `Below` is below: what is exactly the threshold is kept, also at 0.
#[test]
fn what_reaches_the_threshold_is_kept() {
    let (problem, mut x) = peaked();
    x.floats.values_mut().for_each(|x| x.fill(0.0));
    let (_, certificate) = filtered(&problem, &x, Filter::Below { eps: 0.0 });
    assert_eq!(certificate.tiles, (12, 12));
    let (_, certificate) = filtered(&problem, &x, Filter::Below { eps: f64::MIN_POSITIVE });
    assert_eq!(certificate.tiles, (0, 12));
}

/// dw of a single token has rank one, so that its bound is no bound but the norm itself.
#[test]
fn the_certificate_of_a_single_token_is_tight() {
    let problem = small().ignore_index(-1).reduction(Reduction::Sum);
    let mut x = operands(&problem, Pass::Backward, 42);
    x.targets.fill(-1);
    x.targets[2] = 1;
    let exact = run(&problem, Pass::Backward, &x).expect("gradients");
    let (found, certificate) = filtered(&problem, &x, Filter::Below { eps: 1e9 });
    for (class, error) in errors(&found.dw, &exact["dw"]).into_iter().enumerate() {
        let bound = certificate.dw[class];
        assert!(
            bound > 0.0 && (bound - error).abs() <= 1e-14 * bound,
            "{class}: {error}, bound {bound}"
        );
    }
}
