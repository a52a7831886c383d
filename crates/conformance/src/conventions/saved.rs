//! Readings of what the forward pass saves for the backward pass of attention and attention_lse: lse to
//! another base, with another sign, without the sink, of a neighbour; o and its product with dout.
//!
//! With lse′ in place of lse every weight is P′ = e^{S − lse′} = f P with f = e^{lse − lse′}, the same for
//! all keys of a row. Every gradient is a sum over rows of what is linear in dout and dlse (B1) to (B9), so
//! that these are the gradients for f·dout and f·dlse.

use super::{Edit, Own, Reading, plain};
use crate::tensor::Values;
use etalon_problem::{Axis, Pass, Problem};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::{ArrayD, Axis as Along};
use std::f64::consts::{LN_2, LOG2_E};
use std::sync::Arc;

pub(super) fn all(own: &Own<'_>) -> Vec<Reading> {
    let weighs = matches!(own.problem, Problem::Attention(_) | Problem::AttentionLse(_));
    if own.pass != Pass::Backward || !weighs {
        return Vec::new();
    }
    let Some(exact) = forward(own, None) else { return Vec::new() };
    let Some(lse) = exact.get("lse") else { return Vec::new() };
    let mut list = of_lse(own, lse);
    if let (Some(o), Some(dout)) = (exact.get("o"), own.inputs.get("dout")) {
        list.extend(of_delta(own, o, dout));
    }
    list
}

/// The exact results of the forward pass, perhaps without a tensor of scores.
fn forward(own: &Own<'_>, sinks: Option<f64>) -> Option<Values> {
    let operands = own.problem.operands(Pass::Forward);
    let given = operands.iter().filter(|operand| operand.role.is_given());
    let mut inputs: Values =
        given.filter_map(|x| Some((x.name.to_string(), own.inputs.get(x.name)?.clone()))).collect();
    if let (Some(number), Some(x)) = (sinks, inputs.get_mut("sinks")) {
        x.fill(number);
    }
    evaluate_in(Arithmetic::F64, own.problem, Pass::Forward, &inputs).ok()
}

fn of_lse(own: &Own<'_>, lse: &ArrayD<f64>) -> Vec<Reading> {
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
        let mut reading =
            plain(format!("saved-lse-{change}"), format!("the saved `lse` {text}"), own.problem);
        for name in ["dout", "dlse"].into_iter().filter(|name| own.inputs.contains_key(*name)) {
            reading = reading.edit(name, Edit::Rows(factors.clone()));
        }
        reading.of("lse")
    };
    others.into_iter().map(reading).collect()
}

/// δ = dout·o − dlse with another o, or without one: dlse holds what makes it so.
fn of_delta(own: &Own<'_>, o: &ArrayD<f64>, dout: &ArrayD<f64>) -> Vec<Reading> {
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
    }
    let rows: Vec<usize> = own.problem.scores().map_or(Vec::new(), |scores| {
        let e = &scores.extents;
        vec![e.batch, e.query_heads, own.problem.extent(Axis::Queries)]
    });
    let reading = |(id, text, more): (&str, &str, ArrayD<f64>)| {
        let reading = plain(id, text, own.problem).of("o");
        let reading = match own.inputs.contains_key("dlse") {
            true => reading,
            false => reading.edit("dlse", Edit::Fill(rows.clone().into(), 0.0)),
        };
        reading.edit("dlse", Edit::Plus(more.into()))
    };
    others.into_iter().map(reading).collect()
}
