//! Guesses at what a user meant.

use crate::outcome::Failure;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors::{self, Error};
use etalon_problem::{Axis, Error as ProblemError, Problem};
use serde_json::Value;
use std::path::Path;

/// Least similarity of two names, of which one is a slip of the other, between 0 and 1.
const ALIKE: f64 = 0.8;

/// Bytes of the longest text that may be a slip: a comparison with a name takes time by its length times the name's.
const LONGEST_SLIP: usize = 100;

/// The question whether one of the names was meant, if one is like what was found; else nothing.
pub fn did_you_mean<'a>(found: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    if found.len() > LONGEST_SLIP {
        return String::new();
    }
    let alike = |name: &str| strsim::jaro_winkler(&found.to_lowercase(), &name.to_lowercase());
    let rated = names.into_iter().map(|name| (alike(name), name));
    let nearest = rated.filter(|(alike, _)| *alike >= ALIKE).max_by(|x, y| x.0.total_cmp(&y.0));
    nearest.map_or(String::new(), |(_, name)| format!("; did you mean {name:?}?"))
}

/// Reads a problem and the arrays that it names; an error comes with advice.
pub fn read_problem(path: &Path, input: &Path, tensors: &Tensors) -> Result<Problem, Failure> {
    read_with_lists(path, input, tensors).map(|(problem, _)| problem)
}

/// The same with the names of the tensors that hold lengths or offsets of its sequences.
pub fn read_with_lists(
    path: &Path,
    input: &Path,
    tensors: &Tensors,
) -> Result<(Problem, Vec<String>), Failure> {
    // Read once: a second look at a pipe would find nothing, or wait without end.
    let text = vectors::read_text(path)?;
    let problem = vectors::parse_problem(path, &text, input, tensors);
    let problem = problem.map_err(|error| match &error {
        Error::Format { reason, .. } => Failure(format!("{error}{}", on_problem(&text, reason))),
        _ => on_tensors(&error, |_| Some(PAIRS.to_vec())),
    })?;
    Ok((problem, vectors::sequence_tensors(&text)))
}

/// Advice on a problem file: on a mask that is written as a bare string, or from the names that the
/// parser found and expected.
fn on_problem(text: &str, reason: &str) -> String {
    if let Some(advice) = serde_json::from_str(text).ok().as_ref().and_then(bare_mask) {
        return advice;
    }
    if reason.contains("`-1`") && reason.contains("window.") {
        return OPEN_END.to_string();
    }
    let Some((_, unknown)) = reason.split_once("unknown ") else { return String::new() };
    let Some(found) = unknown.split('`').nth(1) else { return String::new() };
    if let Some(write) = window(text, found) {
        return write;
    }
    if let Some((_, write)) = FOREIGN.iter().find(|(keys, _)| keys.contains(&found)) {
        return format!("; {write}");
    }
    let expected = unknown.split_once("expected ").map_or("", |(_, names)| names);
    did_you_mean(found, expected.split('`').skip(1).step_by(2))
}

/// The mask of a window that another library has as a key with two ends, or with a number of keys.
fn window(text: &str, key: &str) -> Option<String> {
    const KEYS: [&str; 4] = ["window_size", "window", "local_window_size", "sliding_window"];
    let problem: Value = serde_json::from_str(text).ok().filter(|_| KEYS.contains(&key))?;
    let end = |name: &str, x: &Value| x.as_u64().map(|x| format!("\"{name}\": {x}"));
    let ends = match problem.get(key)? {
        Value::Array(ends) => match ends.as_slice() {
            [left, right] => [end("left", left), end("right", right)],
            _ => return None,
        },
        // So many keys, the query's own among them.
        keys => [end("left", &(keys.as_u64()?.checked_sub(1)?.into())), end("right", &0.into())],
    };
    let ends: Vec<String> = ends.into_iter().flatten().collect();
    let ends = if ends.is_empty() { String::new() } else { format!(" {} ", ends.join(", ")) };
    Some(format!("; write \"mask\": {{ \"window\": {{{ends}}} }}, without an end that is -1"))
}

/// Advice on an end of a window that is −1.
const OPEN_END: &str =
    r#"; leave out an end that is open, as in "mask": { "window": { "left": 128 } }"#;

