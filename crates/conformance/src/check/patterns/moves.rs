//! Elements that stand elsewhere: heads or batch elements in another order, rows that are shifted or
//! reversed, another layout in memory.

use super::super::candidate::{Candidate, Change};
use super::super::judge::Judge;
use super::Rows;
use crate::conventions::Exchange;
use etalon_problem::Axis;

/// Heads are compared with every other head up to so many of them.
const HEADS: usize = 64;

/// Elements of an entry that are compared with those of others.
const COMPARED: usize = 2048;

/// Rows may be shifted by so many.
const SHIFTS: [isize; 8] = [1, -1, 2, -2, 3, -3, 16, -16];

/// As many exchanges of entries are written out.
const SHOWN: usize = 4;

pub(super) fn all<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let mut list = Vec::new();
    let axes = &judge.output().operand.axes;
    for (at, axis) in axes.iter().enumerate() {
        if matches!(axis, Axis::QueryHeads | Axis::KeyHeads | Axis::Batch | Axis::Sequences) {
            list.extend(permutation(judge, rows, at));
        }
    }
    let of_rows = |axis: &Axis| {
        matches!(axis, Axis::Queries | Axis::Keys | Axis::Tokens | Axis::Targets | Axis::Classes)
    };
    if let Some(at) = axes.iter().position(of_rows) {
        list.extend(shifts(judge, rows, at));
    }
    list.extend(layouts(judge, rows));
    list
}

/// The extent of an axis, and how far apart its entries lie.
fn strides(judge: &Judge<'_>, axis: usize) -> (usize, usize) {
    let shape = &judge.output().operand.shape;
    (shape[axis], shape[axis + 1..].iter().product())
}

/// Heads or batch elements of which one holds the results of another.
fn permutation<'a>(judge: &'a Judge<'a>, rows: &Rows, axis: usize) -> Option<Candidate<'a>> {
    let (extent, stride) = strides(judge, axis);
    let (got, exact, n) = (judge.got(), judge.exact(), judge.got().len());
    if !(2..=HEADS).contains(&extent) {
        return None;
    }
    // Places of an element within the entries of the axis, at equal distances.
    let places = n / extent;
    let step = places.div_ceil(COMPARED).max(1);
    let place = |entry: usize, p: usize| p / stride * stride * extent + entry * stride + p % stride;
    let distance = |entry: usize, other: usize| -> f64 {
        let pairs =
            (0..places).step_by(step).map(|p| (got[place(entry, p)], exact[place(other, p)]));
        pairs.map(|(x, y)| if x == y { 0.0 } else { (x - y).powi(2) }).sum()
    };
    let from: Vec<usize> = (0..extent)
        .map(|entry| {
            let own = distance(entry, entry);
            let best = (0..extent).map(|other| (distance(entry, other), other));
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
    let (what, id) = match judge.output().operand.axes[axis] {
        Axis::Batch => ("batch elements", "batch-permuted"),
        Axis::Sequences => ("sequences", "sequences-permuted"),
        _ => ("heads", "heads-permuted"),
    };
    let more = if moved.len() > SHOWN { ", …" } else { "" };
    let shown = moved.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    let text = format!("{what} are permuted: {shown}{more} (it holds those of the other)");
    let at = move |at: usize| {
        let entry = at / stride % extent;
        exact[at - entry * stride + from[entry] * stride]
    };
    let change = Change { rows: rows.all(), fitted: 0, at: Box::new(at) };
    Some(Candidate::pattern(judge, id, text, change))
}

/// Rows of which each holds the results of a neighbour, or which stand in reverse.
fn shifts<'a>(judge: &'a Judge<'a>, rows: &Rows, axis: usize) -> Vec<Candidate<'a>> {
    let (extent, stride) = strides(judge, axis);
    let (exact, width) = (judge.exact(), judge.width());
    let mut list = Vec::new();
    for by in SHIFTS.into_iter().filter(|by| 2 * by.unsigned_abs() < extent) {
        let source = move |entry: usize| entry.checked_add_signed(-by).filter(|&x| x < extent);
        let (count, side) = (by.abs(), if by > 0 { "before" } else { "after" });
        let name = if count == 1 { "row" } else { "rows" };
        let text = format!("row i holds the results of the row {count} {name} {side} it");
        // Of the rows at the end nothing is known.
        let inner =
            rows.all().into_iter().filter(|row| source(row * width / stride % extent).is_some());
        let at = move |at: usize| {
            let entry = at / stride % extent;
            source(entry).map_or(f64::NAN, |from| exact[at - entry * stride + from * stride])
        };
        let change = Change { rows: inner.collect(), fitted: 0, at: Box::new(at) };
        list.push(Candidate::pattern(judge, "rows-shifted", text, change));
    }
    let at = move |at: usize| {
        let entry = at / stride % extent;
        exact[at - entry * stride + (extent - 1 - entry) * stride]
    };
    let change = Change { rows: rows.all(), fitted: 0, at: Box::new(at) };
    let text = "rows stand from the last to the first";
    list.push(Candidate::pattern(judge, "rows-reversed", text, change));
    list
}

/// Elements in the order of another layout: two axes are exchanged in memory.
fn layouts<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let (axes, shape) = (&judge.output().operand.axes, &judge.output().operand.shape);
    let exact = judge.exact();
    let many: Vec<usize> = (0..axes.len()).filter(|&at| shape[at] > 1).collect();
    let exchanges = many.iter().flat_map(|&x| many.iter().map(move |&y| (x, y)));
    let found = exchanges.filter(|(x, y)| x < y).map(|(x, y)| {
        let mut order: Vec<usize> = (0..axes.len()).collect();
        order.swap(x, y);
        let symbols: Vec<&str> = order.iter().map(|&at| axes[at].symbol()).collect();
        let text = format!("the elements lie in memory as [{}]", symbols.join(", "));
        let exchange = Exchange::new(shape, x, y);
        let at = move |at: usize| exact[exchange.source(at)];
        let change = Change { rows: rows.all(), fitted: 0, at: Box::new(at) };
        Candidate::pattern(judge, "layout", text, change)
    });
    found.collect()
}
