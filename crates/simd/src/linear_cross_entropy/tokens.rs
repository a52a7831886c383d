//! The tokens that count, and their weights:
//!
//! ```text
//! (C10) Z   = Σ_i κ_i cw_{y_i},  Z_z = n or Z      with `Mean`; the given number with `By`; else 1
//! (C12) g_i = dloss κ_i / Z,     γ_i = dloss ζ κ_i ω_i / Z_z
//! ```

use super::operands::Operands;
use crate::workspace::Lists;
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction};
use ndarray::{ArrayView1, ArrayViewD};

/// A token that counts.
#[derive(Clone, Copy, Default)]
pub struct Token {
    /// Its number in the arrays.
    pub index: usize,
    /// y_i
    pub target: u32,
    /// cw_{y_i}
    pub class_weight: f32,
}

/// The tokens that count, in their order, and by what their losses are divided.
pub struct Tokens<'a> {
    pub problem: &'a LinearCrossEntropy,
    pub counted: &'a [Token],
    /// Z of (C10).
    pub z: f64,
    /// Z_z of (C10).
    z_lse: f64,
    /// κ
    weights: Option<ArrayView1<'a, f32>>,
    /// Σ_v cw_v
    pub class_weights: f64,
}

impl<'a> Tokens<'a> {
    /// Fails at a target that is no class, and where nothing is left to average if the problem wants that.
    pub fn new(
        problem: &'a LinearCrossEntropy,
        operands: &Operands<'a>,
        lists: &'a Lists,
    ) -> Result<Self, Error> {
        check_vocab(problem)?;
        let counted = lists.repeat(problem.tokens, Token::default(), "the tokens that count")?;
        let mut number = 0;
        for (index, &target) in operands.targets.iter().enumerate() {
            if target == problem.ignore_index {
                continue;
            }
            let class = problem.class_of(index, target)?;
            counted[number] = Token {
                index,
                target: class as u32,
                class_weight: operands.class_weights.map_or(1.0, |weights| weights[class]),
            };
            number += 1;
        }
        let counted = &counted[..number];
        let weights = operands.token_weights;
        let each = |token: &Token| weight_of(weights, token) * f64::from(token.class_weight);
        let (z, z_lse) = problem.normalisers(number, counted.iter().map(each))?;
        let all = |weights: ArrayView1<'_, f32>| weights.iter().map(|&x| f64::from(x)).sum();
        let class_weights = operands.class_weights.map_or(problem.vocab as f64, all);
        Ok(Tokens { problem, counted, z, z_lse, weights, class_weights })
    }

    /// x / z, or what the problem wants where there is nothing to average.
    fn share(&self, x: f64, z: f64) -> f64 {
        if self.problem.reduction != Reduction::Mean || self.z != 0.0 {
            return x / z;
        }
        match self.problem.nothing_left {
            NothingLeft::Zero => 0.0,
            NothingLeft::Nan | NothingLeft::Error => f64::NAN,
        }
    }

    /// κ_i
    fn weight(&self, token: &Token) -> f64 {
        weight_of(self.weights, token)
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, token: &Token) -> f64 {
        let weighted = match self.problem.lse_square_weight {
            LseSquareWeight::Unweighted => 1.0,
            LseSquareWeight::ClassWeight => f64::from(token.class_weight),
        };
        self.problem.lse_square_scale * self.weight(token) * weighted
    }

    /// κ_i ce_i and ζ κ_i ω_i lse_i², each with 0·∞ = 0.
    pub fn terms(&self, token: &Token, cross_entropy: f64, lse: f64) -> [f64; 2] {
        [weighted(self.weight(token), cross_entropy), weighted(self.lse_square(token), lse * lse)]
    }

    /// Motions of the terms of (C9), from ce and lse and their motions.
    pub fn term_motions(
        &self,
        token: &Token,
        cross_entropy: [f64; 2],
        [lse, motion]: [f64; 2],
    ) -> [f64; 2] {
        let square = [lse * lse, 2.0 * lse * motion];
        let weights = [self.weight(token), self.lse_square(token)];
        [weighted_motion(weights[0], cross_entropy)[1], weighted_motion(weights[1], square)[1]]
    }

    /// (C9), of the sums of both terms.
    pub fn loss(&self, [cross_entropies, squares]: [f64; 2]) -> f64 {
        self.share(cross_entropies, self.z) + self.share(squares, self.z_lse)
    }

    /// g_i and γ_i of (C12).
    pub fn upstream(&self, dloss: Option<&ArrayViewD<'_, f32>>, token: &Token) -> [f64; 2] {
        let dloss = dloss.map_or(0.0, |dloss| f64::from(at_place(self.problem, dloss, token)));
        let g = self.share(dloss * self.weight(token), self.z);
        [g, self.share(dloss * self.lse_square(token), self.z_lse)]
    }
}

/// Fails if there are more classes than numbers of 32 bits.
fn check_vocab(problem: &LinearCrossEntropy) -> Result<(), Error> {
    if u32::try_from(problem.vocab).is_ok() {
        return Ok(());
    }
    let expected = format!("at most {} in the simd tier", u32::MAX);
    Err(Error::value("vocab", expected, problem.vocab))
}

/// The element of a tensor in the shape of the loss that belongs to a token.
fn at_place(problem: &LinearCrossEntropy, x: &ArrayViewD<'_, f32>, token: &Token) -> f32 {
    let own = [token.index];
    let place: &[usize] = if problem.reduction == Reduction::None { &own } else { &[] };
    x[place]
}

/// κ_i
fn weight_of(weights: Option<ArrayView1<'_, f32>>, token: &Token) -> f64 {
    weights.map_or(1.0, |weights| f64::from(weights[token.index]))
}

/// weight · x, but 0·∞ = 0: what has no weight adds nothing, however unlikely it is.
pub fn weighted(weight: f64, x: f64) -> f64 {
    if weight == 0.0 && x.is_infinite() { 0.0 } else { weight * x }
}

/// The same of a number and its motion: what has no weight does not move, where it is infinite.
pub fn weighted_motion(weight: f64, [x, motion]: [f64; 2]) -> [f64; 2] {
    if weight == 0.0 && x.is_infinite() { [0.0; 2] } else { [weight * x, weight * motion] }
}
