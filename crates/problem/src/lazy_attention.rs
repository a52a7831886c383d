//! Lazy attention, Elastic-Softmax with a learned bias by distance: its problem, its tensors and its equations.
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/lazy_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

mod figures;
mod stats;

pub use figures::Figure;
pub use stats::{SpeedUp, Stats};

use crate::alternatives::{self, Other, aligned, other, turned};
use crate::operand::{check_sizes, shapes};
use crate::options::options;
use crate::structs::tensors;
use crate::{Align, Axis, Error, Extents, Mask, Scalar, Scores, Sequence, Sequences, mask};
use ndarray::{ArrayView1, ArrayView4};

/// A learned bias for each distance d = i′ − j in [0, width); a key farther away, or ahead of the
/// query, gets none. It never hides a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DistanceBias {
    /// W: distances with a bias, at least 1.
    pub width: usize,
    /// Alignment by which distances are counted: i′ = i + m − n (bottom right), or i′ = i (top left).
    #[cfg_attr(feature = "serde", serde(default))]
    pub align: Align,
}

impl DistanceBias {
    /// The distance d of query `i` from key `j` of a sequence, where it has a bias: its place in
    /// the last axis of `bias`.
    pub fn distance(&self, sequence: &Sequence, i: usize, j: usize) -> Option<usize> {
        let distance = match self.align {
            Align::TopLeft => i.checked_sub(j),
            Align::BottomRight => (i + sequence.keys).checked_sub(j + sequence.queries),
        };
        distance.filter(|&d| d < self.width)
    }
}

/// τ = −|θ + 1|: never positive, and −1 at θ = 0. So the authors of lazy attention learn it.
pub fn tau_from_theta(theta: f64) -> f64 {
    -(theta + 1.0).abs()
}

/// The gradient of θ from that of τ = −|θ + 1|: ∓dτ on the two sides of θ = −1, and 0 there, where
/// τ has none (every number of [−|dτ|, |dτ|] is a sub-gradient; this is the one of least norm).
pub fn dtheta(theta: f64, dtau: f64) -> f64 {
    match theta + 1.0 {
        above if above > 0.0 => -dtau,
        below if below < 0.0 => dtau,
        0.0 => 0.0,
        nan => nan,
    }
}

/// o = Σ_j max(P_ij + τ_h/n_i, 0) v_j: [the equations](self).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "LazyAttentionFile", from = "LazyAttentionFile"))]
pub struct LazyAttention {
    /// The scores and which of them count. Softcap, sinks and additive bias are not lazy
    /// attention's: the check refuses them.
    pub scores: Scores,
    /// Distances of the operand `bias` `[Hq, W]`, if there is one.
    pub bias: Option<DistanceBias>,
    /// E: elements of a value, at least 1.
    pub value_dim: usize,
}

#[cfg(feature = "serde")]
crate::file::scores! {
    /// Lazy attention.
    LazyAttentionFile: LazyAttention,
    [value_dim]
    /// The distances of the tensor `bias` [query_heads, width], if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bias: Option<DistanceBias> = bias,
    /// Visible pairs; absent: causal, aligned at the bottom right.
    #[serde(default = "Mask::causal", skip_serializing_if = "crate::file::is_causal")]
    mask: Mask = scores.mask,
}

impl LazyAttention {
    /// Causal lazy attention without a bias, with values as wide as the keys.
    pub fn new(extents: Extents) -> Self {
        let mut scores = Scores::new(extents);
        scores.mask = Mask::causal();
        LazyAttention { scores, bias: None, value_dim: extents.dim }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        Error::expect_extents(&[("bias.width", self.bias.map_or(1, |bias| bias.width))])?;
        let foreign = [
            ("softcap", self.scores.softcap.is_some()),
            ("sinks", self.scores.sinks),
            ("scores.bias", self.scores.bias.is_some()),
        ];
        if let Some((name, _)) = foreign.into_iter().find(|(_, set)| *set) {
            return Err(Error::value(name, "absent from lazy_attention", "set"));
        }
        // A value_dim of 0 that nobody gave is a dim of 0.
        self.scores.check()?;
        Error::expect_extents(&[("value_dim", self.value_dim)])?;
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The shape of the bias and of its gradient, if there is one.
    pub fn bias_shape(&self) -> Option<[usize; 2]> {
        self.bias.map(|bias| [self.scores.extents.query_heads, bias.width])
    }

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        match axis {
            Axis::ValueDim => self.value_dim,
            Axis::Distances => self.bias.map_or(1, |bias| bias.width),
            _ => self.scores.extent(axis),
        }
    }
}

