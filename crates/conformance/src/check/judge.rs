//! The judge of explanations: what other values leave of the difference between results and exact values.
//!
//! An element that is off is *explained* where it lies within a bound of the other value: the element's own
//! bound, or where the other values of its row are larger, the bound of its row in proportion. A right
//! element that the other values would change is *spoilt*. An explanation of an output leaves nothing where
//! every element that is off is explained and none is spoilt. It is no accident where all of that is
//! improbable enough ([`EVIDENCE`]).

use super::answer::Judged;
use etalon_problem::Dtype;
use std::cell::LazyCell;

/// By accident an element lies within a bound of another value with a probability of about bound/|error|.
/// The logarithms of all elements that are explained must add up to this: a few hundred explanations are
/// tried, and fewer than one in a thousand checks may find a false one.
pub(super) const EVIDENCE: f64 = 13.0;

/// Of conventions with a name a problem has no more than ten: e⁴ times fewer need 4 less.
pub(super) const EVIDENCE_OF_FEW: f64 = 9.0;

/// Limit of the weight of one element: a bound may be much too wide, and elements of a row err together.
const ELEMENT: f64 = 30.0;

/// So many times the usual ratio of bounds to values counts in a row that cancels.
const CANCELS: f64 = 4.0;

/// Roundoffs that count where every exact result is 0: bounds say nothing of the size of errors there.
const ROUNDINGS: f64 = 8.0;

/// An explanation of some elements that are off must explain this share.
const MOST: f64 = 0.5;

/// The largest share of the difference that an explanation may leave of what it explains.
const FARTHEST: f64 = 0.5;

/// Right elements that may seem to be spoilt: rows that are compared with a bound near what they hold.
const FEW: f64 = 1e-3;

/// Difference of an output from other values.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Left {
    /// Elements that are off.
    pub off: usize,
    /// Of them, those that are explained.
    pub explained: usize,
    /// Of the two, those that are numbers other than 0: what was not written is near many other values.
    numbers: usize,
    explained_numbers: usize,
    /// Right elements that the other values would change.
    pub spoilt: usize,
    /// Of them, those in rows that hold an element that is off.
    pub spoilt_beside: usize,
    /// Σ ln(|error|/bound) of the elements that are explained.
    evidence: f64,
    /// Σ (got − exact)² and Σ (got − other)² of the elements that are off, in units of the mean square of
    /// the exact results.
    own: f64,
    left: f64,
    /// The same of the elements that are explained.
    own_near: f64,
    left_near: f64,
}

/// Quality of an explanation of an output by other values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Grade {
    /// They leave nothing.
    All,
    /// They leave nothing in the rows that are off, and would change others, which are right.
    Rows,
    /// They explain most of the elements that are off, and spoil none.
    Most,
    /// They do not explain it.
    No,
}

impl Left {
    /// Σ ln(|error|/bound) of the elements that are explained.
    pub fn evidence(&self) -> f64 {
        self.evidence
    }

    /// True if most of the elements that hold numbers other than 0 are explained.
    pub fn explains_numbers(&self) -> bool {
        self.explained_numbers > 0 && self.explained_numbers as f64 >= MOST * self.numbers as f64
    }

    /// The grade, where so many numbers were fitted to the results. An output of one number has little
    /// evidence of its own: that of all outputs together counts where nothing of it is left. `needed` is the
    /// least that is no accident.
    pub fn grade(&self, fitted: usize, together: f64, needed: f64) -> Grade {
        let free = 1.0 - fitted as f64 / self.explained.max(1) as f64;
        let alone = self.evidence * free >= needed;
        let beside = together >= needed && self.explained == self.off && self.spoilt == 0;
        if self.explained == 0 || self.is_far() || !(alone || beside) {
            return Grade::No;
        }
        let few = |n: usize| n as f64 <= FEW * self.explained as f64;
        match self.explained == self.off {
            true if few(self.spoilt) => Grade::All,
            true if few(self.spoilt_beside) => Grade::Rows,
            false if few(self.spoilt) && self.explained as f64 >= MOST * self.off as f64 => {
                Grade::Most
            }
            _ => Grade::No,
        }
    }

    /// Of two parts of an output.
    pub fn join(&mut self, other: &Left) {
        self.off += other.off;
        self.explained += other.explained;
        self.numbers += other.numbers;
        self.explained_numbers += other.explained_numbers;
        self.spoilt += other.spoilt;
        self.spoilt_beside += other.spoilt_beside;
        self.evidence += other.evidence;
        self.own_near += other.own_near;
        self.left_near += other.left_near;
        self.add(other);
    }

    /// With the squares of another output.
    pub fn add(&mut self, other: &Left) {
        self.own += other.own;
        self.left += other.left;
    }

    /// True if the other values are farther from the results that they explain than half of the difference. Bounds may
    /// be as wide as results are large: what lies within them is then no explanation by itself.
    fn is_far(&self) -> bool {
        self.left_near > FARTHEST * FARTHEST * self.own_near
    }

    /// rms(got − other) / rms(got − exact), if it is a number.
    pub fn share(&self) -> Option<f64> {
        Some((self.left / self.own).sqrt()).filter(|share| share.is_finite())
    }
}

/// The judge of one output.
pub(super) struct Judge<'a> {
    output: &'a Judged<'a>,
    width: usize,
    /// The rms of the exact results.
    unit: f64,
    /// The ratio of bounds to values, of each row.
    ratios: Vec<f64>,
    exact: Vec<f64>,
    got: Vec<f64>,
    bounds: Vec<f64>,
}

