//! Every algorithm of etalon as its formula: the oracle that judges the fast ones.
//!
//! The formulas are written over any [`scalar::Real`], one row of one head at a time, and read as
//! the pages in `docs/` do: the numbers in the comments are those of the equations there. There is
//! no tiling; heads run side by side, and the result has the same bits for any number of threads.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q = Array4::from_shape_vec(problem.scores.q_shape(), vec![0.0, 0.0])?;
//! let k = Array4::from_shape_vec(problem.scores.k_shape(), vec![1.0, 2.0])?;
//! let v = Array4::from_shape_vec(problem.v_shape(), vec![4.0, 8.0])?;
//! let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), sinks: None, bias: None };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.o, array![[[[4.0], [6.0]]]]); // the second query sees both keys alike
//! assert_eq!(output.lse, array![[[0.0, 2f64.ln()]]]);
//!
//! let dout = Array4::ones(problem.o_shape());
//! let gradients = backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
//! assert_eq!(gradients.dv, array![[[[1.5], [0.5]]]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod attention;
pub mod attention_lse;
mod evaluate;
mod heads;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod named;
pub mod scalar;
mod scores;
mod second_order;
mod tensor;

pub use evaluate::evaluate;
pub use named::Tensors;
