//! Gate G1: every element within its proven bound.

mod hints;

pub use crate::verdict::Verdict;

use crate::bounds::{Bound, Bounds};
use crate::tensor::Tensors;
use ndarray::ArrayD;

/// How outputs stand against their bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// Pass, or fail with the worst element.
    pub verdict: Verdict,
    /// The largest error divided by its bound over all elements with a finite bound; ∞ where an
    /// element that must be exact is not, or has the wrong class.
    pub margin: f64,
}

/// One element that lies farthest out.
#[derive(Debug, Clone, Copy)]
struct Worst {
    margin: f64,
    at: usize,
}

/// Judges every output of a pass. An output that is missing or has the wrong shape is a failure.
pub fn g1(bounds: &Bounds, outputs: &Tensors) -> Judgement {
    let mut worst: Option<(f64, String)> = None;
    for (name, bound) in &bounds.outputs {
        let (margin, text) = match read(name, bound, outputs) {
            Err(text) => (f64::INFINITY, text),
            Ok(got) => match judge(bound, &got) {
                Some(found) => (found.margin, describe(name, bound, &got, found)),
                None => continue,
            },
        };
        if worst.as_ref().is_none_or(|(largest, _)| margin > *largest) {
            worst = Some((margin, text));
        }
    }
    match worst {
        Some((margin, text)) if margin > 1.0 => Judgement { verdict: Verdict::Fail(text), margin },
        Some((margin, _)) => Judgement { verdict: Verdict::Pass, margin },
        None => Judgement { verdict: Verdict::Pass, margin: 0.0 },
    }
}

fn read(name: &str, bound: &Bound, outputs: &Tensors) -> Result<ArrayD<f64>, String> {
    let tensor = outputs.get(name).ok_or_else(|| format!("`{name}` was not returned"))?;
    if tensor.shape != bound.value.shape() {
        let (expected, found) = (bound.value.shape(), &tensor.shape);
        return Err(format!("`{name}` must have shape {expected:?}, found {found:?}"));
    }
    tensor.numbers(name).map_err(|error| error.to_string())
}

/// The worst element of one output; `None` for an empty one.
fn judge(bound: &Bound, got: &ArrayD<f64>) -> Option<Worst> {
    let margins = bound.value.iter().zip(&bound.bound).zip(got);
    let margins = margins.map(|((&value, &b), &got)| margin(got, value, b, bound.largest));
    margins
        .enumerate()
        .map(|(at, margin)| Worst { margin, at })
        .reduce(|worst, next| if next.margin > worst.margin { next } else { worst })
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

fn describe(name: &str, bound: &Bound, got: &ArrayD<f64>, worst: Worst) -> String {
    let element = |array: &ArrayD<f64>| array.iter().nth(worst.at).copied().unwrap_or(f64::NAN);
    let index = unravel(worst.at, got.shape());
    let (got_here, value, b) = (element(got), element(&bound.value), element(&bound.bound));
    let mut text = format!(
        "{name}{index:?} is {got_here:e}, exact is {value:e} ± {b:e} (margin {:.3})",
        worst.margin
    );
    let bad = bound.value.iter().zip(&bound.bound).zip(got);
    let bad = bad.filter(|((value, b), got)| margin(**got, **value, **b, bound.largest) > 1.0);
    text += &format!("; {} of {} elements are out of bounds", bad.count(), got.len());
    if let Some(hint) = hints::hint(bound, got) {
        text += &format!("; {hint}");
    }
    text
}

/// The position of the `at`-th element of an array of this shape.
fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (place, &extent) in index.iter_mut().zip(shape).rev() {
        (*place, at) = (at % extent.max(1), at / extent.max(1));
    }
    index
}

/// The largest share of elements that may be unable to tell right from wrong.
const BLUNT: f64 = 0.2;

/// An output of so few numbers has one for each head, the sum of everything that the head did: half
/// of them may cancel, and one number alone.
const FEW: usize = 4;

/// Whether the bounds could notice anything: at most a fifth of the elements of every output may
/// have a bound above a tenth of their row's scale; of up to four, half. For generic inputs;
/// others may be blunt on purpose. The error says which output is not informative.
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

/// How many elements have a bound below a tenth of their row's scale, of how many.
fn sharpness(bound: &Bound) -> (usize, usize) {
    // One scale for each row of the last axis. A row in which nearly everything cancels (the
    // gradient of a query with a single key) is measured against the whole output instead.
    let width = match bound.value.ndim() {
        0 | 1 => bound.value.len(),
        axes => bound.value.shape()[axes - 1],
    };
    let (Some(values), Some(bounds)) = (bound.value.as_slice(), bound.bound.as_slice()) else {
        return (0, bound.value.len());
    };
    let whole = rms(values);
    let (mut sharp, mut all) = (0, 0);
    for (values, bounds) in values.chunks(width.max(1)).zip(bounds.chunks(width.max(1))) {
        let own = rms(values);
        let scale = if own < 0.1 * whole { whole } else { own };
        all += values.len();
        sharp += bounds.iter().filter(|&&b| b <= 0.1 * scale).count();
    }
    (sharp, all)
}

fn rms(values: &[f64]) -> f64 {
    let finite = || values.iter().filter(|x| x.is_finite());
    (finite().map(|x| x * x).sum::<f64>() / finite().count().max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests;
