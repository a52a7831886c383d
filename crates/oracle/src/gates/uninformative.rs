//! Elements about which a bound says too little, and whether their errors are those of correct kernels.
//!
//! An element is *uninformative* (`blunt` in reports) where its bound exceeds half of the scale of its row,
//! or where it has none: zeros, or another row, would lie within it. Such an element counts as right only if it errs
//! no more than simulated kernels do ([`crate::stochastic`]); otherwise nothing is known of it.

use super::statistics::Layout;
use super::{margins, rms};
use crate::bounds::{Bound, Bounds, NoBound};
use crate::profile::Profile;
use crate::stochastic::{KERNELS, saturated};
use crate::tensor::{Tensor, Tensors, Values};
use etalon_problem::Operand;
use rayon::prelude::*;
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The largest share of the scale of its row that the bound of an informative element may have.
pub const HALF: f64 = 0.5;

/// Rows are named up to this number.
const NAMED: usize = 8;

/// Probability with which the errors of a row of a correct kernel may exceed the limit, if they are normally
/// distributed.
const FALSE_ALARM: f64 = 1e-7;

/// Factor by which the errors of a kernel may exceed those of simulated kernels.
const ROOM: f64 = 2.0;

/// Rows that err together: where so many, and a quarter of all uninformative rows, err more than so many times as
/// much as simulated kernels do, none of them errs by chance. One does so with a probability below 1 %.
const MANY: usize = 4;
const FAR: f64 = 6.0;

/// Results that are by more than this share of themselves too large or too small, in the mean over such rows: zeros,
/// a sign or a factor of 2 are, and few errors of correct kernels that are as large as results go all one way.
const SHARE: f64 = 0.5;

/// The uninformative elements of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct Uninformative {
    /// The output.
    pub output: String,
    /// Number of uninformative elements.
    pub elements: usize,
    /// Number of all elements of the output.
    pub of: usize,
    /// Number of elements without a bound, by the reason: these are uninformative.
    pub no_bound: BTreeMap<NoBound, usize>,
    /// Number of uninformative elements in rows that err more than simulated kernels do.
    pub undecided: usize,
    /// The first of these rows, each by its index without that of the column.
    pub rows: Vec<Vec<usize>>,
    /// True if every element counts as a row, as of outputs of a few rows.
    pub by_element: bool,
    /// Number of such rows.
    pub row_count: usize,
    /// The largest error of such a row over the typical one.
    pub times: f64,
    /// By which share of themselves the uninformative elements are too large, in the mean over rows, where that is
    /// what puts them in doubt.
    pub share: Option<f64>,
}

/// The undecided elements in one sentence.
impl fmt::Display for Uninformative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Uninformative { output, elements, of, no_bound, undecided, rows, row_count, .. } = self;
        let times = self.times;
        let are = if *undecided == 1 { "is" } else { "are" };
        write!(f, "{undecided} of {of} elements of {output} {are} undecided: ")?;
        match self.share {
            Some(share) => {
                let side = if share > 0.0 { "large" } else { "small" };
                let percent = 100.0 * share.abs();
                write!(
                    f,
                    "in the mean {percent:.0} % of themselves too {side}, {times:.0} times as much"
                )?;
            }
            None => write!(f, "errors up to {times:.0} times as large")?,
        }
        write!(f, " as of simulated kernels, and bounds wider than half of the scale of a row")?;
        if !no_bound.is_empty() {
            let reasons = no_bound.iter().map(|(reason, n)| format!("{n} since {reason}"));
            write!(f, " or missing ({})", reasons.collect::<Vec<_>>().join(", "))?;
        }
        let more = elements - undecided;
        if more > 0 {
            write!(f, "; {more} more have such bounds")?;
        }
        let names: Vec<String> = rows.iter().map(|row| format!("{row:?}")).collect();
        let what = if self.by_element { "element" } else { "row" };
        let s = if *row_count == 1 { "" } else { "s" };
        write!(f, "; {what}{s} {}", names.join(", "))?;
        if *row_count > rows.len() {
            write!(f, " and {} more", row_count - rows.len())?;
        }
        Ok(())
    }
}

