//! The flat form of a problem, as it stands in a JSON file: options beside extents, defaults left
//! out, an unknown key refused.

use crate::{
    Attention, AttentionLse, BiasExtents, Decay, DistanceBias, Extents, LazyAttention,
    LinearAttention, LinearExtents, Mask, NamedArray, Scores, Sequences, TokenSequences,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// These two problems differ in `value_dim` alone; serde cannot both flatten a shared part and
/// refuse unknown keys, so the shared fields are written out by this macro.
macro_rules! flat {
    ($(#[$doc:meta])* $file:ident { $($extra:tt)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $file {
            /// B: batch elements.
            batch: usize,
            /// Hq: query heads, a multiple of key_heads.
            query_heads: usize,
            /// Hk: key and value heads.
            key_heads: usize,
            /// N: queries (packed sequences: of all sequences together).
            queries: usize,
            /// M: keys (packed sequences: of all sequences together).
            keys: usize,
            /// D: elements of a query and of a key.
            dim: usize,
            $($extra)*
            /// σ; absent: 1/√dim.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            softmax_scale: Option<f64>,
            /// c: scores become c·tanh(s/c).
            #[serde(default, skip_serializing_if = "Option::is_none")]
            softcap: Option<f64>,
            /// Whether there is a tensor `sinks` [query_heads].
            #[serde(default, skip_serializing_if = "std::ops::Not::not")]
            sinks: bool,
            /// The outer extents of the tensor `bias`, if there is one.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            bias: Option<BiasExtents>,
            /// Which pairs count; absent: all.
            #[serde(default, skip_serializing_if = "is_default")]
            mask: Mask,
            /// Which rows belong together; absent: dense.
            #[serde(default, skip_serializing_if = "is_default")]
            sequences: Sequences,
        }

        impl $file {
            fn split(self) -> Scores {
                Scores {
                    extents: Extents {
                        batch: self.batch,
                        query_heads: self.query_heads,
                        key_heads: self.key_heads,
                        queries: self.queries,
                        keys: self.keys,
                        dim: self.dim,
                    },
                    softmax_scale: self.softmax_scale,
                    softcap: self.softcap,
                    sinks: self.sinks,
                    bias: self.bias,
                    mask: self.mask,
                    sequences: self.sequences,
                }
            }
        }
    };
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

flat! {
    /// Softmax attention.
    AttentionFile {
        /// E: elements of a value; absent: dim.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value_dim: Option<usize>,
    }
}

flat! {
    /// The log-sum-exp of attention scores.
    AttentionLseFile {}
}

impl From<AttentionFile> for Attention {
    fn from(file: AttentionFile) -> Self {
        let value_dim = file.value_dim.unwrap_or(file.dim);
        Attention { scores: file.split(), value_dim }
    }
}

impl From<AttentionLseFile> for AttentionLse {
    fn from(file: AttentionLseFile) -> Self {
        AttentionLse { scores: file.split() }
    }
}

/// The flat file of a problem's scores, with the fields that only it has.
macro_rules! join {
    ($file:ident, $scores:expr, { $($extra:tt)* }) => {{
        let Scores { extents, softmax_scale, softcap, sinks, bias, mask, sequences } = $scores;
        let Extents { batch, query_heads, key_heads, queries, keys, dim } = extents;
        $file {
            batch, query_heads, key_heads, queries, keys, dim,
            $($extra)*
            softmax_scale, softcap, sinks, bias, mask, sequences,
        }
    }};
}

impl From<Attention> for AttentionFile {
    fn from(problem: Attention) -> Self {
        let value_dim = Some(problem.value_dim).filter(|&e| e != problem.scores.extents.dim);
        join!(AttentionFile, problem.scores, { value_dim, })
    }
}

impl From<AttentionLse> for AttentionLseFile {
    fn from(problem: AttentionLse) -> Self {
        join!(AttentionLseFile, problem.scores, {})
    }
}

/// Lazy attention.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LazyAttentionFile {
    /// B: batch elements.
    batch: usize,
    /// Hq: query heads, a multiple of key_heads.
    query_heads: usize,
    /// Hk: key and value heads.
    key_heads: usize,
    /// N: queries (packed sequences: of all sequences together).
    queries: usize,
    /// M: keys (packed sequences: of all sequences together).
    keys: usize,
    /// D: elements of a query and of a key.
    dim: usize,
    /// E: elements of a value; absent: dim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_dim: Option<usize>,
    /// σ; absent: 1/√dim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    softmax_scale: Option<f64>,
    /// The distances of the tensor `bias` [query_heads, width], if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bias: Option<DistanceBias>,
    /// Which pairs count; absent: causal, aligned at the bottom right.
    #[serde(default = "Mask::causal", skip_serializing_if = "is_causal")]
    mask: Mask,
    /// Which rows belong together; absent: dense.
    #[serde(default, skip_serializing_if = "is_default")]
    sequences: Sequences,
}

fn is_causal(mask: &Mask) -> bool {
    *mask == Mask::causal()
}

impl From<LazyAttentionFile> for LazyAttention {
    fn from(file: LazyAttentionFile) -> Self {
        let scores = Scores {
            extents: Extents {
                batch: file.batch,
                query_heads: file.query_heads,
                key_heads: file.key_heads,
                queries: file.queries,
                keys: file.keys,
                dim: file.dim,
            },
            softmax_scale: file.softmax_scale,
            softcap: None,
            sinks: false,
            bias: None,
            mask: file.mask,
            sequences: file.sequences,
        };
        let value_dim = file.value_dim.unwrap_or(file.dim);
        LazyAttention { scores, bias: file.bias, value_dim }
    }
}

impl From<LazyAttention> for LazyAttentionFile {
    fn from(problem: LazyAttention) -> Self {
        let Scores { extents, softmax_scale, mask, sequences, .. } = problem.scores;
        let Extents { batch, query_heads, key_heads, queries, keys, dim } = extents;
        LazyAttentionFile {
            batch,
            query_heads,
            key_heads,
            queries,
            keys,
            dim,
            value_dim: Some(problem.value_dim).filter(|&e| e != dim),
            softmax_scale,
            bias: problem.bias,
            mask,
            sequences,
        }
    }
}

/// Linear attention with decay.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LinearAttentionFile {
    /// B: batch elements.
    batch: usize,
    /// Hq: query heads, a multiple of key_heads.
    query_heads: usize,
    /// Hk: key and value heads.
    key_heads: usize,
    /// N: tokens (packed sequences: of all sequences together).
    tokens: usize,
    /// D: elements of a query and of a key.
    dim: usize,
    /// E: elements of a value; absent: dim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_dim: Option<usize>,
    /// σ; absent: 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    scale: f64,
    /// How states decay; absent: not at all.
    #[serde(default, skip_serializing_if = "is_default")]
    decay: Decay,
    /// Whether there is a tensor `initial_state` [sequences, key_heads, dim, value_dim].
    #[serde(default, skip_serializing_if = "is_default")]
    initial_state: bool,
    /// Whether `final_state` is returned.
    #[serde(default, skip_serializing_if = "is_default")]
    final_state: bool,
    /// Which tokens belong together; absent: dense.
    #[serde(default, skip_serializing_if = "is_default")]
    sequences: TokenSequences,
}

