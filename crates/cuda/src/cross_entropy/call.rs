//! What a kernel of linear_cross_entropy is told.

use cudarc::driver::DeviceRepr;
use etalon_problem::LinearCrossEntropy;

/// `Cotangents` of `cross_entropy.cuh`, and `Outputs`, which has the same fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PerToken {
    pub loss: u64,
    pub lse: u64,
    pub logprob: u64,
    pub entropy: u64,
}

impl PerToken {
    /// The addresses of four operands.
    pub fn new(names: [&str; 4], address: impl Fn(&str) -> u64) -> PerToken {
        let [loss, lse, logprob, entropy] = names.map(address);
        PerToken { loss, lse, logprob, entropy }
    }
}

/// `Call` of `cross_entropy.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Call {
    pub h: u64,
    pub w: u64,
    pub bias: u64,
    pub ddh: u64,
    pub ddw: u64,
    pub ddbias: u64,
    pub class_weights: u64,
    pub first: PerToken,
    pub second: PerToken,
    pub outputs: PerToken,
    pub motions: PerToken,
    pub argmax: u64,
    pub n_valid: u64,
    pub normaliser: u64,
    pub dh: u64,
    pub dw: u64,
    pub dbias: u64,
    pub targets: u64,
    pub token_weights: u64,
    pub tokens: u64,
    pub common: u64,
    pub z: u64,
    pub motion: u64,
    pub picked: u64,
    pub nodes: u64,
    pub pulls: u64,
    pub terms: u64,
    pub hidden: u64,
    pub left_out: u64,
    pub head: u64,
    pub head_bias: u64,
    pub ignore_index: i64,
    pub divisor: f64,
    pub square: f64,
    pub smoothing: f64,
    pub factor: f32,
    pub ratio: f32,
    pub slope: f32,
    pub dim: i32,
    pub vocab: i32,
    pub all: i32,
    pub rows: i32,
    pub columns: i32,
    pub first_token: i32,
    pub count: i32,
    pub first_class: i32,
    pub classes: i32,
    pub mean: i32,
    pub nan_of_nothing: i32,
    pub each: i32,
    pub square_weighted: i32,
    pub entropy: i32,
    pub whole: i32,
    pub wide: i32,
    pub leaf: i32,
    pub begins: i32,
    pub ends: i32,
}

// SAFETY: the fields, their types and their order are those of `Call` in `cross_entropy.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Call {}

impl Call {
    /// With the link of a problem, (C2) and (C11).
    pub fn linked(self, problem: &LinearCrossEntropy) -> Call {
        let LinearCrossEntropy { logit_scale, temperature, softcap, .. } = *problem;
        let factor = softcap.map_or(logit_scale / temperature, |cap| logit_scale / cap);
        Call {
            factor: factor as f32,
            ratio: softcap.map_or(0.0, |cap| (cap / temperature) as f32),
            slope: (logit_scale / temperature) as f32,
            ..self
        }
    }
}
