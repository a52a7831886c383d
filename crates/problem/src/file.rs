//! The flat form of a problem, as it stands in a JSON file: options beside extents, defaults left
//! out, an unknown key refused.

use crate::{Mask, NamedArray};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A file, and both ways between it and its problem: each field of the file with its place in the problem.
/// (serde cannot both flatten a part and refuse unknown keys.)
macro_rules! flat {
    (
        $(#[$doc:meta])*
        $File:ident: $Problem:ident,
        $Extents:ident at $($place:ident).+ { $($(#[$extent_doc:meta])* $extent:ident,)* }
        [$($value_dim:ident)?]
        $($(#[$meta:meta])* $field:ident: $type:ty = $($at:ident).+,)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $File {
            $($(#[$extent_doc])* $extent: usize,)*
            $(
                /// E: elements of a value; absent: dim.
                #[serde(default, skip_serializing_if = "Option::is_none")]
                $value_dim: Option<usize>,
            )?
            $($(#[$meta])* $field: $type,)*
        }

        impl From<$File> for $Problem {
            fn from(file: $File) -> Self {
                let mut problem = $Problem::new($Extents { $($extent: file.$extent,)* });
                $(problem.$value_dim = file.$value_dim.unwrap_or(file.dim);)?
                $(problem.$($at).+ = file.$field;)*
                problem
            }
        }

        impl From<$Problem> for $File {
            fn from(problem: $Problem) -> Self {
                let extents = problem.$($place).+;
                $File {
                    $($extent: extents.$extent,)*
                    $($value_dim: Some(problem.$value_dim)
                        .filter(|&e| e != extents.dim),)?
                    $($field: problem.$($at).+,)*
                }
            }
        }

        /// A problem's schema is that of its file.
        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $Problem {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $File::schema_name()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $File::json_schema(generator)
            }
        }
    };
}

pub(crate) use flat;

/// The file of a problem about scores: `flat!` with their extents and options.
macro_rules! scores {
    (softmax $(#[$doc:meta])* $File:ident: $Problem:ident, [$($value_dim:ident)?]) => {
        crate::file::scores! {
            $(#[$doc])*
            $File: $Problem,
            [$($value_dim)?]
            /// c: scores become c·tanh(s/c).
            #[serde(default, skip_serializing_if = "Option::is_none")]
            softcap: Option<f64> = scores.softcap,
            /// True with a tensor `sinks` [query_heads].
            #[serde(default, skip_serializing_if = "std::ops::Not::not")]
            sinks: bool = scores.sinks,
            /// The outer extents of the tensor `bias`, if there is one.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            bias: Option<BiasExtents> = scores.bias,
            /// Visible pairs; absent: all.
            #[serde(default, skip_serializing_if = "crate::file::is_default")]
            mask: Mask = scores.mask,
        }
    };
    (
        $(#[$doc:meta])*
        $File:ident: $Problem:ident,
        [$($value_dim:ident)?]
        $($fields:tt)*
    ) => {
        crate::file::flat! {
            $(#[$doc])*
            $File: $Problem,
            Extents at scores.extents {
                /// B: batch elements.
                batch,
                /// Hq: query heads, a multiple of key_heads.
                query_heads,
                /// Hk: key and value heads.
                key_heads,
                /// N: queries (packed sequences: of all sequences together).
                queries,
                /// M: keys (packed sequences: of all sequences together).
                keys,
                /// D: elements of a query and of a key.
                dim,
            }
            [$($value_dim)?]
            /// σ; absent: 1/√dim.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            softmax_scale: Option<f64> = scores.softmax_scale,
            $($fields)*
            /// Division of the rows into sequences; absent: dense.
            #[serde(default, skip_serializing_if = "crate::file::is_default")]
            sequences: Sequences = scores.sequences,
        }
    };
}

pub(crate) use scores;

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

pub(crate) fn one() -> f64 {
    1.0
}

pub(crate) fn is_one(value: &f64) -> bool {
    *value == 1.0
}

pub(crate) fn is_causal(mask: &Mask) -> bool {
    *mask == Mask::causal()
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
