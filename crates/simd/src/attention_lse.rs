//! The log-sum-exp of attention scores on CPUs: [`forward`], [`backward`], [`double_backward`] and
//! [`jvp`], for f32, bf16 and f16.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, with memory that the caller may keep; on an error nothing has been written.
//! [`plan`] reports what a pass allocates. The tensors are those of [`etalon_problem::attention_lse`].
//!
//! ```
//! use etalon_problem::{AttentionLse, Extents};
//! use etalon_simd::{Options, attention_lse};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 2, dim: 1 };
//! let problem = AttentionLse::new(extents);
//! let q: Array4<f32> = array![[[[0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [3.0]]]];
//! let inputs = attention_lse::Inputs::new(q.view(), k.view());
//! let options = Options::default();
//!
//! let out = attention_lse::forward(&problem, &inputs, &options)?;
//! assert!((out.lse[[0, 0, 0]] - 2f32.ln()).abs() < 1e-6); // two scores of 0
//!
//! let dlse = array![[[1.0]]];
//! let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
//! let gradients = attention_lse::backward(&problem, &inputs, &out, &cotangents, &options)?;
//! assert!((gradients.dq[[0, 0, 0, 0]] - 2.0).abs() < 1e-5); // the mean of the keys
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/attention_lse.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

pub use etalon_problem::attention_lse::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    OutputTangentsMut, SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};

use crate::element::Tensor;
use crate::run::typed;
use crate::{Element, Options, Plan, softmax};
use etalon_problem::{AttentionLse, Error, Pass};
use ndarray::arr0;

typed! {
    AttentionLse, Forward: (inputs: Inputs);
    /// lse of a problem (L1), and under [`crate::Mode::ForwardGradient`] also ∂lse/∂q = σ Σ_j P S′ k.
    forward -> Output;
    /// As [`forward`], into arrays of the caller, with memory of a workspace, and
    /// ∂lse/∂q if there is a place for it, whatever the mode.
    forward_into, out: OutputMut;
}

typed! {
    AttentionLse, Backward: (inputs: Inputs, [out], cotangents: Cotangents);
    /// dq, dk and, where the problem has them, dsinks and dbias (L2), from the output of the forward
    /// pass: attention's with dP = 0 and δ = −dlse; if ∂lse/∂q was written, dq is dlse times it.
    backward -> Gradients;
    /// As [`backward`], into arrays of the caller, and only the gradients that are asked for.
    backward_into, gradients: GradientsMut;
}

typed! {
    AttentionLse, DoubleBackward: (inputs: Inputs, [out], cotangents: Cotangents,
        second: SecondCotangents);
    /// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_lse, lse⟩ by everything that the backward pass reads, from
    /// the output of the forward pass. [`crate::Mode`] changes nothing.
    double_backward -> SecondGradients;
    /// As [`double_backward`], into arrays of the caller, and only what is asked for.
    double_backward_into, gradients: SecondGradientsMut;
}

typed! {
    AttentionLse, Jvp: (inputs: Inputs, [out], tangents: Tangents);
    /// The tangent of lse along tangents of the inputs (J2), from the output of the forward pass.
    jvp -> OutputTangents;
    /// As [`jvp`], into arrays of the caller.
    jvp_into, moved: OutputTangentsMut;
}

/// The plan of a pass in rayon's current pool, every gradient being asked for and every cotangent given; and
/// the memory that it allocates, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(
    problem: &AttentionLse,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    let zero = arr0(T::ZERO);
    let zero = Tensor::from(zero.view());
    softmax::plan(&problem.clone().into(), &problem.scores, &zero, pass, options)
}
