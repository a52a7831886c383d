//! Gate G2: mistakes that a bound for the worst case cannot see. On generic inputs errors are random: those of a
//! correct kernel are not proportional to the results, and no row errs much more than its like.
//!
//! Two statistics, each against the errors of simulated kernels of the profile ([`Typical`]):
//!
//! * the **slope** β of errors on exact results, over a tensor, a head, a tile of rows or a block of
//!   columns: a wrong scale, a truncation, a factor that one tile lacks (N87);
//! * **χ** of a row: its errors over typical ones, without the direction in which all errors of the row
//!   go together (N88).

use crate::bounds::{Bound, Bounds};
use crate::profile::Profile;
use crate::tensor::Tensors;
use crate::typical::Typical;
use etalon_problem::{Axis, Operand};
use ndarray::ArrayD;
use statrs::distribution::{ContinuousCDF, FisherSnedecor};
use std::fmt;
use std::ops::Range;

/// Number of standard deviations that a slope may lie from 0.
const DEVIATIONS: f64 = 6.0;

/// A uniform relative error that the functions of every profile may have, in roundoffs of the
/// accumulator: of the exponential and its argument, up to |x| = 15.
const UNIFORM: f64 = 64.0;

/// A slope says something where at least so many rows err independently.
const FEWEST_ROWS: usize = 12;

/// A row says something where at least so many of its elements err.
const FEWEST_ELEMENTS: f64 = 4.0;

/// Share of the squares of simulated errors: less than this beside their common direction is the rounding of the
/// simulation.
const RESIDUE: f64 = 1e-6;

/// Columns in a block, and rows in a tile: what kernels process at once are multiples of these.
const BLOCK: usize = 16;

/// Probability with which χ of a row of a correct kernel may exceed its limit.
const FALSE_ALARM: f64 = 1e-9;

/// Factor by which the errors of one row may typically exceed those in simulated kernels: a kernel sums in
/// another order, or rounds a value once more.
const ROOM: f64 = 2.0;

/// A statistic of an output, or of a part of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistic {
    /// The output.
    pub output: String,
    /// The part of it.
    pub part: Part,
    /// The measure that was taken.
    pub measure: Measure,
    /// Its size.
    pub value: f64,
    /// The largest size that chance allows it.
    pub limit: f64,
}

/// A measure of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// β: the share of themselves by which results are too large.
    Slope,
    /// χ: how many times larger than typical errors are.
    Chi,
}

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    All,
    /// A head of a batch element, or whatever axes come before the rows.
    Head(Vec<usize>),
    /// These rows of every head.
    Rows(Range<usize>),
    /// These columns of every row.
    Columns(Range<usize>),
    /// One row, by its index.
    Row(Vec<usize>),
    /// So many short rows or elements, from one on.
    From(usize, Vec<usize>),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::All => write!(f, "all elements"),
            Part::Head(at) => write!(f, "head {at:?}"),
            Part::Rows(rows) => write!(f, "rows {} to {}", rows.start, rows.end - 1),
            Part::Columns(columns) => write!(f, "columns {} to {}", columns.start, columns.end - 1),
            Part::Row(at) => write!(f, "row {at:?}"),
            Part::From(count, at) => write!(f, "{count} in a row from {at:?} on"),
        }
    }
}

impl Statistic {
    /// Above 1 where it is conspicuous.
    pub fn margin(&self) -> f64 {
        self.value.abs() / self.limit
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, limit) = (self.value, self.limit);
        write!(f, "{}, {}: ", self.output, self.part)?;
        match self.measure {
            Measure::Slope => {
                let (size, side) = (value.abs(), if value > 0.0 { "large" } else { "small" });
                write!(f, "results are {size:.2e} of themselves too {side}; {limit:.2e} is chance")
            }
            Measure::Chi => {
                let [value, limit] = [value, limit].map(super::three_digits);
                write!(f, "errors are {value} times the typical ones; {limit} is chance")
            }
        }
    }
}

/// The statistics of every output of floating-point numbers that has its shape: of each, the slope of all
/// elements first, then those that are conspicuous, the worst of each kind.
pub fn g2(
    operands: &[Operand],
    profile: &Profile,
    exact: &Bounds,
    typical: &Typical,
    outputs: &Tensors,
) -> Vec<Statistic> {
    let mut found = Vec::new();
    for (name, samples) in &typical.errors {
        let (Some(bound), Some(tensor)) = (exact.outputs.get(name), outputs.get(name)) else {
            continue;
        };
        let (Some(operand), Ok(got)) =
            (operands.iter().find(|x| x.name == name), tensor.numbers(name))
        else {
            continue;
        };
        if got.shape() == bound.value.shape() {
            let layout = Layout::new(operand);
            let errors = Errors::new(bound, &got, samples, &layout);
            found.extend(errors.slopes(name, profile));
            found.extend(errors.widest_row(name));
        }
    }
    found
}

