//! Gates: by what a state is multiplied before a token is added to it.

use crate::scalar::Real;
use crate::tensor::Matrix;
use etalon_problem::Error;
use ndarray::ArrayView1;

/// The log-decays g_t of one head in one sequence.
#[derive(Clone, Copy)]
pub(super) enum Gates<'a, T> {
    /// The same at every token; 0 where nothing decays.
    Constant(T),
    /// One per token.
    PerToken(Matrix<'a, T>),
}

impl<T: Real> Gates<'_, T> {
    /// g_t, or nothing where it is −∞: a reset. What a reset forgets must be left out, not
    /// multiplied by e^{−∞}, because 0·∞ is not 0.
    pub fn log(&self, t: usize) -> Option<T> {
        let g = match self {
            Gates::Constant(g) => *g,
            Gates::PerToken(g) => g.scalar(t),
        };
        Some(g).filter(|g| g.to_f64() != f64::NEG_INFINITY)
    }

    /// e^{g_t}, or nothing at a reset.
    pub fn factor(&self, t: usize) -> Option<T> {
        self.log(t).map(T::exp)
    }
}

/// Fails unless `g` is at most 0.
pub(super) fn check_log_decay<T: Real>(name: &str, index: &[usize], g: T) -> Result<(), Error> {
    if g <= T::ZERO {
        return Ok(());
    }
    Err(Error::value(format!("{name}{index:?}"), "at most 0", g.to_f64()))
}

/// Fails unless the log-decay of every head is at most 0.
pub(super) fn check_g_gamma<T: Real>(g_gamma: &Option<ArrayView1<'_, T>>) -> Result<(), Error> {
    let mut heads = g_gamma.iter().flatten().enumerate();
    heads.try_for_each(|(h, &g)| check_log_decay("g_gamma", &[h], g))
}
