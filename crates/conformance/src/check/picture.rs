//! Margins of an output as pictures, of at most 64 × 64 cells each, and as counts: what a report shows of an output
//! of any size.

use super::answer::Judged;
use super::places::{TILES, is_cut_into_tiles};
use etalon_problem::Axis;

/// The most cells along a side of a picture.
pub const CELLS: usize = 64;

/// The most lines of tiles along a side.
const LINES: usize = 16;

/// Margins of an output over two of its sides: each cell shows the worst element of those that fall into it, over all
/// entries of the other axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// The side from top to bottom.
    pub down: Side,
    /// The side from left to right.
    pub across: Side,
    /// The names of the axes of which a cell shows the worst entry.
    pub over: Vec<&'static str>,
    /// The cells, row by row.
    pub cells: Vec<Cell>,
}

/// A side of a picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// The symbols of its axes, as in `B × Hq`.
    pub name: String,
    /// The number of its entries.
    pub extent: usize,
    /// The number of entries in a cell, a power of two.
    pub step: usize,
    /// Lines stand at multiples of this entry, if there are any.
    pub lines: Option<usize>,
    /// True if errors begin and end at these lines alone.
    pub at_lines: bool,
}

impl Side {
    /// The number of its cells.
    pub fn cells(&self) -> usize {
        self.extent.div_ceil(self.step)
    }
}

/// The worst of the elements of a cell, from harmless to worst.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub enum Cell {
    /// Nothing is required of any.
    Free,
    /// The largest error divided by its bound; infinite where an element must be exact and is another number.
    Margin(f64),
    /// An infinity that is wrong.
    Infinite,
    /// A NaN that is wrong, or a number where NaN is right.
    NaN,
}

impl Cell {
    /// True if an element of it is off.
    pub fn is_off(self) -> bool {
        match self {
            Cell::Free => false,
            Cell::Margin(margin) => margin > 1.0,
            Cell::Infinite | Cell::NaN => true,
        }
    }

    /// The worse of two.
    pub fn worse(self, other: Cell) -> Cell {
        if other > self { other } else { self }
    }
}

/// Margins counted by their size.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Spread {
    /// Of which nothing is required.
    pub free: usize,
    /// Without an error.
    pub exact: usize,
    /// Margins above 2^(i − 13) and up to 2^(i − 12); the first also smaller ones, the last larger ones.
    pub counts: [usize; Spread::STEPS],
    /// Infinite ones.
    pub infinite: usize,
}

impl Spread {
    /// The number of steps of a factor of two.
    pub const STEPS: usize = 25;

    /// The steps that lie within the bounds are those before this one.
    pub const WITHIN: usize = 13;

    /// Counts a margin.
    pub fn add(&mut self, margin: f64) {
        match margin {
            0.0 => self.exact += 1,
            x if x.is_finite() => self.counts[step(x)] += 1,
            _ => self.infinite += 1,
        }
    }

    /// The counts of a bar chart, from 0 to infinity, each with its share of the largest on a logarithmic scale.
    pub fn bars(&self) -> impl Iterator<Item = (usize, f64)> {
        let counts = || [self.exact].into_iter().chain(self.counts).chain([self.infinite]);
        let size = |count: usize| (1.0 + count as f64).ln();
        let most = size(counts().max().unwrap_or(0).max(1));
        counts().map(move |count| (count, size(count) / most))
    }

    /// The number of margins that were counted.
    pub fn all(&self) -> usize {
        self.free + self.exact + self.counts.iter().sum::<usize>() + self.infinite
    }

    /// The number of those above 1.
    pub fn off(&self) -> usize {
        self.counts[Spread::WITHIN..].iter().sum::<usize>() + self.infinite
    }
}

