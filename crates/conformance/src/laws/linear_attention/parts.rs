//! Parts of a problem: some heads, some tokens of a sequence.

use crate::cases::Case;
use crate::generate::Stream;
use crate::laws::flaw::{Judgement, refute};
use crate::laws::select::part_of;
use crate::laws::tensors::{Equality, difference};
use crate::laws::trial::Trial;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{
    Axis, Error, LinearAttention, Operand, Pass, Problem, TokenSequence, TokenSequences, find,
};
use std::ops::Range;

/// The axes of the tensors of a problem, by name.
pub(super) struct Axes(Vec<Operand>);

impl Axes {
    pub fn new(problem: &LinearAttention) -> Self {
        let passes = [Pass::Forward, Pass::Backward];
        Axes(passes.into_iter().flat_map(|pass| problem.operands(pass)).collect())
    }

    /// Where an axis of a tensor lies.
    pub fn position(&self, name: &str, axis: Axis) -> Option<usize> {
        find(&self.0, name).and_then(|operand| operand.position(axis))
    }

    /// Whether a tensor has an axis.
    pub fn has(&self, name: &str, axis: Axis) -> bool {
        self.position(name, axis).is_some()
    }

    /// Whether an index into a tensor lies in some tokens of some sequences; `tokens` says of a
    /// sequence which. Without an axis of tokens none does.
    pub fn holds(
        &self,
        name: &str,
        at: &[usize],
        sequences: &[TokenSequence],
        tokens: impl Fn(&TokenSequence) -> Range<usize>,
    ) -> bool {
        self.has(name, Axis::Tokens)
            && sequences.iter().any(|s| {
                let range = tokens(s);
                at[0] == s.batch && (s.start + range.start..s.start + range.end).contains(&at[2])
            })
    }
}

/// One key head of one sequence.
struct Part<'a> {
    sequence: &'a TokenSequence,
    key_head: usize,
    group: usize,
}

impl Part<'_> {
    fn tensor(&self, problem: &Problem, name: &str, tensor: &Tensor) -> Tensor {
        let &Part { sequence: s, key_head, group } = self;
        part_of(problem, name, tensor, |axis| match axis {
            Axis::Batch => Some(vec![s.batch]),
            Axis::QueryHeads => Some((key_head * group..(key_head + 1) * group).collect()),
            Axis::KeyHeads => Some(vec![key_head]),
            Axis::Tokens => Some((s.start..s.start + s.tokens).collect()),
            Axis::Sequences => Some(vec![s.index]),
            _ => None,
        })
    }

    fn problem(&self, whole: &LinearAttention) -> LinearAttention {
        let mut part = whole.clone().sequences(TokenSequences::Dense);
        part.extents.batch = 1;
        part.extents.tokens = self.sequence.tokens;
        (part.extents.query_heads, part.extents.key_heads) = (self.group, 1);
        part
    }
}

/// Parts that are tried of one case.
const PARTS: usize = 5;

pub(super) fn alone(trial: &Trial<'_>) -> Judgement {
    let (problem, whole) = (linear(trial.case)?, trial.clean()?);
    let sequences = problem.list_sequences();
    let heads = problem.extents.key_heads;
    let axes = Axes::new(problem);
    let stream = Stream::new(trial.case.spec.seed, "parts");
    for i in 0..PARTS.min(sequences.len() * heads) {
        let at = stream.below(i, sequences.len() * heads);
        let (sequence, key_head) = (&sequences[at / heads], at % heads);
        let part = Part { sequence, key_head, group: problem.group() };
        let of = |(name, x): (&String, &Tensor)| {
            (name.clone(), part.tensor(&trial.case.problem, name, x))
        };
        let inputs: Tensors = trial.case.inputs.iter().map(of).collect();
        let outputs = trial.ask(&part.problem(problem).into(), &inputs, Hints::default())?;
        // Sums over sequences or heads are not the part's alone.
        let own = |name: &str| axes.has(name, Axis::Tokens) || axes.has(name, Axis::Sequences);
        for (name, tensor) in outputs.iter().filter(|(name, _)| own(name)) {
            let place = part.tensor(&trial.case.problem, name, &whole[name]);
            let found = difference(name, &place, tensor, Equality::Bits, |_| true);
            let which = format!("sequence {}, key head {key_head}", sequence.index);
            refute(found.map(|found| format!("{which}: {found}")))?;
        }
    }
    Ok(None)
}

/// The problem of a case of linear_attention.
pub(super) fn linear(case: &Case) -> Result<&LinearAttention, Error> {
    match &case.problem {
        Problem::LinearAttention(problem) => Ok(problem),
        other => Err(Error::Unsupported {
            what: format!("states of {}", other.algorithm()),
            reason: "the algorithm has none".to_string(),
        }),
    }
}
