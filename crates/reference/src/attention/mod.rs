//! Attention: [`forward`], [`backward`], [`double_backward`] and [`jvp`], over any scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), sinks: None, bias: None };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.o, array![[[[4.0], [6.0]]]]); // the second query weighs both keys by 1/2
//!
//! let dout = Array4::ones(output.o.raw_dim());
//! let gradients = backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
//! assert_eq!(gradients.dv, array![[[[1.5], [0.5]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../../docs/assets/links.md")]
#![doc = include_str!("../../../../docs/attention.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]

mod backward;
mod double_backward;
mod evaluate;
mod forward;
mod jvp;

pub use backward::backward;
pub use double_backward::double_backward;
pub use evaluate::evaluate;
pub use forward::forward;
pub use jvp::jvp;

pub(crate) use backward::backward_any_width;
pub(crate) use double_backward::double_backward_any_width;
pub(crate) use forward::forward_any_width;
pub(crate) use jvp::jvp_any_width;

use ndarray::{Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4};

/// What attention is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Queries `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// Keys `[B, Hk, M, D]`.
    pub k: ArrayView4<'a, T>,
    /// Values `[B, Hk, M, E]`.
    pub v: ArrayView4<'a, T>,
    /// One more logit per head `[Hq]`, where the problem has sinks.
    pub sinks: Option<ArrayView1<'a, T>>,
    /// An additive bias `[B or 1, Hq or 1, N, M]`, where the problem has one.
    pub bias: Option<ArrayView4<'a, T>>,
}

/// What attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// o of (F5), `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// lse of (F3), `[B, Hq, N]`.
    pub lse: Array3<T>,
}

/// Gradients of a loss by the outputs.
#[derive(Debug, Clone, Copy)]
pub struct Cotangents<'a, T> {
    /// By o: `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// By lse: `[B, Hq, N]`; absent: zero.
    pub dlse: Option<ArrayView3<'a, T>>,
}

/// Gradients of a loss by the inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// (B5), `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// (B6), `[B, Hk, M, D]`.
    pub dk: Array4<T>,
    /// (B7), `[B, Hk, M, E]`.
    pub dv: Array4<T>,
    /// (B8), `[Hq]`, where the problem has sinks.
    pub dsinks: Option<Array1<T>>,
    /// (B9), in the shape of the bias, where the problem has one.
    pub dbias: Option<Array4<T>>,
}

/// Gradients of a second loss by the gradients of the first, and by the outputs. What is absent
/// is zero.
#[derive(Debug, Clone, Copy)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, M, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dv: `[B, Hk, M, E]`.
    pub ddv: Option<ArrayView4<'a, T>>,
    /// By dsinks: `[Hq]`.
    pub ddsinks: Option<ArrayView1<'a, T>>,
    /// By dbias: in the shape of the bias.
    pub ddbias: Option<ArrayView4<'a, T>>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By lse: `[B, Hq, N]`.
    pub cot_lse: Option<ArrayView3<'a, T>>,
}

/// Gradients of the second loss by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (D10): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (D11): `[B, Hk, M, D]`.
    pub gk: Array4<T>,
    /// By v, (D12): `[B, Hk, M, E]`.
    pub gv: Array4<T>,
    /// By dout, (D5): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
    /// By dlse, (D13): `[B, Hq, N]`.
    pub gdlse: Array3<T>,
    /// By the sinks, (D14): `[Hq]`, where the problem has them.
    pub gsinks: Option<Array1<T>>,
    /// By the bias, (D15): in its shape, where the problem has one.
    pub gbias: Option<Array4<T>>,
}

/// A direction in which the inputs move. What is absent stands still.
#[derive(Debug, Clone, Copy)]
pub struct Tangents<'a, T> {
    /// Of q: `[B, Hq, N, D]`.
    pub tq: Option<ArrayView4<'a, T>>,
    /// Of k: `[B, Hk, M, D]`.
    pub tk: Option<ArrayView4<'a, T>>,
    /// Of v: `[B, Hk, M, E]`.
    pub tv: Option<ArrayView4<'a, T>>,
    /// Of the sinks: `[Hq]`.
    pub tsinks: Option<ArrayView1<'a, T>>,
    /// Of the bias: in its shape.
    pub tbias: Option<ArrayView4<'a, T>>,
}

/// How the outputs move.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputTangents<T> {
    /// Of o, (J1): `[B, Hq, N, E]`.
    pub to: Array4<T>,
    /// Of lse, (J2): `[B, Hq, N]`.
    pub tlse: Array3<T>,
}
