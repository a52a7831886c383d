//! Deterministic operands for the tests of this crate.

use etalon_problem::{Attention, Extents, Mask};
use ndarray::{Array1, Array3, Array4};

/// A wave, different for every tensor, so that no two elements are alike.
pub fn wave(shape: [usize; 4], speed: f32) -> Array4<f32> {
    let mut t = 0.0f32;
    Array4::from_shape_simple_fn(shape, || {
        t += speed;
        t.sin()
    })
}

/// Every operand of a problem.
pub struct Operands {
    pub problem: Attention,
    pub q: Array4<f32>,
    pub k: Array4<f32>,
    pub v: Array4<f32>,
    pub dout: Array4<f32>,
    pub dlse: Array3<f32>,
    pub sinks: Array1<f32>,
    pub bias: Array4<f32>,
}

impl Operands {
    pub fn new(problem: Attention) -> Self {
        let bias = problem.scores.bias_shape().unwrap_or([1, 1, 0, 0]);
        let rows = problem.scores.row_shape();
        Operands {
            q: wave(problem.scores.q_shape(), 0.7),
            k: wave(problem.scores.k_shape(), 1.1),
            v: wave(problem.v_shape(), 1.3),
            dout: wave(problem.o_shape(), 1.7),
            dlse: wave([1, rows[0], rows[1], rows[2]], 1.9).index_axis_move(ndarray::Axis(0), 0),
            sinks: Array1::linspace(-1.0, 1.0, problem.scores.extents.query_heads),
            bias: wave(bias, 2.3),
            problem,
        }
    }
}

/// Every option at once, lengths that are multiples of nothing, 2 query heads to a key head.
pub fn everything() -> Attention {
    let extents =
        Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 101, keys: 113, dim: 40 };
    Attention::new(extents).value_dim(24).mask(Mask::causal()).softcap(3.0).sinks().bias(1, 4)
}
