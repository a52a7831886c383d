use super::*;
use crate::profile::Profile;
use crate::tensor::{Data, Stored, Tensor};
use etalon_problem::{Attention, Dtype, Extents, Pass, Problem};
use half::bf16;
use ndarray::ArrayD;
use std::collections::BTreeMap;
use std::sync::Arc;

fn shaped(shape: &[usize], value: &[f64], bound: &[f64]) -> Bounds {
    let array = |list: &[f64]| ArrayD::from_shape_vec(shape, list.to_vec()).unwrap();
    let (value, bound, stored) = (array(value), array(bound), Stored::Float(Dtype::F64));
    let (largest, no_bound, as_right) = (65504.0, BTreeMap::new(), BTreeMap::new()); // as if stored in f16
    let bound = Bound { value, bound, stored, largest, no_bound, as_right };
    Bounds { outputs: BTreeMap::from([("o".to_string(), bound)]), power: None }
}

fn bounds(value: &[f64], bound: &[f64]) -> Bounds {
    shaped(&[1, value.len()], value, bound)
}

fn judged(value: &[f64], bound: &[f64], got: &[f64]) -> Judgement {
    let tensor = Tensor { shape: vec![1, got.len()], data: Data::F64(got.to_vec()) };
    g1(&bounds(value, bound), &BTreeMap::from([("o".to_string(), tensor)]))
}

fn failure(judgement: Judgement) -> String {
    assert!(judgement.margin > 1.0);
    match judgement.verdict {
        Verdict::Fail(text) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn margins_count_in_bounds() {
    let judgement = judged(&[1.0, 2.0], &[0.5, 0.5], &[1.25, 2.125]);
    assert_eq!(judgement, Judgement { verdict: Verdict::Pass, margin: 0.5 });
    let text = failure(judged(&[1.0, 2.0], &[0.5, 0.5], &[1.0, 3.0]));
    assert!(text.contains("o[0, 1] is 3e0, exact is 2e0 ± 5e-1 (margin 2.00)"), "{text}");
    assert!(text.contains("1 of 2 elements"), "{text}");
}

#[test]
fn nothing_non_finite_passes_silently() {
    for value in [0.0, 1.0, f64::INFINITY, f64::NEG_INFINITY] {
        let text = failure(judged(&[1.0, value], &[0.5, 0.5], &[1.0, f64::NAN]));
        assert!(text.contains("NaN"), "{text}");
    }
    failure(judged(&[f64::NAN], &[0.0], &[1.0]));
    failure(judged(&[f64::INFINITY], &[0.0], &[f64::NEG_INFINITY]));
    failure(judged(&[f64::INFINITY], &[0.0], &[f64::MAX]));
    failure(judged(&[1.0], &[0.5], &[f64::INFINITY]));
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(judged(&[value], &[0.0], &[value]).verdict, Verdict::Pass);
    }
}

#[test]
fn a_bound_of_zero_means_exact() {
    assert_eq!(judged(&[0.0], &[0.0], &[-0.0]).verdict, Verdict::Pass);
    failure(judged(&[0.0], &[0.0], &[1e-300]));
}

#[test]
fn overflow_is_permitted_where_the_bound_reaches_beyond_the_type() {
    let permitted = judged(&[-65500.0], &[32.0], &[f64::NEG_INFINITY]);
    assert_eq!(permitted.verdict, Verdict::Pass);
    failure(judged(&[-65500.0], &[32.0], &[f64::INFINITY])); // the wrong side
    failure(judged(&[-65500.0], &[32.0], &[f64::NAN]));
    failure(judged(&[-60000.0], &[32.0], &[f64::NEG_INFINITY]));
}

#[test]
fn missing_and_misshapen_outputs_fail() {
    let expected = bounds(&[1.0], &[0.5]);
    let text = failure(g1(&expected, &BTreeMap::new()));
    assert_eq!(text, "`o` was not returned");
    let flat = Tensor { shape: vec![1], data: Data::F64(vec![1.0]) };
    let text = failure(g1(&expected, &BTreeMap::from([("o".to_string(), flat)])));
    assert_eq!(text, "`o` must have shape [1, 1], found [1]");
}

#[test]
fn constant_ratios_are_named() {
    let value: Vec<f64> = (1..9).map(f64::from).collect();
    let times = |ratio: f64| {
        let got: Vec<f64> = value.iter().map(|x| x * ratio).collect();
        failure(judged(&value, &[1e-6; 8], &got))
    };
    assert!(times(std::f64::consts::LOG2_E).contains("a logarithm to base 2?"));
    assert!(times(0.125).contains("times 0.1250 (1/8.0000)"));
    assert!(times(0.0).contains("was it written at all?"));
    let random = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0];
    assert!(!failure(judged(&value, &[1e-6; 8], &random)).contains("times"));
}

