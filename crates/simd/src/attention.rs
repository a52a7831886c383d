#![doc = include_str!("../../../docs/attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod backward;
pub(crate) mod forward;
pub(crate) mod gradient;
mod sweeps;

pub(crate) use backward::{Backward, check_gradients};
pub use backward::{backward, backward_into};
pub use forward::{forward, forward_into};

use etalon_problem::{Attention, Error};
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut3,
    ArrayViewMut4,
};

/// The inputs of attention, of any strides.
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    /// `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// `[B, Hk, M, D]`.
    pub k: ArrayView4<'a, T>,
    /// `[B, Hk, M, E]`.
    pub v: ArrayView4<'a, T>,
    /// `[Hq]`, where the problem has sinks.
    pub sinks: Option<ArrayView1<'a, f32>>,
    /// `[B or 1, Hq or 1, N, M]`, where the problem has a bias.
    pub bias: Option<ArrayView4<'a, T>>,
}

impl<'a, T> Inputs<'a, T> {
    /// Inputs without sinks and bias.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, sinks: None, bias: None }
    }

    /// Adds the logit per head that has no value.
    pub fn sinks(mut self, sinks: ArrayView1<'a, f32>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Adds the bias of the scores.
    pub fn bias(mut self, bias: ArrayView4<'a, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    fn check(&self, problem: &Attention) -> Result<(), Error> {
        problem.check()?;
        crate::attention_lse::check_scores(
            &problem.scores,
            &self.q,
            &self.k,
            self.sinks.as_ref(),
            self.bias.as_ref(),
        )?;
        Error::expect_shape("v", &problem.v_shape(), self.v.shape())
    }
}

/// The outputs of attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// `[B, Hq, N]`, natural logarithm, with the sink.
    pub lse: Array3<f32>,
}

/// Where the outputs of attention are written; of any strides.
#[derive(Debug)]
pub struct OutputMut<'a, T> {
    /// `[B, Hq, N, E]`.
    pub o: ArrayViewMut4<'a, T>,
    /// `[B, Hq, N]`.
    pub lse: ArrayViewMut3<'a, f32>,
}

/// The cotangents of attention's outputs, of any strides.
#[derive(Debug, Clone)]
pub struct Cotangents<'a, T> {
    /// `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// `[B, Hq, N]`; absent: zero.
    pub dlse: Option<ArrayView3<'a, f32>>,
}

impl<'a, T> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dlse: None }
    }

    /// Adds the cotangent of lse.
    pub fn dlse(mut self, dlse: ArrayView3<'a, f32>) -> Self {
        self.dlse = Some(dlse);
        self
    }
}

/// The gradients of attention's inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// `[B, Hk, M, D]`.
    pub dk: Array4<T>,
    /// `[B, Hk, M, E]`.
    pub dv: Array4<T>,
    /// `[Hq]`, where the problem has sinks.
    pub dsinks: Option<Array1<f32>>,
    /// The shape of the bias, where the problem has one.
    pub dbias: Option<Array4<T>>,
}

/// Where gradients are written; of any strides. A gradient that is not asked for is not paid for.
#[derive(Debug, Default)]
pub struct GradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub dq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, M, D]`.
    pub dk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, M, E]`.
    pub dv: Option<ArrayViewMut4<'a, T>>,
    /// `[Hq]`.
    pub dsinks: Option<ArrayViewMut1<'a, f32>>,
    /// The shape of the bias.
    pub dbias: Option<ArrayViewMut4<'a, T>>,
}
