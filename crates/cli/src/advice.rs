//! What a user may have meant.

use crate::outcome::Failure;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors::{self, Error};
use etalon_problem::{Axis, Error as ProblemError, Problem};
use serde_json::Value;
use std::path::Path;

/// How alike two names are at least, of which one is a slip of the other, between 0 and 1.
const ALIKE: f64 = 0.8;

/// The question whether one of the names was meant, if one is like what was found; else nothing.
pub fn did_you_mean<'a>(found: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let alike = |name: &str| strsim::jaro_winkler(&found.to_lowercase(), &name.to_lowercase());
    let rated = names.into_iter().map(|name| (alike(name), name));
    let nearest = rated.filter(|(alike, _)| *alike >= ALIKE).max_by(|x, y| x.0.total_cmp(&y.0));
    nearest.map_or(String::new(), |(_, name)| format!("; did you mean {name:?}?"))
}

/// Reads a problem and the arrays that its mask names; an error comes with advice.
pub fn read_problem(path: &Path, input: &Path, tensors: &Tensors) -> Result<Problem, Failure> {
    // Read once: a second look at a pipe would find nothing, or wait without end.
    let text = vectors::read_text(path)?;
    vectors::parse_problem(path, &text, input, tensors).map_err(|error| match &error {
        Error::Format { reason, .. } => Failure(format!("{error}{}", on_problem(&text, reason))),
        _ => on_tensors(&error, |_| Some(PAIRS.to_vec())),
    })
}

/// Advice on a problem file: on a mask that is written as a bare string, or from the names that the
/// parser found and expected.
fn on_problem(text: &str, reason: &str) -> String {
    if let Some(advice) = serde_json::from_str(text).ok().as_ref().and_then(bare_mask) {
        return advice;
    }
    let mut names = reason.split('`').skip(1).step_by(2);
    match names.next() {
        Some(found) if reason.contains("unknown ") => did_you_mean(found, names),
        _ => String::new(),
    }
}

/// How masks with parameters are written.
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