/// The step of a positive number: from its bits, so that it is the same on every machine.
fn step(x: f64) -> usize {
    const BITS: u32 = f64::MANTISSA_DIGITS - 1;
    let bits = x.to_bits();
    let exponent = (bits >> BITS) as i64 - 1023;
    let above = bits & ((1 << BITS) - 1) != 0;
    let within = Spread::WITHIN as i64 - 1;
    (exponent + i64::from(above) + within).clamp(0, Spread::STEPS as i64 - 1) as usize
}

/// The margins of an output, counted.
pub(super) fn spread(output: &Judged<'_>) -> Spread {
    let mut spread = Spread::default();
    for (margin, bound) in output.margins.iter().zip(&output.bound.bound) {
        match is_free(*margin, *bound) {
            true => spread.free += 1,
            false => spread.add(*margin),
        }
    }
    spread
}

fn is_free(margin: f64, bound: f64) -> bool {
    bound == f64::INFINITY && margin == 0.0
}

/// Pictures of an output: rows × columns, and rows × heads of all batch elements, as far as it has them.
pub(super) fn pictures(output: &Judged<'_>) -> Vec<Picture> {
    let (axes, shape) = (&output.operand.axes, &output.operand.shape);
    if output.got.is_empty() {
        return Vec::new();
    }
    let (heads, inner): (Vec<usize>, Vec<usize>) =
        (0..axes.len()).partition(|&at| is_outer(axes[at]));
    let several = heads.iter().map(|&at| shape[at]).product::<usize>() > 1;
    let columns = match inner.as_slice() {
        [rows, .., columns] => Some((vec![*rows], vec![*columns])),
        [only] if !several && shape[*only] > 1 => Some((Vec::new(), vec![*only])),
        _ => None,
    };
    let heads = several.then(|| (inner.first().copied().into_iter().collect(), heads));
    let sides = columns.into_iter().chain(heads);
    sides.map(|(down, across)| picture(output, &down, &across)).collect()
}

/// True for an axis of which every entry is a matrix of its own.
fn is_outer(axis: Axis) -> bool {
    use Axis::{Batch, BatchOr1, KeyHeads, QueryHeads, QueryHeadsOr1, Sequences, Tiles};
    matches!(axis, Batch | BatchOr1 | QueryHeads | QueryHeadsOr1 | KeyHeads | Sequences | Tiles)
}

/// The picture over two lists of axes, of which the entries of each are numbered in row-major order.
fn picture(output: &Judged<'_>, down: &[usize], across: &[usize]) -> Picture {
    let (axes, shape) = (&output.operand.axes, &output.operand.shape);
    let place = |index: &[usize], of: &[usize]| {
        of.iter().fold(0, |place, &at| place * shape[at] + index[at])
    };
    let extent = |of: &[usize]| of.iter().map(|&at| shape[at]).product::<usize>();
    let mut hit = [vec![false; extent(down)], vec![false; extent(across)]];
    let steps = [down, across].map(|of| extent(of).div_ceil(CELLS).next_power_of_two());
    let width = extent(across).div_ceil(steps[1]);
    let mut cells = vec![Cell::Free; extent(down).div_ceil(steps[0]) * width];
    let mut index = vec![0; shape.len()];
    let bounds = output.bound.bound.iter().zip(&output.bound.value);
    for ((margin, got), (bound, value)) in output.margins.iter().zip(&output.got).zip(bounds) {
        let cell = cell(*margin, *bound, *got, *value);
        let (i, j) = (place(&index, down), place(&index, across));
        if cell.is_off() {
            (hit[0][i], hit[1][j]) = (true, true);
        }
        let own = &mut cells[i / steps[0] * width + j / steps[1]];
        *own = own.worse(cell);
        advance(&mut index, shape);
    }
    let [down_hit, across_hit] = hit;
    let over = (0..shape.len()).filter(|at| !down.contains(at) && !across.contains(at));
    Picture {
        down: side(axes, shape, down, &down_hit),
        across: side(axes, shape, across, &across_hit),
        over: over.filter(|&at| shape[at] > 1).map(|at| axes[at].symbol()).collect(),
        cells,
    }
}

