//! Elements that stand elsewhere: heads, batch elements, rows or columns in another order, rows that are
//! shifted, reversed or summed up, another layout in memory, another tensor.

use super::super::candidate::{Candidate, Change};
use super::super::judge::Judge;
use super::Rows;
use crate::conventions::Layout;
use etalon_problem::Axis;
use std::collections::BTreeMap;

/// Heads are compared with every other head up to so many of them.
const HEADS: usize = 64;

/// Elements of an entry that are compared with those of others.
const COMPARED: usize = 2048;

/// Rows may be shifted by so many.
const SHIFTS: [isize; 16] = [1, -1, 2, -2, 3, -3, 4, -4, 16, -16, 32, -32, 64, -64, 128, -128];

/// Rows and columns of fewer elements are not searched for.
const WIDE: usize = 8;

/// Columns of wider rows are not searched for.
const WIDEST: usize = 1024;

/// Rows that are searched for, at the most, and elements among which they are.
const FOUND: usize = 128;
const SEARCHED: usize = 1 << 24;

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
        list.extend(sums(judge, rows, at));
    }
    list.extend(layouts(judge, rows));
    list.extend(columns(judge, rows));
    list.extend(scattered(judge, rows));
    list
}

/// The extent of an axis, and how far apart its entries lie.
fn strides(judge: &Judge<'_>, axis: usize) -> (usize, usize) {
    let shape = &judge.output().operand.shape;
    (shape[axis], shape[axis + 1..].iter().product())
}

/// Heads or batch elements whose elements that are off hold the results of another.
fn permutation<'a>(judge: &'a Judge<'a>, rows: &Rows, axis: usize) -> Option<Candidate<'a>> {
    let (extent, stride) = strides(judge, axis);
    let (got, exact, n) = (judge.got(), judge.exact(), judge.got().len());
    if !(2..=HEADS).contains(&extent) {
        return None;
    }
    let place = |entry: usize, p: usize| p / stride * stride * extent + entry * stride + p % stride;
    let from: Vec<usize> = (0..extent)
        .map(|entry| {
            // Places of elements that are off, at equal distances.
            let off: Vec<usize> =
                (0..n / extent).filter(|&p| judge.is_off(place(entry, p))).collect();
            let step = off.len().div_ceil(COMPARED).max(1);
            let distance = |other: usize| -> f64 {
                let pairs = off
                    .iter()
                    .step_by(step)
                    .map(|&p| (got[place(entry, p)], exact[place(other, p)]));
                pairs.map(|(x, y)| if x == y { 0.0 } else { (x - y).powi(2) }).sum()
            };
            let best = (0..extent).map(|other| (distance(other), other));
            let best = best.min_by(|x, y| x.0.total_cmp(&y.0));
            best.filter(|_| !off.is_empty()).map_or(entry, |(_, other)| other)
        })
        .collect();
    let moved: Vec<(usize, usize)> =
        from.iter().copied().enumerate().filter(|(entry, from)| entry != from).collect();
    if moved.is_empty() {
        return None;
    }
    let (what, id) = match judge.output().operand.axes[axis] {
        Axis::Batch => ("batch elements", "batch-permuted"),
        Axis::Sequences => ("sequences", "sequences-permuted"),
        _ => ("heads", "heads-permuted"),
    };
    let text = format!("{what} are permuted: {} (it holds those of the other)", shown(&moved));
    let at = move |at: usize| {
        let entry = at / stride % extent;
        exact[at - entry * stride + from[entry] * stride]
    };
    let change = Change { rows: rows.all(), fitted: 0, at: Box::new(at) };
    Some(Candidate::pattern(judge, id, text, change))
}

/// Entries and those whose results they hold, in words.
fn shown(moved: &[(usize, usize)]) -> String {
    let more = if moved.len() > SHOWN { ", …" } else { "" };
    let words: Vec<String> =
        moved.iter().take(SHOWN).map(|(entry, from)| format!("{entry} those of {from}")).collect();
    words.join(", ") + more
}