/// Division of an output into heads, rows and columns.
pub(super) struct Layout {
    /// The extents of the axes before the rows.
    heads: Vec<usize>,
    rows: usize,
    pub width: usize,
}

impl Layout {
    pub fn new(operand: &Operand) -> Self {
        let mut heads = operand.shape.clone();
        let by_columns = operand.axes.last().is_some_and(|axis| {
            matches!(axis, Axis::Dim | Axis::ValueDim | Axis::Keys | Axis::Distances)
        });
        // Of a few rows every element is one.
        let width = match heads.last() {
            Some(&width) if by_columns && operand.len() >= FEWEST_ROWS * width => width,
            _ => 1,
        };
        if width > 1 {
            heads.pop();
        }
        let rows = heads.pop().unwrap_or(1);
        Layout { heads, rows, width }
    }

    /// The index of a row, counted over all heads.
    pub fn index(&self, row: usize) -> Vec<usize> {
        let rows = self.rows.max(1);
        let mut at = self.head(row / rows);
        at.push(row % rows);
        at
    }

    /// The index of head `at`.
    fn head(&self, mut at: usize) -> Vec<usize> {
        let mut index = vec![0; self.heads.len()];
        for (place, extent) in index.iter_mut().zip(&self.heads).rev() {
            *place = at % extent;
            at /= extent;
        }
        index
    }
}

/// Errors and typical errors, element by element in row-major order.
struct Errors<'a> {
    layout: &'a Layout,
    exact: Vec<f64>,
    own: Vec<f64>,
    samples: Vec<Vec<f64>>,
    /// 1/σ² of each row, 0 where its results are exact.
    weights: Vec<f64>,
}

/// Terms that a block of a row adds to a slope: Σ w x², Σ w x e, and the latter of the samples.
#[derive(Clone)]
struct Cell {
    xx: f64,
    xe: f64,
    samples: Vec<f64>,
}

/// Largest ratio of the bound to typical errors of a row that is measured, over that of the row in the middle.
/// Beyond, errors that the simulation does not have decide: a pair at its threshold is active or not. G1 judges alone.
const FARTHEST: f64 = 32.0;

/// Cap on the ratio of the bound to typical errors of the row in the middle, which tells nothing where terms
/// cancel in every row. Errors of correct kernels are then a hundredth of the bound or less, as everywhere.
const WIDEST: f64 = 64.0;

impl<'a> Errors<'a> {
    fn new(bound: &Bound, got: &ArrayD<f64>, samples: &[ArrayD<f64>], layout: &'a Layout) -> Self {
        let rows = got.len() / layout.width.max(1);
        let bounds: Vec<f64> = bound.bound.iter().copied().collect();
        let exact: Vec<f64> = bound.value.iter().copied().collect();
        // Nothing is measured where nothing is required, or only a class.
        let open: Vec<bool> =
            exact.iter().zip(&bounds).map(|(x, b)| !x.is_finite() || *b == f64::INFINITY).collect();
        let measured = |errors: &mut dyn Iterator<Item = f64>| -> Vec<f64> {
            let known = |(e, open): (f64, &bool)| if *open || !e.is_finite() { 0.0 } else { e };
            errors.zip(&open).map(known).collect()
        };
        let mut errors = Errors {
            layout,
            own: measured(&mut got.iter().zip(&exact).map(|(got, x)| got - x)),
            samples: samples.iter().map(|x| measured(&mut x.iter().copied())).collect(),
            exact: measured(&mut exact.iter().copied()),
            weights: vec![0.0; rows],
        };
        let bounds = measured(&mut bounds.into_iter());
        errors.follow(&bounds);
        for row in 0..rows {
            let variance = errors.variance(row);
            errors.weights[row] = if variance > 0.0 { 1.0 / variance } else { 0.0 };
        }
        errors
    }

    /// The mean of σ² over a row.
    fn variance(&self, row: usize) -> f64 {
        let range = self.layout.range(row);
        let elements = (self.samples.len() * range.len()).max(1) as f64;
        self.samples.iter().map(|sample| squares(&sample[range.clone()])).sum::<f64>() / elements
    }

