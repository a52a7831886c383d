//! Linear cross-entropy, the output layer of a language model fused with its loss: its problem, its
//! tensors and its equations.
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/linear_cross_entropy.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

pub mod shard;

use crate::alternatives::{Other, factors, limits, other, summands};
#[cfg(feature = "serde")]
use crate::file::{is_default, is_one, one};
use crate::operand::{check_sizes, shapes};
use crate::options::options;
use crate::structs::tensors;
use crate::{Axis, Error, Scalar};
use ndarray::{ArrayView1, ArrayView2};

/// Reduction of the losses of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Reduction {
    /// One loss per token.
    None,
    /// Their sum, divided by Z: the sum of the counted tokens' token weights times the class weights
    /// of their targets.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// Their sum, divided by a number that the caller knows.
    By {
        /// Z; finite, not 0.
        normaliser: f64,
    },
}

/// Result of `Mean` when there is nothing left to average: no counted token, or Z = 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum NothingLeft {
    /// A loss of 0, with gradients of 0.
    #[default]
    Zero,
    /// A loss of NaN. Ignored tokens still have gradients of 0.
    Nan,
    /// An error.
    Error,
}

/// Weight of the z-loss of a token, beside its token weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum LseSquareWeight {
    /// By nothing: `Mean` divides its sum by the number of counted tokens.
    #[default]
    Unweighted,
    /// By the class weight of the target: `Mean` divides its sum by Z, as that of the loss.
    ClassWeight,
}

/// Outputs beside the loss, one number per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TokenOutputs {
    /// `lse`: the log-sum-exp of the logits.
    pub lse: bool,
    /// `logprob`: the logarithm of the target's probability.
    pub logprob: bool,
    /// `entropy`: that of the probabilities, in nats.
    pub entropy: bool,
    /// `argmax`: the class with the largest logit, the first of equals.
    pub argmax: bool,
}

/// The cross-entropy of targets against logits h·w, which never exist as a whole:
/// [the equations](self).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LinearCrossEntropy {
    /// T: tokens.
    pub tokens: usize,
    /// D: elements of a hidden state and of a row of w, at least 1.
    pub dim: usize,
    /// V: classes, at least 1.
    pub vocab: usize,
    /// True with an operand `bias` `[V]`.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub bias: bool,
    /// True with an operand `class_weights` `[V]`.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub class_weights: bool,
    /// True with an operand `token_weights` `[T]`.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub token_weights: bool,
    /// Multiplies h·w + bias, before the cap; absent: 1.
    #[cfg_attr(feature = "serde", serde(default = "one", skip_serializing_if = "is_one"))]
    pub logit_scale: f64,
    /// c: logits become c·tanh(·/c), before the temperature.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub softcap: Option<f64>,
    /// Divides the logits, last; absent: 1.
    #[cfg_attr(feature = "serde", serde(default = "one", skip_serializing_if = "is_one"))]
    pub temperature: f64,
    /// The target of tokens that do not count; absent: −100.
    #[cfg_attr(feature = "serde", serde(default = "ignored", skip_serializing_if = "is_ignored"))]
    pub ignore_index: i64,
    /// α in [0, 1]: the part of the target that is spread evenly over all classes.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub label_smoothing: f64,
    /// ζ: adds ζ·lse² to the loss of each token (z-loss).
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub lse_square_scale: f64,
    /// Weight of ζ·lse².
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub lse_square_weight: LseSquareWeight,
    /// Reduction of the losses of the tokens.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub reduction: Reduction,
    /// Result of `Mean` when there is nothing left to average.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub nothing_left: NothingLeft,
    /// Outputs beside the loss.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub outputs: TokenOutputs,
    /// True for gradients in f32 (f64 beside f64), whatever the storage type is: for sums over several
    /// calls.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "is_default"))]
    pub wide_gradients: bool,
}

#[cfg(feature = "serde")]
fn ignored() -> i64 {
    LinearCrossEntropy::IGNORE_INDEX
}

#[cfg(feature = "serde")]
fn is_ignored(value: &i64) -> bool {
    *value == LinearCrossEntropy::IGNORE_INDEX
}

