//! Rows that nobody computes: padding, keys that no query sees, queries that see no key, ignored tokens. There
//! the exact results are 0 (lse: −∞), and elements that are off were not written, or kernels read what they should
//! not.

use super::super::answer::Judged;
use etalon_problem::{Axis, Problem, Scores, Sequence};

/// The most pairs that are looked at to find what nobody sees.
const PAIRS: usize = 1 << 26;

/// A sentence for each kind of such rows that hold an element that is off.
pub(super) fn sentences(problem: &Problem, output: &Judged<'_>) -> Vec<String> {
    let (axes, shape) = (&output.operand.axes, &output.operand.shape);
    let mut steps = 0;
    let mut counts = [0; 3];
    let mut all = 0;
    let mut known = std::collections::BTreeMap::new();
    for (row, _) in output.own_rows().into_iter().enumerate().filter(|(_, off)| *off) {
        all += 1;
        let Some(place) = Place::new(axes, shape, row * output.width()) else { continue };
        let kind = known.entry(place).or_insert_with(|| kind(problem, &place, &mut steps));
        if let Some(kind) = *kind {
            counts[kind as usize] += 1;
        }
    }
    let names = [
        (
            "is padding",
            "are padding",
            ": they belong to no sequence, and the exact result is nothing",
        ),
        ("is a key that no query sees", "are keys that no query sees", ""),
        ("is of a query that sees no key", "are of queries that see no key", ""),
    ];
    let counted = counts.into_iter().zip(names).filter(|(count, _)| *count > 0);
    counted
        .map(|(count, (one, many, more))| match (count == all, count) {
            (true, 1) => format!("The row that is off {one}{more}."),
            (true, _) => format!("All rows that are off {many}{more}."),
            (false, 1) => format!("1 of the {all} rows that are off {one}{more}."),
            (false, n) => format!("{n} of the {all} rows that are off {many}{more}."),
        })
        .collect()
}

/// Kinds of rows without a result to compute.
#[derive(Clone, Copy)]
enum Kind {
    Padding,
    Unseen,
    Blind,
}

/// Place of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    batch: usize,
    /// A query head, or a key head.
    head: usize,
    row: usize,
    of_keys: bool,
}

impl Place {
    fn new(axes: &[Axis], shape: &[usize], element: usize) -> Option<Self> {
        let entry = |at: usize| element / shape[at + 1..].iter().product::<usize>() % shape[at];
        let find = |wanted: &[Axis]| axes.iter().position(|axis| wanted.contains(axis));
        let queries = find(&[Axis::Queries, Axis::Tokens]);
        let rows = queries.or_else(|| find(&[Axis::Keys]))?;
        Some(Place {
            batch: find(&[Axis::Batch]).map_or(0, entry),
            head: find(&[Axis::QueryHeads, Axis::KeyHeads]).map_or(0, entry),
            row: entry(rows),
            of_keys: queries.is_none(),
        })
    }
}

fn kind(problem: &Problem, place: &Place, steps: &mut usize) -> Option<Kind> {
    if let Problem::LinearAttention(x) = problem {
        let holds = |s: &etalon_problem::TokenSequence| {
            s.batch == place.batch && (s.start..s.start + s.tokens).contains(&place.row)
        };
        return (!x.list_sequences().iter().any(holds)).then_some(Kind::Padding);
    }
    let scores = problem.scores()?;
    let holds = |s: &Sequence| {
        let rows = match place.of_keys {
            true => s.key_start..s.key_start + s.keys,
            false => s.query_start..s.query_start + s.queries,
        };
        s.batch == place.batch && rows.contains(&place.row)
    };
    let Some(sequence) = scores.sequences().into_iter().find(holds) else {
        return Some(Kind::Padding);
    };
    is_blind(scores, place, &sequence, steps)
}

fn is_blind(
    scores: &Scores,
    place: &Place,
    sequence: &Sequence,
    steps: &mut usize,
) -> Option<Kind> {
    *steps += if place.of_keys { scores.group() * sequence.queries } else { sequence.keys };
    if *steps > PAIRS {
        return None;
    }
    let sees = |head: usize, i: usize, j: usize| scores.mask.allows(sequence, head, i, j);
    if place.of_keys {
        let j = place.row - sequence.key_start;
        let heads = place.head * scores.group()..(place.head + 1) * scores.group();
        let seen = heads.into_iter().any(|head| (0..sequence.queries).any(|i| sees(head, i, j)));
        return (!seen).then_some(Kind::Unseen);
    }
    let i = place.row - sequence.query_start;
    (!(0..sequence.keys).any(|j| sees(place.head, i, j))).then_some(Kind::Blind)
}
