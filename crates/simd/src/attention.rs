//! Attention on CPUs: [`forward`], [`backward`], [`double_backward`] and [`jvp`], for f32, bf16 and
//! f16.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, and [`plan`] reports what a pass allocates beside them.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_simd::{Options, attention};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q: Array4<f32> = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
//! let options = Options::default();
//!
//! let out = attention::forward(&problem, &inputs, &options)?;
//! assert_eq!(out.o, array![[[[4.0], [6.0]]]]); // the second query weighs both keys by 1/2
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = attention::Cotangents::new(dout.view());
//! let gradients = attention::backward(&problem, &inputs, &out, &cotangents, &options)?;
//! assert_eq!(gradients.dv, array![[[[1.5], [0.5]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../docs/assets/links.md")]
#![doc = include_str!("../../../docs/attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod passes;
mod tensors;

pub use passes::{
    backward, backward_into, double_backward, double_backward_into, forward, forward_into, jvp,
    jvp_into, plan,
};
pub use tensors::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    OutputTangentsMut, SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};
