//! Linear cross-entropy: [`forward`], [`backward`] and [`double_backward`], over any scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//! [`shard`] computes parts of the vocabulary, [`filter`] omits small gradients with a proven bound.
//!
//! ```
//! use etalon_problem::LinearCrossEntropy;
//! use etalon_reference::linear_cross_entropy::{Cotangents, Inputs, Wanted, backward, forward};
//! use ndarray::{array, arr0};
//!
//! let problem = LinearCrossEntropy::new(1, 1, 2); // tokens, elements, classes
//! let h = array![[2.0]];
//! let w = array![[0.0], [0.0]];
//! let targets = array![1];
//! let inputs = Inputs {
//!     h: h.view(),
//!     w: w.view(),
//!     bias: None,
//!     targets: targets.view(),
//!     class_weights: None,
//!     token_weights: None,
//! };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.loss, arr0(2f64.ln()).into_dyn()); // two equal logits
//!
//! let dloss = arr0(1.0).into_dyn();
//! let cotangents =
//!     Cotangents { dloss: Some(dloss.view()), dlse: None, dlogprob: None, dentropy: None };
//! let gradients = backward(&problem, &inputs, &cotangents, Wanted::ALL)?;
//! assert_eq!(gradients.dw, Some(array![[1.0], [-1.0]])); // (p − [v = y]) h
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/linear_cross_entropy.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/katex.html"))]

mod backward;
mod double_backward;
pub mod filter;
mod forward;
mod head;
mod partial;
pub mod shard;
mod tokens;
mod tree;

pub use backward::backward;
pub use double_backward::double_backward;
pub use etalon_problem::linear_cross_entropy::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients,
};
pub use forward::forward;

use crate::scalar::Real;

/// Gradients that are wanted. The others cost nothing: with a frozen head, neither `dw` nor `dbias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The gradient of h.
    pub dh: bool,
    /// The gradient of w.
    pub dw: bool,
    /// The gradient of the bias, if the problem has one.
    pub dbias: bool,
}

impl Wanted {
    /// Every gradient.
    pub const ALL: Wanted = Wanted { dh: true, dw: true, dbias: true };
    /// The gradient of h alone, as with a frozen head.
    pub const DH: Wanted = Wanted { dh: true, dw: false, dbias: false };
}

/// weight · x of a weight that does not move, but 0·∞ = 0: a class without weight adds nothing, however
/// unlikely it is.
fn weighted<T: Real>(weight: T, x: T) -> T {
    if weight == T::ZERO && is_infinite(x) { T::ZERO } else { x.times(weight) }
}

/// p · x of a probability p and a logit x, but 0 where p is 0 and x infinite: what p ln p tends to.
fn expected<T: Real>(p: T, x: T) -> T {
    if p == T::ZERO && is_infinite(x) { T::ZERO } else { p * x }
}

fn is_infinite<T: Real>(x: T) -> bool {
    !x.is_finite() && !x.is_nan()
}
