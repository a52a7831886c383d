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
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/lazy_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/katex.html"))]

mod activity;
mod backward;
mod double_backward;
mod forward;
mod row;
mod stats;

pub use activity::{Pair, active_pairs, activity, ambiguous};
pub use backward::{backward, backward_under};
pub use double_backward::double_backward;
pub use etalon_problem::lazy_attention::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, SpeedUp, Stats,
};
pub use forward::forward;
pub use stats::stats;
