//! The log-sum-exp of attention scores on CPUs: [`forward`], [`backward`], [`double_backward`] and
//! [`jvp`], for f32, bf16 and f16.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, and [`plan`] reports what a pass allocates beside them.
//!
//! ```
//! use etalon_problem::{AttentionLse, Extents};
//! use etalon_simd::{Options, attention_lse};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 2, dim: 1 };
//! let problem = AttentionLse::new(extents);
//! let q: Array4<f32> = array![[[[0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [3.0]]]];
//! let inputs = attention_lse::Inputs::new(q.view(), k.view());
//! let options = Options::default();
//!
//! let out = attention_lse::forward(&problem, &inputs, &options)?;
//! assert!((out.lse[[0, 0, 0]] - 2f32.ln()).abs() < 1e-6); // two scores of 0
//!
//! let dlse = array![[[1.0]]];
//! let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
//! let gradients = attention_lse::backward(&problem, &inputs, &out, &cotangents, &options)?;
//! assert!((gradients.dq[[0, 0, 0, 0]] - 2.0).abs() < 1e-5); // the mean of the keys
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../docs/assets/links.md")]
#![doc = include_str!("../../../docs/attention_lse.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod passes;
mod tensors;

pub use passes::{
    backward, backward_into, double_backward, double_backward_into, forward, forward_into, jvp,
    jvp_into, plan,
};
pub use tensors::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};
