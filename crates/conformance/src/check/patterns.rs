//! Changes of the exact results that kernels make by mistake: a factor, a shift, another order of heads,
//! another layout. Each is measured, in the rows that are off, by what it leaves of the difference.

use super::answer::Judged;
use super::{Explanation, Kind, LEFT, by_rest};
use crate::gates;
use etalon_problem::{Axis, Problem};
use ndarray::{ArrayD, ArrayViewD, Axis as Along, Slice};
use std::f64::consts::{LN_2, LOG2_E};

/// How near a ratio must be to a number that has a name.
const NEAR: f64 = 5e-3;

/// Rows of fewer elements than this have no factor of their own that would say anything.
const WIDE: usize = 8;

/// Heads are compared with every other head up to so many of them.
const HEADS: usize = 64;

/// Rows may be shifted by so many.
const SHIFTS: [isize; 6] = [1, -1, 2, -2, 3, -3];

/// The patterns of an output that is off. One of each kind, and of those the one that leaves least.
pub(super) fn all(problem: &Problem, output: &Judged<'_>) -> Vec<Explanation> {
    if output.off() == 0 {
        return Vec::new();
    }
    let mut found: Vec<Explanation> =
        [factor(problem, output), order(output), shift(output), layout(output)]
            .into_iter()
            .flatten()
            .filter(|x| x.left <= Some(LEFT))
            .collect();
    // A shift of one row by chance is also an order of its heads; a constant also a factor of each row.
    found.sort_by(by_rest);
    found.truncate(1);
    if found.is_empty() {
        found.extend(factor_of_each_row(output).filter(|x| x.left <= Some(LEFT)));
    }
    if found.is_empty() {
        found.extend(marks(output));
    }
    found
}

fn pattern(
    output: &Judged<'_>,
    id: &'static str,
    text: String,
    left: impl Into<Option<f64>>,
) -> Explanation {
    let output = output.operand.name;
    let text = format!("{output}: {text}");
    Explanation { kind: Kind::Pattern, id, output: Some(output), text, left: left.into() }
}

/// ⟨got, exact⟩ / ⟨exact, exact⟩ over finite pairs.
fn ratio<'a>(pairs: impl Iterator<Item = (&'a f64, &'a f64)>) -> Option<f64> {
    let finite = pairs.filter(|(got, exact)| got.is_finite() && exact.is_finite());
    let (xy, xx) = finite.fold((0.0, 0.0), |(xy, xx), (y, x)| (xy + x * y, xx + x * x));
    Some(xy / xx).filter(|ratio| ratio.is_finite())
}

/// The elements of the rows that are off, with their exact values.
fn pairs<'a>(output: &'a Judged<'_>, rows: &'a [bool]) -> impl Iterator<Item = (&'a f64, &'a f64)> {
    let width = output.width();
    let all = output.got.iter().zip(&output.bound.value).enumerate();
    all.filter(move |(at, _)| rows[at / width]).map(|(_, pair)| pair)
}

/// The exact results times one number.
fn factor(problem: &Problem, output: &Judged<'_>) -> Option<Explanation> {
    let rows = output.own_rows();
    let ratio = ratio(pairs(output, &rows))?;
    let left = output.left(&(&output.bound.value * ratio))?;
    if ratio == 0.0 || pairs(output, &rows).filter(|(_, exact)| **exact != 0.0).count() < WIDE {
        return None; // left to marks: nothing was written, or too little to tell
    }
    let of = if rows.iter().all(|row| *row) { "the results" } else { "the rows that are off" };
    let text = match name(problem, output, ratio) {
        Some(name) => format!("{of} are the exact ones times {name}"),
        None => format!("{of} are the exact ones times {ratio:.4} (1/{:.4})", 1.0 / ratio),
    };
    Some(pattern(output, "factor", text, left))
}

