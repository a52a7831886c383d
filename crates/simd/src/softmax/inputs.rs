//! The inputs of the softmax algorithms, of any element type.

use crate::element::{Tensor, View};
use etalon_problem::Scores;
use ndarray::{Ix1, Ix4};

/// The inputs of attention, or of attention_lse, which has no v.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The scores and which of them count.
    pub scores: &'a Scores,
    /// `[B, Hq, N, D]`.
    pub q: Tensor<'a, Ix4>,
    /// `[B, Hk, M, D]`.
    pub k: Tensor<'a, Ix4>,
    /// `[B, Hk, M, E]`.
    pub v: Option<Tensor<'a, Ix4>>,
    /// `[Hq]`, where the problem has sinks.
    pub sinks: Option<View<'a, f32, Ix1>>,
    /// `[B or 1, Hq or 1, N, M]`, where the problem has a bias.
    pub bias: Option<Tensor<'a, Ix4>>,
}

impl Inputs<'_> {
    /// E, or 0 without values.
    pub fn value_dim(&self) -> usize {
        self.v.map_or(0, |v| v.shape()[3])
    }
}
