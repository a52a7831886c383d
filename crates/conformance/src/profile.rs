//! Numerics profiles: a declared class of arithmetic, from which every bound follows.

use etalon_problem::Dtype;

/// With which arithmetic a kernel claims to compute. There is no free tolerance: the bounds of
/// `docs/numerics.md` are functions of these numbers and of the inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Profile {
    /// Its name on the command line.
    pub name: &'static str,
    /// The type of every sum.
    pub accumulator: Dtype,
    /// The type in which the weights P are stored before they multiply v, if not the accumulator's.
    pub p_store: Dtype,
    /// The type in which dS is stored before it multiplies q and k, if not the accumulator's.
    pub ds_store: Dtype,
    /// a: the error of exp in units of the accumulator's roundoff, at 0.
    pub exp_constant: f64,
    /// b: how that error grows with the size of the argument.
    pub exp_slope: f64,
    /// The error of tanh, absolute, in units of the accumulator's roundoff.
    pub tanh: f64,
    /// The error of ln, in units of the accumulator's roundoff.
    pub log: f64,
}
