//! Linear cross-entropy on CPUs: [`forward`], [`backward`], [`forward_backward`] and [`double_backward`],
//! for f32, bf16 and f16; the loss and what comes with it are f32.
//!
//! The logits never exist as a whole: [`Options::memory_budget`](crate::Options) bounds what is held of
//! them, and of everything else beside operands and results. Views of the operands may have any strides.
//! Each function with the suffix `_into` writes into arrays of the caller, with memory that the caller may
//! keep; on an error nothing has been written. [`plan`] reports what a pass allocates. [`filter`] has a
//! backward pass that leaves out small gradients of logits. The tensors are
//! those of [`etalon_problem::linear_cross_entropy`]. Gradients have the type of the inputs, or, where the
//! problem has `wide_gradients`, f32.
//!
//! ```
//! use etalon_problem::LinearCrossEntropy;
//! use etalon_simd::{Options, linear_cross_entropy};
//! use ndarray::{Array2, arr0, array};
//!
//! let problem = LinearCrossEntropy::new(1, 1, 2); // tokens, elements, classes
//! let h = array![[2.0f32]];
//! let w = array![[0.0], [0.0]];
//! let targets = array![1];
//! let inputs = linear_cross_entropy::Inputs::new(h.view(), w.view(), targets.view());
//! let options = Options::default();
//!
//! let output = linear_cross_entropy::forward(&problem, &inputs, &options)?;
//! assert_eq!(output.loss, arr0(2f32.ln()).into_dyn()); // two equal logits
//!
//! let dloss = arr0(1.0).into_dyn();
//! let cotangents = linear_cross_entropy::Cotangents::default().dloss(dloss.view());
//! let (output, gradients) =
//!     linear_cross_entropy::forward_backward(&problem, &inputs, &cotangents, &options)?;
//! assert_eq!(output.n_valid, 1);
//! assert_eq!(gradients.dw, Some(array![[1.0], [-1.0]])); // (p − [v = y]) h
//!
//! // A frozen head costs nothing: what has no place is not computed.
//! let mut dh = Array2::<f32>::zeros((1, 1));
//! let places = linear_cross_entropy::GradientsMut {
//!     dh: Some(dh.view_mut()),
//!     ..linear_cross_entropy::GradientsMut::default()
//! };
//! let workspace = etalon_simd::Workspace::new();
//! linear_cross_entropy::backward_into(&workspace, &problem, &inputs, &cotangents, places, &options)?;
//! assert_eq!(dh, array![[0.0]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/linear_cross_entropy.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

mod choice;
mod cut;
pub mod filter;
mod gradient;
mod gradients;
mod kept;
mod logit_gradients;
mod logits;
mod matrix;
mod measure;
pub(crate) mod named;
mod operands;
mod output;
mod pack;
mod partial;
mod plan;
mod products;
mod second;
pub mod shard;
mod sums;
mod sweeps;
mod tokens;
mod totals;
mod tree;

#[cfg(test)]
mod tests;

pub use etalon_problem::linear_cross_entropy::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, SecondCotangents,
    SecondGradients, SecondGradientsMut,
};
pub use plan::plan;

use crate::run::typed;
use etalon_problem::LinearCrossEntropy;

/// Results of [`forward_backward`].
pub type Both<T> = (Output<T>, Gradients<T>);

/// Places of the results of [`forward_backward_into`].
pub type BothMut<'a, T> = (OutputMut<'a, T>, GradientsMut<'a, T>);

typed! {
    LinearCrossEntropy, Forward: (inputs: Inputs);
    /// The loss (C9), and what else the problem asks for. Fails at a target that is neither a class nor
    /// ignored.
    forward -> Output;
    /// As [`forward`], into arrays of the caller, with memory of a workspace.
    forward_into, out: OutputMut;
}

typed! {
    LinearCrossEntropy, Backward: (inputs: Inputs, cotangents: Cotangents);
    /// The gradients of ⟨dloss, loss⟩ + ⟨dlse, lse⟩ + ⟨dlogprob, logprob⟩ + ⟨dentropy, entropy⟩ by the inputs
    /// (C17)–(C19). It reads nothing of the forward pass.
    backward -> Gradients;
    /// As [`backward`], into arrays of the caller, and only what is asked for. With
    /// [`wide_gradients`](LinearCrossEntropy::wide_gradients) these are of f32, whatever the inputs are.
    backward_into, gradients: GradientsMut of G;
}

typed! {
    LinearCrossEntropy, ForwardBackward: (inputs: Inputs, cotangents: Cotangents);
    /// The loss and its gradients at once, where the cotangents are known before: what [`backward`] costs
    /// alone.
    forward_backward -> Both;
    /// As [`forward_backward`], into arrays of the caller, and only what is asked for. With
    /// [`wide_gradients`](LinearCrossEntropy::wide_gradients) gradients are of f32, whatever the inputs are.
    forward_backward_into, places: BothMut of G;
}

typed! {
    LinearCrossEntropy, DoubleBackward: (inputs: Inputs, cotangents: Cotangents,
        second: SecondCotangents);
    /// The gradients of ⟨ddh, dh⟩ + ⟨ddw, dw⟩ + ⟨ddbias, dbias⟩ + ⟨cot_loss, loss⟩ + ⟨cot_lse, lse⟩ +
    /// ⟨cot_logprob, logprob⟩ + ⟨cot_entropy, entropy⟩ by everything that the backward pass reads
    /// (C21)–(C32). It reads nothing of the passes before.
    double_backward -> SecondGradients;
    /// As [`double_backward`], into arrays of the caller, and only what is asked for. With
    /// [`wide_gradients`](LinearCrossEntropy::wide_gradients) these are of f32, whatever the inputs are.
    double_backward_into, gradients: SecondGradientsMut of G;
}
