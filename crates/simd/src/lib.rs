//! Tiled, multithreaded SIMD kernels for the algorithms that train transformers.
//!
//! Describe a problem, hand in views of its tensors, and call a pass:
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_simd::{Options, attention};
//! use ndarray::Array4;
//!
//! let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 5, keys: 5, dim: 8 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q = Array4::<f32>::from_shape_fn(problem.scores.q_shape(), |(_, h, i, d)| (h + i + d) as f32);
//! let k = Array4::<f32>::from_elem(problem.scores.k_shape(), 0.5);
//! let v = Array4::<f32>::from_elem(problem.v_shape(), 2.0);
//!
//! let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
//! let out = attention::forward(&problem, &inputs, &Options::default())?;
//! assert_eq!(out.o[[0, 1, 4, 7]], 2.0); // every value is 2, and weights sum to 1
//!
//! let dout = Array4::<f32>::ones(problem.o_shape());
//! let cotangents = attention::Cotangents::new(dout.view());
//! let grads = attention::backward(&problem, &inputs, &out, &cotangents, &Options::default())?;
//! assert_eq!(grads.dq[[0, 0, 0, 0]], 0.0); // all values are equal, so scores have no effect
//! # Ok::<(), etalon_problem::Error>(())
//! ```
//!
//! Each algorithm has a module: [`attention`], [`attention_lse`], [`linear_attention`],
//! [`lazy_attention`], [`linear_cross_entropy`]. Tensors are
//! f32, bf16 or f16; every sum is f32. Results have the same bits from run to run, for any number
//! of threads, any other batch elements in the call, and any strides. They may differ between
//! instruction sets.
//!
//! [`run`](run()) computes any pass of any algorithm over tensors by name: for bindings, and for callers
//! that know the element type only when the program runs. A [`Workspace`] keeps memory between calls.
//!
//! A kernel is written once, over the lanes of an instruction set ([`Level`]), with the tiling of GPU
//! kernels: packed panels, tiles of scores in registers, a streaming softmax, and one writer for
//! every tile of a result. [`etalon_problem::docs::simd`] explains the kernels.

mod aligned;
pub mod attention;
pub mod attention_lse;
mod element;
mod exp;
mod known;
mod lanes;
pub mod lazy_attention;
mod level;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod mask;
mod memory;
mod named;
mod options;
mod pack;
mod parallel;
mod plan;
pub mod probe;
mod products;
mod run;
mod softmax;
mod tile;
mod tiles;
mod waves;
mod workspace;

pub use element::{Element, Tensor, TensorMut};
pub use etalon_problem::Mode;
pub use level::Level;
pub use options::{Options, Precision};
pub use plan::{Buffer, Plan, Strategy};
pub use run::{run, run_in};
pub use workspace::Workspace;

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
