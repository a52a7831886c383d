//! Linear attention with decay ("lightning attention").

use crate::operand::{Row, check_sizes};
use crate::{Axis, Error, TokenSequence, TokenSequences};

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

/// By what the state is multiplied before a token is added to it: e to an operand that holds
/// logarithms, none of them above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Decay {
    /// Nothing is forgotten.
    #[default]
    None,
    /// The operand `g_gamma` `[Hk]`: one logarithm per head. [`slopes`](crate::slopes) computes
    /// those that have names.
    PerHead,
    /// The operand `g` `[B, Hk, N]`: one logarithm per token. −∞ forgets everything before it.
    PerToken,
}

/// H_t = e^{g_t} H_{t−1} + k_tᵀ v_t and o_t = σ q_t H_t:
/// [`docs::linear_attention`](crate::docs::linear_attention).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(into = "crate::file::LinearAttentionFile", from = "crate::file::LinearAttentionFile")
)]
pub struct LinearAttention {
    /// The extents of q and k.
    pub extents: LinearExtents,
    /// E: elements of a value, at least 1.
    pub value_dim: usize,
    /// σ; 1 unless set (not 1/√D).
    pub scale: f64,
    /// How states decay.
    pub decay: Decay,
    /// Whether there is an operand `initial_state` `[S, Hk, D, E]`; otherwise states begin at 0.
    pub initial_state: bool,
    /// Whether the states after the last token are returned: `final_state` `[S, Hk, D, E]`.
    pub final_state: bool,
    /// Which tokens belong together. S is their number: B, or that of the packed sequences.
    pub sequences: TokenSequences,
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

    /// Sets E, the elements of a value.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Sets σ.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// Sets how states decay.
    pub fn decay(mut self, decay: Decay) -> Self {
        self.decay = decay;
        self
    }

    /// Adds the operand `initial_state`.
    pub fn initial_state(mut self) -> Self {
        self.initial_state = true;
        self
    }

    /// Adds the result `final_state`.
    pub fn final_state(mut self) -> Self {
        self.final_state = true;
        self
    }

    /// Sets which tokens belong together.
    pub fn sequences(mut self, sequences: TokenSequences) -> Self {
        self.sequences = sequences;
        self
    }

    /// Hq/Hk: the query heads that share a key head.
    pub fn group(&self) -> usize {
        self.extents.query_heads / self.extents.key_heads.max(1)
    }

    /// The sequences in the order of their tokens. The problem must have passed its check.
    pub fn list_sequences(&self) -> Vec<TokenSequence> {
        self.sequences.list(self.extents.batch, self.extents.tokens)
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        let e = &self.extents;
        let extents = [("key_heads", e.key_heads), ("dim", e.dim), ("value_dim", self.value_dim)];
        for (name, extent) in extents {
            if extent == 0 {
                return Err(Error::value(name, "at least 1", extent));
            }
        }
        if !e.query_heads.is_multiple_of(e.key_heads) {
            let expected = format!("a multiple of key_heads ({})", e.key_heads);
            return Err(Error::value("query_heads", expected, e.query_heads));
        }
        if !self.scale.is_finite() {
            return Err(Error::value("scale", "finite", self.scale));
        }
        self.sequences.check(e.batch, e.tokens)?;
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The shape of q and of its gradient.
    pub fn q_shape(&self) -> [usize; 4] {
        let e = &self.extents;
        [e.batch, e.query_heads, e.tokens, e.dim]
    }

    /// The shape of k and of its gradient.
    pub fn k_shape(&self) -> [usize; 4] {
        let e = &self.extents;
        [e.batch, e.key_heads, e.tokens, e.dim]
    }

    /// The shape of v and of its gradient.
    pub fn v_shape(&self) -> [usize; 4] {
        let e = &self.extents;
        [e.batch, e.key_heads, e.tokens, self.value_dim]
    }

    /// The shape of o and of its cotangent.
    pub fn o_shape(&self) -> [usize; 4] {
        let e = &self.extents;
        [e.batch, e.query_heads, e.tokens, self.value_dim]
    }

    /// The shape of the states and of their gradients: a state per sequence and key head.
    pub fn state_shape(&self) -> [usize; 4] {
        let e = &self.extents;
        [self.sequences.count(e.batch), e.key_heads, e.dim, self.value_dim]
    }

    /// The shape of g and of its gradient.
    pub fn g_shape(&self) -> [usize; 3] {
        let e = &self.extents;
        [e.batch, e.key_heads, e.tokens]
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

    /// The table of tensors.
    pub(crate) fn rows(&self) -> Vec<Row> {
        use Axis::{Batch, Dim, KeyHeads, QueryHeads, Sequences, Tokens, ValueDim};
        let state = [Sequences, KeyHeads, Dim, ValueDim];
        let (per_head, per_token) = (self.decay == Decay::PerHead, self.decay == Decay::PerToken);
        let initial = ["dinitial_state", "ddinitial_state", "ginitial_state", "tinitial_state"];
        let finals = ["dfinal_state", "cot_final_state", "gdfinal_state", "tfinal_state"];
        let value = [Batch, KeyHeads, Tokens, ValueDim];
        let output = [Batch, QueryHeads, Tokens, ValueDim];
        vec![
            Row::input("q", ["dq", "ddq", "gq", "tq"], &[Batch, QueryHeads, Tokens, Dim]),
            Row::input("k", ["dk", "ddk", "gk", "tk"], &[Batch, KeyHeads, Tokens, Dim]),
            Row::input("v", ["dv", "ddv", "gv", "tv"], &value),
            Row::input("g_gamma", ["dg_gamma", "ddg_gamma", "gg_gamma", "tg_gamma"], &[KeyHeads])
                .wide()
                .option("decay", per_head),
            Row::input("g", ["dg", "ddg", "gg", "tg"], &[Batch, KeyHeads, Tokens])
                .wide()
                .option("decay", per_token),
            Row::input("initial_state", initial, &state)
                .wide()
                .option("initial_state", self.initial_state)
                .becomes("final_state"),
            Row::input("scale", ["dscale", "ddscale", "gscale", "tscale"], &[])
                .wide()
                .number(self.scale),
            Row::output("o", ["dout", "cot_o", "gdout", "to"], &output).needed(),
            Row::output("final_state", finals, &state)
                .wide()
                .option("final_state", self.final_state),
        ]
    }
}
