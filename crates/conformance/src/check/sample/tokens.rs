//! The first tokens of a sequence of linear attention, in the heads that share a state.

use super::super::answer::Judged;
use super::{PARTS, Part, Piece, words};
use crate::conventions::Reading;
use etalon_problem::{Axis, LinearAttention, LinearExtents, Operand, Problem, TokenSequences};

/// A prefix is at least this long.
const FEWEST: usize = 64;

/// The first tokens of a sequence.
pub(in super::super) struct Prefix {
    /// The number of the sequence.
    index: usize,
    batch: usize,
    key_head: usize,
    group: usize,
    start: usize,
    tokens: usize,
    /// True if it is all of the sequence.
    whole: bool,
}

/// The parts in which outputs are off.
pub(super) fn parts(problem: &LinearAttention, off: &[&Judged<'_>], products: f64) -> Vec<Part> {
    let e = &problem.extents;
    let sequences = problem.list_sequences();
    let mut heads: Vec<(usize, usize)> = Vec::new();
    for output in off {
        let shape = &output.operand.shape;
        let by = output.operand.axes.get(..2).map(|axes| (axes[0], axes[1]));
        let group = match by {
            Some((Axis::Batch | Axis::Sequences, Axis::QueryHeads)) => problem.group(),
            Some((Axis::Batch | Axis::Sequences, Axis::KeyHeads)) => 1,
            _ => continue,
        };
        let inner = (output.got.len() / (shape[0] * shape[1]).max(1)).max(1);
        for (at, margins) in output.margins.chunks(inner).enumerate() {
            let head = (at / shape[1], at % shape[1] / group.max(1));
            if margins.iter().any(|margin| *margin > 1.0) && !heads.contains(&head) {
                heads.push(head);
            }
        }
    }
    heads.sort_unstable();
    let step = heads.len().div_ceil(PARTS).max(1);
    let heads: Vec<_> = heads.into_iter().step_by(step).collect();
    let each = products / heads.len().max(1) as f64;
    let token = (problem.group() + 2) as f64 * (e.dim * problem.value_dim) as f64;
    let most = ((each / token) as usize).max(FEWEST);
    let part = |(outer, key_head): (usize, usize)| {
        let packed = matches!(problem.sequences, TokenSequences::Packed { .. });
        let holds = |s: &&etalon_problem::TokenSequence| {
            (if packed { s.index == outer || s.batch == outer } else { s.batch == outer })
                && s.tokens > 0
        };
        let s = sequences.iter().find(holds)?;
        let tokens = s.tokens.min(most);
        let (index, batch, start, whole) = (s.index, s.batch, s.start, tokens == s.tokens);
        let group = problem.group();
        Some(Part::Tokens(Prefix { index, batch, key_head, group, start, tokens, whole }))
    };
    heads.into_iter().filter_map(part).collect()
}

impl Prefix {
    /// Outputs of the tokens before which everything is known: o and dq, and of a whole sequence all that
    /// have its tokens or its states.
    pub fn picks(&self, operand: &Operand) -> Option<Vec<Vec<usize>>> {
        let forward = ["o", "dq"].contains(&operand.name);
        let own = operand.has(Axis::Tokens) || operand.has(Axis::Sequences);
        if !own || !(forward || self.whole) {
            return None;
        }
        let axes = operand.axes.iter().zip(&operand.shape);
        Some(
            axes.map(|(axis, extent)| {
                self.entries(*axis).unwrap_or_else(|| (0..*extent).collect())
            })
            .collect(),
        )
    }

    fn entries(&self, axis: Axis) -> Option<Vec<usize>> {
        Some(match axis {
            Axis::Batch => vec![self.batch],
            Axis::Sequences => vec![self.index],
            Axis::QueryHeads => {
                (self.key_head * self.group..(self.key_head + 1) * self.group).collect()
            }
            Axis::KeyHeads => vec![self.key_head],
            Axis::Tokens => (self.start..self.start + self.tokens).collect(),
            _ => return None,
        })
    }

    pub fn describe(&self) -> String {
        let tokens: Vec<usize> = (self.start..self.start + self.tokens).collect();
        format!(
            "tokens {} of key head {} of batch element {}",
            words(&tokens),
            self.key_head,
            self.batch
        )
    }

    pub fn cost(&self, problem: &Problem) -> f64 {
        let states = problem.extent(Axis::Dim) * problem.extent(Axis::ValueDim);
        ((self.group + 2) * self.tokens * states) as f64
    }

    pub fn piece(&self, reading: &Reading) -> Option<Piece> {
        let Problem::LinearAttention(own) = &reading.problem else { return None };
        let sequence = own.list_sequences().into_iter().find(|s| s.index == self.index)?;
        // A reading may cut sequences elsewhere.
        let same = sequence.batch == self.batch && sequence.start == self.start;
        let long =
            sequence.tokens >= self.tokens && !(self.whole && sequence.tokens != self.tokens);
        if reading.is_interleaved || !same || !long {
            return None;
        }
        let extents = LinearExtents {
            batch: 1,
            query_heads: self.group,
            key_heads: 1,
            tokens: self.tokens,
            dim: own.extents.dim,
        };
        let part = Prefix { ..*self };
        let problem = LinearAttention { extents, sequences: TokenSequences::Dense, ..own.clone() };
        let picks = move |axis: Axis, _: usize| part.entries(axis);
        Some(Piece { problem: problem.into(), picks: Box::new(picks), wanted: Box::new(|_| None) })
    }
}
