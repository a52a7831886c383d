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
#![doc = include_str!("../../../../docs/assets/links.md")]
#![doc = include_str!("../../../../docs/linear_cross_entropy.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]

mod backward;
mod double_backward;
mod evaluate;
pub mod filter;
mod forward;
mod head;
mod partial;
pub mod shard;
mod tokens;
mod tree;

pub use backward::backward;
pub use double_backward::double_backward;
pub use evaluate::evaluate;
pub use forward::forward;

use crate::scalar::Real;
use ndarray::{Array1, Array2, ArrayD, ArrayView1, ArrayView2, ArrayViewD};

/// What the loss is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Hidden states `[T, D]`.
    pub h: ArrayView2<'a, T>,
    /// The rows of the head, one per class `[V, D]`; of a shard, those of its classes.
    pub w: ArrayView2<'a, T>,
    /// Added to h·w `[V]`, where the problem has it; of a shard, that of its classes.
    pub bias: Option<ArrayView1<'a, T>>,
    /// The class of each token `[T]`, or the problem's `ignore_index`.
    pub targets: ArrayView1<'a, i64>,
    /// The weights of all classes `[V]`, where the problem has them.
    pub class_weights: Option<ArrayView1<'a, T>>,
    /// The weights of the tokens `[T]`, where the problem has them.
    pub token_weights: Option<ArrayView1<'a, T>>,
}

/// The loss and what belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// (C9): one number, `[]`, or one per token, `[T]`, where nothing is reduced.
    pub loss: ArrayD<T>,
    /// (C3), `[T]`, where the problem asks for it; ignored tokens: 0.
    pub lse: Option<Array1<T>>,
    /// (C5), `[T]`, where the problem asks for it; ignored tokens: 0.
    pub logprob: Option<Array1<T>>,
    /// (C6), `[T]`, where the problem asks for it; ignored tokens: 0.
    pub entropy: Option<Array1<T>>,
    /// The class with the largest logit, `[T]`, where the problem asks for it; ignored tokens: −1.
    pub argmax: Option<Array1<i64>>,
    /// The number of tokens that count.
    pub n_valid: i64,
    /// Z of (C10).
    pub normaliser: T,
}

/// Gradients of something by the outputs. What is absent is zero.
#[derive(Debug, Clone)]
pub struct Cotangents<'a, T> {
    /// By the loss: in its shape.
    pub dloss: Option<ArrayViewD<'a, T>>,
    /// By lse: `[T]`.
    pub dlse: Option<ArrayView1<'a, T>>,
    /// By logprob: `[T]`.
    pub dlogprob: Option<ArrayView1<'a, T>>,
    /// By entropy: `[T]`.
    pub dentropy: Option<ArrayView1<'a, T>>,
}

/// Which gradients are wanted. The others cost nothing: with a frozen head, neither `dw` nor
/// `dbias`.
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
    /// That of h alone, as with a frozen head.
    pub const DH: Wanted = Wanted { dh: true, dw: false, dbias: false };
}

/// Gradients by the inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// (C17), `[T, D]`, if it was wanted; of a shard, what its classes add to it.
    pub dh: Option<Array2<T>>,
    /// (C18), `[V, D]`, if it was wanted; of a shard, that of its classes.
    pub dw: Option<Array2<T>>,
    /// (C19), `[V]`, if it was wanted and the problem has a bias; of a shard, that of its classes.
    pub dbias: Option<Array1<T>>,
}

/// Gradients of something else by the gradients, and by the outputs. What is absent is zero.
#[derive(Debug, Clone)]
pub struct SecondCotangents<'a, T> {
    /// By dh: `[T, D]`.
    pub ddh: Option<ArrayView2<'a, T>>,
    /// By dw: `[V, D]`.
    pub ddw: Option<ArrayView2<'a, T>>,
    /// By dbias: `[V]`.
    pub ddbias: Option<ArrayView1<'a, T>>,
    /// By the loss: in its shape.
    pub cot_loss: Option<ArrayViewD<'a, T>>,
    /// By lse: `[T]`.
    pub cot_lse: Option<ArrayView1<'a, T>>,
    /// By logprob: `[T]`.
    pub cot_logprob: Option<ArrayView1<'a, T>>,
    /// By entropy: `[T]`.
    pub cot_entropy: Option<ArrayView1<'a, T>>,
}

/// Its gradients by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By h, (C28): `[T, D]`.
    pub gh: Array2<T>,
    /// By w, (C29): `[V, D]`.
    pub gw: Array2<T>,
    /// By the bias, (C30): `[V]`, where the problem has one.
    pub gbias: Option<Array1<T>>,
    /// By dloss, (C31): in the shape of the loss.
    pub gdloss: ArrayD<T>,
    /// By dlse, (C22): `[T]`, where the problem asks for lse.
    pub gdlse: Option<Array1<T>>,
    /// By dlogprob, (C32): `[T]`, where the problem asks for logprob.
    pub gdlogprob: Option<Array1<T>>,
    /// By dentropy, (C24): `[T]`, where the problem asks for entropy.
    pub gdentropy: Option<Array1<T>>,
}

/// weight · x, but 0·∞ = 0: a class without weight adds nothing, however unlikely it is.
fn weigh<T: Real>(weight: T, x: T) -> T {
    let infinite = !x.is_finite() && !x.is_nan();
    if weight == T::ZERO && infinite { T::ZERO } else { weight * x }
}