/// The next index in row-major order.
fn advance(index: &mut [usize], shape: &[usize]) {
    for (entry, &extent) in index.iter_mut().zip(shape).rev() {
        *entry += 1;
        if *entry < extent {
            return;
        }
        *entry = 0;
    }
}

fn cell(margin: f64, bound: f64, got: f64, value: f64) -> Cell {
    match margin {
        margin if is_free(margin, bound) => Cell::Free,
        f64::INFINITY if got.is_nan() != value.is_nan() => Cell::NaN,
        f64::INFINITY if !got.is_finite() || !value.is_finite() => Cell::Infinite,
        margin => Cell::Margin(margin),
    }
}

/// A side, with the lines of the largest tile at which errors begin and end, or else of one that gives few lines.
fn side(axes: &[Axis], shape: &[usize], of: &[usize], hit: &[bool]) -> Side {
    let extent = hit.len();
    let step = extent.div_ceil(CELLS).next_power_of_two();
    let name = of.iter().map(|&at| axes[at].symbol()).collect::<Vec<_>>().join(" × ");
    let (lines, at_lines) = match of {
        [only] if is_cut_into_tiles(axes[*only]) => tiles(hit, step),
        // Heads in groups of one batch element.
        [_, inner @ ..] if !inner.is_empty() => {
            let own = inner.iter().map(|&at| shape[at]).product::<usize>();
            (Some(own).filter(|own| *own > 1 && extent / own <= LINES && *own < extent), false)
        }
        _ => (None, false),
    };
    Side { name, extent, step, lines, at_lines }
}