/// The list nearest to `x` among `others`, by its number.
fn nearest<'b>(x: &[f64], others: impl Iterator<Item = &'b [f64]>) -> Option<usize> {
    let mut best = (f64::INFINITY, None);
    for (at, other) in others.enumerate() {
        let mut sum = 0.0;
        for (x, y) in x.iter().zip(other) {
            sum += (x - y).powi(2);
            if sum >= best.0 {
                break;
            }
        }
        if sum < best.0 {
            best = (sum, Some(at));
        }
    }
    best.1
}

/// Rows that are off and hold each the results of some other row.
fn scattered<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Option<Candidate<'a>> {
    let (width, got, exact) = (judge.width(), judge.got(), judge.exact());
    if width < WIDE || exact.len() > SEARCHED {
        return None;
    }
    let step = rows.off.len().div_ceil(FOUND).max(1);
    let mut from = BTreeMap::<usize, usize>::new();
    for &row in rows.off.iter().step_by(step) {
        let own = &got[row * width..(row + 1) * width];
        from.insert(row, nearest(own, exact.chunks(width))?);
    }
    let moved: Vec<(usize, usize)> =
        from.iter().map(|(x, y)| (*x, *y)).filter(|(x, y)| x != y).collect();
    if moved.is_empty() {
        return None;
    }
    let inner = judge.rows_inside();
    let word = |row: usize| if inner > 0 { row % inner } else { row };
    let words: Vec<(usize, usize)> = moved.iter().map(|&(x, y)| (word(x), word(y))).collect();
    let text = format!("rows hold the results of other rows: {}", shown(&words));
    let chosen: Vec<usize> = from.keys().copied().collect();
    let at = move |at: usize| {
        let row = at / width;
        exact[from.get(&row).copied().unwrap_or(row) * width + at % width]
    };
    let change = Change { fitted: chosen.len(), rows: chosen, at: Box::new(at) };
    Some(Candidate::pattern(judge, "rows-permuted", text, change))
}

/// Columns of which each holds the results of another.
fn columns<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Option<Candidate<'a>> {
    let (width, got, exact) = (judge.width(), judge.got(), judge.exact());
    if !(2..=WIDEST).contains(&width) || rows.off.len() < WIDE {
        return None;
    }
    let step = rows.off.len().div_ceil(FOUND).max(1);
    let some: Vec<usize> = rows.off.iter().copied().step_by(step).collect();
    let column =
        |x: &[f64], c: usize| -> Vec<f64> { some.iter().map(|row| x[row * width + c]).collect() };
    let columns: Vec<Vec<f64>> = (0..width).map(|c| column(exact, c)).collect();
    let from: Option<Vec<usize>> =
        (0..width).map(|c| nearest(&column(got, c), columns.iter().map(Vec::as_slice))).collect();
    let from = from?;
    let moved: Vec<(usize, usize)> =
        from.iter().copied().enumerate().filter(|(x, y)| x != y).collect();
    if moved.is_empty() {
        return None;
    }
    let text = format!("columns hold the results of other columns: {}", shown(&moved));
    let at = move |at: usize| exact[at / width * width + from[at % width]];
    let change = Change { rows: rows.off.clone(), fitted: moved.len(), at: Box::new(at) };
    Some(Candidate::pattern(judge, "columns-permuted", text, change))
}

