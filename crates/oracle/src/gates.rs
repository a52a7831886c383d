//! Gate G1: every element within its proven bound.

mod generic;
mod hints;
mod statistics;
mod uninformative;
mod verdict;

pub use generic::generic;
pub use hints::hint;
pub use statistics::{Measure, Part, Statistic, g2};
pub use uninformative::{HALF, Uninformative, uninformative};
pub use verdict::{Status, Verdict};

use crate::bounds::{Bound, Bounds};
use crate::tensor::Tensors;
use etalon_problem::Error;
use ndarray::{ArrayD, Dimension};
use std::borrow::Cow;

/// Outputs judged against their bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// Pass, or fail with the worst element.
    pub verdict: Verdict,
    /// The largest error divided by its bound over all elements with a finite bound; ∞ where an
    /// element that must be exact is not, or has the wrong class.
    pub margin: f64,
}

/// Judges every output of a pass. An output that is missing or has the wrong shape is a failure.
pub fn g1(bounds: &Bounds, outputs: &Tensors) -> Judgement {
    let judged = bounds.outputs.iter().filter_map(|(name, bound)| judge(name, bound, outputs));
    match judged.reduce(|worst, next| if next.0 > worst.0 { next } else { worst }) {
        Some((margin, text)) if margin > 1.0 => Judgement { verdict: Verdict::Fail(text), margin },
        Some((margin, _)) => Judgement { verdict: Verdict::Pass, margin },
        None => Judgement { verdict: Verdict::Pass, margin: 0.0 },
    }
}

/// The largest margin of one output, and what is wrong where it is above 1; `None` for an empty one.
fn judge(name: &str, bound: &Bound, outputs: &Tensors) -> Option<(f64, String)> {
    let got = match read(name, bound, outputs) {
        Ok(got) => got,
        Err(text) => return Some((f64::INFINITY, text)),
    };
    let margins = margins(bound, &got);
    let all = margins.iter().copied().enumerate();
    let (at, worst) = all.reduce(|worst, next| if next.1 > worst.1 { next } else { worst })?;
    let text = if worst > 1.0 { describe(name, bound, &got, &margins, at) } else { String::new() };
    Some((worst, text))
}

fn read(name: &str, bound: &Bound, outputs: &Tensors) -> Result<ArrayD<f64>, String> {
    let tensor = outputs.get(name).ok_or_else(|| format!("`{name}` was not returned"))?;
    let fits = Error::expect_shape(name, bound.value.shape(), &tensor.shape);
    fits.and_then(|()| tensor.numbers(name)).map_err(|error| error.to_string())
}

/// The margin of every element of an output that has its shape, in row-major order: |got − value| / bound,
/// and ∞ for a wrong class. Above 1 an element is off.
pub fn margins(bound: &Bound, got: &ArrayD<f64>) -> Vec<f64> {
    let [values, bounds, got] = [&bound.value, &bound.bound, got].map(in_order);
    let elements = values.iter().zip(&*bounds).zip(&*got);
    let margin = |((&value, &b), &got): ((&f64, &f64), &f64)| margin(got, value, b, bound.largest);
    let mut margins: Vec<f64> = elements.map(margin).collect();
    for (&at, others) in &bound.as_right {
        if let Some(margin) = margins.get_mut(at) {
            let right = got[at] == values[at] || others.iter().any(|&x| x as f64 == got[at]);
            *margin = if right { 0.0 } else { f64::INFINITY };
        }
    }
    margins
}

/// The elements of an array in row-major order: iterators over any number of axes are slow.
pub fn in_order(x: &ArrayD<f64>) -> Cow<'_, [f64]> {
    x.as_slice().map_or_else(|| x.iter().copied().collect(), Cow::Borrowed)
}

/// |got − value| / bound, and ∞ for a wrong class. Never NaN, so that no comparison can lose it.
fn margin(got: f64, value: f64, bound: f64, largest: f64) -> f64 {
    if !value.is_finite() {
        let same = got == value || (got.is_nan() && value.is_nan());
        return if same { 0.0 } else { f64::INFINITY };
    }
    if bound == f64::INFINITY {
        return 0.0; // no requirement, not even of finiteness: the arithmetic may overflow here
    }
    if !got.is_finite() {
        let overflows = value.abs() + bound > largest && got.is_infinite();
        let permitted = overflows && (got > 0.0) == (value > 0.0);
        return if permitted { 0.0 } else { f64::INFINITY };
    }
    let error = (got - value).abs();
    let margin = if error == 0.0 { 0.0 } else { error / bound };
    if margin.is_nan() { f64::INFINITY } else { margin }
}

