//! Misreadings of the options of a problem by a kernel: absent, twice its value, its inverse, one end of a
//! window too far. The lists follow from the types of the options, and every option has one
//! ([`crate::Problem::settings`]).

use crate::{Align, Problem, Scores, Sequences, TokenSequences};
use std::f64::consts::{LN_2, LOG2_E};

/// A problem in which one option has another value.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// The option.
    pub option: &'static str,
    /// The change, in a word or two joined by hyphens: a part of a stable name.
    pub change: String,
    /// The same, as the end of a sentence that begins with the option.
    pub text: String,
    /// The problem.
    pub problem: Problem,
}

/// An option of a problem, set or not.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    /// The aspect of the problem that it decides.
    pub kind: SettingKind,
    /// Misreadings of it by a kernel; none where it is not set.
    pub others: Vec<Alternative>,
}

/// The aspect of a problem that an option decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// The values that are computed.
    Value,
    /// The presence of a tensor.
    Tensor,
    /// Extents, the tensors returned, and their form.
    Form,
}

/// Another value of an option.
pub(crate) struct Other<T> {
    pub change: String,
    pub text: String,
    pub value: T,
}

pub(crate) fn other<T>(change: impl Into<String>, text: impl Into<String>, value: T) -> Other<T> {
    Other { change: change.into(), text: text.into(), value }
}

/// Misreadings of a factor; none where it is 1, as if it were not set.
pub(crate) fn factors(x: f64) -> Vec<Other<f64>> {
    if x == 1.0 {
        return Vec::new();
    }
    let list = [
        ("absent", "is not applied", 1.0),
        ("twice", "is applied twice", x * x),
        ("inverted", "divides where it should multiply, or the other way round", 1.0 / x),
        ("negated", "has the other sign", -x),
        ("doubled", "is twice as large", 2.0 * x),
        ("halved", "is half as large", 0.5 * x),
        ("root", "is its own square root", x.abs().sqrt()),
    ];
    list.into_iter().map(|(change, text, value)| other(change, text, value)).collect()
}

/// Misreadings of the scale: an exponential may be one to base 2, and the scale may be the usual one, that of another
/// extent, or 0.
pub(crate) fn scales(scores: &Scores) -> Vec<Other<Option<f64>>> {
    let (scale, usual) = (scores.scale(), scores.usual_scale());
    let mut list = factors(scale);
    list.extend([
        other("base-2", "lacks log₂e: the exponential is to base 2", LN_2 * scale),
        other("in-base-2", "is multiplied by log₂e once too often", LOG2_E * scale),
    ]);
    let e = &scores.extents;
    let root = |extent: usize| 1.0 / (extent.max(1) as f64).sqrt();
    let others = [
        ("usual", "is not read: it is 1/√D", usual),
        ("of-keys", "is 1/√M, of the keys' number in place of D", root(e.keys)),
        ("of-queries", "is 1/√N, of the queries' number in place of D", root(e.queries)),
        ("without-root", "is 1/D: the root is missing", 1.0 / e.dim.max(1) as f64),
        ("zero", "is 0: q and k are not read, and all keys that a query sees weigh alike", 0.0),
    ];
    for (change, text, value) in others {
        if value != scale && list.iter().all(|other| other.value != value) {
            list.push(other(change, text, value));
        }
    }
    set(list)
}

/// Misreadings of a summand; none where it is 0, as if it were not set.
pub(crate) fn summands(x: f64) -> Vec<Other<f64>> {
    if x == 0.0 {
        return Vec::new();
    }
    let list = [
        ("absent", "is not applied", 0.0),
        ("doubled", "is applied twice", 2.0 * x),
        ("negated", "has the other sign", -x),
        ("inverted", "is taken for 1 minus what it is", 1.0 - x),
        ("halved", "is half as large", 0.5 * x),
    ];
    list.into_iter().map(|(change, text, value)| other(change, text, value)).collect()
}

/// Misreadings of a limit.
pub(crate) fn limits(x: Option<f64>) -> Vec<Other<Option<f64>>> {
    let Some(x) = x else { return Vec::new() };
    vec![
        other("absent", "is not applied", None),
        other("inverted", "is taken for its inverse", Some(1.0 / x)),
        other("doubled", "is twice as large", Some(2.0 * x)),
        other("halved", "is half as large", Some(0.5 * x)),
    ]
}

/// The same numbers as values of an option that may be absent.
fn set<T>(others: Vec<Other<T>>) -> Vec<Other<Option<T>>> {
    let set = |x: Other<T>| Other { change: x.change, text: x.text, value: Some(x.value) };
    others.into_iter().map(set).collect()
}

/// The other end.
pub(crate) fn turned(align: Align) -> Align {
    match align {
        Align::TopLeft => Align::BottomRight,
        Align::BottomRight => Align::TopLeft,
    }
}

/// An alignment in words.
pub(crate) fn aligned(align: Align) -> &'static str {
    match align {
        Align::TopLeft => "from the first query and key",
        Align::BottomRight => "from the last query and key",
    }
}