/// A hint is about the elements that are off, and leaves nothing beyond the bounds.
#[test]
fn a_few_zeros_among_roundings_are_no_factor() {
    let value: Vec<f64> = (1..41).map(f64::from).collect();
    let bound: Vec<f64> = value.iter().map(|x| 4e-3 * x).collect();
    let mut got: Vec<f64> = value.iter().map(|x| x * 1.002).collect();
    (got[3], got[20]) = (0.0, 0.0);
    let text = failure(judged(&value, &bound, &got));
    assert!(text.ends_with("every element that is off is 0: was it written at all?"), "{text}");
    // Results where the exact ones are 0 were written.
    let text = failure(judged(&[0.0; 5], &[1e-6; 5], &[1.0, 2.0, 3.0, 4.0, 6.0]));
    assert!(!text.contains("is 0:"), "{text}");
}

#[test]
fn blunt_bounds_are_not_informative() {
    assert_eq!(informative(&bounds(&[1.0; 10], &[0.1; 10])), Ok(()));
    let mut found = [0.1; 10];
    (found[3], found[5]) = (f64::INFINITY, 1.0);
    assert_eq!(informative(&bounds(&[1.0; 10], &found)), Ok(()), "a fifth may be uninformative");
    found[4] = 0.2;
    let text = informative(&bounds(&[1.0; 10], &found)).unwrap_err();
    assert!(text.starts_with("only 7 of 10 elements of o"), "{text}");
    assert_eq!(informative(&bounds(&[1.0], &[1.0])), Ok(()), "a single number may cancel");
    assert_eq!(informative(&bounds(&[1.0; 4], &[0.1, 1.0, 1.0, 0.1])), Ok(()), "half of few may");
    assert!(informative(&bounds(&[1.0; 4], &[1.0, 1.0, 1.0, 0.1])).is_err());
    assert!(informative(&bounds(&[1.0; 5], &[1.0, 0.1, 1.0, 0.1, 0.1])).is_err());
}

#[test]
fn a_row_that_cancels_is_measured_against_the_whole() {
    let value = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]; // rms of all: 0.87
    let judge = |last: f64| {
        informative(&shaped(&[4, 2], &value, &[1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, last, last]))
    };
    assert!(judge(0.08).is_ok() && judge(0.09).is_err());
}

/// The rows in doubt of an output of one column in bf16 whose bounds are wider than its results, beside simulated
/// kernels that err by `errors` in every row.
fn in_doubt(value: &[f64], got: &[f64], errors: &[f64]) -> usize {
    let shape = [1, 1, value.len(), 1];
    let exact = shaped(&shape, value, &vec![10.0; value.len()]);
    let list = got.iter().map(|&x| bf16::from_f64(x)).collect();
    let tensor = Tensor { shape: shape.to_vec(), data: Data::Bf16(list) };
    let outputs = BTreeMap::from([("o".to_string(), tensor)]);
    let extents =
        Extents { batch: 1, query_heads: 1, key_heads: 1, queries: value.len(), keys: 1, dim: 1 };
    let problem: Problem = Attention::new(extents).into();
    let simulate = |_| -> Result<_, Error> {
        let errors = ArrayD::from_shape_vec(&shape[..], errors.to_vec()).unwrap();
        Ok(Arc::new(BTreeMap::from([("o".to_string(), errors)])))
    };
    let profile = Profile::flash(Dtype::Bf16);
    let operands = problem.operands(Pass::Forward);
    let found = uninformative(&operands, &profile, &exact, &outputs, simulate).unwrap();
    found.iter().map(|x| x.undecided).sum()
}

/// bf16 has 13.1875 and 13.25 (8 bits): all simulated kernels store the first, which is right to four digits.
#[test]
fn a_neighbour_of_the_number_that_simulated_kernels_store_is_not_in_doubt() {
    let exact = 13.188994;
    assert_eq!(in_doubt(&[exact], &[13.25], &[13.1875 - exact]), 0);
    let far = 20.0;
    assert_eq!(in_doubt(&[exact], &[far], &[13.1875 - exact]), 1, "a half more is");
}

/// Their squares are subnormal or 0 in f64.
#[test]
fn results_too_small_to_be_squared_are_not_in_doubt() {
    for tiny in [1e-157, 1e-200, 1e-300] {
        assert_eq!(in_doubt(&[tiny; 8], &[0.0; 8], &[-tiny; 8]), 0, "{tiny:e}");
    }
}