impl LinearCrossEntropy {
    /// The usual target of tokens that do not count.
    pub const IGNORE_INDEX: i64 = -100;

    /// The mean cross-entropy of T tokens over V classes, without options.
    pub fn new(tokens: usize, dim: usize, vocab: usize) -> Self {
        LinearCrossEntropy {
            tokens,
            dim,
            vocab,
            bias: false,
            class_weights: false,
            token_weights: false,
            logit_scale: 1.0,
            softcap: None,
            temperature: 1.0,
            ignore_index: Self::IGNORE_INDEX,
            label_smoothing: 0.0,
            lse_square_scale: 0.0,
            lse_square_weight: LseSquareWeight::Unweighted,
            reduction: Reduction::Mean,
            nothing_left: NothingLeft::Zero,
            outputs: TokenOutputs::default(),
            wide_gradients: false,
        }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        Error::expect_extents(&[("dim", self.dim), ("vocab", self.vocab)])?;
        if i64::try_from(self.vocab).is_err() {
            return Err(Error::value("vocab", "a number of classes that i64 counts", self.vocab));
        }
        Error::expect_positive("softcap", self.softcap.unwrap_or(1.0))?;
        Error::expect_positive("temperature", self.temperature)?;
        Error::expect_finite("logit_scale", self.logit_scale)?;
        Error::expect_finite("lse_square_scale", self.lse_square_scale)?;
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return Err(Error::value("label_smoothing", "in [0, 1]", self.label_smoothing));
        }
        if let Reduction::By { normaliser } = self.reduction
            && !(normaliser.is_finite() && normaliser != 0.0)
        {
            return Err(Error::value("reduction.by.normaliser", "finite, not 0", normaliser));
        }
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The shape of the loss: one number, or one per token where nothing is reduced.
    pub fn loss_shape(&self) -> Vec<usize> {
        self.loss_axes().iter().map(|&axis| self.extent(axis)).collect()
    }

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        match axis {
            Axis::Targets => self.tokens,
            Axis::Dim => self.dim,
            Axis::Classes => self.vocab,
            _ => 1,
        }
    }

    /// The axes of the loss.
    fn loss_axes(&self) -> &'static [Axis] {
        if self.reduction == Reduction::None { &[Axis::Targets] } else { &[] }
    }
}

/// Condition under which a backward pass leaves a tile of tokens and classes out of dh (C17) and dw (C18). The
/// tier chooses the extents of a tile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Filter {
    /// Every |da_iv| of the tile is below a threshold (C36).
    Below {
        /// The threshold; it sees what reaches the tokens through the cotangents, too.
        eps: f64,
    },
    /// No bound of the certificate exceeds these budgets. The tiles of a block of tokens are tried in the order
    /// of classes, those of a tile of classes in the order of tokens.
    Within {
        /// Of every ‖error of dh_i‖ (C37).
        dh: f64,
        /// Of every ‖error of dw_v‖ (C38).
        dw: f64,
    },
}

impl Filter {
    /// Fails at a threshold or a budget that is below 0, infinite or NaN.
    pub fn check(&self) -> Result<(), Error> {
        let expect = |name: &str, x: f64| match x.is_finite() && x >= 0.0 {
            true => Ok(()),
            false => Err(Error::value(format!("filter.{name}"), "finite, at least 0", x)),
        };
        match *self {
            Filter::Below { eps } => expect("eps", eps),
            Filter::Within { dh, dw } => expect("dh", dh).and_then(|()| expect("dw", dw)),
        }
    }
}

