//! Exact implementations of every algorithm, written as their formulas: the oracle that judges
//! the fast kernels.
//!
//! Each module is one algorithm and has a function for each pass. Hand in a problem and views of
//! its tensors:
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! use etalon_reference::attention::{Inputs, forward};
//! use ndarray::array;
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
//! assert_eq!(output.lse, array![[[0.0, 2f64.ln()]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
//!
//! The code works over any [`scalar::Real`]: f64 is the oracle, dual numbers check its derivatives,
//! and double-double numbers its rounding. It computes one row of one head at a time, without
//! tiles. Heads run in parallel, and the result has the same bits for any number of threads.
//! Comments carry the equation numbers of the pages in [`etalon_problem::docs`].
#![forbid(unsafe_code)]

pub mod attention;
pub mod attention_lse;
mod heads;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod named;
mod parallel;
mod run;
pub mod scalar;
mod scores;
mod second_order;
mod tensor;
pub mod trace;
mod traced;

pub use named::{Named, NamedViews, Shapes, Tensors, convert};
pub use run::run;

use etalon_problem::{Error, Pass, Problem};
use named::{ByName, into_named};
use scalar::{Quad, Real};
use second_order::FirstOrder;

/// The passes of an algorithm whose second order is written out.
macro_rules! four_passes {
    ($algorithm:ident, $problem:expr, $own:expr, $pass:expr, $x:expr) => {
        match $pass {
            Pass::Forward => $algorithm::forward($own, &$x.get()?).map(into_named),
            Pass::Backward => $algorithm::backward($own, &$x.get()?, &$x.get()?).map(into_named),
            Pass::DoubleBackward => {
                let second = &$x.get()?;
                $algorithm::double_backward($own, &$x.get()?, &$x.get()?, second).map(into_named)
            }
            Pass::Jvp => $algorithm::jvp($own, &$x.get()?, &$x.get()?).map(into_named),
            _ => Err($problem.algorithm().no_pass($pass)),
        }
    };
}

/// The outputs of a pass, by name, in the arithmetic of `T`: `x` holds its inputs and cotangents, whole
/// numbers among them as numbers of `T`. Outputs that the problem does not ask for are absent.
///
/// Fails unless the problem is sound and `x` holds every operand that the pass needs, each in its
/// shape, and no other.
pub fn evaluate<T: Real>(
    problem: &Problem,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let x = &ByName::checked(problem, pass, x)?;
    match problem {
        Problem::Attention(own) => four_passes!(attention, problem, own, pass, x),
        Problem::AttentionLse(own) => four_passes!(attention_lse, problem, own, pass, x),
        Problem::LinearAttention(own) => own.evaluate(pass, x),
        Problem::LazyAttention(own) => own.evaluate(pass, x),
        Problem::LinearCrossEntropy(own) => own.evaluate(pass, x),
    }
}

/// An arithmetic in which the formulas can be evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// IEEE binary32: shows what a plain formula gives in single precision.
    F32,
    /// IEEE binary64: the oracle.
    F64,
    /// Two binary64 numbers for each: shows how far off the oracle is.
    DoubleDouble,
}

/// As [`evaluate`], with inputs in f64 and outputs that are each the nearest f64. It is compiled once, with
/// this crate.
pub fn evaluate_in(
    arithmetic: Arithmetic,
    problem: &Problem,
    pass: Pass,
    x: &Tensors<f64>,
) -> Result<Tensors<f64>, Error> {
    fn through<T: Real>(
        problem: &Problem,
        pass: Pass,
        x: &Tensors<f64>,
    ) -> Result<Tensors<f64>, Error> {
        let outputs = evaluate::<T>(problem, pass, &convert(x, T::from_f64))?;
        Ok(convert(&outputs, T::to_f64))
    }
    match arithmetic {
        Arithmetic::F32 => through::<f32>(problem, pass, x),
        Arithmetic::F64 => evaluate(problem, pass, x),
        Arithmetic::DoubleDouble => through::<Quad>(problem, pass, x),
    }
}
