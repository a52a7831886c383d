//! The tokens that count, and what they weigh:
//!
//! ```text
//! (C10) Z   = Σ_i κ_i cw_{y_i},  Z_z = n or Z      with `Mean`; the given number with `By`; else 1
//! (C12) g_i = dloss κ_i / Z,     γ_i = dloss ζ κ_i ω_i / Z_z
//! ```

use super::head::{contiguous, matrix};
use super::{Inputs, weigh};
use crate::scalar::Real;
use crate::tensor::{filled, reserve};
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction};
use ndarray::{ArrayView1, ArrayView2, ArrayViewD, Axis};
use std::borrow::Cow;
use std::ops::Range;

/// Tokens that are computed together.
const BLOCK: usize = 64;

/// A token that counts.
#[derive(Clone, Copy)]
pub(super) struct Token<T> {
    /// Where it lies in the arrays.
    pub index: usize,
    /// y_i
    pub target: usize,
    /// κ_i
    pub weight: T,
    /// cw_{y_i}
    pub class_weight: T,
}

/// The tokens that count, in their order.
pub(super) struct Tokens<'a, T: Clone> {
    counted: Vec<Token<T>>,
    /// Their rows of h, filled up with zeros as [`Real::PRODUCT_ROWS`] wants it.
    h: Vec<T>,
    dim: usize,
    class_weights: Option<Cow<'a, [T]>>,
    pub normaliser: Normaliser<T>,
}

impl<'a, T: Real> Tokens<'a, T> {
    pub fn new(problem: &LinearCrossEntropy, inputs: &'a Inputs<'_, T>) -> Result<Self, Error> {
        let class_weights = inputs.class_weights.as_ref();
        let class_weights =
            class_weights.map(|x| contiguous("class_weights", x.view())).transpose()?;
        let counted = counted(problem, inputs, class_weights.as_deref())?;
        let normaliser = Normaliser::new(problem, &counted)?;
        let rows = counted.len().next_multiple_of(T::PRODUCT_ROWS);
        let mut h = reserve("the counted rows of h", rows.saturating_mul(problem.dim))?;
        for token in &counted {
            h.extend(inputs.h.index_axis(Axis(0), token.index).iter().copied());
        }
        h.resize(rows * problem.dim, T::ZERO);
        Ok(Tokens { counted, h, dim: problem.dim, class_weights, normaliser })
    }

    /// Every one of them.
    pub fn counted(&self) -> &[Token<T>] {
        &self.counted
    }

    /// The weights of some classes, if there are any.
    pub fn class_weights(&self, classes: &Range<usize>) -> Option<&[T]> {
        self.class_weights.as_deref().map(|weights| &weights[classes.clone()])
    }

    /// Block by block: the numbers of its tokens, and their rows of h, filled up.
    pub fn blocks(&self) -> Vec<(Range<usize>, ArrayView2<'_, T>)> {
        let tokens = self.counted.len();
        let starts = (0..tokens).step_by(BLOCK);
        let blocks = starts.zip(self.h.chunks(BLOCK.saturating_mul(self.dim)));
        blocks.map(|(start, h)| (start..tokens.min(start + BLOCK), matrix(h, self.dim))).collect()
    }
}

/// The tokens whose target is not the ignored one. Fails at a target that is no class.
fn counted<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    class_weights: Option<&[T]>,
) -> Result<Vec<Token<T>>, Error> {
    let ignored = problem.ignore_index;
    let number = inputs.targets.iter().filter(|&&target| target != ignored).count();
    let mut counted = reserve("the tokens that count", number)?;
    for (index, &target) in inputs.targets.iter().enumerate() {
        if target == ignored {
            continue;
        }
        let class = usize::try_from(target).ok().filter(|&class| class < problem.vocab);
        let Some(class) = class else {
            let expected = format!("a class below {} or the ignored {ignored}", problem.vocab);
            return Err(Error::value(format!("targets[{index}]"), expected, target));
        };
        counted.push(Token {
            index,
            target: class,
            weight: inputs.token_weights.map_or(T::ONE, |weights| weights[index]),
            class_weight: class_weights.map_or(T::ONE, |weights| weights[class]),
        });
    }
    Ok(counted)
}