shapes! { LazyAttention {
    /// The shape of v and of its gradient.
    v_shape: 4 [Batch KeyHeads Keys ValueDim];
    /// The shape of o and of its cotangent.
    o_shape: 4 [Batch QueryHeads Queries ValueDim];
} }

options! { LazyAttention {
    /// Sets E, the elements of a value.
    value_dim(elements: usize) => value_dim = elements, or none;
    /// Sets σ; without it 1/√D.
    softmax_scale(scale: f64) => scores.softmax_scale = Some(scale),
        or others(x => alternatives::scales(&x.scores));
    /// Adds the operand `bias` for distances below `width`, counted from the last query and key.
    bias(width: usize) => bias = Some(DistanceBias { width, align: Align::BottomRight }),
        or others(x => distances(x.bias));
    /// Sets which pairs count.
    mask(mask: Mask) => scores.mask = mask, or others(x => mask::others(&x.scores));
    /// Sets which rows belong together.
    sequences(sequences: Sequences) => scores.sequences = sequences,
        or others(x => alternatives::sequences(&x.scores));
} }

impl<'a, T: Scalar> Inputs<'a, T> {
    /// Inputs without a bias.
    pub fn new(
        q: ArrayView4<'a, T>,
        k: ArrayView4<'a, T>,
        v: ArrayView4<'a, T>,
        tau: ArrayView1<'a, T::Wide>,
    ) -> Self {
        Inputs { q, k, v, bias: None, tau }
    }
}

impl<'a, T: Scalar> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dlse: None }
    }
}

tensors! {
    LazyAttention as problem, gradients each, no_jvp;
    inputs {
        /// Queries.
        q: Storage [Batch QueryHeads Queries Dim] always => dq "(E10)", ddq, gq "(E26)", tq;
        /// Keys.
        k: Storage [Batch KeyHeads Keys Dim] always => dk "(E11)", ddk, gk "(E27)", tk;
        /// Values.
        v: Storage [Batch KeyHeads Keys ValueDim] always => dv "(E12)", ddv, gv "(E28)", tv;
        /// A bias for each distance below W.
        bias: Wide [QueryHeads Distances] ("bias" problem.bias.is_some())
            => dbias "(E13)", ddbias, gbias "(E29)", tbias;
        /// Offset of the weights of a row, summed over all its keys; below 0 it filters.
        tau: Wide [QueryHeads] always => dtau "(E14)", ddtau, gtau "(E30)", ttau;
    }
    numbers {}
    outputs {
        /// o of (E6).
        o: Storage [Batch QueryHeads Queries ValueDim] always unsaved
            => needed dout, cot_o, gdout "(E23)", to;
        /// lse of (E3), over every visible key, active or not.
        lse: Wide [Batch QueryHeads Queries] always saved => zero dlse, cot_lse, gdlse "(E21)", tlse;
        /// Σ_j a_ij P_ij v_j, if the tier returns it: its product with dout is Δ, (E47).
        pv_sum: Wide [Batch QueryHeads Queries ValueDim] optional saved;
    }
}

/// Misreadings of a bias by distance.
fn distances(bias: Option<DistanceBias>) -> Vec<Other<Option<DistanceBias>>> {
    let Some(bias) = bias else { return Vec::new() };
    let align = turned(bias.align);
    let text = format!("counts distances {}", aligned(align));
    vec![other("other-end", text, Some(DistanceBias { align, ..bias }))]
}
