//! Shared parts of the benches of all algorithms: operands, levels, and throughput in flops.
//!
//! `cargo bench -p etalon-benches` runs them. A time says little on a machine that is not idle;
//! `etalon bench` sets each against the peak measured in the same run.

use criterion::{BenchmarkGroup, Throughput, measurement::WallTime};
use etalon_problem::{Extents, Scores};
use etalon_simd::Element;
use ndarray::{Array, Dimension, ShapeBuilder};

/// The extents of one batch element with as many key heads as query heads.
pub fn square(heads: usize, length: usize, dim: usize) -> Extents {
    Extents { batch: 1, query_heads: heads, key_heads: heads, queries: length, keys: length, dim }
}

/// A wave, different for every tensor: no two rows are alike, and no softmax is degenerate.
pub fn wave<T: Element, D: Dimension>(
    shape: impl ShapeBuilder<Dim = D>,
    speed: f32,
) -> Array<T, D> {
    let mut t = 0.0f32;
    Array::from_shape_simple_fn(shape, || {
        t += speed;
        T::from_f32(t.sin())
    })
}

/// Declares the flops of a pass: `products` of the visible pairs with `dim` elements each, two
/// operations a product.
pub fn flops(group: &mut BenchmarkGroup<'_, WallTime>, scores: &Scores, products: usize) {
    let pairs = scores.visible_pairs().expect("a problem small enough to be timed");
    let flops = 2 * products as u64 * pairs * scores.extents.dim as u64;
    group.throughput(Throughput::Elements(flops));
}
