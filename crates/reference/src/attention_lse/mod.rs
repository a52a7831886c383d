//! The log-sum-exp of attention scores: [`forward`], [`backward`], [`double_backward`] and [`jvp`],
//! over any scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//!
//! ```
//! use etalon_problem::{AttentionLse, Extents};
//! use etalon_reference::attention_lse::{Cotangents, Inputs, backward, forward};
//! use ndarray::array;
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 2, dim: 1 };
//! let problem = AttentionLse::new(extents);
//! let q = array![[[[0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [3.0]]]];
//! let inputs = Inputs { q: q.view(), k: k.view(), sinks: None, bias: None };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.lse, array![[[2f64.ln()]]]); // two scores of 0
//!
//! let dlse = array![[[1.0]]];
//! let gradients = backward(&problem, &inputs, &Cotangents { dlse: dlse.view() })?;
//! assert_eq!(gradients.dq, array![[[[2.0]]]]); // the mean of the keys
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/attention_lse.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/katex.html"))]

mod passes;

pub use etalon_problem::attention_lse::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents,
};
pub use passes::{backward, double_backward, forward, jvp};
