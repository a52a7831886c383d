//! The results that a kernel must return, and how far off they may be.
//!
//! [`bounds`](bounds::bounds) evaluates the exact results of a pass with a proven bound for every
//! element, from the inputs and from the arithmetic that a [`profile`] declares; [`gates`] judges what a
//! kernel returned against them. [`tensor`] holds what goes in and out. Nothing here knows a kernel, so
//! that a project of its own may depend on this crate alone.
//!
//! ```
//! use etalon_oracle::profile::Profile;
//! use etalon_oracle::tensor::{Tensor, Tensors};
//! use etalon_oracle::{bounds::bounds, gates};
//! use etalon_problem::{AttentionLse, Dtype, Extents, Pass, Problem};
//! use ndarray::ArrayD;
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 8 };
//! let problem: Problem = AttentionLse::new(extents).into();
//! let ones = |shape: &[usize]| Tensor::round(&ArrayD::from_elem(shape, 1.0), Dtype::F32);
//! let inputs = Tensors::from([
//!     ("q".to_string(), ones(&[1, 1, 2, 8])),
//!     ("k".to_string(), ones(&[1, 1, 4, 8])),
//! ]);
//!
//! let profile = Profile::strict(Dtype::F32);
//! let exact = bounds(&problem, Pass::Forward, Dtype::F32, &profile, &inputs)?;
//! // Every score is 8/√8, and there are four: lse = √8 + ln 4. This kernel forgot the logarithm.
//! let got = Tensor::round(&ArrayD::from_elem(vec![1, 1, 2], 8f64.sqrt()), Dtype::F32);
//! let judged = gates::g1(&exact, &Tensors::from([("lse".to_string(), got)]));
//! assert!(judged.margin > 1.0);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod bounds;
mod chunks;
pub mod gates;
pub mod generate;
pub mod profile;
pub mod stochastic;

pub mod tensor;
pub mod types;
pub mod typical;
