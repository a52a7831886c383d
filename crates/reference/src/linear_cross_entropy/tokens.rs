//! The tokens that count, and their weights:
//!
//! ```text
//! (C10) Z   = Σ_i κ_i cw_{y_i},  Z_z = n or Z      with `Mean`; the given number with `By`; else 1
//! (C12) g_i = dloss κ_i / Z,     γ_i = dloss ζ κ_i ω_i / Z_z
//! ```

use super::head::matrix;
use super::{Inputs, weighted};
use crate::scalar::Real;
use crate::tensor::{contiguous, filled, reserve};
use etalon_problem::{Error, LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction};
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewD, Axis, aview1};
use std::borrow::Cow;
use std::ops::Range;

/// Tokens that are computed together.
const BLOCK: usize = 64;

/// A token that counts.
#[derive(Clone, Copy)]
pub(super) struct Token<T> {
    /// Its number in the arrays.
    pub index: usize,
    /// y_i
    pub target: usize,
    /// κ_i
    pub weight: T,
    /// cw_{y_i}
    pub class_weight: T,
}

/// The tokens that count, in their order, and by what their losses are divided.
pub(super) struct Tokens<'a, T: Clone> {
    problem: &'a LinearCrossEntropy,
    pub counted: Vec<Token<T>>,
    /// Their rows of h.
    h: Vec<T>,
    class_weights: Option<Cow<'a, [T]>>,
    /// Z of (C10).
    pub z: T,
    /// Z_z of (C10).
    z_lse: T,
}

impl<'a, T: Real> Tokens<'a, T> {
    pub fn new(problem: &'a LinearCrossEntropy, inputs: &'a Inputs<'_, T>) -> Result<Self, Error> {
        let class_weights = inputs.class_weights.as_ref();
        let class_weights =
            class_weights.map(|x| contiguous("class_weights", x.view())).transpose()?;
        let counted = counted(problem, inputs, class_weights.as_deref())?;
        let (z, z_lse) = normalisers(problem, &counted)?;
        let elements = counted.len().saturating_mul(problem.dim);
        let mut h = reserve("the counted rows of h", elements)?;
        for token in &counted {
            h.extend(inputs.h.index_axis(Axis(0), token.index).iter().copied());
        }
        Ok(Tokens { problem, counted, h, class_weights, z, z_lse })
    }

    /// The weights of some classes, if there are any.
    pub fn class_weights(&self, classes: &Range<usize>) -> Option<&[T]> {
        self.class_weights.as_deref().map(|weights| &weights[classes.clone()])
    }

    /// Block by block: the numbers of its tokens, and their rows of h.
    pub fn blocks(&self) -> Vec<(Range<usize>, ArrayView2<'_, T>)> {
        let tokens = self.counted.len();
        let starts = (0..tokens).step_by(BLOCK);
        let dim = self.problem.dim;
        let blocks = starts.zip(self.h.chunks(BLOCK.saturating_mul(dim)));
        blocks.map(|(start, h)| (start..tokens.min(start + BLOCK), matrix(h, dim))).collect()
    }

    /// A value for each token `[T]`, from those of the tokens that count; `nothing` for the others.
    pub fn spread<X: Clone>(
        &self,
        what: &str,
        nothing: X,
        values: impl IntoIterator<Item = X>,
    ) -> Result<Vec<X>, Error> {
        let mut all = filled(what, self.problem.tokens, nothing)?;
        for (token, value) in self.counted.iter().zip(values) {
            all[token.index] = value;
        }
        Ok(all)
    }

    /// x / z, or what the problem wants where there is nothing to average.
    fn share(&self, x: T, z: T) -> T {
        if self.problem.reduction != Reduction::Mean || self.z != T::ZERO {
            return x.over(z);
        }
        match self.problem.nothing_left {
            NothingLeft::Zero => T::ZERO,
            NothingLeft::Nan | NothingLeft::Error => x * T::from_f64(f64::NAN),
        }
    }

    /// ζ κ_i ω_i
    fn lse_square(&self, token: &Token<T>) -> T {
        let weighted = match self.problem.lse_square_weight {
            LseSquareWeight::Unweighted => token.weight,
            LseSquareWeight::ClassWeight => token.weight * token.class_weight,
        };
        T::from_f64(self.problem.lse_square_scale) * weighted
    }

    /// The sum of the cross-entropies (C7) and of the squares of lse (C9), from both of every token that
    /// counts: one number, or one per such token.
    pub fn loss(&self, terms: impl Iterator<Item = (T, T)>) -> Result<Vec<T>, Error> {
        let weighted = self.counted.iter().zip(terms).map(|(token, (cross_entropy, lse))| {
            let square = weighted(self.lse_square(token), lse * lse);
            (weighted(token.weight, cross_entropy), square)
        });
        if self.problem.reduction == Reduction::None {
            let mut losses = reserve("the losses", self.counted.len())?;
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
        let own = [token.index];
        let place: &[usize] = if self.problem.reduction == Reduction::None { &own } else { &[] };
        let dloss = dloss.map_or(T::ZERO, |dloss| dloss[place]);
        let g = self.share(dloss * token.weight, self.z);
        (g, self.share(dloss * self.lse_square(token), self.z_lse))
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

/// Z and Z_z of (C10). Fails where there is nothing left to average, if the problem wants that.
fn normalisers<T: Real>(
    problem: &LinearCrossEntropy,
    counted: &[Token<T>],
) -> Result<(T, T), Error> {
    let mut z = T::ZERO;
    match problem.reduction {
        Reduction::None | Reduction::Sum => return Ok((T::ONE, T::ONE)),
        Reduction::By { normaliser } => {
            return Ok((T::from_f64(normaliser), T::from_f64(normaliser)));
        }
        Reduction::Mean => counted.iter().for_each(|token| z += token.weight * token.class_weight),
    }
    if z == T::ZERO && problem.nothing_left == NothingLeft::Error {
        let expected = "not 0, as there must be something left to average";
        return Err(Error::value("normaliser", expected, z.to_f64()));
    }
    Ok(match problem.lse_square_weight {
        LseSquareWeight::Unweighted => (z, T::from_f64(counted.len() as f64)),
        LseSquareWeight::ClassWeight => (z, z),
    })
}

/// Writes rows of the tokens that count to their places in a tensor `[T, D]`.
pub(super) fn scatter<'a, T: Real>(
    tensor: &mut Array2<T>,
    tokens: &[Token<T>],
    rows: impl Iterator<Item = &'a [T]>,
) {
    for (token, row) in tokens.iter().zip(rows) {
        tensor.row_mut(token.index).assign(&aview1(row));
    }
}

/// The element of a token, of a tensor that counts as zero where it is absent.
pub(super) fn at<T: Real>(tensor: &Option<ArrayView1<'_, T>>, token: &Token<T>) -> T {
    tensor.as_ref().map_or(T::ZERO, |tensor| tensor[token.index])
}
