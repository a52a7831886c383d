//! Problems that have no meaning: every implementation must refuse them.

use crate::tensor::Tensors;
use crate::vectors::{Error as FileError, parse_problem};
use etalon_problem::Error;
use std::path::Path;

/// An invalid problem.
#[derive(Debug, Clone, Copy)]
pub struct Invalid {
    /// Its id.
    pub id: &'static str,
    /// The problem file.
    pub problem: &'static str,
    /// The key whose value is at fault.
    pub name: &'static str,
}

/// The table of invalid problems: of each the rest of its id, the key that is at fault, and what the file has beside
/// the extents.
macro_rules! invalid {
    ($($algorithm:literal, $extents:literal: { $($id:literal, $name:literal, $rest:literal;)* })*) => {
        /// The invalid problems.
        pub const INVALID: &[Invalid] = &[$($(Invalid {
            id: concat!($algorithm, ".invalid.", $id),
            problem: concat!("{\"algorithm\": \"", $algorithm, "\", ", $extents, $rest, "}\n"),
            name: $name,
        }),*),*];
    };
}

invalid! {
    "attention", "\"batch\": 2, \"queries\": 4, \"keys\": 6, ": {
        "heads_in_no_groups", "query_heads", "\"query_heads\": 3, \"key_heads\": 2, \"dim\": 8";
        "no_key_heads", "key_heads", "\"query_heads\": 2, \"key_heads\": 0, \"dim\": 8";
        "dim_of_0", "dim", "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 0";
        "value_dim_of_0", "value_dim", "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"value_dim\": 0";
        "softcap_of_0", "softcap", "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"softcap\": 0";
        "negative_softcap", "softcap", "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"softcap\": -30";
        "bias_of_3_batches", "bias.batch",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"bias\": {\"batch\": 3, \"heads\": 1}";
        "bias_of_key_heads", "bias.heads",
            "\"query_heads\": 4, \"key_heads\": 2, \"dim\": 8, \"bias\": {\"batch\": 1, \"heads\": 2}";
        "chunks_of_0", "mask.chunk",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"mask\": {\"chunked_causal\": {\"chunk\": 0}}";
        "length_beyond_queries", "sequences.query",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"sequences\": {\"lengths\": {\"query\": [4, 5], \
            \"key\": [6, 6]}}";
        "length_beyond_keys", "sequences.key",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"sequences\": {\"lengths\": {\"query\": [4, 4], \
            \"key\": [7, 6]}}";
        "too_few_lengths", "sequences.key",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"sequences\": {\"lengths\": {\"query\": [4, 4], \
            \"key\": [6]}}";
        "packed_in_a_batch", "batch",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 8, \"sequences\": {\"packed\": {\"cu_query\": [0, 4], \
            \"cu_key\": [0, 6]}}";
    }
    "attention", "\"batch\": 1, \"query_heads\": 2, \"key_heads\": 2, \"queries\": 4, \"keys\": 6, \"dim\": 8, ": {
        "offsets_that_fall", "sequences.cu_query",
            "\"sequences\": {\"packed\": {\"cu_query\": [0, 3, 2, 4], \"cu_key\": [0, 2, 4, 6]}}";
        "offsets_not_from_0", "sequences.cu_query",
            "\"sequences\": {\"packed\": {\"cu_query\": [1, 4], \"cu_key\": [0, 6]}}";
        "offsets_beyond_keys", "sequences.cu_key",
            "\"sequences\": {\"packed\": {\"cu_query\": [0, 4], \"cu_key\": [0, 7]}}";
        "offsets_of_other_sequences", "sequences.cu_key",
            "\"sequences\": {\"packed\": {\"cu_query\": [0, 4], \"cu_key\": [0, 3, 6]}}";
    }
    "attention_lse", "\"batch\": 1, \"queries\": 4, \"keys\": 6, \"dim\": 8, ": {
        "heads_in_no_groups", "query_heads", "\"query_heads\": 5, \"key_heads\": 2";
    }
    "lazy_attention", "\"batch\": 1, \"query_heads\": 2, \"key_heads\": 2, \"queries\": 4, \"keys\": 6, \"dim\": 8, ": {
        "bias_of_no_distance", "bias.width", "\"bias\": {\"width\": 0}";
        "sinks", "sinks", "\"sinks\": true";
    }
    "linear_attention", "\"batch\": 2, \"tokens\": 5, ": {
        "heads_in_no_groups", "query_heads", "\"query_heads\": 3, \"key_heads\": 2, \"dim\": 4";
        "dim_of_0", "dim", "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 0";
        "length_beyond_tokens", "sequences.tokens",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 4, \"sequences\": {\"lengths\": {\"tokens\": [5, 6]}}";
        "packed_in_a_batch", "batch",
            "\"query_heads\": 2, \"key_heads\": 2, \"dim\": 4, \"sequences\": {\"packed\": {\"cu_tokens\": [0, 5]}}";
    }
    "linear_attention", "\"batch\": 1, \"query_heads\": 2, \"key_heads\": 2, \"tokens\": 5, \"dim\": 4, ": {
        "offsets_that_fall", "sequences.cu_tokens", "\"sequences\": {\"packed\": {\"cu_tokens\": [0, 4, 3, 5]}}";
        "offsets_not_from_0", "sequences.cu_tokens", "\"sequences\": {\"packed\": {\"cu_tokens\": [1, 5]}}";
    }
    "linear_cross_entropy", "\"tokens\": 4, \"dim\": 8, ": {
        "no_classes", "vocab", "\"vocab\": 0";
        "smoothing_above_1", "label_smoothing", "\"vocab\": 9, \"label_smoothing\": 1.5";
        "negative_smoothing", "label_smoothing", "\"vocab\": 9, \"label_smoothing\": -0.1";
        "temperature_of_0", "temperature", "\"vocab\": 9, \"temperature\": 0";
        "softcap_of_0", "softcap", "\"vocab\": 9, \"softcap\": 0";
        "normaliser_of_0", "reduction.by.normaliser", "\"vocab\": 9, \"reduction\": {\"by\": {\"normaliser\": 0}}";
    }
}

/// The refusal of a problem by etalon: the key that is at fault, if one is, and the error without the file's name.
/// `None` of a problem that it takes.
pub fn refusal(problem: &str) -> Option<(Option<String>, String)> {
    let path = Path::new("problem.json");
    let error = parse_problem(path, problem, path, &Tensors::new()).err()?;
    let text = error.to_string();
    let text = text.strip_prefix("problem.json: ").unwrap_or(&text).to_string();
    let name = match error {
        FileError::Content { source: Error::Value { name, .. }, .. } => Some(name),
        _ => None,
    };
    Some((name, text))
}
