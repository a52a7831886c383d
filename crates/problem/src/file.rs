//! The flat form of a problem, as it stands in a JSON file: options beside extents, defaults left
//! out, an unknown key refused.

use crate::{Attention, AttentionLse, BiasExtents, Extents, Mask, NamedArray, Scores, Sequences};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The two problems differ in `value_dim` alone; serde cannot both flatten a shared part and
/// refuse unknown keys, so the shared fields are written out by this macro.
macro_rules! flat {
    ($(#[$doc:meta])* $file:ident for $problem:ident { $($extra:tt)* }) => {
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

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $problem {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $file::schema_name()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $file::json_schema(generator)
            }
        }
    };
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

flat! {
    /// Softmax attention.
    AttentionFile for Attention {
        /// E: elements of a value; absent: dim.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value_dim: Option<usize>,
    }
}

flat! {
    /// The log-sum-exp of attention scores.
    AttentionLseFile for AttentionLse {}
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
