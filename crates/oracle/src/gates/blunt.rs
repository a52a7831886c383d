//! Elements about which a bound says too little, and whether their errors are those of correct kernels.
//!
//! An element is *blunt* where its bound exceeds half of the scale of its row, or where it has none: zeros, or
//! another row, would lie within it. Such an element counts as right only if it errs no more than simulated
//! kernels do ([`crate::stochastic`]); otherwise nothing is known of it.

use super::rms;
use super::statistics::Layout;
use crate::bounds::{Bound, Bounds, NoBound};
use crate::profile::Profile;
use crate::tensor::Tensors;
use etalon_problem::Operand;
use ndarray::ArrayD;
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::collections::BTreeMap;
use std::fmt;

/// The largest share of the scale of its row that the bound of an element may have which is not blunt.
const HALF: f64 = 0.5;

/// Rows are named up to this number.
const NAMED: usize = 8;

/// How often the errors of a row of a correct kernel may exceed the limit, if they are normally distributed.
const FALSE_ALARM: f64 = 1e-7;

/// How much larger than those of simulated kernels the errors of a kernel may be.
const ROOM: f64 = 2.0;

/// Where so many rows, and a quarter of all blunt rows, err more than so many times as much as simulated kernels
/// do, none of these rows errs by chance: one does so with a probability below 1 %.
const MANY: usize = 4;
const FAR: f64 = 6.0;

/// What is blunt about an output.
#[derive(Debug, Clone, PartialEq)]
pub struct Blunt {
    /// The output.
    pub output: String,
    /// How many elements are blunt, of how many.
    pub elements: usize,
    /// How many elements the output has.
    pub of: usize,
    /// How many have no bound, by the reason: these are blunt.
    pub no_bound: BTreeMap<NoBound, usize>,
    /// How many blunt elements lie in rows that err more than simulated kernels do.
    pub undecided: usize,
    /// The first of these rows, each by its index without that of the column.
    pub rows: Vec<Vec<usize>>,
    /// How many such rows there are.
    pub row_count: usize,
    /// The largest error of such a row over the typical one.
    pub times: f64,
}

/// The undecided elements in one sentence.
impl fmt::Display for Blunt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Blunt { output, elements, of, no_bound, undecided, rows, row_count, times } = self;
        write!(
            f,
            "{undecided} of {of} elements of {output} are undecided: they err up to {times:.0} times as much as simulated kernels do, "
        )?;
        write!(
            f,
            "and their bounds, with those of {} more, are wider than half of the scale of their rows",
            elements - undecided
        )?;
        if !no_bound.is_empty() {
            let reasons = no_bound.iter().map(|(reason, n)| format!("{n} since {reason}"));
            write!(f, " or missing ({})", reasons.collect::<Vec<_>>().join(", "))?;
        }
        let names: Vec<String> = rows.iter().map(|row| format!("{row:?}")).collect();
        write!(f, "; rows {}", names.join(", "))?;
        if *row_count > rows.len() {
            write!(f, " and {} more", row_count - rows.len())?;
        }
        Ok(())
    }
}

/// Which elements of an output are blunt, and the scale of the row of each, in row-major order; `None` where none
/// is.
fn blunt_elements(bound: &Bound) -> Option<(Vec<bool>, Vec<f64>)> {
    let width = super::row_width(bound);
    let (values, bounds) = (bound.value.as_slice()?, bound.bound.as_slice()?);
    let whole = rms(values);
    let (mut blunt, mut scales) = (vec![false; values.len()], Vec::with_capacity(values.len()));
    let rows = values.chunks(width).zip(bounds.chunks(width)).zip(blunt.chunks_mut(width));
    for ((values, bounds), blunt) in rows {
        let scale = super::scale_of_row(values, whole);
        scales.resize(scales.len() + values.len(), scale);
        let elements = values.iter().zip(bounds).zip(blunt);
        // Of nothing but zeros any bound is narrow that there is.
        let widest = if scale > 0.0 { HALF * scale } else { f64::MAX };
        elements.for_each(|((x, bound), blunt)| *blunt = x.is_finite() && *bound > widest);
    }
    // What may be one of several numbers is judged as each of them.
    bound.as_right.keys().for_each(|&at| blunt[at] = false);
    blunt.contains(&true).then_some((blunt, scales))
}