/// The element at place `at`, and what the others are like.
fn describe(name: &str, bound: &Bound, got: &ArrayD<f64>, margins: &[f64], at: usize) -> String {
    let Some((index, &found)) = got.indexed_iter().nth(at) else { return String::new() };
    let (value, b, margin) = (bound.value[&index], bound.bound[&index], margins[at]);
    let bad = margins.iter().filter(|margin| **margin > 1.0).count();
    let hint = hint(bound, got).map_or(String::new(), |hint| format!("; {hint}"));
    format!(
        "{name}{:?} is {found:e}, exact is {value:e} ± {b:e} (margin {}); {bad} of {} \
         elements are out of bounds{hint}",
        index.slice(),
        three_digits(margin),
        got.len()
    )
}

/// A margin as people read it.
fn three_digits(margin: f64) -> String {
    match margin {
        small if small < 9.995 => format!("{small:.2}"),
        some if some < 99.95 => format!("{some:.1}"),
        many if many < 999.5 || !many.is_finite() => format!("{many:.0}"),
        more => format!("{more:.2e}"),
    }
}

/// The largest share of elements that may be unable to tell right from wrong.
const BLUNT: f64 = 0.2;

/// An output of so few numbers has one for each head, the sum of everything that the head did: half
/// of them may cancel, and one number alone.
const FEW: usize = 4;

/// Fails unless the bounds could notice anything: at most a fifth of the elements of every output may
/// have a bound above a tenth of their row's scale; of up to four, half. For generic inputs;
/// others may be uninformative on purpose. The error names the output that is not informative.
pub fn informative(bounds: &Bounds) -> Result<(), String> {
    for (name, bound) in &bounds.outputs {
        let (sharp, all) = sharpness(bound);
        let few = if all <= FEW { (all / 2).max(1) } else { 1 };
        if (all - sharp) as f64 > (BLUNT * all as f64).max(few as f64) {
            return Err(format!(
                "only {sharp} of {all} elements of {name} have a bound of at most a tenth of \
                 their row's scale"
            ));
        }
    }
    Ok(())
}

/// Fails unless the bounds of attention's forward pass notice a mask that is wrong by one: in nine rows of
/// ten, a key less must be out of bounds. Of f32, and for generic inputs: bf16 hides a key among many.
pub fn powerful(bounds: &Bounds) -> Result<(), String> {
    match bounds.power {
        Some(power) if power < 0.9 => Err(format!(
            "in only {:.0} % of the rows would the bounds notice that the last key is forgotten",
            100.0 * power
        )),
        _ => Ok(()),
    }
}

/// Number of elements whose bound is at most a tenth of their row's scale, and number of all elements.
pub fn sharpness(bound: &Bound) -> (usize, usize) {
    let width = row_width(bound);
    let (Some(values), Some(bounds)) = (bound.value.as_slice(), bound.bound.as_slice()) else {
        return (0, bound.value.len());
    };
    let whole = rms(values);
    let (mut sharp, mut all) = (0, 0);
    for (values, bounds) in values.chunks(width).zip(bounds.chunks(width)) {
        let scale = scale_of_row(values, whole);
        all += values.len();
        sharp += bounds.iter().filter(|&&b| b <= 0.1 * scale).count();
    }
    (sharp, all)
}

/// The elements of a row, at least 1: those of the last axis, or all of a list.
fn row_width(bound: &Bound) -> usize {
    let width = match bound.value.ndim() {
        0 | 1 => bound.value.len(),
        axes => bound.value.shape()[axes - 1],
    };
    width.max(1)
}

/// The scale of a row: its root mean square. A row in which nearly everything cancels (the gradient of a query
/// with a single key) is measured against the whole output instead, whose scale is `whole`.
pub fn scale_of_row(values: &[f64], whole: f64) -> f64 {
    let own = rms(values);
    if own < 0.1 * whole { whole } else { own }
}

/// The root mean square of those that are finite.
pub fn rms(values: &[f64]) -> f64 {
    let finite = || values.iter().filter(|x| x.is_finite());
    (finite().map(|x| x * x).sum::<f64>() / finite().count().max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests;
