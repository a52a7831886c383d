//! Readings of what the forward pass saves for the backward pass of attention and attention_lse: lse to
//! another base, with another sign, without the sink, of a neighbour; o and its product with dout. And of
//! another reading in the backward pass alone, which reads what a right forward pass saved.
//!
//! With lse′ in place of lse every weight is P′ = e^{S − lse′} = f P with f = e^{lse − lse′}, the same for
//! all keys of a row. Every gradient is a sum over rows of what is linear in dout and dlse (B1) to (B9), so
//! that these are the gradients for f·dout and f·dlse.

use super::forward::{Saved, evaluate_forward};
use super::tails::{TILES, of_keys};
use super::{Edit, Original, Reading};
use crate::tensor::Values;
use etalon_problem::{Axis, Pass, Problem};
use ndarray::{ArrayD, Axis as Along};
use std::f64::consts::{LN_2, LOG2_E};
use std::sync::Arc;

/// Readings of saved tensors, and `others` with what a right forward pass saved.
pub(super) fn all<'a>(
    own: &Original<'_>,
    others: impl Iterator<Item = &'a Reading>,
) -> Vec<Reading> {
    let has_softmax = matches!(own.problem, Problem::Attention(_) | Problem::AttentionLse(_));
    if own.pass != Pass::Backward || !has_softmax {
        return Vec::new();
    }
    let Some(exact) = forward(own, None) else { return Vec::new() };
    let Some(lse) = exact.get("lse") else { return Vec::new() };
    let mut list = of_lse(own, lse);
    let mut product = None;
    if let (Some(o), Some(dout)) = (exact.get("o"), own.inputs.get("dout")) {
        list.extend(of_delta(own, o, dout));
        product = Some((o * dout).sum_axis(Along(3)));
    }
    let saved = Arc::new(Saved { lse: lse.clone(), product });
    list.extend(
        others.filter(|x| may_be_of_backward(x)).map(|reading| in_backward(reading, &saved)),
    );
    list.extend(parts_of_dq(own, &saved));
    list
}

/// True if a backward pass alone may read the problem so: without changes of what it alone reads, or of where
/// inputs lie.
fn may_be_of_backward(reading: &Reading) -> bool {
    let edited =
        |names: &[&str]| reading.edits.iter().any(|(name, _)| names.contains(&name.as_str()));
    !edited(&["dout", "dlse"])
        && (!reading.is_late || !edited(&["q", "k", "v"]))
        && reading.joined.is_none()
        && reading.finish.is_empty()
        && reading.only.is_empty()
        && !reading.is_interleaved
}

/// A reading in the backward pass alone.
fn in_backward(reading: &Reading, saved: &Arc<Saved>) -> Reading {
    let name = reading.text.strip_prefix(&format!("{}. ", reading.id));
    let text = name.unwrap_or(&reading.text);
    let mut own = reading.clone();
    own.id = format!("{}-in-backward", reading.id);
    own.text =
        format!("in the backward pass alone, with `lse` and `o` of a right forward pass: {text}");
    own.of = own.of.or(Some("lse"));
    own.saved = Some(saved.clone());
    own
}

/// dq of one tile of keys alone, as where it is stored and not added up.
fn parts_of_dq(own: &Original<'_>, saved: &Arc<Saved>) -> Vec<Reading> {
    let Some(scores) = own.problem.scores() else { return Vec::new() };
    let keys = scores.extents.keys;
    let mut list = Vec::new();
    for tile in TILES.into_iter().filter(|&tile| keys > tile) {
        let last = (keys - 1) / tile * tile;
        let of = |which: &str, counts: &dyn Fn(usize) -> bool| {
            let id = format!("dq-of-{which}-tile-of-{tile}");
            let text = format!("dq holds the keys of the {which} tile of {tile} alone");
            let mut reading = of_keys(own, scores, &id, &text, counts)?.only(["dq"]);
            reading.saved = Some(saved.clone());
            Some(reading)
        };
        list.extend(of("first", &|j| j < tile));
        list.extend(of("last", &|j| j >= last));
    }
    list
}

/// The exact results of the forward pass, perhaps with other sinks.
fn forward(own: &Original<'_>, sinks: Option<f64>) -> Option<Values> {
    let mut inputs = own.inputs.clone();
    if let (Some(number), Some(x)) = (sinks, inputs.get_mut("sinks")) {
        x.fill(number);
    }
    evaluate_forward(own.problem, &inputs).ok()
}

