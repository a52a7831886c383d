//! Linear attention with decay ("lightning attention"): its problem, its tensors and its equations.
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/linear_attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

use crate::alternatives::{Other, factors, other, token_sequences};
use crate::operand::{check_sizes, shapes};
use crate::options::options;
use crate::structs::{operands, results, tensors};
use crate::{Axis, Error, Scalar, TokenSequence, TokenSequences, named};
use ndarray::ArrayView4;

/// The extents of q and k of linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearExtents {
    /// B: batch elements.
    pub batch: usize,
    /// Hq: query heads, a multiple of `key_heads`.
    pub query_heads: usize,
    /// Hk: key and value heads, at least 1; each has a state. Query head h uses key head h / (Hq/Hk).
    pub key_heads: usize,
    /// N: tokens (packed sequences: of all sequences together).
    pub tokens: usize,
    /// D: elements of a query and of a key, at least 1.
    pub dim: usize,
}

named! {
    /// By what the state is multiplied before a token is added to it: e to an operand that holds
    /// logarithms, none of them above 0.
    #[derive(Default)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    Decay, "decay" {
        /// Nothing is forgotten.
        #[default]
        None = "none",
        /// The operand `g_gamma` `[Hk]`: one logarithm per head. [`slopes`](crate::slopes) computes
        /// those that have names.
        PerHead = "per_head",
        /// The operand `g` `[B, Hk, N]`: one logarithm per token. −∞ forgets everything before it.
        PerToken = "per_token",
    }
}

/// H_t = e^{g_t} H_{t−1} + k_tᵀ v_t and o_t = σ q_t H_t:
/// [the equations](self).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "LinearAttentionFile", from = "LinearAttentionFile"))]
pub struct LinearAttention {
    /// The extents of q and k.
    pub extents: LinearExtents,
    /// E: elements of a value, at least 1.
    pub value_dim: usize,
    /// σ; 1 unless set (not 1/√D).
    pub scale: f64,
    /// Decay of the states.
    pub decay: Decay,
    /// True with an operand `initial_state` `[S, Hk, D, E]`; otherwise states begin at 0.
    pub initial_state: bool,
    /// True to return the states after the last token: `final_state` `[S, Hk, D, E]`.
    pub final_state: bool,
    /// Division of the tokens into sequences. S is the number of sequences: B, or that of the packed ones.
    pub sequences: TokenSequences,
}

#[cfg(feature = "serde")]
crate::file::flat! {
    /// Linear attention with decay.
    LinearAttentionFile: LinearAttention,
    LinearExtents at extents {
        /// B: batch elements.
        batch,
        /// Hq: query heads, a multiple of key_heads.
        query_heads,
        /// Hk: key and value heads.
        key_heads,
        /// N: tokens (packed sequences: of all sequences together).
        tokens,
        /// D: elements of a query and of a key.
        dim,
    }
    [value_dim]
    /// σ; absent: 1.
    #[serde(default = "crate::file::one", skip_serializing_if = "crate::file::is_one")]
    scale: f64 = scale,
    /// Decay of the states; absent: none.
    #[serde(default, skip_serializing_if = "crate::file::is_default")]
    decay: Decay = decay,
    /// True with a tensor `initial_state` [sequences, key_heads, dim, value_dim].
    #[serde(default, skip_serializing_if = "crate::file::is_default")]
    initial_state: bool = initial_state,
    /// True to return `final_state`.
    #[serde(default, skip_serializing_if = "crate::file::is_default")]
    final_state: bool = final_state,
    /// Division of the tokens into sequences; absent: dense.
    #[serde(default, skip_serializing_if = "crate::file::is_default")]
    sequences: TokenSequences = sequences,
}

impl LinearAttention {
    /// Linear attention without options, with values as wide as the keys.
    pub fn new(extents: LinearExtents) -> Self {
        LinearAttention {
            extents,
            value_dim: extents.dim,
            scale: 1.0,
            decay: Decay::None,
            initial_state: false,
            final_state: false,
            sequences: TokenSequences::Dense,
        }
    }

    /// Hq/Hk: the query heads that share a key head.
    pub fn group(&self) -> usize {
        self.extents.query_heads / self.extents.key_heads.max(1)
    }

    /// Number of sequences: none where there is neither a token nor a state, since no tensor
    /// then vouches for the number of batch elements. The problem must have passed its check.
    pub fn sequence_count(&self) -> usize {
        if self.extents.tokens == 0 && !self.initial_state && !self.final_state {
            return 0;
        }
        self.sequences.count(self.extents.batch)
    }

    /// The sequences in the order of their tokens, [so many](Self::sequence_count). The problem must
    /// have passed its check.
    pub fn list_sequences(&self) -> Vec<TokenSequence> {
        if self.sequence_count() == 0 {
            return Vec::new();
        }
        self.sequences.list(self.extents.batch, self.extents.tokens)
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        let e = &self.extents;
        let extents = [("key_heads", e.key_heads), ("dim", e.dim), ("value_dim", self.value_dim)];
        Error::expect_extents(&extents)?;
        Error::expect_groups(e.query_heads, e.key_heads)?;
        Error::expect_finite("scale", self.scale)?;
        self.sequences.check(e.batch, e.tokens)?;
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        let e = &self.extents;
        match axis {
            Axis::Batch => e.batch,
            Axis::QueryHeads => e.query_heads,
            Axis::KeyHeads => e.key_heads,
            Axis::Tokens => e.tokens,
            Axis::Dim => e.dim,
            Axis::ValueDim => self.value_dim,
            Axis::Sequences => self.sequences.count(e.batch),
            _ => 1,
        }
    }
}