/// Misreadings of the lengths or offsets of sequences.
pub(crate) fn sequences(scores: &Scores) -> Vec<Other<Sequences>> {
    let e = &scores.extents;
    match &scores.sequences {
        Sequences::Dense => Vec::new(),
        Sequences::Lengths { query, key } => {
            let of = |query: &[usize], key: &[usize]| Sequences::Lengths {
                query: query.to_vec(),
                key: key.to_vec(),
            };
            let all = vec![e.keys; key.len()];
            let whole = vec![e.queries; query.len()];
            let mut list = vec![
                other("ignored", "are ignored: padding counts", Sequences::Dense),
                other("keys-ignored", "are ignored for keys: padding counts", of(query, &all)),
                other("queries-ignored", "are ignored for queries", of(&whole, key)),
                other("exchanged", "are exchanged: keys have those of queries", of(key, query)),
                other("of-queries", "are those of the queries for keys, too", of(query, query)),
                other("of-keys", "are those of the keys for queries, too", of(key, key)),
            ];
            for (change, text, by) in NEIGHBOURS {
                let text = format!("are those of the batch element {text}");
                list.push(other(change, text, of(&rolled(query, by), &rolled(key, by))));
            }
            let first = |list: &[usize]| vec![list.first().copied().unwrap_or(0); list.len()];
            let text = "are those of the first batch element for all";
            list.push(other("of-first", text, of(&first(query), &first(key))));
            for (change, text, by) in ENDS {
                let words = format!("{text} for keys");
                list.push(other(change, words, of(query, &moved(key, by))));
                let words = format!("{text} for queries and keys");
                let both = of(&moved(query, by), &moved(key, by));
                list.push(other(format!("all-{change}"), words, both));
            }
            list
        }
        Sequences::Packed { cu_query, cu_key } => {
            let of = |cu_query: &[usize], cu_key: &[usize]| Sequences::Packed {
                cu_query: cu_query.to_vec(),
                cu_key: cu_key.to_vec(),
            };
            let ends = |list: &[usize]| vec![0, list.last().copied().unwrap_or(0)];
            let text = "are ignored: all sequences are one";
            let mut list = vec![
                other("ignored", text, of(&ends(cu_query), &ends(cu_key))),
                other(
                    "of-queries",
                    "are those of the queries for keys, too",
                    of(cu_query, cu_query),
                ),
                other("of-keys", "are those of the keys for queries, too", of(cu_key, cu_key)),
                other("padding-counts", "are ignored, and padding counts", Sequences::Dense),
            ];
            for (change, text, by) in ENDS {
                let words = format!("{text} for keys");
                list.push(other(change, words, of(cu_query, &inner(cu_key, by))));
                let both = of(&inner(cu_query, by), &inner(cu_key, by));
                list.push(other(format!("all-{change}"), text, both));
            }
            list
        }
    }
}

/// Misreadings of the lengths or offsets of sequences of tokens.
pub(crate) fn token_sequences(sequences: &TokenSequences) -> Vec<Other<TokenSequences>> {
    let ignored = |text: &str| other("ignored", text, TokenSequences::Dense);
    match sequences {
        TokenSequences::Dense => Vec::new(),
        TokenSequences::Lengths { tokens } => {
            let mut list = vec![ignored("are ignored: padding counts")];
            for (change, text, by) in NEIGHBOURS {
                let text = format!("are those of the batch element {text}");
                let tokens = rolled(tokens, by);
                list.push(other(change, text, TokenSequences::Lengths { tokens }));
            }
            let tokens_of_first = vec![tokens.first().copied().unwrap_or(0); tokens.len()];
            let text = "are those of the first batch element for all";
            list.push(other("of-first", text, TokenSequences::Lengths { tokens: tokens_of_first }));
            for (change, text, by) in ENDS {
                let tokens = moved(tokens, by);
                list.push(other(change, text, TokenSequences::Lengths { tokens }));
            }
            list
        }
        TokenSequences::Packed { cu_tokens } => {
            let whole = vec![0, cu_tokens.last().copied().unwrap_or(0)];
            let whole = TokenSequences::Packed { cu_tokens: whole };
            let mut list = vec![
                other(
                    "ignored",
                    "are ignored: a state passes from one sequence to the next",
                    whole,
                ),
                other("padding-counts", "are ignored, and padding counts", TokenSequences::Dense),
            ];
            for (change, text, by) in ENDS {
                let cu_tokens = inner(cu_tokens, by);
                list.push(other(change, text, TokenSequences::Packed { cu_tokens }));
            }
            list
        }
    }
}

/// Neighbours on a circle.
const NEIGHBOURS: [(&str, &str, usize); 2] =
    [("of-next", "after it", 1), ("of-previous", "before it", 0)];

/// Ends that are off by one.
const ENDS: [(&str, &str, isize); 2] =
    [("one-more", "are one larger", 1), ("one-less", "are one smaller", -1)];

fn rolled(list: &[usize], next: usize) -> Vec<usize> {
    let n = list.len().max(1);
    let by = if next == 1 { 1 } else { n - 1 };
    (0..list.len()).map(|at| list[(at + by) % n]).collect()
}

fn moved(list: &[usize], by: isize) -> Vec<usize> {
    list.iter().map(|x| x.saturating_add_signed(by)).collect()
}

/// Offsets whose inner ones are off.
fn inner(list: &[usize], by: isize) -> Vec<usize> {
    let last = list.len().saturating_sub(1);
    let moved = |(at, &x): (usize, &usize)| {
        if at == 0 || at == last { x } else { x.saturating_add_signed(by) }
    };
    list.iter().enumerate().map(moved).collect()
}