    /// Simulated errors follow the bounds where these are wider than usual: terms cancel there, whose
    /// roundings do not. Far from the usual, the row is not measured.
    fn follow(&mut self, bounds: &[f64]) {
        let width = self.layout.width.max(1) as f64;
        let ratio = |row: usize| {
            let bound = squares(&bounds[self.layout.range(row)]) / width;
            (bound / self.variance(row)).sqrt()
        };
        let ratios: Vec<f64> = (0..self.weights.len()).map(ratio).collect();
        let mut known: Vec<f64> = ratios.iter().copied().filter(|x| x.is_finite()).collect();
        known.sort_by(f64::total_cmp);
        let Some(usual) = known.get(known.len() / 2).map(|x| x.min(WIDEST)) else { return };
        for (row, ratio) in ratios.into_iter().enumerate() {
            let range = self.layout.range(row);
            let far = ratio.is_nan() || ratio > FARTHEST * usual;
            let times = if far { 0.0 } else { (ratio / usual).max(1.0) };
            for errors in self.samples.iter_mut() {
                errors[range.clone()].iter_mut().for_each(|x| *x *= times);
            }
            if far {
                self.own[range].fill(0.0);
            }
        }
    }

    /// Terms that the columns of a row add to a slope.
    fn cell(&self, row: usize, columns: Range<usize>) -> Cell {
        let start = row * self.layout.width;
        let range = start + columns.start..start + columns.end;
        let (x, w) = (&self.exact[range.clone()], self.weights[row]);
        let with = |e: &[f64]| w * x.iter().zip(&e[range.clone()]).map(|(x, e)| x * e).sum::<f64>();
        Cell {
            xx: w * squares(x),
            xe: with(&self.own),
            samples: self.samples.iter().map(|sample| with(sample)).collect(),
        }
    }

    /// The slope of all elements, and the most conspicuous of those of parts, where it is.
    fn slopes(&self, name: &str, profile: &Profile) -> Vec<Statistic> {
        let layout = self.layout;
        let rows = self.weights.len();
        let blocks: Vec<Range<usize>> = tiles(layout.width).collect();
        let cells: Vec<Vec<Cell>> = (0..rows)
            .map(|row| blocks.iter().map(|block| self.cell(row, block.clone())).collect())
            .collect();
        let sums = |row: usize| Cell::sum(&cells[row]);
        let all: Vec<Cell> = (0..rows).map(sums).collect();
        let allowed = UNIFORM * profile.accumulator.unit_roundoff();
        let slope = |part: Part, cells: &mut dyn Iterator<Item = &Cell>| {
            let (value, limit) = slope(cells, allowed)?;
            let output = name.to_string();
            Some(Statistic { output, part, measure: Measure::Slope, value, limit })
        };
        let Some(whole) = slope(Part::All, &mut all.iter()) else { return Vec::new() };
        let heads = (0..rows / layout.rows.max(1)).filter_map(|head| {
            let own = &all[head * layout.rows..(head + 1) * layout.rows];
            slope(Part::Head(layout.head(head)), &mut own.iter())
        });
        let by_rows = tiles(layout.rows).filter_map(|tile| {
            let inside = |row: &usize| tile.contains(&(row % layout.rows));
            slope(Part::Rows(tile.clone()), &mut (0..rows).filter(inside).map(|row| &all[row]))
        });
        let by_columns = blocks.iter().enumerate().filter_map(|(block, columns)| {
            slope(Part::Columns(columns.clone()), &mut cells.iter().map(|row| &row[block]))
        });
        let parts = heads.chain(by_rows).chain(by_columns);
        let worst = parts.max_by(|a, b| a.margin().total_cmp(&b.margin()));
        let conspicuous = worst.filter(|part| part.margin() > 1.0);
        [whole].into_iter().chain(conspicuous).collect()
    }

    /// The row with the largest χ over its limit, where that is exceeded. Rows of a few columns are
    /// taken together.
    fn widest_row(&self, name: &str) -> Option<Statistic> {
        let layout = self.layout;
        let together = BLOCK.div_ceil(layout.width.max(1)).min(layout.rows.max(1));
        let groups = (0..self.weights.len()).step_by(together.max(1));
        let chi = |first: usize| {
            let last = (first + together).min(self.weights.len());
            let range = first * layout.width..last * layout.width;
            let samples: Vec<&[f64]> = self.samples.iter().map(|x| &x[range.clone()]).collect();
            let (value, limit) = chi(&self.own[range], &samples)?;
            let at = layout.index(first);
            let part = if last - first == 1 { Part::Row(at) } else { Part::From(last - first, at) };
            let output = name.to_string();
            Some(Statistic { output, part, measure: Measure::Chi, value, limit })
        };
        let worst = groups.filter_map(chi).max_by(|a, b| a.margin().total_cmp(&b.margin()));
        worst.filter(|row| row.margin() > 1.0)
    }
}