/// Flags of the uninformative elements of an output, and the scale of the row of each element, in row-major order;
/// `None` where none is.
fn uninformative_elements(bound: &Bound) -> Option<(Vec<bool>, Vec<f64>)> {
    let width = super::row_width(bound);
    let (values, bounds) = (bound.value.as_slice()?, bound.bound.as_slice()?);
    let whole = rms(values);
    let (mut uninformative, mut scales) =
        (vec![false; values.len()], Vec::with_capacity(values.len()));
    let rows = values.chunks(width).zip(bounds.chunks(width)).zip(uninformative.chunks_mut(width));
    for ((values, bounds), marks) in rows {
        let scale = super::scale_of_row(values, whole);
        scales.resize(scales.len() + values.len(), scale);
        let elements = values.iter().zip(bounds).zip(marks);
        // Of nothing but zeros any bound is narrow that there is.
        let widest = if scale > 0.0 { HALF * scale } else { f64::MAX };
        elements.for_each(|((x, bound), mark)| *mark = x.is_finite() && *bound > widest);
    }
    // An element that may be one of several numbers is judged as each of them.
    bound.as_right.keys().for_each(|&at| uninformative[at] = false);
    uninformative.contains(&true).then_some((uninformative, scales))
}

/// The uninformative elements of each output that has some. `simulate` returns the errors of one of [`KERNELS`]
/// correct kernels, by output, on the pass and inputs of `exact`.
///
/// Kernels are simulated one after the other until nothing is in doubt: an error that is small beside those of
/// the first kernels is so beside those of all.
pub fn uninformative<E: Send>(
    operands: &[Operand],
    profile: &Profile,
    exact: &Bounds,
    outputs: &Tensors,
    simulate: impl Fn(u32) -> Result<Arc<Values>, E> + Sync,
) -> Result<Vec<Uninformative>, E> {
    let unit = profile.accumulator.unit_roundoff();
    let rows = exact.outputs.iter().filter_map(|(name, bound)| {
        let operand = operands.iter().find(|operand| operand.name == name)?;
        Rows::new(operand, bound, outputs.get(name)?, unit)
    });
    let mut rows: Vec<Rows<'_>> = rows.collect();
    let mut kernels = 0;
    while kernels < KERNELS && rows.iter().any(|rows| !rows.in_doubt().is_empty()) {
        let some = kernels..(2 * kernels).clamp(1, KERNELS);
        kernels = some.end;
        let errors: Vec<_> = some.into_par_iter().map(&simulate).collect::<Result<_, E>>()?;
        errors.iter().for_each(|errors| rows.iter_mut().for_each(|rows| rows.add(errors)));
    }
    Ok(rows.iter().map(Rows::judge).collect())
}

/// The rows of an output of which some elements are uninformative.
struct Rows<'a> {
    operand: &'a Operand,
    bound: &'a Bound,
    layout: Layout,
    /// Element by element.
    uninformative: Vec<bool>,
    /// The rows that hold an uninformative element, and none that is off: such a row is wrong, not in doubt.
    rows: Vec<usize>,
    /// Of each of them the sum of the squares of errors of its uninformative elements, of what is judged.
    own: Vec<f64>,
    /// The same of the rounding of sums and of stored results that is granted to any kernel.
    least: Vec<f64>,
    /// The same of the simulated kernels, all together.
    simulated: Vec<f64>,
    /// The exact results, each divided by the sum of the squares of the scales of the uninformative elements of its
    /// row, and by the number of rows.
    directions: Vec<f64>,
    /// The share of themselves by which uninformative elements are too large, in the mean over rows.
    share: f64,
    /// The sum of its squares of the simulated kernels.
    shares: f64,
}

impl<'a> Rows<'a> {
    fn new(operand: &'a Operand, bound: &'a Bound, got: &Tensor, unit: f64) -> Option<Self> {
        let (uninformative, scales) = uninformative_elements(bound)?;
        let (got, stored) = (got.numbers(operand.name).ok()?, got.dtype()?);
        if got.shape() != bound.value.shape() {
            return None;
        }
        let layout = Layout::new(operand);
        let off: Vec<bool> = margins(bound, &got).iter().map(|margin| *margin > 1.0).collect();
        let rows = (0..uninformative.len() / layout.width.max(1)).filter(|row| {
            let range = layout.range(*row);
            uninformative[range.clone()].contains(&true) && !off[range].contains(&true)
        });
        let rows: Vec<usize> = rows.collect();
        let error = |(got, exact): (&f64, &f64)| saturated(*got, bound.largest) - exact;
        let own: Vec<f64> = got.iter().zip(&bound.value).map(error).collect();
        // Exact results close to a number of the storage type are stored as that by all simulated kernels, and as its
        // neighbour by the next one.
        let granted = |(scale, value): (&f64, &f64)| {
            unit * scale + stored.unit_roundoff() * value.abs() + stored.underflow()
        };
        let least: Vec<f64> = scales.iter().zip(&bound.value).map(granted).collect();
        let simulated = vec![0.0; rows.len()];
        let directions = bound.value.iter().copied().collect();
        let (share, shares) = (0.0, 0.0);
        let mut all = Rows {
            operand,
            bound,
            layout,
            uninformative,
            rows,
            own: vec![],
            least: vec![],
            simulated,
            directions,
            share,
            shares,
        };
        (all.own, all.least) = (all.squares(&own), all.squares(&least));
        all.divide_directions(&scales);
        all.share = all.share_of(&own);
        Some(all)
    }