/// By what the losses are divided.
pub(super) struct Normaliser<T> {
    /// n: the tokens that count.
    pub n_valid: usize,
    /// Z of (C10).
    pub z: T,
    /// Z_z of (C10).
    z_lse: T,
    /// Whether there is nothing to average, and what then.
    nothing: Option<NothingLeft>,
    reduced: bool,
    /// ζ
    lse_square_scale: T,
    lse_square_weight: LseSquareWeight,
}

impl<T: Real> Normaliser<T> {
    fn new(problem: &LinearCrossEntropy, counted: &[Token<T>]) -> Result<Self, Error> {
        let n_valid = counted.len();
        let (z, z_lse) = match problem.reduction {
            Reduction::None | Reduction::Sum => (T::ONE, T::ONE),
            Reduction::By { normaliser } => {
                let normaliser = T::from_f64(normaliser);
                (normaliser, normaliser)
            }
            Reduction::Mean => {
                let mut z = T::ZERO;
                counted.iter().for_each(|token| z += token.weight * token.class_weight);
                match problem.lse_square_weight {
                    LseSquareWeight::Unweighted => (z, T::from_f64(n_valid as f64)),
                    LseSquareWeight::ClassWeight => (z, z),
                }
            }
        };
        let nothing =
            (problem.reduction == Reduction::Mean && z == T::ZERO).then_some(problem.nothing_left);
        if nothing == Some(NothingLeft::Error) {
            let expected = "not 0, as there must be something left to average";
            return Err(Error::value("normaliser", expected, z.to_f64()));
        }
        Ok(Normaliser {
            n_valid,
            z,
            z_lse,
            nothing,
            reduced: problem.reduction != Reduction::None,
            lse_square_scale: T::from_f64(problem.lse_square_scale),
            lse_square_weight: problem.lse_square_weight,
        })
    }

    /// x / z, or what the problem wants where there is nothing to average.
    fn share(&self, x: T, z: T) -> T {
        match self.nothing {
            None => x / z,
            Some(NothingLeft::Zero) => T::ZERO,
            Some(NothingLeft::Nan | NothingLeft::Error) => x * T::from_f64(f64::NAN),
        }
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, token: &Token<T>) -> T {
        let weighted = match self.lse_square_weight {
            LseSquareWeight::Unweighted => token.weight,
            LseSquareWeight::ClassWeight => token.weight * token.class_weight,
        };
        self.lse_square_scale * weighted
    }

    /// What the cross-entropies (C7) and the squares of lse add up to (C9): one number, or one per
    /// token that counts.
    pub fn loss(&self, terms: impl Iterator<Item = (Token<T>, T, T)>) -> Result<Vec<T>, Error> {
        let weighted = terms.map(|(token, cross_entropy, lse)| {
            let square = weigh(self.lse_square(&token), lse * lse);
            (weigh(token.weight, cross_entropy), square)
        });
        if !self.reduced {
            let mut losses = reserve("the losses", self.n_valid)?;
            losses.extend(weighted.map(|(cross_entropy, square)| cross_entropy + square));
            return Ok(losses);
        }
        let (mut cross_entropies, mut squares) = (T::ZERO, T::ZERO);
        for (cross_entropy, square) in weighted {
            cross_entropies += cross_entropy;
            squares += square;
        }
        Ok(vec![self.share(cross_entropies, self.z) + self.share(squares, self.z_lse)])
    }

    /// g_i and γ_i of (C12).
    pub fn upstream(&self, dloss: Option<&ArrayViewD<'_, T>>, token: &Token<T>) -> (T, T) {
        let place: &[usize] = if self.reduced { &[] } else { &[token.index] };
        let dloss = dloss.map_or(T::ZERO, |dloss| dloss[place]);
        let g = self.share(dloss * token.weight, self.z);
        (g, self.share(dloss * self.lse_square(token), self.z_lse))
    }
}

/// The element of a token, of a tensor that counts as zero where it is absent.
pub(super) fn at<T: Real>(tensor: &Option<ArrayView1<'_, T>>, token: &Token<T>) -> T {
    tensor.as_ref().map_or(T::ZERO, |tensor| tensor[token.index])
}

/// A value for each token, `nothing` for those that do not count.
pub(super) fn spread<T: Real, X: Clone>(
    what: &str,
    tokens: usize,
    nothing: X,
    values: impl Iterator<Item = (Token<T>, X)>,
) -> Result<Vec<X>, Error> {
    let mut all = filled(what, tokens, nothing)?;
    for (token, value) in values {
        all[token.index] = value;
    }
    Ok(all)
}
