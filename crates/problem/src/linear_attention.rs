//! Linear attention with decay ("lightning attention").

use crate::{Error, Operand, Pass, Role, TokenSequence, TokenSequences};

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
        // A step's states are what every pass works with, also where none goes in or comes out.
        let operands = [self.operands(Pass::Backward), self.operands(Pass::Step)];
        operands.iter().flatten().try_for_each(Operand::check_size)
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

    /// The tensors of a pass: inputs, cotangents and outputs, in this order; none where the
    /// algorithm does not have the pass. `step` takes one token of every batch element, without the
    /// axis of the tokens, and the states always.
    pub fn operands(&self, pass: Pass) -> Vec<Operand> {
        use Role::{Cotangent, Input, OptionalCotangent, Output};
        let (q, k, v, o) = (self.q_shape(), self.k_shape(), self.v_shape(), self.o_shape());
        let state = self.state_shape();
        let mut list = match pass {
            Pass::Step => return self.step_operands(),
            Pass::Jvp => return Vec::new(),
            _ => vec![
                Operand::storage("q", &q, Input),
                Operand::storage("k", &k, Input),
                Operand::storage("v", &v, Input),
            ],
        };
        list.extend(self.decay_operand(["g_gamma", "g"], Input));
        list.extend(self.initial_state.then(|| Operand::wide("initial_state", &state, Input)));
        if pass != Pass::Forward {
            list.push(Operand::storage("dout", &o, Cotangent));
            let dfinal = || Operand::wide("dfinal_state", &state, OptionalCotangent);
            list.extend(self.final_state.then(dfinal));
        }
        match pass {
            Pass::Forward => {
                list.push(Operand::storage("o", &o, Output));
                list.extend(self.final_state.then(|| Operand::wide("final_state", &state, Output)));
            }
            Pass::Backward => list.extend(self.gradients(
                ["dq", "dk", "dv", "dg_gamma", "dg", "dinitial_state", "dscale"],
                Output,
            )),
            _ => {
                list.extend(self.gradients(
                    ["ddq", "ddk", "ddv", "ddg_gamma", "ddg", "ddinitial_state", "ddscale"],
                    OptionalCotangent,
                ));
                list.push(Operand::storage("cot_o", &o, OptionalCotangent));
                let cotangent = || Operand::wide("cot_final_state", &state, OptionalCotangent);
                list.extend(self.final_state.then(cotangent));
                list.extend(self.gradients(
                    ["gq", "gk", "gv", "gg_gamma", "gg", "ginitial_state", "gscale"],
                    Output,
                ));
                list.push(Operand::storage("gdout", &o, Output));
                let gradient = || Operand::wide("gdfinal_state", &state, Output);
                list.extend(self.final_state.then(gradient));
            }
        }
        list
    }

    fn gradients(&self, names: [&'static str; 7], role: Role) -> Vec<Operand> {
        let [q, k, v, g_gamma, g, initial_state, scale] = names;
        let mut list = vec![
            Operand::storage(q, &self.q_shape(), role),
            Operand::storage(k, &self.k_shape(), role),
            Operand::storage(v, &self.v_shape(), role),
        ];
        list.extend(self.decay_operand([g_gamma, g], role));
        let state = || Operand::wide(initial_state, &self.state_shape(), role);
        list.extend(self.initial_state.then(state));
        list.push(Operand::wide(scale, &[], role));
        list
    }

    fn decay_operand(&self, [g_gamma, g]: [&'static str; 2], role: Role) -> Option<Operand> {
        match self.decay {
            Decay::None => None,
            Decay::PerHead => Some(Operand::wide(g_gamma, &[self.extents.key_heads], role)),
            Decay::PerToken => Some(Operand::wide(g, &self.g_shape(), role)),
        }
    }

    fn step_operands(&self) -> Vec<Operand> {
        use Role::{Input, Output};
        let (e, width) = (&self.extents, self.value_dim);
        let state = [e.batch, e.key_heads, e.dim, width];
        let mut list = vec![
            Operand::storage("q", &[e.batch, e.query_heads, e.dim], Input),
            Operand::storage("k", &[e.batch, e.key_heads, e.dim], Input),
            Operand::storage("v", &[e.batch, e.key_heads, width], Input),
        ];
        match self.decay {
            Decay::None => {}
            Decay::PerHead => list.push(Operand::wide("g_gamma", &[e.key_heads], Input)),
            Decay::PerToken => list.push(Operand::wide("g", &[e.batch, e.key_heads], Input)),
        }
        list.push(Operand::wide("initial_state", &state, Input));
        list.push(Operand::storage("o", &[e.batch, e.query_heads, width], Output));
        list.push(Operand::wide("final_state", &state, Output));
        list
    }
}
