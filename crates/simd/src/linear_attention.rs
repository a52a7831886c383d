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
#![doc = include_str!("../../../docs/assets/links.md")]
#![doc = include_str!("../../../docs/linear_attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod cut;
mod decays;
mod flow;
mod forward;
mod gradient;
mod named;
mod operands;
mod plan;
mod rows;
mod schedule;
mod scratch;
mod state;
mod step;
mod two_sided;

pub use etalon_problem::linear_attention::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, SecondCotangents,
    SecondGradients, SecondGradientsMut, StepInputs, StepOutput, StepOutputMut,
};
pub(crate) use named::run;
pub use plan::{SharedMemory, plan, shared_memory};

use crate::run::Call;
use crate::{Element, Options, Workspace};
use etalon_problem::{Error, LinearAttention, Pass};

/// o and, where the problem asks for it, the final state.
pub fn forward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output<T>, Error> {
    Call::new(problem, Pass::Forward).with(inputs).results(options)
}

/// As [`forward`], into arrays of the caller, with memory of a workspace.
pub fn forward_into<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    Call::new(problem, Pass::Forward).with(inputs).write(workspace, out, options)
}

/// The gradients of the inputs.
pub fn backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    Call::new(problem, Pass::Backward).with(inputs).with(cotangents).results(options)
}

/// As [`backward`], into arrays of the caller, and only what is asked for.
pub fn backward_into<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let call = Call::new(problem, Pass::Backward).with(inputs).with(cotangents);
    call.write(workspace, gradients, options)
}

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_final_state, H_n⟩ by everything that the
/// backward pass reads.
pub fn double_backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    let call = Call::new(problem, Pass::DoubleBackward).with(inputs);
    call.with(cotangents).with(second).results(options)
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for.
pub fn double_backward_into<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let call = Call::new(problem, Pass::DoubleBackward).with(inputs);
    call.with(cotangents).with(second).write(workspace, gradients, options)
}

/// o of the next token and the states after it, from `initial_state`, those before it.
pub fn step<T: Element>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    options: &Options,
) -> Result<StepOutput<T>, Error> {
    Call::new(problem, Pass::Step).with(inputs).results(options)
}

/// As [`step`], into arrays of the caller. Without `initial_state` the states are where they are: the
/// place of `final_state` holds those before the token, and then those after it.
pub fn step_into<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    out: StepOutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    Call::new(problem, Pass::Step).with(inputs).write(workspace, out, options)
}
