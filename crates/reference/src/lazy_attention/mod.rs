//! Lazy attention (Elastic-Softmax): [`forward`], [`backward`] and [`double_backward`], over any
//! scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//! [`stats`] measures sparsity, [`active_pairs`] and [`ambiguous`] report which pairs are active.
//!
//! ```
//! use etalon_problem::{Extents, LazyAttention};
//! use etalon_reference::lazy_attention::{Cotangents, Inputs, backward, forward};
//! use ndarray::array;
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = LazyAttention::new(extents); // causal
//! let q = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let tau = array![-0.5];
//! let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), bias: None, tau: tau.view() };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.o, array![[[[2.0], [3.0]]]]); // weights 1 − 0.5, and 0.5 − 0.25 twice
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let gradients = backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
//! assert_eq!(gradients.dv, array![[[[0.75], [0.25]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../../docs/assets/links.md")]
#![doc = include_str!("../../../../docs/lazy_attention.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]

mod activity;
mod backward;
mod double_backward;
mod evaluate;
mod forward;
mod row;
mod stats;

pub use activity::{Pair, active_pairs, activity, ambiguous};
pub use backward::{backward, backward_under};
pub use double_backward::double_backward;
pub use evaluate::evaluate;
pub use forward::forward;
pub use stats::{SpeedUp, Stats, stats};

use ndarray::{Array1, Array2, Array3, Array4, ArrayView1, ArrayView2, ArrayView3, ArrayView4};

/// What lazy attention is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Queries `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// Keys `[B, Hk, M, D]`.
    pub k: ArrayView4<'a, T>,
    /// Values `[B, Hk, M, E]`.
    pub v: ArrayView4<'a, T>,
    /// A bias for each distance below W, `[Hq, W]`, where the problem has one.
    pub bias: Option<ArrayView2<'a, T>>,
    /// What a row raises its weights by, over all its keys together, `[Hq]`; below 0 it filters.
    pub tau: ArrayView1<'a, T>,
}

/// What lazy attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// o of (E6), `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// lse of (E3), over every visible key, active or not: `[B, Hq, N]`.
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
    /// (E10), `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// (E11), `[B, Hk, M, D]`.
    pub dk: Array4<T>,
    /// (E12), `[B, Hk, M, E]`.
    pub dv: Array4<T>,
    /// (E13), `[Hq, W]`, where the problem has a bias.
    pub dbias: Option<Array2<T>>,
    /// (E14), `[Hq]`.
    pub dtau: Array1<T>,
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
    /// By dbias: `[Hq, W]`.
    pub ddbias: Option<ArrayView2<'a, T>>,
    /// By dtau: `[Hq]`.
    pub ddtau: Option<ArrayView1<'a, T>>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By lse: `[B, Hq, N]`.
    pub cot_lse: Option<ArrayView3<'a, T>>,
}

/// Gradients of the second loss by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (E26): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (E27): `[B, Hk, M, D]`.
    pub gk: Array4<T>,
    /// By v, (E28): `[B, Hk, M, E]`.
    pub gv: Array4<T>,
    /// By the bias, (E29): `[Hq, W]`, where the problem has one.
    pub gbias: Option<Array2<T>>,
    /// By tau, (E30): `[Hq]`.
    pub gtau: Array1<T>,
    /// By dout, (E23): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
    /// By dlse, (E21): `[B, Hq, N]`.
    pub gdlse: Array3<T>,
}
