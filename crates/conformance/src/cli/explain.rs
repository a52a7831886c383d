//! `etalon explain`: a case in words.

use super::{Failure, Outcome, say};
use etalon_conformance::cases::{Case, Spec};
use etalon_conformance::laws;
use etalon_problem::{Align, Mask, Scores, Sequences};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The case's name, as it stands in reports.
    case: Spec,
}

pub fn run(arguments: &Arguments) -> Outcome {
    say(&explain(&arguments.case.build())?);
    Ok(true)
}

fn explain(case: &Case) -> Result<String, Failure> {
    let mut text = format!("{}: {} in {}\n\n", case.name, case.problem.algorithm(), case.dtype);
    if let Some(scores) = case.problem.scores() {
        text += &pairs(scores);
    }
    text += &format!("elements: {}\n", case.spec.few_words());
    text += &match case.blocking() {
        Some(tiles) => format!("tiles: {} queries × {} keys\n", tiles.queries, tiles.keys),
        None => "tiles: as the tier likes them\n".to_string(),
    };
    text += "\nThe problem file:\n";
    text += &serde_json::to_string_pretty(&case.problem)?;
    text += "\n\nTensors:\n";
    for (name, tensor) in &case.inputs {
        text += &format!("  {name} {:?} {}\n", tensor.shape, tensor.type_name());
    }
    for &pass in case.problem.algorithm().passes() {
        let laws = laws::all().into_iter().filter(|law| law.concerns(case, pass));
        let names: Vec<&str> = laws.map(|law| law.name).collect();
        text += &format!("\nLaws of {pass}: {}", names.join(", "));
    }
    Ok(text)
}

/// Who sees whom, in words.
fn pairs(scores: &Scores) -> String {
    let e = &scores.extents;
    let mut text = format!(
        "{} batch element(s), {} query heads on {} key heads, {} queries, {} keys, {} elements in \
         each\n",
        e.batch, e.query_heads, e.key_heads, e.queries, e.keys, e.dim
    );
    let (seen, all) = (scores.visible_pairs(), e.batch * e.query_heads * e.queries * e.keys);
    text += &format!("a query sees {}: {seen} of {all} pairs\n", mask(&scores.mask));
    text += &format!("sequences: {}\n", sequences(scores));
    text += &format!("scores: {}\n", options(scores));
    text
}

fn mask(mask: &Mask) -> String {
    let from = |align: &Align| match align {
        Align::TopLeft => "counted from the first query and key",
        Align::BottomRight => "counted from the last query and key",
    };
    let list = |masks: &[Mask]| masks.iter().map(self::mask).collect::<Vec<_>>();
    match mask {
        Mask::Full => "every key".to_string(),
        Mask::Causal { align } => format!("the keys up to its own, {}", from(align)),
        Mask::Window { left, right, align } => {
            let end = |end: &Option<usize>| end.map_or("all".to_string(), |end| end.to_string());
            let (left, right) = (end(left), end(right));
            format!("its own key, {left} before it and {right} after it, {}", from(align))
        }
        Mask::ChunkedCausal { chunk, align } => {
            format!("the keys up to its own in its chunk of {chunk}, {}", from(align))
        }
        Mask::Segments { .. } => "the keys of its own segment".to_string(),
        Mask::Array(_) => "the keys that an array allows".to_string(),
        Mask::And(masks) => format!("what all of these allow: ({})", list(masks).join("; ")),
        Mask::Or(masks) => format!("what one of these allows: ({})", list(masks).join("; ")),
    }
}

fn sequences(scores: &Scores) -> String {
    match &scores.sequences {
        Sequences::Dense => "as long as the arrays".to_string(),
        Sequences::Lengths { query, key } => {
            format!("padded on the right, of {query:?} queries and {key:?} keys")
        }
        Sequences::Packed { cu_query, cu_key } => {
            format!("end to end, queries cut at {cu_query:?} and keys at {cu_key:?}")
        }
    }
}

fn options(scores: &Scores) -> String {
    let mut text = format!("q·k times {}", scores.scale());
    if let Some(cap) = scores.softcap {
        text += &format!(", softly capped at {cap}");
    }
    if let Some(bias) = scores.bias {
        let heads = if bias.heads == 1 { "all heads" } else { "each head" };
        text += &format!(", plus a bias for {heads}");
    }
    if scores.sinks {
        text += ", beside a sink for each head";
    }
    text
}
