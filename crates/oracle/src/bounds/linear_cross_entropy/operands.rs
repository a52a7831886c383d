//! The inputs, the tokens that count, and by what their losses are divided (N65).

use crate::bounds::inputs::Inputs;
use crate::bounds::model::Model;
use etalon_problem::{LinearCrossEntropy, LseSquareWeight, Reduction};

/// The inputs, in f64.
pub(super) struct Operands<'a> {
    pub problem: &'a LinearCrossEntropy,
    pub model: &'a Model,
    inputs: &'a Inputs<'a>,
    pub h: &'a [f64],
    pub w: &'a [f64],
    bias: &'a [f64],
    class_weights: &'a [f64],
    token_weights: &'a [f64],
    /// The tokens that count, with their classes.
    pub counted: Vec<(usize, usize)>,
}

impl<'a> Operands<'a> {
    pub fn new(problem: &'a LinearCrossEntropy, inputs: &'a Inputs<'a>) -> Self {
        let data = |name| inputs.rows(name).data;
        let targets = data("targets").iter().map(|&target| target as i64).enumerate();
        let counted = targets.filter(|(_, target)| *target != problem.ignore_index);
        Operands {
            problem,
            model: inputs.model,
            inputs,
            h: data("h"),
            w: data("w"),
            bias: data("bias"),
            class_weights: data("class_weights"),
            token_weights: data("token_weights"),
            counted: counted.map(|(i, target)| (i, target as usize)).collect(),
        }
    }

    /// A cotangent of token `i`, or of all tokens together; 0 where it is absent.
    pub fn cotangent(&self, name: &str, i: usize) -> f64 {
        let all = self.inputs.rows(name).data;
        all.get(if all.len() == 1 { 0 } else { i }).copied().unwrap_or(0.0)
    }

    pub fn bias(&self, v: usize) -> f64 {
        self.bias.get(v).copied().unwrap_or(0.0)
    }

    pub fn class_weight(&self, v: usize) -> f64 {
        self.class_weights.get(v).copied().unwrap_or(1.0)
    }

    pub fn token_weight(&self, i: usize) -> f64 {
        self.token_weights.get(i).copied().unwrap_or(1.0)
    }

    /// ζ κ_i ω_i
    pub fn lse_square(&self, i: usize, target: usize) -> f64 {
        let weight = match self.problem.lse_square_weight {
            LseSquareWeight::Unweighted => 1.0,
            LseSquareWeight::ClassWeight => self.class_weight(target),
        };
        self.problem.lse_square_scale * self.token_weight(i) * weight
    }
}

/// Z and Z_z of (C10).
pub(super) struct Normaliser {
    pub z: f64,
    pub z_lse: f64,
    /// The error of Z (N65).
    pub error: f64,
    /// The same relative to Z.
    pub relative: f64,
}

impl Normaliser {
    pub fn new(operands: &Operands<'_>) -> Self {
        let weight = |&(i, y): &(usize, usize)| operands.token_weight(i) * operands.class_weight(y);
        let (terms, n) = (operands.counted.iter().map(weight), operands.counted.len());
        let (z, error) = match operands.problem.reduction {
            Reduction::Mean => {
                let absolute = terms.clone().map(f64::abs).sum::<f64>();
                (terms.sum(), operands.model.gamma_of_sum(n + 2) * absolute)
            }
            Reduction::By { normaliser } => (normaliser, 0.0),
            Reduction::None | Reduction::Sum => (1.0, 0.0),
        };
        let by_number = operands.problem.reduction == Reduction::Mean
            && operands.problem.lse_square_weight == LseSquareWeight::Unweighted;
        let z_lse = if by_number { n as f64 } else { z };
        let relative = if error > 0.0 { error / f64::abs(z) } else { 0.0 };
        Normaliser { z, z_lse, error, relative }
    }
}
