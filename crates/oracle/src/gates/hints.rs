//! Marks of a failure: not a number, never written, the exact results times one number. A hint is
//! given only where it leaves nothing beyond the bounds.

use super::margins;
use crate::bounds::Bound;
use ndarray::ArrayD;
use std::f64::consts::{LN_2, LOG2_E};

/// Fewest elements that are off from which a common number is derived.
const FEWEST: usize = 4;

/// Largest relative distance of a ratio from a number that has a name.
const NEAR: f64 = 5e-3;

/// A guess at the mistake, if the elements that are off have the marks of a common one.
pub fn hint(bound: &Bound, got: &ArrayD<f64>) -> Option<String> {
    let all = bound.value.iter().zip(&bound.bound).zip(got).map(|((&x, &b), &got)| (x, b, got));
    let off: Vec<(f64, f64, f64)> =
        all.zip(margins(bound, got)).filter(|(_, margin)| *margin > 1.0).map(|(x, _)| x).collect();
    if off.is_empty() {
        return None;
    }
    let nan = off.iter().filter(|(value, _, got)| got.is_nan() && !value.is_nan()).count();
    if nan > 0 {
        return Some(format!("{nan} elements are NaN: a row that sees nothing, or 0·∞?"));
    }
    if off.iter().all(|(.., got)| *got == 0.0) {
        return Some(match got.iter().all(|got| *got == 0.0) {
            true => "every element is 0: was it written at all?".to_string(),
            false => "every element that is off is 0: was it written at all?".to_string(),
        });
    }
    let one = off[0].2;
    if off.len() >= FEWEST && off.iter().all(|(.., got)| *got == one) {
        return Some(format!("every element that is off is {one:e}"));
    }
    let leaves_nothing = |other: &dyn Fn(f64) -> f64, stretch: f64| {
        off.iter().all(|&(value, bound, got)| (got - other(value)).abs() <= stretch * bound)
    };
    let ratio = median(off.iter().map(|(value, _, got)| got / value))?;
    if ratio != 0.0 && leaves_nothing(&|value| ratio * value, ratio.abs().max(1.0)) {
        return Some(name_ratio(ratio));
    }
    let difference = median(off.iter().map(|(value, _, got)| got - value))?;
    leaves_nothing(&|value| value + difference, 1.0)
        .then(|| format!("every element that is off is off by {difference:.4}"))
}

fn name_ratio(ratio: f64) -> String {
    let close = |x: f64| (ratio / x - 1.0).abs() < NEAR;
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

/// The number in the middle; none of too few.
fn median(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let mut numbers: Vec<f64> = numbers.filter(|x| x.is_finite()).collect();
    numbers.sort_by(f64::total_cmp);
    (numbers.len() >= FEWEST).then(|| numbers[numbers.len() / 2])
}
