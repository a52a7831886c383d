//! Traces of a problem, and their ends.

use super::tensors::Tensors;
use etalon_problem::{Order, Pass, Problem, Walk};
use etalon_reference::trace::{Traced, trace};
use ndarray::ArrayD;

/// Every tensor of a trace.
pub fn all(problem: &Problem, pass: Pass, x: &Tensors<f64>, walk: &Walk) -> Vec<Traced<f64>> {
    let tensors = walk.tensors(problem, pass).expect("a walk");
    let names: Vec<&str> = tensors.iter().map(|operand| operand.name).collect();
    trace(problem, pass, x, walk, &names).expect("a trace")
}

/// The elements that are compared after the last tile of a walk, each with that of `result`.
pub fn last(traced: &Traced<f64>, order: Order, result: &ArrayD<f64>) -> Vec<(f64, f64)> {
    let tiles = traced.operand.shape[0];
    let walk: Vec<usize> = match order {
        Order::Ascending => (0..tiles).rev().collect(),
        Order::Descending => (0..tiles).collect(),
    };
    let stride = result.len();
    let values = traced.values.as_slice().expect("row-major order");
    let of = |(n, &exact): (usize, &f64)| {
        // The last tile that the element has a part in: those after it have nothing to show.
        let tile = walk.iter().find(|tile| traced.compared[*tile * stride + n])?;
        Some((values[tile * stride + n], exact))
    };
    result.iter().enumerate().filter_map(of).collect()
}
