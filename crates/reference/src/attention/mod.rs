//! Attention: [`forward()`], [`backward()`], [`double_backward()`] and [`jvp()`], over any scalar.
//!
//! Hand in a problem and views of its tensors; outputs and gradients come back as arrays.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
//! use ndarray::{Array4, array};
//!
//! let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 2, dim: 1 };
//! let problem = Attention::new(extents).mask(Mask::causal());
//! let q = array![[[[0.0], [0.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), sinks: None, bias: None };
//!
//! let output = forward(&problem, &inputs)?;
//! assert_eq!(output.o, array![[[[4.0], [6.0]]]]); // the second query weighs both keys by 1/2
//!
//! let dout = Array4::ones(output.o.raw_dim());
//! let gradients = backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
//! assert_eq!(gradients.dv, array![[[[1.5], [0.5]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/katex.html"))]

pub(crate) mod backward;
pub(crate) mod double_backward;
pub(crate) mod forward;
pub(crate) mod jvp;
pub(crate) mod trace;

pub use etalon_problem::attention::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents,
};

use crate::scalar::Real;
use etalon_problem::{Attention, Error};

/// The passes of a problem that is checked here; `attention_lse` checks its own.
macro_rules! passes {
    ($($(#[$doc:meta])* $pass:ident($($x:ident: $Operands:ident),*) -> $Results:ident;)*) => {$(
        $(#[$doc])*
        pub fn $pass<T: Real>(
            problem: &Attention,
            $($x: &$Operands<'_, T>,)*
        ) -> Result<$Results<T>, Error> {
            problem.check()?;
            $pass::any_width(problem, $($x),*)
        }
    )*};
}

passes! {
    /// o and lse.
    forward(inputs: Inputs) -> Output;
    /// The gradients of <dout, o> + <dlse, lse> by the inputs.
    backward(inputs: Inputs, cotangents: Cotangents) -> Gradients;
    /// The gradients of a loss of the gradients (and of the outputs) by everything they come from.
    double_backward(inputs: Inputs, cotangents: Cotangents, second: SecondCotangents)
        -> SecondGradients;
    /// Motions of o and lse when the inputs move along the tangents.
    jvp(inputs: Inputs, tangents: Tangents) -> OutputTangents;
}