/// Whether any element of an output is blunt: only then are simulated kernels wanted.
pub fn has_blunt(exact: &Bounds) -> bool {
    exact.outputs.values().any(|bound| blunt_elements(bound).is_some())
}

/// What is blunt about each output, where something is. `simulated` are the errors of correct kernels, by output.
pub fn blunt(
    operands: &[Operand],
    profile: &Profile,
    exact: &Bounds,
    simulated: &BTreeMap<String, Vec<ArrayD<f64>>>,
    outputs: &Tensors,
) -> Vec<Blunt> {
    let found = exact.outputs.iter().filter_map(|(name, bound)| {
        let (blunt, scales) = blunt_elements(bound)?;
        let operand = operands.iter().find(|operand| operand.name == name)?;
        let (got, stored) = (outputs.get(name)?.numbers(name).ok()?, outputs.get(name)?.dtype()?);
        let unit = profile.accumulator.unit_roundoff();
        let least: Vec<f64> =
            scales.iter().map(|scale| unit * scale + stored.underflow()).collect();
        let samples = simulated.get(name).map_or(&[][..], Vec::as_slice);
        (got.shape() == bound.value.shape())
            .then(|| judge(operand, bound, (&blunt, &least), &got, samples))
    });
    found.collect()
}

fn judge(
    operand: &Operand,
    bound: &Bound,
    (blunt, least): (&[bool], &[f64]),
    got: &ArrayD<f64>,
    samples: &[ArrayD<f64>],
) -> Blunt {
    let layout = Layout::new(operand);
    let own: Vec<f64> = got.iter().zip(&bound.value).map(|(got, exact)| got - exact).collect();
    let samples: Vec<&[f64]> = samples.iter().filter_map(|x| x.as_slice()).collect();
    let squares = |errors: &[f64], row: usize| -> f64 {
        let inside = errors[layout.range(row)].iter().zip(&blunt[layout.range(row)]);
        inside.filter(|(_, blunt)| **blunt).map(|(x, _)| x * x).sum()
    };
    // The error of a row in units of the typical one, which is a rounding at least; ∞ where it is not finite.
    let times = |row: usize| {
        let kernels = samples.len().max(1) as f64;
        let simulated: f64 = samples.iter().map(|sample| squares(sample, row)).sum();
        let typical = simulated / kernels + squares(least, row);
        let times = (squares(&own, row) / typical).sqrt();
        match squares(&own, row) {
            0.0 => 0.0,
            _ if times.is_nan() => f64::INFINITY,
            _ => times,
        }
    };
    let rows = (0..blunt.len() / layout.width.max(1))
        .filter(|row| blunt[layout.range(*row)].contains(&true));
    let rows: Vec<(usize, f64)> = rows.map(|row| (row, times(row))).collect();
    let far = rows.iter().filter(|(_, times)| *times > FAR).count();
    let limit = if far >= MANY && 4 * far >= rows.len() { FAR } else { limit(samples.len()) };
    let undecided: Vec<(usize, f64)> =
        rows.into_iter().filter(|(_, times)| *times > limit).collect();
    let elements =
        |range: std::ops::Range<usize>| blunt[range].iter().filter(|blunt| **blunt).count();
    Blunt {
        output: operand.name.to_string(),
        elements: elements(0..blunt.len()),
        of: blunt.len(),
        no_bound: bound.no_bound.clone(),
        undecided: undecided.iter().map(|(row, _)| elements(layout.range(*row))).sum(),
        rows: undecided.iter().take(NAMED).map(|(row, _)| layout.index(*row)).collect(),
        row_count: undecided.len(),
        times: undecided.iter().map(|(_, times)| *times).fold(0.0, f64::max),
    }
}

/// How many times the root mean square of the errors of some simulated kernels that of a correct one may be.
/// All elements of a row may err together: each kernel counts once.
fn limit(kernels: usize) -> f64 {
    let chance = StudentsT::new(0.0, 1.0, kernels.max(1) as f64);
    ROOM * chance.map_or(0.0, |chance| chance.inverse_cdf(1.0 - FALSE_ALARM / 2.0))
}
