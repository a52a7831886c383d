//! The inputs of the softmax algorithms, of any element type, and the shapes that follow from them.

use crate::element::{Tensor, View};
use crate::tiles::check_counts;
use etalon_problem::{Error, Scores};
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

    /// Fails unless the inputs have the shapes that follow from the problem, with values of E =
    /// `value_dim`.
    pub fn check(&self, value_dim: usize) -> Result<(), Error> {
        let (scores, e) = (self.scores, &self.scores.extents);
        check_counts(e.batch, e.query_heads)?;
        Error::expect_shape("q", &scores.q_shape(), self.q.shape())?;
        Error::expect_shape("k", &scores.k_shape(), self.k.shape())?;
        Error::expect_presence("sinks", "sinks", scores.sinks, self.sinks.is_some())?;
        Error::expect_presence("bias", "bias", scores.bias.is_some(), self.bias.is_some())?;
        let v = [e.batch, e.key_heads, e.keys, value_dim];
        self.v.map_or(Ok(()), |found| Error::expect_shape("v", &v, found.shape()))?;
        let (sinks, bias) = (self.sinks.as_ref().map(|x| x.shape()), shape(&self.bias));
        self.check_like_inputs(["q", "k", "v", "sinks", "bias"], [None, None, None, sinks, bias])
    }

    /// Fails unless tensors that belong to q, k, v, sinks and bias – gradients, cotangents of these
    /// or tangents – have their shapes. Any may be absent.
    pub fn check_like_inputs(
        &self,
        names: [&str; 5],
        [q, k, v, sinks, bias]: [Option<&[usize]>; 5],
    ) -> Result<(), Error> {
        let (scores, e) = (self.scores, &self.scores.extents);
        check(names[0], &scores.q_shape(), q)?;
        check(names[1], &scores.k_shape(), k)?;
        check(names[2], &[e.batch, e.key_heads, e.keys, self.value_dim()], v)?;
        if sinks.is_some() {
            Error::expect_presence(names[3], "sinks", scores.sinks, true)?;
            check(names[3], &[e.query_heads], sinks)?;
        }
        match (bias, scores.bias_shape()) {
            (Some(bias), Some(shape)) => Error::expect_shape(names[4], &shape, bias),
            (Some(_), None) => Error::expect_presence(names[4], "bias", false, true),
            (None, _) => Ok(()),
        }
    }

    /// Fails unless tensors that belong to o and lse have their shapes. Either may be absent.
    pub fn check_like_outputs(
        &self,
        names: [&str; 2],
        [o, lse]: [Option<&[usize]>; 2],
    ) -> Result<(), Error> {
        let e = &self.scores.extents;
        check(names[0], &[e.batch, e.query_heads, e.queries, self.value_dim()], o)?;
        check(names[1], &self.scores.row_shape(), lse)
    }
}

/// Fails unless an operand that may be absent has its shape.
fn check(name: &str, expected: &[usize], found: Option<&[usize]>) -> Result<(), Error> {
    found.map_or(Ok(()), |found| Error::expect_shape(name, expected, found))
}

/// The shape of an operand that may be absent.
pub fn shape<'s>(tensor: &'s Option<Tensor<'_, Ix4>>) -> Option<&'s [usize]> {
    tensor.as_ref().map(Tensor::shape)
}
