//! Every pass of every algorithm, by name.

use crate::named::{ByName, Tensors, into_named};
use crate::scalar::{Quad, Real};
use crate::second_order::FirstOrder;
use crate::{attention, attention_lse};
use etalon_problem::{Error, Pass, Problem};

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
    let table = problem.checked_table(pass)?;
    let given: Vec<_> = x.iter().map(|(name, x)| (name.as_str(), Some(x.shape()))).collect();
    table.check_all(&given)?;
    let x = &ByName::new(problem, x);
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
        let x = x.iter().map(|(name, x)| (name.clone(), x.mapv(T::from_f64))).collect();
        let outputs = evaluate::<T>(problem, pass, &x)?;
        Ok(outputs.into_iter().map(|(name, x)| (name, x.mapv(T::to_f64))).collect())
    }
    match arithmetic {
        Arithmetic::F32 => through::<f32>(problem, pass, x),
        Arithmetic::F64 => evaluate(problem, pass, x),
        Arithmetic::DoubleDouble => through::<Quad>(problem, pass, x),
    }
}