/// A factor in words, if it is one that a problem has.
fn name(problem: &Problem, output: &Judged<'_>, ratio: f64) -> Option<String> {
    let is_lse = output.operand.primal == "lse";
    let base = match is_lse {
        true => "log₂e: a logarithm to base 2 (convention lse-base-2)",
        false => "log₂e: an exponential taken for one to base 2?",
    };
    let mut known = vec![
        (LOG2_E, base.to_string()),
        (LN_2, "ln 2: an exponential to base 2, or a logarithm taken for one to base 2?".into()),
        (-1.0, "−1: a sign?".into()),
    ];
    let (scale, group, dim) = match problem {
        Problem::LinearAttention(x) => (x.scale, x.group(), x.extents.dim),
        _ => problem.scores().map_or((1.0, 1, 1), |x| (x.scale(), x.group(), x.extents.dim)),
    };
    let root = (dim as f64).sqrt();
    for (number, words) in [
        (scale, "the scale"),
        (group as f64, "the group size, Hq/Hk"),
        (root, "√D"),
        (dim as f64, "D"),
    ] {
        if (number - 1.0).abs() > NEAR && number != 0.0 {
            known.push((number, format!("{words} ({number:.4}): applied once too often?")));
            known.push((1.0 / number, format!("1/{words} (1/{number:.4}): not applied?")));
        }
    }
    known.push((2.0, "2: counted twice?".into()));
    known.push((0.5, "½: half of it is missing?".into()));
    let mut names =
        known.into_iter().filter(|(x, _)| (ratio / x - 1.0).abs() < NEAR).map(|(_, name)| name);
    let first = names.next()?;
    // A group of two is also a factor of 2: the reader knows which it can be.
    Some(names.fold(first, |all, name| format!("{all} Or {name}")))
}

/// Every row with a factor of its own.
fn factor_of_each_row(output: &Judged<'_>) -> Option<Explanation> {
    let width = output.width();
    if width < WIDE {
        return None;
    }
    let (got, exact) = (output.got.as_slice()?, output.bound.value.as_slice()?);
    let mut changed = output.bound.value.clone();
    let mut factors = Vec::new();
    let rows =
        got.chunks(width).zip(exact.chunks(width)).zip(changed.as_slice_mut()?.chunks_mut(width));
    for (((got, exact), changed), off) in rows.zip(output.own_rows()) {
        if let Some(ratio) = ratio(got.iter().zip(exact)).filter(|_| off) {
            changed.iter_mut().for_each(|x| *x *= ratio);
            factors.push(ratio);
        }
    }
    let left = output.left(&changed)?;
    factors.sort_by(f64::total_cmp);
    let (least, most) = (factors.first()?, factors.last()?);
    let text = format!(
        "each row that is off is the exact one times a factor of its own, {least:.3} to {most:.3}: not \
         normalised, or a rescale is missing where the maximum grew?"
    );
    Some(pattern(output, "factor-of-each-row", text, left))
}

/// Heads or batch elements of which one holds the results of another.
fn order(output: &Judged<'_>) -> Option<Explanation> {
    use Axis::{Batch, KeyHeads, QueryHeads};
    let places = output.operand.axes.iter().enumerate();
    let found = places.filter(|(_, axis)| matches!(axis, QueryHeads | KeyHeads | Batch));
    let found = found.filter_map(|(at, &axis)| permutation(output, at, axis));
    found.min_by(by_rest)
}

