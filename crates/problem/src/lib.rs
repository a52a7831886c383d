//! The vocabulary of etalon: *what* a kernel computes, never *how*.
//!
//! A problem is plain data: extents, options, a mask. It holds arrays only where a mask needs
//! them, does no arithmetic on tensors, and can be written to and read from JSON (feature
//! `serde`). Every tier takes the same problems, so that one conformance suite can judge them all.
//!
//! * [`Attention`], [`AttentionLse`] and [`LazyAttention`]: problems around the same [`Scores`];
//! * [`LinearAttention`], [`LinearCrossEntropy`]: problems without scores; [`slopes`]: named decays;
//! * [`Mask`], [`Sequences`]: which query sees which key; [`TokenSequences`]: which tokens share a state;
//! * [`Operand`], [`Table`]: the tensors of a pass with their axes, types and parts; [`Views`],
//!   [`ViewsMut`]: such tensors, borrowed, by name;
//! * [`Dtype`], [`Blocking`], [`Error`];
//! * [`docs`]: the notation and the equations, numbered as the comments of every kernel number them.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! let extents = Extents { batch: 1, query_heads: 8, key_heads: 2, queries: 128, keys: 128, dim: 64 };
//! let problem = Attention::new(extents).mask(Mask::causal()).softcap(30.0);
//! problem.check()?;
//! assert_eq!(problem.scores.scale(), 0.125); // 1/√64, unless softmax_scale is set
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![forbid(unsafe_code)]

// `docs/assets/links.md` names the pages by the name of this crate, in every crate.
extern crate self as etalon_problem;

pub mod attention;
pub mod attention_lse;
mod blocking;
pub mod docs;
mod dtype;
mod error;
#[cfg(feature = "serde")]
mod file;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod mask;
mod named;
mod operand;
mod options;
mod problem;
mod scores;
mod sequences;
pub mod slopes;
mod structs;
pub mod tensors;
mod tokens;
mod view;

pub use attention::Attention;
pub use attention_lse::AttentionLse;
pub use blocking::{Blocking, Mode};
pub use dtype::Dtype;
pub use error::Error;
pub use lazy_attention::{DistanceBias, LazyAttention, dtheta, tau_from_theta};
pub use linear_attention::{Decay, LinearAttention, LinearExtents};
pub use linear_cross_entropy::{
    LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction, TokenOutputs,
};
pub use mask::{Align, Cover, Mask, NamedArray};
pub use operand::{Axis, Family, Operand, Precision, Role, Table, check_operands, find};
pub use problem::{Algorithm, Pass, Problem};
pub use scores::{BiasExtents, Extents, Scores};
pub use sequences::{Sequence, Sequences};
pub use tensors::Scalar;
pub use tokens::{TokenSequence, TokenSequences};
pub use view::{Stored, View, ViewMut, Views, ViewsMut};