impl Layout {
    /// The elements of a row.
    pub fn range(&self, row: usize) -> Range<usize> {
        row * self.width..(row + 1) * self.width
    }
}

impl Cell {
    fn sum(cells: &[Cell]) -> Cell {
        let kernels = cells.first().map_or(0, |cell| cell.samples.len());
        let sample = |kernel: usize| cells.iter().map(|cell| cell.samples[kernel]).sum();
        Cell {
            xx: cells.iter().map(|cell| cell.xx).sum(),
            xe: cells.iter().map(|cell| cell.xe).sum(),
            samples: (0..kernels).map(sample).collect(),
        }
    }
}

fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..n).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(n))
}

fn squares(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

/// β over some rows, and what chance allows it (N87). None of too few rows.
fn slope(rows: &mut dyn Iterator<Item = &Cell>, allowed: f64) -> Option<(f64, f64)> {
    let rows: Vec<&Cell> = rows.filter(|row| row.xx > 0.0).collect();
    if rows.len() < FEWEST_ROWS {
        return None;
    }
    let xx: f64 = rows.iter().map(|row| row.xx).sum();
    let beta = rows.iter().map(|row| row.xe).sum::<f64>() / xx;
    // Errors of a row may go together; what is left of them without the slope tells how far it scatters.
    let scatter: f64 = rows.iter().map(|row| (row.xe - beta * row.xx).powi(2)).sum();
    let kernels = rows.first().map_or(0, |row| row.samples.len());
    let simulated = (0..kernels).map(|kernel| {
        let xe: f64 = rows.iter().map(|row| row.samples[kernel]).sum();
        xe * xe
    });
    let variance = scatter.max(simulated.sum::<f64>() / kernels.max(1) as f64);
    Some((beta, DEVIATIONS * variance.sqrt() / xx + allowed))
}

/// χ of a row, and what chance allows it (N88). None where results are exact.
fn chi(own: &[f64], samples: &[&[f64]]) -> Option<(f64, f64)> {
    let mode = common_mode(samples);
    let left = |x: &[f64]| -> Vec<f64> {
        let along: f64 = x.iter().zip(&mode).map(|(x, m)| x * m).sum();
        x.iter().zip(&mode).map(|(x, m)| x - along * m).collect()
    };
    let kernels = samples.len() as f64;
    let all: f64 = samples.iter().map(|x| squares(x)).sum::<f64>() / kernels;
    let mut variances = vec![0.0; own.len()];
    for sample in samples {
        let more = left(sample);
        variances.iter_mut().zip(more).for_each(|(sum, x)| *sum += x * x / kernels);
    }
    let typical: f64 = variances.iter().sum();
    if typical <= RESIDUE * all {
        return None;
    }
    // As many elements as err alike: of a masked row, those that are visible. Variances that are estimated
    // from a few samples scatter, and would make that fewer than they are.
    let alike = typical * typical / squares(&variances) * (1.0 + 2.0 / kernels);
    let freedom = alike.min(own.len() as f64) - 1.0;
    if freedom < FEWEST_ELEMENTS - 1.0 {
        return None;
    }
    let others = freedom * (kernels - 1.0);
    let chance = FisherSnedecor::new(freedom, others).ok()?.inverse_cdf(1.0 - FALSE_ALARM);
    Some(((squares(&left(own)) / typical).sqrt(), ROOM * chance.sqrt()))
}

/// The unit vector along which the samples are largest: a few steps of the power method.
fn common_mode(samples: &[&[f64]]) -> Vec<f64> {
    let mut mode = samples.first().map_or(Vec::new(), |first| first.to_vec());
    for _ in 0..8 {
        let mut next = vec![0.0; mode.len()];
        for sample in samples {
            let along: f64 = sample.iter().zip(&mode).map(|(x, m)| x * m).sum();
            next.iter_mut().zip(*sample).for_each(|(next, x)| *next += along * x);
        }
        let size = squares(&next).sqrt();
        if size == 0.0 {
            return next;
        }
        mode = next.into_iter().map(|x| x / size).collect();
    }
    mode
}
