#![doc = include_str!("../../../docs/attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod passes;
mod tensors;

pub use passes::{
    backward, backward_into, double_backward, double_backward_into, forward, forward_into, jvp,
    jvp_into, plan,
};
pub use tensors::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    OutputTangentsMut, SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};
