//! Readings of inputs that lie otherwise in memory than their file says: two axes are exchanged, as where
//! strides were lost on the way. And inputs that were rounded to a narrower type before they were read.

use super::derived::hyphens;
use super::{Edit, Layout, Original, Reading};
use etalon_problem::{Dtype, Operand, Precision, Scores};

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let mut list = rounded(own);
    let given = || own.operands.iter().filter(|x| own.inputs.contains_key(x.name));
    for operand in given().filter(|x| x.precision != Precision::Integer) {
        for order in Layout::orders(&operand.shape).into_iter().filter(|order| is_pair(order)) {
            for lay in twice(operand, &order) {
                let text = format!(
                    "`{}` {}: strides were lost on the way between the file and the kernel",
                    operand.name,
                    words(operand, &order, lay)
                );
                let id = format!("{}-as-{}", hyphens(operand.name), memory(operand, &order, lay));
                let reading = Reading::plain(id, text, own.problem).of(operand.name).late();
                list.push(reading.edit(operand.name, edit(&order, lay)));
            }
        }
    }
    list.extend(together(own));
    list
}

/// True if an order of axes exchanges two.
fn is_pair(order: &[usize]) -> bool {
    order.iter().enumerate().filter(|(at, axis)| at != *axis).count() == 2
}

fn edit(order: &[usize], lay: bool) -> Edit {
    if lay { Edit::Layout(order.into()) } else { Edit::LayoutBack(order.into()) }
}

/// An exchange and its inverse, which are one where the extents are equal and the axes are neighbours.
fn twice(operand: &Operand, order: &[usize]) -> Vec<bool> {
    let moved = |axis: &usize| order[*axis] != *axis;
    let mut extents = (0..order.len()).filter(moved).map(|axis| operand.shape[axis]);
    let first = extents.next();
    if extents.all(|extent| Some(extent) == first) { vec![false] } else { vec![false, true] }
}

fn symbols(operand: &Operand, order: &[usize]) -> Vec<&'static str> {
    order.iter().map(|&axis| operand.axes[axis].symbol()).collect()
}

fn words(operand: &Operand, order: &[usize], lay: bool) -> String {
    let order = symbols(operand, order).join(", ");
    match lay {
        false => format!("was read as if it lay in memory as [{order}]"),
        true => format!("lay in memory as [{order}] and was read as if it did not"),
    }
}

fn memory(operand: &Operand, order: &[usize], lay: bool) -> String {
    let order = symbols(operand, order).concat().to_lowercase().replace('|', "");
    format!("{order}{}", if lay { "-in-memory" } else { "" })
}

/// All large tensors in the same other layout.
fn together(own: &Original<'_>) -> Vec<Reading> {
    let large: Vec<&Operand> = own
        .operands
        .iter()
        .filter(|x| own.inputs.contains_key(x.name) && x.shape.len() == 4 && x.option.is_none())
        .collect();
    let Some(first) = large.first().filter(|_| large.len() > 1) else { return Vec::new() };
    let mut list = Vec::new();
    for order in Layout::orders(&first.shape) {
        for lay in [false, true] {
            let text = format!("every input {}", words(first, &order, lay));
            let id = format!("inputs-as-{}", memory(first, &order, lay));
            let edited = |reading: Reading, x: &&Operand| reading.edit(x.name, edit(&order, lay));
            let reading = Reading::plain(id, text, own.problem).of("q");
            list.push(large.iter().fold(reading, edited).late());
        }
    }
    list
}

/// Inputs in a narrower type than the one in which they are stored, and queries that were scaled and rounded
/// again.
fn rounded(own: &Original<'_>) -> Vec<Reading> {
    let mut list = Vec::new();
    let storage: Vec<&Operand> = own
        .operands
        .iter()
        .filter(|x| own.inputs.contains_key(x.name) && x.precision == Precision::Storage)
        .collect();
    type Round = fn(f64) -> f64;
    let types: &[(&str, Round)] = match own.dtype {
        Dtype::F64 => &[("f32", |x| Dtype::F32.round(x)), ("bf16", |x| Dtype::Bf16.round(x))],
        Dtype::F32 => {
            &[("tf32", tf32), ("bf16", |x| Dtype::Bf16.round(x)), ("f16", |x| Dtype::F16.round(x))]
        }
        Dtype::F16 => &[("bf16", |x| Dtype::Bf16.round(x))],
        Dtype::Bf16 => &[("f16", |x| Dtype::F16.round(x))],
    };
    for (name, round) in types {
        let text = format!("every input was rounded to {name} before it was multiplied");
        let edit =
            |reading: Reading, operand: &&Operand| reading.edit(operand.name, Edit::map(*round));
        let reading = Reading::plain(format!("inputs-in-{name}"), text, own.problem).of("dtype");
        list.push(storage.iter().fold(reading, edit));
    }
    if let Some(scale) = own.problem.scores().map(Scores::scale).filter(|x| *x != 0.0) {
        let dtype = own.dtype;
        for (change, text, by) in [
            ("scaled", "queries were scaled and rounded again before they were multiplied", scale),
            (
                "scaled-in-base-2",
                "queries were multiplied by the scale and log₂e and rounded again",
                scale * std::f64::consts::LOG2_E,
            ),
        ] {
            let edit = Edit::map(move |x| dtype.round(x * by) / by);
            list.push(
                Reading::plain(format!("q-{change}"), text, own.problem).edit("q", edit).of("q"),
            );
        }
    }
    list
}

/// The nearest number of 11 significant bits, ties to even, with the exponents of f32.
fn tf32(x: f64) -> f64 {
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let bits = (x as f32).to_bits();
    let half = 0x0fff + ((bits >> 13) & 1);
    f64::from(f32::from_bits(bits.wrapping_add(half) & !0x1fff))
}
