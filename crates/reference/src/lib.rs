//! Exact implementations of every algorithm, written as their formulas: the oracle that judges
//! the fast kernels.
//!
//! Each module is one algorithm and has a function for each pass. Hand in a problem and views of
//! its tensors:
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_reference::attention::{Inputs, forward};
//! use ndarray::array;
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
//! assert_eq!(output.lse, array![[[0.0, 2f64.ln()]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
//!
//! The code works over any [`scalar::Real`]: f64 is the oracle, dual numbers check its derivatives,
//! and double-double numbers its rounding. It computes one row of one head at a time, without
//! tiles. Heads run in parallel, and the result has the same bits for any number of threads.
//! Comments carry the equation numbers of the pages in [`etalon_problem::docs`].
#![forbid(unsafe_code)]

pub mod attention;
pub mod attention_lse;
mod evaluate;
mod heads;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod named;
mod parallel;
mod run;
pub mod scalar;
mod scores;
mod second_order;
mod tensor;

pub use evaluate::{Arithmetic, evaluate, evaluate_in};
pub use named::{Named, NamedViews, Shapes, Tensors};
pub use run::run;