/// Keys of other libraries, and what to write in their place.
const FOREIGN: [(&[&str], &str); 20] = [
    (
        &["is_causal"],
        r#"write "mask": { "causal": { "align": "top_left" } } as PyTorch and JAX align it, or "mask": { "causal": {} } as flash-attention does"#,
    ),
    (&["causal"], r#"write "mask": { "causal": {} }"#),
    (
        &[
            "window_size",
            "window",
            "window_left",
            "window_right",
            "sliding_window",
            "local_window_size",
        ],
        r#"write "mask": { "window": { "left": 128, "right": 0 } }, without an end that is -1"#,
    ),
    (
        &["alibi_slopes", "alibi"],
        r#"write "bias": { "batch": 1, "heads": 8 }, with your heads, and a tensor bias of slope × (key − query − M + N)"#,
    ),
    (
        &["attn_mask", "attention_mask", "key_padding_mask", "block_mask"],
        r#"write "mask": { "array": "attn_mask" } for a bool tensor of the file, or "bias": { "batch": 1, "heads": 1 } for numbers that are added"#,
    ),
    (
        &["attn_bias", "score_mod"],
        r#"write "bias": { "batch": 1, "heads": 1 }, and name the tensor bias"#,
    ),
    (
        &["scale", "sm_scale", "scaling"],
        r#"write "softmax_scale": 0.125, of linear_cross_entropy "logit_scale""#,
    ),
    (
        &["dropout_p", "dropout", "p_dropout"],
        "leave it out: there is no dropout, so check the kernel without",
    ),
    (
        &["logits_soft_cap", "soft_cap", "logit_softcapping", "score_cap", "logit_cap"],
        r#"write "softcap": 30"#,
    ),
    (
        &["cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "seqlens", "max_seqlen_q"],
        r#"write "sequences": { "packed": { "cu_query": "cu_seqlens_q", "cu_key": "cu_seqlens_k" } }, lists of offsets or the names of tensors, and of tokens { "packed": { "cu_tokens": "cu_seqlens" } }"#,
    ),
    (
        &["num_heads", "nheads", "heads", "num_kv_heads", "num_key_value_heads", "enable_gqa"],
        r#"write "query_heads": 8, "key_heads": 2"#,
    ),
    (&["head_dim", "headdim", "d_model"], r#"write "dim": 64"#),
    (
        &["seq_len", "seqlen", "seqlen_q", "seqlen_k", "N_CTX"],
        r#"write "queries": 128, "keys": 128, of tokens "tokens": 128"#,
    ),
    (
        &["query_seq_lengths", "key_value_seq_lengths", "seqused_q", "seqused_k", "cache_seqlens"],
        r#"write "sequences": { "lengths": { "query": [128, 77], "key": [128, 77] } }, lists or the names of tensors"#,
    ),
    (
        &["dtype", "input_dtype"],
        "leave it out: tensors have the types of the file, and --dtype says in what the kernel computes",
    ),
    (
        &["layout", "input_layout", "tensor_layout", "qkv_format"],
        "leave it out: tensors are [batch, heads, rows, elements], so write x.transpose(1, 2).contiguous() of others",
    ),
    (
        &["return_lse", "return_softmax", "return_attn_probs", "need_weights"],
        "leave it out: --only and --allow-missing say which results there are",
    ),
    (
        &[
            "deterministic",
            "implementation",
            "backend",
            "is_varlen",
            "training",
            "page_table",
            "block_table",
        ],
        "leave it out: it changes no result",
    ),
    (
        &["s_aux", "sink", "attention_sink", "attention_sinks"],
        r#"write "sinks": true, and name the tensor sinks"#,
    ),
    (&["lse_scale", "z_loss"], r#"write "lse_square_scale": 1e-4"#),
];

/// Written forms of masks with parameters.
const MASKS: [(&str, &str); 6] = [
    ("causal", r#"{ "causal": {} }"#),
    ("window", r#"{ "window": { "left": 128, "right": 0 } }"#),
    ("chunked_causal", r#"{ "chunked_causal": { "chunk": 64 } }"#),
    ("segments", r#"{ "segments": { "query": "query_ids", "key": "key_ids" } }"#),
    ("array", r#"{ "array": "allowed" }"#),
    ("and", r#"{ "and": [{ "causal": {} }, …] }"#),
];

/// Advice on the first mask that is written as a bare string, in the mask and the masks within it.
fn bare_mask(problem: &Value) -> Option<String> {
    let mut masks = vec![problem.get("mask")?];
    while let Some(mask) = masks.pop() {
        match mask {
            Value::String(name) => {
                if let Some((_, form)) = MASKS.iter().find(|(mask, _)| name == mask) {
                    return Some(format!("; write {form}"));
                }
            }
            Value::Object(inner) => {
                masks.extend(inner.values().filter_map(Value::as_array).flatten())
            }
            _ => {}
        }
    }
    None
}

/// An error about tensors: a permuted shape comes with its axes, which `axes` knows by name.
pub fn on_tensors(error: &Error, axes: impl Fn(&str) -> Option<Vec<Axis>>) -> Failure {
    let advice = match error {
        Error::Content { source: ProblemError::Shape { operand, expected, found }, .. } => {
            axes(operand).and_then(|axes| permuted(expected, found, &axes))
        }
        _ => None,
    };
    let advice = advice.map_or(String::new(), |axes| format!(", which looks like {axes}"));
    Failure(format!("{error}{advice}"))
}

/// The axes of an array of pairs.
const PAIRS: [Axis; 4] = [Axis::BatchOr1, Axis::QueryHeadsOr1, Axis::Queries, Axis::Keys];

/// The axes of a shape that is a permutation of the expected one; of equal extents the first stands
/// first.
fn permuted(expected: &[usize], found: &[usize], axes: &[Axis]) -> Option<String> {
    if [expected.len(), axes.len()] != [found.len(); 2] {
        return None;
    }
    let mut left: Vec<usize> = (0..expected.len()).collect();
    let mut order = Vec::new();
    for extent in found {
        let place = left.iter().position(|&axis| expected[axis] == *extent)?;
        order.push(axes[left.remove(place)].symbol());
    }
    Some(format!("[{}]", order.join(", ")))
}