fn permutation(output: &Judged<'_>, at: usize, axis: Axis) -> Option<Explanation> {
    let (extent, along) = (output.operand.shape[at], Along(at));
    if !(2..=HEADS).contains(&extent) {
        return None;
    }
    let value = &output.bound.value;
    let from: Vec<usize> = (0..extent)
        .map(|entry| {
            let got = output.got.index_axis(along, entry);
            let near = |other: &usize| distance(&got, &value.index_axis(along, *other));
            let own = near(&entry);
            let best = (0..extent).map(|other| (near(&other), other));
            let best = best.min_by(|x, y| x.0.total_cmp(&y.0)).unwrap_or((own, entry));
            if best.0 < own { best.1 } else { entry }
        })
        .collect();
    let moved: Vec<String> = (0..extent)
        .filter(|&entry| from[entry] != entry)
        .map(|entry| format!("{entry} those of {}", from[entry]))
        .collect();
    if moved.is_empty() {
        return None;
    }
    let left = output.left(&value.select(along, &from))?;
    let what = if axis == Axis::Batch { "batch elements" } else { "heads" };
    let shown = moved.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
    let more = if moved.len() > 4 { ", …" } else { "" };
    let text = format!("{what} are permuted: {shown}{more} (it holds those of the other)");
    let id = if axis == Axis::Batch { "batch-permuted" } else { "heads-permuted" };
    Some(pattern(output, id, text, left))
}

/// Σ (x − y)² over finite pairs; a class that differs counts as much as anything can.
fn distance(x: &ArrayViewD<'_, f64>, y: &ArrayViewD<'_, f64>) -> f64 {
    x.iter().zip(y).map(|(x, y)| if x == y { 0.0 } else { (x - y).powi(2) }).sum::<f64>()
}

/// Rows of which each holds the results of a neighbour, or which stand in reverse.
fn shift(output: &Judged<'_>) -> Option<Explanation> {
    let rows = |axis: &Axis| {
        matches!(axis, Axis::Queries | Axis::Keys | Axis::Tokens | Axis::Targets | Axis::Classes)
    };
    let at = output.operand.axes.iter().position(rows)?;
    let extent = output.operand.shape[at];
    let value = &output.bound.value;
    let shifted = SHIFTS.into_iter().filter(|by| by.unsigned_abs() < extent).filter_map(|by| {
        let from: Vec<usize> =
            (0..extent as isize).map(|i| (i - by).clamp(0, extent as isize - 1) as usize).collect();
        let left = output.left(&value.select(Along(at), &from))?;
        let (count, side) = (by.abs(), if by > 0 { "before" } else { "after" });
        let rows = if count == 1 { "row" } else { "rows" };
        let text = format!("row i holds the results of the row {count} {rows} {side} it");
        Some(pattern(output, "rows-shifted", text, left))
    });
    let reversed = || {
        let mut turned = value.view();
        turned.slice_axis_inplace(Along(at), Slice::new(0, None, -1));
        let left = output.left(&turned.to_owned())?;
        Some(pattern(output, "rows-reversed", "rows stand from the last to the first".into(), left))
    };
    shifted.chain(reversed()).min_by(by_rest)
}

/// Elements in the order of another layout: two axes are exchanged in memory.
fn layout(output: &Judged<'_>) -> Option<Explanation> {
    let (axes, shape) = (&output.operand.axes, &output.operand.shape);
    let many: Vec<usize> = (0..axes.len()).filter(|&at| shape[at] > 1).collect();
    let exchanges = many.iter().flat_map(|&x| many.iter().map(move |&y| (x, y)));
    let found = exchanges.filter(|(x, y)| x < y).filter_map(|(x, y)| {
        let mut order: Vec<usize> = (0..axes.len()).collect();
        order.swap(x, y);
        let exchanged = output.bound.value.view().permuted_axes(order.clone());
        let data: Vec<f64> = exchanged.iter().copied().collect();
        let exchanged = ArrayD::from_shape_vec(shape.as_slice(), data).ok()?;
        let left = output.left(&exchanged)?;
        let symbols: Vec<&str> = order.iter().map(|&at| axes[at].symbol()).collect();
        let text = format!("the elements lie in memory as [{}]", symbols.join(", "));
        Some(pattern(output, "layout", text, left))
    });
    found.min_by(by_rest)
}

/// What else results may look like: not a number, never written, off by a constant.
fn marks(output: &Judged<'_>) -> Option<Explanation> {
    gates::hint(output.bound, &output.got).map(|text| pattern(output, "marks", text, None))
}
