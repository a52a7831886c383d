//! Softmax attention.

use crate::{BiasExtents, Error, Extents, Mask, Operand, Pass, Role, Scores, Sequences};

/// o = softmax(S) v, with the log-sum-exp of every row: [`docs::attention`](crate::docs::attention).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(into = "crate::file::AttentionFile", from = "crate::file::AttentionFile")
)]
pub struct Attention {
    /// The scores and which of them count.
    pub scores: Scores,
    /// E: elements of a value, at least 1.
    pub value_dim: usize,
}

impl Attention {
    /// Attention without options, with values as wide as the keys.
    pub fn new(extents: Extents) -> Self {
        Attention { scores: Scores::new(extents), value_dim: extents.dim }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        if self.value_dim == 0 {
            return Err(Error::value("value_dim", "at least 1", self.value_dim));
        }
        self.scores.check()?;
        self.operands(Pass::Backward).iter().try_for_each(Operand::check_size)
    }

    /// The shape of v and of its gradient.
    pub fn v_shape(&self) -> [usize; 4] {
        let e = &self.scores.extents;
        [e.batch, e.key_heads, e.keys, self.value_dim]
    }

    /// The shape of o and of its cotangent.
    pub fn o_shape(&self) -> [usize; 4] {
        let e = &self.scores.extents;
        [e.batch, e.query_heads, e.queries, self.value_dim]
    }

    /// The tensors of a pass: inputs, cotangents and outputs, in this order; none where the
    /// algorithm does not have the pass.
    pub fn operands(&self, pass: Pass) -> Vec<Operand> {
        use Role::{Cotangent, OptionalCotangent, Output};
        let scores = &self.scores;
        let (q, k, v, o) = (scores.q_shape(), scores.k_shape(), self.v_shape(), self.o_shape());
        let rows = scores.row_shape();
        if pass == Pass::Step {
            return Vec::new();
        }
        let mut list = scores.operands();
        list.insert(2, Operand::storage("v", &v, Role::Input));
        match pass {
            Pass::Step => {}
            Pass::Forward => list
                .extend([Operand::storage("o", &o, Output), Operand::wide("lse", &rows, Output)]),
            Pass::Backward => {
                list.push(Operand::storage("dout", &o, Cotangent));
                list.push(Operand::wide("dlse", &rows, OptionalCotangent));
                list.extend([
                    Operand::storage("dq", &q, Output),
                    Operand::storage("dk", &k, Output),
                    Operand::storage("dv", &v, Output),
                ]);
                list.extend(scores.optional(["dsinks", "dbias"], Output));
            }
            Pass::DoubleBackward => {
                list.push(Operand::storage("dout", &o, Cotangent));
                list.push(Operand::wide("dlse", &rows, OptionalCotangent));
                list.extend([
                    Operand::storage("ddq", &q, OptionalCotangent),
                    Operand::storage("ddk", &k, OptionalCotangent),
                    Operand::storage("ddv", &v, OptionalCotangent),
                ]);
                list.extend(scores.optional(["ddsinks", "ddbias"], OptionalCotangent));
                list.push(Operand::storage("cot_o", &o, OptionalCotangent));
                list.push(Operand::wide("cot_lse", &rows, OptionalCotangent));
                list.extend([
                    Operand::storage("gq", &q, Output),
                    Operand::storage("gk", &k, Output),
                    Operand::storage("gv", &v, Output),
                    Operand::storage("gdout", &o, Output),
                    Operand::wide("gdlse", &rows, Output),
                ]);
                list.extend(scores.optional(["gsinks", "gbias"], Output));
            }
            Pass::Jvp => {
                list.extend([
                    Operand::storage("tq", &q, OptionalCotangent),
                    Operand::storage("tk", &k, OptionalCotangent),
                    Operand::storage("tv", &v, OptionalCotangent),
                ]);
                list.extend(scores.optional(["tsinks", "tbias"], OptionalCotangent));
                list.push(Operand::storage("to", &o, Output));
                list.push(Operand::wide("tlse", &rows, Output));
            }
        }
        list
    }
}

impl Scores {
    /// The companions of sinks and bias, where the problem has them.
    pub(crate) fn optional(&self, [sinks, bias]: [&'static str; 2], role: Role) -> Vec<Operand> {
        let mut list = Vec::new();
        if self.sinks {
            list.push(Operand::wide(sinks, &[self.extents.query_heads], role));
        }
        if let Some(shape) = self.bias_shape() {
            list.push(Operand::storage(bias, &shape, role));
        }
        list
    }
}

/// The options that attention and attention_lse share, as a chain of calls.
macro_rules! score_options {
    ($problem:ty) => {
        impl $problem {
            /// Sets σ; without it 1/√D.
            pub fn softmax_scale(mut self, scale: f64) -> Self {
                self.scores.softmax_scale = Some(scale);
                self
            }

            /// Caps the scores: c·tanh(s/c).
            pub fn softcap(mut self, cap: f64) -> Self {
                self.scores.softcap = Some(cap);
                self
            }

            /// Adds the operand `sinks`, a logit per head without a value.
            pub fn sinks(mut self) -> Self {
                self.scores.sinks = true;
                self
            }

            /// Adds the operand `bias` with these outer extents (each 1, or the problem's own).
            pub fn bias(mut self, batch: usize, heads: usize) -> Self {
                self.scores.bias = Some(BiasExtents { batch, heads });
                self
            }

            /// Sets which pairs count.
            pub fn mask(mut self, mask: Mask) -> Self {
                self.scores.mask = mask;
                self
            }

            /// Sets which rows belong together.
            pub fn sequences(mut self, sequences: Sequences) -> Self {
                self.scores.sequences = sequences;
                self
            }
        }
    };
}
pub(crate) use score_options;

score_options!(Attention);

impl Attention {
    /// Sets E, the elements of a value.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }
}
