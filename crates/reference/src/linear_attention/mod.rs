//! Linear attention: [`forward`], [`backward`], [`double_backward`] and [`step`], over any scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//! [`chunked`] computes the same in chunks, as kernels do.
//!
//! ```
//! use etalon_problem::{LinearAttention, LinearExtents};
//! use etalon_reference::linear_attention::{Cotangents, Inputs, backward, forward};
//! use ndarray::array;
//!
//! let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 2, dim: 1 };
//! let problem = LinearAttention::new(extents).final_state();
//! let q = array![[[[1.0], [1.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let (q, k, v) = (q.view(), k.view(), v.view());
//! let inputs = Inputs { q, k, v, g_gamma: None, g: None, initial_state: None };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.o, array![[[[4.0], [20.0]]]]); // the second query reads both keys
//! assert_eq!(output.final_state, Some(array![[[[20.0]]]]));
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = Cotangents { dout: dout.view(), dfinal_state: None };
//! let gradients = backward(&problem, &inputs, &cotangents)?;
//! assert_eq!(gradients.dv, array![[[[2.0], [2.0]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../../docs/assets/links.md")]
#![doc = include_str!("../../../../docs/linear_attention.md")]
#![doc = include_str!("../../../../docs/assets/katex.html")]

mod backward;
pub mod chunked;
mod double_backward;
mod evaluate;
mod forward;
mod heads;
mod state;
mod step;

pub use backward::backward;
pub use double_backward::double_backward;
pub use evaluate::evaluate;
pub use forward::forward;
pub use step::{StepInputs, StepOutput, step};

use crate::named::{Shapes, check};
use crate::scalar::Real;
use etalon_problem::{Error, LinearAttention, Pass};
use ndarray::{Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4};

/// What linear attention is computed from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// Queries `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// Keys `[B, Hk, N, D]`.
    pub k: ArrayView4<'a, T>,
    /// Values `[B, Hk, N, E]`.
    pub v: ArrayView4<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, T>>,
    /// A log-decay per token `[B, Hk, N]`, where the problem decays so.
    pub g: Option<ArrayView3<'a, T>>,
    /// H_0, `[S, Hk, D, E]`, where the problem has it.
    pub initial_state: Option<ArrayView4<'a, T>>,
}

/// What linear attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// o of (R2), `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// H_n of (R1), `[S, Hk, D, E]`, where the problem asks for it.
    pub final_state: Option<Array4<T>>,
}

/// Gradients of a loss by the outputs.
#[derive(Debug, Clone, Copy)]
pub struct Cotangents<'a, T> {
    /// By o: `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// By the final state: `[S, Hk, D, E]`; absent: zero.
    pub dfinal_state: Option<ArrayView4<'a, T>>,
}

/// Gradients of a loss by the inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// (R4), `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// (R5), `[B, Hk, N, D]`.
    pub dk: Array4<T>,
    /// (R6), `[B, Hk, N, E]`.
    pub dv: Array4<T>,
    /// (R7) summed over tokens and sequences, `[Hk]`, where the problem decays per head.
    pub dg_gamma: Option<Array1<T>>,
    /// (R7), `[B, Hk, N]`, where the problem decays per token.
    pub dg: Option<Array3<T>>,
    /// (R8), `[S, Hk, D, E]`, where the problem has an initial state.
    pub dinitial_state: Option<Array4<T>>,
    /// (R9).
    pub dscale: T,
}

/// Gradients of a second loss by the gradients of the first, and by the outputs. What is absent
/// is zero.
#[derive(Debug, Clone, Copy)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, N, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dv: `[B, Hk, N, E]`.
    pub ddv: Option<ArrayView4<'a, T>>,
    /// By dg_gamma: `[Hk]`.
    pub ddg_gamma: Option<ArrayView1<'a, T>>,
    /// By dg: `[B, Hk, N]`. At a reset it is not read.
    pub ddg: Option<ArrayView3<'a, T>>,
    /// By dinitial_state: `[S, Hk, D, E]`.
    pub ddinitial_state: Option<ArrayView4<'a, T>>,
    /// By dscale.
    pub ddscale: Option<T>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By the final state: `[S, Hk, D, E]`.
    pub cot_final_state: Option<ArrayView4<'a, T>>,
}

/// Gradients of the second loss by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (R14): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (R15): `[B, Hk, N, D]`.
    pub gk: Array4<T>,
    /// By v, (R16): `[B, Hk, N, E]`.
    pub gv: Array4<T>,
    /// By g_gamma, (R17) summed: `[Hk]`, where the problem decays per head.
    pub gg_gamma: Option<Array1<T>>,
    /// By g, (R17): `[B, Hk, N]`, where the problem decays per token.
    pub gg: Option<Array3<T>>,
    /// By the initial state, (R18): `[S, Hk, D, E]`, where the problem has one.
    pub ginitial_state: Option<Array4<T>>,
    /// By the scale, (R19).
    pub gscale: T,
    /// By dout, (R12): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
    /// By dfinal_state, (R11): `[S, Hk, D, E]`, where the problem returns the final state.
    pub gdfinal_state: Option<Array4<T>>,
}

/// Fails unless the problem is sound, its inputs and the further operands of the pass fit it, and no
/// log-decay of a head is positive or NaN. (Those of tokens are looked at where they are read: padding
/// may hold anything.)
fn check_inputs<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    inputs: &Inputs<'_, T>,
    further: Shapes<'_>,
) -> Result<(), Error> {
    problem.check()?;
    check(&problem.table(pass), &[inputs.shapes(), further])?;
    check_g_gamma(&inputs.g_gamma)
}

/// Fails unless the log-decay of every head is at most 0.
fn check_g_gamma<T: Real>(g_gamma: &Option<ArrayView1<'_, T>>) -> Result<(), Error> {
    let mut heads = g_gamma.iter().flatten().enumerate();
    heads.try_for_each(|(h, &g)| check_log_decay("g_gamma", &[h], g))
}

/// Fails unless `g` is at most 0.
fn check_log_decay<T: Real>(name: &str, index: &[usize], g: T) -> Result<(), Error> {
    if g <= T::ZERO {
        return Ok(());
    }
    Err(Error::value(format!("{name}{index:?}"), "at most 0", g.to_f64()))
}
