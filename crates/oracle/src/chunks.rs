//! Sums of dw over chunks of tokens, each rounded to the type in which a profile stores them.

use crate::generate::Stream;
use crate::profile::Profile;
use etalon_problem::{Axis, Operand};
use ndarray::ArrayD;

/// The standard deviation of the roundings of dw over chunks of tokens, in shares of what a sum so far is
/// typically: of C sums the last one is as large as the result, and the others grow up to it.
pub(crate) fn chunks(profile: &Profile, operands: &[Operand]) -> f64 {
    let u = profile.chunk_store.unit_roundoff();
    let extent = |axis| operands.iter().find_map(|x| x.position(axis).map(|at| x.shape[at]));
    let extents = [Axis::Targets, Axis::Dim, Axis::Classes].map(extent);
    let [Some(tokens), Some(dim), Some(vocab)] = extents else { return 0.0 };
    if u <= profile.accumulator.unit_roundoff() {
        return 0.0;
    }
    // Each sum is rounded, and what a chunk adds to it.
    let chunks = tokens.div_ceil(profile.chunk(tokens, dim, vocab)) as f64;
    u / 3f64.sqrt() * (chunks / 2.0 + 1.5).sqrt()
}

/// Rounds the sums of chunks of tokens, of the size of a result or of its row.
pub(crate) fn over_chunks(
    value: &ArrayD<f64>,
    results: &mut ArrayD<f64>,
    size: f64,
    stream: Stream,
) {
    let width = if value.ndim() > 1 { value.shape()[value.ndim() - 1] } else { 1 };
    let (Some(values), Some(results)) = (value.as_slice(), results.as_slice_mut()) else {
        return;
    };
    let rows = values.chunks(width.max(1)).zip(results.chunks_mut(width.max(1)));
    for (row, (values, results)) in rows.enumerate() {
        let squares = values.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>();
        let whole = (squares / values.len().max(1) as f64).sqrt();
        for (at, (result, value)) in results.iter_mut().zip(values).enumerate() {
            *result += size * value.abs().max(whole) * stream.normal(row * width + at);
        }
    }
}
