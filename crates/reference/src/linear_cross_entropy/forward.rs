//! ```text
//! (C3)  lse_i     = ln Σ_v e^{z_iv}
//! (C5)  logprob_i = z_{i,y_i} − lse_i
//! (C6)  entropy_i = −Σ_v p_iv ln p_iv
//! (C7)  ce_i      = (1 − α) cw_{y_i} (lse_i − z_{i,y_i}) + (α/V) Σ_v cw_v (lse_i − z_iv)
//! (C9)  loss      = Σ_i κ_i ce_i / Z + ζ Σ_i κ_i ω_i lse_i² / Z_z
//! ```

use super::shard::{Partial, Shard};
use super::tokens::Token;
use super::{Inputs, Output, weighted};
use crate::scalar::Real;
use crate::tensor::shaped;
use etalon_problem::{Error, LinearCrossEntropy, Reduction, TokenOutputs};
use ndarray::{Array1, IxDyn};

/// The loss, and what else the problem asks for.
pub fn forward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    let shard = Shard::new(problem, 0..problem.vocab, inputs)?;
    shard.output(&shard.partials()?)
}

impl<T: Real> Shard<'_, T> {
    /// The output, from the totals of all classes `[T]`; the same on every rank.
    pub fn output(&self, totals: &[Partial<T>]) -> Result<Output<T>, Error> {
        let (problem, tokens) = (self.problem, &self.tokens);
        let rows = self.totals(totals)?;
        let terms = rows.clone().map(|(token, x)| (self.cross_entropy(token, x), x.lse()));
        let mut loss = tokens.loss(terms)?;
        if problem.reduction == Reduction::None {
            loss = tokens.spread("loss", T::ZERO, loss)?;
        }
        let per_token = |wanted: bool, name, value: fn(&Partial<T>) -> T| {
            let values = rows.clone().map(|(_, total)| value(total));
            let all = || tokens.spread(name, T::ZERO, values).map(Array1::from_vec);
            wanted.then(all).transpose()
        };
        let TokenOutputs { lse, logprob, entropy, argmax } = problem.outputs;
        let class = |class: usize| class as i64;
        let classes = rows.clone().map(|(_, total)| total.argmax.map_or(NO_CLASS, class));
        let argmaxes = || tokens.spread("argmax", NO_CLASS, classes).map(Array1::from_vec);
        Ok(Output {
            loss: shaped("loss", IxDyn(&problem.loss_shape()), loss)?,
            lse: per_token(lse, "lse", Partial::lse)?,
            logprob: per_token(logprob, "logprob", log_probability)?,
            entropy: per_token(entropy, "entropy", Partial::entropy)?,
            argmax: argmax.then(argmaxes).transpose()?,
            n_valid: tokens.counted.len() as i64,
            normaliser: tokens.z,
        })
    }

    /// (C7). A part of weight 0 is left out.
    fn cross_entropy(&self, token: &Token<T>, total: &Partial<T>) -> T {
        let (alpha, mut sum) = (self.problem.label_smoothing, T::ZERO);
        if alpha < 1.0 {
            let target = weighted(token.class_weight, -log_probability(total));
            sum += target.times(T::ONE - T::from_f64(alpha));
        }
        if alpha > 0.0 {
            let classes = T::from_f64(self.problem.vocab as f64);
            sum += total.spread().times(T::from_f64(alpha) / classes);
        }
        sum
    }
}

/// `argmax` of an ignored token.
const NO_CLASS: i64 = -1;

/// The log-probability of the target in a total; NaN if it has no target.
pub(super) fn log_probability<T: Real>(total: &Partial<T>) -> T {
    total.logprob().unwrap_or(T::from_f64(f64::NAN))
}
