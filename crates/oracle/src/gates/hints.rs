//! What a failure looks like: the ratio of results to exact values, where it is one number.

use crate::bounds::Bound;
use ndarray::ArrayD;
use std::f64::consts::{LN_2, LOG2_E};

/// A guess at the mistake, if the results have the marks of a common one.
pub fn hint(bound: &Bound, got: &ArrayD<f64>) -> Option<String> {
    let pairs = || bound.value.iter().copied().zip(got.iter().copied());
    let nan = pairs().filter(|(value, got)| got.is_nan() && !value.is_nan()).count();
    if nan > 0 {
        return Some(format!("{nan} elements are NaN: a row that sees nothing, or 0·∞?"));
    }
    if pairs().all(|(value, got)| value == 0.0 || got == 0.0) {
        return Some("every element is 0: was it written at all?".to_string());
    }
    // Only elements far above their bounds can show a ratio.
    let loud: Vec<(f64, f64)> = (pairs().zip(&bound.bound))
        .filter(|((value, got), b)| {
            value.is_finite() && got.is_finite() && value.abs() > 20.0 * **b
        })
        .map(|(pair, _)| pair)
        .collect();
    let ratio = constant(loud.iter().map(|(value, got)| got / value));
    if let Some(ratio) = ratio.filter(|ratio| (ratio - 1.0).abs() > 1e-3) {
        return Some(name_ratio(ratio));
    }
    let difference = constant(loud.iter().map(|(value, got)| got - value))?;
    (difference.abs() > 1e-3).then(|| format!("every element is off by {difference:.4}"))
}

fn name_ratio(ratio: f64) -> String {
    let close = |x: f64| (ratio / x - 1.0).abs() < 5e-3;
    let known = [
        (LOG2_E, "log₂e: a logarithm to base 2?"),
        (LN_2, "ln 2: an exponential to base 2, or a logarithm taken for one to base 2?"),
        (-1.0, "−1: a sign?"),
    ];
    match known.into_iter().find(|(x, _)| close(*x)) {
        Some((_, text)) => format!("results are exact values times {text}"),
        None => {
            let inverse = 1.0 / ratio;
            format!(
                "results are exact values times {ratio:.4} (1/{inverse:.4}): \
                 a scale, or a group of heads, applied twice or not at all?"
            )
        }
    }
}

/// The number that at least nine tenths of these are, to half a percent.
fn constant(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let mut numbers: Vec<f64> = numbers.filter(|x| x.is_finite()).collect();
    if numbers.len() < 4 {
        return None; // too few to call it a pattern
    }
    numbers.sort_by(f64::total_cmp);
    let median = numbers[numbers.len() / 2];
    let near = numbers.iter().filter(|x| (*x - median).abs() <= 5e-3 * median.abs()).count();
    (10 * near >= 9 * numbers.len()).then_some(median)
}