tensors! {
    LinearCrossEntropy as problem, gradients wanted (wide problem.wide_gradients), no_jvp;
    inputs {
        /// Hidden states.
        h: Storage [Targets Dim] always => dh "(C17)", ddh, gh "(C28)", th;
        /// The rows of the head, one per class; of a shard, those of its classes.
        w: Storage [Classes Dim] always => dw "(C18)", ddw, gw "(C29)", tw;
        /// Added to h·w; of a shard, that of its classes.
        bias: Storage [Classes] ("bias" problem.bias) => dbias "(C19)", ddbias, gbias "(C30)", tbias;
        /// The class of each token, or the problem's `ignore_index`.
        targets: Integer [Targets] always;
        /// The weights of all classes.
        class_weights: Wide [Classes] ("class_weights" problem.class_weights);
        /// The weights of the tokens.
        token_weights: Wide [Targets] ("token_weights" problem.token_weights);
    }
    numbers {}
    outputs {
        /// (C9): one number, `[]`, or one per token, `[T]`, where nothing is reduced.
        loss: Wide (problem.loss_axes()) always unsaved => zero dloss, cot_loss, gdloss "(C31)", tloss;
        /// (C3); ignored tokens: 0.
        lse: Wide [Targets] ("outputs.lse" problem.outputs.lse) unsaved
            => zero dlse, cot_lse, gdlse "(C22)", tlse;
        /// (C5); ignored tokens: 0.
        logprob: Wide [Targets] ("outputs.logprob" problem.outputs.logprob) unsaved
            => zero dlogprob, cot_logprob, gdlogprob "(C32)", tlogprob;
        /// (C6); ignored tokens: 0.
        entropy: Wide [Targets] ("outputs.entropy" problem.outputs.entropy) unsaved
            => zero dentropy, cot_entropy, gdentropy "(C24)", tentropy;
        /// The class with the largest logit; ignored tokens: −1.
        argmax: Integer [Targets] ("outputs.argmax" problem.outputs.argmax) unsaved;
        /// The number of tokens that count.
        n_valid: Integer [] always unsaved;
        /// Z of (C10).
        normaliser: Wide [] always unsaved;
    }
}

shapes! { LinearCrossEntropy {
    /// The shape of h and of its gradient.
    h_shape: 2 [Targets Dim];
    /// The shape of w and of its gradient.
    w_shape: 2 [Classes Dim];
} }

options! { LinearCrossEntropy {
    /// Adds the operand `bias`.
    bias() => bias = true, or tensor;
    /// Adds the operand `class_weights`.
    class_weights() => class_weights = true, or tensor;
    /// Adds the operand `token_weights`.
    token_weights() => token_weights = true, or tensor;
    /// Multiplies h·w + bias, before the cap.
    logit_scale(scale: f64) => logit_scale = scale, or others(x => factors(x.logit_scale));
    /// Caps the logits: c·tanh(·/c), before the temperature.
    softcap(cap: f64) => softcap = Some(cap), or others(x => limits(x.softcap));
    /// Divides the logits, last.
    temperature(temperature: f64) => temperature = temperature,
        or others(x => factors(x.temperature));
    /// Sets the target of tokens that do not count.
    ignore_index(target: i64) => ignore_index = target, or tensor;
    /// Sets α, the part of the target that is spread evenly over all classes.
    label_smoothing(alpha: f64) => label_smoothing = alpha, or others(x => smoothing(x));
    /// Sets ζ of the z-loss ζ·lse².
    lse_square_scale(scale: f64) => lse_square_scale = scale,
        or others(x => summands(x.lse_square_scale));
    /// Sets what the z-loss is weighted by.
    lse_square_weight(weight: LseSquareWeight) => lse_square_weight = weight,
        or others(x => square_weights(x.lse_square_weight));
    /// Sets what becomes of the losses of the tokens.
    reduction(reduction: Reduction) => reduction = reduction,
        or others(x => reductions(x.reduction));
    /// Sets what `Mean` returns when there is nothing left to average.
    nothing_left(result: NothingLeft) => nothing_left = result, or none;
    /// Sets what is returned beside the loss.
    outputs(outputs: TokenOutputs) => outputs = outputs, or none;
    /// Has gradients in f32, whatever the storage type is.
    wide_gradients() => wide_gradients = true, or none;
} }

impl<'a, T: Scalar> Inputs<'a, T> {
    /// Inputs without bias and weights.
    pub fn new(h: ArrayView2<'a, T>, w: ArrayView2<'a, T>, targets: ArrayView1<'a, i64>) -> Self {
        Inputs { h, w, bias: None, targets, class_weights: None, token_weights: None }
    }
}