/// Numbers of rows that are sums over the rows up to them, or differences of neighbours.
fn sums<'a>(judge: &'a Judge<'a>, rows: &Rows, axis: usize) -> Vec<Candidate<'a>> {
    let (extent, stride) = strides(judge, axis);
    let exact = judge.exact();
    if stride != 1 || extent < 2 || exact.len() > SEARCHED {
        return Vec::new();
    }
    let lines = || exact.chunks(extent);
    let running = |line: &mut dyn Iterator<Item = f64>| -> Vec<f64> {
        line.scan(0.0, |sum, x| {
            *sum += x;
            Some(*sum)
        })
        .collect()
    };
    let upwards = lines().flat_map(|line| running(&mut line.iter().copied())).collect();
    let downwards = lines().flat_map(|line| {
        let mut sums = running(&mut line.iter().rev().copied());
        sums.reverse();
        sums
    });
    let less_next = lines()
        .flat_map(|line| (0..extent).map(|at| line[at] - line.get(at + 1).copied().unwrap_or(0.0)));
    let less_last = lines()
        .flat_map(|line| (0..extent).map(|at| line[at] - if at > 0 { line[at - 1] } else { 0.0 }));
    let list: [(&str, &str, Vec<f64>); 4] = [
        ("rows-summed", "each is the sum of the exact ones up to it", upwards),
        (
            "rows-summed-from-last",
            "each is the sum of the exact ones from it on",
            downwards.collect(),
        ),
        (
            "rows-not-summed",
            "each is the exact one minus the next: not summed up?",
            less_next.collect(),
        ),
        (
            "rows-less-last",
            "each is the exact one minus the one before: not summed up?",
            less_last.collect(),
        ),
    ];
    let candidate = |(id, text, values): (&str, &str, Vec<f64>)| {
        let change = Change { rows: rows.all(), fitted: 0, at: Box::new(move |at| values[at]) };
        Candidate::pattern(judge, id, text, change)
    };
    list.into_iter().map(candidate).collect()
}

/// Candidates: every other output, and every input, of the same shape.
pub(super) fn copies<'a>(
    judge: &'a Judge<'a>,
    rows: &Rows,
    others: &'a [Judge<'a>],
    inputs: &'a [(&'static str, &'a [f64])],
) -> Vec<Candidate<'a>> {
    let own = &judge.output().operand;
    if judge.exact().len() < WIDE {
        return Vec::new(); // two numbers may be the same
    }
    let same = |other: &&Judge<'_>| {
        let other = &other.output().operand;
        other.name != own.name && other.shape == own.shape
    };
    let outputs = others.iter().filter(same).map(|other| {
        (format!("it holds the results of {}", other.output().operand.name), other.exact())
    });
    let inputs = inputs
        .iter()
        .map(|(name, x)| (format!("it holds the input {name}"), *x))
        .filter(|(_, x)| x.len() == judge.exact().len());
    let candidate = |(text, x): (String, &'a [f64])| {
        let change = Change { rows: rows.all(), fitted: 0, at: Box::new(move |at| x[at]) };
        Candidate::pattern(judge, "copy", text, change)
    };
    outputs.chain(inputs).map(candidate).collect()
}

/// Rows of which each holds the results of a neighbour, or which stand in reverse.
fn shifts<'a>(judge: &'a Judge<'a>, rows: &Rows, axis: usize) -> Vec<Candidate<'a>> {
    let (extent, stride) = strides(judge, axis);
    let (exact, width) = (judge.exact(), judge.width());
    let mut list = Vec::new();
    for by in SHIFTS.into_iter().filter(|by| by.unsigned_abs() < extent) {
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

/// Elements in the order of another layout.
fn layouts<'a>(judge: &'a Judge<'a>, rows: &Rows) -> Vec<Candidate<'a>> {
    let (axes, shape) = (&judge.output().operand.axes, &judge.output().operand.shape);
    let exact = judge.exact();
    let found = Layout::orders(shape).into_iter().map(|order| {
        let symbols: Vec<&str> = order.iter().map(|&at| axes[at].symbol()).collect();
        let text = format!("the elements lie in memory as [{}]", symbols.join(", "));
        let layout = Layout::new(shape, &order);
        let at = move |at: usize| exact[layout.source(at)];
        let change = Change { rows: rows.all(), fitted: 0, at: Box::new(at) };
        Candidate::pattern(judge, "layout", text, change)
    });
    found.collect()
}
