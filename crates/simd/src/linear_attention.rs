//! Linear attention on CPUs: [`forward`], [`backward`], [`double_backward`] and [`step`], for f32,
//! bf16 and f16; states and decays are f32.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, with memory that the caller may keep; on an error nothing has been written.
//! [`plan`] reports what a pass allocates. The tensors are those of
//! [`etalon_problem::linear_attention`].
//!
//! ```
//! use etalon_problem::{LinearAttention, LinearExtents};
//! use etalon_simd::{Options, linear_attention};
//! use ndarray::{Array4, array};
//!
//! let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 2, dim: 1 };
//! let problem = LinearAttention::new(extents).final_state();
//! let q: Array4<f32> = array![[[[1.0], [1.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
//! let options = Options::default();
//!
//! let out = linear_attention::forward(&problem, &inputs, &options)?;
//! assert_eq!(out.o, array![[[[4.0], [20.0]]]]); // the second query reads both keys
//! assert_eq!(out.final_state, Some(array![[[[20.0]]]]));
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = linear_attention::Cotangents::new(dout.view());
//! let gradients = linear_attention::backward(&problem, &inputs, &cotangents, &options)?;
//! assert_eq!(gradients.dv, array![[[[2.0], [2.0]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/linear_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

mod bf16_forward;
mod bf16_gradient;
mod bf16_scratch;
mod bf16_state;
mod bf16_weights;
mod cut;
mod decays;
mod flow;
mod forward;
mod gradient;
pub(crate) mod named;
mod operands;
mod plan;
mod rows;
mod schedule;
mod scratch;
mod state;
mod step;
mod two_sided;
mod words;

pub use etalon_problem::linear_attention::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, SecondCotangents,
    SecondGradients, SecondGradientsMut, StepInputs, StepOutput, StepOutputMut,
};
pub use plan::{SharedMemory, plan, shared_memory};

use crate::run::typed;
use etalon_problem::LinearAttention;

typed! {
    LinearAttention, Forward: (inputs: Inputs);
    /// o and, where the problem asks for it, the final state.
    forward -> Output;
    /// As [`forward`], into arrays of the caller, with memory of a workspace.
    forward_into, out: OutputMut;
}

typed! {
    LinearAttention, Backward: (inputs: Inputs, cotangents: Cotangents);
    /// The gradients of the inputs.
    backward -> Gradients;
    /// As [`backward`], into arrays of the caller, and only what is asked for.
    backward_into, gradients: GradientsMut;
}

typed! {
    LinearAttention, DoubleBackward: (inputs: Inputs, cotangents: Cotangents,
        second: SecondCotangents);
    /// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_final_state, H_n⟩ by everything that the
    /// backward pass reads.
    double_backward -> SecondGradients;
    /// As [`double_backward`], into arrays of the caller, and only what is asked for.
    double_backward_into, gradients: SecondGradientsMut;
}

typed! {
    LinearAttention, Step: (inputs: StepInputs);
    /// o of the next token and the states after it, from `initial_state`, those before it.
    step -> StepOutput;
    /// As [`step`], into arrays of the caller. Without `initial_state` the states are where they are: the
    /// place of `final_state` holds those before the token, and then those after it.
    step_into, out: StepOutputMut;
}