impl<'a> Judge<'a> {
    pub fn new(output: &'a Judged<'a>) -> Self {
        let list = |x: &ndarray::ArrayD<f64>| x.iter().copied().collect::<Vec<f64>>();
        let (exact, bounds) = (list(&output.bound.value), list(&output.bound.bound));
        let width = output.width();
        let unit = rms(&exact);
        let rows = exact.chunks(width).zip(bounds.chunks(width));
        let mut ratios: Vec<f64> = rows.map(|(x, b)| rms(b) / rms(x)).collect();
        let mut finite: Vec<f64> = ratios.iter().copied().filter(|x| x.is_finite()).collect();
        finite.sort_by(f64::total_cmp);
        let usual = finite.get(finite.len() / 2).copied();
        let usual = usual.unwrap_or_else(|| ROUNDINGS * roundoff(output.bound.largest));
        for ratio in &mut ratios {
            *ratio = if ratio.is_finite() { ratio.min(CANCELS * usual) } else { usual };
        }
        let (unit, got) = (if unit > 0.0 { unit } else { 1.0 }, list(&output.got));
        Judge { output, width, unit, ratios, exact, got, bounds }
    }

    pub fn output(&self) -> &'a Judged<'a> {
        self.output
    }

    /// The exact values, in row-major order.
    pub fn exact(&self) -> &[f64] {
        &self.exact
    }

    /// The results.
    pub fn got(&self) -> &[f64] {
        &self.got
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// The number of rows in one entry of the axes before the axis of rows.
    pub fn rows_inside(&self) -> usize {
        let shape = &self.output.operand.shape;
        let rows =
            if self.width > 1 { shape.len().checked_sub(2) } else { shape.len().checked_sub(1) };
        rows.and_then(|at| shape.get(at)).copied().unwrap_or(1)
    }

    pub fn is_off(&self, at: usize) -> bool {
        self.output.margins[at] > 1.0
    }

    /// Difference of some rows from other values.
    pub fn left(
        &self,
        rows: impl IntoIterator<Item = usize>,
        other: impl Fn(usize) -> f64,
    ) -> Left {
        self.left_of(rows, other, false)
    }

    /// The same of other values that are the exact ones times numbers, with bounds in proportion: a column of a
    /// row may be a thousand times as large as the others, and so may be its bound.
    pub fn left_in_proportion(
        &self,
        rows: impl IntoIterator<Item = usize>,
        other: impl Fn(usize) -> f64,
    ) -> Left {
        self.left_of(rows, other, true)
    }

    fn left_of(
        &self,
        rows: impl IntoIterator<Item = usize>,
        other: impl Fn(usize) -> f64,
        in_proportion: bool,
    ) -> Left {
        let mut left = Left::default();
        let mut others = Vec::with_capacity(self.width);
        for row in rows {
            let start = row * self.width;
            others.clear();
            others.extend((start..start + self.width).map(&other));
            self.row(row, &others, in_proportion, &mut left);
        }
        left
    }

    fn row(&self, row: usize, others: &[f64], in_proportion: bool, left: &mut Left) {
        let range = row * self.width..(row + 1) * self.width;
        let is_off = range.clone().any(|at| self.is_off(at));
        // Most elements lie within their own bounds, and then nobody asks for that of the row.
        let moved = LazyCell::new(|| self.ratios[row] * rms(others));
        for (at, &other) in range.zip(others) {
            let (got, exact, bound) = (self.got[at], self.exact[at], self.bounds[at]);
            if bound == f64::INFINITY {
                continue; // nothing is required of it
            }
            let within = || {
                let times = if in_proportion { (other / exact).abs() } else { f64::NAN };
                if times.is_finite() { bound * times.max(1.0) } else { bound.max(*moved) }
            };
            let same = got == other || (got.is_nan() && other.is_nan());
            let apart_by = (got - other).abs();
            let near = same || apart_by <= bound || apart_by <= within();
            match self.is_off(at) {
                true => {
                    left.off += 1;
                    let is_number = got.is_finite() && got != 0.0;
                    left.numbers += usize::from(is_number);
                    left.explained_numbers += usize::from(is_number && near);
                    let squares = [apart(got, exact, self.unit), apart(got, other, self.unit)];
                    left.own += squares[0];
                    left.left += squares[1];
                    if near {
                        left.explained += 1;
                        left.own_near += squares[0];
                        left.left_near += squares[1];
                        let error = (got - exact).abs();
                        let rare =
                            if error.is_finite() { (error / within()).ln() } else { ELEMENT };
                        left.evidence += if same { ELEMENT } else { rare.clamp(0.0, ELEMENT) };
                    }
                }
                false if !near => {
                    left.spoilt += 1;
                    left.spoilt_beside += usize::from(is_off);
                }
                false => {}
            }
        }
    }
}

/// The roundoff of the type whose largest number is this.
fn roundoff(largest: f64) -> f64 {
    let types = [Dtype::F16, Dtype::Bf16, Dtype::F32];
    let found = types.into_iter().find(|&dtype| Dtype::max(dtype) == largest);
    found.unwrap_or(Dtype::F64).unit_roundoff()
}

fn rms(x: &[f64]) -> f64 {
    let finite = || x.iter().filter(|x| x.is_finite());
    (finite().map(|x| x * x).sum::<f64>() / finite().count().max(1) as f64).sqrt()
}

/// The squared difference of two numbers; of two that are not both finite, 1 or 0.
fn apart(x: f64, y: f64, unit: f64) -> f64 {
    if x == y || (x.is_nan() && y.is_nan()) {
        return 0.0;
    }
    if x.is_finite() && y.is_finite() { ((x - y) / unit).powi(2) } else { 1.0 }
}