fn of_lse(own: &Original<'_>, lse: &ArrayD<f64>) -> Vec<Reading> {
    let mut others = vec![
        ("base-2", "is a logarithm to base 2, read as a natural one", lse.mapv(|x| LOG2_E * x)),
        ("in-base-2", "is a natural logarithm, read as one to base 2", lse.mapv(|x| LN_2 * x)),
        ("negated", "has the other sign", lse.mapv(|x| -x)),
        ("zero", "is not read: weights are not normalised", lse.mapv(|_| 0.0)),
    ];
    if own.problem.scores().is_some_and(|x| x.sinks)
        && let Some(bare) = forward(own, Some(f64::NEG_INFINITY)).and_then(|mut x| x.remove("lse"))
    {
        others.push(("without-sink", "does not count the sink", bare));
    }
    let axes = [(0, "batch-element", "batch element"), (1, "head", "head"), (2, "row", "row")];
    for (axis, slug, name) in axes.into_iter().filter(|(axis, ..)| lse.shape()[*axis] > 1) {
        let extent = lse.shape()[axis];
        let next: Vec<usize> = (0..extent).map(|at| (at + 1) % extent).collect();
        let id: &'static str = match slug {
            "head" => "of-next-head",
            "row" => "of-next-row",
            _ => "of-next-batch-element",
        };
        let text: &'static str = match name {
            "head" => "is that of the next head",
            "row" => "is that of the next row",
            _ => "is that of the next batch element",
        };
        others.push((id, text, lse.select(Along(axis), &next)));
    }
    let reading = |(change, text, other): (&str, &str, ArrayD<f64>)| {
        let mut factors = lse - &other;
        // A row that sees nothing has no weights.
        factors.mapv_inplace(|x| if x.is_finite() { x.exp() } else { 1.0 });
        let factors = Arc::new(factors);
        let mut reading = Reading::plain(
            format!("saved-lse-{change}"),
            format!("the saved `lse` {text}"),
            own.problem,
        );
        for name in ["dout", "dlse"].into_iter().filter(|name| own.inputs.contains_key(*name)) {
            reading = reading.edit(name, Edit::Rows(factors.clone()));
        }
        reading.of("lse")
    };
    others.into_iter().map(reading).collect()
}

/// δ = dout·o − dlse with another o, or without one: dlse holds what makes it so.
fn of_delta(own: &Original<'_>, o: &ArrayD<f64>, dout: &ArrayD<f64>) -> Vec<Reading> {
    let along = Along(o.ndim() - 1);
    let product = |o: &ArrayD<f64>| (o * dout).sum_axis(along);
    let delta = product(o);
    let heads = o.shape()[1];
    let next: Vec<usize> = (0..heads).map(|at| (at + 1) % heads.max(1)).collect();
    let mut others = vec![
        ("delta-omitted", "δ = dout·o is not subtracted", delta.clone()),
        ("delta-doubled", "δ = dout·o is subtracted twice", -&delta),
        ("delta-negated", "δ = dout·o has the other sign", 2.0 * &delta),
    ];
    if heads > 1 {
        let other = &delta - &product(&o.select(Along(1), &next));
        others.push(("saved-o-of-next-head", "the saved `o` is that of the next head", other));
        let dlse = own.inputs.get("dlse").cloned().unwrap_or_else(|| ArrayD::zeros(delta.shape()));
        let full = &delta - &dlse;
        let other = &full - &full.select(Along(1), &next);
        let text = "δ = dout·o − dlse is that of the next head";
        others.push(("saved-delta-of-next-head", text, other));
    }
    let rows: Vec<usize> = own.problem.scores().map_or(Vec::new(), |scores| {
        let e = &scores.extents;
        vec![e.batch, e.query_heads, own.problem.extent(Axis::Queries)]
    });
    let reading = |(id, text, more): (&str, &str, ArrayD<f64>)| {
        let reading = Reading::plain(id, text, own.problem).of("o");
        let reading = match own.inputs.contains_key("dlse") {
            true => reading,
            false => reading.edit("dlse", Edit::Fill(rows.clone().into(), 0.0)),
        };
        reading.edit("dlse", Edit::Plus(more.into()))
    };
    others.into_iter().map(reading).collect()
}
