//! Attention on CPUs: [`forward`], [`backward`], [`double_backward`] and [`jvp`], for f32, bf16 and
//! f16.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, with memory that the caller may keep; on an error nothing has been written.
//! [`plan`] reports what a pass allocates. The tensors are those of [`etalon_problem::attention`].
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_simd::{Options, attention};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q: Array4<f32> = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
//! let options = Options::default();
//!
//! let out = attention::forward(&problem, &inputs, &options)?;
//! assert_eq!(out.o, array![[[[4.0], [6.0]]]]); // the second query weighs both keys by 1/2
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = attention::Cotangents::new(dout.view());
//! let gradients = attention::backward(&problem, &inputs, &out, &cotangents, &options)?;
//! assert_eq!(gradients.dv, array![[[[1.5], [0.5]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

pub use etalon_problem::attention::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    OutputTangentsMut, SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};

use crate::element::Tensor;
use crate::run::typed;
use crate::{Element, Options, Plan, softmax};
use etalon_problem::{Attention, Error, Pass};
use ndarray::arr0;

typed! {
    Attention, Forward: (inputs: Inputs);
    /// o and lse of a problem (F1)–(F5).
    forward -> Output;
    /// As [`forward`], into arrays of the caller, with memory of a workspace.
    forward_into, out: OutputMut;
}

typed! {
    Attention, Backward: (inputs: Inputs, [out], cotangents: Cotangents);
    /// dq, dk, dv and, where the problem has them, dsinks and dbias (B1)–(B9), from the outputs of the
    /// forward pass.
    backward -> Gradients;
    /// As [`backward`], into arrays of the caller, and only the gradients that are asked for: dv alone
    /// needs no dP.
    backward_into, gradients: GradientsMut;
}

typed! {
    Attention, DoubleBackward: (inputs: Inputs, [out], cotangents: Cotangents,
        second: SecondCotangents);
    /// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_lse, lse⟩ by everything that the backward
    /// pass reads (D1)–(D15), from the outputs of the forward pass. [`crate::Mode`] changes nothing.
    double_backward -> SecondGradients;
    /// As [`double_backward`], into arrays of the caller, and only what is asked for.
    double_backward_into, gradients: SecondGradientsMut;
}

typed! {
    Attention, Jvp: (inputs: Inputs, [out], tangents: Tangents);
    /// The tangents of o and lse along tangents of the inputs (J1)–(J2), from the outputs of the forward
    /// pass.
    jvp -> OutputTangents;
    /// As [`jvp`], into arrays of the caller.
    jvp_into, moved: OutputTangentsMut;
}

/// The plan of a pass in rayon's current pool, every gradient being asked for and every cotangent given; and
/// the memory that it allocates, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(problem: &Attention, pass: Pass, options: &Options) -> Result<Plan, Error> {
    let zero = arr0(T::ZERO);
    let zero = Tensor::from(zero.view());
    softmax::plan(&problem.clone().into(), &problem.scores, &zero, pass, options)
}
