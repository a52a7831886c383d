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
mod forward;
mod jvp;

pub use backward::backward;
pub use double_backward::double_backward;
pub use etalon_problem::attention::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents,
};
pub use forward::forward;
pub use jvp::jvp;

pub(crate) use backward::backward_any_width;
pub(crate) use double_backward::double_backward_any_width;
pub(crate) use forward::forward_any_width;
pub(crate) use jvp::jvp_any_width;