fn tiles(hit: &[bool], step: usize) -> (Option<usize>, bool) {
    let turns: Vec<usize> = (1..hit.len()).filter(|&at| hit[at] != hit[at - 1]).collect();
    let fits = |tile: &usize| *tile < hit.len() && *tile >= 2 * step;
    let found =
        TILES.into_iter().rev().find(|tile| turns.iter().all(|at| at.is_multiple_of(*tile)));
    match found.filter(|tile| !turns.is_empty() && fits(tile)) {
        Some(tile) => (Some(tile), true),
        None => (TILES.into_iter().find(|tile| fits(tile) && hit.len() / tile <= LINES), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Bound;
    use crate::tensor::Stored;
    use etalon_problem::{Dtype, Operand, Precision, Role};
    use ndarray::ArrayD;
    use std::borrow::Cow;
    use std::collections::BTreeMap;

    /// An output whose exact values are 0 with a bound of 1: what it holds are its margins.
    fn pictured(axes: &[Axis], shape: &[usize], got: impl Fn(&[usize]) -> f64) -> Vec<Picture> {
        let axes = axes.to_vec();
        let mut index = vec![0; shape.len()];
        let got = ArrayD::from_shape_simple_fn(shape, || {
            let x = got(&index);
            advance(&mut index, shape);
            x
        });
        let bound = Bound {
            value: ArrayD::zeros(shape),
            bound: ArrayD::from_elem(shape, 1.0),
            stored: Stored::Float(Dtype::F64),
            largest: f64::MAX,
            no_bound: BTreeMap::new(),
            as_right: BTreeMap::new(),
        };
        let margins = crate::gates::margins(&bound, &got);
        let (shape, role) = (shape.to_vec(), Role::Output);
        let precision = Precision::Storage;
        let (option, becomes) = (None, None);
        let operand =
            Operand { name: "o", primal: "o", axes, shape, role, precision, option, becomes };
        let (operand, bound) = (Cow::Owned(operand), Cow::Owned(bound));
        pictures(&Judged { operand, bound, got, margins })
    }

    const O: [Axis; 4] = [Axis::Batch, Axis::QueryHeads, Axis::Queries, Axis::ValueDim];

    #[test]
    fn a_cell_shows_the_worst_of_its_elements() {
        let pictures = pictured(&O, &[2, 3, 130, 5], |at| match at {
            [1, 2, 97, 3] => 7.0,
            [0, 1, 97, 3] => 3.0,
            [0, 0, 0, 0] => f64::NAN,
            [0, 0, 1, 0] => f64::NEG_INFINITY,
            [0, 0, 128, 4] => -f64::INFINITY,
            _ => 0.5,
        });
        let [columns, heads] = &pictures[..] else { panic!("{pictures:?}") };
        assert_eq!((columns.down.step, columns.down.cells(), columns.across.cells()), (4, 33, 5));
        assert_eq!(columns.over, ["B", "Hq"]);
        assert_eq!(columns.cells[97 / 4 * 5 + 3], Cell::Margin(7.0));
        assert_eq!(columns.cells[0], Cell::NaN, "NaN stands before an infinity");
        assert_eq!(columns.cells[32 * 5 + 4], Cell::Infinite);
        assert_eq!(columns.cells[1], Cell::Margin(0.5));
        assert_eq!((heads.across.name.as_str(), heads.across.lines), ("B × Hq", Some(3)));
        assert_eq!(heads.cells[97 / 4 * 6 + 1], Cell::Margin(3.0));
        assert_eq!(heads.cells[97 / 4 * 6 + 5], Cell::Margin(7.0));
    }

    #[test]
    fn lines_stand_where_errors_begin() {
        let lines = |rows: usize, from: usize, to: usize| {
            let off = |at: &[usize]| if (from..to).contains(&at[2]) { 2.0 } else { 0.0 };
            let side = pictured(&O, &[1, 1, rows, 4], off).remove(0).down;
            (side.lines, side.at_lines)
        };
        assert_eq!(lines(128, 96, 128), (Some(32), true));
        assert_eq!(lines(200, 64, 128), (Some(64), true));
        assert_eq!(lines(128, 97, 128), (Some(16), false));
        assert_eq!(lines(16, 4, 16), (None, false), "there is one tile");
        // A cell has 64 rows: lines of less would not be told apart.
        assert_eq!(lines(4096, 32, 4096), (None, false));
    }

    #[test]
    fn an_output_without_columns_or_rows_has_the_picture_that_it_can_have() {
        let sides = |axes: &[Axis], shape: &[usize]| -> Vec<[String; 2]> {
            let pictures = pictured(axes, shape, |_| 0.0);
            pictures.into_iter().map(|x| [x.down.name, x.across.name]).collect()
        };
        let named = |down: &str, across: &str| [down.to_string(), across.to_string()];
        assert_eq!(sides(&O[..3], &[1, 2, 3]), [named("N", "B × Hq")]);
        assert_eq!(sides(&[Axis::QueryHeads], &[4]), [named("", "Hq")]);
        assert_eq!(sides(&[Axis::Classes], &[40_000]), [named("", "V")]);
        assert_eq!(sides(&[Axis::Targets, Axis::Dim], &[3, 4]), [named("T", "D")]);
        for (axes, shape) in [(&O[..0], &[][..]), (&O[..1], &[1]), (&O[..], &[1, 0, 2, 2])] {
            assert_eq!(sides(axes, shape), [[""; 2]; 0], "{shape:?}");
        }
    }

    #[test]
    fn margins_are_counted_by_powers_of_two() {
        let mut spread = Spread::default();
        let margins = [0.0, 1e-300, 0.5, 0.500_001, 1.0, 1.000_001, 2.0, 1e300, f64::INFINITY];
        margins.into_iter().for_each(|margin| spread.add(margin));
        assert_eq!((spread.exact, spread.infinite, spread.off(), spread.all()), (1, 1, 4, 9));
        let at = |step: usize| spread.counts[step];
        assert_eq!((at(0), at(11), at(12), at(13), at(24)), (1, 1, 2, 2, 1));
        let bars: Vec<(usize, f64)> = spread.bars().collect();
        assert_eq!((bars.len(), bars[0].0, bars[13], bars[26].0), (27, 1, (2, 1.0), 1));
    }
}
