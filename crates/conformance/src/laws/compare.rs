//! Comparison of results with those of the unchanged case.

use super::flaw::{Flaw, Judgement, worst};
use super::tensors::{Equality, both, change, change_each, exceeds, index, map, same};
use super::trial::Trial;
use crate::bounds::{Bound, Bounds};
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Problem};
use ndarray::ArrayD;

/// Two results that lie within a bound of the same number lie within two of each other.
pub(crate) const TWICE: f64 = 2.0;

/// Strictness of the comparison of results that a formula makes equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strict {
    /// Within two bounds: a kernel may take another way, and round differently.
    Bound,
    /// Bit by bit: what etalon's own tiers promise.
    Bits,
}

impl Strict {
    /// Fails unless the outputs are those of the case as it is where `counts(name, index)` holds.
    pub fn unchanged(
        self,
        trial: &Trial<'_>,
        outputs: &Tensors,
        counts: impl Fn(&str, &[usize]) -> bool,
    ) -> Judgement {
        match self {
            Strict::Bits => same(outputs, trial.clean()?, Equality::Bits, counts),
            Strict::Bound => agree(outputs, trial.clean()?, trial.bounds()?, TWICE, counts),
        }
    }
}

/// The bound of a result in comparisons of two: nothing is required where it is not finite, or may overflow its type.
pub(crate) fn allowance(exact: &Bound) -> ArrayD<f64> {
    let mut limit = exact.bound.clone();
    limit.zip_mut_with(&exact.value, |limit, value| {
        if !value.is_finite() || value.abs() + *limit > exact.largest {
            *limit = f64::INFINITY;
        }
    });
    limit
}

/// Fails unless |got − expected| ≤ its limit everywhere; returns the largest share of a limit.
pub(crate) fn close(
    name: &str,
    got: &ArrayD<f64>,
    expected: &ArrayD<f64>,
    limits: &ArrayD<f64>,
) -> Judgement {
    let mut margin = 0f64;
    for (number, (limit, (a, b))) in limits.iter().zip(got.iter().zip(expected)).enumerate() {
        if a == b || (a.is_nan() && b.is_nan()) || *limit == f64::INFINITY {
            continue; // ∞: nothing is required here
        }
        let share = (a - b).abs() / limit;
        if exceeds(share, 1.0) {
            let at = index(limits.shape(), number);
            let text = format!("{name}{at:?} = {a:e}, expected {b:e} within {limit:e}");
            return Err(Flaw::Fail(text));
        }
        margin = margin.max(share);
    }
    Ok(Some(margin))
}

/// Fails unless tensors of one name lie within `times` bounds of each other where
/// `counts(name, index)` holds.
pub(crate) fn agree(
    got: &Tensors,
    expected: &Tensors,
    bounds: &Bounds,
    times: f64,
    counts: impl Fn(&str, &[usize]) -> bool,
) -> Judgement {
    worst(both(got, expected).map(|(name, got, expected)| {
        let mut limit = &bounds.outputs[name].bound * times;
        change_each(&mut limit, |at, limit| {
            if !counts(name, at) {
                *limit = f64::INFINITY;
            }
        });
        close(name, &got.numbers(name)?, &expected.numbers(name)?, &limit)
    }))
}

/// Residue in a sum after the underflow of a weight or of a product: 2⁻¹²⁶ (an arithmetic that flushes to zero) times
/// operands and lengths, with room to spare.
const UNDERFLOW: f64 = 7.888_609_052_210_118e-31; // 2⁻¹⁰⁰

/// Multiplies inputs of the case, and fails unless every output of a problem is then the clean one times
/// `factor(name)`. Where something underflows or overflows on the way the product itself rounds: such
/// elements are exempt.
pub(crate) fn exchange(
    trial: &Trial<'_>,
    strict: Strict,
    problem: &Problem,
    inputs: &[(&str, f64)],
    factor: &dyn Fn(&str) -> f64,
    what: &str,
) -> Judgement {
    let of_input = |name: &str| inputs.iter().find(|x| x.0 == name).map_or(1.0, |x| x.1);
    let changed = change(&trial.case.inputs, |name, _, x| of_input(name) * x)?;
    let outputs = trial.ask(problem, &changed)?;
    worst(trial.clean()?.iter().map(|(name, clean)| {
        let (dtype, factor) = (clean.dtype().unwrap_or(Dtype::F64), factor(name));
        let expected = map(clean, |_, x| factor * x)?.numbers(name)?;
        let got = outputs[name].numbers(name)?;
        let rounds = |x: f64| x.abs() < 4.0 * dtype.min_positive() || x.abs() > 0.25 * dtype.max();
        let mut limit = match strict {
            Strict::Bits => ArrayD::from_elem(got.raw_dim(), UNDERFLOW),
            Strict::Bound => &trial.bounds()?.outputs[name].bound * (TWICE * factor.abs().max(1.0)),
        };
        limit.zip_mut_with(&got, |limit, &got| {
            if factor.abs() != 1.0 && rounds(got) {
                *limit = f64::INFINITY;
            }
        });
        close(name, &got, &expected, &limit).map_err(|flaw| flaw.of(what))
    }))
}

/// The sums over consecutive groups of entries of an axis.
pub(crate) fn sum_groups(values: &ArrayD<f64>, axis: usize, group: usize) -> ArrayD<f64> {
    let axis = ndarray::Axis(axis);
    let mut shape = values.raw_dim();
    shape[axis.0] /= group;
    let mut sums = ArrayD::zeros(shape);
    for (h, head) in values.axis_iter(axis).enumerate() {
        let mut sum = sums.index_axis_mut(axis, h / group);
        sum += &head;
    }
    sums
}
