//! Numbers of tests.

use half::bf16;
use ndarray::{ArrayD, IxDyn};

/// Small numbers that no rule repeats.
pub fn numbers(shape: &[usize], seed: usize) -> ArrayD<bf16> {
    let mut at = seed;
    ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bf16::from_f32(((at >> 40) % 257) as f32 / 128.0 - 1.0)
    })
}
