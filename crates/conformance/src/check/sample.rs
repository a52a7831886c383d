//! Parts of a large problem: rows that are off with all they see, heads, tokens, a prefix of a recurrence. A
//! part is a problem of its own, of which the results are exact for the rows that it is about.

mod losses;
mod rows;
mod tokens;

use super::answer::{Answer, Judged};
use crate::conventions::{Reading, gather};
use crate::tensor::Values;
use etalon_problem::{Axis, Operand, Pass, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};

/// Rows of a part that are off, and rows that are right, at the most.
const OFF: usize = 24;
const RIGHT: usize = 8;

/// Parts of an output, at the most.
const PARTS: usize = 4;

/// A part of a problem.
pub(super) enum Part {
    /// Everything.
    Whole,
    /// Some queries of a head, with the keys of their sequence.
    Queries(rows::Queries),
    /// Some keys of a head, with every query that sees them.
    Keys(rows::Keys),
    /// The first tokens of a sequence, in the heads that share a state.
    Tokens(tokens::Prefix),
    /// Some tokens that have a loss.
    Losses(losses::Losses),
}

/// A problem of a part as it is evaluated.
pub(super) struct Piece {
    problem: Problem,
    /// The entries of an axis of a tensor that it holds; `None`: all.
    picks: Box<dyn Fn(Axis, usize) -> Option<Vec<usize>>>,
    /// Of an axis of an output, which of the entries of the piece are wanted; `None`: all.
    wanted: Box<dyn Fn(Axis) -> Option<Vec<usize>>>,
}

impl Part {
    /// The parts of a problem in which outputs are off, that can be evaluated by themselves; empty where no
    /// part is exact for any output that is off. `products` is what one evaluation may take.
    pub fn all(problem: &Problem, answer: &Answer<'_>, products: f64) -> Vec<Part> {
        let off: Vec<&Judged<'_>> = answer.outputs.iter().filter(|x| x.off() > 0).collect();
        match problem {
            Problem::LinearAttention(x) => tokens::parts(x, &off, products),
            Problem::LinearCrossEntropy(x) => losses::parts(x, &off, products),
            _ => problem.scores().map_or(Vec::new(), |x| rows::parts(problem, x, &off, products)),
        }
    }

    /// The answer about a part: the outputs for which it is exact.
    pub fn answer<'a>(&self, answer: &'a Answer<'a>) -> Answer<'a> {
        let judged = |output: &'a Judged<'a>| Some(output.select(&self.picks(&output.operand)?));
        Answer { outputs: answer.outputs.iter().filter_map(judged).collect() }
    }

    /// The entries of each axis of an output for which the part is exact.
    fn picks(&self, operand: &Operand) -> Option<Vec<Vec<usize>>> {
        match self {
            Part::Whole => None,
            Part::Queries(part) => part.picks(operand),
            Part::Keys(part) => part.picks(operand),
            Part::Tokens(part) => part.picks(operand),
            Part::Losses(part) => part.picks(operand),
        }
    }

    /// Name of the part, in words.
    pub fn describe(&self) -> String {
        match self {
            Part::Whole => "everything".to_string(),
            Part::Queries(part) => part.describe(),
            Part::Keys(part) => part.describe(),
            Part::Tokens(part) => part.describe(),
            Part::Losses(part) => part.describe(),
        }
    }

    /// The products of an evaluation, about.
    pub fn cost(&self, problem: &Problem) -> f64 {
        match self {
            Part::Whole => crate::cases::cost(problem),
            Part::Queries(part) => part.cost(problem),
            Part::Keys(part) => part.cost(problem),
            Part::Tokens(part) => part.cost(problem),
            Part::Losses(part) => part.cost(problem),
        }
    }

    /// Results of a reading in the part, output by output; nothing where the part says nothing of it.
    pub fn results(&self, reading: &Reading, pass: Pass, inputs: &Values) -> Option<Values> {
        let own = |reading: &Reading| {
            let piece = match self {
                Part::Whole => return reading.evaluated(pass, inputs).map_err(drop),
                Part::Queries(part) => part.piece(reading),
                Part::Keys(part) => part.piece(reading),
                Part::Tokens(part) => part.piece(reading),
                Part::Losses(part) => part.piece(reading, inputs),
            };
            piece.and_then(|piece| piece.results(reading, pass, inputs)).ok_or(())
        };
        reading.made(own).ok()
    }
}

impl Piece {
    fn results(&self, reading: &Reading, pass: Pass, inputs: &Values) -> Option<Values> {
        self.problem.check().ok()?;
        let operands = reading.problem.operands(pass);
        let all = |operand: &Operand| -> Vec<Vec<usize>> {
            let axes = operand.axes.iter().zip(&operand.shape);
            let picks = |(axis, extent): (&Axis, &usize)| {
                (self.picks)(*axis, *extent).unwrap_or_else(|| (0..*extent).collect())
            };
            axes.map(picks).collect()
        };
        let mut own = Values::new();
        for operand in operands.iter().filter(|operand| operand.role.is_given()) {
            let edits = reading.edits_of(operand.name);
            let x = gather(inputs.get(operand.name), &edits, Some(&all(operand)));
            own.extend(x.map(|x| (operand.name.to_string(), x)));
        }
        if let Some(saved) = &reading.saved {
            let rows = operands.iter().find(|operand| operand.name == "lse")?;
            saved.read(&self.problem, Some(&all(rows)), &mut own).ok()?;
        }
        let mut results = evaluate_in(Arithmetic::F64, &self.problem, pass, &own).ok()?;
        for operand in operands.iter().filter(|operand| operand.role == Role::Output) {
            let Some(x) = results.get_mut(operand.name) else { continue };
            for (at, axis) in operand.axes.iter().enumerate() {
                if let Some(wanted) = (self.wanted)(*axis) {
                    *x = x.select(ndarray::Axis(at), &wanted);
                }
            }
            // Maps that move entries have nothing to move here.
            let maps: Vec<_> = reading
                .finish_of(operand.name)
                .into_iter()
                .filter(|edit| matches!(edit, crate::conventions::Edit::Map(_)))
                .collect();
            if !maps.is_empty() {
                *x = gather(Some(x), &maps, None)?;
            }
        }
        Some(results)
    }
}

/// Entries of a list at equal distances, of which so many are wanted.
fn some(list: &[usize], most: usize) -> Vec<usize> {
    list.iter().step_by(list.len().div_ceil(most.max(1)).max(1)).copied().collect()
}

/// Numbers in words: a few, or the first, the last and how many.
fn words(list: &[usize]) -> String {
    match list {
        [] => "none".to_string(),
        [one] => one.to_string(),
        [first, .., last] if last - first + 1 == list.len() => format!("{first} to {last}"),
        [first, .., last] => format!("{} of {first} to {last}", list.len()),
    }
}
