//! Lazy attention (Elastic-Softmax) on CPUs: [`forward`], [`backward`] and [`double_backward`], for
//! f32, bf16 and f16; and how sparse its weights are: [`stats`], [`activity`].
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, with memory that the caller may keep; on an error nothing has been written.
//! [`plan`] reports what a pass allocates. The tensors are those of [`etalon_problem::lazy_attention`].
//!
//! ```
//! use etalon_problem::{Blocking, Extents, LazyAttention, Views};
//! use etalon_simd::{Options, lazy_attention};
//! use ndarray::{Array1, Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = LazyAttention::new(extents); // causal
//! let q: Array4<f32> = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let tau: Array1<f32> = array![-0.5];
//! let inputs = lazy_attention::Inputs::new(q.view(), k.view(), v.view(), tau.view());
//!
//! let options = Options::default();
//!
//! let out = lazy_attention::forward(&problem, &inputs, &options)?;
//! assert_eq!(out.o, array![[[[2.0], [3.0]]]]); // weights 1 − 0.5, and 0.5 − 0.25 twice
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = lazy_attention::Cotangents::new(dout.view());
//! let gradients = lazy_attention::backward(&problem, &inputs, &out, &cotangents, &options)?;
//! assert_eq!(gradients.dv, array![[[[0.75], [0.25]]]]);
//!
//! let by_name = Views::new().with("q", &q).with("k", &k).with("v", &v).with("tau", &tau);
//! let stats = lazy_attention::stats(&problem, &by_name, Blocking::new(64, 64), &options)?;
//! assert_eq!((stats.element_density, stats.surviving_mass), (1.0, 0.5));
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/lazy_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

pub use etalon_problem::lazy_attention::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, SecondCotangents,
    SecondGradients, SecondGradientsMut, SpeedUp, Stats,
};

use crate::element::Tensor;
use crate::known::Known;
use crate::run::typed;
use crate::{Element, Options, Plan, Workspace, softmax};
use etalon_problem::{Blocking, Error, LazyAttention, Pass, Views, ViewsMut};
use ndarray::{Array4, arr0};

typed! {
    LazyAttention, Forward: (inputs: Inputs);
    /// o and lse of a problem (E1)–(E6), and under [`crate::Mode::ForwardGradient`] also Σ_j a P v, with
    /// which the backward pass needs no sweep for Δ.
    forward -> Output;
    /// As [`forward`], into arrays of the caller, with memory of a workspace, and Σ_j a P v if there is a
    /// place for it, whatever the mode.
    forward_into, out: OutputMut;
}

typed! {
    LazyAttention, Backward: (inputs: Inputs, [out], cotangents: Cotangents);
    /// dq, dk, dv, dtau and, where the problem has a bias, dbias (E7)–(E16), from the outputs of the
    /// forward pass.
    backward -> Gradients;
    /// As [`backward`], into arrays of the caller, and only the gradients that are asked for: dv alone
    /// needs no dP.
    backward_into, gradients: GradientsMut;
}

typed! {
    LazyAttention, DoubleBackward: (inputs: Inputs, [out], cotangents: Cotangents,
        second: SecondCotangents);
    /// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_lse, lse⟩ by everything that the backward
    /// pass reads (E19)–(E30), from the outputs of the forward pass; away from kinks.
    /// [`crate::Mode`] changes nothing.
    double_backward -> SecondGradients;
    /// As [`double_backward`], into arrays of the caller, and only what is asked for.
    double_backward_into, gradients: SecondGradientsMut;
}

/// Sparsity of the weights (E37)–(E46), with tiles of this size. The inputs are those of the forward pass, by
/// name; v is not read.
pub fn stats(
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Stats, Error> {
    let figures = figures(problem, inputs, tile, options)?;
    Ok(softmax::stats(&problem.scores, &figures, tile))
}

/// Flags of the tiles that hold an active pair: `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`, as the forward pass decides
/// it. Tiles lie on the arrays, those of packed sequences across the sequences. The inputs are those of
/// [`stats`].
pub fn activity(
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Array4<bool>, Error> {
    let figures = figures(problem, inputs, tile, options)?;
    softmax::activity(&problem.scores, &figures, tile)
}

fn figures(
    problem: &LazyAttention,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Array4<f32>, Error> {
    let known = Known::of(&Workspace::new(), &problem.clone().into(), Pass::Forward)?;
    let storage = known.table.check_call(inputs, &ViewsMut::new(), false)?;
    storage.refuse_f64()?;
    softmax::figures(&known, &problem.scores, inputs, tile, options)
}

/// The plan of a pass in rayon's current pool, every gradient being asked for and every cotangent given; and
/// the memory that it allocates, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(
    problem: &LazyAttention,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    let zero = arr0(T::ZERO);
    let zero = Tensor::from(zero.view());
    softmax::plan(&problem.clone().into(), &problem.scores, &zero, pass, options)
}