pub(crate) fn one() -> f64 {
    1.0
}

pub(crate) fn is_one(value: &f64) -> bool {
    *value == 1.0
}

impl From<LinearAttentionFile> for LinearAttention {
    fn from(file: LinearAttentionFile) -> Self {
        LinearAttention {
            extents: LinearExtents {
                batch: file.batch,
                query_heads: file.query_heads,
                key_heads: file.key_heads,
                tokens: file.tokens,
                dim: file.dim,
            },
            value_dim: file.value_dim.unwrap_or(file.dim),
            scale: file.scale,
            decay: file.decay,
            initial_state: file.initial_state,
            final_state: file.final_state,
            sequences: file.sequences,
        }
    }
}

impl From<LinearAttention> for LinearAttentionFile {
    fn from(problem: LinearAttention) -> Self {
        let LinearExtents { batch, query_heads, key_heads, tokens, dim } = problem.extents;
        LinearAttentionFile {
            batch,
            query_heads,
            key_heads,
            tokens,
            dim,
            value_dim: Some(problem.value_dim).filter(|&e| e != dim),
            scale: problem.scale,
            decay: problem.decay,
            initial_state: problem.initial_state,
            final_state: problem.final_state,
            sequences: problem.sequences,
        }
    }
}

/// A problem's schema is that of its file.
#[cfg(feature = "schema")]
macro_rules! schema_of_file {
    ($($problem:ident $file:ident;)*) => {
        $(impl schemars::JsonSchema for $problem {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $file::schema_name()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $file::json_schema(generator)
            }
        })*
    };
}
#[cfg(feature = "schema")]
schema_of_file! {
    Attention AttentionFile;
    AttentionLse AttentionLseFile;
    LazyAttention LazyAttentionFile;
    LinearAttention LinearAttentionFile;
}

impl<T> Serialize for NamedArray<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.name.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for NamedArray<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(NamedArray::unbound)
    }
}

#[cfg(feature = "schema")]
impl<T> schemars::JsonSchema for NamedArray<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TensorName".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "description": "The name of a tensor in the safetensors file beside the problem."
        })
    }
}
