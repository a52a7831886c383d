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
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/linear_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/katex.html"))]

mod backward;
pub mod chunked;
mod double_backward;
mod forward;
mod heads;
mod state;
mod step;
mod trace;

pub use backward::backward;
pub use double_backward::double_backward;
pub use etalon_problem::linear_attention::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, StepInputs,
    StepOutput,
};
pub use forward::forward;
pub use step::step;
pub use trace::trace;

use crate::named::{ByName, Named, Shapes, Tensors, check, zeros};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::tensors::Results;
use etalon_problem::{Error, LinearAttention, Pass};
use ndarray::ArrayView1;

/// The outputs of a pass by name: [`crate::evaluate`] of this algorithm alone, for those who bring a type of number of
/// their own and need not compile the others for it.
pub fn evaluate<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    FirstOrder::evaluate(problem, pass, &ByName::checked(&problem.clone().into(), pass, x)?)
}

/// The results of a pass, which hold 0 until they are written. Fails unless the problem is sound, its
/// inputs and the further operands of the pass fit it, and no log-decay of a head is positive or NaN.
/// (Those of tokens are looked at where they are read: padding may hold anything.)
fn checked<T: Real, R: Results<T>>(
    problem: &LinearAttention,
    pass: Pass,
    inputs: &Inputs<'_, T>,
    further: Shapes,
) -> Result<R, Error> {
    problem.check()?;
    let table = problem.table(pass);
    check(&table, &[inputs.shapes(), further])?;
    check_g_gamma(&inputs.g_gamma)?;
    zeros(&table)
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