impl<T: Scalar> Default for Cotangents<'_, T> {
    fn default() -> Self {
        Cotangents { dloss: None, dlse: None, dlogprob: None, dentropy: None }
    }
}

impl LinearCrossEntropy {
    /// Label smoothing that spreads `alpha` over the *other* classes, as Megatron-LM means it: then
    /// α = alpha·V/(V − 1), with V of all shards together. A single class has no others: α = alpha.
    pub fn label_smoothing_over_others(self, alpha: f64) -> Self {
        let classes = self.vocab as f64;
        let alpha = if self.vocab > 1 { alpha * classes / (classes - 1.0) } else { alpha };
        self.label_smoothing(alpha)
    }

    /// The target of a token that counts, as a class. Fails at one that is no class.
    pub fn class_of(&self, token: usize, target: i64) -> Result<usize, Error> {
        let class = usize::try_from(target).ok().filter(|&class| class < self.vocab);
        class.ok_or_else(|| {
            let ignored = self.ignore_index;
            let expected = format!("a class below {} or the ignored {ignored}", self.vocab);
            Error::value(format!("targets[{token}]"), expected, target)
        })
    }

    /// Z and Z_z of (C10), from the number of tokens that count and κ_i cw_{y_i} of each. Fails where there is
    /// nothing left to average, if the problem wants that.
    pub fn normalisers(
        &self,
        counted: usize,
        weights: impl Iterator<Item = f64>,
    ) -> Result<(f64, f64), Error> {
        let z: f64 = match self.reduction {
            Reduction::None | Reduction::Sum => return Ok((1.0, 1.0)),
            Reduction::By { normaliser } => return Ok((normaliser, normaliser)),
            // From 0: an empty sum of floats would begin with −0.
            Reduction::Mean => weights.fold(0.0, |sum, x| sum + x),
        };
        if z == 0.0 && self.nothing_left == NothingLeft::Error {
            let expected = "not 0, as there must be something left to average";
            return Err(Error::value("normaliser", expected, z));
        }
        Ok(match self.lse_square_weight {
            LseSquareWeight::Unweighted => (z, counted as f64),
            LseSquareWeight::ClassWeight => (z, z),
        })
    }
}

/// Misreadings of a reduction; other normalisers follow from the weights of the tokens, which no problem
/// holds.
fn reductions(reduction: Reduction) -> Vec<Other<Reduction>> {
    match reduction {
        Reduction::None => Vec::new(),
        Reduction::Sum => vec![other("mean", "is a mean", Reduction::Mean)],
        Reduction::Mean => vec![other("sum", "is a sum", Reduction::Sum)],
        Reduction::By { normaliser } => vec![
            other("sum", "is a sum", Reduction::Sum),
            other("mean", "is a mean", Reduction::Mean),
            other(
                "inverted",
                "multiplies by the normaliser",
                Reduction::By { normaliser: 1.0 / normaliser },
            ),
        ],
    }
}

/// Misreadings of the weight of the z-loss.
fn square_weights(weight: LseSquareWeight) -> Vec<Other<LseSquareWeight>> {
    match weight {
        LseSquareWeight::Unweighted => {
            vec![other("class-weight", "is that of the class", LseSquareWeight::ClassWeight)]
        }
        LseSquareWeight::ClassWeight => {
            vec![other("absent", "is not applied", LseSquareWeight::Unweighted)]
        }
    }
}

/// Misreadings of a label smoothing, Megatron-LM's among them, which is spread over the other classes alone.
fn smoothing(loss: &LinearCrossEntropy) -> Vec<Other<f64>> {
    let mut list = summands(loss.label_smoothing);
    if loss.label_smoothing > 0.0 && loss.vocab > 1 {
        let classes = loss.vocab as f64;
        let over = loss.label_smoothing * classes / (classes - 1.0);
        list.push(other("over-others", "is spread over the other classes alone", over));
        let own = loss.label_smoothing * (classes - 1.0) / classes;
        list.push(other("over-all", "is spread over all classes, but meant for the others", own));
    }
    list
}