    fn divide_directions(&mut self, scales: &[f64]) {
        let (squares, rows) = (self.squares(scales), self.rows.len() as f64);
        for (&row, square) in self.rows.iter().zip(squares) {
            // Of results below √f64::MIN_POSITIVE no share is known.
            let by = if square.is_normal() { 1.0 / (square * rows) } else { 0.0 };
            self.directions[self.layout.range(row)].iter_mut().for_each(|x| *x *= by);
        }
    }

    /// The share of themselves by which the uninformative elements are too large, in the mean over rows, of errors.
    fn share_of(&self, errors: &[f64]) -> f64 {
        let uninformative = self.rows.iter().flat_map(|&row| self.layout.range(row));
        let uninformative =
            uninformative.filter(|&at| self.uninformative[at] && self.directions[at] != 0.0);
        uninformative.map(|at| errors[at] * self.directions[at]).sum()
    }

    /// The share, where it is larger than those of simulated kernels let it be, and how many times as large.
    fn share_in_doubt(&self) -> Option<(f64, f64)> {
        let typical = (self.shares / f64::from(KERNELS)).sqrt();
        let wide = self.rows.len() >= MANY && self.share.abs() > SHARE.max(limit() * typical);
        wide.then(|| (self.share, self.share.abs() / typical))
    }

    /// Row by row, the sum of the squares of the uninformative elements of a list.
    fn squares(&self, list: &[f64]) -> Vec<f64> {
        let of_row = |&row: &usize| {
            let inside = self.layout.range(row).filter(|at| self.uninformative[*at]);
            inside.map(|at| list[at] * list[at]).sum()
        };
        self.rows.iter().map(of_row).collect()
    }

    /// Counts the errors of a simulated kernel.
    fn add(&mut self, errors: &Values) {
        let errors = errors.get(self.operand.name).and_then(|errors| errors.as_slice());
        self.shares += errors.map_or(0.0, |errors| self.share_of(errors).powi(2));
        let squares = errors.map_or(Vec::new(), |errors| self.squares(errors));
        self.simulated.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
    }

    /// The error of each row in units of the typical one of all kernels, as far as they were simulated; ∞ where
    /// it is not finite.
    fn times(&self) -> Vec<f64> {
        let rows = self.own.iter().zip(&self.least).zip(&self.simulated);
        let times = rows.map(|((&own, &least), &simulated)| {
            let times = (own / (simulated / f64::from(KERNELS) + least)).sqrt();
            match own {
                0.0 => 0.0,
                _ if times.is_nan() => f64::INFINITY,
                _ => times,
            }
        });
        times.collect()
    }

    /// The rows that err more than simulated kernels do, and how many times as much: all, where they err one way.
    fn in_doubt(&self) -> Vec<(usize, f64)> {
        let times = self.times();
        if let Some((_, share)) = self.share_in_doubt() {
            return self.rows.iter().map(|&row| (row, share)).collect();
        }
        let far = times.iter().filter(|times| **times > FAR).count();
        let limit = if far >= MANY && 4 * far >= times.len() { FAR } else { limit() };
        let rows = self.rows.iter().copied().zip(times);
        rows.filter(|(_, times)| *times > limit).collect()
    }

    fn judge(&self) -> Uninformative {
        let doubts = self.in_doubt();
        let elements =
            |range: Range<usize>| self.uninformative[range].iter().filter(|x| **x).count();
        Uninformative {
            output: self.operand.name.to_string(),
            elements: elements(0..self.uninformative.len()),
            of: self.uninformative.len(),
            no_bound: self.bound.no_bound.clone(),
            undecided: doubts.iter().map(|(row, _)| elements(self.layout.range(*row))).sum(),
            rows: doubts.iter().take(NAMED).map(|(row, _)| self.layout.index(*row)).collect(),
            by_element: self.layout.width == 1,
            row_count: doubts.len(),
            times: doubts.iter().map(|(_, times)| *times).fold(0.0, f64::max),
            share: self.share_in_doubt().map(|(share, _)| share),
        }
    }
}

/// Largest ratio of the root mean square of the errors of a correct kernel to that of the simulated ones.
/// All elements of a row may err together: each kernel counts once.
fn limit() -> f64 {
    let chance = StudentsT::new(0.0, 1.0, f64::from(KERNELS));
    ROOM * chance.map_or(0.0, |chance| chance.inverse_cdf(1.0 - FALSE_ALARM / 2.0))
}
