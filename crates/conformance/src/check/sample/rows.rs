//! Queries with all they see, and keys with all that see them.

use super::super::answer::Judged;
use super::{OFF, PARTS, Part, Piece, RIGHT, some, words};
use crate::conventions::Reading;
use etalon_problem::{
    Align, Axis, BiasExtents, Extents, Mask, NamedArray, Operand, Problem, Scores, Sequence,
};
use std::collections::{BTreeMap, BTreeSet};

/// Keys of a part.
const KEYS: usize = 16;

/// Some queries of a head: rows of q that lie in one sequence.
pub(in super::super) struct Queries {
    batch: usize,
    head: usize,
    rows: Vec<usize>,
}

/// Some keys of a key head: rows of k that lie in one sequence of the problem that was asked.
pub(in super::super) struct Keys {
    batch: usize,
    head: usize,
    rows: Vec<usize>,
    asked: Box<Scores>,
}

/// The parts in which outputs are off: those of queries first.
pub(super) fn parts(
    problem: &Problem,
    scores: &Scores,
    off: &[&Judged<'_>],
    products: f64,
) -> Vec<Part> {
    let e = &scores.extents;
    let sequences = scores.sequences();
    let width = (e.dim + problem.extent(Axis::ValueDim) + 30) as f64;
    let by_query = chosen(off, &sequences, Axis::QueryHeads, Axis::Queries);
    let by_key = chosen(off, &sequences, Axis::KeyHeads, Axis::Keys);
    let each = products / (by_query.len() + by_key.len()).max(1) as f64;
    let mut list = Vec::new();
    for ((batch, head), rows) in by_query {
        let most = (each / (e.keys as f64 * width)) as usize;
        let right: Vec<usize> = (rows.sequence.query_start..)
            .take(rows.sequence.queries)
            .filter(|row| rows.off.binary_search(row).is_err())
            .collect();
        let mut own = some(&rows.off, OFF.min(most).max(4));
        own.extend(some(&right, RIGHT.min(most)));
        own.sort_unstable();
        list.push(Part::Queries(Queries { batch, head, rows: own }));
    }
    for ((batch, head), rows) in by_key {
        // Under a causal mask the last ones are seen by the fewest queries.
        let last = rows.off.len().saturating_sub(KEYS);
        let rows = rows.off[last..].to_vec();
        list.push(Part::Keys(Keys { batch, head, rows, asked: Box::new(scores.clone()) }));
    }
    list
}

/// Rows of a head that are off, in a sequence.
struct Chosen {
    sequence: Sequence,
    off: Vec<usize>,
}

/// By batch element and head rows that are off, of as many heads as there may be parts: at equal distances.
fn chosen(
    off: &[&Judged<'_>],
    sequences: &[Sequence],
    heads: Axis,
    rows: Axis,
) -> BTreeMap<(usize, usize), Chosen> {
    let mut all = BTreeMap::<(usize, usize), BTreeSet<usize>>::new();
    for output in off {
        let axes = &output.operand.axes;
        if axes.len() < 3 || axes[..3] != [Axis::Batch, heads, rows] {
            continue;
        }
        let [_, h, n] = [0, 1, 2].map(|axis| output.operand.shape[axis]);
        for (at, off) in output.own_rows().into_iter().enumerate() {
            // A number for each query is a row of one element, of the same order.
            if off {
                all.entry((at / n / h, at / n % h)).or_default().insert(at % n);
            }
        }
    }
    let step = all.len().div_ceil(PARTS).max(1);
    let part = |((batch, head), off): ((usize, usize), BTreeSet<usize>)| {
        let mut off: Vec<usize> = off.into_iter().collect();
        let span = |s: &Sequence| match rows {
            Axis::Keys => (s.batch, s.key_start..s.key_start + s.keys),
            _ => (s.batch, s.query_start..s.query_start + s.queries),
        };
        let of = |row: usize| {
            let holds = |s: &&Sequence| span(s).0 == batch && span(s).1.contains(&row);
            sequences.iter().find(holds).copied()
        };
        let sequence = off.iter().find_map(|row| of(*row))?;
        off.retain(|row| span(&sequence).1.contains(row));
        Some(((batch, head), Chosen { sequence, off }))
    };
    all.into_iter().step_by(step).filter_map(part).collect()
}

impl Queries {
    /// Outputs that have a row for each query.
    pub fn picks(&self, operand: &Operand) -> Option<Vec<Vec<usize>>> {
        if operand.axes.get(..3)? != [Axis::Batch, Axis::QueryHeads, Axis::Queries] {
            return None;
        }
        let mut picks = vec![vec![self.batch], vec![self.head], self.rows.clone()];
        picks.extend(operand.shape[3..].iter().map(|&extent| (0..extent).collect::<Vec<_>>()));
        Some(picks)
    }

    pub fn describe(&self) -> String {
        format!(
            "queries {} of head {} of batch element {}",
            words(&self.rows),
            self.head,
            self.batch
        )
    }

    pub fn cost(&self, problem: &Problem) -> f64 {
        let width = problem.extent(Axis::Dim) + problem.extent(Axis::ValueDim) + 30;
        (self.rows.len() * problem.extent(Axis::Keys) * width) as f64
    }

    pub fn piece(&self, reading: &Reading) -> Option<Piece> {
        let scores = reading.problem.scores()?;
        let key_head = key_head(reading, scores, self.head);
        piece(reading, scores, self.batch, vec![self.head], key_head, self.rows.clone(), None)
    }
}

impl Keys {
    /// Outputs that have a row for each key.
    pub fn picks(&self, operand: &Operand) -> Option<Vec<Vec<usize>>> {
        if operand.axes.get(..3)? != [Axis::Batch, Axis::KeyHeads, Axis::Keys] {
            return None;
        }
        let mut picks = vec![vec![self.batch], vec![self.head], self.rows.clone()];
        picks.extend(operand.shape[3..].iter().map(|&extent| (0..extent).collect::<Vec<_>>()));
        Some(picks)
    }

    pub fn describe(&self) -> String {
        let (rows, head, batch) = (words(&self.rows), self.head, self.batch);
        format!("keys {rows} of key head {head} of batch element {batch}")
    }

    pub fn cost(&self, problem: &Problem) -> f64 {
        let e = &self.asked.extents;
        let width = problem.extent(Axis::Dim) + problem.extent(Axis::ValueDim) + 30;
        (self.asked.group() * self.viewers(&self.asked).len() * e.keys * width) as f64
    }

    /// The rows of q in which a query of a group sees one of the keys.
    fn viewers(&self, scores: &Scores) -> Vec<usize> {
        let mut rows = Vec::new();
        let group = scores.group();
        for s in scores.sequences().iter().filter(|s| s.batch == self.batch) {
            let keys: Vec<usize> = self
                .rows
                .iter()
                .filter(|row| (s.key_start..s.key_start + s.keys).contains(row))
                .map(|row| row - s.key_start)
                .collect();
            for i in 0..s.queries {
                let mut heads = self.head * group..(self.head + 1) * group;
                if heads.any(|head| keys.iter().any(|&j| scores.mask.allows(s, head, i, j))) {
                    rows.push(s.query_start + i);
                }
            }
        }
        rows
    }

    pub fn piece(&self, reading: &Reading) -> Option<Piece> {
        let scores = reading.problem.scores()?;
        let heads: Vec<usize> = (0..scores.extents.query_heads)
            .filter(|&head| key_head(reading, scores, head) == self.head)
            .collect();
        let mut rows = self.viewers(&self.asked);
        rows.extend(self.viewers(scores));
        rows.sort_unstable();
        rows.dedup();
        piece(reading, scores, self.batch, heads, self.head, rows, Some(&self.rows))
    }
}

/// The key head of a query head.
fn key_head(reading: &Reading, scores: &Scores, head: usize) -> usize {
    reading.key_head(head, scores.extents.key_heads, scores.group())
}

/// The problem of some rows of q in some heads that share a key head, with the keys of their sequence; of
/// outputs by key, those of `wanted`. Nothing where the rows lie in several sequences, or where a bias by
/// distance would move.
fn piece(
    reading: &Reading,
    scores: &Scores,
    batch: usize,
    heads: Vec<usize>,
    key_head: usize,
    rows: Vec<usize>,
    wanted: Option<&[usize]>,
) -> Option<Piece> {
    let first = *rows.first()?;
    let holds =
        |s: &Sequence, row: usize| (s.query_start..s.query_start + s.queries).contains(&row);
    let sequence = scores.sequences().into_iter().find(|s| s.batch == batch && holds(s, first))?;
    if !rows.iter().all(|&row| holds(&sequence, row)) {
        return None;
    }
    let own: Vec<usize> = rows.iter().map(|row| row - sequence.query_start).collect();
    let keys = keys_of(&reading.problem, scores, &sequence, &own, heads.first().copied()?)?;
    let mut problem = reading.problem.clone();
    let part = problem.scores_mut()?;
    part.extents = Extents {
        batch: 1,
        query_heads: heads.len(),
        key_heads: 1,
        queries: rows.len(),
        keys,
        dim: scores.extents.dim,
    };
    part.softmax_scale = Some(scores.scale());
    part.sequences = etalon_problem::Sequences::Dense;
    let by_head = scores.bias.map(|bias| if bias.heads == 1 { 1 } else { heads.len() });
    part.bias = by_head.map(|heads| BiasExtents { batch: 1, heads });
    if scores.mask != Mask::Full {
        let flags = heads.iter().flat_map(|&head| {
            let sequence = &sequence;
            own.iter().flat_map(move |&i| {
                (0..keys).map(move |j| scores.mask.allows(sequence, head, i, j))
            })
        });
        let shape = [1, heads.len(), rows.len(), keys];
        part.mask = Mask::Array(NamedArray::new("part", &shape, flags.collect::<Vec<bool>>()));
    }
    let wanted: Option<Vec<usize>> = match wanted {
        Some(wanted) => {
            let inside = |row: &usize| row.checked_sub(sequence.key_start).filter(|&j| j < keys);
            Some(wanted.iter().map(inside).collect::<Option<_>>()?)
        }
        None => None,
    };
    let start = sequence.key_start;
    let picks = move |axis: Axis, extent: usize| match axis {
        Axis::Batch => Some(vec![batch]),
        Axis::BatchOr1 => Some(vec![if extent == 1 { 0 } else { batch }]),
        Axis::QueryHeads => Some(heads.clone()),
        Axis::QueryHeadsOr1 => Some(if extent == 1 { vec![0] } else { heads.clone() }),
        Axis::KeyHeads => Some(vec![key_head]),
        Axis::Queries => Some(rows.clone()),
        Axis::Keys => Some((start..start + keys).collect()),
        _ => None,
    };
    let wanted = move |axis: Axis| wanted.clone().filter(|_| axis == Axis::Keys);
    Some(Piece { problem, picks: Box::new(picks), wanted: Box::new(wanted) })
}

/// Number of keys of a sequence in a part: all, or with a bias by distance as many as leave its distances where they
/// are; nothing where a query sees one of the others.
fn keys_of(
    problem: &Problem,
    scores: &Scores,
    sequence: &Sequence,
    rows: &[usize],
    head: usize,
) -> Option<usize> {
    let Problem::LazyAttention(lazy) = problem else { return Some(sequence.keys) };
    let Some(bias) = lazy.bias else { return Some(sequence.keys) };
    let (first, n) = (*rows.first()?, rows.len());
    if rows.iter().enumerate().any(|(at, &row)| row != first + at) {
        return None;
    }
    let keys = match bias.align {
        Align::TopLeft => Some(sequence.keys).filter(|_| first == 0)?,
        Align::BottomRight => (first + sequence.keys + n).checked_sub(sequence.queries)?,
    };
    let hidden = |j: usize| rows.iter().all(|&i| !scores.mask.allows(sequence, head, i, j));
    (keys <= sequence.keys && (keys..sequence.keys).all(hidden)).then_some(keys)
}
