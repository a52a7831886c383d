//! Parts of a problem: some heads, some tokens of a sequence.

use crate::cases::Case;
use crate::generate::Stream;
use crate::laws::flaw::{Judgement, refute};
use crate::laws::tensors::{Equality, difference, take};
use crate::laws::trial::Trial;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Error, LinearAttention, Problem, TokenSequence, TokenSequences};
use std::ops::Range;

/// How the axes of a tensor run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// `[B, Hq, N, …]`
    Query,
    /// `[B, Hk, N, …]`
    Key,
    /// `[Hk]`
    Head,
    /// `[S, Hk, D, E]`
    State,
    /// `[]`
    Number,
}

pub(super) fn layout(name: &str) -> Layout {
    match name {
        _ if name.ends_with("scale") => Layout::Number,
        _ if name.ends_with("state") => Layout::State,
        _ if name.ends_with("g_gamma") => Layout::Head,
        _ if name.ends_with(['k', 'v', 'g']) => Layout::Key,
        _ => Layout::Query,
    }
}

/// Whether an index into a tensor lies in some tokens of some sequences; `tokens` says of a
/// sequence which. Without an axis of tokens none does.
pub(super) fn holds(
    name: &str,
    at: &[usize],
    sequences: &[TokenSequence],
    tokens: impl Fn(&TokenSequence) -> Range<usize>,
) -> bool {
    let by_token = matches!(layout(name), Layout::Query | Layout::Key);
    by_token
        && sequences.iter().any(|s| {
            let range = tokens(s);
            at[0] == s.batch && (s.start + range.start..s.start + range.end).contains(&at[2])
        })
}

/// One key head of one sequence.
struct Part<'a> {
    sequence: &'a TokenSequence,
    key_head: usize,
    group: usize,
}

impl Part<'_> {
    fn tensor(&self, name: &str, tensor: &Tensor) -> Tensor {
        let &Part { sequence: s, key_head, group } = self;
        let tokens: Vec<usize> = (s.start..s.start + s.tokens).collect();
        let queries: Vec<usize> = (key_head * group..(key_head + 1) * group).collect();
        let rows =
            |heads: &[usize]| take(&take(&take(tensor, 0, &[s.batch]), 1, heads), 2, &tokens);
        match layout(name) {
            Layout::Query => rows(&queries),
            Layout::Key => rows(&[key_head]),
            Layout::Head => take(tensor, 0, &[key_head]),
            Layout::State => take(&take(tensor, 0, &[s.index]), 1, &[key_head]),
            Layout::Number => tensor.clone(),
        }
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
    let stream = Stream::new(trial.case.spec.seed, "parts");
    for i in 0..PARTS.min(sequences.len() * heads) {
        let at = stream.below(i, sequences.len() * heads);
        let (sequence, key_head) = (&sequences[at / heads], at % heads);
        let part = Part { sequence, key_head, group: problem.group() };
        let of = |(name, x): (&String, &Tensor)| (name.clone(), part.tensor(name, x));
        let inputs: Tensors = trial.case.inputs.iter().map(of).collect();
        let outputs = trial.ask(&part.problem(problem).into(), &inputs, Hints::default())?;
        // Sums over sequences or heads are not the part's alone.
        let own = |name: &str| !matches!(layout(name), Layout::Head | Layout::Number);
        for (name, tensor) in outputs.iter().filter(|(name, _)| own(name)) {
            let place = part.tensor(name, &whole[name]);
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
