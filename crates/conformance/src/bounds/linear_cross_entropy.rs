//! The bounds of linear_cross_entropy: equations (N60) to (N75).

mod backward;
mod forward;
mod row;

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, LinearCrossEntropy, LseSquareWeight, Pass, Reduction};
use std::collections::BTreeMap;

/// The errors of its outputs.
pub(super) fn errors(problem: &LinearCrossEntropy, asked: &Asked<'_>) -> Result<Errors, Error> {
    let operands = Operands::new(problem, asked)?;
    let lists = match asked.pass {
        Pass::Forward => forward::errors(&operands, asked.model),
        Pass::Backward => {
            let cotangents = backward::Cotangents::new(asked)?;
            backward::errors(&operands, &cotangents, asked.model)
        }
        _ => return Err(asked.underived(Algorithm::LinearCrossEntropy)),
    };
    Ok(Errors { lists, power: None })
}

/// Errors by the name of the output, in row-major order.
type Lists = BTreeMap<&'static str, Vec<f64>>;

/// The inputs, in f64.
struct Operands<'a> {
    problem: &'a LinearCrossEntropy,
    h: &'a [f64],
    w: &'a [f64],
    bias: Option<&'a [f64]>,
    targets: &'a [f64],
    class_weights: Option<&'a [f64]>,
    token_weights: Option<&'a [f64]>,
}

impl<'a> Operands<'a> {
    fn new(problem: &'a LinearCrossEntropy, asked: &Asked<'a>) -> Result<Self, Error> {
        Ok(Operands {
            problem,
            h: asked.input("h")?,
            w: asked.input("w")?,
            bias: asked.optional("bias")?,
            targets: asked.input("targets")?,
            class_weights: asked.optional("class_weights")?,
            token_weights: asked.optional("token_weights")?,
        })
    }

    /// The class of token `i`, if it counts.
    fn target(&self, i: usize) -> Option<usize> {
        let target = self.targets[i] as i64;
        (target != self.problem.ignore_index).then_some(target as usize)
    }

    fn class_weight(&self, v: usize) -> f64 {
        self.class_weights.map_or(1.0, |weights| weights[v])
    }

    fn token_weight(&self, i: usize) -> f64 {
        self.token_weights.map_or(1.0, |weights| weights[i])
    }

    /// The tokens that count, with their classes.
    fn counted(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.problem.tokens).filter_map(|i| Some((i, self.target(i)?)))
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, i: usize, target: usize) -> f64 {
        let weight = match self.problem.lse_square_weight {
            LseSquareWeight::Unweighted => 1.0,
            LseSquareWeight::ClassWeight => self.class_weight(target),
        };
        self.problem.lse_square_scale * self.token_weight(i) * weight
    }

    /// Z and Z_z, the relative error of Z, and n (N65).
    fn normaliser(&self, gamma: impl Fn(usize) -> f64) -> Normaliser {
        let terms = || self.counted().map(|(i, y)| self.token_weight(i) * self.class_weight(y));
        let n = self.counted().count();
        let (z, error) = match self.problem.reduction {
            Reduction::Mean => (terms().sum(), gamma(n + 2) * terms().map(f64::abs).sum::<f64>()),
            Reduction::By { normaliser } => (normaliser, 0.0),
            Reduction::None | Reduction::Sum => (1.0, 0.0),
        };
        let by_number = self.problem.reduction == Reduction::Mean
            && self.problem.lse_square_weight == LseSquareWeight::Unweighted;
        let z_lse = if by_number { n as f64 } else { z };
        let relative = if error > 0.0 { error / f64::abs(z) } else { 0.0 };
        Normaliser { z, z_lse, error, relative, n }
    }
}

struct Normaliser {
    z: f64,
    z_lse: f64,
    /// Of z.
    error: f64,
    /// The same, relative.
    relative: f64,
    n: usize,
}
