//! The exact results times a number: one for all, or one for each head, row or column.

use super::super::candidate::{Candidate, Change};
use super::super::judge::Judge;
use super::{Rows, names};
use etalon_problem::{Axis, Problem};
use std::collections::BTreeMap;

/// Rows of fewer elements than this have no factor of their own that would say anything.
const WIDE: usize = 8;

pub(super) fn all<'a>(problem: &Problem, judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let (width, shape) = (judge.width(), &judge.output().operand.shape);
    let mut list = Vec::new();
    list.extend(factor(problem, judge, rows));
    list.extend(offset(judge, rows));
    let each = |id: &str, what: &str, group: Box<dyn Fn(usize) -> usize + Send + Sync>| {
        factor_of_each(judge, rows, id, what, group)
    };
    let by_rows = "not normalised, or a rescale is missing where the maximum grew?";
    if width >= WIDE {
        list.extend(each(
            "factor-of-each-row",
            &format!("row|{by_rows}"),
            Box::new(move |at| at / width),
        ));
        let text = "column|a scale of each channel?";
        list.extend(each("factor-of-each-column", text, Box::new(move |at| at % width)));
    }
    let heads = |axis: &Axis| matches!(axis, Axis::QueryHeads | Axis::KeyHeads);
    if let Some(at) = judge.output().operand.axes.iter().position(heads).filter(|&at| shape[at] > 1)
    {
        let inner: usize = shape[at + 1..].iter().product();
        let text = "head|a scale of each head?";
        list.extend(each("factor-of-each-head", text, Box::new(move |at| at / inner)));
    }
    list
}

/// Distance from the median ratio within which elements count as evidence of it.
const NEAR: f64 = 0.05;

/// ⟨got, exact⟩ / ⟨exact, exact⟩ over elements whose ratio is near the one in the middle of those that are
/// off: something else may be off beside.
fn ratio(judge: &Judge<'_>, elements: impl Iterator<Item = usize> + Clone) -> Option<f64> {
    let (got, exact) = (judge.got(), judge.exact());
    let off = elements.clone().filter(|&at| judge.is_off(at));
    let mut ratios: Vec<f64> =
        off.map(|at| got[at] / exact[at]).filter(|x| x.is_finite()).collect();
    ratios.sort_by(f64::total_cmp);
    let middle = *ratios.get(ratios.len() / 2)?;
    let near =
        |at: &usize| (got[*at] - middle * exact[*at]).abs() <= NEAR * (middle * exact[*at]).abs();
    let (xy, xx) = elements
        .filter(near)
        .fold((0.0, 0.0), |(xy, xx), at| (xy + exact[at] * got[at], xx + exact[at] * exact[at]));
    Some(xy / xx).filter(|ratio| ratio.is_finite() && *ratio != 0.0)
}

/// The columns in which an element of some rows is off.
fn columns(judge: &Judge<'_>, rows: &[usize]) -> Vec<bool> {
    let width = judge.width();
    let mut hit = vec![false; width];
    for row in rows {
        (0..width).for_each(|column| hit[column] |= judge.is_off(row * width + column));
    }
    hit
}

/// The exact results times a number, which has a name or was fitted.
fn factor<'a>(problem: &Problem, judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let width = judge.width();
    let hit = columns(judge, &rows.off);
    let elements = rows.off.iter().flat_map(|row| row * width..(row + 1) * width);
    let Some(ratio) = ratio(judge, elements.filter(|at| hit[at % width])) else {
        return Vec::new();
    };
    let of = match (rows.right.is_empty(), hit.iter().all(|hit| *hit)) {
        (true, true) => "the results",
        (false, true) => "the rows that are off",
        _ => "the columns that are off",
    };
    let times = |number: f64, text: String, fitted: usize| {
        let (exact, hit) = (judge.exact(), hit.clone());
        let at = move |at: usize| if hit[at % width] { number * exact[at] } else { exact[at] };
        let change = Change { rows: rows.off.clone(), fitted, at: Box::new(at) };
        Candidate::factors(judge, "factor", format!("{of} are the exact ones times {text}"), change)
    };
    let named = names::name(problem, &judge.output().operand, ratio);
    // A number with a name was not fitted: it may be reported of a single result.
    match named {
        Some((number, name)) => vec![times(number, name.clone(), 0), times(ratio, name, 1)],
        None => vec![times(ratio, format!("{ratio:.4} (1/{:.4})", 1.0 / ratio), 1)],
    }
}

/// The exact results and one number more.
fn offset<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Option<Candidate<'a>> {
    let (width, got, exact) = (judge.width(), judge.got(), judge.exact());
    let hit = columns(judge, &rows.off);
    let elements = rows.off.iter().flat_map(|row| row * width..(row + 1) * width);
    let finite = elements.filter(|at| hit[at % width] && (got[*at] - exact[*at]).is_finite());
    let (sum, n) = finite.fold((0.0, 0.0), |(sum, n), at| (sum + got[at] - exact[at], n + 1.0));
    let mean = sum / n;
    let at = move |at: usize| if hit[at % width] { exact[at] + mean } else { exact[at] };
    let text = format!("results that are off are the exact ones plus {mean:.4e}");
    let change = Change { rows: rows.off.clone(), fitted: 1, at: Box::new(at) };
    mean.is_finite().then(|| Candidate::pattern(judge, "offset", text, change))
}

/// Every group of elements with a factor of its own, in rows that are off; `what` is the name of a group
/// and a guess.
fn factor_of_each<'a>(
    judge: &'a Judge<'a>,
    rows: &Rows,
    id: &str,
    what: &str,
    group: Box<dyn Fn(usize) -> usize + Send + Sync>,
) -> Option<Candidate<'a>> {
    let (width, exact, got) = (judge.width(), judge.exact(), judge.got());
    let mut sums = BTreeMap::<usize, (f64, f64)>::new();
    for at in rows.off.iter().flat_map(|row| row * width..(row + 1) * width) {
        if got[at].is_finite() && exact[at].is_finite() {
            let (xy, xx) = sums.entry(group(at)).or_default();
            *xy += exact[at] * got[at];
            *xx += exact[at] * exact[at];
        }
    }
    let factors: BTreeMap<usize, f64> = sums
        .into_iter()
        .map(|(group, (xy, xx))| (group, xy / xx))
        .filter(|(_, ratio)| ratio.is_finite() && *ratio != 0.0)
        .collect();
    if factors.len() < 2 {
        return None;
    }
    let least = factors.values().copied().fold(f64::INFINITY, f64::min);
    let most = factors.values().copied().fold(f64::NEG_INFINITY, f64::max);
    let (name, guess) = what.split_once('|').unwrap_or((what, ""));
    let text = format!(
        "each {name} that is off is the exact one times a factor of its own, {least:.3} to {most:.3}: {guess}"
    );
    let fitted = factors.len();
    let at = move |at: usize| factors.get(&group(at)).copied().unwrap_or(1.0) * exact[at];
    let change = Change { rows: rows.off.clone(), fitted, at: Box::new(at) };
    Some(Candidate::factors(judge, id, text, change))
}