shapes! { LinearAttention {
    /// The shape of q and of its gradient.
    q_shape: 4 [Batch QueryHeads Tokens Dim];
    /// The shape of k and of its gradient.
    k_shape: 4 [Batch KeyHeads Tokens Dim];
    /// The shape of v and of its gradient.
    v_shape: 4 [Batch KeyHeads Tokens ValueDim];
    /// The shape of o and of its cotangent.
    o_shape: 4 [Batch QueryHeads Tokens ValueDim];
    /// The shape of the states and of their gradients: a state per sequence and key head.
    state_shape: 4 [Sequences KeyHeads Dim ValueDim];
    /// The shape of g and of its gradient.
    g_shape: 3 [Batch KeyHeads Tokens];
} }

options! { LinearAttention {
    /// Sets E, the elements of a value.
    value_dim(elements: usize) => value_dim = elements, or none;
    /// Sets σ.
    scale(scale: f64) => scale = scale, or others(x => factor(x));
    /// Sets how states decay.
    decay(decay: Decay) => decay = decay, or tensor;
    /// Adds the operand `initial_state`.
    initial_state() => initial_state = true, or tensor;
    /// Adds the result `final_state`.
    final_state() => final_state = true, or none;
    /// Sets which tokens belong together.
    sequences(sequences: TokenSequences) => sequences = sequences,
        or others(x => token_sequences(&x.sequences));
} }

tensors! {
    LinearAttention as problem, gradients each, no_jvp;
    inputs {
        /// Queries.
        q: Storage [Batch QueryHeads Tokens Dim] always => dq "(R4)", ddq, gq "(R14)", tq;
        /// Keys.
        k: Storage [Batch KeyHeads Tokens Dim] always => dk "(R5)", ddk, gk "(R15)", tk;
        /// Values.
        v: Storage [Batch KeyHeads Tokens ValueDim] always => dv "(R6)", ddv, gv "(R16)", tv;
        /// A log-decay per key head.
        g_gamma: Wide [KeyHeads] ("decay" problem.decay == Decay::PerHead)
            => dg_gamma "(R7), summed over tokens and sequences", ddg_gamma, gg_gamma "(R17), summed",
            tg_gamma;
        /// A log-decay per token.
        g: Wide [Batch KeyHeads Tokens] ("decay" problem.decay == Decay::PerToken)
            => dg "(R7)", ddg, gg "(R17)", tg;
        /// H_0.
        initial_state: Wide [Sequences KeyHeads Dim ValueDim] ("initial_state" problem.initial_state)
            becomes final_state
            => dinitial_state "(R8)", ddinitial_state, ginitial_state "(R18)", tinitial_state;
    }
    numbers {
        scale problem.scale => dscale "(R9)", ddscale, gscale "(R19)", tscale;
    }
    outputs {
        /// o of (R2).
        o: Storage [Batch QueryHeads Tokens ValueDim] always unsaved
            => needed dout, cot_o, gdout "(R12)", to;
        /// H_n of (R1).
        final_state: Wide [Sequences KeyHeads Dim ValueDim] ("final_state" problem.final_state) unsaved
            => zero dfinal_state, cot_final_state, gdfinal_state "(R11)", tfinal_state;
    }
}

operands! {
    /// Operands of the step to the next token of every batch element.
    StepInputs {
        /// Queries.
        q: Storage [Batch QueryHeads Dim] always,
        /// Keys.
        k: Storage [Batch KeyHeads Dim] always,
        /// Values.
        v: Storage [Batch KeyHeads ValueDim] always,
        /// A log-decay per key head, where the problem decays so.
        g_gamma: Wide [KeyHeads] optional,
        /// The token's log-decay, where the problem decays per token.
        g: Wide [Batch KeyHeads] optional,
        /// H_{t−1}; absent: the place of the state after the token holds it.
        initial_state: Wide [Batch KeyHeads Dim ValueDim] optional,
    }
}

results! {
    /// Results of the step to the next token.
    StepOutput, StepOutputMut {
        /// o of (R2).
        o: Storage [Batch QueryHeads ValueDim] always,
        /// H_t of (R1).
        final_state: Wide [Batch KeyHeads Dim ValueDim] always,
    }
}

impl<'a, T: Scalar> Inputs<'a, T> {
    /// Inputs without decay and initial state.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, g_gamma: None, g: None, initial_state: None }
    }
}

impl<'a, T: Scalar> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dfinal_state: None }
    }
}

/// Other factors that the scale may be taken for: other libraries have 1/√D where none is given.
fn factor(problem: &LinearAttention) -> Vec<Other<f64>> {
    let mut list = factors(problem.scale);
    let usual = 1.0 / (problem.extents.dim as f64).sqrt();
    list.push(other("usual", "is not read: it is 1/√D", usual));
    list
}
